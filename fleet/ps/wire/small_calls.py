"""Small calls of a documented service, over sockets: the messages that gRPC carries, each behind its length.

Through Python's gRPC a call costs several times what a small one has to do. Here one thread reads whatever has come
over all connections, and has it answered together: the busier it is, the less each call costs. What is large, or in
error, goes through gRPC, where it holds up nobody and is told why: this side hangs up on it.

Who comes has to show a key first, which gRPC gives to those who are let in.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet.base.clock import Clock, SystemClock
from fleet.base.cluster import Endpoint
from fleet.ps.wire.direct_client import reach
from fleet.ps.wire.direct_server import KEY_BYTES, is_loopback, local_door, tcp_door
from fleet.ps.wire.line import Line
from fleet.ps.wire.transport import TransportError

_log = logging.getLogger("fleet.wire")

#: The bytes of a request, and of its answer, at most.
MOST_ASKED, MOST_ANSWERED = 64 << 10, 1 << 20
#: In all, and of those that have not shown the key.
_MOST_PEERS, _MOST_STRANGERS = 1024, 128
#: For so long a peer may take to show it, and to go on with what it has begun.
_HANDSHAKE_S, _STALL_S = 5.0, 60.0
#: How soon somebody is noticed who takes longer.
_LOOK_S = 1.0
#: So many calls are answered together.
_TOGETHER = 64
#: A client keeps so many connections that carry nothing.
_KEPT = 16
#: After a failure it tries no further one for so long, twice as long each time, up to a bound.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 60.0
#: A firewall may let nobody through to the door, and say nothing.
_CONNECT_S = 1.0
_LENGTH = struct.Struct("<I")

#: Answers calls, all that have come; None where the caller should ask through gRPC.
Answer = Callable[[Sequence[bytes]], Sequence[bytes | None]]


@dataclass(frozen=True)
class Door:
    """Says where calls are taken: under a name on the listener's own machine, at a port of its address, or both."""

    key: bytes
    local: str = ""
    port: int = 0


class _Peer:
    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.known = False
        #: what has come and is not answered, and what is left of an answer
        self.came = b""
        self.unsent = b""
        #: whether the rest is waited for
        self.waits = False
        #: since when a message has begun, the rest is left, or the key is awaited
        self.since = now

    def read(self) -> None:
        """Take what has come, as much as one message may have, as what is there has to be answered first; raise
        ``OSError`` if the peer hangs up."""
        room = MOST_ASKED + _LENGTH.size - len(self.came)
        if not room:
            return
        came = self.sock.recv(room)
        if not came:
            raise ConnectionResetError("the peer hung up")
        self.came = self.came + came if self.came else came

    def next(self) -> bytes | None:
        """Return the next message that is whole; raise ``OSError`` if one begins that is too large."""
        if len(self.came) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self.came)
        if size > MOST_ASKED:
            raise ConnectionAbortedError(f"a request of {size} bytes")
        end = _LENGTH.size + size
        if end > len(self.came):
            return None
        message, self.came = self.came[_LENGTH.size : end], self.came[end:]
        return message

    def send(self, data: bytes) -> None:
        """Send what goes without waiting, and keep the rest."""
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        self.unsent = data[sent:]


