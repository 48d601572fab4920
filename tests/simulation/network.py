"""A network between simulated processes: messages take time, overtake each other, get lost, come twice, and are held up
where two processes are cut off from each other."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from functools import partial

from fleet.base.cluster import Endpoint
from fleet.errors import PortInUseError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.transport import BrokenCall, Call, Handler, TransportError
from fleet.ps.wire.wire_errors import serve

from .scheduler import Process, Scheduler
from .threads import Condition, Future, Lock, ThreadOfFleet

#: A connection that has carried nothing for so long is given up by the system below it.
_BREAKS_AFTER_S = 30.0
#: So long after its peer's machine has stopped a connection is found to be open at one end only.
PROBED_AFTER_S = 45.0
#: Threads that a server has for requests.
_MOST_THREADS = 8


@dataclass
class Weather:
    """Says how fast the network is."""

    #: between these a message takes its time, and sometimes ten times as long
    least_s: float = 0.0002
    most_s: float = 0.002
    slow: float = 0.02


@dataclass(frozen=True)
class Message:
    """Is what the story of a run tells of one message."""

    at: float
    sender: str
    receiver: str
    what: str
    #: what became of it, where that is not that it arrived
    fate: str = ""


@dataclass(frozen=True)
class Load:
    """Is what a message weighs."""

    #: of a request, or of the one that it answers: "push"
    kind: str
    nbytes: int
    #: a request that waits behind no other
    is_urgent: bool = False
    #: what it is the answer to
    answers: Load | None = None


#: That a line broke is heard without a message.
NOTHING = Load("", 0)


class Wires:
    """Connects all processes of one simulation."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.weather = Weather()
        self.messages: list[Message] = []
        #: called with what every message is before it leaves; says what becomes of a request, if not that it arrives
        self.on_moment: Callable[[str], str] = lambda _: ""
        self.draw = random.Random(f"network {seed}")
        self._scheduler = scheduler
        self._listeners: dict[Endpoint, Listener] = {}
        #: those whose connections are open, though some may take no more of them
        self._open: list[Listener] = []
        #: pairs of (sender, receiver) between which nothing passes, and what waits there
        self._cuts: dict[tuple[str, str], list[tuple[float, Callable[[], None], Callable[[], None]]]] = {}
        self._numbers = itertools.count()
        #: by process: the most requests that it has had to answer at a time
        self.most_held: Counter[str] = Counter()

    def of(self, process: Process) -> ProcessNetwork:
        return ProcessNetwork(self, process)

    # ---------------------------------------------------------------- what happens to it

    def cut(self, sender: str, receiver: str) -> None:
        self._cuts.setdefault((sender, receiver), [])

    def heal(self) -> None:
        """End all cuts: what was held up goes on its way, or turns out to be broken if that took long."""
        cuts, self._cuts = self._cuts, {}
        for held in cuts.values():
            for since, arrive, breaks in held:
                is_late = self._scheduler.now - since > _BREAKS_AFTER_S
                self._scheduler.at(self._delay_s(), breaks if is_late else arrive)

    def forget(self, process: Process, *, silently: bool) -> None:
        """Close all that a killed process had open, as its system does, unless that has stopped as well."""
        for listener in [each for each in self._open if each.process is process]:
            self.remove(listener.endpoint, listener)
            self._open.remove(listener)
            if silently:  # until it is asked whether it is still there
                self._scheduler.at(PROBED_AFTER_S, partial(listener.breaks, "nobody is there any more"))
            else:
                listener.breaks("the connection was reset")

    # ---------------------------------------------------------------- for channels

    def carry(
        self,
        sender: str,
        receiver: str,
        arrive: Callable[[], None],
        breaks: Callable[[], None],
        load: Load = NOTHING,
    ) -> None:
        """Bring something from one process to another, some time later; or let it turn out that this is broken. Here
        whatever is carried takes as long."""
        held = self._cuts.get((sender, receiver))
        if held is None:
            self._scheduler.at(self._delay_s(), lambda: self._arrive(sender, receiver, arrive, breaks))
        else:
            held.append((self._scheduler.now, arrive, breaks))

    def _arrive(self, sender: str, receiver: str, arrive: Callable[[], None], breaks: Callable[[], None]) -> None:
        held = self._cuts.get((sender, receiver))  # it may have been cut meanwhile
        if held is None:
            arrive()
        else:
            held.append((self._scheduler.now, arrive, breaks))

    def _delay_s(self) -> float:
        weather = self.weather
        takes_s = self.draw.uniform(weather.least_s, weather.most_s)
        return takes_s * 10 if self.draw.random() < weather.slow else takes_s

    def note(self, sender: str, receiver: str, what: str, fate: str = "") -> None:
        self.messages.append(Message(self._scheduler.now, sender, receiver, what, fate))

    def hold(self, name: str, requests: int) -> None:
        """Note that a process has so many requests to answer, of which most wait for something."""
        self.most_held[name] = max(self.most_held[name], requests)

    def number(self) -> int:
        return next(self._numbers)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    # ---------------------------------------------------------------- for listeners

    def listener(self, endpoint: Endpoint) -> Listener | None:
        return self._listeners.get(endpoint)

    def add(self, endpoint: Endpoint, listener: Listener) -> None:
        if endpoint in self._listeners:
            raise PortInUseError("the endpoint is taken", where=str(endpoint))
        self._listeners[endpoint] = listener
        self._open.append(listener)

    def remove(self, endpoint: Endpoint, listener: Listener) -> None:
        if self._listeners.get(endpoint) is listener:
            del self._listeners[endpoint]


