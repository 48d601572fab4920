"""The figures of a server: how much it does, who waits for whom, and what the workers' heartbeats bring.

Whoever's request lets another one's be answered is who that one has waited for: of a round, the worker that came last.
The caller holds the server's lock, but for ``heard``, which heartbeats use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fleet.base.clock import Clock
from fleet.errors import ProtocolError
from fleet.ps.server.job import Job
from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.wire.frame import Frame
from fleet.telemetry.figures import LONGEST_NAME, MOST_FIGURES
from fleet.telemetry.process import ProcessFigures


class Statistics:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process = ProcessFigures(clock)
        self._requests = self._sent_bytes = self._received_bytes = 0
        self._updates = 0
        self._busy_s = 0.0
        #: (who waited, for whom) -> seconds
        self._waited: dict[tuple[int, int], float] = defaultdict(float)
        self._figures: dict[int, dict[str, float]] = {}

    @contextmanager
    def request(self, frame: Frame, outbox: Outbox) -> Iterator[None]:
        """Around carrying out one request, whose replies gather in ``outbox``."""
        try:
            with self.busy():
                yield
        finally:
            self._requests += 1
            self._received_bytes += frame.nbytes
            self._sent_bytes += sum(reply.nbytes for _, reply in outbox)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around any work."""
        began = self._clock.now()
        try:
            yield
        finally:
            self._busy_s += self._clock.now() - began

    def updated(self) -> None:
        """What workers have pushed has been applied, a round or one push."""
        self._updates += 1

    def released(self, waiting: Waiting, by: int) -> None:
        """A request that waited can be answered, since worker ``by`` has done something."""
        if waiting.worker != by and not waiting.ahead:
            self._waited[waiting.worker, by] += self._clock.now() - waiting.since

    def heard(self, worker: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a worker."""
        if len(figures) > MOST_FIGURES or any(len(name) > LONGEST_NAME for name in figures):
            raise ProtocolError(
                "a heartbeat tells too much",
                expected=f"up to {MOST_FIGURES} figures, with names of up to {LONGEST_NAME} characters",
                got=len(figures),
            )
        self._figures[worker] = dict(figures)

    def status(
        self, job: Job | None, members: Sequence[tuple[str, str, float | None]], phase: str, task: str
    ) -> dict[str, Any]:
        """All of it, and how the job and its members stand (``Membership.glance``), as JSON has it."""
        parked = [] if job is None else job.all_waiting()
        about: dict[str, Any] = {
            "phase": phase,
            "errand": task,
            "figures": {
                "version": 0 if job is None else job.rounds.gate.version,
                "updates": self._updates,
                "requests": self._requests,
                "busy_seconds": self._busy_s,
                "parked": len(parked),
                "sent_bytes": self._sent_bytes,
                "received_bytes": self._received_bytes,
                **self._process.read(),
            },
        }
        if job is None:
            return about
        longest: dict[int, Waiting] = {}
        for waiting in parked:
            if not waiting.ahead and waiting.since <= longest.get(waiting.worker, waiting).since:
                longest[waiting.worker] = waiting
        staleness = {} if job.shard is None else job.shard.staleness.counts
        now = self._clock.now()
        return {
            **about,
            "job_id": job.job_id,
            "mode": job.plans.current.spec.settings.mode,
            "index": None if job.shard is None else job.shard.server,
            "tables": {} if job.shard is None else {t.spec.name: [len(t), t.nbytes] for t in job.shard.tables},
            "workers": [
                {
                    "standing": standing,
                    "label": label,
                    "heard_seconds": heard_s,
                    "steps": job.steps_of(worker),
                    "staleness": _sum_and_count(staleness.get(worker, {})),
                    "waits": None if worker not in longest else self._described(job, longest[worker], now),
                    "waited": {str(other): s for (waiter, other), s in self._waited.items() if waiter == worker},
                    "figures": self._figures.get(worker, {}),
                }
                for worker, (standing, label, heard_s) in enumerate(members)
            ],
        }

    @staticmethod
    def _described(job: Job, waiting: Waiting, now: float) -> dict[str, Any]:
        return {"what": waiting.what, "seconds": now - waiting.since, "for": list(job.waited_for(waiting))}


def _sum_and_count(histograms: Mapping[str, Mapping[int, int]]) -> tuple[int, int]:
    counts = [(low, count) for histogram in histograms.values() for low, count in histogram.items()]
    return sum(low * count for low, count in counts), sum(count for _, count in counts)
