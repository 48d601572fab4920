"""``fleet.join``: a script makes one call, and its process begins, serves or leaves by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_processes
import torch
from harness import run_job
from test_processes import Processes, as_server, as_worker, ended

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

TRAINED = "trained 3 ['0.weight']\n"


@pytest.fixture
def script(tmp_path: Path) -> str:
    written = tmp_path / "train.py"
    written.write_text(SCRIPT)
    return str(written)


def ends(processes: Processes, endpoints: list[str], script: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Of a server and two workers."""
    members = [as_server(endpoints[0], endpoints, 2), *(as_worker(index, endpoints, 2) for index in range(2))]
    return [ended(each) for each in [processes.start(script, *arguments, **member) for member in members]]


def test_a_script_alone_leaves_when_it_ends(processes: Processes, script: str) -> None:
    status, out, err = ended(processes.start(script))
    assert (status, out) == (0, TRAINED), err
    assert "stop_worker" not in err


def test_every_script_of_a_job_leaves_when_it_ends(
    processes: Processes, script: str, free_endpoints: Callable[[int], list[str]]
) -> None:
    said = ends(processes, free_endpoints(1), script)
    assert [status for status, *_ in said] == [0, 0, 0], said
    assert [out for _, out, _ in said] == ["", TRAINED, TRAINED], "a server's script ends where it has served"
    assert not any("stop_worker" in err for *_, err in said)


def test_an_error_is_the_jobs_and_no_goodbye(
    processes: Processes, script: str, free_endpoints: Callable[[int], list[str]]
) -> None:
    for status, _, err in ends(processes, free_endpoints(1), script, "raise")[:2]:  # the other worker may be done
        assert status == 1, err
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