class ProcessNetwork:
    """The network, as one process sees it."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires = wires
        self._process = process

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        listener = Listener(self._wires, self._process, endpoint, handler)
        self._wires.add(endpoint, listener)
        return listener

    def connect(self, endpoint: Endpoint) -> _Channel:
        return _Channel(self._wires, self._process, endpoint)

    def own_address(self, towards: Endpoint) -> str:
        return towards.host


class Listener:
    def __init__(self, wires: Wires, process: Process, endpoint: Endpoint, handler: Handler) -> None:
        self.process = process
        self._wires = wires
        self.endpoint = endpoint
        self._handler = handler
        self._calls: dict[_Call, None] = {}
        self._requests: deque[tuple[_Call, list[bytes]]] = deque()
        self._came = Condition(Lock())
        self._threads = self._idle = 0
        self._is_closed = False

    def deliver(self, call: _Call, pieces: list[bytes]) -> None:
        """Take a request that has arrived. Called by nobody's thread: it must not wait."""
        if self._is_closed or self.process.is_dead:
            call.break_later(f"nobody listens at {self.endpoint}", self.process.name)
            return
        self._calls[call] = None
        self._wires.hold(self.process.name, len(self._calls))
        self._requests.append((call, pieces))
        if self._idle:
            self._idle -= 1
            self._came.notify()
        elif self._threads < _MOST_THREADS:
            self._threads += 1
            scheduler = self._wires.scheduler
            thread = ThreadOfFleet(target=self._serve, name=f"{self.endpoint}-{self._threads}")
            thread.process = self.process
            scheduler.start(thread)

    def _serve(self) -> None:
        while not self._is_closed:
            while self._requests:
                call, pieces = self._requests.popleft()
                serve(self._handler, pieces, call.respond)()
            with self._came:
                self._idle += 1
                self._came.wait()

    def done(self, call: _Call) -> None:
        self._calls.pop(call, None)

    def breaks(self, reason: str) -> None:
        self._is_closed = True
        for call in list(self._calls):
            call.break_later(reason, self.process.name)
        self._calls.clear()

    def close(self, grace_s: float = 0.0) -> None:
        self._wires.remove(self.endpoint, self)
        until = self._wires.scheduler.now + grace_s
        while self._calls and self._wires.scheduler.now < until:
            self._wires.scheduler.block(0.01)
        self.breaks(f"the server at {self.endpoint} closed")
        with self._came:
            self._came.notify_all()


