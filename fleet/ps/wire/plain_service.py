"""Answers the calls of a service of gRPC that is documented for everybody: a message in, a message or several out.

What servers and workers say to each other is in ``grpc_server``. Here an error is a status of gRPC, as clients in any
language expect it, and comes out of a channel of this package as the error that it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc

from fleet.base.cluster import Endpoint
from fleet.errors import (
    AuthenticationError,
    FleetError,
    IdOutOfRangeError,
    NotInitializedError,
    ProtocolError,
    ServerBusyError,
)
from fleet.ps.wire.grpc_client import TOKEN, opened
from fleet.ps.wire.grpc_server import started
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls import why_no_handshake
from fleet.ps.wire.transport import TransportError

_log = logging.getLogger("fleet.wire")

#: What an error is to others. Errors of other classes are mistakes of ours.
_STATUS: dict[type[FleetError], grpc.StatusCode] = {
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    IdOutOfRangeError: grpc.StatusCode.INVALID_ARGUMENT,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    NotInitializedError: grpc.StatusCode.UNAVAILABLE,
    ServerBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_MOST_TEXT = 1 << 10


class Methods(NamedTuple):
    """Holds what answers, by the names of the calls: with one message, or with several."""

    single: Mapping[str, Callable[[bytes], bytes]]
    several: Mapping[str, Callable[[bytes], Iterator[bytes]]]


class PlainListener:
    def __init__(
        self,
        service: str,
        methods: Methods,
        endpoint: Endpoint,
        at: Endpoint,
        threads: int,
        security: Security,
        most_bytes: int,
    ) -> None:
        """``endpoint`` is how others know the server, ``at`` is where it listens."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fleet-replica")
        try:
            self._server = started(at, _Handler(service, methods, endpoint, security), self._pool, security, most_bytes)
        except BaseException:
            self._pool.shutdown(wait=False)
            raise

    def close(self, grace_s: float = 0.0) -> None:
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=True)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, service: str, methods: Methods, endpoint: Endpoint, security: Security) -> None:
        self._endpoint = endpoint
        self._security = security
        self._handlers = {
            f"/{service}/{name}": grpc.unary_unary_rpc_method_handler(_answering(answer))
            for name, answer in methods.single.items()
        } | {
            f"/{service}/{name}": grpc.unary_stream_rpc_method_handler(_streaming(answer))
            for name, answer in methods.several.items()
        }

    def service(self, details: Any) -> Any:
        presented = [value for key, value in details.invocation_metadata or () if key == TOKEN]
        refusal = self._security.refusal(presented, self._endpoint)
        if refusal is None:
            return self._handlers.get(details.method)
        # A stream of requests that is never read: what a stranger sends is not.
        return grpc.stream_stream_rpc_method_handler(lambda _, context: _abort(context, refusal))


def _answering(answer: Callable[[bytes], bytes]) -> Callable[[bytes, Any], bytes]:
    def answered(request: bytes, context: Any) -> bytes:
        try:
            return answer(request)
        except Exception as error:
            _abort(context, error)
            raise

    return answered


def _streaming(answer: Callable[[bytes], Iterator[bytes]]) -> Callable[[bytes, Any], Iterator[bytes]]:
    def answered(request: bytes, context: Any) -> Iterator[bytes]:
        try:
            yield from answer(request)
        except Exception as error:
            _abort(context, error)

    return answered


def _abort(context: Any, error: Exception) -> None:
    """End a call with the status of an error, which leaves by an exception of gRPC's."""
    status = _STATUS.get(type(error)) if isinstance(error, FleetError) else None
    if status is None:
        _log.error("a call failed", exc_info=error)
        context.abort(grpc.StatusCode.INTERNAL, "the call failed; the log of the server says why")
    context.abort(status, str(error)[:_MOST_TEXT].encode(errors="backslashreplace").decode())


class PlainCall:
    """Holds a request that is under way."""

    def __init__(self, channel: PlainChannel, future: Any, timeout_s: float) -> None:
        self._channel = channel
        self._future = future
        self._timeout_s = timeout_s

    @property
    def is_done(self) -> bool:
        return bool(self._future.done())

    def result(self) -> bytes:
        """Return the answer, once it is there."""
        return self._channel.answer_of(self._future, self._timeout_s)


class PlainChannel:
    """Calls such a service."""

    def __init__(self, service: str, endpoint: Endpoint, security: Security, most_bytes: int) -> None:
        self.endpoint = endpoint
        self._service = service
        self._security = security
        self._beside = ((TOKEN, security.token),) if security.token else None
        self._channel = opened(endpoint, security, most_bytes)
        self._calls: dict[str, Any] = {}
        self._answered = False

    def ask(self, name: str, request: bytes, timeout_s: float) -> bytes:
        """Return the answer; raise a ``TransportError`` if none comes, or the error that it is."""
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = self._channel.unary_unary(f"/{self._service}/{name}")
        try:
            answer: bytes = call(request, timeout=timeout_s, metadata=self._beside)
        except (grpc.RpcError, ValueError) as error:
            raise self._read(error, timeout_s) from None
        self._answered = True
        return answer

    def start(self, name: str, request: bytes, timeout_s: float) -> PlainCall:
        """Ask, and wait for nothing."""
        call = self._channel.unary_unary(f"/{self._service}/{name}")
        try:
            return PlainCall(self, call.future(request, timeout=timeout_s, metadata=self._beside), timeout_s)
        except ValueError as error:
            raise self._read(error, timeout_s) from None

    def stream(self, name: str, request: bytes, timeout_s: float) -> Iterator[bytes]:
        """Yield the parts of the answer; raise as ``ask`` does."""
        try:
            call = self._channel.unary_stream(f"/{self._service}/{name}")(
                request, timeout=timeout_s, metadata=self._beside
            )
        except ValueError as error:
            raise self._read(error, timeout_s) from None
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._read(error, timeout_s) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def answer_of(self, future: Any, timeout_s: float) -> bytes:
        """Return the answer to what was started, as ``ask`` does; of a server that was never reached it does not look
        why."""
        try:
            answer: bytes = future.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise self._read(error, timeout_s, is_curious=False) from None
        self._answered = True
        return answer

    def _read(self, error: Exception, timeout_s: float, *, is_curious: bool = True) -> Exception:
        if not isinstance(error, grpc.RpcError):  # gRPC's answer to a call on a closed channel
            return TransportError(str(error))
        code, told = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(f"{self.endpoint} refuses this process: {told}")
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ProtocolError(f"{self.endpoint} refuses a request: {told}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ServerBusyError(f"{self.endpoint} has no time now: {told}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return TransportError(f"what listens there is no such service ({told})")
        # A server that was never reached may be up and not let us in, which gRPC does not tell apart.
        if code is grpc.StatusCode.UNAVAILABLE and not self._answered and is_curious:
            why = why_no_handshake(self.endpoint, self._security.tls)
            if why is not None:
                return why
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TransportError(f"no answer within {timeout_s:g} s")
        return TransportError(f"{code.name.lower()}: {told}")
