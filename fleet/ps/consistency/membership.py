"""Decides who is in the job: a pure function of hellos, heartbeats, goodbyes and the time.

Every worker that the job begins with is expected from the start; in an elastic job others may come as well. A worker
becomes live with its hello, and is out once it said goodbye, was silent for longer than the deadline, or the whole job
failed because it never came.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from fleet.errors import DuplicateWorkerError, FleetError, IdentityError, ServerBusyError


class Standing(enum.Enum):
    EXPECTED = "expected"
    LIVE = "live"
    LEFT = "left"
    LOST = "lost"


@dataclass
class Member:
    """Holds what is known of one worker; ``label`` says where it runs ("host:pid")."""

    standing: Standing = Standing.EXPECTED
    incarnation: int = 0
    label: str = ""
    last_heard: float = 0.0
    refusal: str = ""
    #: It came to an earlier process of this server, and has not been heard by this one.
    surmised: bool = False


#: A job goes over to other servers less often than this. Incarnations are drawn from 63 bits: others are further away.
_MOST_MOVES = 1 << 20
#: Of a worker: its index, how it stands, its incarnation and its label.
MemberRecord = tuple[int, str, int, str]


@dataclass(frozen=True)
class Lost:
    """Says that a worker was silent for too long."""

    worker: int
    silent_s: float


@dataclass(frozen=True)
class NeverCame:
    """Says that the start-up deadline passed and these workers have not said hello."""

    workers: tuple[int, ...]
    waited_s: float
    refusals: tuple[str, ...]


class Membership:
    def __init__(
        self,
        worker_num: int,
        *,
        silence_s: float,
        quiet_s: float,
        startup_s: float,
        now: float,
        elastic: bool = False,
    ) -> None:
        """``silence_s`` is the silence after which a worker is given up on, ``quiet_s`` that after which it may be
        replaced. In an ``elastic`` job anybody may take a place that was never taken, or whose worker has left."""
        self._elastic = elastic
        self._members = {worker: Member() for worker in range(worker_num)}
        #: who has one of some standings, until somebody's changes: each request asks for them
        self._selected: dict[tuple[Standing, ...], tuple[int, ...]] = {}
        self._quiet_s = quiet_s
        self._silence_s = silence_s
        self._startup_s = startup_s
        self._started_at = now

    @property
    def finished(self) -> bool:
        """Say whether nobody is left to wait for."""
        return all(m.standing in (Standing.LEFT, Standing.LOST) for m in self._members.values())

    def hello(self, worker: int, incarnation: int, label: str, now: float, *, surely: bool = False) -> Standing | None:
        """Admit a worker, or say who holds its place. Repeating a hello makes no second worker. If it takes the place
        of a process that has fallen silent, whose requests count no more, return how that one stood; for a worker that
        joins an elastic job, return that its place was left. ``surely`` says that it was admitted once."""
        member = self._members.get(worker, Member(Standing.LEFT) if self._elastic else None)
        if member is None:
            raise IdentityError(
                f"worker {worker} is not part of this job",
                expected=f"an index from 0 to {len(self._members) - 1}",
                todo="Start every process with the same number of workers.",
            )
        if member.standing is Standing.LIVE and member.incarnation == incarnation:
            member.last_heard, member.surmised = now, False
            return None
        is_silent = member.standing is Standing.LIVE and (surely or now - member.last_heard > self._quiet_s)
        if member.standing is not Standing.EXPECTED and not is_silent and not self._is_free(member, incarnation):
            raise self._taken(worker, member, label, now)
        self._members[worker] = Member(Standing.LIVE, incarnation, label, now)
        self._selected.clear()
        return None if member.standing is Standing.EXPECTED else member.standing

    def _is_free(self, member: Member, incarnation: int) -> bool:
        """Say whether a place is free because its process was given up on, or has left a job in which others may
        follow; that process itself stays out, as does everybody when the job is over."""
        if self.finished or member.incarnation == incarnation:
            return False
        if member.standing is Standing.LOST:
            return member.incarnation != 0
        return self._elastic and member.standing is Standing.LEFT

    def refused(self, worker: int, reason: str) -> None:
        """Remember why a worker was turned away, to report it if the worker never comes back better."""
        if worker in self._members:
            self._members[worker].refusal = reason

    def succeeds(self, worker: int, incarnation: int) -> Standing | None:
        """Return how the process stands that had this place, if another process takes it now; otherwise None."""
        member = self._members.get(worker)
        if member is None or member.standing is Standing.EXPECTED or member.incarnation == incarnation:
            return None
        return member.standing

    def has(self, worker: int, incarnation: int) -> bool:
        """Say whether this process is a live member."""
        member = self._members.get(worker)
        return member is not None and member.incarnation == incarnation and member.standing is Standing.LIVE

    def knows(self, incarnation: int) -> bool:
        """Say whether this process was let in at any time, and none has its place since. Whoever goes over to other
        servers has one more there, so it may be known here by a number close by."""
        known = [each.incarnation for each in self._members.values() if each.incarnation]
        return bool(incarnation) and any(abs(incarnation - each) < _MOST_MOVES for each in known)

    @property
    def one_that_was_here(self) -> int:
        """Return the incarnation of a process that was let in; 0 if none was."""
        return max((each.incarnation for each in self._members.values()), default=0)

    def met(self, worker: int) -> bool:
        """Say whether a worker has come to this process, and is not only surmised to be here."""
        member = self._members.get(worker)
        return member is not None and member.standing is Standing.LIVE and not member.surmised

    def heard(self, worker: int, incarnation: int, now: float) -> bool:
        """Note a sign of life; return False if this process is not a live member."""
        if not self.has(worker, incarnation):
            return False
        member = self._members[worker]
        member.last_heard, member.surmised = now, False
        return True

    def dump(self) -> list[MemberRecord]:
        return [(worker, each.standing.value, each.incarnation, each.label) for worker, each in self._members.items()]

    def restore(self, records: Iterable[MemberRecord], now: float) -> None:
        """Become the membership whose records these are; every worker counts as just heard of."""
        for worker, standing, incarnation, label in records:
            self._members[worker] = Member(Standing(standing), incarnation, label, now)
        self._selected.clear()

    def surmise(self, now: float) -> None:
        """Take the workers that an earlier process knew for present; from now on it shows which of them still are."""
        for member in self._members.values():
            member.last_heard, member.surmised = now, member.standing is Standing.LIVE

    def leave(self, worker: int) -> None:
        self._stands(worker, Standing.LEFT)

    def lose(self, worker: int) -> None:
        self._stands(worker, Standing.LOST)

    def awaited(self) -> tuple[int, ...]:
        """Return the workers that are here or may still come."""
        return self._select(Standing.LIVE, Standing.EXPECTED)

    def absent(self) -> tuple[int, ...]:
        """Return the workers that have not come yet."""
        return self._select(Standing.EXPECTED)

    def gone(self) -> tuple[int, ...]:
        """Return the workers that have said goodbye."""
        return self._select(Standing.LEFT)

    def standing(self, worker: int) -> Standing | None:
        member = self._members.get(worker)
        return None if member is None else member.standing

    def describe(self, worker: int, now: float) -> str:
        """Describe a worker, to explain a wait: "worker 1 (host:4711), silent for 3.2 s"."""
        member = self._members[worker]
        if member.standing is Standing.LIVE:
            return f"worker {worker} ({member.label}), last heard {now - member.last_heard:.1f} s ago"
        return f"worker {worker}, {'not there yet' if member.standing is Standing.EXPECTED else member.standing.value}"

    def glance(self, now: float) -> list[tuple[int, str, str, float | None]]:
        """Return every worker, how it stands, its label, and for how long it has not been heard of, if it ever was."""
        return [
            (worker, each.standing.value, each.label, now - each.last_heard if each.label else None)
            for worker, each in sorted(self._members.items())
        ]

    def tick(self, now: float) -> list[Lost | NeverCame]:
        """Return what the passing of time alone has decided since the last call."""
        effects: list[Lost | NeverCame] = []
        for worker, member in self._members.items():
            if member.standing is Standing.LIVE and now - member.last_heard > self._silence_s:
                self._stands(worker, Standing.LOST)
                effects.append(Lost(worker, now - member.last_heard))
        waited_s = now - self._started_at
        absent = self.absent()
        if absent and waited_s > self._startup_s:
            refusals = tuple(self._members[w].refusal for w in absent if self._members[w].refusal)
            for worker in absent:
                self._stands(worker, Standing.LOST)
            effects.append(NeverCame(absent, waited_s, refusals))
        return effects

    def _stands(self, worker: int, standing: Standing) -> None:
        self._members[worker].standing = standing
        self._selected.clear()

    def _select(self, *wanted: Standing) -> tuple[int, ...]:
        found = self._selected.get(wanted)
        if found is None:
            found = tuple(worker for worker, member in self._members.items() if member.standing in wanted)
            self._selected[wanted] = found
        return found

    def _taken(self, worker: int, member: Member, label: str, now: float) -> FleetError:
        if member.surmised:
            return ServerBusyError(
                f"this server was started again and does not know yet whether worker {worker} still is",
                where=f"{member.label}, not heard in {now - member.last_heard:.1f} s",
                got=f"a second one at {label}",
                todo=f"Wait: after {self._quiet_s:g} s of silence its place is free.",
            )
        if member.standing is Standing.LIVE:
            return DuplicateWorkerError(
                f"there is already a worker {worker}",
                where=f"{member.label}, last heard {now - member.last_heard:.1f} s ago",
                got=f"a second one at {label}",
                todo="Give every worker its own index, and let no two jobs share a server.",
            )
        if self._elastic and self.finished:
            return IdentityError(
                f"worker {worker} comes too late",
                where=label,
                got="every worker of this job has left or was given up on",
                todo="Start a new job: servers and workers.",
            )
        how = "left this job" if member.standing is Standing.LEFT else "been given up on"
        return IdentityError(
            f"worker {worker} has already {how}",
            where=label,
            todo="Start a new job: servers and workers.",
        )
