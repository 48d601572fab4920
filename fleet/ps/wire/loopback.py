"""A network inside one process: the whole job of a laptop, and of most tests.

Every frame is encoded and read again, so that nothing but the sockets differs from the real thing.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError

from fleet.cluster import Endpoint
from fleet.errors import PortInUseError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.errors import serve
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.transport import Handler, TransportError


class LoopbackNetwork:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: dict[Endpoint, Handler] = {}

    def listen(self, endpoint: Endpoint, handler: Handler) -> _Listener:
        with self._lock:
            if endpoint in self._handlers:
                raise PortInUseError("the endpoint is taken", where=str(endpoint))
            self._handlers[endpoint] = handler
        return _Listener(self, endpoint)

    def connect(self, endpoint: Endpoint) -> _Channel:
        return _Channel(self, endpoint)

    def handler(self, endpoint: Endpoint) -> Handler | None:
        with self._lock:
            return self._handlers.get(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._handlers.pop(endpoint, None)


class _Listener:
    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint

    def close(self, grace_s: float = 0.0) -> None:  # noqa: ARG002 - replies leave at once here
        self._network.forget(self._endpoint)


class _Channel:
    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint

    def start(self, request: Frame, timeout_s: float | None = None) -> _Call:
        call = _Call(timeout_s)
        handler = self._network.handler(self._endpoint)
        if handler is None:
            call.fail(TransportError(f"nobody listens at {self._endpoint}"))
            return call
        serve(handler, request.pieces(), call.respond)
        return call

    def close(self) -> None:
        pass


class _Call:
    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._future: Future[list[bytes]] = Future()

    def respond(self, reply: Frame) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller gave up while its request waited
            self._future.set_result(list(reply.pieces()))

    def fail(self, error: TransportError) -> None:
        self._future.set_exception(error)

    def result(self) -> Frame:
        try:
            return read_frame(pb.Reply, self._future.result(self._timeout_s))
        except CancelledError:
            raise TransportError("cancelled") from None
        except FutureTimeoutError:
            raise TransportError(f"no reply within {self._timeout_s:g} s") from None

    def cancel(self) -> None:
        self._future.cancel()
