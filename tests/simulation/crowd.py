"""Runs jobs of a thousand workers, real servers and the code of real workers, on machines of which it is known how long
everything takes.

A message takes the sender's processor, its link, the way, the receiver's link and the receiver's processor, each as
long as was recorded for such a message, and each in turn with all others. Computing is a time that is waited for. What
a server or a worker decides, sends and keeps is real.

Heartbeats, tens of thousands a second, have no thread each: they are due one after the other, and nobody waits for
their answers.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.errors import FleetError
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Handler, Respond, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.connection import Connection
from fleet.role_maker import Role, UserDefinedRoleMaker

from .disk import Disk
from .network import NOTHING, Listener, Load, ProcessNetwork, Wires
from .scheduler import Process, Scheduler, Thread
from .threads import installed

#: What TCP, IP and Ethernet add to as many bytes as fit into one of their packets.
_PACKET_BYTES, _HEADER_BYTES = 1448, 78
#: A process gives its core to others of its machine after so long.
_TURN_S = 1e-3
#: No thread of a crowd needs more.
_STACK_BYTES = 1 << 20
#: Silence means nothing where all processes are known to be there.
_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Times:
    """Says how many seconds of a processor everything takes: half of what a request takes goes with the request, and
    half with its answer."""

    worker_request_s: float = 0.0
    worker_byte_s: float = 0.0
    worker_beat_s: float = 0.0
    server_request_s: float = 0.0
    server_byte_s: float = 0.0
    server_beat_s: float = 0.0

    def of(self, load: Load, *, is_server: bool) -> float:
        """Return how long a process takes to send or to receive a message."""
        if load.kind == "beat":
            return (self.server_beat_s if is_server else self.worker_beat_s) / 2
        a_request_s = self.server_request_s if is_server else self.worker_request_s
        return a_request_s / 2 + load.nbytes * (self.server_byte_s if is_server else self.worker_byte_s)


@dataclass(frozen=True)
class Cabling:
    """Says how fast the network between machines is; within one a message takes no time but its processors'."""

    bytes_s: float = 10e9 / 8
    latency_s: float = 50e-6


class Machine:
    """Has cores, which its processes have in turn, and a link, for one message at a time in each direction."""

    def __init__(self, scheduler: Scheduler, cores: int, *, is_shared: bool) -> None:
        self._scheduler = scheduler
        self._is_shared = is_shared
        self._idle = cores
        self._ready: deque[Processor] = deque()
        self.sends_at = self.receives_at = 0.0
        self.sent_bytes = self.received_bytes = 0

    def give_turn(self, processor: Processor) -> None:
        self._ready.append(processor)
        self._go_on()

    def _go_on(self) -> None:
        while self._idle and self._ready:
            self._idle -= 1
            processor = self._ready.popleft()
            takes_s, act = processor.next(_TURN_S if self._is_shared else math.inf)
            self._scheduler.at(takes_s, partial(self._done, processor, act))

    def _done(self, processor: Processor, act: Callable[[], None]) -> None:
        act()
        self._scheduler.at(0.0, partial(self._end, processor))  # when all that this lets others do is done

    def _end(self, processor: Processor) -> None:
        self._idle += 1
        processor.end_turn()
        self._go_on()


