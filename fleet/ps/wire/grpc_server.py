"""The server half of the gRPC transport: replies may come late, without holding a thread.

gRPC's threaded server takes a handler marked ``experimental_non_blocking``: it is called on a pool thread with a
callback, returns at once, and answers through the callback whenever it likes, from any thread (the health-checking
service that ships with gRPC is built on it). Measured against ``grpc.aio`` it moves large messages twice as fast; the
figures are in docs/design.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from fleet.cluster import Endpoint
from fleet.errors import ConfigurationError, PortInUseError
from fleet.ps.wire.errors import serve
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_client import EXCHANGE, MAX_MESSAGE_BYTES, UPLOAD, GrpcChannel
from fleet.ps.wire.port_holder import holder_of, is_taken
from fleet.ps.wire.transport import Handler

_Send = Callable[[bytes | None], None]

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port must be an error, not a coin toss for every connection.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.lookahead_bytes", 1 << 22),
]


class GrpcNetwork:
    def __init__(self, threads: int) -> None:
        self._threads = threads

    def listen(self, endpoint: Endpoint, handler: Handler) -> GrpcListener:
        return GrpcListener(endpoint, handler, self._threads)

    def connect(self, endpoint: Endpoint) -> GrpcChannel:
        return GrpcChannel(endpoint)


class GrpcListener:
    def __init__(self, endpoint: Endpoint, handler: Handler, threads: int) -> None:
        # gRPC's own failure to bind names neither the reason nor the holder, so look before it does.
        if is_taken(endpoint):
            raise _port_in_use(endpoint)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fleet-rpc")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Handlers(handler, self._pool),))
        try:
            self._server.add_insecure_port(str(endpoint))
        except RuntimeError as error:
            self._server.stop(None)
            self._pool.shutdown(wait=False)
            if is_taken(endpoint):
                raise _port_in_use(endpoint) from None
            raise ConfigurationError(
                "cannot listen here",
                where=str(endpoint),
                got=str(error),
                todo="Give the server an address of this machine.",
            ) from None
        self._server.start()

    def close(self, grace_s: float = 0.0) -> None:
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=True)


def _port_in_use(endpoint: Endpoint) -> PortInUseError:
    return PortInUseError(
        f"port {endpoint.port} is in use",
        where=str(endpoint),
        got=holder_of(endpoint.port),
        todo="End that process, or give this job another port.",
    )


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, handler: Handler, pool: ThreadPoolExecutor) -> None:
        def exchange(request: bytes, context: Any, send: _Send) -> None:
            _Exchange(context, send, pool).serve(handler, (request,))

        def upload(requests: Iterator[bytes], context: Any, send: _Send) -> None:
            _Exchange(context, send, pool).serve(handler, requests)

        exchange.experimental_non_blocking = True  # type: ignore[attr-defined]
        upload.experimental_non_blocking = True  # type: ignore[attr-defined]
        self._methods = {
            EXCHANGE: grpc.unary_stream_rpc_method_handler(exchange),
            UPLOAD: grpc.stream_stream_rpc_method_handler(upload),
        }

    def service(self, details: Any) -> Any:
        return self._methods.get(details.method)


class _Exchange:
    """One request and its reply. A reply that comes late leaves on a pool thread: gRPC's send waits for the peer to
    read, and whoever closed a round must not wait for the slowest reader in it."""

    def __init__(self, context: Any, send: _Send, pool: ThreadPoolExecutor) -> None:
        self._context = context
        self._send = send
        self._pool = pool
        self._late = False

    def serve(self, handler: Handler, pieces: Iterable[bytes]) -> None:
        serve(handler, pieces, self._respond)
        self._late = True

    def _respond(self, reply: Frame) -> None:
        if self._late:
            with contextlib.suppress(RuntimeError):  # the pool is closed, and with it every connection
                self._pool.submit(self._deliver, reply)
        else:
            self._deliver(reply)

    def _deliver(self, reply: Frame) -> None:
        if not self._context.is_active():
            return  # the peer hung up while its request waited
        for piece in reply.pieces():
            self._send(piece)
        self._send(None)
