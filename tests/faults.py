"""A vocabulary of faults: a network that misbehaves on the requests it is told of, over any other network.

    network = FaultyNetwork(LoopbackNetwork(), Fault(Action.DROP_REPLY, kind="push", step=3))

Faults happen on the caller's side of the line, so they are the same on loopback and on real sockets. A fault is
named by peer, worker, kind of request and step; whatever is left out matches everything.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleet.base.cluster import Endpoint
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import BrokenCall, Call, Channel, Handler, Listener, Network, TransportError


class Action(enum.Enum):
    DROP_REQUEST = enum.auto()
    """The request never arrives and its caller is told so."""
    DROP_REPLY = enum.auto()
    """The request is carried out; its caller is told that the line broke instead of what it answered."""
    DUPLICATE = enum.auto()
    """The request arrives twice; the caller gets the second answer."""
    DELAY = enum.auto()
    """The request arrives ``delay_s`` later, behind whatever was sent meanwhile."""
    SILENCE = enum.auto()
    """The request never arrives and nobody is told: a black hole, a peer that is stopped."""
    CUT = enum.auto()
    """The peer is out of reach from this request on; calls under way break. ``heal`` ends it."""


@dataclass(frozen=True)
class Fault:
    action: Action
    endpoint: Endpoint | None = None
    worker: int | None = None
    kind: str | None = None
    step: int | None = None
    #: Let this many matching requests pass, then strike this many (None: all of them).
    skip: int = 0
    times: int | None = 1
    delay_s: float = 0.0

    def matches(self, endpoint: Endpoint, request: Frame) -> bool:
        message = request.message
        told = (endpoint, message.worker, message.WhichOneof("kind"), message.step)
        wanted = (self.endpoint, self.worker, self.kind, self.step)
        return all(want is None or want == got for want, got in zip(wanted, told, strict=True))


class FaultyNetwork:
    """``struck`` lists what happened: (action, kind of request, step), in order."""

    def __init__(self, inner: Network, *faults: Fault) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._seen: dict[int, int] = {}
        self._cut: set[Endpoint] = set()
        self._under_way: dict[Endpoint, set[_FaultyCall]] = {}
        self.struck: list[tuple[Action, str, int]] = []
        self.add(*faults)

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        return self._inner.listen(endpoint, handler)

    def connect(self, endpoint: Endpoint) -> Channel:
        return _FaultyChannel(self, endpoint, self._inner.connect(endpoint))

    def own_address(self, towards: Endpoint) -> str:
        return self._inner.own_address(towards)

    def add(self, *faults: Fault) -> None:
        with self._lock:
            for fault in faults:
                self._seen[len(self._faults)] = 0
                self._faults.append(fault)

    def clear(self) -> None:
        """From now on nothing goes wrong; what is cut stays cut."""
        with self._lock:
            self._faults.clear()
            self._seen.clear()

    def cut(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._cut.add(endpoint)
            under_way = list(self._under_way.get(endpoint, ()))
        for call in under_way:
            call.cancel()

    def heal(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._cut.discard(endpoint)

    # ---------------------------------------------------------------- for channels and calls

    def strike(self, endpoint: Endpoint, request: Frame) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not fault.matches(endpoint, request):
                    continue
                self._seen[index] += 1
                count = self._seen[index] - fault.skip
                if count > 0 and (fault.times is None or count <= fault.times):
                    kind = request.message.WhichOneof("kind") or ""
                    self.struck.append((fault.action, kind, request.message.step))
                    return fault
        return None

    def admit(self, endpoint: Endpoint, call: _FaultyCall) -> bool:
        with self._lock:
            if endpoint in self._cut:
                return False
            self._under_way.setdefault(endpoint, set()).add(call)
            return True

    def settle(self, endpoint: Endpoint, call: _FaultyCall) -> None:
        with self._lock:
            self._under_way.get(endpoint, set()).discard(call)


class _FaultyChannel:
    def __init__(self, network: FaultyNetwork, endpoint: Endpoint, inner: Channel) -> None:
        self._network = network
        self._endpoint = endpoint
        self._inner = inner
        self._lock = threading.Lock()
        self._calls: set[_FaultyCall] = set()
        self._timers: set[threading.Timer] = set()

    def start(
        self, request: Frame, timeout_s: float | None = None, *, urgent: bool = False, ahead: bool = False
    ) -> Call:
        fault = self._network.strike(self._endpoint, request)
        action = None if fault is None else fault.action
        if action is Action.CUT:
            self._network.cut(self._endpoint)
        if action is Action.DROP_REQUEST:
            return BrokenCall("the request was dropped")

        def begin() -> Call:
            return self._inner.start(request, timeout_s, urgent=urgent, ahead=ahead)

        call = _FaultyCall(timeout_s, action is Action.DROP_REPLY, self._settle)
        if not self._network.admit(self._endpoint, call):
            return BrokenCall(f"{self._endpoint} is cut off")
        with self._lock:
            self._calls.add(call)
        if fault is not None and action is Action.DELAY:
            timer = threading.Timer(fault.delay_s, lambda: call.begin(begin))
            timer.daemon = True
            with self._lock:
                self._timers.add(timer)
            timer.start()
        elif action is Action.DUPLICATE:
            first = begin()
            call.begin(begin)
            call.twin = first
        elif action is not Action.SILENCE:
            call.begin(begin)
        return call

    def _settle(self, call: _FaultyCall) -> None:
        self._network.settle(self._endpoint, call)
        with self._lock:
            self._calls.discard(call)

    def close(self) -> None:
        with self._lock:
            timers, calls = list(self._timers), list(self._calls)
        for timer in timers:
            timer.cancel()
        for call in calls:
            call.cancel()
        self._inner.close()
        for timer in timers:
            timer.join()


class _FaultyCall:
    """A call that may not have been sent yet, or never will be."""

    def __init__(self, timeout_s: float | None, reply_is_lost: bool, settled: Callable[[_FaultyCall], None]) -> None:
        self._timeout_s = timeout_s
        self._reply_is_lost = reply_is_lost
        self._settled = settled
        self._changed = threading.Condition()
        self._sent: Call | None = None
        self._cancelled = False
        self.twin: Call | None = None

    def begin(self, start: Callable[[], Call]) -> None:
        with self._changed:
            if self._cancelled:
                return
        sent = start()
        with self._changed:
            self._sent = sent
            self._changed.notify_all()
            cancelled = self._cancelled
        if cancelled:
            sent.cancel()

    def send(self) -> None:
        with self._changed:
            sent = self._sent
        if sent is not None:
            sent.send()

    def result(self) -> Frame:
        try:
            until = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            with self._changed:
                while self._sent is None and not self._cancelled:
                    rest = None if until is None else until - time.monotonic()
                    if not self._changed.wait(rest):
                        raise TransportError(f"no reply within {self._timeout_s:g} s")
                if self._cancelled or self._sent is None:
                    raise TransportError("cancelled")
                sent = self._sent
            reply = sent.result()
            if self._reply_is_lost:
                raise TransportError("the reply was dropped")
            return reply
        finally:
            self._settled(self)

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            calls = [call for call in (self._sent, self.twin) if call is not None]
            self._changed.notify_all()
        for call in calls:
            call.cancel()
