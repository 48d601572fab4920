"""The click model as a script of its own, for ``fleetrun`` and ``fleet plan``: it takes so many steps, or until it is
ended."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from ours import INITIALIZER, STRATEGIES
from torch_model import OneTable, as_tensors, make_model
from work import Work, clicks

import fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=STRATEGIES, default="sync")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause_ms", type=float, default=0.0, help="of waiting for data in each step")
    options = parser.parse_args()
    fleet.init()
    work = Work("worker", 0, [], 1, [], options.mode, options.steps, 0, options.width, options.batch, vocabulary=10**9)
    model = make_model(work, lambda: OneTable(fleet.nn.Embedding(work.vocabulary, work.dim, initializer=INITIALIZER)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    optimizer = fleet.distributed_optimizer(optimizer, STRATEGIES[options.mode](), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    for step in range(options.steps):
        # Data of its own for each step of each worker, so that ids come that nobody has seen.
        (batch,) = as_tensors(clicks(replace(work, index=step * fleet.worker_num() + fleet.worker_index()), 1))
        time.sleep(options.pause_ms / 1e3)
        optimizer.minimize(model.loss(*batch))
        fleet.report(examples=options.batch)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
