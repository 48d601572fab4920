"""A client sends requests over direct connections.

A connection carries one request and then its reply, nothing else meanwhile: requests under way together have one
each, so none waits for another, and one that is given up takes its connection with it.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Protocol

from fleet.base.cluster import Endpoint
from fleet.errors import AuthenticationError, FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.line import Line, Outgoing
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls_line import TlsLine
from fleet.ps.wire.transport import BrokenCall, Call, Channel, TransportError
from fleet.ps.wire.wire_errors import raise_if_error

_log = logging.getLogger("fleet.wire")

WELCOME = b"FLT1 welcome"

#: To ask where connections are taken, and to make one.
CONNECT_S = 5.0

#: So many connections are kept that carry nothing at the moment.
KEPT = 4

#: After so many failures in a row no further connection is tried.
PATIENCE = 3


class DirectChannel:
    """Sends requests over direct connections where the server takes any, and over ``control`` where it does not.

    An urgent request needs no way of its own there: at the server nothing waits for work that takes long.
    """

    def __init__(self, endpoint: Endpoint, control: Channel, security: Security) -> None:
        self._endpoint = endpoint
        self._control = control
        self._security = security
        self.limit = security.max_message_bytes  #: the bytes of a reply
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._busy: set[DirectCall] = set()
        self._address: pb.DirectAddress | None = None
        self._failures = 0
        self._closed = False

    def start(
        self, request: Frame, timeout_s: float | None = None, *, urgent: bool = False, ahead: bool = False
    ) -> Call:
        if self._failures < PATIENCE:
            try:
                connection = self._take(min(timeout_s or CONNECT_S, CONNECT_S))
            except TransportError as error:
                return BrokenCall(str(error))
            if connection is not None:
                call = DirectCall(self, connection, request, timeout_s)
                with self._lock:
                    if not self._closed:
                        self._busy.add(call)
                        return call
                _hang_up(connection)
                return BrokenCall("the channel is closed")
        return self._control.start(request, timeout_s, urgent=urgent, ahead=ahead)

    def forked(self) -> DirectChannel:
        made = DirectChannel(self._endpoint, self._control.forked(), self._security)
        made._address = self._address
        return made

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for call in self._busy:
                call.wake()
        for connection in idle:
            _hang_up(connection)
        self._control.close()

    # ---------------------------------------------------------------- for calls

    def release(self, call: DirectCall, connection: Line, *, whole: bool) -> None:
        """Take a connection back, as its call has ended; after a ``whole`` reply it can carry the next."""
        with self._lock:
            if call not in self._busy:
                return
            self._busy.remove(call)
            if whole and not self._closed and len(self._idle) < KEPT:
                self._idle.append(connection)
                return
        _hang_up(connection)

    def cancel(self, call: DirectCall) -> None:
        with self._lock:
            if call in self._busy:
                call.wake()

    # ---------------------------------------------------------------- connections

    def _take(self, timeout_s: float) -> Line | None:
        """Return a connection that carries nothing; None if there is none to be had."""
        while True:
            with self._lock:
                if self._closed:
                    raise TransportError("the channel is closed")
                if not self._idle:
                    known = self._address
                    break
                connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            _hang_up(connection)
            self._address = None  # the server has gone, and its successor is somewhere else
        address = known or self._ask(timeout_s)
        if address is None:
            return None
        try:
            connection = _connect(self._endpoint, address, self._security, timeout_s)
        except OSError as error:
            self._address = None
            if known is not None:
                raise TransportError(f"{self._endpoint} takes no connection: {error}") from None
            self._failures += 1
            if self._failures == PATIENCE:
                _log.log(
                    logging.INFO if isinstance(error, _NoDoorHere) else logging.WARNING,
                    "no direct connection to the server at %s, port %d (%s): requests go through gRPC, which is slower",
                    self._endpoint,
                    address.port,
                    error,
                )
            return None
        self._address, self._failures = address, 0
        return connection

    def _ask(self, timeout_s: float) -> pb.DirectAddress | None:
        try:
            reply = raise_if_error(self._control.start(Frame(pb.Request(direct=pb.Direct())), timeout_s).result())
        except AuthenticationError:
            raise
        except FleetError:  # a server that takes none knows no such request
            self._failures = PATIENCE
            _log.info("the server at %s takes no direct connections: requests go through gRPC", self._endpoint)
            return None
        address: pb.DirectAddress = reply.message.direct
        return address


class DirectCall:
    def __init__(self, channel: DirectChannel, connection: Line, request: Frame, timeout_s: float | None):
        self._channel = channel
        self._connection = connection
        self._timeout_s = timeout_s
        self._request = Outgoing(request)
        self._broken: OSError | None = None  #: why nothing can be sent or read any more
        self._send(wait=False)

    def _send(self, *, wait: bool) -> None:
        try:
            self._request.send(self._connection, wait=wait)
        except OSError as error:
            self._broken = error

    def send(self) -> None:
        if self._broken is None:
            self._send(wait=True)

    def result(self) -> Frame:
        whole = False
        connection = self._connection
        try:
            if self._broken is not None:
                raise self._broken
            if self._timeout_s is not None:
                connection.sock.settimeout(self._timeout_s)
            self.send()
            if self._broken is not None:
                raise self._broken
            reply = connection.receive(pb.Reply, self._channel.limit)
            if self._timeout_s is not None:
                connection.sock.settimeout(None)
            whole = True
            return reply
        except OSError as error:
            # Without a limit of ours it is TCP's own: the other machine has not answered for long.
            timed_out = isinstance(error, TimeoutError) and error.errno is None and self._timeout_s is not None
            raise TransportError(f"no reply within {self._timeout_s:g} s" if timed_out else str(error)) from None
        finally:
            # The connection may carry the next request by now: another call of this gets nothing from it.
            self._broken = ConnectionAbortedError("the call has ended")
            self._channel.release(self, connection, whole=whole)

    def cancel(self) -> None:
        self._channel.cancel(self)

    def wake(self) -> None:
        """Let the thread that waits on the connection go on."""
        self._connection.shut()


def _hang_up(connection: Line) -> None:
    # To close is not enough where a forked child has a copy of the connection.
    connection.shut()
    connection.close()


def _is_quiet(connection: Line) -> bool:
    """Say whether nothing has come, not even the end: a server that went away is noticed before it is sent anything."""
    try:
        return connection.peek() is None
    except OSError:
        return False


def _connect(endpoint: Endpoint, address: pb.DirectAddress, security: Security, timeout_s: float) -> Line:
    sock = reach(endpoint, address, timeout_s)
    connection = Line(sock)
    try:
        if security.tls is not None and sock.family != getattr(socket, "AF_UNIX", None):
            connection = TlsLine(sock, security.tls.context(), security.tls.name_of(endpoint))
        sock.settimeout(timeout_s)
        connection.tune()
        connection.shake_hands()
        connection.say(address.key)
        if connection.take(len(WELCOME)) != WELCOME:
            raise ConnectionRefusedError("somebody else listens there")
        sock.settimeout(None)
    except BaseException:
        _hang_up(connection)
        raise
    return connection


class _NoDoorHere(ConnectionRefusedError):
    """Says that the server refuses on purpose."""


class Doors(Protocol):
    """Names the doors of a listener: one on its own machine, and a port of its address."""

    @property
    def local(self) -> str: ...

    @property
    def port(self) -> int: ...


def reach(endpoint: Endpoint, address: Doors, timeout_s: float) -> socket.socket:
    """Connect to the nearest of the doors."""
    if address.local and hasattr(socket, "AF_UNIX"):
        # An abstract name: no file, and to be found only by who shares the server's network.
        near = socket.socket(socket.AF_UNIX)
        try:
            near.settimeout(timeout_s)
            near.connect("\0" + address.local)
        except OSError:
            near.close()
        else:
            return near
    if not address.port:
        raise _NoDoorHere("it takes them on its own machine only")
    return socket.create_connection((endpoint.host.strip("[]"), address.port), timeout_s)
