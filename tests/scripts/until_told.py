"""A worker that trains until a file is there, and tells how far it is: for tests that do something to its servers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fleet

IDS = torch.arange(200)


def main() -> None:
    ends = Path(sys.argv[1])
    fleet.init()
    table = fleet.nn.Embedding(None, 4, initializer="constant(0.0)")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.5), model=table)
    fleet.init_worker()
    steps = 0
    while True:
        optimizer.minimize(table(IDS).sum())
        steps += 1
        Path("steps").write_text(str(steps))
        if fleet.all_reduce_worker(float(ends.exists()), op="min"):
            break
    # Each step of all takes off half of the mean gradient, which is one.
    wrong = (table(IDS).detach() + 0.5 * steps).count_nonzero().item()
    print(f"servers {fleet.server_num()} rows {wrong or 'right'}", flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
