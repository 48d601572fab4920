"""Collective jobs of which one worker is lost: the others stop in time, with an error that names it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PROCESSES_S
from prepared import Prepared, Process

SCRIPT = Path(__file__).parent / "scripts" / "collective_failures.py"
WORKERS = 3
#: Of silence; what the workers are given to start and end comes on top.
DEADLINE_S = 6.0

Start = Callable[[str, int], list[Process]]


@pytest.fixture
def start(prepared: Prepared, free_endpoints: Callable[[int], list[str]]) -> Iterator[Start]:
    started: list[Process] = []

    def begin(variant: str, who: int) -> list[Process]:
        strange = ("PADDLE_", "FLAGS_", "FLEET_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        environ |= {
            "PADDLE_TRAINER_ENDPOINTS": ",".join(free_endpoints(WORKERS)),
            "FLAGS_rpc_deadline": str(round(DEADLINE_S * 1000)),
            "FLEET_STARTUP_DEADLINE_S": "12" if variant == "absent" else "60",
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(WORKERS):
            mine = {**environ, "PADDLE_TRAINER_ID": str(rank)}
            started.append(prepared.start([str(SCRIPT), variant, str(who)], mine))
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ends(processes: list[Process], without: int | None = None) -> dict[int, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process but one."""
    until = time.monotonic() + PROCESSES_S
    found = {}
    for rank, process in enumerate(processes):
        if rank != without:
            out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
            found[rank] = process.returncode, out, err
    return found


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 0], ids=["member", "host of the store"])
@pytest.mark.parametrize("variant", ["kill", "freeze"])
def test_a_worker_that_is_lost_is_named(start: Start, variant: str, who: int) -> None:
    for code, out, err in ends(start(variant, who), without=who).values():
        assert code == 1
        assert "trained" not in out
        told = re.findall(r"fleet\.errors\.DeadlineError: (.*)", err)
        assert told, err
        assert f"worker {who}" in told[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "code", "why"),
    [
        ("raise", 1, r"exit code 1 \(ValueError: a bad batch\)"),
        ("end", 1, r"its script ended without fleet.stop_worker\(\)"),
    ],
)
def test_fleetrun_names_the_worker_that_ended_the_job(
    prepared: Prepared, tmp_path: Path, variant: str, code: int, why: str
) -> None:
    command = ["-m", "fleet.launch", "--worker_num", "2", str(SCRIPT), variant, "1"]
    launcher = prepared.start(command, os.environ, tmp_path)
    _, err = launcher.communicate(PROCESSES_S)
    assert launcher.returncode == code
    assert re.search(rf"^\[fleetrun\] worker 1 failed: {why}", err, re.MULTILINE), err
    assert err.count("Traceback (most recent call last)") == (variant == "raise")


def test_an_exception_ends_the_job_for_all(start: Start) -> None:
    ended = ends(start("raise", 2))
    assert "ValueError: a bad batch" in ended.pop(2)[2]
    for code, _, err in ended.values():
        assert code == 1
        assert "JobAbortedError: worker 2 failed and ended the job" in err
        assert "ValueError: a bad batch" in err


@pytest.mark.slow
def test_a_script_that_just_ends(start: Start) -> None:
    ended = ends(start("end", 1))
    assert ended.pop(1)[0] == 0
    for code, _, err in ended.values():
        assert code == 1
        assert "worker 1 failed and ended the job; got its script ended without fleet.stop_worker()" in err


@pytest.mark.slow
def test_a_long_step_is_no_silence(start: Start) -> None:
    for rank, (code, out, err) in ends(start("slow", 1)).items():
        assert code == 0, err
        assert out == f"trained as {rank} of {WORKERS}\n"


@pytest.mark.slow
def test_a_worker_that_does_not_come(start: Start) -> None:
    ended = ends(start("absent", 1))
    assert ended.pop(1)[0] == 0
    for code, _, err in ended.values():
        assert code == 1
        assert "workers 1 did not come within 12 s" in err
        assert re.search(r"^worker [02] waits for workers 1, \d+ s so far", err, re.MULTILINE)
