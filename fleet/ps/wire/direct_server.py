"""The server half of direct connections: a thread for each, which reads a request, waits for its answer and sends it.

A request that is parked holds the thread of its connection and no other, so a pool is never full of them; a peer that
does not read its reply holds up nobody but itself.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Hashable
from typing import Any

from fleet.cluster import Endpoint
from fleet.errors import ConfigurationError, FleetError, PortInUseError
from fleet.ports import holder_of, is_taken
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_client import WELCOME
from fleet.ps.wire.errors import error_reply, handle
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.security import Security
from fleet.ps.wire.stream import Outgoing, receive, tune
from fleet.ps.wire.transport import Handler

_log = logging.getLogger("fleet.wire")

KEY_BYTES = 16

#: For so long a peer may take to say who it is, and to go on with a request that it has begun.
HANDSHAKE_S, STALL_S = 5, 60

#: In all; of one address, or one process of this machine; and of those who have not said yet who they are.
MAX_CONNECTIONS, MAX_OF_ONE, MAX_STRANGERS = 4096, 1024, 128

#: Between attempts while the system has no descriptors or threads left.
SCARCITY_PAUSE_S = 0.2
#: To close waits so long for threads that were woken.
JOIN_S = 10.0

_numbers = itertools.count()


class DirectListener:
    """Takes connections at a port of the endpoint's address, any free one for 0, and from its own machine under a name.

    Where the address is for its own machine only, the name is enough, and takes no port from anybody.
    """

    def __init__(self, endpoint: Endpoint, port: int, handler: Handler, security: Security | None = None) -> None:
        security = security or Security()
        self._handler = handler
        self._limit = security.max_message_bytes
        self._lock = threading.Condition()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._closing = False
        self.address = pb.DirectAddress(key=secrets.token_bytes(KEY_BYTES))
        self._doors: list[socket.socket] = []
        if sys.platform == "linux":
            name = f"fleet-{secrets.token_hex(16)}"
            with contextlib.suppress(OSError):  # not everywhere: then it is TCP for everybody
                self._doors.append(_local_door(name))
                self.address.local = name
        if security.tls is None and (port or not (self._doors and _is_loopback(endpoint))):
            self._doors.append(_tcp_door(endpoint, port))
            self.address.port = self._doors[-1].getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._porter = threading.Thread(target=self._let_in, name="fleet-direct", daemon=True)
        self._porter.start()

    def _let_in(self) -> None:
        with selectors.DefaultSelector() as selector:
            for door in [*self._doors, self._woken]:
                selector.register(door, selectors.EVENT_READ)
            while True:
                for ready, _ in selector.select():
                    if ready.fileobj is self._woken:
                        return
                    try:
                        sock, address = ready.fileobj.accept()  # type: ignore[union-attr]
                        self._take(sock, _peer(sock, address))
                    except (OSError, RuntimeError) as error:  # no descriptors, no threads
                        _log.warning("a direct connection could not be taken: %s", error)
                        with self._lock:
                            self._lock.wait(SCARCITY_PAUSE_S)

    def _take(self, sock: socket.socket, peer: Hashable) -> None:
        connection = _Connection(sock, peer, self._limit)
        name = f"fleet-direct-{next(_numbers)}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        with self._lock:
            if self._closing or not self._has_room_for(peer):
                sock.close()
                return
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._connections[connection]
            sock.close()
            raise

    def _has_room_for(self, peer: Hashable) -> bool:
        there = self._connections
        return (
            len(there) < MAX_CONNECTIONS
            and sum(not each.known for each in there) < MAX_STRANGERS
            and sum(each.peer == peer for each in there) < MAX_OF_ONE
        )

    def refuse(self) -> None:
        """Take no further connection and no further request."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for connection in self._connections:
                if not connection.busy:
                    connection.end()
        self._wake.close()
        self._porter.join()
        for door in [*self._doors, self._woken]:
            door.close()

    def close(self, grace_s: float = 0.0) -> None:
        self.refuse()
        with self._lock:
            self._lock.wait_for(lambda: not self._connections, grace_s)
            left = list(self._connections.items())
            for connection, _ in left:
                connection.end()
        for _, thread in left:
            thread.join(JOIN_S)

    # ---------------------------------------------------------------- on the threads of the connections

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.greet(self.address.key)
            while connection.await_request() and self._begin(connection):
                connection.exchange(self._handler)
                if not self._end(connection):
                    break
        except OSError as error:
            _log.debug("a direct connection ended: %s", error)
        finally:
            with self._lock:
                connection.sock.close()
                del self._connections[connection]
                self._lock.notify_all()

    def _begin(self, connection: _Connection) -> bool:
        with self._lock:
            connection.busy = not self._closing
            return connection.busy

    def _end(self, connection: _Connection) -> bool:
        with self._lock:
            connection.busy = False
            return not self._closing


