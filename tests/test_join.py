"""``fleet.join``: a script makes one call, and its process begins, serves or leaves by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_processes
import torch
from harness import run_job
from test_processes import Processes, ended

from fleet import Fleet
from fleet.errors import StateError

processes = test_processes.processes  # the fixture

SCRIPT = """
import logging, sys, torch, fleet
logging.basicConfig()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 1))
optimizer = fleet.join(torch.optim.SGD(model.parameters(), lr=0.1), model=model, remote="all")
for _ in range(3):
    optimizer.minimize(model(torch.tensor([1, 3])).sum())
print("trained", fleet.resume_step(), sorted(fleet.summary()["tables"]), flush=True)
if fleet.worker_index() == 0 and "raise" in sys.argv:
    raise ValueError("it went wrong")
"""

JOB = ("-m", "fleet.launch", "--server_num", "1", "--worker_num", "2")


@pytest.mark.parametrize(("launcher", "workers"), [((), 1), (JOB, 2)], ids=["alone", "a job"])
def test_a_script_leaves_when_it_ends(
    launcher: tuple[str, ...], workers: int, processes: Processes, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status, out, err = ended(processes.start(*launcher, str(script), cwd=tmp_path), 120.0)
    assert status == 0, err
    assert out.count("trained 3 ['0.weight']") == workers, "a server's script ends where it has served"
    assert "stop_worker" not in err


def test_an_error_is_the_jobs_and_no_goodbye(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status, _, err = ended(processes.start(*JOB, str(script), "raise", cwd=tmp_path), 120.0)
    assert status == 1
    assert "ValueError: it went wrong" in err


def test_it_takes_part_once() -> None:
    def body(fleet_: Fleet, _: int) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = fleet_.join(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        optimizer.minimize(model(torch.ones(1, 2)).sum())
        with pytest.raises(StateError, match="called twice"):
            fleet_.join(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        return fleet_.resume_step()

    assert run_job(body, 2, 1) == [1, 1]
