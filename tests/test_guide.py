"""The guide as a new user follows it: its files and its commands, in its order, in one empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_processes
from test_processes import ROOT, Processes, ended

processes = test_processes.processes  # the fixture

GUIDE = (ROOT / "docs" / "guide.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", GUIDE, re.DOTALL))
COMMANDS = re.findall(r"^```sh\n(.*?)\n```", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stranger_follows_the_guide(processes: Processes, tmp_path: Path) -> None:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    said = {}
    plain, alone, together, listing, relaxed, scores, durable = COMMANDS
    assert set(together.split()) < set(durable.split()), "one job shows both"
    # At the same time what does not need each other.
    for commands in ((plain, alone), (durable,), (listing,), (relaxed, scores)):
        replace = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])"
        shells = [processes.python("-c", replace, command, cwd=tmp_path, PATH=processes.path()) for command in commands]
        for command, shell in zip(commands, shells, strict=True):
            code, out, err = ended(shell, 200)
            assert code == 0, f"{command}: {err}"
            said[command] = out

    def steps_of(command: str) -> list[tuple[int, int, float]]:
        found = re.findall(r"steps (\d+) to (\d+), loss ([\d.]+)", said[command])
        return [(int(first), int(last), float(loss)) for first, last, loss in found]

    ((first, last, loss),) = steps_of(alone)
    assert (first, last) == (0, 200)
    assert said[plain] == f"loss {loss:.3f}\n"
    assert loss < 0.3
    for first, last, loss in steps_of(durable):
        assert (first, last) == (200, 400), said[durable]
        assert loss < 0.2
    assert "step-00000400" in said[listing]
    assert [first for first, *_ in steps_of(relaxed)] == [400, 400]
    assert len(re.findall(r"^[01]\.\d{3}$", said[scores], re.MULTILINE)) == 5