class _Connection:
    def __init__(self, sock: socket.socket, peer: Hashable, limit: int) -> None:
        self.sock = sock
        self.peer = peer
        self.known = False
        self.busy = False
        self._most_bytes = limit
        self._ended = False
        self._reply: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def end(self) -> None:
        """Wake the thread, whatever it waits for."""
        self._ended = True
        self._reply.put(None)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def greet(self, key: bytes) -> None:
        tune(self.sock)
        self._limit(HANDSHAKE_S)
        # In one go, or not at all: with time for every byte, strangers would take up places for long.
        if not hmac.compare_digest(self.sock.recv(len(key), socket.MSG_WAITALL), key):
            raise ConnectionRefusedError("a peer does not have the key")
        self.known = True
        self.sock.sendall(WELCOME)
        self._limit(STALL_S)

    def _limit(self, seconds: int) -> None:
        """For so long a read may wait; unlike a socket's timeout in Python this costs nothing."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))

    def await_request(self) -> bool:
        """Wait for one as long as it takes; False when the peer hangs up."""
        while True:
            try:
                return bool(self.sock.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                continue

    def exchange(self, handler: Handler) -> None:
        try:
            request = receive(pb.Request, self.sock, self._most_bytes)
        except FleetError as error:
            # What follows cannot be made out any more.
            _log.warning("a request over a direct connection cannot be read: %s", error)
            Outgoing(error_reply(error)).send(self.sock, wait=True)
            raise ConnectionAbortedError(str(error)) from None
        self._reply = queue.SimpleQueue()  # of its own, as a handler may answer twice
        afterwards = handle(handler, request, self._reply.put)
        reply = None if self._ended else self._reply.get()
        if reply is None:
            raise ConnectionAbortedError("the server closes")
        Outgoing(reply).send(self.sock, wait=True)
        afterwards()


def _peer(sock: socket.socket, address: Any) -> Hashable:
    """The address a connection comes from, or the process of this machine."""
    if sock.family != getattr(socket, "AF_UNIX", None):
        return str(address[0])
    process, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(process)


def _is_loopback(endpoint: Endpoint) -> bool:
    host = endpoint.host.strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _tcp_door(endpoint: Endpoint, port: int) -> socket.socket:
    host = endpoint.host.strip("[]")
    if port and is_taken(Endpoint(endpoint.host, port)):
        raise PortInUseError(
            f"port {port} is in use",
            where=f"{endpoint.host}:{port}, for direct connections",
            got=holder_of(port),
            todo="Give every server of a machine another FLEET_DIRECT_PORT, or none.",
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # All addresses of a machine are those of both kinds, as they are to gRPC.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigurationError(
            "cannot take direct connections here",
            where=f"{endpoint.host}:{port or 'any port'}",
            got=str(error),
            todo="Give the server an address of this machine.",
        ) from None


def _local_door(name: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind("\0" + name)
        door.listen(128)
    except OSError:
        door.close()
        raise
    return door
