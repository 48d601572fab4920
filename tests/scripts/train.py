"""The script of every process in test_processes: a small job whose end is known. Variants come as arguments."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fleet
from fleet.ps.server.lean import be_lean


def say_at_once(line: str) -> None:
    print(line, flush=True)


def main(variant: str) -> None:
    fleet.init()
    if fleet.is_worker():  # servers do so by themselves
        be_lean()
    if fleet.is_server():
        join(fleet)
        fleet.init_server()
        fleet.run_server()
        print("served", "with" if "torch._dynamo" in sys.modules else "without", "a compiler")
        return
    train(fleet, variant)
    assert "torch._dynamo" not in sys.modules  # it comes with what is compiled
    if variant != "forget":
        fleet.stop_worker()


def join(job: Any) -> tuple[torch.nn.Parameter, fleet.nn.Embedding, Any]:
    weight = torch.nn.Parameter(torch.zeros(4))
    table = fleet.nn.Embedding(None, 2, initializer="zeros")
    return weight, table, job.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0))


def train(job: Any, variant: str, say: Callable[[str], object] = say_at_once) -> None:
    """What a worker does; ``job`` is the module, or a ``Fleet`` of a thread."""
    weight, table, optimizer = join(job)
    job.init_worker()
    say("joined")
    if variant == "again":
        again(job, weight, table, optimizer, say)
    else:
        five_steps(job, weight, table, optimizer, variant)
    if variant == "fork" and os.fork() == 0:
        sys.exit(3)  # runs what is registered for the end of a process
    if variant in ("slow", "brief"):
        say("under way")
        for _ in range(600 if variant == "slow" else 30):
            optimizer.minimize(weight.sum() * 0)
            time.sleep(0.1)
    say(f"weight {weight[0].item()} row {table(torch.tensor([0]))[0, 0].item()}")


def five_steps(job: Any, weight: torch.nn.Parameter, table: fleet.nn.Embedding, optimizer: Any, variant: str) -> None:
    for step in range(5):
        optimizer.minimize(weight.sum() + table(torch.tensor([job.worker_index()])).sum())
        if step == 2 and variant == "fail" and job.worker_index() == 1:
            raise ValueError("a bad batch")
        if step == 2 and variant == "exit" and job.worker_index() == 1:
            sys.exit(7)


def again(
    job: Any, weight: torch.nn.Parameter, table: fleet.nn.Embedding, optimizer: Any, say: Callable[[str], object]
) -> None:
    """Steps that know which they are, from the first one that the job does not have yet."""
    say(f"from {job.resume_step()}")
    for step in range(job.resume_step(), 40):
        optimizer.minimize((step + 1) * weight.sum() + table(torch.tensor([step % 3])).sum())
        say(f"step {step}")
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
