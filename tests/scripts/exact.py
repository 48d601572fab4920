"""A job whose end is known to the bit: ``exact.py MODE`` is one process of it, whose place is in the environment.

Synchronous, it trains; asynchronous, its gradients do not depend on what was read, and their sums are exact.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from fleet import Fleet, StrategyFactory

ROWS, DIM, STEPS = 300, 64, 25


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.rows = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.head = torch.nn.Linear(DIM, DIM)
        with torch.no_grad():
            for parameter in self.parameters():  # small whole numbers
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=draw))


def train(made: Fleet, mode: str) -> str:
    """What every process does; a worker's result tells all parameters apart from any others."""
    model = Model()
    if mode == "sync":
        strategy = StrategyFactory.create_sync_strategy()
        inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    else:
        strategy = StrategyFactory.create_async_strategy()
        inner = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = made.distributed_optimizer(inner, strategy, model=model)
    if made.is_server():
        made.init_server()
        made.run_server()
        return "served"
    made.init_worker()
    index = made.worker_index()
    for step in range(STEPS):
        ids = torch.randint(0, ROWS, (128,), generator=torch.Generator().manual_seed(2 * step + index))
        if mode == "sync":
            loss = (model.head(model.rows(ids)) - 1).square().mean()
        else:
            loss = (model.rows(ids).sum() + sum(each.sum() for each in model.head.parameters())) * float(step + index)
        optimizer.minimize(loss)
    made.barrier_worker()
    digest = hashlib.sha256()
    for name, value in sorted(made.state_dict(model).items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main(mode: str) -> None:
    made = Fleet()
    made.init()
    print(train(made, mode))
    if made.is_worker():
        made.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1])
