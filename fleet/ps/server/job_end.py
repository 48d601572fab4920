"""Whether the job is over on this server, and why; and when its process may end, as every worker has been told."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from fleet.base.clock import Clock
from fleet.errors import FleetError
from fleet.ps.server.members import Members

#: For so many heartbeats a failed job's server stays, to tell its workers why.
LINGER_BEATS = 4


class JobEnd:
    def __init__(self, roll: Members, clock: Clock, beat_s: float) -> None:
        self._roll = roll
        self._clock = clock
        self._linger_s = LINGER_BEATS * beat_s
        self._over_at = 0.0
        self._told: set[int] = set()
        self.over = False
        #: why the job ended, if it did not end well
        self.failure: FleetError | None = None
        #: whether this process stops, while the job goes on when it is started again
        self.suspended = False
        #: set when this process may end
        self.ended = threading.Event()

    @property
    def begun(self) -> bool:
        """The job is over, or this process stops."""
        return self.over or self.suspended

    def end(self, failure: FleetError | None = None) -> None:
        self.failure, self.over, self._over_at = failure, True, self._clock.now()

    def suspend(self) -> None:
        self.suspended = True
        self.ended.set()

    def refuse_if_failed(self, worker: int) -> None:
        if self.failure is not None:
            self._told.add(worker)
            raise self.failure.again()

    def tell(self, workers: Iterable[int]) -> None:
        """These workers have heard why the job failed, or that their goodbye has come."""
        self._told.update(workers)

    def end_if_all_told(self) -> None:
        if self.over and self._all_told():
            self.ended.set()

    def _all_told(self) -> bool:
        """A server is not gone before every worker has heard why its job failed, or that its goodbye has come, within a
        few of its heartbeats. One that was killed may have had goodbyes that it did not answer."""
        asking = self._roll.gone() if self.failure is None else self._roll.awaited()
        return self._told.issuperset(asking) or self._clock.now() - self._over_at > self._linger_s

    def tell_again(self) -> None:
        """Nobody has heard anything of this process, which goes on from what another one has kept."""
        self._told.clear()
        self._over_at = self._clock.now()
        self.ended.clear()
