"""A server counts what it does and who waits for whom, and keeps the figures that workers' heartbeats bring.

If one worker's request lets another one's be answered, the other one has waited for it: in a round, for the worker that
came last. The caller holds the server's lock, except for ``heard``, which heartbeats use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fleet.base.clock import Clock
from fleet.errors import ProtocolError
from fleet.ps.server.asked_ids import AskedIds
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
        self.asked = AskedIds()
        #: who waited -> for whom -> seconds
        self._waited: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._figures: dict[int, dict[str, float]] = {}

    @contextmanager
    def request(self, frame: Frame, outbox: Outbox) -> Iterator[None]:
        """Count a request that is carried out, and the replies that gather in ``outbox``."""
        try:
            with self.busy():
                yield
        finally:
            self._requests += 1
            self._received_bytes += frame.nbytes
            self._sent_bytes += sum(reply.nbytes for _, reply in outbox)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time of any work."""
        began = self._clock.now()
        try:
            yield
        finally:
            self._busy_s += self._clock.now() - began

    def updated(self) -> None:
        """Count an update, a round or one push."""
        self._updates += 1

    def released(self, waiting: Waiting, by: int) -> None:
        """Count how long a request waited until worker ``by`` let it be answered."""
        if waiting.worker != by and not waiting.ahead:
            self._waited[waiting.worker][by] += self._clock.now() - waiting.since

    def heard(self, worker: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a worker."""
        if len(figures) > MOST_FIGURES or any(len(name) > LONGEST_NAME for name in figures):
            raise ProtocolError(
                "a heartbeat tells too much",
                expected=f"up to {MOST_FIGURES} figures, with names of up to {LONGEST_NAME} characters",
                got=len(figures),
            )
        self._figures[worker] = dict(figures)

    def figures(self) -> dict[str, float]:
        """Return this server's counts, and what its process uses."""
        return {
            "updates": self._updates,
            "requests": self._requests,
            "busy_seconds": self._busy_s,
            "asked_rows": self.asked.rows,
            "sent_bytes": self._sent_bytes,
            "received_bytes": self._received_bytes,
            **self._process.read(),
        }

    def figures_of(self, worker: int) -> dict[str, float]:
        """Return what a worker's last heartbeat brought."""
        return self._figures.get(worker, {})

    def waited_by(self, worker: int) -> dict[int, float]:
        """Return for how many seconds a worker has waited for each other one."""
        return dict(self._waited.get(worker, {}))
