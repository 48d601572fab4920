"""Collective jobs by the launchers, with the examples: fleetrun, torchrun, and a restart by torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_processes
from test_processes import ROOT, Processes, ended

processes = test_processes.processes  # the fixture

FLEETRUN = ("-m", "fleet.launch")
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--nproc-per-node",
    "2",
)


def launch(processes: Processes, cwd: Path, *command: str) -> str:
    """What a whole launch printed; it must end well."""
    code, out, err = ended(processes.start(*command, cwd=cwd))
    assert code == 0, err
    return out


def test_fleetrun_makes_one_job_of_its_workers(processes: Processes, tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "scripts" / "collective_failures.py")
    out = launch(processes, tmp_path, *FLEETRUN, "--worker_num", "2", script, "none", "0")
    assert sorted(out.splitlines()) == ["[worker 0] trained as 0 of 2", "[worker 1] trained as 1 of 2"]


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        pytest.param((*FLEETRUN, "--worker_num", "2"), (), marks=pytest.mark.slow),
        pytest.param(TORCHRUN, ("--local_sgd", "4"), marks=pytest.mark.slow),
        pytest.param(TORCHRUN, (), marks=pytest.mark.slow),
    ],
    ids=["fleetrun", "torchrun, local SGD", "torchrun"],
)
def test_digits_are_learned(
    processes: Processes, tmp_path: Path, launcher: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    out = launch(processes, tmp_path, *launcher, str(ROOT / "examples" / "collective.py"), *arguments)
    found = re.findall(r"worker (\d) of 2: accuracy ([\d.]+)", out)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert len({accuracy for _, accuracy in found}) == 1, "the same model"
    assert float(found[0][1]) > 0.95


@pytest.mark.slow
def test_a_restarted_job_goes_on_from_its_last_checkpoint(processes: Processes, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "elastic.py")

    def ends(*arguments: str) -> set[tuple[str, str]]:
        out = launch(processes, tmp_path, *TORCHRUN, "--max-restarts", "2", script, *arguments)
        # Two processes write to one pipe, and the end of a line may come after the other's begins.
        found = re.findall(r"worker \d of 2 began at step (\d+); parameters add up to (-?[\d.]+)", out)
        assert len(found) == 2
        return set(found)

    ((begun, total),) = ends("--checkpoints", "whole")
    assert begun == "0"
    assert ends("--checkpoints", "broken", "--fail_at", "35") == {("30", total)}
