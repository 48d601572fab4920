"""Frames go through sockets.

They go without a copy: a frame leaves from where its tensors are, and arrives in place. A line carries a request and
then its reply, and one thread at a time uses it; whether the peer has hung up may be looked for beside that.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from itertools import islice
from typing import TypeVar

from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import MAX_PAYLOAD_BYTES, PREFIX_BYTES, Frame, announced_bytes, receive_frame

#: So many buffers at most go into one call of the operating system (IOV_MAX on Linux and macOS).
_MAX_BUFFERS = 1024

#: Room between two processes of one machine, as far as the system grants it (net.core.wmem_max and rmem_max): with
#: 208 KiB, the default, large frames take a fifth longer.
_LOCAL_BUFFER = 4 << 20

#: A request may be parked for long. What is between the machines must not forget the connection meanwhile, and if it
#: has, both ends should know within a minute: who waits, and who has sent what nobody acknowledges, or reads, which the
#: system alone would repeat for a quarter of an hour.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}

M = TypeVar("M", pb.Request, pb.Reply)
Buffers = deque[memoryview]


class Line:
    """Holds a socket to a peer, through which bytes go as they are."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def limit(self, kind: int, seconds: int) -> None:
        """Set for how long the socket may wait for the peer; unlike a socket's timeout in Python this costs nothing."""
        self.sock.setsockopt(socket.SOL_SOCKET, kind, struct.pack("@ll", seconds, 0))

    def tune(self) -> None:
        """Let frames leave at once, and notice in the end when the peer's machine is gone."""
        sock = self.sock
        if sock.family == getattr(socket, "AF_UNIX", None):
            for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, side, _LOCAL_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def shake_hands(self) -> None:
        """Agree with the peer on how the line is protected, which this one is not."""

    def take(self, nbytes: int) -> bytes:
        """Return the next few bytes. They come in one go, or not at all: with time for every byte, strangers would take
        up places for long."""
        return self.sock.recv(nbytes, socket.MSG_WAITALL)

    def fill(self, target: memoryview) -> None:
        """Wait for the next bytes; raise ``OSError`` when the connection ends or its time is up."""
        while target:
            got = self.sock.recv_into(target, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the peer hung up")
            target = target[got:]

    def receive(self, kind: type[M], limit: int = MAX_PAYLOAD_BYTES) -> Frame:
        """Read the next frame; raise ``OSError`` when the connection ends or its time is up."""
        return receive_frame(kind, self.fill, limit)

    def say(self, words: bytes) -> None:
        """Send a few bytes."""
        plain = deque([memoryview(words)])
        while plain:
            for part in self.sealed(plain):
                self.sock.sendall(part)

    def sealed(self, plain: Buffers) -> Buffers:
        """Take some of what is to be sent next, and return it as it travels."""
        taken = deque(islice(plain, _MAX_BUFFERS))
        for _ in taken:
            plain.popleft()
        return taken

    def peek(self) -> int | None:
        """Return how many bytes the frame that has begun to come says it has, 0 if it does not say yet, or None if
        nothing has come; raise ``OSError`` if nothing will come."""
        try:
            begun = self.sock.recv(PREFIX_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not begun:
            raise ConnectionResetError("the peer hung up")
        return announced_bytes(begun)

    @property
    def holds_more(self) -> bool:
        """Say whether more has come than was read, which the socket does not show any more."""
        return False

    def shut(self) -> None:
        """Let a thread that waits for the peer go on."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class Outgoing:
    """Holds a frame on its way into a line."""

    def __init__(self, frame: Frame) -> None:
        self._plain: Buffers = deque(memoryview(buffer) for buffer in frame.buffers())
        self._rest: Buffers = deque()

    @property
    def is_sent(self) -> bool:
        return not (self._plain or self._rest)

    def send(self, line: Line, *, wait: bool) -> None:
        """Send all of it, or as much as the socket takes without waiting; raise ``OSError`` when its time is up."""
        while not self.is_sent:
            rest = self._rest = self._rest or line.sealed(self._plain)
            try:
                sent = line.sock.sendmsg(rest, (), 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                if wait:  # for as long as the system was told to
                    raise TimeoutError("the peer reads nothing") from None
                return
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]
