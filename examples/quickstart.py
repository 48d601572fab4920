"""Train a small click model: dense layers and a sparse table, on one process or on many, with the same script.

    python examples/quickstart.py
    fleetrun --server_num 2 --worker_num 2 examples/quickstart.py

Clicks depend on a hidden score of each user and each item, so there is something to learn and the best possible
accuracy is known. Every worker sees its own part of the stream.
"""

from __future__ import annotations

import argparse

import torch

import fleet

STEPS, BATCH, USERS, ITEMS = 300, 512, 1000, 200


class ClickModel(torch.nn.Module):
    """Rows for users and items that exist on the servers only, and a small network over them."""

    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.nn.Embedding(None, 8, initializer="normal(0, 0.1)")
        self.item = fleet.nn.Embedding(ITEMS, 8, initializer="normal(0, 0.1)")
        self.top = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], dim=1)).squeeze(1)


def clicks(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch of users, items and whether they clicked."""
    taste = torch.Generator().manual_seed(7)
    user_score, item_score = torch.randn(USERS, generator=taste), torch.randn(ITEMS, generator=taste)
    draw = torch.Generator().manual_seed(seed)
    user = torch.randint(0, USERS, (BATCH,), generator=draw)
    item = torch.randint(0, ITEMS, (BATCH,), generator=draw)
    return user, item, (user_score[user] + item_score[item] > 0).float()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    fleet.init()
    model = ClickModel()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return

    fleet.init_worker()
    for step in range(STEPS):
        user, item, clicked = clicks(seed=step * fleet.worker_num() + fleet.worker_index())
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked)
        optimizer.minimize(loss)
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    model.eval()
    user, item, clicked = clicks(seed=10**6)
    with torch.no_grad():
        accuracy = ((model(user, item) > 0).float() == clicked).float().mean().item()
    print(f"accuracy on new clicks: {accuracy:.3f}")
    if fleet.is_first_worker():
        fleet.save_persistables("ckpt/quickstart")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
