"""The loopback network lies inside one process: for the whole job of a laptop, and for most tests.

Every frame is encoded and read again, so that nothing but the sockets differs from the real thing.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as FutureTimeoutError

from fleet.base.cluster import Endpoint
from fleet.base.interruption import uninterrupted
from fleet.errors import PortInUseError
from fleet.numeric.modes import outside_all
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.transport import BrokenCall, Call, Handler, TransportError
from fleet.ps.wire.wire_errors import serve


class LoopbackNetwork:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[Endpoint, _Listener] = {}

    def listen(self, endpoint: Endpoint, handler: Handler) -> _Listener:
        with self._lock:
            if endpoint in self._listeners:
                raise PortInUseError("the endpoint is taken", where=str(endpoint))
            self._listeners[endpoint] = _Listener(self, endpoint, handler)
            return self._listeners[endpoint]

    def connect(self, endpoint: Endpoint) -> _Channel:
        return _Channel(self, endpoint)

    def own_address(self, towards: Endpoint) -> str:  # noqa: ARG002
        return "127.0.0.1"  # names are this network's own: nobody else knows them

    def listener(self, endpoint: Endpoint) -> _Listener | None:
        with self._lock:
            return self._listeners.get(endpoint)

    def forget(self, endpoint: Endpoint, listener: _Listener) -> None:
        with self._lock:
            if self._listeners.get(endpoint) is listener:
                del self._listeners[endpoint]


class _Listener:
    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint, handler: Handler) -> None:
        self._network = network
        self._endpoint = endpoint
        self.handler = handler
        self.calls = _Calls()

    def close(self, grace_s: float = 0.0) -> None:
        self._network.forget(self._endpoint, self)
        self.calls.end(f"the server at {self._endpoint} closed", grace_s)


class _Channel:
    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint
        self._calls = _Calls()

    def start(
        self,
        request: Frame,
        timeout_s: float | None = None,
        *,
        urgent: bool = False,  # noqa: ARG002
        ahead: bool = False,  # noqa: ARG002
    ) -> Call:
        listener = self._network.listener(self._endpoint)
        call = _Call(timeout_s)
        if listener is None or not listener.calls.add(call):
            return BrokenCall(f"nobody listens at {self._endpoint}")
        if not self._calls.add(call):
            call.cancel()
            return BrokenCall("the channel is closed")
        with uninterrupted(), outside_all():  # the server is in another process as a rule, which goes on
            serve(listener.handler, request.pieces(), call.respond)()
        return call

    def forked(self) -> _ForkedChannel:
        return _ForkedChannel(self._network, self._endpoint)

    def close(self) -> None:
        self._calls.end("the channel is closed", 0.0)


class _ForkedChannel(_Channel):
    """Serves a forked child, which has a copy of the server as well. A thread that the child does not have may hold one
    of that server's locks for good, so another thread asks, and nobody waits for it longer than for any other server.
    """

    def start(
        self,
        request: Frame,
        timeout_s: float | None = None,
        *,
        urgent: bool = False,  # noqa: ARG002
        ahead: bool = False,  # noqa: ARG002
    ) -> Call:
        call = _Call(timeout_s)

        def ask() -> None:
            listener = self._network.listener(self._endpoint)
            if listener is None:
                call.fail(TransportError(f"nobody listens at {self._endpoint}"))
            else:
                serve(listener.handler, request.pieces(), call.respond)()

        threading.Thread(target=ask, name="fleet-forked", daemon=True).start()
        return call


class _Call:
    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self.future: Future[list[bytes]] = Future()

    def respond(self, reply: Frame) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller gave up while its request waited
            self.future.set_result(list(reply.pieces()))

    def fail(self, error: TransportError) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        try:
            return read_frame(pb.Reply, self.future.result(self._timeout_s))
        except CancelledError:
            raise TransportError("cancelled") from None
        except FutureTimeoutError:
            self.cancel()
            raise TransportError(f"no reply within {self._timeout_s:g} s") from None

    def cancel(self) -> None:
        self.future.cancel()


class _Calls:
    """Holds the calls under way on one side of the line; closing that side ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Future[list[bytes]], _Call] = {}
        self._closed = False

    def add(self, call: _Call) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._under_way[call.future] = call
        call.future.add_done_callback(self._done)
        return True

    def _done(self, future: Future[list[bytes]]) -> None:
        with self._lock:
            self._under_way.pop(future, None)

    def end(self, reason: str, grace_s: float) -> None:
        with self._lock:
            self._closed = True
            under_way = list(self._under_way.values())
        wait([call.future for call in under_way], grace_s)
        for call in under_way:
            call.fail(TransportError(reason))