class SmallCallListener:
    def __init__(self, endpoint: Endpoint, port: int, answer: Answer, *, only_near: bool) -> None:
        """``port`` is one of the endpoint's address, any free one for 0; ``only_near`` opens none."""
        self._doors: list[socket.socket] = []
        local, taken = "", 0
        if sys.platform == "linux":
            name = f"fleet-{secrets.token_hex(16)}"
            with contextlib.suppress(OSError):
                self._doors.append(local_door(name))
                local = name
        if not only_near and (port or not (local and is_loopback(endpoint))):
            self._doors.append(tcp_door(endpoint, port))
            taken = self._doors[-1].getsockname()[1]
        self.door = Door(secrets.token_bytes(KEY_BYTES), local, taken)
        self._answer = answer
        self._clock = SystemClock()
        self._peers: set[_Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for each in (*self._doors, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._closing = False
        #: whether nobody is let in for a moment
        self._is_shut = False
        self._thread = threading.Thread(target=self._run, name="fleet-small-calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.close()
        self._thread.join()

    # ---------------------------------------------------------------- on its thread

    def _run(self) -> None:
        look_at = 0.0
        #: those of whom more has come than has been answered
        more: list[_Peer] = []
        try:
            while not self._closing:
                heard = more
                for key, events in self._selector.select(0.0 if more else _LOOK_S):
                    if key.data is None:
                        self._let_in(key.fileobj)
                    elif self._hear(key.data, events) and key.data not in more:
                        heard.append(key.data)
                calls = [(peer, message) for peer in heard if (message := self._next(peer)) is not None]
                for start in range(0, len(calls), _TOGETHER):
                    self._serve(calls[start : start + _TOGETHER])
                # Nobody has more than one answer under way, so that those who do not read take no memory.
                more = [peer for peer, _ in calls if peer.came and peer in self._peers and not peer.waits]
                now = self._clock.now()
                if now >= look_at:
                    look_at = now + _LOOK_S
                    self._look_around(now)
        finally:
            for sock in (*(peer.sock for peer in self._peers), *self._doors, self._woken):
                sock.close()
            self._selector.close()

    def _let_in(self, door: object) -> None:
        if not isinstance(door, socket.socket) or door is self._woken or self._is_shut:
            return
        try:
            sock, _ = door.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("no connection for small calls could be taken, and none is for a moment: %s", error)
            for each in self._doors:
                self._selector.unregister(each)
            self._is_shut = True
            return
        if len(self._peers) >= _MOST_PEERS or sum(not each.known for each in self._peers) >= _MOST_STRANGERS:
            sock.close()
            return
        Line(sock).tune()
        sock.setblocking(False)
        peer = _Peer(sock, self._clock.now())
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer, events: int) -> bool:
        """Attend to a peer from which something has come, or that takes something; return whether it may be served."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer, peer.unsent)
                return not peer.waits
            if not peer.known:
                self._check(peer)
                return False
            if not peer.came:
                peer.since = self._clock.now()
            peer.read()
            return True
        except OSError as error:
            self._drop(peer, error)
            return False

    def _next(self, peer: _Peer) -> bytes | None:
        try:
            message = peer.next()
        except OSError as error:
            self._drop(peer, error)
            return None
        if message is not None:
            peer.since = self._clock.now()  # the next one may have begun
        return message

    def _check(self, peer: _Peer) -> None:
        """Read the key, which comes in one go."""
        if not hmac.compare_digest(peer.sock.recv(KEY_BYTES), self.door.key):
            raise ConnectionRefusedError("a peer does not have the key")
        peer.known = True

    def _serve(self, calls: Sequence[tuple[_Peer, bytes]]) -> None:
        try:
            answers = self._answer([message for _, message in calls])
        except Exception:
            _log.exception("small calls could not be answered")
            answers = [None] * len(calls)
        for (peer, _), answer in zip(calls, answers, strict=True):
            if peer not in self._peers:
                continue
            try:
                if answer is None:
                    raise ConnectionAbortedError("a request that is for gRPC")
                self._send(peer, _LENGTH.pack(len(answer)) + answer)
            except OSError as error:
                self._drop(peer, error)

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Send data. Nothing more is read from a peer that does not take what it has asked for."""
        peer.send(data)
        if bool(peer.unsent) != peer.waits:
            peer.waits = not peer.waits
            peer.since = self._clock.now()
            self._selector.modify(peer.sock, selectors.EVENT_WRITE if peer.waits else selectors.EVENT_READ, peer)

    def _look_around(self, now: float) -> None:
        """Leave those who have taken too long, and open the doors again."""
        for peer in list(self._peers):
            most_s = _STALL_S if peer.known else _HANDSHAKE_S
            if (peer.came or peer.waits or not peer.known) and now - peer.since > most_s:
                self._drop(peer, TimeoutError(f"it has taken more than {most_s:g} s"))
        if self._is_shut:
            self._is_shut = False
            for door in self._doors:
                self._selector.register(door, selectors.EVENT_READ)

    def _drop(self, peer: _Peer, why: OSError) -> None:
        if peer in self._peers:
            _log.debug("a connection for small calls ended: %s", why)
            self._peers.remove(peer)
            self._selector.unregister(peer.sock)
            peer.sock.close()


class SmallCallChannel:
    """Makes small calls. Each has a connection to itself meanwhile, so any number of threads may."""

    def __init__(self, endpoint: Endpoint, door: Door, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._endpoint = endpoint
        self._door = door
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._pause_s, self._rests_until = 0.0, -math.inf
        self._closed = False

    def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Return the answer, or None if gRPC is to be asked; raise a ``TransportError`` if none comes in time."""
        if len(request) > MOST_ASKED or self._clock.now() < self._rests_until:
            return None
        try:
            sock = self._take(timeout_s)
        except OSError as error:
            pause_s = self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._rests_until = self._clock.now() + pause_s
            _log.info(
                "no connection for small calls to %s, which go through gRPC for %g s: %s",
                *(self._endpoint, pause_s, error),
            )
            return None
        try:
            sock.settimeout(timeout_s)
            sock.sendall(_LENGTH.pack(len(request)) + request)
            (size,) = _LENGTH.unpack(_received(sock, _LENGTH.size))
            if size > MOST_ANSWERED + MOST_ASKED:
                raise ConnectionAbortedError(f"an answer of {size} bytes")
            answer = _received(sock, size)
        except TimeoutError:
            self._end(sock)
            raise TransportError(f"no answer within {timeout_s:g} s") from None
        except OSError:
            self._end(sock)
            return None
        except BaseException:  # an answer that nobody takes must not be the next one's
            self._end(sock)
            raise
        with self._lock:
            self._busy.discard(sock)
            if not self._closed and len(self._idle) < _KEPT:
                self._idle.append(sock)
                return answer
        sock.close()
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for sock in self._busy:
                Line(sock).shut()
        for sock in idle:
            sock.close()

    def _take(self, timeout_s: float) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the channel is closed")
            sock = self._idle.pop() if self._idle else None
            if sock is not None:
                self._busy.add(sock)
        if sock is None:
            sock = self._connect(min(timeout_s, _CONNECT_S))
            with self._lock:
                if self._closed:
                    sock.close()
                    raise ConnectionAbortedError("the channel is closed")
                self._busy.add(sock)
        self._pause_s = 0.0
        return sock

    def _connect(self, timeout_s: float) -> socket.socket:
        sock = reach(self._endpoint, self._door, timeout_s)
        try:
            Line(sock).tune()
            sock.sendall(self._door.key)
        except BaseException:
            sock.close()
            raise
        return sock

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
        sock.close()


def _received(sock: socket.socket, nbytes: int) -> bytes:
    data = sock.recv(nbytes)
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not (data and more):
            raise ConnectionResetError("the peer hung up")
        data += more
    return data
