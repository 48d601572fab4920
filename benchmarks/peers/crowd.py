"""Many of Fleet's workers in a process, which compute next to nothing: how much of them a server can take.

Each of a process's ``crowd`` is a worker of its own, with connections, heartbeats and a thread. What it asks for was
made before: the distinct ids of a batch of ctr.py. All that it computes is how far the rows are from one, to which it
moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ours import STRATEGIES
from work import Meter, Work, clicks, my_work

import fleet
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.tensors import WireTensor
from fleet.role_maker import Role, UserDefinedRoleMaker

#: As many dense numbers as the click model of three layers of 32 has.
DENSE = 10_946


def member(work: Work, role: Role, index: int) -> tuple[fleet.Fleet, Any]:
    """A part in the job, and its optimizer."""
    part = fleet.Fleet()
    part.init(UserDefinedRoleMaker(index, role, work.crowd * work.workers, work.servers))
    table = fleet.nn.Embedding(None, work.dim, initializer="zeros")
    dense = torch.nn.Parameter(torch.zeros(DENSE))
    optimizer = torch.optim.SGD([dense, *table.parameters()], lr=0.02)
    return part, part.distributed_optimizer(optimizer, STRATEGIES[work.mode](), model=table)


class Caller:
    """One of the crowd."""

    def __init__(self, work: Work, index: int) -> None:
        self._part, optimizer = member(work, Role.WORKER, index)
        self._part.init_worker()
        floor = optimizer._stepper().floor
        (self._client,) = floor.lines.clients
        self._options = floor.trained.description.options()
        self._version_needed = floor.mode.version_needed
        self._step = 0
        batches = [np.unique(ids) for ids, _, _ in clicks(work)]
        self._batches = [(WireTensor.of(ids), np.empty((ids.size, work.dim), np.float32)) for ids in batches]
        self._dense = WireTensor.of(torch.full((DENSE,), 1e-3))

    def run(self, steps: int) -> list[float]:
        """How far the rows were from one, in each step."""
        return [self._take_step() for _ in range(steps)]

    def _take_step(self) -> float:
        ids, gradients = self._batches[self._step % len(self._batches)]
        pull = pb.Pull(version=self._version_needed(self._step, 0), tables=[0], training=[True])
        rows = self._client.call(Frame(self._client.request(self._step, pull=pull), [ids]), "rows")
        np.subtract(rows.tensors[0].numpy(), 1, out=gradients)
        self._step += 1
        push = pb.Push(
            options=self._options,
            present=b"\1",
            row_tables=[0],
            used_tables=[0],
            steps=1,
            rows_read_at=list(rows.message.table_clocks),
        )
        tensors = [self._dense, ids, WireTensor.of(gradients)]
        self._client.call(Frame(self._client.request(self._step, push=push), tensors), "push")
        return float(np.square(gradients).mean())

    def leave(self) -> None:
        self._part.stop_worker()


def main() -> None:
    work = my_work()
    if work.role == "server":
        part, _ = member(work, Role.SERVER, work.index)
        part.init_server()
        part.run_server()
        return
    with ThreadPoolExecutor(work.crowd) as threads:

        def together(do: Callable[[int], list[float]]) -> list[float]:
            """What each of the crowd has made of the same step, in the mean."""
            return list(np.mean([*threads.map(do, range(work.crowd))], 0))

        first = work.index * work.crowd
        callers = list(threads.map(lambda index: Caller(work, first + index), range(work.crowd)))
        meter = Meter(replace(work, batch=work.batch * work.crowd))
        for steps in (work.warmup, work.steps):
            for distance in together(lambda index, steps=steps: callers[index].run(steps)):
                meter.after_step(distance)
        meter.end()
        list(threads.map(Caller.leave, callers))


if __name__ == "__main__":
    main()
