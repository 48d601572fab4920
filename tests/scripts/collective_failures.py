"""A collective job of which one rank comes to a bad end: RANK SIZE VARIANT WHO, the rest from the environment."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import fleet
from fleet.numeric.compiler import put_off_compiler


def main(variant: str, who: int) -> None:
    fleet.init()
    put_off_compiler()
    mine = fleet.worker_index() == who
    if variant == "absent" and mine:
        return
    model = torch.nn.Linear(4, 2)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    try:
        for step in range(4):
            if step == (0 if variant == "raise" else 2) and mine:  # before torch imports its compiler, or in the midst
                if variant == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if variant == "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if variant == "raise":
                    raise ValueError("a bad batch")
                if variant == "end":
                    sys.exit(0)
                if variant == "slow":
                    time.sleep(8)  # longer than the deadline: its heart beats on
            optimizer.minimize(model(torch.ones(3, 4)).sum())
    finally:
        if not (mine and variant in ("raise", "end")):
            fleet.stop_worker()
    print(f"trained as {fleet.worker_index()} of {fleet.worker_num()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
