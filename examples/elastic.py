"""A collective job that goes on from its last checkpoint when torchrun restarts it.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py

When a worker fails, torchrun ends the others and starts all of them again, on as many machines as are left. The script
needs no case of its own for that: ``fleet.resume_from`` takes the newest checkpoint, if there is one, and the loop
begins at its step. ``--fail_at STEP`` lets worker 1 be killed at that step, the first time.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch

import fleet

STEPS = 60
EVERY = 10


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """A batch that depends on the step and the worker alone, so that a step done again is the same step."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * step + fleet.worker_index()))
    return torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", default="ckpt/elastic", metavar="DIR")
    parser.add_argument("--fail_at", type=int, metavar="STEP")
    options = parser.parse_args()

    torch.manual_seed(0)
    fleet.init()
    begun = fleet.resume_from(options.checkpoints)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    fleet.init_worker()
    with fleet.Checkpoints(options.checkpoints, every_steps=EVERY, keep_last=2) as checkpoints:
        for step in range(begun, STEPS):
            if step == options.fail_at and begun == 0 and fleet.worker_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.minimize(loss_of(model, step))
            checkpoints.after_step()
    total = sum(value.sum().item() for value in model.parameters())
    fleet.stop_worker()
    print(
        f"worker {fleet.worker_index()} of {fleet.worker_num()} began at step {begun}; parameters add up to {total:.6f}"
    )


if __name__ == "__main__":
    main()
