"""The client half of the gRPC transport; with ``grpc_server`` the only files that know gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.experimental

from fleet.cluster import Endpoint
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import PIECE_BYTES, Frame, read_frame
from fleet.ps.wire.transport import BrokenCall, Call, TransportError

#: One piece and its share of protobuf and HTTP/2 framing.
MAX_MESSAGE_BYTES = PIECE_BYTES + (64 << 10)

EXCHANGE = "/fleet.ParameterServer/Exchange"
UPLOAD = "/fleet.ParameterServer/Upload"
URGENT = "/fleet.ParameterServer/Urgent"

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A server that comes up late is found within a second, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.lookahead_bytes", 1 << 22),
    # A connection of its own, also beside other workers in this process: one that stalls must not stall the others.
    ("grpc.use_local_subchannel_pool", 1),
    # Whoever asks for a reply reads it; without this every call would start a thread that reads for it.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
]


class GrpcChannel:
    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = grpc.insecure_channel(str(endpoint), options=_OPTIONS)
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
                return GrpcCall(method(first, timeout=timeout_s), timeout_s)
            return GrpcCall(self._upload(_chained(first, second, pieces), timeout=timeout_s), timeout_s)
        except ValueError as error:  # gRPC's answer to a request on a closed channel
            return BrokenCall(str(error))

    def close(self) -> None:
        self._channel.close()


class GrpcCall:
    def __init__(self, call: Any, timeout_s: float | None) -> None:
        self._call = call
        self._timeout_s = timeout_s

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        try:
            return read_frame(pb.Reply, self._call)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TransportError(f"no reply within {self._timeout_s:g} s") from None
            raise TransportError(f"{code.name.lower()}: {error.details()}") from None

    def cancel(self) -> None:
        self._call.cancel()


class _ReadAtOnce:
    """A call whose reply is read as it comes, by a thread: a server's send waits for its reader, and a large reply that
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
