"""The script of every process of an elastic job: workers train until the file that is named appears."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import fleet
from fleet.ps.server.lean import be_lean


def main(end: Path) -> None:
    fleet.init()
    if fleet.is_worker():  # servers do so by themselves
        be_lean()
    weight = torch.nn.Parameter(torch.zeros(4))
    strategy = fleet.StrategyFactory.create_half_async_strategy(elastic=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    print("joined", flush=True)
    while not end.exists():
        optimizer.minimize(weight.sum())
        time.sleep(0.05)
    fleet.barrier_worker()  # those that have died are given up on
    optimizer.minimize(weight.sum())
    print(f"weight {weight[0].item():.0f} steps {fleet.summary()['steps_by_worker']}")
    fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
