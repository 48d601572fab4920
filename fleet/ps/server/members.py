"""Every thread of a server asks here who is in the job: the membership has a lock of its own.

Heartbeats take only this lock, so that a long round is never mistaken for a dead server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import IdentityError, ServerLostError
from fleet.plan.specs import PlanSettings
from fleet.ps.consistency.membership import Lost, MemberRecord, Membership, NeverCame, Standing

#: A worker that is silent for so many heartbeats may be replaced by another process under its index.
QUIET_BEATS = 3
#: So many that were turned away before the first one was let in are remembered.
MOST_REFUSALS = 16


class Members:
    def __init__(self, endpoint: Endpoint, settings: ProcessSettings, clock: Clock) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        #: from the first hello on
        self._members: Membership | None = None
        #: until then, by worker: why it was turned away
        self._refusals: dict[int, str] = {}

    # ---------------------------------------------------------------- who comes, and who is here

    def admit(self, request: Any, label: str, settings: PlanSettings, *, surely: bool) -> Standing | None:
        """Let in a worker that says hello, or refuse it, as ``Membership.hello`` does; the first one begins the job."""
        now = self._clock.now()
        with self._lock:
            members = self._members or self._new_members(settings)
            before = members.hello(request.worker, request.incarnation, label, now, surely=surely)
            if self._members is None:
                for worker, reason in self._refusals.items():
                    members.refused(worker, reason)
            self._members = members
        return before

    def refused(self, worker: int, reason: str) -> None:
        with self._lock:
            if self._members is not None:
                self._members.refused(worker, reason)
            elif worker in self._refusals or len(self._refusals) < MOST_REFUSALS:
                self._refusals[worker] = reason

    def succeeds(self, worker: int, incarnation: int) -> Standing | None:
        with self._lock:
            return None if self._members is None else self._members.succeeds(worker, incarnation)

    def has(self, request: Any) -> bool:
        """Say whether this very process has been let in, and still is."""
        with self._lock:
            return self._members is not None and self._members.has(request.worker, request.incarnation)

    def knows(self, incarnation: int) -> bool:
        """Say whether this process is or was in the job."""
        with self._lock:
            return self._members is not None and self._members.knows(incarnation)

    @property
    def one_that_was_here(self) -> int:
        """Return the incarnation of a process that is or was in the job; 0 if there was none."""
        with self._lock:
            return 0 if self._members is None else self._members.one_that_was_here

    def has_met(self, worker: int) -> bool:
        """Say whether a worker has come to this process, and is here as far as is known."""
        with self._lock:
            return self._members is not None and self._members.met(worker)

    def is_stranger(self, worker: int) -> bool:
        """Say whether there is a job, and no such worker in it."""
        with self._lock:
            return self._members is not None and self._members.standing(worker) is None

    def check(self, request: Any, *, parting: bool) -> None:
        """Note a sign of life, or refuse a process that is not in the job; one that is ``parting`` may say so twice."""
        with self._lock:
            members = self._members
            if members is not None and members.heard(request.worker, request.incarnation, self._clock.now()):
                return
            standing = None if members is None else members.standing(request.worker)
        if parting and standing is Standing.LEFT:
            return
        if standing is None or standing is Standing.EXPECTED:
            raise ServerLostError(
                "this server does not know the worker's job: it was restarted and has lost its state",
                where=str(self._endpoint),
                got=f"a request of worker {request.worker}",
                todo="Start the job again, from its last checkpoint if there is one (init_server(model_dir)).",
            )
        raise IdentityError(
            f"worker {request.worker} is no longer part of this job",
            where=str(self._endpoint),
            got=f"it has {'left' if standing is Standing.LEFT else 'been given up on or was replaced'}",
        )

    # ---------------------------------------------------------------- who goes

    def leave(self, worker: int) -> bool:
        """Let a worker go that says goodbye; return False if it had gone before."""
        with self._lock:
            members = self._begun
            if members.standing(worker) is Standing.LEFT:
                return False
            members.leave(worker)
            return True

    def lose(self, worker: int) -> None:
        with self._lock:
            self._begun.lose(worker)

    def tick(self, now: float) -> list[Lost | NeverCame]:
        with self._lock:
            return [] if self._members is None else self._members.tick(now)

    # ---------------------------------------------------------------- how all of them stand

    @property
    def is_empty(self) -> bool:
        """Say whether nobody has said hello yet."""
        with self._lock:
            return self._members is None

    @property
    def refusals(self) -> list[str]:
        """Return why each worker was turned away that came while nobody had been let in."""
        with self._lock:
            return list(self._refusals.values())

    @property
    def is_finished(self) -> bool:
        with self._lock:
            return self._begun.finished

    def awaited(self) -> tuple[int, ...]:
        with self._lock:
            return () if self._members is None else self._members.awaited()

    def absent(self) -> tuple[int, ...]:
        with self._lock:
            return () if self._members is None else self._members.absent()

    def gone(self) -> tuple[int, ...]:
        with self._lock:
            return () if self._members is None else self._members.gone()

    def describe(self, worker: int, now: float) -> str:
        with self._lock:
            return self._begun.describe(worker, now)

    def glance(self, now: float) -> list[tuple[int, str, str, float | None]]:
        with self._lock:
            return [] if self._members is None else self._members.glance(now)

    def dump(self) -> list[MemberRecord]:
        with self._lock:
            return self._begun.dump()

    def restore(self, settings: PlanSettings, records: Iterable[MemberRecord]) -> None:
        with self._lock:
            self._members = self._new_members(settings)
            self._members.restore(records, self._clock.now())

    def surmise(self) -> None:
        """Take everybody from an earlier process: this one has heard nobody yet."""
        with self._lock:
            if self._members is not None:
                self._members.surmise(self._clock.now())

    @property
    def _begun(self) -> Membership:
        assert self._members is not None, "nobody asks for members before there is one"
        return self._members

    def _new_members(self, settings: PlanSettings) -> Membership:
        return Membership(
            settings.worker_num,
            silence_s=self._settings.rpc_deadline_s,
            quiet_s=QUIET_BEATS * self._settings.heartbeat_s,
            startup_s=self._settings.startup_deadline_s,
            now=self._clock.now(),
            elastic=settings.elastic,
        )
