"""A server says how it and its job do: to people who look on, to its log, to a worker that asks for a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fleet.base.clock import Clock
from fleet.ps.server.asked_ids import hottest
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.statistics import Statistics
from fleet.ps.server.step_requests import told_change
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb

_MOST_NAMED = 8


class Status:
    def __init__(
        self,
        where: str,
        lock: AbstractContextManager[object],
        clock: Clock,
        end: JobEnd,
        members: Members,
        statistics: Statistics,
        found_job: Callable[[], Job | None],
        move: Callable[[Job | None], str],
        wanted: Callable[[], Sequence[str]],
        worker_num: int | None,
    ) -> None:
        """``found_job`` finds the job, ``move`` says what is done for a move and ``wanted`` where to, all under the
        lock; ``worker_num`` is the number of workers this process was told of, where it was told."""
        self._where = where
        self._lock = lock
        self._clock = clock
        self._end = end
        self._members = members
        self._statistics = statistics
        self._found_job = found_job
        self._move = move
        self._wanted = wanted
        self._worker_num = worker_num

    def status(self) -> dict[str, Any]:
        """Return how the job does, as far as this server sees it, to be shown."""
        with self._lock:
            job = self._found_job()
            waiting = [] if job is None else job.all_waiting()
            about: dict[str, Any] = {
                "server": self._where,
                "phase": self._phase(job),
                "errand": self._move(job) or _task_of(job),
                "wanted": self._wanted(),
                "moved_to": job.moves.servers if job is not None and job.moves.made else (),
                "figures": {
                    "version": 0 if job is None else job.rounds.gate.version,
                    "parked": len(waiting),
                    "followers": 0 if job is None else len(job.feed.followers),
                    "followers_behind": 0 if job is None else job.feed.lag(job.version),
                    **self._statistics.figures(),
                },
            }
            if job is None:
                return about
            about |= self._status_of(job, waiting)
            names, kept = [table.name for table in job.plans.current.spec.tables], self._statistics.asked.kept()
        # Without the lock, as this takes longer than all of the above.
        return {**about, "hot": [(names[table], id, share) for table, id, share in hottest(kept)]}

    def _status_of(self, job: Job, waiting: Sequence[Waiting]) -> dict[str, Any]:
        """Return the job's part of the status, and how its members stand."""
        longest: dict[int, Waiting] = {}
        for each in waiting:
            if not each.ahead and each.since <= longest.get(each.worker, each).since:
                longest[each.worker] = each
        shard, statistics, now = job.shard, self._statistics, self._clock.now()
        staleness = {} if shard is None else shard.staleness.counts
        return {
            "job_id": job.job_id,
            "mode": job.plans.current.spec.settings.mode,
            "index": None if shard is None else shard.server,
            "tables": {} if shard is None else _tables_of(shard),
            "pace": "".join(map(told_change, job.rounds.gate.changes[-1:])),
            "workers": [
                {
                    "worker": worker,
                    "standing": standing,
                    "label": label,
                    "heard_seconds": heard_s,
                    "steps": job.steps_of(worker),
                    "staleness": _sum_and_count(staleness.get(worker, {})),
                    "late": 0 if shard is None else shard.staleness.late[worker],
                    "waits": None if worker not in longest else _described(job, longest[worker], now),
                    "waited": {str(other): s for other, s in statistics.waited_by(worker).items()},
                    "figures": statistics.figures_of(worker),
                }
                for worker, standing, label, heard_s in self._members.glance(now)
            ],
        }

    def absent(self) -> str:
        """Return in words which workers have not come yet; nothing once all have. It does without the lock, as
        heartbeats ask for it."""
        members = self._members
        if members.is_empty and self._worker_num is None:
            return "its workers"
        absent = tuple(range(self._worker_num or 0)) if members.is_empty else members.absent()
        named = ", ".join(f"worker {worker}" for worker in absent[:_MOST_NAMED])
        return named if len(absent) <= _MOST_NAMED else f"{named} and {len(absent) - _MOST_NAMED} more"

    def explain(self) -> str:
        """Return in words what this server is waiting for."""
        with self._lock:
            job, now = self._found_job(), self._clock.now()
            if job is None:
                return "waiting for the first worker's hello"
            waits = job.reductions.lacking()
            if job.plans.growing or not job.initialized:
                waits.append(("initial values", (0,)))
            elif job.rounds.pushed or not waits:
                step, lacking = job.rounds.gate.lacking()
                waits.append((f"round {step}", lacking))
            return "; ".join(
                f"{what}: waiting for " + ", ".join(self._members.describe(worker, now) for worker in lacking)
                for what, lacking in waits
            )

    def survey(self, job: Job, arrival: Arrival) -> None:
        """Answer with what a worker's summary shows of this server."""
        shard = job.held()
        about = {
            "steps": {worker: job.steps_of(worker) for worker in sorted(job.progress.steps)},
            "tables": _tables_of(shard),
            "staleness": shard.staleness.counts,
            "changes": [(each.version, each.together, each.gain) for each in job.rounds.gate.changes],
            "late": dict(sorted(shard.staleness.late.items())),
        }
        arrival.answer(pb.Reply(version=job.rounds.gate.version, about=json.dumps(about)))

    def _phase(self, job: Job | None) -> str:
        if self._end.suspended:
            return "stopped, to go on when it is started again"
        if self._end.over:
            return "over" if self._end.failure is None else f"failed: {in_brief(str(self._end.failure))}"
        if job is None:
            return "waiting for the first worker"
        if not job.initialized:
            return "waiting for initial values"
        return "training"


def _tables_of(shard: Shard) -> dict[str, dict[str, int]]:
    return {table.spec.name: table.figures() for table in shard.tables}


def _described(job: Job, waiting: Waiting, now: float) -> dict[str, Any]:
    return {"what": waiting.what, "seconds": now - waiting.since, "for": list(job.waited_for(waiting))}


def _sum_and_count(histograms: Mapping[str, Mapping[int, int]]) -> tuple[int, int]:
    counts = [(low, count) for histogram in histograms.values() for low, count in histogram.items()]
    return sum(low * count for low, count in counts), sum(count for _, count in counts)


def _task_of(job: Job | None) -> str:
    """Return what is done beside the training, if anything: the workers may wait for it, or go on."""
    task = None if job is None else job.background.task
    return "" if task is None or task.is_done else on_one_line(task.what)


def in_brief(reason: str) -> str:
    """Return the last line of a reason that ends with a traceback."""
    first, *others = reason.strip().splitlines() or [""]
    head = first.partition("Traceback (most recent call last):")[0] if others else first
    return on_one_line(f"{head}{others[-1].strip() if others else ''}")[:500]


def on_one_line(text: str) -> str:
    """Return what a stranger says in a form that cannot pass for lines of this server's log."""
    return "".join(each if each.isprintable() else "?" for each in text)
