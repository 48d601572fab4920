"""Requests that cannot be answered yet, and replies that leave once the server's lock is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond

#: Replies to send once the lock is released.
Outbox = list[tuple[Respond, Frame]]


@dataclass(frozen=True)
class Waiting:
    """A request that cannot be answered yet: who asked, for what and when, and how to make the answer when its time has
    come."""

    worker: int
    what: str
    since: float
    respond: Respond
    answer: Callable[[], Frame]
    gathering: bool = False
    ahead: bool = False  #: the worker does not wait for it yet
    nbytes: int = 0  #: what it keeps in memory until then
