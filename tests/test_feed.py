"""Those who follow a model from outside the job are told what changes: each version exactly as the job had it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from harness import Job, until

import fleet.nn
from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.serving.server_source import ServerSource
from fleet.serving.source import Update
from fleet.strategy.parameter_server import StrategyFactory

ROWS, DIM = 60, 4


class Followed:
    """What a follower has, put together from the updates of a source."""

    def __init__(self, source: ServerSource) -> None:
        self.source = source
        self.tables = source.describe().tables
        self.dense: dict[str, torch.Tensor] = {}
        self.rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.tables}
        self.version = -1
        self.wholes = 0
        self.row_count = 0

    def take(self, update: Update) -> None:
        if update.whole:
            self.wholes += 1
            self.dense, self.rows = {}, {name: {} for name in self.tables}
        for piece in update.pieces:
            self.dense.update(piece.dense)
            for name, changes in piece.rows.items():
                self.rows[name].update(zip(changes.ids.tolist(), changes.values.clone(), strict=True))
                self.row_count += changes.ids.size
                for gone in changes.gone.tolist():
                    self.rows[name].pop(gone, None)
        self.version = update.version

    def to_the_end(self, each: Callable[[Followed], None] = lambda _: None) -> Followed:
        while not self.source.ended:
            update = self.source.next(1.0)
            if update is not None:
                self.take(update)
                each(self)
        return self


def source_of(job: Job, **options: Any) -> ServerSource:
    return ServerSource([Endpoint.parse(each) for each in job.endpoints], job.network, poll_s=0.002, **options)


class Model(torch.nn.Module):
    """Rows and dense values start at 0 and fall by the learning rate in every step that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, DIM, initializer="zeros")
        self.known = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.dense = torch.nn.Parameter(torch.zeros(7))
        torch.nn.init.zeros_(self.known.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -(self.open(ids).sum() + self.known(ids).sum() + self.dense.sum())


def test_smoke() -> None:
    go = threading.Event()

    def body(made: Fleet, index: int) -> Any:
        model = Model()
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        made.init_worker()
        for _ in range(30):
            wrapped.minimize(model(torch.arange(ROWS)))
        go.wait(20)
        for _ in range(30):
            wrapped.minimize(model(torch.arange(ROWS)))
        return made.state_dict(model)

    job = Job(body, 2, 2)
    threads = job.start()
    until(lambda: go or job.errors)
    print(job.errors)
    source = source_of(job)
    followed = Followed(source)
    print(followed.tables)
    go.set()
    versions = []
    followed.to_the_end(lambda f: versions.append((f.version, f.dense['dense'][0].item())))
    job.join(threads)
    print(job.errors, versions, followed.wholes)
    print({k: v.sum() for k, v in job.results[0].items()}, job.results[0].keys())
    source.close()
