"""A job that trains a table for others to follow, and who follows it: each role of ``fresh.py``, as its argument says.

A trainer notes when a push was applied, which is when ``minimize`` returns; a follower when a forward shows it. Both
read the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from work import REPORT

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.serving.server_source import ServerSource
from fleet.serving.source import Piece, Update

DIM, FILLED_AT_ONCE = 16, 50_000
LAYER = torch.ones(128, 128)


class Model(torch.nn.Module):
    """``mark`` falls by one in each step, so a forward shows which step it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, DIM, initializer="zeros")
        self.mark = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(ids).sum(), self.mark.sum()


def say(event: str, **what: Any) -> None:
    print(REPORT + json.dumps({"event": event, **what}), flush=True)


def heard() -> str:
    return sys.stdin.readline().strip()


def serve(work: dict[str, Any]) -> None:
    fleet.init(role(work, Role.SERVER))
    fleet.init_server()
    fleet.run_server()


def role(work: dict[str, Any], kind: Any) -> UserDefinedRoleMaker:
    return UserDefinedRoleMaker(current_id=work["index"], role=kind, worker_num=1, server_endpoints=work["servers"])


def train(work: dict[str, Any]) -> None:
    """Fill the table, then train as told in each span: for so many seconds, or until there is more to hear, ``hz``
    times a second unless that is 0, and with so much computing in each step."""
    fleet.init(role(work, Role.WORKER))
    model = Model()
    optimizer_class = getattr(torch.optim, work.get("optimizer", "SGD"))
    optimizer = fleet.distributed_optimizer(optimizer_class(model.parameters(), lr=1.0), model=model)
    fleet.init_worker()

    def step(ids: torch.Tensor) -> None:
        rows, mark = model(ids)
        optimizer.minimize(rows * 1e-6 + mark)

    steps = 0
    for start in range(0, work["rows"], FILLED_AT_ONCE):
        step(torch.arange(start, min(work["rows"], start + FILLED_AT_ONCE)))
        steps += 1
    draw = torch.Generator().manual_seed(0)
    say("warm", steps=steps)
    while (line := heard()) and line != "stop":
        seconds, hz, busy_s = map(float, line.split())
        began, cpu, first, times = time.monotonic(), time.process_time(), steps, []
        while (now := time.monotonic()) < began + seconds and not select.select([sys.stdin], [], [], 0)[0]:
            compute(busy_s)
            step(torch.randint(0, work["rows"], (work["batch"],), generator=draw))
            steps += 1
            times.append(time.monotonic())
            if hz:
                time.sleep(max(0.0, began + (steps - first) / hz - time.monotonic()))
        say(
            "done",
            first=first,
            times=times,
            rate=(steps - first) / (now - began),
            cpu_us=(time.process_time() - cpu) / (steps - first) * 1e6,
        )
    fleet.stop_worker()


def compute(seconds: float) -> None:
    """Take so much time of a processor, as the layers of a model do."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch.mm(LAYER, LAYER)


class Counting:
    """Counts the bytes that a source brings."""

    def __init__(self) -> None:
        self.bytes = 0
        original = ServerSource.next

        def next_counted(source: ServerSource, timeout_s: float) -> Update | None:
            update = original(source, timeout_s)
            return None if update is None else replace(update, pieces=self._counted(update.pieces))

        ServerSource.next = next_counted  # type: ignore[method-assign]

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.bytes += sum(values.nbytes for values in piece.dense.values())
            for rows in piece.rows.values():
                self.bytes += rows.ids.nbytes + rows.values.nbytes + rows.gone.nbytes
            yield piece


def follow(work: dict[str, Any]) -> None:
    """Follow, and note when a forward has shown which step, until told to end. A background follower leaves the
    processors to the job, as one on a machine of its own does."""
    if work["background"]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    counting, model, began = Counting(), Model().eval(), time.monotonic()
    follower = fleet.serving.follow(model, work["servers"], poll_s=work["poll_s"])
    say("warm", seconds=time.monotonic() - began, bytes=counting.bytes)
    heard()
    counting.bytes, seen, first = 0, [], follower.version
    ids, until = torch.arange(26), time.monotonic() + work["seconds"]
    while time.monotonic() < until:
        try:
            follower.wait(follower.version + 1, timeout_s=0.5)
        except fleet.errors.FleetError:
            continue
        with torch.no_grad():
            _, mark = model(ids)
        seen.append((time.monotonic(), -int(mark)))
    say("done", seen=seen, bytes=counting.bytes, first=first, last=follower.version)
    heard()
    follower.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    {"server": serve, "worker": train, "follower": follow}[given["role"]](given)