class Processor:
    """Is what a process has of its machine: one core at most."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.busy_s: dict[str, float] = defaultdict(float)
        self._first: deque[tuple[float, Callable[[], None]]] = deque()
        self._then: deque[tuple[float, Callable[[], None]]] = deque()
        self._has_turn = False

    def take(self, takes_s: float, act: Callable[[], None], what: str, *, first: bool = False) -> None:
        """Have a core for so long, and do something then."""
        self.busy_s[what] += takes_s
        (self._first if first else self._then).append((takes_s, act))
        if not self._has_turn:
            self._has_turn = True
            self.machine.give_turn(self)

    def next(self, most_s: float) -> tuple[float, Callable[[], None]]:
        """Return for how long this has a core now, and what is done then."""
        tasks = self._first or self._then
        takes_s, act = tasks.popleft()
        if takes_s > most_s:
            tasks.appendleft((takes_s - most_s, act))
            return most_s, _nothing
        return takes_s, act

    def end_turn(self) -> None:
        self._has_turn = bool(self._first or self._then)
        if self._has_turn:
            self.machine.give_turn(self)


def _nothing() -> None:
    pass


@dataclass
class Handled:
    """Counts what a server was asked and has answered. ``took_s`` is what its real code took of this machine's
    processor, by kind of request."""

    requests: Counter[str]
    took_s: dict[str, float]
    #: requests that are not answered yet and answers that have not left
    held_bytes: int = 0
    most_held_bytes: int = 0

    def hold(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)


class CrowdWires(Wires):
    """Connects machines: how long a message takes follows from its size and from what else is under way."""

    def __init__(self, scheduler: Scheduler, seed: int, times: Times, cabling: Cabling) -> None:
        super().__init__(scheduler, seed)
        self.times = times
        self._cabling = cabling
        self._processors: dict[str, Processor] = {}
        self.handled: dict[str, Handled] = defaultdict(lambda: Handled(Counter(), defaultdict(float)))
        #: requests that a server has and has not answered
        self._in_hand: set[int] = set()
        #: bytes that frames have, by kind of message
        self.bytes_of: Counter[str] = Counter()

    def place(self, name: str, machine: Machine) -> None:
        self._processors[name] = Processor(machine)

    def processor(self, name: str) -> Processor:
        return self._processors[name]

    def of(self, process: Process) -> ProcessNetwork:
        return _CrowdNetwork(self, process)

    def note(self, sender: str, receiver: str, what: str, fate: str = "") -> None:
        """Remember nothing: there are millions."""

    def carry(
        self, sender: str, receiver: str, arrive: Callable[[], None], breaks: Callable[[], None], load: Load = NOTHING
    ) -> None:
        one, other = self._processors.get(sender), self._processors.get(receiver)
        if load is NOTHING or one is None or other is None:  # one that is not there says so at once
            super().carry(sender, receiver, arrive, breaks)
            return
        self.bytes_of[load.kind] += load.nbytes
        is_server = sender.startswith("server")
        held = self.handled[sender if is_server else receiver]
        if load.answers is not None:
            is_held = id(load.answers) in self._in_hand  # one that came before its server was there is not
            held.hold(load.nbytes - is_held * load.answers.nbytes)
            self._in_hand.discard(id(load.answers))

        def delivered() -> None:
            if load.answers is None:
                held.hold(load.nbytes)
                held.requests[load.kind] += 1
                self._in_hand.add(id(load))
            arrive()

        def there() -> None:
            if load.answers is not None:
                held.hold(-load.nbytes)
            other.take(self.times.of(load, is_server=not is_server), delivered, load.kind, first=load.is_urgent)

        # A server answers before it takes the next request.
        first = load.is_urgent or is_server
        takes_s = self.times.of(load, is_server=is_server)
        one.take(takes_s, partial(self._leave, one, other, load, there), load.kind, first=first)

    def _leave(self, one: Processor, other: Processor, load: Load, there: Callable[[], None]) -> None:
        sender, receiver, scheduler = one.machine, other.machine, self.scheduler
        if sender is receiver:
            there()
            return
        nbytes = load.nbytes + _HEADER_BYTES * (1 + load.nbytes // _PACKET_BYTES)
        takes_s = nbytes / self._cabling.bytes_s
        sender.sent_bytes += nbytes
        receiver.received_bytes += nbytes
        begins_at = max(scheduler.now, sender.sends_at)
        sender.sends_at = begins_at + takes_s

        def comes() -> None:
            receiver.receives_at = max(scheduler.now, receiver.receives_at) + takes_s
            scheduler.at(receiver.receives_at - scheduler.now, there)

        scheduler.at(begins_at + self._cabling.latency_s - scheduler.now, comes)


class _CrowdNetwork(ProcessNetwork):
    def __init__(self, wires: CrowdWires, process: Process) -> None:
        super().__init__(wires, process)
        self._handled = wires.handled[process.name]
        self._began = time.thread_time()

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        """Listen once the server is there: it recovers as long as it does here."""
        took_s = self._handled.took_s
        if self._process.disk is not None:
            self._wires.scheduler.block(time.thread_time() - self._began)

        def handle(frame: Frame, respond: Respond) -> Callable[[], None] | None:
            kind, began = frame.message.WhichOneof("kind"), time.thread_time()
            try:
                after = handler(frame, respond)
            finally:
                took_s[kind] += time.thread_time() - began
            return None if after is None else partial(go_on, kind, after)

        def go_on(kind: str, after: Callable[[], None]) -> None:
            began = time.thread_time()
            after()
            took_s[kind] += time.thread_time() - began

        return super().listen(endpoint, handle)


# ---------------------------------------------------------------- heartbeats


class _Beats:
    """Stands for the thread that sends the heartbeats of a connection."""

    def __init__(self, connection: Connection, scheduler: Scheduler, every_s: float) -> None:
        self._connection = connection
        self._scheduler = scheduler
        self._every_s = every_s
        scheduler.at(every_s, self._beat)

    def _beat(self) -> None:
        connection = self._connection
        if not connection._closing.is_set():
            call = connection._beat()
            call.when_done(partial(self._answered, call))
            self._scheduler.at(self._every_s, self._beat)

    def _answered(self, call: object) -> None:
        try:
            self._connection._take_in(raise_if_error(call.result()))
        except TransportError:
            pass
        except FleetError as error:
            self._connection.fail(error)

    def join(self) -> None:
        pass


@contextlib.contextmanager
def _beating(scheduler: Scheduler, every_s: float) -> Iterator[None]:
    """Have connections send heartbeats without threads."""

    def start_heartbeat(self: Connection) -> None:
        if self._heartbeat is None:
            self._heartbeat = _Beats(self, scheduler, every_s)

    before = Connection.start_heartbeat
    Connection.start_heartbeat = start_heartbeat
    try:
        yield
    finally:
        Connection.start_heartbeat = before


# ---------------------------------------------------------------- a job


class Crowd:
    """Runs one job. ``cores`` is what each machine has; ``together``: all processes share one."""

    def __init__(
        self,
        workers: int,
        servers: int,
        work: Callable[[Crowd, Fleet, int], None],
        times: Times,
        *,
        cores: int = 2,
        together: bool = False,
        cabling: Cabling = Cabling(),
        heartbeat_s: float = 1.0,
        durable: Path | None = None,
        sync_s: float = 0.0,
        operate: Callable[[Crowd], None] | None = None,
        seed: int = 0,
    ) -> None:
        """``work`` is what a worker does with its ``Fleet``. Servers keep what they do in ``durable``, if that is
        given, on disks that take at most ``sync_s``. Whoever runs the job may ``operate`` it beside, and ends it so."""
        self.workers = workers
        self.servers = servers
        self.scheduler = Scheduler(seed)
        self.wires = CrowdWires(self.scheduler, seed, times, cabling)
        self.machines: dict[str, Machine] = {}
        self._driver = self.scheduler.current
        self._seed = seed
        self._work = work
        self._operate = operate
        self._heartbeat_s = heartbeat_s
        self._endpoints = [f"server{index}:1" for index in range(servers)]
        self._environ = {
            "FLEET_JOB_ID": "crowd",
            "FLAGS_rpc_deadline": f"{_DEADLINE_S * 1000:.0f}",
            "FLEET_HEARTBEAT_S": f"{heartbeat_s}",
            "FLEET_STARTUP_DEADLINE_S": f"{_DEADLINE_S}",
            "FLAGS_rpc_retry_times": "1000000",
        }
        self._processes: dict[str, Process] = {}
        self._threads: dict[str, Thread] = {}
        self._disks: dict[str, Disk] = {}
        #: when a server that was started again had recovered
        self.served_at: dict[str, float] = {}
        shared = Machine(self.scheduler, cores, is_shared=True)
        for name in self.names:
            self.machines[name] = shared if together else Machine(self.scheduler, cores, is_shared=False)
            self.wires.place(name, self.machines[name])
            if durable is not None and name.startswith("server"):
                self._disks[name] = Disk(durable / name, f"{seed} {name}", lambda: None, sync_s)

    @property
    def names(self) -> list[str]:
        servers = [f"server{index}" for index in range(self.servers)]
        return servers + [f"worker{index}" for index in range(self.workers)]

    def run(self) -> None:
        """Run until every worker has done its work, or whoever operates the job."""
        threading.stack_size(_STACK_BYTES)
        try:
            with installed(self.scheduler, self._seed), _beating(self.scheduler, self._heartbeat_s):
                for name in self.names:
                    self._start(name)
                awaited = [self._threads[name] for name in self.names if name.startswith("worker")]
                if self._operate is not None:
                    operate = self._operate
                    awaited = [self._thread(Process("operator"), lambda: operate(self))]
                while not all(each.has_ended for each in awaited) and not self._errors:
                    self.scheduler.block(_DEADLINE_S)
                errors = self._errors
                self._end()
        finally:
            threading.stack_size(0)
        if errors:
            raise errors[0]

    @property
    def _errors(self) -> list[BaseException]:
        return [each.error for each in self._threads.values() if each.error is not None]

    def compute(self, seconds: float) -> None:
        """Let the calling worker compute for so long."""
        thread = self.scheduler.current
        processor = self.wires.processor(thread.process.name)
        processor.take(seconds, lambda: self.scheduler.wake(thread), "step")
        self.scheduler.block()

    def restart(self, name: str, after_s: float) -> None:
        """Kill a server, and have it started again so much later."""
        process = self._processes[name]
        self.wires.forget(process, silently=False)
        self._disks[name].killed(lambda: self.scheduler.unwind(process), loses_power=False, turns_a_bit=False)
        self.scheduler.at(after_s, lambda: self._start(name))

    def _start(self, name: str) -> None:
        process = self._processes[name] = Process(name)
        process.disk = self._disks.get(name)
        act = self._serve if name.startswith("server") else self._train
        self._thread(process, lambda: act(process))

    def _thread(self, process: Process, act: Callable[[], None]) -> Thread:
        thread = self._threads[process.name] = Thread(self.scheduler, process, act, process.name)
        thread.waiters.append(self._driver)
        self.scheduler.start(thread)
        return thread

    def _fleet(self, process: Process, role: Role) -> Fleet:
        environ, index = dict(self._environ), int(process.name[len("server") :])
        if process.disk is not None:
            environ |= {"FLEET_DURABLE_DIR": str(process.disk.folder), "FLEET_DURABLE_SYNC": "always"}
        fleet = Fleet(environ=environ, network=self.wires.of(process))
        fleet.init(UserDefinedRoleMaker(index, role, self.workers, self._endpoints))
        return fleet

    def _serve(self, process: Process) -> None:
        fleet = self._fleet(process, Role.SERVER)
        fleet.init_server()
        self.served_at[process.name] = self.scheduler.now
        fleet.run_server()

    def _train(self, process: Process) -> None:
        fleet = self._fleet(process, Role.WORKER)
        self._work(self, fleet, fleet.worker_index())

    def _end(self) -> None:
        for name, process in self._processes.items():
            self.scheduler.unwind(process)
            if name in self._disks:
                self._disks[name].close()
                shutil.rmtree(self._disks[name].folder, ignore_errors=True)
