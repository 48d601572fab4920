"""A server takes requests through gRPC, and may reply late without holding a thread.

gRPC's threaded server takes a handler marked ``experimental_non_blocking``: it is called on a pool thread with a
callback, returns at once, and answers through the callback whenever it likes, from any thread (the health-checking
service that ships with gRPC is built on it). Measured against ``grpc.aio`` with threads it takes half the time; the
figures are in docs/decisions/0001-late-replies.md.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from fleet.base.clock import SystemClock
from fleet.base.cluster import Binding, Endpoint
from fleet.base.exposure import warn_if_only_here
from fleet.base.ports import holder_of, is_taken, why_not
from fleet.errors import AuthenticationError, ConfigurationError, PortInUseError
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_client import EXCHANGE, MAX_MESSAGE_BYTES, TOKEN, UPLOAD, URGENT, GrpcChannel, of_at_most
from fleet.ps.wire.security import Security
from fleet.ps.wire.transport import Handler, TransportError
from fleet.ps.wire.wire_errors import error_reply, serve

_log = logging.getLogger("fleet.wire")

URGENT_THREADS = 4

#: So many requests of one connection are under way at once, more wait at the client; the count is a client's own, and
#: far more than a worker has.
_MAX_UNDER_WAY = 1024

#: To say who it is, a new connection has so long.
_HANDSHAKE_MS = 10_000

#: A request that has begun may bring nothing for so long.
STALL_S = 60.0

#: So many replies, and so many bytes as one message may have, wait for one peer to read. More are dropped: it asks and
#: asks and does not listen.
MAX_UNREAD = 1024

#: So many strangers are named in the log, once each.
_MOST_NAMED = 1000

_Send = Callable[[bytes | None], None]

_OPTIONS = [
    # Two servers on one port must be an error, not a coin toss for every connection.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.lookahead_bytes", 1 << 22),
    ("grpc.max_concurrent_streams", _MAX_UNDER_WAY),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
]


class GrpcNetwork:
    def __init__(self, threads: int, security: Security | None = None, binding: Binding | None = None) -> None:
        self._threads = threads
        self._security = security or Security()
        self._binding = binding or Binding()

    def listen(self, endpoint: Endpoint, handler: Handler) -> GrpcListener:
        return GrpcListener(endpoint, self._binding.of(endpoint), handler, self._threads, self._security)

    def connect(self, endpoint: Endpoint) -> GrpcChannel:
        return GrpcChannel(endpoint, self._security)

    def own_address(self, towards: Endpoint) -> str:
        with contextlib.suppress(OSError, UnicodeError):
            host = towards.host.strip("[]")
            for family, _, _, _, address in socket.getaddrinfo(host, towards.port, type=socket.SOCK_DGRAM):
                # Connecting a datagram socket sends nothing: it only asks which address such a packet would carry.
                # There may be no way to some of a host's addresses.
                with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        return "127.0.0.1"


class GrpcListener:
    def __init__(self, endpoint: Endpoint, at: Endpoint, handler: Handler, threads: int, security: Security) -> None:
        """``endpoint`` is how others know the server, ``at`` is where it listens."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fleet-rpc")
        # However many requests wait for a long round to end, heartbeats are answered meanwhile.
        self._urgent = ThreadPoolExecutor(URGENT_THREADS, thread_name_prefix="fleet-rpc-urgent")
        methods = _Methods(handler, self._pool, threads, self._urgent, security.max_message_bytes)
        try:
            self._server = started(at, _Gate(methods, security, endpoint), self._pool, security, MAX_MESSAGE_BYTES)
        except BaseException:
            self._pool.shutdown(wait=False)
            self._urgent.shutdown(wait=False)
            raise

    def close(self, grace_s: float = 0.0) -> None:
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=True)
        self._urgent.shutdown(wait=True)


def started(
    at: Endpoint, handler: grpc.GenericRpcHandler, pool: ThreadPoolExecutor, security: Security, most_bytes: int
) -> Any:
    """Return a server of gRPC that listens, for messages of at most so many bytes."""
    security.check_listening(at)
    # When gRPC fails to bind, it names neither the reason nor the holder, so this looks first.
    if is_taken(at):
        raise _port_in_use(at)
    warn_if_only_here(at)
    server = grpc.server(pool, options=[*_OPTIONS, *of_at_most(most_bytes)])
    server.add_generic_rpc_handlers((handler,))
    try:
        _bind(server, at, security)
    except RuntimeError as error:
        server.stop(None)
        if is_taken(at):
            raise _port_in_use(at) from None
        raise ConfigurationError(
            "cannot listen here",
            where=str(at),
            got=why_not(at) or str(error),
            todo="Give the server an address of this machine; FLEET_BIND_ADDRESS is one that others need not know.",
        ) from None
    server.start()
    return server


def _bind(server: Any, at: Endpoint, security: Security) -> None:
    tls = security.tls
    if tls is None:
        server.add_insecure_port(str(at))
        return
    credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.authority, tls.mutual)
    server.add_secure_port(str(at), credentials)


def _port_in_use(endpoint: Endpoint) -> PortInUseError:
    return PortInUseError(
        f"port {endpoint.port} is in use",
        where=str(endpoint),
        got=holder_of(endpoint.port),
        todo="End that process, or give this job another port.",
    )


class _Gate(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Lets in every request, of whatever kind, and refuses one that has no right to come before it is read."""

    def __init__(self, methods: _Methods, security: Security, endpoint: Endpoint) -> None:
        self._methods = methods
        self._security = security
        self._endpoint = endpoint
        self._named: set[str] = set()

    def service(self, details: Any) -> Any:
        presented = [value for key, value in details.invocation_metadata or () if key == TOKEN]
        refusal = self._security.refusal(presented, self._endpoint)
        self._methods.arrivals.give_up()
        if refusal is None:
            return self._methods.of(details.method)
        return grpc.stream_stream_rpc_method_handler(lambda _, context: self._turn_away(refusal, context.peer()))

    def _turn_away(self, refusal: AuthenticationError, peer: str) -> Iterator[bytes]:
        host = peer.rpartition(":")[0]
        if host not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(host)
            _log.warning("%s: a request from %s was refused: %s", self._endpoint, peer, refusal.what)
        yield from error_reply(refusal).pieces()


class _Methods:
    def __init__(
        self, handler: Handler, pool: ThreadPoolExecutor, threads: int, urgent: ThreadPoolExecutor, limit: int
    ) -> None:
        self.arrivals = _Arrivals()
        # A peer has two lanes for replies, and one thread stays free of both; what it sends has a lane as well.
        lanes = _Lanes(pool, max(1, (threads - 1) // 2), limit)

        def exchange(request: bytes, context: Any, send: _Send) -> None:
            _Exchange(context, send, lanes).serve(handler, (request,), limit)

        reading = _Lanes(pool, max(1, (threads - 1) // 2), limit)

        def upload(requests: Iterator[bytes], context: Any, send: _Send) -> None:
            def serve() -> None:
                _Exchange(context, send, lanes).serve(handler, self.arrivals.read(context, requests), limit)

            reading.enter(context.peer(), serve, 0, here=True)

        overtaking = _Lanes(urgent, 1, limit)

        def hurry(request: bytes, context: Any, send: _Send) -> None:
            _Exchange(context, send, overtaking).serve(handler, (request,), limit)

        hurry.experimental_non_blocking = True  # type: ignore[attr-defined]
        hurry.experimental_thread_pool = urgent  # type: ignore[attr-defined]
        exchange.experimental_non_blocking = True  # type: ignore[attr-defined]
        upload.experimental_non_blocking = True  # type: ignore[attr-defined]
        self._methods = {
            EXCHANGE: grpc.unary_stream_rpc_method_handler(exchange),
            UPLOAD: grpc.stream_stream_rpc_method_handler(upload),
            URGENT: grpc.unary_stream_rpc_method_handler(hurry),
        }

    def of(self, name: str) -> Any:
        return self._methods.get(name)


class _Arrivals:
    """Receives requests of several pieces. Each holds a thread; one that brings nothing for long loses it."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._heard: dict[Any, float] = {}  # by its context, when a request's last piece came

    def read(self, context: Any, requests: Iterator[bytes]) -> Iterator[bytes]:
        self._heard[context] = self._clock.now()
        try:
            for piece in requests:
                self._heard[context] = self._clock.now()
                yield piece
        except grpc.RpcError:
            raise TransportError("the peer hung up in the middle of its request") from None
        finally:
            del self._heard[context]

    def give_up(self) -> None:
        """Cancel requests that have brought nothing for long. This runs whenever anything comes, as only then somebody
        misses a thread."""
        latest = self._clock.now() - STALL_S
        for context, heard in list(self._heard.items()):
            if heard < latest:
                context.cancel()


class _Lanes:
    """Carries replies on their way out, or large requests on their way in. gRPC waits for the peer to read, or to send,
    so every peer has a lane, with room for a few side by side and the others behind them: one that stops halfway never
    holds all threads of the pool.

    The room is more than one where the pool allows it, since a peer may wait for its second reply before its first.
    """

    def __init__(self, pool: ThreadPoolExecutor, room: int, most_bytes: int) -> None:
        self._pool = pool
        self._room = room
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._busy: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[tuple[Callable[[], None], int]]] = {}
        self._bytes: Counter[Hashable] = Counter()  # of what waits

    def enter(self, lane: Hashable, deliver: Callable[[], None], nbytes: int, *, here: bool) -> bool:
        """Send as soon as there is room: on this thread if that is now and ``here``, else on one of the pool. Return
        False if there is no room to wait either."""
        with self._lock:
            if self._busy[lane] >= self._room:
                waiting = self._waiting.setdefault(lane, deque())
                if len(waiting) >= MAX_UNREAD or (waiting and self._bytes[lane] + nbytes > self._most_bytes):
                    return False
                waiting.append((deliver, nbytes))
                self._bytes[lane] += nbytes
                return True
            self._busy[lane] += 1
        if here:
            self._drain(lane, deliver)
        else:
            with contextlib.suppress(RuntimeError):  # the pool is closed, and with it every connection
                self._pool.submit(self._drain, lane, deliver)
        return True

    def _drain(self, lane: Hashable, deliver: Callable[[], None]) -> None:
        following: Callable[[], None] | None = deliver
        while following is not None:
            try:
                following()
            except Exception:
                _log.exception("a reply could not be sent")
            following = self._next(lane)

    def _next(self, lane: Hashable) -> Callable[[], None] | None:
        """Return what waits in this lane; if nothing is left, free one place in it."""
        with self._lock:
            waiting = self._waiting.get(lane)
            if waiting:
                following, nbytes = waiting.popleft()
                self._bytes[lane] -= nbytes
                return following
            self._waiting.pop(lane, None)
            self._bytes.pop(lane, None)
            self._busy[lane] -= 1
            if not self._busy[lane]:
                del self._busy[lane]
            return None


