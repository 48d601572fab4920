"""A small job for tests of checkpoints: every number it has learnt can be looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import fleet.nn
from fleet import Fleet
from fleet.strategy.parameter_server import StrategyFactory

IDS = torch.arange(-20, 60)

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
    "ssp": StrategyFactory.create_ssp_strategy,
    "dc-asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.5),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.open = fleet.nn.Embedding(None, 4)
        self.closed = torch.nn.Embedding(30, 4, sparse=True)

    @staticmethod
    def ids(step: int) -> torch.Tensor:
        return torch.randint(0, 30, (6,), generator=torch.Generator().manual_seed(step))

    def loss(self, step: int) -> torch.Tensor:
        ids = self.ids(step)
        return self.dense(self.open(ids * 2 - 20 + step) + self.closed(ids)).square().mean()

    def seen(self) -> list[torch.Tensor]:
        """All a job has learnt."""
        with torch.no_grad():
            rows = [self.open(IDS), self.closed(torch.arange(30))]
        return [*(p.detach().clone() for p in self.dense.parameters()), *rows]


def join(fleet_: Fleet, strategy: str = "sync") -> tuple[Net, Any]:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    wrapped = fleet_.distributed_optimizer(optimizer, STRATEGIES[strategy](), model=model)
    fleet_.init_worker()
    return model, wrapped


def train(model: Net, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.minimize(model.loss(step))


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
