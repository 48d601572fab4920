"""Frames go through sockets under TLS.

They are sealed and opened in memory, not by the socket: so a socket waits, or does not wait, as one in the clear does,
and whether a peer has hung up can be seen without opening anything.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from typing import Any

from fleet.ps.wire.line import Buffers, Line

#: So much is sealed, or read to be opened, in one go.
_PART_BYTES = 256 << 10

#: What a sealed frame says of its size cannot be seen before it is opened.
_UNKNOWN_BYTES = 1 << 62

#: A handshake has few messages. Whoever sends them in more parts is no peer.
_HANDSHAKE_PARTS = 16


class TlsLine(Line):
    """Holds a socket through which only sealed bytes go."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: str | None = None) -> None:
        """Begin a line to the ``server`` of that name, or, without one, the line of a server."""
        super().__init__(sock)
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaves, server_side=server is None, server_hostname=server)

    def shake_hands(self) -> None:
        for _ in range(_HANDSHAKE_PARTS):
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._read_on()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # the peer is told why
                raise
            else:
                self._flush()
                return
        raise ConnectionAbortedError("a TLS handshake comes in too many parts")

    def _flush(self) -> None:
        self.sock.sendall(self._leaves.read())

    def _read_on(self) -> None:
        came = self.sock.recv(_PART_BYTES)
        if not came:
            raise ConnectionResetError("the peer hung up")
        self._came.write(came)

    def take(self, nbytes: int) -> bytes:
        for _ in range(_HANDSHAKE_PARTS):
            try:
                return self._tls.read(nbytes)  # was sealed in one piece
            except ssl.SSLWantReadError:
                self._read_on()
        raise ConnectionAbortedError("a few bytes come in too many parts")

    def fill(self, target: memoryview) -> None:
        while target:
            try:
                got: Any = self._tls.read(len(target), target)
            except ssl.SSLWantReadError:
                self._read_on()
                continue
            if not got:
                raise ConnectionResetError("the peer hung up")
            target = target[got:]

    def sealed(self, plain: Buffers) -> Buffers:
        parts, room = [], _PART_BYTES
        while plain and room:
            part = plain.popleft()
            if len(part) > room:
                part, rest = part[:room], part[room:]
                plain.appendleft(rest)
            parts.append(part)
            room -= len(part)
        if room < _PART_BYTES:
            self._tls.write(parts[0] if len(parts) == 1 else b"".join(parts))
        return deque([memoryview(self._leaves.read())])

    def peek(self) -> int | None:
        if not self.holds_more and super().peek() is None:
            return None
        return _UNKNOWN_BYTES

    @property
    def holds_more(self) -> bool:
        return bool(self._came.pending or self._tls.pending())
