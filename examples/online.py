"""A model that is trained on a stream and served meanwhile: two commands, in two terminals and in either order.

    python examples/online.py train     # or as a job: fleetrun --server_num 2 --worker_num 2 examples/online.py train
    python examples/online.py serve

Users come and go, so a model that is not trained on grows old. Every 100 steps the trainer saves what has changed since
the last time, a delta, and the serving process picks it up and scores the clicks of that time: it is right in more than
93 of 100. Of the clicks at the end the first checkpoint would tell no more than 80. It loads a checkpoint with all that
it goes on from, which ``full_every=4`` keeps to three deltas and a whole one.
"""

from __future__ import annotations

import argparse
import time

import torch

import fleet

ROOT = "ckpt/online"
STEPS, EVERY, BATCH = 800, 100, 512
USERS, ITEMS = 500, 100  # at a time; two users go and two come with every step
PATIENCE_S = 120.0


class ClickModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.nn.Embedding(None, 1, initializer="zeros")
        self.item = fleet.nn.Embedding(None, 1, initializer="zeros")

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) + self.item(item)).squeeze(1)


def clicks(step: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users and items at a time of the stream, and which of them clicked: both have a score, and the sum decides."""
    taste = torch.Generator().manual_seed(7)
    users, items = torch.randn(USERS + 2 * STEPS + 2, generator=taste), torch.randn(ITEMS, generator=taste)
    user = 2 * step + torch.randint(0, USERS, (BATCH,), generator=draw)
    item = torch.randint(0, ITEMS, (BATCH,), generator=draw)
    return user, item, (users[user] + items[item] > 0).float()


def join() -> tuple[ClickModel, torch.optim.Optimizer]:
    model = ClickModel()
    return model, fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.5), model=model)


def train() -> None:
    fleet.init()
    model, optimizer = join()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    draw = torch.Generator().manual_seed(fleet.worker_index())
    with fleet.Checkpoints(ROOT, every_steps=EVERY, full_every=4, keep_last=4) as checkpoints:
        for step in range(STEPS):
            user, item, clicked = clicks(step, draw)
            optimizer.minimize(torch.nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked))
            checkpoints.after_step()
            time.sleep(0.01)  # as a stream has it
    fleet.stop_worker()


def serve() -> None:
    """A job of its own, alone in this process, that never takes a step: its server holds what was loaded last."""
    fleet.init()
    model, _ = join()
    fleet.init_worker()
    model.eval()
    draw, served, until = torch.Generator().manual_seed(99), "", time.monotonic() + PATIENCE_S
    while fleet.resume_step() < STEPS:
        latest = fleet.Checkpoints.latest(ROOT)
        if latest is None or latest == served:
            if time.monotonic() > until:
                raise SystemExit(f"nothing new in {ROOT} for {PATIENCE_S:g} s")
            time.sleep(0.05)
            continue
        fleet.load_persistables(latest)
        served, until = latest, time.monotonic() + PATIENCE_S
        step = fleet.resume_step()
        print(f"step {step}: right in {right(model, step, draw):.3f} now, {right(model, STEPS, draw):.3f} at the end")
    fleet.stop_worker()


@torch.no_grad()
def right(model: ClickModel, step: int, draw: torch.Generator) -> float:
    user, item, clicked = clicks(step, draw)
    return ((model(user, item) > 0).float() == clicked).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", "serve"])
    {"train": train, "serve": serve}[parser.parse_args().part]()
