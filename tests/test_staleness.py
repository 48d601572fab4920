"""How old the values were that gradients were computed on: counted right, per worker and table, and readable."""

from __future__ import annotations

import threading

import pytest
import torch
from harness import run_job
from test_geo import Turns
from test_modes import RELAXED

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import NotInitializedError, StateError
from fleet.ps.consistency.staleness import Staleness, bucket, total
from fleet.ps.worker.push import Clocks
from fleet.strategy.parameter_server import Strategy


def test_small_ones_are_counted_exactly_and_large_ones_in_ranges_that_double() -> None:
    assert [bucket(n) for n in (0, 1, 63, 64, 127, 128, 1000)] == [0, 1, 63, 64, 64, 128, 512]


def test_the_counts_of_several_servers_are_added() -> None:
    one, other = Staleness(), Staleness()
    for staleness in (2, 0, 2):
        one.add(1, "dense", staleness)
    other.add(0, "table", 5)
    other.add(1, "dense", 2)
    assert total([one.counts, other.counts]) == {0: {"table": {5: 1}}, 1: {"dense": {0: 1, 2: 3}}}


def test_gradients_that_become_one_are_as_old_as_the_oldest() -> None:
    """Of every server, and of every table on it."""
    one, other = Clocks({0: 3, 1: 4}, {(0, 1): 5}), Clocks({0: 2, 1: 9}, {(0, 1): 7, (0, 0): 1})
    for merged in (one.or_earlier(other), other.or_earlier(one)):
        assert merged == Clocks({0: 2, 1: 4}, {(0, 1): 5, (0, 0): 1})


def by_turns(strategy: Strategy | None, steps: dict[int, int], order: list[int]) -> dict:
    """What worker 0 reads at the end of a job in which the workers step in ``order``; worker 1 alone uses "other"."""
    turns, everybody, seen = iter(order), threading.Barrier(len(steps)), {}
    now = [next(turns)]
    changed = threading.Condition()

    def body(fleet_: Fleet, worker: int) -> None:
        model = torch.nn.ModuleDict({name: fleet.nn.Embedding(None, 1) for name in ("shared", "other")})
        model["dense"] = torch.nn.Linear(1, 1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet_.init_worker()
        everybody.wait(20)
        for _ in range(steps[worker]):
            # Both have read before either of two steps that are next to each other in the order: see the tests.
            loss = model["dense"](model["shared"](torch.tensor([1])))
            if worker == 1:
                loss = loss + model["other"](torch.tensor([2]))
            with changed:
                assert changed.wait_for(lambda: now[0] == worker, 20)
            optimizer.minimize(loss.sum())
            with changed:
                now[0] = next(turns, -1)
                changed.notify_all()
        everybody.wait(20)
        if worker == 0:
            seen.update(fleet_.summary())
        everybody.wait(20)

    run_job(body, len(steps), 1)
    return seen


def test_a_worker_that_read_long_ago_is_counted_as_stale() -> None:
    """Worker 1 computes its gradient, worker 0 steps four times, then worker 1's arrives."""
    seen = by_turns(StrategyFactory.create_half_async_strategy(), {0: 4, 1: 1}, [0, 0, 0, 0, 1])
    assert seen["staleness"][0]["dense"] == {"updates": 4, "mean": 0, "max": 0, "histogram": {0: 4}}
    assert seen["staleness"][1]["dense"] == {"updates": 1, "mean": 4, "max": 4, "histogram": {4: 1}}
    assert seen["staleness"][1]["other.weight"]["histogram"] == {0: 1}, "nobody else uses that table"
    # Worker 1 read its row before or after one of worker 0's steps: nothing orders its look-up.
    assert set(seen["staleness"][1]["shared.weight"]["histogram"]) <= {0, 1, 2, 3, 4}
    assert seen["steps_by_worker"] == {0: 4, 1: 1}


def test_synchronous_training_is_never_stale() -> None:
    def body(fleet_: Fleet, worker: int) -> dict:
        table = fleet.nn.Embedding(None, 1)
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam([weight, *table.parameters()]))
        fleet_.init_worker()
        for step in range(5):
            optimizer.minimize(weight.sum() + table(torch.tensor([step, worker])).sum())
        fleet_.barrier_worker()
        return fleet_.summary()

    for seen in run_job(body, 3, 2):
        histograms = [one["histogram"] for names in seen["staleness"].values() for one in names.values()]
        assert len(histograms) == 6
        assert all(set(histogram) == {0} for histogram in histograms)


