"""A click model with many rows, which is told while it runs how many steps to take, and on which ids.

First every row is made. Then each line of input is answered with what it took: "zipf 100" are a hundred steps with ids
that are Zipf-distributed and lie anywhere, "uniform 100" the same with any ids. A line without a word ends it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from ours import STRATEGIES, asked, make_rows
from torch_model import ClickModel
from work import FEATURES, REPORT, SLOTS, Work, my_work

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker

EXPONENT = 1.05
FILLED = 50_000
Batch = tuple[torch.Tensor, ...]


def main() -> None:
    work = my_work()
    role = Role.SERVER if work.role == "server" else Role.WORKER
    fleet.init(UserDefinedRoleMaker(work.index, role, work.workers, work.servers))
    mode, *extras = work.mode.split("+")
    model = ClickModel(work, make_rows(work, extras))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=work.rate)
    optimizer = fleet.distributed_optimizer(optimizer, STRATEGIES[mode](), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()

    def took(batches: list[Batch]) -> dict[str, float]:
        began, cpu_began = time.perf_counter(), time.process_time()
        stream: Iterator[Batch] = iter(batches)
        if "prefetch" in extras:
            stream = fleet.prefetch(stream, lambda batch: asked(model.rows, batch[0]))
        for batch in stream:
            optimizer.minimize(model.loss(*batch))
        fleet.barrier_worker()  # what is still on its way counts
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}

    for start in range(0, work.vocabulary, FILLED):
        ids = torch.arange(start, min(work.vocabulary, start + FILLED))
        optimizer.minimize(model.rows.table(ids).sum() * 0.0)
    fleet.barrier_worker()
    report("ready")
    draw = np.random.default_rng(3)
    for line in sys.stdin:
        if not line.split():
            break
        trace, steps = line.split()
        batches = [made(work, trace, draw) for _ in range(int(steps))]
        ids = sum(torch.unique(batch[0]).numel() for batch in batches)
        report("done", ids=ids, **took(batches))
    fleet.stop_worker()


def made(work: Work, trace: str, draw: np.random.Generator) -> Batch:
    """Those are clicked whose numbers add up to more than the median's."""
    random, rows = draw.random((work.batch, SLOTS)), work.vocabulary
    if trace == "zipf":
        power = 1 - EXPONENT
        ranks = (1 + random * ((rows + 1.0) ** power - 1)) ** (1 / power) - 1
    else:
        ranks = random * rows
    # Steps of about the golden ratio lead anywhere, and the same id from each rank.
    step = next(each for each in range(int(rows * 0.6180339887), rows) if np.gcd(each, rows) == 1)
    ids = ranks.astype(np.int64).clip(0, rows - 1) * step % rows
    numbers = draw.random((work.batch, FEATURES)).astype("float32")
    scores = numbers.sum(1)
    return tuple(map(torch.from_numpy, (ids, numbers, (scores > np.median(scores)).astype("int64"))))


def report(event: str, **what: float) -> None:
    sys.stdout.write("\n" + REPORT + json.dumps({"event": event, **what}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
