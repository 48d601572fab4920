"""Fleet with a table that has seen ``vocabulary`` ids: first all of them are trained, which is the warm-up, then every
step trains as many distinct ids as ``batch`` tells, drawn from all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import torch
from work import Meter, Work, my_work

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker

#: So many ids come into being in one step of the warm-up.
CHUNK = 200_000


def filling(work: Work) -> Iterator[torch.Tensor]:
    for start in range(0, work.vocabulary, CHUNK):
        yield torch.arange(start, min(start + CHUNK, work.vocabulary))


def drawing(work: Work) -> Iterator[torch.Tensor]:
    draw = np.random.default_rng(0)
    while True:
        few = np.unique(draw.integers(0, work.vocabulary, 2 * work.batch))
        yield torch.from_numpy(draw.permutation(few)[: work.batch])


def main() -> None:
    work = my_work()
    role = Role.SERVER if work.role == "server" else Role.WORKER
    fleet.init(UserDefinedRoleMaker(work.index, role, work.workers, work.servers))
    table = fleet.nn.Embedding(None, work.dim, initializer="zeros")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.25), model=table)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    work.warmup += -(-work.vocabulary // CHUNK)
    meter = Meter(work)
    for ids in islice(chain(filling(work), drawing(work)), work.warmup + work.steps):
        error = table(ids) - 1  # the first time a row is trained it goes half the way
        optimizer.minimize(error.square().sum())
        meter.after_step(error.detach().square().mean())
    meter.end()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