def test_an_asynchronous_worker_is_stale_by_its_own_steps_too() -> None:
    """Parameters are fetched after four gradients only: until then each is computed on the first ones."""
    strategy = StrategyFactory.create_async_strategy(min_send_grad_num_before_recv=4, independent_recv_thread=False)

    def body(fleet_: Fleet, worker: int) -> dict:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=0.1), strategy)
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize(weight.sum())
        fleet_.barrier_worker()
        return fleet_.summary()

    (seen,) = run_job(body, 1, 1)
    histogram = {0: 1, 1: 1, 2: 1}
    assert seen["staleness"][0]["dense"] == {"updates": 3, "mean": 1.0, "max": 2, "histogram": histogram}


def test_a_merged_push_counts_from_its_oldest_gradient() -> None:
    """Worker 1 merges two steps: it read before worker 0's three, and again after them."""
    strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=2)
    seen = by_turns(strategy, {0: 4, 1: 2}, [1, 0, 0, 0, 0, 1])
    assert seen["staleness"][1]["dense"]["histogram"] == {2: 1}, "worker 0 has pushed twice meanwhile"
    assert seen["steps_by_worker"] == {0: 4, 1: 2}


def test_geo_counts_the_changes_of_others_since_the_last_agreement() -> None:
    turns, everybody = Turns(2), threading.Barrier(2)

    def body(fleet_: Fleet, worker: int) -> dict:
        table = fleet.nn.Embedding(None, 1)
        weight = torch.nn.Parameter(torch.ones(4))
        plain = torch.optim.SGD([weight, *table.parameters()], lr=0.1)
        optimizer = fleet_.distributed_optimizer(plain, StrategyFactory.create_geo_strategy(1))
        fleet_.init_worker()
        table(torch.tensor([1]))
        everybody.wait(20)
        for _ in range(3):
            with turns.of(worker):
                optimizer.minimize(weight.sum() + table(torch.tensor([1])).sum())
        fleet_.barrier_worker()
        return fleet_.summary()

    seen = run_job(body, 2, 1)[0]
    for name in ("dense", "optimizer0.group0.param1"):
        assert seen["staleness"][0][name]["histogram"] == {0: 1, 1: 2}
        assert seen["staleness"][1][name]["histogram"] == {1: 3}


@pytest.mark.parametrize("mode", RELAXED)
def test_the_summary_of_a_job(mode: str) -> None:
    def body(fleet_: Fleet, worker: int) -> dict:
        with pytest.raises(NotInitializedError, match="summary"):
            fleet_.summary()
        model = torch.nn.ModuleDict({"rows": fleet.nn.Embedding(None, 2)})
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1), RELAXED[mode], model=model)
        fleet_.init_worker()
        for step in range(5):
            optimizer.minimize(model["rows"](torch.tensor([worker, step + 10])).sum())
        fleet_.barrier_worker()
        seen = fleet_.summary()
        fleet_.barrier_worker()
        fleet_.stop_worker()
        with pytest.raises(StateError, match="after the job ended"):
            fleet_.summary()
        return seen

    for worker, seen in enumerate(run_job(body, 2, 2)):
        assert (seen["worker"], seen["mode"], seen["steps"]) == (worker, RELAXED[mode].mode, 5)
        assert seen["steps_by_worker"] == {0: 5, 1: 5}
        assert seen["tables"]["rows.weight"]["rows"] == 7
        assert seen["tables"]["rows.weight"]["bytes"] > 7 * 2 * 4
        assert set(seen["staleness"]) == {0, 1}
        assert set(seen["staleness"][0]) == {"rows.weight"}