class _Exchange:
    """Holds one request and its reply. No handler waits for a peer to read: a reply that is there when the handler
    returns leaves then, on the request's thread; one that comes late, or to a peer still busy reading, leaves on a
    thread of the pool.
    """

    def __init__(self, context: Any, send: _Send, lanes: _Lanes) -> None:
        self._context = context
        self._send = send
        self._lanes = lanes
        self._lock = threading.Lock()
        self._serving = True
        self._reply: Frame | None = None

    def serve(self, handler: Handler, pieces: Iterable[bytes], limit: int) -> None:
        try:
            afterwards = serve(handler, pieces, self._respond, limit)
        finally:
            with self._lock:
                self._serving = False
                reply = self._reply
        if reply is not None:
            self._leave(reply, here=True)
        afterwards()

    def _respond(self, reply: Frame) -> None:
        with self._lock:
            if self._reply is not None:
                return  # a handler that answered and failed after it
            self._reply = reply
            if self._serving:
                return
        self._leave(reply, here=False)

    def _leave(self, reply: Frame, here: bool) -> None:
        # Small replies overtake large ones, so that a heartbeat is answered while a model is sent.
        peer = self._context.peer()
        lane = (peer, bool(reply.tensors))
        if not self._lanes.enter(lane, lambda: self._deliver(reply), reply.nbytes, here=here):
            _log.warning("%s does not read its replies, and gets no more of them", peer)
            self._context.cancel()

    def _deliver(self, reply: Frame) -> None:
        if not self._context.is_active():
            return  # the peer hung up while its request waited
        for piece in reply.pieces():
            self._send(piece)
        self._send(None)
