"""Trains on a Ray cluster with Ray Data in front: Ray prepares the samples, and a Fleet job of Ray's actors learns.

    python examples/ray/train.py

takes this machine, or the cluster that RAY_ADDRESS names. It ends with the accuracy on new clicks.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import torch

import fleet

USERS, ITEMS, CLICKS = 1000, 200, 60_000


def clicks(first: int) -> dict[str, np.ndarray]:
    """Who clicked what, from a hidden score of each user and item."""
    scores = np.random.default_rng(0)
    users, items = scores.normal(size=USERS), scores.normal(size=ITEMS)
    chance = np.random.default_rng(first)
    user, item = chance.integers(USERS, size=1000), chance.integers(ITEMS, size=1000)
    return {"user": user, "item": item, "click": (users[user] + items[item] > 0).astype(np.float32)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.nn.Embedding(None, 8, initializer="normal(0, 0.1)")
        self.item = fleet.nn.Embedding(None, 8, initializer="normal(0, 0.1)")
        self.head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(torch.cat([self.user(batch["user"]), self.item(batch["item"])], 1)).squeeze(1)


def train(shards: list[Any], lr: float) -> float | None:
    """What every server and worker does; a worker returns its accuracy on clicks that nobody trained on."""
    fleet.init()
    torch.manual_seed(0)
    model = Model()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=lr), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
    for batch in shards[fleet.worker_index()].iter_torch_batches(batch_size=256):
        optimizer.minimize(loss_fn(model(batch), batch["click"]))
    new = {name: torch.from_numpy(values) for name, values in clicks(-1 % 2**31).items()}
    with torch.no_grad():
        accuracy = ((model(new) > 0) == (new["click"] > 0)).float().mean().item()
    fleet.stop_worker()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server_num", type=int, default=2)
    parser.add_argument("--worker_num", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()
    data = ray.data.range(CLICKS // 1000, override_num_blocks=8).flat_map(
        lambda row: [
            dict(zip(("user", "item", "click"), one, strict=True))
            for one in zip(*clicks(int(row["id"])).values(), strict=True)
        ]
    )
    shards = data.materialize().split(options.worker_num, equal=True)
    accuracies = fleet.ray.run(
        train,
        shards,
        options.lr,
        server_num=options.server_num,
        worker_num=options.worker_num,
        resources_per_server={"CPU": 0.5},
        resources_per_worker={"CPU": 0.5},
    )
    print(f"accuracy on new clicks: {accuracies[0]:.3f}")


if __name__ == "__main__":
    main()
