"""A server opens doors, through which peers come in with direct connections."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Hashable
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.base.ports import holder_of, is_taken
from fleet.errors import ConfigurationError, PortInUseError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_connections import Connections
from fleet.ps.wire.line import Line
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls_line import TlsLine
from fleet.ps.wire.transport import Handler

_log = logging.getLogger("fleet.wire")

KEY_BYTES = 16

#: Between attempts while the system has no descriptors left.
SCARCITY_PAUSE_S = 0.2


class DirectListener:
    """Takes connections at a port of the endpoint's address, any free one for 0, and from its own machine under a name.

    Where the address is for its own machine only, the name is enough, and takes no port from anybody.
    """

    def __init__(self, endpoint: Endpoint, port: int, handler: Handler, security: Security | None = None) -> None:
        security = security or Security()
        self.address = pb.DirectAddress(key=secrets.token_bytes(KEY_BYTES))
        self._doors: list[socket.socket] = []
        if sys.platform == "linux":
            name = f"fleet-{secrets.token_hex(16)}"
            with contextlib.suppress(OSError):  # not everywhere: then it is TCP for everybody
                self._doors.append(local_door(name))
                self.address.local = name
        if port or not (self._doors and is_loopback(endpoint)):
            self._doors.append(tcp_door(endpoint, port))
            self.address.port = self._doors[-1].getsockname()[1]
        self._tls = None if security.tls is None else security.tls.server_context()
        self.connections = Connections(handler, self.address.key, security.max_message_bytes)
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._porter = threading.Thread(target=self._let_in, name="fleet-direct-door", daemon=True)
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
                        self.connections.take(self._line(sock), _peer(sock, address))
                    except OSError as error:
                        _log.warning("a direct connection could not be taken: %s", error)
                        self._closing.wait(SCARCITY_PAUSE_S)

    def _line(self, sock: socket.socket) -> Line:
        # What comes under the name is of this machine.
        if self._tls is None or sock.family == getattr(socket, "AF_UNIX", None):
            return Line(sock)
        return TlsLine(sock, self._tls)

    def refuse(self) -> None:
        """Take no further connection and no further request."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.connections.refuse()
        self._wake.close()
        self._porter.join()
        for door in [*self._doors, self._woken]:
            door.close()

    def close(self, grace_s: float = 0.0) -> None:
        self.refuse()
        self.connections.close(grace_s)


def _peer(sock: socket.socket, address: Any) -> Hashable:
    """Return the address a connection comes from, or the process of this machine."""
    if sock.family != getattr(socket, "AF_UNIX", None):
        return str(address[0])
    process, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(process)


def is_loopback(endpoint: Endpoint) -> bool:
    host = endpoint.host.strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def tcp_door(endpoint: Endpoint, port: int) -> socket.socket:
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
        # "All addresses" of a machine are those of both kinds, as for gRPC.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        # With all its parts: an address of one link has its interface among them.
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigurationError(
            "cannot take direct connections here",
            where=f"{endpoint.host}:{port or 'any port'}",
            got=str(error),
            todo="Give the server an address of this machine.",
        ) from None


def local_door(name: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind("\0" + name)
        door.listen(128)
    except OSError:
        door.close()
        raise
    return door