class _Channel:
    def __init__(self, wires: Wires, process: Process, endpoint: Endpoint) -> None:
        self._wires = wires
        self._process = process
        self._endpoint = endpoint
        self._calls: dict[_Call, None] = {}
        self._is_closed = False

    def start(
        self,
        request: Frame,
        timeout_s: float | None = None,
        *,
        urgent: bool = False,
        ahead: bool = False,
    ) -> Call:
        self._wires.scheduler.check()
        if self._is_closed:
            return BrokenCall("the channel is closed")
        kind = request.message.WhichOneof("kind")
        what = f"{kind} {request.message.step}"
        fate = self._wires.on_moment(what)
        pieces = list(request.pieces())
        load = Load(kind, sum(map(len, pieces)), is_urgent=urgent)
        call = _Call(self._wires, self, self._process.name, what, timeout_s, fate, load)
        self._calls[call] = None
        to = self._owner()
        self._wires.note(self._process.name, to, call.what, fate)
        if fate == "lost":
            call.break_later("the line broke", to)
            return call
        self._send(call, pieces, to)
        if fate == "twice":
            twin = _Call(self._wires, self, self._process.name, call.what, None, "unanswered", load)
            self._send(twin, pieces, to)
        return call

    def _owner(self) -> str:
        listener = self._wires.listener(self._endpoint)
        return str(self._endpoint) if listener is None else listener.process.name

    def _send(self, call: _Call, pieces: list[bytes], to: str) -> None:
        def arrive() -> None:
            listener = self._wires.listener(self._endpoint)
            if listener is None:
                call.break_later(f"nobody listens at {self._endpoint}", to)
            else:
                call.listener = listener
                listener.deliver(call, pieces)

        self._wires.carry(self._process.name, to, arrive, lambda: call.fail("the connection timed out"), call.load)

    def forget(self, call: _Call) -> None:
        self._calls.pop(call, None)

    def forked(self) -> _Channel:
        return self

    def close(self) -> None:
        self._is_closed = True
        for call in list(self._calls):
            call.fail("the channel is closed")


class _Call:
    """A request under way, and its reply."""

    def __init__(
        self, wires: Wires, channel: _Channel, sender: str, what: str, timeout_s: float | None, fate: str, load: Load
    ) -> None:
        self.listener: Listener | None = None
        self.what = what
        self.load = load
        self._wires = wires
        self._channel = channel
        self._sender = sender
        self._timeout_s = timeout_s
        self._fate = fate
        self._future: Future = Future()
        self._number = wires.number()

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    # ---------------------------------------------------------------- the server's end

    def respond(self, reply: Frame) -> None:
        listener = self.listener
        assert listener is not None
        self._wires.scheduler.check()
        self._wires.on_moment(self.what)
        pieces = list(reply.pieces())
        error = reply.message.error.kind if reply.message.HasField("error") else ""
        said = f"{error or 'answer'} to {self.what}"
        if listener.process.is_dead:
            return
        listener.done(self)
        self._wires.note(listener.process.name, self._sender, said, "lost" if self._fate == "unanswered" else "")

        def arrive() -> None:
            if self._fate == "unanswered":
                self.fail("the line broke")
            else:
                with contextlib.suppress(InvalidStateError):  # the caller gave up meanwhile
                    self._future.set_result(pieces)

        load = replace(self.load, nbytes=sum(map(len, pieces)), answers=self.load)
        breaks = partial(self.fail, "the connection timed out")
        self._wires.carry(listener.process.name, self._sender, arrive, breaks, load)

    def break_later(self, reason: str, by: str) -> None:
        """Let the caller hear, in time, that there will be no answer."""
        self._wires.carry(by, self._sender, lambda: self.fail(reason), lambda: self.fail(reason))

    def fail(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(TransportError(reason))
        self._channel.forget(self)

    # ---------------------------------------------------------------- the caller's end

    def when_done(self, act: Callable[[], None]) -> None:
        """Have something done when the reply is there, or is known not to come; nobody's thread does it."""
        self._future.add_done_callback(lambda _: act())

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        try:
            return read_frame(pb.Reply, self._future.result(self._timeout_s))
        except CancelledError:
            raise TransportError("cancelled") from None
        except NotYet:
            self.cancel()
            raise TransportError(f"no reply within {self._timeout_s:g} s") from None
        finally:
            self._channel.forget(self)

    def cancel(self) -> None:
        self._future.cancel()
