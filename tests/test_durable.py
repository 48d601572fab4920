"""Servers that are killed lose nothing: jobs end bit for bit where undisturbed ones do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import ANSWERED, BEFORE, CARRIED_OUT, MOMENTS, NOTED_DOWN, Crashes, DyingJob, Plan, at, every
from harness import run_job

import fleet.nn
from fleet import Fleet
from fleet.ps.worker import client

ROWS, DIM = 40, 4


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are there again at once."""
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.002)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.open = fleet.nn.Embedding(None, DIM)
        self.known = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.head = torch.nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.open(ids).mean(1) + self.known(ids).mean(1)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def state(made: Fleet, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in made.state_dict(model).items()}


def same(got: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert torch.equal(ours[key], theirs[key]), key


def trains(
    optimizer: str, steps: int = 4, strategy: Any = None, between: Callable[[Fleet, int, int], None] | None = None
) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> Any:
        model = Model()
        wrapped = made.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()), strategy, model=model)
        made.init_worker()
        draw = torch.Generator().manual_seed(index)
        for step in range(steps):
            loss = (model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean()
            wrapped.minimize(loss)
            if between is not None:
                between(made, index, step)
        made.barrier_worker()
        return state(made, model)

    return body


def gathers(made: Fleet, index: int, step: int) -> None:
    total = made.all_reduce_worker(torch.tensor([float(index + step)]))
    assert total.item() == 1 + 2 * step


# ---------------------------------------------------------------- synchronous jobs, to the bit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("offset", range(3))
def test_killed_at_every_request(tmp_path: Path, optimizer: str, offset: int) -> None:
    body = trains(optimizer, between=gathers)
    job = DyingJob(body, tmp_path, plan=every(3, offset))
    same(job.run(), run_job(body, 2, 2))
    assert job.kills > 10
    assert not list(tmp_path.iterdir())


def test_snapshots_in_the_midst_of_rounds_and_gatherings(tmp_path: Path) -> None:
    """One with every request: whatever is not finished has to come along."""
    job = DyingJob(trains("adam", between=gathers), tmp_path, plan=every(4, 1), journal_bytes=1)
    same(job.run(), run_job(trains("adam", between=gathers), 2, 2))
    assert job.kills > 8


def test_a_journal_alone(tmp_path: Path) -> None:
    job = DyingJob(trains("adagrad", between=gathers), tmp_path, plan=every(4, 2), journal_bytes=1 << 30)
    same(job.run(), run_job(trains("adagrad", between=gathers), 2, 2))
    assert job.kills > 8


def test_parameters_that_come_later(tmp_path: Path) -> None:
    def body(made: Fleet, index: int) -> Any:
        model = Model()
        first = [*model.open.parameters(), *model.head.parameters()]
        optimizer = torch.optim.Adagrad(first, lr=0.1)
        wrapped = made.distributed_optimizer(optimizer, model=model)
        made.init_worker()
        draw = torch.Generator().manual_seed(index)
        for step in range(5):
            if step == 2:
                wrapped.add_param_group({"params": list(model.known.parameters()), "lr": 0.01})
            loss = (model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean()
            wrapped.minimize(loss)
        made.barrier_worker()
        return state(made, model)

    job = DyingJob(body, tmp_path, plan=every(3, 1))
    same(job.run(), run_job(body, 2, 2))
    assert job.kills > 8


# ---------------------------------------------------------------- modes without rounds

FREE = {
    "async": fleet.StrategyFactory.create_async_strategy(independent_recv_thread=False),
    "half_async": fleet.StrategyFactory.create_half_async_strategy(),
    "ssp": fleet.StrategyFactory.create_ssp_strategy(2),
}


@pytest.mark.parametrize("mode", FREE)
def test_one_worker_without_rounds(tmp_path: Path, mode: str) -> None:
    body = counts(FREE[mode], torch.optim.Adagrad)
    job = DyingJob(body, tmp_path, workers=1, plan=every(3, 1))
    same(job.run(), run_job(body, 1, 2))
    assert job.kills > 3


@pytest.mark.parametrize("mode", FREE)
def test_every_push_once(tmp_path: Path, mode: str) -> None:
    job = DyingJob(counts(FREE[mode], torch.optim.SGD), tmp_path, plan=every(3, 2))
    total = sum(step + index + 1 for step in range(12) for index in range(2))
    for result in job.run():
        for value in result.values():
            assert torch.equal(value, torch.full_like(value, -0.125 * total))
    assert job.kills > 5


def counts(strategy: Any, optimizer: type[torch.optim.Optimizer], steps: int = 12) -> Callable[[Fleet, int], Any]:
    """Gradients that do not depend on what was read, and whose sums are exact."""

    def body(made: Fleet, index: int) -> Any:
        model = torch.nn.ModuleDict({"line": torch.nn.Linear(4, 4), "rows": torch.nn.Embedding(9, 2, sparse=True)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        wrapped = made.distributed_optimizer(optimizer(model.parameters(), lr=0.125), strategy, model=model)
        made.init_worker()
        for step in range(steps):
            looked_up = model["rows"](torch.arange(9)).sum() + sum(each.sum() for each in model["line"].parameters())
            wrapped.minimize(looked_up * float(step + index + 1))
        made.barrier_worker()
        return state(made, model)

    return body
