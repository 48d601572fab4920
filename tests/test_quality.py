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


def test_with_one_worker_there_is_nothing_to_compensate() -> None:
    task = Digits()
    assert task.train(1, Trial(0.1), 0, updates=50) == task.train(1, Trial(0.1, 30.0), 0, updates=50)


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
