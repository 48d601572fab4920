"""The scripts of examples/libraries end where the same scripts end without Fleet."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path

import pytest
import test_processes
import torch
from test_processes import ROOT, Processes, ended

processes = test_processes.processes  # the fixture

EXAMPLES = ROOT / "examples" / "libraries"
PAGE = (EXAMPLES / "README.md").read_text()
RESULT = str(ROOT / "tests" / "scripts" / "library_result.py")
PATIENCE_S = 250.0

#: By the script's name: the package, and whether rows are lazy in it, so that torch's own sparse optimizers are what it
#: is compared with.
SCRIPTS = {
    "rechub": ("torch_rechub", False),
    "deepctr": ("deepctr_torch", False),
    "fuxictr": ("fuxictr", False),
    "widedeep": ("pytorch_widedeep", True),
    "recbole": ("recbole", False),
    "lightning": ("lightning", True),
    "accelerate": ("accelerate", False),
    "transformers": ("transformers", False),
}


def lines(name: str) -> list[str]:
    return [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.strip()]


def differing(script: str) -> int:
    """How many lines of the script with Fleet are not in the one without, or stand for one that is gone."""
    added = removed = 0
    for line in difflib.ndiff(lines(f"plain_{script}"), lines(f"fleet_{script}")):
        added += line.startswith("+ ")
        removed += line.startswith("- ")
    return max(added, removed)


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_most_three_lines_differ_and_the_page_says_how_many(script: str) -> None:
    assert 0 < differing(script) <= 3
    assert re.search(rf"\[fleet_{script}\.py\]\(fleet_{script}\.py\)[^|]*\|[^|]*\| {differing(script)} \|", PAGE)


def test_every_script_is_compared() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "clicks",
        *(f"{kind}_{script}" for kind in ("plain", "fleet") for script in SCRIPTS),
    }


def result(processes: Processes, folder: Path, out: str, *command: str) -> dict[str, torch.Tensor]:
    """What the command has written to ``out``."""
    folder.mkdir()
    status, _, err = ended(processes.start(*command, cwd=folder), PATIENCE_S)
    assert status == 0, err
    return torch.load(out)  # type: ignore[no-any-return]


@pytest.mark.libraries
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_ends_where_it_ends_without(script: str, processes: Processes, tmp_path: Path) -> None:
    package, lazy = SCRIPTS[script]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    plain, ours = (str(EXAMPLES / f"{kind}_{script}.py") for kind in ("plain", "fleet"))
    out = [str(tmp_path / f"{index}.pt") for index in range(3)]
    expected = result(processes, tmp_path / "plain", out[0], RESULT, *(["--sparse"] if lazy else []), out[0], plain)
    alone = result(processes, tmp_path / "alone", out[1], RESULT, out[1], ours)
    launch = ("-m", "fleet.launch", "--server_num", "2", "--worker_num", "2")
    two = result(processes, tmp_path / "two", out[2], *launch, RESULT, out[2], ours)
    for got in (alone, two):
        assert list(got) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0)
