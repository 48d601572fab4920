"""A worker finds out where its job has moved to, and tells servers that have not heard of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.errors import DeadlineError, FleetError, ServersMovedError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import TransportError
from fleet.ps.worker.connection import RETRY_PAUSE_S, Connection, Connections, inquire_all

#: A server that a job leaves is told so up to so many times.
_WORDS = 3


class Move(NamedTuple):
    """Names a move that has been made, and all servers since; it is the job's first, or has another ``number``.
    ``past`` has all that were made, this one too, where a server has told of it."""

    attempt: str
    servers: tuple[Endpoint, ...]
    number: int
    past: Sequence[tuple[str, Sequence[str]]] = ()

    @classmethod
    def of(cls, past: Sequence[tuple[str, Sequence[str]]]) -> Move:
        """Return the last of all moves that were made."""
        attempt, servers = past[-1]
        return cls(attempt, tuple(map(Endpoint.parse, servers)), len(past), past)

    def first_since(self, known: int) -> Move:
        """Return the first of the moves that were made since so many were known."""
        return Move.of(self.past[: known + 1]) if self.past else self


def find_move(connections: Connections, clock: Clock, deadline_s: float) -> Move | None:
    """Return where the job has moved to from these servers; None if it is there. The first server decides: while it
    stands still it is asked again, and if nothing moves there, others that stand still are told."""
    began = clock.now()
    while True:
        answers = _ask(connections)
        move = _of(connections, answers)
        if move is not None:
            return move
        if 0 in answers and not answers[0]["halted"]:
            _end_given_up(connections, answers)
            return None
        if clock.now() - began > deadline_s:
            raise DeadlineError(
                "the servers that a job moves away from do not say where it is",
                where=", ".join(str(each.endpoint) for each in connections.by_server),
                expected=f"an answer within {deadline_s:g} s (FLAGS_rpc_deadline)",
                todo="Look at the log of the first of them.",
            )
        clock.sleep(RETRY_PAUSE_S)


def end_others(connections: Connections, attempt: str) -> None:
    """Tell servers that stand still for another move than this one that it is over, if the first server has given it
    up: whoever moved the job was lost amid it."""
    answers = _ask(connections)
    if 0 in answers and answers[0]["halted"] in ("", attempt) and _of(connections, answers) is None:
        _end_given_up(connections, {server: each for server, each in answers.items() if each["halted"] != attempt})


def _end_given_up(connections: Connections, answers: dict[int, dict[str, Any]]) -> None:
    for server, answer in answers.items():
        if answer["halted"]:
            over = pb.Switch(attempt=answer["halted"], given_up=True)
            connection = connections.by_server[server]
            connection.inquire(Frame(connection.request(0, switch=over)))


class Hop(NamedTuple):
    """Holds one move, and connections to the servers since."""

    move: Move
    connections: Connections


class WayAhead:
    """Leads from the servers that a worker knows to those where its job is. While a worker computes, heartbeats find
    that, and let the new servers know that the worker lives; it goes over when it asks for something next."""

    def __init__(
        self,
        connections: Connections,
        connect: Callable[[Sequence[Endpoint], int], Connections],
        clock: Clock,
        deadline_s: float,
    ) -> None:
        """``connect`` connects to servers as the process that this one is after so many more moves."""
        self._connections = connections
        self._connect = connect
        self._clock = clock
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._hops: list[Hop] = []
        #: whether the worker is on its way, and needs no heartbeat to find it
        self._is_taken = self._is_closed = False

    def look(self, connection: Connection) -> bool:
        """Look where the job is, on the thread of a heartbeat whose server says that it has moved; return whether that
        is known. Nothing is waited for longer than a short answer takes: the next heartbeat looks again."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._is_taken or self._is_closed:
                return False
            known = len(self._hops)
            self._go_on(surely=False)
            for each in (each for hop in self._hops[known:] for each in hop.connections.by_server):
                each.start_heartbeat()
            is_known = bool(self._hops) and connection not in self._hops[-1].connections.by_server
        finally:
            self._lock.release()
        if self._is_closed:
            self.close()
        return is_known

    def take(self, known: Move | None = None) -> list[Hop]:
        """Return all moves from where this worker is to where the job is, for the caller to go over, which says when it
        has; the first of them may be ``known``."""
        with self._lock:
            if not self._hops:
                first = known or find_move(self._connections, self._clock, self._deadline_s)
                if first is not None:
                    self._add(first, surely=True)
            self._go_on(surely=True)
            hops, self._hops = self._hops, []
            self._is_taken = bool(hops)
            return hops

    def arrive(self) -> None:
        """Note that the worker has gone over, or has not come through."""
        with self._lock:
            self._is_taken = False

    def _go_on(self, *, surely: bool) -> None:
        """Find moves that follow, as far as servers know of any."""
        while True:
            here = self._hops[-1].connections if self._hops else self._connections
            move = _of(here, _ask(here))
            if move is None or not self._add(move, surely=surely):
                return

    def _add(self, move: Move, *, surely: bool) -> bool:
        """Connect to the servers since a move, and tell them of it; return whether all have heard."""
        connections = self._connect(move.servers, move.number - self._connections.moves)
        connections.moves = move.number
        try:
            has_told = tell_of(move, connections.by_server, surely=surely)
        except BaseException:
            connections.close()
            raise
        if has_told:
            self._hops.append(Hop(move, connections))
        else:
            connections.close()
        return has_told

    def farewell(self, **word: object) -> None:
        """Send a last word to where the job is, if that is not where this worker is."""
        with self._lock:
            with contextlib.suppress(FleetError, TransportError):
                self._go_on(surely=False)
            if self._hops:
                self._hops[-1].connections.farewell(**word)

    def close(self) -> None:
        """Go no further."""
        self._is_closed = True
        if not self._lock.acquire(blocking=False):
            return  # a heartbeat that looks closes what it has found
        hops, self._hops = self._hops, []
        self._lock.release()
        for hop in hops:
            hop.connections.close()


