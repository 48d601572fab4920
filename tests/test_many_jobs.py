"""Jobs that follow one another on the same ports, or run side by side, have nothing to do with each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from test_processes import Processes, ended, processes  # noqa: F401 - a fixture

MANY_JOBS = str(Path(__file__).parent / "scripts" / "many_jobs.py")
JOBS = 100


def test_a_hundred_jobs_one_after_another_on_the_same_ports(
    processes: Processes,  # noqa: F811
    free_endpoints: Callable[[int], list[str]],
) -> None:
    """Every process goes from job to job at its own speed: early workers and late servers of each are about."""
    endpoints = free_endpoints(2)
    common = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints), "PADDLE_TRAINERS_NUM": "2"}
    started = [
        *(
            processes.start(MANY_JOBS, str(JOBS), TRAINING_ROLE="PSERVER", PADDLE_PSERVER_ID=str(index), **common)
            for index in range(2)
        ),
        *(
            processes.start(MANY_JOBS, str(JOBS), TRAINING_ROLE="TRAINER", PADDLE_TRAINER_ID=str(index), **common)
            for index in range(2)
        ),
    ]
    for process in started:
        code, out, err = ended(process, 110)
        assert code == 0, err
        assert out == f"{JOBS} jobs\n"


def test_a_worker_that_outlived_its_job_is_kept_out_of_the_next(
    processes: Processes,  # noqa: F811
    free_endpoints: Callable[[int], list[str]],
) -> None:
    endpoints = free_endpoints(1)
    first = processes.server(endpoints[0], endpoints, 1)
    orphan = processes.worker(0, endpoints, 1, "slow")
    assert orphan.stdout is not None
    assert orphan.stdout.readline() == "joined\n"
    first.kill()
    first.wait()
    second = processes.server(endpoints[0], endpoints, 1)
    # Long enough for the orphan to come by: it looks for its server every second.
    code, out, err = ended(processes.worker(0, endpoints, 1, "brief"))
    assert code == 0, err
    assert "weight -5.0 row -5.0" in out
    assert ended(second)[0] == 0
    code, _, err = ended(orphan)
    assert code == 1
    assert f"worker 0 is no longer part of this job; at {endpoints[0]}" in err


def test_two_jobs_side_by_side_and_a_worker_in_the_wrong_one(
    processes: Processes,  # noqa: F811
    free_endpoints: Callable[[int], list[str]],
) -> None:
    one, other = free_endpoints(2)
    servers = [
        processes.server(endpoint, [endpoint], 1, FLEET_JOB_ID=name) for endpoint, name in ((one, "a"), (other, "b"))
    ]
    stray = processes.worker(0, [other], 1, FLEET_JOB_ID="a")
    code, _, err = ended(stray)
    assert code == 1
    assert f"this server serves another job; at {other}; expected job b; got job a" in err
    for endpoint, name in ((one, "a"), (other, "b")):
        code, out, err = ended(processes.worker(0, [endpoint], 1, FLEET_JOB_ID=name))
        assert code == 0, err
        assert "weight -5.0 row -5.0" in out
    assert [ended(server)[0] for server in servers] == [0, 0]
