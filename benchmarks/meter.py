"""How much of a job's traffic is training: the bytes of gradients, changes, ids, rows and values, both ways."""

from __future__ import annotations

import threading

from fleet.base.cluster import Endpoint
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Call, Channel, Handler, Listener

#: Requests that are part of a step. All others begin, watch over, save or end a job.
OF_STEPS = ("push", "pull")


class MeteredNetwork:
    """The loopback network with a count of what passes."""

    def __init__(self) -> None:
        self._inner = LoopbackNetwork()
        self._lock = threading.Lock()
        self.bytes = 0

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        return self._inner.listen(endpoint, handler)

    def connect(self, endpoint: Endpoint) -> Channel:
        return _MeteredChannel(self._inner.connect(endpoint), self)

    def own_address(self, towards: Endpoint) -> str:
        return self._inner.own_address(towards)

    def count(self, frame: Frame) -> None:
        size = sum(map(len, frame.pieces()))
        with self._lock:
            self.bytes += size


class _MeteredChannel:
    def __init__(self, inner: Channel, network: MeteredNetwork) -> None:
        self._inner = inner
        self._network = network

    def start(
        self, request: Frame, timeout_s: float | None = None, *, urgent: bool = False, ahead: bool = False
    ) -> Call:
        call = self._inner.start(request, timeout_s, urgent=urgent, ahead=ahead)
        if request.message.WhichOneof("kind") not in OF_STEPS:
            return call
        self._network.count(request)
        return _MeteredCall(call, self._network)

    def close(self) -> None:
        self._inner.close()


class _MeteredCall:
    def __init__(self, inner: Call, network: MeteredNetwork) -> None:
        self._inner = inner
        self._network = network

    def send(self) -> None:
        self._inner.send()

    def result(self) -> Frame:
        reply = self._inner.result()
        self._network.count(reply)
        return reply

    def cancel(self) -> None:
        self._inner.cancel()
