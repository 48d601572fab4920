"""What a server tells of itself and its job: to people who look on, to its log, to a worker that asks for a summary."""

from __future__ import annotations

import json
from typing import Any

from fleet.ps.server.context import Floor
from fleet.ps.server.pending import Arrival
from fleet.ps.wire import fleet_pb2 as pb

_MOST_NAMED = 8


class Status:
    def __init__(self, floor: Floor, worker_num: int | None) -> None:
        """``worker_num`` is the number of workers this process was told of, where it was told."""
        self._floor = floor
        self._worker_num = worker_num

    def status(self) -> dict[str, Any]:
        """How the job does, as far as this server sees it, for whoever shows it."""
        floor = self._floor
        with floor.lock:
            glance = floor.roll.glance(floor.clock.now())
            known = floor.ledger.status(floor.job, glance, self._phase(), self._errand())
            return {"server": str(floor.endpoint), **known}

    def absent(self) -> str:
        """Who has not come yet, in words; nothing once all have. It takes no part in the lock, as heartbeats ask it."""
        roll = self._floor.roll
        if roll.is_empty and self._worker_num is None:
            return "its workers"
        absent = tuple(range(self._worker_num or 0)) if roll.is_empty else roll.absent()
        named = ", ".join(f"worker {worker}" for worker in absent[:_MOST_NAMED])
        return named if len(absent) <= _MOST_NAMED else f"{named} and {len(absent) - _MOST_NAMED} more"

    def explain(self) -> str:
        """What this server is waiting for, in words."""
        floor = self._floor
        with floor.lock:
            job, now = floor.job, floor.clock.now()
            if job is None:
                return "waiting for the first worker's hello"
            waits = job.hall.lacking()
            if job.growing or not job.initialized:
                waits.append(("initial values", (0,)))
            elif job.pushed or not waits:
                step, lacking = job.gate.lacking()
                waits.append((f"round {step}", lacking))
            return "; ".join(
                f"{what}: waiting for " + ", ".join(floor.roll.describe(worker, now) for worker in lacking)
                for what, lacking in waits
            )

    def survey(self, arrival: Arrival) -> None:
        shard, job = self._floor.shard(), self._floor.running()
        about = {
            "steps": {worker: job.steps_of(worker) for worker in sorted(job.steps)},
            "tables": {table.spec.name: {"rows": len(table), "bytes": table.nbytes} for table in shard.tables},
            "staleness": shard.staleness.counts,
        }
        arrival.answer(pb.Reply(version=job.gate.version, about=json.dumps(about)))

    def _phase(self) -> str:
        job, ending = self._floor.job, self._floor.ending
        if ending.suspended:
            return "stopped, to go on when it is started again"
        if ending.over:
            return "over" if ending.failure is None else f"failed: {in_brief(str(ending.failure))}"
        if job is None:
            return "waiting for the first worker"
        if not job.initialized:
            return "waiting for initial values"
        return "training"

    def _errand(self) -> str:
        """What it does beside the training, if anything: the workers may wait for it, or go on."""
        job = self._floor.job
        return "" if job is None or job.errand is None or job.errand.is_done else on_one_line(job.errand.what)


def in_brief(reason: str) -> str:
    """Of a traceback that it ends with, the last line."""
    first, *others = reason.strip().splitlines() or [""]
    head = first.partition("Traceback (most recent call last):")[0] if others else first
    return on_one_line(f"{head}{others[-1].strip() if others else ''}")[:500]


def on_one_line(text: str) -> str:
    """What a stranger says, so that it cannot pass for lines of this server's log."""
    return "".join(each if each.isprintable() else "?" for each in text)
