"""Trains on the stream, as a job of servers and workers: fleetrun --server_num 2 --worker_num 2 train.py STREAM

No worker waits for another one, or for a batch to fill: what has come is trained on, and what is learnt is on the
servers at once.
"""

from __future__ import annotations

import sys

import torch
from stream import stream_at

import fleet
from fleet import StrategyFactory


class ClickModel(torch.nn.Module):
    """The sum of a user's score and an item's. Users who have not been seen for long are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.nn.Embedding(None, 1, initializer="zeros", evict=fleet.nn.Unused(seconds=60))
        self.item = fleet.nn.Embedding(None, 1, initializer="zeros")

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) + self.item(item)).squeeze(1)


def columns(lines: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the users, the items, the scores and the clicks of some lines."""
    user, item, score, clicked = zip(*(line.split() for line in lines), strict=True)
    ids = torch.tensor([list(map(int, user)), list(map(int, item))])
    return ids[0], ids[1], torch.tensor(list(map(float, score))), torch.tensor(list(map(float, clicked)))


def main(place: str) -> None:
    fleet.init()
    model = ClickModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = fleet.distributed_optimizer(optimizer, StrategyFactory.create_async_strategy(), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    loss = torch.nn.BCEWithLogitsLoss(reduction="sum")
    for lines in stream_at(place).read("training", fleet.worker_index(), fleet.worker_num()):
        if lines:
            user, item, _, clicked = columns(lines)
            optimizer.minimize(loss(model(user, item), clicked))
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1])
