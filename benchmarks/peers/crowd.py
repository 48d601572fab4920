"""Many of Fleet's workers in a process, which compute next to nothing: how much of them a server can take.

Each of a process's ``crowd`` is a worker of its own, with connections and heartbeats. What it asks for was made before:
the distinct ids of a batch of ctr.py, in every step of another batch than the others'. All that it computes is how far
the rows are from one, to which it moves them.

All of a process have their requests under way at the same time, but share a thread: with one each they would take
more of two cores by waiting for each other's interpreter than the server that is to be measured.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ours import STRATEGIES
from work import Meter, Work, clicks, my_work

import fleet
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.role_maker import Role, UserDefinedRoleMaker

#: No two of so many workers ask for the same ids in a step; in as many steps each of them has asked for all.
BATCHES = 64

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

    def __init__(self, work: Work, index: int, batches: list[WireTensor]) -> None:
        """``batches`` are the ids of all."""
        self._part, optimizer = member(work, Role.WORKER, index)
        self._part.init_worker()
        worker = optimizer._stepper()
        (self._client,) = worker.connections.by_server
        self._options = worker.trained.description.options()
        self._version_needed = worker.policy.version_needed
        self._step = 0
        self._batches = batches[index % len(batches) :] + batches[: index % len(batches)]
        self._dense = WireTensor.of(torch.full((DENSE,), 1e-3))

    def ask(self) -> None:
        self._ids = self._batches[self._step % len(self._batches)]
        count = self._ids.array.size
        pull = pb.Pull(version=self._version_needed(self._step), tables=[0], training=[True], counts=[count])
        self._asked = self._client.start(Frame(self._client.request(self._step, pull=pull), [self._ids]), "rows")

    def push(self) -> float:
        """Push the gradients of what was asked for; how far the rows were from one."""
        rows = self._asked.result()
        gradients = rows.tensors[0].numpy()
        gradients -= 1
        self._step += 1
        push = pb.Push(
            options=self._options,
            present=b"\1",
            row_tables=[0],
            used_tables=[0],
            steps=1,
            rows_read_at=list(rows.message.table_clocks),
            row_counts=[self._ids.array.size],
        )
        tensors = [self._dense, self._ids, WireTensor.of(gradients)]
        self._pushed = self._client.start(Frame(self._client.request(self._step, push=push), tensors), "push")
        return float(np.square(gradients).mean())

    def finish(self) -> None:
        self._pushed.result()

    def leave(self) -> None:
        self._part.stop_worker()


def serve(work: Work) -> None:
    part, _ = member(work, Role.SERVER, work.index)
    part.init_server()
    part.run_server()


def main() -> None:
    work = my_work()
    if work.role == "server":
        serve(work)
        return
    first = work.index * work.crowd
    batches = [WireTensor.of(np.unique(ids)) for ids, _, _ in clicks(work, BATCHES)]
    # To join and to leave each waits for the others.
    with ThreadPoolExecutor(work.crowd) as threads:
        turns = list(threads.map(lambda index: Caller(work, first + index, batches), range(work.crowd)))
        meter = Meter(replace(work, batch=work.batch * work.crowd))
        for _ in range(work.warmup + work.steps):
            meter.after_step(together(turns))
        meter.end()
        list(threads.map(Caller.leave, turns))


def together(turns: list[Caller]) -> float:
    """A step of all of them; how far the rows were from one in the mean."""
    for caller in turns:
        caller.ask()
    distances = [caller.push() for caller in turns]
    for caller in turns:
        caller.finish()
    return float(np.mean(distances))


if __name__ == "__main__":
    main()
