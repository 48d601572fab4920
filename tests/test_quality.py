"""The studies in benchmarks/: the simulated delays are what they say they are, and the modes keep what they promise."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from delays import Digits, Trial, arrivals, staleness, train_in_order
from quality import RELAXED, SYNC, Examples, Length, Study, Task
from simulated_clock import follow, simulate, train
from tasks import as_large_as_adult

from fleet import Fleet, StrategyFactory
from fleet.optimizer import DistributedOptimizer


def test_staleness_is_how_many_others_pushed_since_a_worker_did() -> None:
    assert staleness([0, 1, 2] * 3) == [0, 1, 2] + [2] * 6
    assert staleness([0, 0, 1, 0, 1]) == [0, 0, 2, 1, 1]


def test_the_simulated_clock_is_fair_and_repeats_itself() -> None:
    order = arrivals(20, 2000, seed=3)
    assert order == arrivals(20, 2000, seed=3) != arrivals(20, 2000, seed=4)
    assert all(80 < order.count(worker) < 120 for worker in range(20))
    settled = staleness(order)[200:]
    assert statistics.mean(settled) == pytest.approx(19, abs=0.5)
    assert max(settled) > 30, "steps are not all of one length"


def test_gradients_are_as_stale_as_the_schedule_says() -> None:
    """Every push adds one to the parameter, so what a worker reads tells how many pushes it has seen."""
    order = arrivals(8, 60, seed=1)
    seen: dict[int, float] = {}

    def loss_of(model: torch.nn.Module, place: int) -> torch.Tensor:
        (param,) = model.parameters()
        seen[place] = param.item()
        return -param.sum()

    counter = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(counter.weight)
    trained = train_in_order(counter, loss_of, order, Trial(rate=1.0))
    assert [place - seen[place] for place in range(60)] == staleness(order)
    assert trained.weight.item() == 60


@pytest.mark.slow
def test_compensation_pays_where_gradients_are_stale() -> None:
    task = Digits()
    for seed in range(2):
        plain, constant, adaptive = (
            task.train(20, trial, seed, updates=400)[0]
            for trial in (Trial(0.1), Trial(0.1, 30.0), Trial(0.1, 3.0, adaptive=True))
        )
        assert max(constant, adaptive) < 0.8 * plain


@pytest.mark.slow
def test_with_one_worker_there_is_nothing_to_compensate() -> None:
    task = Digits()
    assert task.train(1, Trial(0.1), 0, updates=50) == task.train(1, Trial(0.1, 30.0), 0, updates=50)


# ---------------------------------------------------------------- whole courses on a simulated clock


def test_a_slow_worker_is_waited_for_in_synchronous_training_alone() -> None:
    rates = {mode: simulate(mode, 4, 800, 0, one_slow=True).rate for mode in ("sync", "gba", "auto", "async")}
    assert rates["gba"] == pytest.approx(rates["async"], rel=0.01)
    assert rates["auto"] > 2 * rates["sync"]
    assert rates["gba"] == pytest.approx(3.25, rel=0.1), "three whole workers, and a quarter"


def test_every_push_becomes_part_of_an_update_or_is_dropped() -> None:
    course = simulate("gba", 4, 800, 0, one_slow=True)
    places = [place for update in course.updates for each in update.values() for place in each]
    assert len(course.updates) == 200
    assert len(places) == len({*places}) == 800 - course.late < 800
    assert max(course.behind) == 4, "what is later is dropped"


def test_even_workers_lose_next_to_nothing() -> None:
    course = simulate("gba", 20, 20000, 0, one_slow=False)
    assert course.late < 0.01 * len(course.order)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(40, 3, sparse=True)
        self.top = torch.nn.Linear(6, 1)

    def loss(self, place: int) -> torch.Tensor:
        ids = torch.randint(0, 40, (5, 2), generator=torch.Generator().manual_seed(place))
        return (self.top(self.rows(ids).flatten(1)) - 1).square().mean()


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["gba", "auto"])
def test_a_job_on_a_simulated_course_computes_what_plain_torch_does(mode: str) -> None:
    """Rows, dense parameters, what is late, and where auto changes."""
    course = simulate(mode, 3, 150, 1, one_slow=True, staleness=2)
    assert course.late
    torch.manual_seed(0)
    plain = Net()
    untrained = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    train(course, plain, optimizer, lambda places: torch.stack([*map(plain.loss, places)]).mean())
    make = StrategyFactory.create_gba_strategy if mode == "gba" else StrategyFactory.create_auto_strategy
    strategy = make(staleness=2, **({"changes": [course.rounds]} if mode == "auto" else {}))

    def begin(fleet: Fleet) -> tuple[Net, DistributedOptimizer]:
        model = Net()
        model.load_state_dict(untrained)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        distributed = fleet.distributed_optimizer(optimizer, strategy, model=model)
        fleet.init_worker()
        return model, distributed

    def end(fleet: Fleet, model: Net) -> tuple[dict[str, torch.Tensor], int]:
        return fleet.state_dict(model), sum(fleet.summary()["late_gradients"].values())

    values, late = follow(course, begin, Net.loss, end)
    assert late == course.late
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(values[name], expected, rtol=1e-5, atol=1e-5)


def test_the_set_as_large_as_adult_is_that_large() -> None:
    problem = as_large_as_adult()
    assert sum(map(len, (problem.task.train, problem.task.validation, problem.task.test))) == 48842
    assert problem.task.fields == 14
    assert problem.best is not None
    assert 0.8 < problem.best < 0.9


def clicks() -> Task:
    """Who clicks on what: every user and item has a hidden score, and chance has its part."""
    draw = torch.Generator().manual_seed(5)
    scores = torch.randn(300, generator=draw)
    ids = torch.stack([torch.randint(low, low + 100, (30000,), generator=draw) for low in (0, 100, 200)], 1)
    labels = torch.bernoulli(torch.sigmoid(scores[ids].sum(1)), generator=draw)
    examples = Examples(ids, labels)
    return Task(*(examples.part(slice(start, start + 10000)) for start in (0, 10000, 20000)))


#: What a mode may lose of the AUC. One that loses two thirds of its updates loses more.
TOLERATED = 0.004


@pytest.mark.slow
def test_every_mode_ends_close_to_one_process() -> None:
    study, third = (Study(clicks(), Length(32, updates), rates=(0.03,), seeds=(0,)) for updates in (600, 200))
    (alone,), (on_the_way,) = (each.one_process()["auc"] for each in (study, third))
    assert alone - TOLERATED > max(on_the_way, 0.75), "nothing that is lost could be seen"
    (exact,) = study.mode("sync", SYNC, 4)["lost"]
    assert abs(exact) < 1e-4
    for name, strategy in RELAXED.items():
        (lost,) = study.mode(name, strategy, 4)["lost"]
        assert lost < TOLERATED, name
