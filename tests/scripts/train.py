"""The script of every process in test_processes: a small job whose end is known. Variants come as arguments."""

from __future__ import annotations

import os
import sys
import time

import torch

import fleet
from fleet.ps.server.lean import be_lean


def main(variant: str) -> None:
    fleet.init()
    if fleet.is_worker():  # servers do so by themselves
        be_lean()
    weight = torch.nn.Parameter(torch.zeros(4))
    table = fleet.nn.Embedding(None, 2, initializer="zeros")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        print("served", "with" if "torch._dynamo" in sys.modules else "without", "a compiler")
        return
    fleet.init_worker()
    print("joined", flush=True)
    if variant == "again":
        again(weight, table, optimizer)
        return
    for step in range(5):
        optimizer.minimize(weight.sum() + table(torch.tensor([fleet.worker_index()])).sum())
        if step == 2 and variant == "fail" and fleet.worker_index() == 1:
            raise ValueError("a bad batch")
        if step == 2 and variant == "exit" and fleet.worker_index() == 1:
            sys.exit(7)
    if variant == "fork" and os.fork() == 0:
        sys.exit(3)  # runs what is registered for the end of a process
    if variant in ("slow", "brief"):
        print("under way", flush=True)
        for _ in range(600 if variant == "slow" else 30):
            optimizer.minimize(weight.sum() * 0)
            time.sleep(0.1)
    print(f"weight {weight[0].item()} row {table(torch.tensor([0]))[0, 0].item()}")
    assert "torch._dynamo" in sys.modules  # whoever trains may compile
    if variant != "forget":
        fleet.stop_worker()


def again(weight: torch.nn.Parameter, table: fleet.nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    """Steps that know which they are, from the first one that the job does not have yet."""
    print(f"from {fleet.resume_step()}", flush=True)
    for step in range(fleet.resume_step(), 40):
        optimizer.minimize((step + 1) * weight.sum() + table(torch.tensor([step % 3])).sum())
        print(f"step {step}", flush=True)
        time.sleep(0.05)
    print(f"weight {weight[0].item()} row {table(torch.tensor([0]))[0, 0].item()}")
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
