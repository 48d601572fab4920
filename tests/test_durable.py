"""Servers that are killed lose nothing: jobs end bit for bit where undisturbed ones do."""

from __future__ import annotations

import itertools
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
