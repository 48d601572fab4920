"""A client sends requests through gRPC, which few files beside this one know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.experimental

from fleet.base.cluster import Endpoint
from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import PIECE_BYTES, Frame, read_frame
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls import why_no_handshake
from fleet.ps.wire.transport import BrokenCall, BrokenChannel, Call, Channel, TransportError

#: One piece and its share of protobuf and HTTP/2 framing.
MAX_MESSAGE_BYTES = PIECE_BYTES + (64 << 10)

EXCHANGE = "/fleet.ParameterServer/Exchange"
UPLOAD = "/fleet.ParameterServer/Upload"
URGENT = "/fleet.ParameterServer/Urgent"

#: The name under which a token travels beside every request; gRPC takes any bytes under one that ends like this.
TOKEN = "fleet-token-bin"

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # A server that comes up late is found within a second, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # What gRPC names so is how long a connection may take to come about: a server may be far away, or busy.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.lookahead_bytes", 1 << 22),
    # Who has sent what nobody acknowledges knows within a minute that the connection is gone. That comes with pings, of
    # which servers want no more than one in five minutes, and the network may bring one later than the next.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    # A connection of its own, also beside other workers in this process: one that stalls must not stall the others.
    ("grpc.use_local_subchannel_pool", 1),
    # The thread that asks for a reply reads it; without this every call would start a thread that reads for it.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
]


class GrpcChannel:
    def __init__(self, endpoint: Endpoint, security: Security) -> None:
        self._endpoint = endpoint
        self._security = security
        self._answered = False
        self._beside = ((TOKEN, security.token),) if security.token else None
        self._channel = opened(endpoint, security, MAX_MESSAGE_BYTES)
        self._exchange = self._channel.unary_stream(EXCHANGE)
        self._upload = self._channel.stream_stream(UPLOAD)
        self._urgent = self._channel.unary_stream(URGENT)

    def start(
        self, request: Frame, timeout_s: float | None = None, *, urgent: bool = False, ahead: bool = False
    ) -> Call:
        call = self._begin(request, timeout_s, urgent)
        return _ReadAtOnce(call) if ahead else call

    def _begin(self, request: Frame, timeout_s: float | None, urgent: bool) -> Call:
        pieces = request.pieces()
        first = next(pieces)
        second = next(pieces, None)
        try:
            if second is None:
                method = self._urgent if urgent else self._exchange
                started = method(first, timeout=timeout_s, metadata=self._beside)
            else:
                started = self._upload(_chained(first, second, pieces), timeout=timeout_s, metadata=self._beside)
            return GrpcCall(started, timeout_s, self._read, self._why_unavailable)
        except ValueError as error:  # gRPC's answer to a request on a closed channel
            return BrokenCall(str(error))

    def forked(self) -> Channel:
        return BrokenChannel("gRPC does not outlive a fork, and there are no direct connections")

    def close(self) -> None:
        self._channel.close()

    def _read(self, pieces: Iterator[bytes]) -> Frame:
        reply = read_frame(pb.Reply, pieces, self._security.max_message_bytes)
        self._answered = True
        return reply

    def _why_unavailable(self) -> FleetError | None:
        """Return why a server was never reached: it may be up and not let us in, which gRPC does not tell apart."""
        return None if self._answered else why_no_handshake(self._endpoint, self._security.tls)


def of_at_most(nbytes: int) -> list[tuple[str, int]]:
    """Return the options by which messages have no more bytes."""
    return [("grpc.max_send_message_length", nbytes), ("grpc.max_receive_message_length", nbytes)]


def opened(endpoint: Endpoint, security: Security, most_bytes: int) -> Any:
    """Return a channel of gRPC, for messages of at most so many bytes."""
    security.check_connecting(endpoint)
    options: list[tuple[str, Any]] = [*_OPTIONS, *of_at_most(most_bytes)]
    tls = security.tls
    if tls is None:
        return grpc.insecure_channel(str(endpoint), options=options)
    if name := tls.settings.server_name:
        options.append(("grpc.ssl_target_name_override", name))
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.secure_channel(str(endpoint), credentials, options=options)


class GrpcCall:
    def __init__(
        self,
        call: Any,
        timeout_s: float | None,
        read: Callable[[Any], Frame],
        why_unavailable: Callable[[], FleetError | None],
    ) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._read = read
        self._why_unavailable = why_unavailable

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        try:
            return self._read(self._call)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE and (why := self._why_unavailable()) is not None:
                raise why from None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TransportError(f"no reply within {self._timeout_s:g} s") from None
            raise TransportError(f"{code.name.lower()}: {error.details()}") from None

    def cancel(self) -> None:
        self._call.cancel()


class _ReadAtOnce:
    """Reads the reply to a call as it comes, on a thread: a server's send waits for its reader, and a large reply that
    nobody reads yet would hold a thread of the server, and in the end the reply that its worker waits for."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reply: Future[Frame] = Future()
        threading.Thread(target=self._read, name="fleet-ahead", daemon=True).start()

    def _read(self) -> None:
        try:
            self._reply.set_result(self._call.result())
        except BaseException as error:
            self._reply.set_exception(error)

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        return self._reply.result()

    def cancel(self) -> None:
        self._call.cancel()


def _chained(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest
