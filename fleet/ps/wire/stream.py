"""Frames through stream sockets, without a copy: they leave from where their tensors are and arrive in place."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import TypeVar

from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import MAX_PAYLOAD_BYTES, Frame, receive_frame

#: So many buffers at most go into one call of the operating system (IOV_MAX on Linux and macOS).
_MAX_BUFFERS = 1024

#: Room between two processes of one machine, as far as the system grants it (net.core.wmem_max and rmem_max): with
#: 208 KiB, the default, large frames take a fifth longer.
_LOCAL_BUFFER = 4 << 20

#: A request may be parked for long. What is between the machines must not forget the connection meanwhile, and if it
#: has, both ends should know within a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}

M = TypeVar("M", pb.Request, pb.Reply)


class Outgoing:
    """A frame on its way into a socket."""

    def __init__(self, frame: Frame) -> None:
        self._rest = deque(memoryview(buffer) for buffer in frame.buffers())

    @property
    def is_sent(self) -> bool:
        return not self._rest

    def send(self, sock: socket.socket, *, wait: bool) -> None:
        """Send all of it, or as much as the socket takes without waiting; ``OSError`` when its time is up."""
        while self._rest:
            try:
                sent = sock.sendmsg(islice(self._rest, _MAX_BUFFERS), (), 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                if wait:  # for as long as the system was told to
                    raise TimeoutError("the peer reads nothing") from None
                return
            while self._rest and sent >= len(self._rest[0]):
                sent -= len(self._rest.popleft())
            if sent:
                self._rest[0] = self._rest[0][sent:]


def receive(kind: type[M], sock: socket.socket, limit: int = MAX_PAYLOAD_BYTES) -> Frame:
    """Read the next frame; ``OSError`` when the connection ends or its time is up."""
    return receive_frame(kind, lambda target: fill(target, sock), limit)


def fill(target: memoryview, sock: socket.socket) -> None:
    while target:
        got = sock.recv_into(target, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionResetError("the peer hung up")
        target = target[got:]


def tune(sock: socket.socket) -> None:
    """Let frames leave at once, and notice in the end when the peer's machine is gone."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, side, _LOCAL_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
