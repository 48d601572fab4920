"""A job ends, well or with a failure; its server's process ends when every worker has heard of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from fleet.base.clock import Clock
from fleet.base.settings import ProcessSettings
from fleet.errors import FleetError
from fleet.ps.server.job import Job
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Outbox, nobody
from fleet.ps.wire.wire_errors import error_reply
from fleet.telemetry.cause import claim

#: For so many heartbeats a failed job's server stays, to let its workers know why.
LINGER_BEATS = 4


class JobEnd:
    def __init__(
        self,
        members: Members,
        clock: Clock,
        settings: ProcessSettings,
        name: str,
        where: str,
        rows_lost: Callable[[], FleetError | None],
        *,
        is_kept: bool,
    ) -> None:
        """``name`` is this process's name ("server 0"), ``where`` its endpoint; ``rows_lost`` says why rows in files
        cannot be had, if they cannot; ``is_kept`` whether the job is kept on disk."""
        self._rows_lost = rows_lost
        self._is_kept = is_kept
        self._members = members
        self._clock = clock
        self._settings = settings
        self._name = name
        self._where = where
        self._over_at = 0.0
        self._informed: set[int] = set()
        self.over = False
        #: why the job ended, if it did not end well
        self.failure: FleetError | None = None
        #: whether this process stops, while the job goes on when it is started again
        self.suspended = False
        #: why this process stops, if it cannot go on
        self.suspended_by: FleetError | None = None
        #: set when this process may end
        self.ended = threading.Event()

    @property
    def begun(self) -> bool:
        """Say whether the job is over, or this process stops."""
        return self.over or self.suspended

    # ---------------------------------------------------------------- how it ends

    def end(self, failure: FleetError | None = None) -> None:
        self.failure, self.over, self._over_at = failure, True, self._clock.now()
        if failure is not None:
            failure.ends_job = True

    def suspend(self, cause: FleetError | None = None) -> None:
        """Stop the process, but not the job. The first cause stands: a process that cannot go on is stopped as well."""
        self.suspended, self.suspended_by = True, self.suspended_by or cause
        self.ended.set()

    def end_if_rows_are_lost(self, job: Job | None, outbox: Outbox) -> None:
        """End the job, or where it is kept on disk this process, if rows in files cannot be had."""
        lost = self._rows_lost()
        if lost is not None:
            self.fail(lost, job, outbox)

    def fail(self, error: FleetError, job: Job | None, outbox: Outbox, *, by_worker: bool = False) -> None:
        """End the job, and tell everybody who waits now or asks later. If ``by_worker``, a failed worker has said
        itself that it is the cause."""
        if self.over or self.suspended_by is not None:
            return
        lost = self._rows_lost()
        if lost is not None:  # whatever has come of it
            error, by_worker = lost, False
            if self._is_kept:  # all rows can be made anew
                self.suspend(lost)
                outbox.clear()  # who is not answered asks again
                return
        if not by_worker:
            claim(self._settings.observing.record_dir, self._settings.job_id, self._name, str(error))
        self.end(error)
        if job is not None:
            waiting = job.abandon()
            self.inform(each.worker for each in waiting if each.respond is not nobody)
            outbox += [(each.respond, error_reply(error)) for each in waiting]

    # ---------------------------------------------------------------- who has heard of it

    def refuse_if_failed(self, worker: int) -> None:
        """Raise why the job has failed, if it has."""
        if self.failure is not None:
            self._informed.add(worker)
            raise self.failure.again()

    def inform(self, workers: Iterable[int]) -> None:
        """Note that these workers hear why the job failed, or that their goodbye has come."""
        self._informed.update(workers)

    def end_if_all_informed(self) -> None:
        if self.over and self._all_informed():
            self.ended.set()

    def _all_informed(self) -> bool:
        """Say whether every worker has heard why its job failed, or that its goodbye has come, or a few heartbeats have
        passed since the end. A server that was killed may have had goodbyes that it did not answer."""
        asking = self._members.gone() if self.failure is None else self._members.awaited()
        linger_s = LINGER_BEATS * self._settings.heartbeat_s
        return self._informed.issuperset(asking) or self._clock.now() - self._over_at > linger_s

    def inform_again(self) -> None:
        """Go on from what another process has kept, of which nobody has heard anything."""
        self._informed.clear()
        self._over_at = self._clock.now()
        self.ended.clear()