def refuse_if_moved(connections: Connections, former: int = 0) -> None:
    """Raise if one of these servers knows that the job is elsewhere; others may be gone, or still be in the job before
    this one, in which this process was as ``former``."""
    if _of(connections, _ask(connections, former)) is not None:
        where = ", ".join(str(each.endpoint) for each in connections.by_server)
        raise ServersMovedError("the job has moved to other servers", where=where)


def tell_of(move: Move, connections: Sequence[Connection], *, surely: bool) -> bool:
    """Tell servers of a move that has been made, ``surely`` or once; return whether all have heard."""
    told = pb.Switch(attempt=move.attempt, endpoints=map(str, move.servers))
    asked = [(connection, Frame(connection.request(0, switch=told))) for connection in connections]
    if surely:
        for connection, frame in asked:
            connection.insist(frame, "a move")
        return True
    return None not in inquire_all(asked)


def take_leave(move: Move, connections: Sequence[Connection]) -> None:
    """Tell servers that the job has left of the move by which it did: they wait for everybody's word, and one may get
    lost. A server that answers none may have ended, and keeps nobody waiting for long."""
    silent = list(connections)
    for count in range(_WORDS):
        if count:
            silent[0].clock.sleep(RETRY_PAUSE_S)
        word = pb.Switch(attempt=move.attempt, endpoints=map(str, move.servers))
        answers = inquire_all([(each, Frame(each.request(0, switch=word))) for each in silent])
        silent = [each for each, answer in zip(silent, answers, strict=True) if answer is None]
        if not silent:
            return


def tell_those_between(move: Move, known: int, connect: Callable[[Sequence[Endpoint]], list[Connection]]) -> None:
    """Tell servers that the job has come to and left since the moves that were ``known``: they wait for everybody."""
    for number in range(known + 1, len(move.past)):
        later = move.first_since(number)
        _, servers = move.past[number - 1]
        connections = connect([each for each in map(Endpoint.parse, servers) if each not in later.servers])
        take_leave(later, connections)
        for connection in connections:
            connection.close()


def _ask(connections: Connections, former: int = 0) -> dict[int, dict[str, Any]]:
    where = pb.Where(former=former)
    replies = inquire_all([(each, Frame(each.request(0, where=where))) for each in connections.by_server])
    return {server: json.loads(reply.message.about) for server, reply in enumerate(replies) if reply is not None}


def _of(connections: Connections, answers: dict[int, dict[str, Any]]) -> Move | None:
    """Return the last move of the job that these servers know of, unless it is the one that has led to them: the same
    list may be another arrangement, as a job may come back."""
    past = max((answer["past"] for answer in answers.values()), key=len, default=())
    return Move.of(past) if len(past) > connections.moves else None
