"""A crowd of workers and servers takes as long as arithmetic says of the times that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from simulation.crowd import Cabling, Crowd, Times

from fleet import Fleet, StrategyFactory

NUMBERS = 1000


def trained(steps: int, computing_s: Callable[[int], float], done: list[float]) -> Callable[[Crowd, Fleet, int], None]:
    """What a worker of a job does that has nothing but dense parameters, so that a step is one request; ``done`` is
    when each of them is done."""

    def work(crowd: Crowd, here: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(NUMBERS))
        strategy = StrategyFactory.create_sync_strategy()
        optimizer = here.distributed_optimizer(torch.optim.SGD([weight], lr=0.1), strategy)
        here.init_worker()
        for _ in range(steps):
            crowd.compute(computing_s(worker))
            optimizer.minimize(weight.sum())
            done.append(crowd.scheduler.now)

    return work


def round_s(done: list[float], workers: int) -> float:
    """From the last worker's end of the first step to that of the last one."""
    rounds = len(done) // workers
    return (done[-1] - done[workers - 1]) / (rounds - 1)


def test_a_round_takes_what_its_server_takes_for_all_workers() -> None:
    done: list[float] = []
    workers = 8
    crowd = Crowd(workers, 1, trained(5, lambda _: 0.5e-3, done), Times(server_request_s=2e-3))
    crowd.run()
    assert round_s(done, workers) == pytest.approx(workers * 2e-3, rel=1e-6)
    assert crowd.wires.handled["server0"].requests["push"] == 5 * workers
    # Those of all are here before the first one is answered, and no answer has left by then.
    assert 4 * NUMBERS * workers < crowd.wires.handled["server0"].most_held_bytes < 1.2 * 4 * NUMBERS * workers


def test_a_round_takes_as_long_as_its_slowest_worker() -> None:
    done: list[float] = []
    crowd = Crowd(3, 2, trained(4, lambda worker: 0.3 if worker == 1 else 0.1, done), Times(worker_request_s=2e-3))
    crowd.run()
    # It sends to two servers, one after the other, and takes in two answers.
    assert round_s(done, 3) == pytest.approx(0.3 + 3e-3, rel=0.01)


def test_what_goes_through_a_link_waits_for_what_went_before() -> None:
    done: list[float] = []
    cabling = Cabling(bytes_s=1e6, latency_s=1e-3)
    crowd = Crowd(4, 1, trained(3, lambda _: 0.0, done), Times(), cabling=cabling)
    crowd.run()
    # Four answers leave the server, one after the other, and then the last one who got his sends a gradient.
    least_s = (4 + 1) * 4 * NUMBERS / 1e6 + 2 * 1e-3
    assert least_s < round_s(done, 4) < 1.1 * least_s  # with headers


def test_processes_of_one_machine_share_its_cores() -> None:
    done: list[float] = []
    crowd = Crowd(6, 1, trained(3, lambda _: 0.01, done), Times(), cores=2, together=True)
    crowd.run()
    assert done[-1] == pytest.approx(3 * 6 * 0.01 / 2, rel=0.05)


def test_heartbeats_come_every_second_and_take_their_time() -> None:
    done: list[float] = []
    crowd = Crowd(2, 2, trained(2, lambda _: 5.0, done), Times(server_beat_s=1e-3))
    crowd.run()
    expected = 2 * math.floor(done[-1])
    assert crowd.wires.handled["server0"].requests["beat"] == pytest.approx(expected, abs=2)
    assert crowd.wires.processor("server0").busy_s["beat"] == pytest.approx(expected * 1e-3, abs=2e-3)
