"""Requests arrive over the connections that a server has let in, and their replies leave.

One thread waits for all of them, reads a request, has it handled and sends the reply (``LeaderPool``). A peer that
stops in the middle or does not read, a long request, or one that waits for the server's lock may hold it up: then
another thread goes on for the other connections. A request that is parked holds no thread.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_client import WELCOME
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.leader_pool import LeaderPool, Work
from fleet.ps.wire.line import Line, Outgoing
from fleet.ps.wire.transport import Handler
from fleet.ps.wire.wire_errors import error_reply, failure_reply

_log = logging.getLogger("fleet.wire")

#: For so long a peer may take to say who it is, and to go on with a request that it has begun or with reading a reply.
HANDSHAKE_S, STALL_S = 5, 60

#: In all; of one address, or one process of this machine; and of peers that have not shown the key yet.
MAX_CONNECTIONS, MAX_OF_ONE, MAX_STRANGERS = 4096, 1024, 128

#: To read more than this takes longer than to wake another thread, which can do something else meanwhile.
_LARGE_BYTES = 1 << 20

#: To close waits so long for threads that were woken.
JOIN_S = 10.0


class State(enum.Enum):
    NEW = enum.auto()
    GREETING = enum.auto()  #: a thread waits for its key
    IDLE = enum.auto()
    READING = enum.auto()  #: a thread reads a request
    WAITING = enum.auto()  #: for the reply
    SENDING = enum.auto()  #: a thread sends the reply
    UNSENT = enum.auto()  #: a part of the reply is left, for the next thread to send


class Connection:
    """Holds a connection with a peer that may not be known yet. A thread that has moved it to a state in which a thread
    has something to do may use its line; in the other states this takes the lock."""

    def __init__(self, line: Line, peer: Hashable) -> None:
        self.line = line
        self.peer = peer
        self.known = False
        self.state = State.NEW
        self.watched = False
        self.exchange: Exchange | None = None
        self.rest: Outgoing | None = None

    def greet(self, key: bytes) -> None:
        line = self.line
        line.tune()
        line.limit(socket.SO_RCVTIMEO, HANDSHAKE_S)
        line.limit(socket.SO_SNDTIMEO, STALL_S)
        line.shake_hands()
        if not hmac.compare_digest(line.take(len(key)), key):
            raise ConnectionRefusedError("a peer does not have the key")
        self.known = True
        line.say(WELCOME)
        line.limit(socket.SO_RCVTIMEO, STALL_S)


class Exchange:
    """Holds a request, and its reply."""

    __slots__ = ("attended", "connection")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.attended = True  #: by the thread that has read the request


class Connections:
    def __init__(self, handler: Handler, key: bytes, limit: int) -> None:
        self._handler = handler
        self._key = key
        self._limit = limit
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._all: set[Connection] = set()
        self._closing = self._over = False
        #: those for which there is something to do
        self._ready: deque[Connection] = deque()
        self._selector = selectors.DefaultSelector()
        self._bell, self._rung = socket.socketpair()
        for end in (self._bell, self._rung):
            end.setblocking(False)
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._leaders = LeaderPool("fleet-direct", self._wait)

    def __len__(self) -> int:
        return len(self._all)

    def take(self, line: Line, peer: Hashable) -> None:
        """Let somebody in, who has still to show the key; hang up if there is no room."""
        connection = Connection(line, peer)
        with self._lock:
            if self._closing or not self._has_room_for(peer):
                line.close()
                return
            self._all.add(connection)
        self._call_for(connection)

    def _has_room_for(self, peer: Hashable) -> bool:
        there = self._all
        return (
            len(there) < MAX_CONNECTIONS
            and sum(not each.known for each in there) < MAX_STRANGERS
            and sum(each.peer == peer for each in there) < MAX_OF_ONE
        )

    def refuse(self) -> None:
        """Take no further connection and no further request."""
        with self._lock:
            self._closing = True
            for connection in list(self._all):
                if connection.state is State.IDLE:
                    self._drop(connection)
                elif not connection.known:
                    connection.line.shut()

    def close(self, grace_s: float) -> None:
        """Give replies under way some time to leave."""
        self.refuse()
        with self._lock:
            if self._over:
                return
            self._left.wait_for(lambda: not self._all, grace_s)
            for connection in list(self._all):
                if connection.state is State.WAITING:
                    self._drop(connection)
                else:
                    connection.line.shut()
            self._left.wait_for(lambda: not self._all, JOIN_S)
            for connection in self._all:
                self._unwatch(connection)
            self._over = True
        self._leaders.dismiss()
        self._ring()
        self._leaders.join(JOIN_S)
        self._selector.close()
        self._bell.close()
        self._rung.close()

    # ---------------------------------------------------------------- what there is to do

    def _wait(self) -> Work | None:
        while not self._over:
            if self._ready:
                return partial(self._attend, self._ready.popleft())
            self._look(None)
        return None

    def _look(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            connection: Connection | None = key.data
            if connection is None:
                if timeout_s is None:  # else this may be a thread that does not lead, and the bell rings for who does
                    with contextlib.suppress(BlockingIOError):
                        self._rung.recv(4096)
            elif _has_its_time(connection):
                self._ready.append(connection)
            else:
                with self._lock:
                    if not _has_its_time(connection):
                        self._unwatch(connection)

    def _others_wait(self) -> bool:
        if not self._ready:
            self._look(0)
        return bool(self._ready)

    def _call_for(self, connection: Connection) -> None:
        """Ask for somebody to attend to a connection, soon."""
        self._ready.append(connection)
        if not self._leaders.relieve():
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or nobody is there any more
            self._bell.send(b"\0")

    def _watch(self, connection: Connection) -> None:
        if not connection.watched:
            self._selector.register(connection.line.sock, selectors.EVENT_READ, connection)
            connection.watched = True
            self._ring()  # not every selector notices by itself

    def _unwatch(self, connection: Connection) -> None:
        if connection.watched:
            self._selector.unregister(connection.line.sock)
            connection.watched = False

    # ---------------------------------------------------------------- for one connection

    def _attend(self, connection: Connection) -> None:
        with self._lock:
            task = self._take_up(connection)
        taken = None
        if task is not None:
            try:
                taken = task(connection)
            except Exception as error:
                self._end(connection, error)
        if taken is not None:
            self._serve(*taken)

    def _take_up(self, connection: Connection) -> Callable[[Connection], tuple[Exchange, Frame] | None] | None:
        """Return what is to be done; None if another thread does it."""
        if connection not in self._all:
            return None
        if connection.state is State.NEW:
            connection.state = State.GREETING
            return self._greet
        if connection.state is State.IDLE:
            connection.state = State.READING
            return self._read
        if connection.state is State.UNSENT:
            connection.state = State.SENDING
            return self._send_rest
        if connection.state is State.WAITING:
            try:
                if connection.line.peek() is not None:
                    self._unwatch(connection)  # the next request has its time when this one is answered
            except OSError:
                self._drop(connection)
        return None

    def _greet(self, connection: Connection) -> None:
        self._leaders.relieve()  # whichever thread this is, others do not wait for it
        connection.greet(self._key)
        self._await_next(connection)

    def _read(self, connection: Connection) -> tuple[Exchange, Frame] | None:
        line = connection.line
        size = line.peek()
        if size is None:
            self._await_next(connection)
            return None
        if size > _LARGE_BYTES and self._others_wait():
            self._leaders.relieve()
        try:
            request = line.receive(pb.Request, self._limit)
        except FleetError as error:
            # What follows cannot be made out any more.
            _log.warning("a request over a direct connection cannot be read: %s", error)
            Outgoing(error_reply(error)).send(connection.line, wait=True)
            raise ConnectionAbortedError(str(error)) from None
        exchange = Exchange(connection)
        with self._lock:
            self._watch(connection)  # the peer may hang up
            connection.exchange = exchange
            connection.state = State.WAITING
        return exchange, request

    def _serve(self, exchange: Exchange, request: Frame) -> None:
        connection, answer = exchange.connection, partial(self._answer, exchange)
        afterwards = None
        try:
            afterwards = self._handler(request, answer)
        except Exception as error:
            answer(failure_reply(error))
        del request
        with self._lock:
            exchange.attended = False
            if unsent := connection.exchange is exchange and connection.state is State.UNSENT:
                connection.state = State.SENDING
        if unsent:
            try:
                self._send_rest(connection)
            except OSError as error:
                self._end(connection, error)
        if afterwards is not None:
            afterwards()

    def _answer(self, exchange: Exchange, reply: Frame) -> None:
        """Send the reply as far as it goes without waiting for the peer, on whatever thread has it. That thread has
        others to answer: what fails here harms this connection alone."""
        connection = exchange.connection
        with self._lock:
            # It may have been answered before, or the connection be gone.
            if connection.exchange is not exchange or connection.state is not State.WAITING:
                return
            connection.state = State.SENDING
        try:
            outgoing = Outgoing(reply)
            outgoing.send(connection.line, wait=False)
            if outgoing.is_sent:
                self._await_next(connection)
                return
        except Exception as error:
            self._end(connection, error)
            return
        with self._lock:
            connection.rest = outgoing
            connection.state = State.UNSENT
            attended = exchange.attended
        if not attended:
            self._call_for(connection)

    def _send_rest(self, connection: Connection) -> None:
        if self._ready:
            self._leaders.relieve()
        rest, connection.rest = connection.rest, None
        assert rest is not None, "what is unsent has a rest"
        rest.send(connection.line, wait=True)
        self._await_next(connection)

    def _await_next(self, connection: Connection) -> None:
        """Wait for the next request on it."""
        with self._lock:
            if self._closing:
                self._drop(connection)
                return
            self._watch(connection)
            more = connection.line.holds_more
            connection.state = State.IDLE
        if more:  # which the selector does not see
            self._call_for(connection)

    def _end(self, connection: Connection, error: Exception) -> None:
        if isinstance(error, OSError):
            _log.debug("a direct connection ended: %s", error)
        else:
            _log.error("a direct connection ends, as the server failed", exc_info=error)
        with self._lock:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._unwatch(connection)
            connection.exchange = connection.rest = None
            connection.line.close()
            self._left.notify_all()


def _has_its_time(connection: Connection) -> bool:
    """Say whether the leader may look at a connection: no other thread is at work on it."""
    return connection.state in (State.IDLE, State.WAITING)
