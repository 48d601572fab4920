"""The script of every process in test_many_jobs.py: one job after another, each with a model and an end of its own."""

from __future__ import annotations

import sys

import torch

import fleet
from fleet.ps.server.lean import be_lean


def main(jobs: int) -> None:
    for job in range(jobs):
        fleet.init()
        if fleet.is_worker():  # servers do so by themselves
            be_lean()
        weight = torch.nn.Parameter(torch.full((1 + job % 3,), float(job)))
        table = fleet.nn.Embedding(None, 1 + job % 2, initializer=f"constant({job})")
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0))
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            continue
        fleet.init_worker()
        for _ in range(3):
            optimizer.minimize(weight.sum() + table(torch.tensor([7])).sum())
        ended = weight[0].item(), table(torch.tensor([7]))[0, 0].item()
        assert ended == (job - 3.0, job - 3.0), f"job {job} ended at {ended}"
        fleet.stop_worker()
    print(f"{jobs} jobs")


if __name__ == "__main__":
    main(int(sys.argv[1]))
