"""Requests are handled or wait to be answered, and replies leave once the server's lock is released."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import FleetError
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond

#: Replies to send once the lock is released.
Outbox = list[tuple[Respond, Frame]]


def nobody(_: Frame) -> None:
    """Drop the answer to a request that is done over: its sender has not heard of this process yet, and asks again."""


def cannot_answer(error: Exception) -> FleetError:
    """Return what somebody is told whose answer cannot be made."""
    return FleetError("the server could not make an answer", got=repr(error), todo=way_out(error))


def way_out(error: Exception) -> str | None:
    """Return what to do about an error of the server's, if that is known."""
    return "Give the job more servers, or this one more memory." if isinstance(error, MemoryError) else None


@dataclass(frozen=True)
class Arrival:
    """Holds a request that is being handled; ``outbox`` takes its reply, and those of others that it makes possible."""

    frame: Frame
    respond: Respond
    outbox: Outbox

    @property
    def request(self) -> Any:
        return self.frame.message

    @property
    def worker(self) -> int:
        worker: int = self.frame.message.worker
        return worker

    @property
    def told(self) -> tuple[int, int]:
        """Return how far the worker is in its group, as it says."""
        return self.frame.message.group, self.frame.message.together

    @property
    def tensors(self) -> Sequence[WireTensor]:
        return self.frame.tensors

    def answer(self, reply: pb.Reply, tensors: Sequence[WireTensor] = ()) -> None:
        self.outbox.append((self.respond, Frame(reply, [*tensors])))


#: So many repetitions of a request are answered, the last ones.
_MOST_REPETITIONS = 16


@dataclass(frozen=True)
class _RespondToAll:
    responds: tuple[Respond, ...]

    def __call__(self, frame: Frame) -> None:
        for respond in self.responds:
            respond(frame)


@dataclass(frozen=True)
class Waiting:
    """Holds a request that cannot be answered yet: who asked, for what and when, and how to make the answer when its
    time has come."""

    worker: int
    what: str
    since: float
    respond: Respond
    answer: Callable[[], Frame]
    gathering: bool = False
    beside: bool = False  #: another thread of the worker trains on meanwhile
    ahead: bool = False  #: the worker does not wait for it yet
    has_rows: bool = False  #: the answer
    version: int = 0  #: which it needs
    nbytes: int = 0  #: what it keeps in memory until then
    told: tuple[int, int] = (0, 0)  #: the group that the worker is in, and how much that has done together
    handing_out: Frame | None = None  #: the request that says what the answer gives, where that is remembered

    def repeating(self, former: Waiting | None) -> Waiting:
        """Return this request, in whose place a ``former`` one has waited: its answer is that of both. The repetition
        may have come first, so either may be the one that its sender waits for."""
        if former is None:
            return self
        before = former.respond.responds if isinstance(former.respond, _RespondToAll) else (former.respond,)
        return replace(self, respond=_RespondToAll((*before, self.respond)[-_MOST_REPETITIONS:]))


class Parked(dict[Hashable, Waiting]):
    """Holds requests under tickets, and finds those of a worker without looking at all."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, dict[Hashable, Waiting]] = defaultdict(dict)

    def of(self, worker: int) -> Collection[Waiting]:
        return self._of[worker].values()

    def __setitem__(self, ticket: Hashable, waiting: Waiting) -> None:
        super().__setitem__(ticket, waiting)
        self._of[waiting.worker][ticket] = waiting

    def take(self, ticket: Hashable) -> Waiting:
        """Return a request that waits no more."""
        waiting = self.pop(ticket)
        del self._of[waiting.worker][ticket]
        return waiting

    def clear(self) -> None:
        super().clear()
        self._of.clear()
