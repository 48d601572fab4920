"""The servers of a job change while it runs, and it ends to the bit where it would have ended without that."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import dying
import pytest
import torch
from dying import ANSWERED, ENVIRON, MOMENTS, DyingJob, at
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, SOON, Job, run_job, until
from inside import (
    communicator_of,
    completed,
    connections,
    exchange,
    flush,
    found_job,
    is_copying,
    leave,
    refresh,
    summed_up,
    under_way,
    wanted_servers,
    worker_of,
)
from patience import PATIENCE_S
from test_elastic import ELASTIC, part
from test_feed import Followed, source_of

import fleet as fleet_package
from fleet import Checkpoints, Fleet, StrategyFactory
from fleet.base import exit_guard
from fleet.base.clock import Clock, SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.state import states_in, values
from fleet.errors import (
    ConfigurationError,
    DeadlineError,
    FleetError,
    JobAbortedError,
    MissedError,
    PlanMismatchError,
    ServerLostError,
    ServersMovedError,
    StateError,
    UnsupportedError,
)
from fleet.launch.servers_command import change_servers
from fleet.launch.sources import Running
from fleet.nn import CountFilter, MaxRows, Probability, SmallNorm, Unused
from fleet.ps.consistency.policy import Policy
from fleet.ps.server import runtime
from fleet.ps.server.claims import Claims
from fleet.ps.server.meetings import Meetings
from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.server.service import Service
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import BrokenCall, TransportError
from fleet.ps.worker import resizing
from fleet.ps.worker.connection import Connection, Connections
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.role_maker import Role, UserDefinedRoleMaker

STEPS, MOVED_AFTER = 7, 3
BEATING = {**PATIENT, "FLEET_HEARTBEAT_S": "0.02"}

#: What trains parameters, and what trains rows.
OPTIMIZERS: dict[str, Callable[[torch.nn.Module], list[torch.optim.Optimizer]]] = {
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.05)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
}


#: torch has one generator for all threads.
one_at_a_time = threading.Lock()


def model_of_all(large: int = 9000, rules: dict[str, Any] | None = None) -> Model:
    with one_at_a_time:
        torch.manual_seed(7)
        return Model(large, rules or {})


class Model(torch.nn.Module):
    def __init__(self, large: int, rules: dict[str, Any]) -> None:
        super().__init__()
        self.table = fleet_package.nn.Embedding(None, 4, **rules)
        self.small = torch.nn.Linear(4, 3)
        self.large = torch.nn.Linear(3, large)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.large(torch.tanh(self.small(self.table(ids)).sum(1))).square().mean()


def names(numbers: Sequence[int]) -> list[str]:
    return [f"server{number}:1" for number in numbers]


class Resized(Job):
    """Is a job whose servers may change; ``later`` ones start with the list that it is to have."""

    def __init__(self, body: Any, first: Sequence[int], then: Sequence[int], workers: int = 2, **options: Any) -> None:
        super().__init__(body, workers, endpoints=names(first), **options)
        self.then = names(then)
        #: the servers that later ones are told of, where that is not ``then``
        self.lists: dict[str, list[str]] = {}
        #: the environments of some servers, where they have others
        self.environs: dict[str, dict[str, str]] = {}
        self.served: list[str] = []

    def serve_at(self, name: str, servers: list[str]) -> None:
        try:
            fleet = Fleet(environ=self.environs.get(name, self.environ), network=self.network)
            fleet.init(UserDefinedRoleMaker(servers.index(name), Role.SERVER, self.workers, servers))
            fleet.init_server(self.model_dir if name in self.endpoints else None)
            fleet.run_server()
            self.served.append(name)
        except BaseException as error:
            self.errors[name] = error

    def start(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(
                target=self.serve_at,
                args=(name, self.lists.get(name, self.then)),
                name=f"job-serve-{name}",
                daemon=True,
            )
            for name in self.then
            if name not in self.endpoints
        ]
        for thread in threads:
            thread.start()
        return [*super().start(), *threads]

    def service(self, name: str) -> Any:
        """The service that listens there; None if nobody does."""
        network = getattr(self.network, "_inner", self.network)
        listener = network.listener(Endpoint.parse(name))
        return None if listener is None else listener.handler.__self__

    def serve(self, index: int) -> None:
        self.serve_at(self.endpoints[index], self.endpoints)

    def end(self, threads: list[threading.Thread]) -> None:
        """Wait for the end of the job, and end the servers that wait for one."""
        first = len(self.endpoints)
        self.join(threads[first : first + self.workers])
        for service in map(self.service, self.then):
            if service is not None and service.job is None:
                service.stop("nobody has moved here")
        self.join(threads)


def ids_of(worker: int, step: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 3), generator=torch.Generator().manual_seed(100 * worker + step))


def training(
    optimizers: str,
    then: list[str] | None,
    movers: Sequence[int] = (0,),
    workers: int = 2,
    pause: Callable[[int], None] = lambda _: None,
    strategy: Callable[[], Any] = lambda: None,
) -> Callable[[Fleet, int], Any]:
    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS[optimizers](model), strategy(), model=model)
        fleet.init_worker()
        losses = []
        for step in range(STEPS):
            pause(step)
            if step == MOVED_AFTER and then is not None and worker in movers:
                fleet.resize_servers(then)
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        fleet.barrier_worker()
        return losses, fleet.state_dict(model)

    return body


def assert_same(got: Any, expected: Any) -> None:
    for (losses, state), (other_losses, other_state) in zip(got, expected, strict=True):
        assert losses == other_losses
        assert state.keys() == other_state.keys()
        for name, value in state.items():
            assert torch.equal(value, other_state[name]), name


MOVES = {"2 to 4": ([0, 1], [0, 1, 2, 3]), "3 to 1": ([0, 1, 2], [1]), "1 to 2 others": ([0], [1, 2])}


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.pairs(1)
def test_a_job_ends_where_it_ends_without_a_move(optimizers: str, move: str) -> None:
    first, then = MOVES[move]
    job = Resized(training(optimizers, names(then)), first, then)
    got = job.run()
    assert sorted(job.served) == sorted({*names(first), *names(then)})
    assert_same(got, Job(training(optimizers, None), 2, len(first)).run())


def among_workers() -> Any:
    return StrategyFactory.create_sync_strategy(dense="all_reduce")


@functools.cache
def undisturbed_among_workers() -> Any:
    return Job(training("adam", None, strategy=among_workers), 2, 2).run()


@pytest.mark.pairs(1)
@pytest.mark.parametrize("move", MOVES)
def test_a_job_whose_workers_have_the_dense_parameters_ends_there_too(move: str) -> None:
    first, then = MOVES[move]
    job = Resized(training("adam", names(then), strategy=among_workers), first, then)
    assert_same(job.run(), undisturbed_among_workers())


def train_among_workers(fleet: Fleet, worker: int, before: Callable[[int], object]) -> Any:
    model = model_of_all(large=5)
    optimizer = fleet.distributed_optimizer(OPTIMIZERS["adam"](model), among_workers(), model=model)
    fleet.init_worker()
    losses = []
    for step in range(STEPS):
        before(step)
        optimizer.zero_grad()
        loss = model(ids_of(worker, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    fleet.barrier_worker()
    return losses, fleet.state_dict(model)


class Gone(Exception):
    pass


@pytest.mark.pairs(1)
@pytest.mark.parametrize("what", ["goes on", "dies", "waits elsewhere"])
def test_a_worker_goes_over_while_it_waits_for_an_average(what: str) -> None:
    """It asks no server for anything then; what becomes of the others is known to the new ones."""
    workers, fleets = 3 if what == "dies" else 2, dict[int, Fleet]()

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        fleets[worker] = fleet

        def before(step: int) -> None:
            if step != MOVED_AFTER or worker:
                return
            if moves:
                fleet.resize_servers(names([1, 2]))
                until(lambda: all(fleets[each].server_endpoints() == names([1, 2]) for each in range(1, workers)))
            if what == "dies":
                leave(fleet)
                raise Gone
            if what == "waits elsewhere":
                fleet.barrier_worker()

        with contextlib.suppress(Gone):
            return train_among_workers(fleet, worker, before)

    job = Resized(body, [0, 1], [1, 2], workers=workers, environ=SOON)
    job.join(job.start())
    if what == "waits elsewhere":
        for name in ("worker 0", "worker 1"):
            assert "the workers wait for each other" in str(job.errors[name])
            assert "workers [0] in barrier 1, workers [1] in an average of gradients" in str(job.errors[name])
        return
    assert job.errors == {}
    expected = Job(functools.partial(body, moves=False), workers, 2, environ=SOON).run()
    left = range(what == "dies", workers)
    assert_same([job.results[worker] for worker in left], [expected[worker] for worker in left])


def test_who_comes_to_the_others_while_the_job_moves_comes_after_it() -> None:
    """It waits for them at a server that the job leaves."""
    elastic = functools.partial(StrategyFactory.create_async_strategy, dense="all_reduce", elastic=True)
    is_there = threading.Event()

    def body(fleet: Fleet, worker: int) -> Any:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), elastic(), model=model)
        fleet.init_worker()
        for step in range(4):
            if step == 2 and worker == 0:
                is_there.set()
                until(lambda: job.service("server0:1").job.meetings.waiting())
                fleet.resize_servers(names([1]))
            optimizer.minimize(model())
        group = worker_of(fleet).dense.group
        if worker == 2:
            return group.size, fleet.server_endpoints()
        for size in (3, 2):  # the newcomer is there, and has left
            while group.size != size:
                optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model, tables=False), fleet.server_endpoints()

    job = Resized(body, [0], [1], environ=BEATING)
    threads = job.start()
    assert is_there.wait(PATIENCE_S)
    job.workers, newcomer = 3, threading.Thread(target=job.work, args=(2,), daemon=True)
    newcomer.start()
    job.join([*threads, newcomer])
    assert job.errors == {}
    assert all(servers == names([1]) for _, servers in job.results.values())
    assert job.results[2][0] == 3
    for name, value in job.results[0][0].items():
        assert torch.equal(value, job.results[1][0][name]), name


def test_what_replaces_the_dense_parameters_of_workers_moves(tmp_path: Path) -> None:
    """One that has not taken it over yet is told of it by the new servers."""
    strategy = AMONG_WORKERS["half_async, all_reduce"]
    loaded = threading.Event()

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        def before(step: int) -> None:
            if step == 1 and worker == 0:
                fleet.save_persistables(str(tmp_path / str(moves)))
            if step == 3 and worker == 0:
                fleet.load_persistables(str(tmp_path / str(moves)))
                if moves:
                    fleet.resize_servers(names([1, 2]))
                loaded.set()
            if step == 3 and worker == 1:
                assert loaded.wait(PATIENCE_S)

        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adam"](model), strategy(), model=model)
        fleet.init_worker()
        for step in range(STEPS):
            before(step)
            optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model, tables=False)

    got = Resized(body, [0, 1], [1, 2], environ=BEATING).run()
    loaded.clear()
    expected = Job(functools.partial(body, moves=False), 2, 2).run()
    for name, value in expected[0].items():
        assert torch.equal(got[0][name], value)
        assert torch.equal(got[1][name], value)


def test_who_comes_anew_after_a_move_finds_the_checkpoint_that_the_job_began_with(tmp_path: Path) -> None:
    """No worker has any values then, and the servers only rows."""
    strategy = AMONG_WORKERS["async, all_reduce"]

    def body(fleet: Fleet, worker: int, steps: int) -> dict[str, torch.Tensor]:
        model = constant()
        plain = OPTIMIZERS["adagrad"](model)
        optimizer = fleet.distributed_optimizer(plain, strategy(), model=model)
        fleet.init_worker()
        for _ in range(steps):
            optimizer.minimize(model())
            fleet.save_persistables(str(tmp_path))
        return fleet.state_dict(model)

    def comes_twice(fleet: Fleet, worker: int) -> dict[str, torch.Tensor]:
        body(fleet, worker, 0)
        fleet.resize_servers(names([1, 2]))
        leave(fleet)
        again = job.fleet(Role.WORKER, worker)
        state = body(again, worker, 0)
        again.stop_worker()
        return state

    (expected,) = Job(functools.partial(body, steps=1), 1, 1).run()
    job = Resized(comes_twice, [0], [1, 2], workers=1, model_dir=str(tmp_path), environ=SOON)
    (got,) = job.run()
    for name in ("small.weight", "large.weight"):
        assert torch.equal(got[name], expected[name])


def test_other_servers_know_the_group_of_the_workers() -> None:
    before, after = Meetings(), Meetings()
    outbox: Outbox = []

    def come(meetings: Meetings, worker: int, incarnation: int) -> None:
        request = pb.Request(worker=worker, incarnation=incarnation, meet=pb.Meet(address="there"))
        waiting = Waiting(worker, "the others", 0.0, lambda _: None, lambda: Frame(pb.Reply()))
        meetings.come(request, waiting, outbox)

    for worker in range(4):
        come(before, worker, 10 * worker)
    before.answer_ready(range(4), outbox, is_trained=False)
    before.leave(1)
    before.left(3)
    after.restore(json.loads(json.dumps(before.dump())), {0, 1, 2})
    assert after.told == before.told == (0, 1), "nobody in it gets any further"
    come(after, 2, 21)
    assert [each.message.about for _, each in outbox] == [outbox[0][1].message.about] * 5, "whose first answer was lost"
    later = Meetings()
    later.restore({**after.dump(), "broken": 0}, ())
    later.left(1)
    assert later.told == (0, 0), "it had said that it leaves"


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE])
@pytest.mark.pairs(1)
def test_workers_that_meet_and_leave_around_a_move(action: Action, skip: int) -> None:
    """With one message lost of those by which they do, and data that end for one of them just before or after it."""

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        def before(step: int) -> None:
            if worker == 2 and step == MOVED_AFTER + skip // 2:
                raise Gone
            if worker == 0 and step == MOVED_AFTER and moves:
                fleet.resize_servers(names([1, 2]))

        with contextlib.suppress(Gone):
            return train_among_workers(fleet, worker, before)

    network = FaultyNetwork(LoopbackNetwork(), *(Fault(action, kind="meet", skip=skip + 3 * each) for each in range(3)))
    got = Resized(body, [0, 1], [1, 2], workers=3, network=network, environ=BEATING).run()
    assert network.struck
    assert_same(got[:2], Job(functools.partial(body, moves=False), 3, 2).run()[:2])


def test_all_workers_may_ask_for_the_same_move() -> None:
    moves = training("adam", names([1, 2, 3]), movers=(0, 1))
    assert_same(Resized(moves, [0, 1], [1, 2, 3]).run(), Job(training("adam", None), 2, 2).run())


@pytest.mark.parametrize("kind", ["where", "halt", "stage", "fill", "export", "switch", "hello"])
@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE])
@pytest.mark.pairs(2)
def test_no_message_of_a_move_has_to_arrive_the_first_time(action: Action, kind: str) -> None:
    network = FaultyNetwork(LoopbackNetwork(), Fault(action, kind=kind, skip=1))
    got = Resized(training("adagrad", names([1, 2])), [0, 1], [1, 2], network=network).run()
    assert network.struck
    assert_same(got, undisturbed())


@functools.cache
def undisturbed() -> Any:
    return Job(training("adagrad", None), 2, 2).run()


def asking(then: list[str], refusal: type[Exception], match: str | None = None) -> Callable[[Fleet, int], Any]:
    """What trains on with the servers that it has, as the move fails."""

    def body(fleet: Fleet, worker: int) -> Any:
        resize = fleet.resize_servers

        def refused(endpoints: list[str]) -> None:
            with pytest.raises(refusal, match=match):
                resize(endpoints)

        fleet.resize_servers = refused  # type: ignore[method-assign]
        return training("adagrad", then)(fleet, worker)

    return body


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("kind", "skip"), [("stage", 0), ("fill", 0), ("fill", 2)])
def test_a_new_server_that_dies_before_the_decision_leaves_the_job_as_it_was(kind: str, skip: int) -> None:
    lost = Endpoint.parse("server2:1")
    network = FaultyNetwork(LoopbackNetwork(), Fault(Action.CUT, endpoint=lost, kind=kind, skip=skip))
    job = Resized(asking(names([0, 1, 2]), DeadlineError), [0, 1], [0, 1, 2], network=network, environ=SOON)
    job.end(job.start())
    assert {name for name in job.errors if name.startswith("worker")} == set(), job.errors
    assert_same([job.results[worker] for worker in range(2)], undisturbed())
    assert list(job.errors) == ["server2:1"], "it has waited for a job"


# ---------------------------------------------------------------------------------------------- kills


class Killed(Exception):
    pass


#: What the worker says that moves a job.
OF_A_MOVE = {"where", "halt", "stage", "export", "fill", "switch", "hello"}


class StrikingNetwork:
    """Strikes at one of the messages of a move, before it arrives or after it has been carried out."""

    def __init__(
        self,
        number: int,
        strike: Callable[[], None],
        *,
        after: bool,
        to: str | None = None,
        kinds: Collection[str] = OF_A_MOVE,
    ) -> None:
        """Only messages ``to`` one endpoint count, if it is given; with a strike there it is out of reach for good."""
        self._inner = LoopbackNetwork()
        self._strike = strike
        self._after = after
        self._to = to
        self._kinds = kinds
        self._left = number
        self._is_cut = False
        #: whether messages count
        self.counts = False
        #: what was struck
        self.struck = ""

    def listen(self, endpoint: Endpoint, handler: Any) -> Any:
        return self._inner.listen(endpoint, handler)

    def connect(self, endpoint: Endpoint) -> Any:
        channel = self._inner.connect(endpoint)
        start = channel.start

        def struck(request: Frame, *given: Any, **more: Any) -> Any:
            if self._is_it(endpoint, request.message):
                if self._after:
                    start(request, *given, **more)
                self.struck = request.message.WhichOneof("kind") or ""
                self._is_cut = self._to is not None
                self._strike()
            if self._is_cut and str(endpoint) == self._to:
                return BrokenCall("it is out of reach")
            return start(request, *given, **more)

        channel.start = struck  # type: ignore[method-assign]
        return channel

    def own_address(self, towards: Any) -> str:
        return self._inner.own_address(towards)

    def _is_it(self, endpoint: Endpoint, message: Any) -> bool:
        kind = message.WhichOneof("kind")
        if not self.counts or message.worker or kind not in self._kinds or self._to not in (None, str(endpoint)):
            return False
        if threading.current_thread().name.startswith("fleet-heartbeat"):  # on a slow machine it asks, too
            return False
        self._left -= 1
        return self._left == 0


def resumed_after(number: int, *, after: bool, mode: str | None = None, to: str | None = None) -> tuple[list[Any], str]:
    """Run a job whose worker 0 is killed at a message of its move, and starts again with the list that it had, or whose
    server ``to`` is killed then; return what becomes of it, and which message that was."""
    fleets: dict[int, Fleet] = {}

    def kill() -> None:
        network.counts = False
        if to is None:
            worker = worker_of(fleets[0])
            exit_guard.release(worker)
            worker.close()
            raise Killed

    network = StrikingNetwork(number, kill, after=after, to=to)

    def body(fleet: Fleet, worker: int) -> Any:
        fleets[worker] = fleet
        losses: list[float] = []
        for life in range(2):
            model = model_of_all() if mode is None else constant()
            strategy = None if mode is None else ALL_MODES[mode]()
            optimizer = fleets[worker].distributed_optimizer(OPTIMIZERS["adagrad"](model), strategy, model=model)
            fleets[worker].init_worker()
            try:
                for step in range(fleets[worker].resume_step(), STEPS):
                    if step == MOVED_AFTER and worker == 0 and life == 0:
                        network.counts = True
                        with contextlib.suppress(*[] if to is None else [DeadlineError, MissedError]):
                            fleets[worker].resize_servers(names([1, 2]))
                        network.counts = False
                    optimizer.zero_grad()
                    loss = model(ids_of(worker, step)) if mode is None else model()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            except (Killed, StateError):
                if life or not network.struck:  # else it may have been a thread beside this one that was in a call
                    raise
                fleets[worker] = job.fleet(Role.WORKER, worker)
                continue
            break
        fleets[worker].barrier_worker()
        result = losses, fleets[worker].state_dict(model)
        if fleets[worker] is not fleet:
            fleets[worker].stop_worker()
        return result

    soon = SOON if to is None else {**SOON, "FLEET_STARTUP_DEADLINE_S": "5"}
    job = Resized(body, [0, 1], [1, 2], network=network, environ=soon)
    job.end(job.start())
    for name, error in job.errors.items():
        if name.startswith("worker"):
            raise error
    return [job.results[worker] for worker in range(2)], network.struck


def test_what_a_former_server_says_does_not_end_the_job_elsewhere() -> None:
    """It may be ended before all have gone over."""

    def connected(*numbers: int) -> list[Connection]:
        settings, network = ProcessSettings.read(PATIENT), LoopbackNetwork()
        return [Connection(Endpoint("server", each), network, settings, SystemClock(), 0, 1) for each in numbers]

    former, others, here = connected(1, 2), connected(3, 4), connected(5)
    left, stays = (Connections(each, Progress(Policy()), lambda _: None) for each in (former, others))
    over = JobAbortedError("the server was stopped")
    for connection in former:
        connection.fail(ServersMovedError("the job has moved"))
    left.replace(here)
    former[0].hear_the_end(over)
    assert here[0].failure is None
    others[0].hear_the_end(over)
    assert others[1].failure is over, "of servers where the job is"
    assert stays.failure is over


#: Modes in which somebody is killed at any message; in the first one workers share their steps.
KILLED = [None, "async", "async, all_reduce", "gba", "auto", "geo", "dc_asgd"]


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [each for each in KILLED if each != "geo"])
@pytest.mark.parametrize("after", [False, True], ids=["before it arrives", "after it is carried out"])
def test_a_mover_that_is_killed_at_any_message_leaves_no_half_of_a_move(after: bool, mode: str | None) -> None:
    """Where workers share no steps each message has one of the two, and the other one in the next mode."""
    for number in itertools.count(1) if mode is None else itertools.count(1 + (after + KILLED.index(mode)) % 2, 2):
        results, struck = resumed_after(number, after=after, mode=mode)
        assert_went_on(results, mode)
        if not struck:
            break
    assert number > 20


def assert_went_on(results: list[Any], mode: str | None) -> None:
    if mode is None:
        assert_same(results, undisturbed())
        return
    assert_close([state for _, state in results], undisturbed_a_little(mode))


@functools.cache
def undisturbed_a_little(mode: str) -> list[dict[str, torch.Tensor]]:
    return Job(training_freely("adagrad", mode, None, STEPS, moved_after=MOVED_AFTER), 2, 2).run()


def assert_close(got: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]) -> None:
    """What each worker has in the end. The order of updates is another one."""
    for state, other in zip(got, expected, strict=True):
        assert state.keys() == other.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("after", [False, True], ids=["before it arrives", "after it is carried out"])
def test_a_new_server_that_is_killed_at_any_message_leaves_no_half_of_a_move(after: bool) -> None:
    """Once the job has moved it is a server like any other, and the job ends without it."""
    for number in itertools.count(1):
        try:
            results, _ = resumed_after(number, after=after, to="server2:1")
        except FleetError as error:
            ended_by = str(error)
            break
        assert_same(results, undisturbed())
    assert "server2:1" in ended_by
    assert number > 5


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("number", "after"), [(6, False), (29, False), (30, True)])
def test_a_mover_that_is_killed_leaves_no_half_of_a_move(number: int, after: bool) -> None:
    results, struck = resumed_after(number, after=after)
    assert struck
    assert_same(results, undisturbed())


@pytest.mark.parametrize("after", [False, True], ids=["before it has moved", "when it has moved"])
def test_the_move_that_a_worker_was_lost_amid_the_next_makes_once(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have asked for it. Servers may still stand still for the one that is lost."""
    fleets: dict[int, Fleet] = {}
    begun, waits, movers = threading.Event(), threading.Event(), []

    class Told(Claims):
        def claim(self, name: str, by_anyone: bool, waiting: Waiting, *rest: Any) -> None:
            super().claim(name, by_anyone, waiting, *rest)
            if waiting.worker == 1:
                waits.set()

    def move(worker: WorkerRuntime, servers: Any) -> None:
        movers.append(worker.assignment.index)
        if worker.assignment.index == 0:
            begun.set()
            assert waits.wait(PATIENCE_S)
            network.counts = True
        moved(worker, servers)

    def kill() -> None:
        network.counts = False
        exit_guard.release(worker_of(fleets[0]))
        worker_of(fleets[0]).close()
        raise Killed

    def body(fleet: Fleet, worker: int) -> Any:
        def pause(step: int) -> None:
            assert worker == 0 or step != MOVED_AFTER or begun.wait(PATIENCE_S)

        fleets[worker] = fleet
        return training("adagrad", names([1, 2]), movers=(0, 1), pause=pause)(fleet, worker)

    monkeypatch.setattr("fleet.ps.server.job.Claims", Told)
    moved = resizing._move
    monkeypatch.setattr(resizing, "_move", move)
    network = StrikingNetwork(1, kill, after=after, kinds={"switch"})
    job = Resized(body, [0, 1], [1, 2], network=network, environ=SOON)
    job.end(job.start())
    assert {name: type(error) for name, error in job.errors.items()} == {"worker 0": Killed}
    assert movers == ([0] if after else [0, 1])
    assert job.results[1][0][:MOVED_AFTER] == undisturbed()[1][0][:MOVED_AFTER]


# ---------------------------------------------------------------------------------------------- workers share no steps

MODES = {
    "async": lambda: StrategyFactory.create_async_strategy(),
    "half_async": lambda: StrategyFactory.create_half_async_strategy(),
    "ssp": lambda: StrategyFactory.create_ssp_strategy(staleness=2),
}
#: Those in which dense parameters are on the workers, which nobody can follow.
AMONG_WORKERS = {
    "async, all_reduce": lambda: StrategyFactory.create_async_strategy(dense="all_reduce"),
    "half_async, all_reduce": lambda: StrategyFactory.create_half_async_strategy(dense="all_reduce"),
}
#: Those in which some pushes wait for others: three of two workers' make an update, or of three workers' four.
IN_BUFFERS = {
    "gba": lambda: StrategyFactory.create_gba_strategy(4, 99),
    "auto": lambda: StrategyFactory.create_auto_strategy(staleness=99),
    "auto, gba": lambda: StrategyFactory.create_auto_strategy(staleness=99, changes=[3]),
}
#: Those whose servers remember what each worker was given. Compensation that is to change next to nothing leaves it to
#: others to show that the right values are remembered.
GIVEN = {
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
    "dc_asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=1e-9),
}
ALL_MODES = {**MODES, **AMONG_WORKERS, **IN_BUFFERS, **GIVEN}


class Constant(torch.nn.Module):
    """Has the same gradients whatever its values are: the order of updates makes no difference, and each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = fleet_package.nn.Embedding(None, 4)
        self.small = torch.nn.Linear(4, 3)
        self.large = torch.nn.Linear(3, 9000)

    def forward(self) -> torch.Tensor:
        rows = self.table(torch.arange(40)).sum()
        return 0.5 * rows + sum(param.sum() for part in (self.small, self.large) for param in part.parameters())


def constant() -> Constant:
    with one_at_a_time:
        torch.manual_seed(7)
        return Constant()


def training_freely(
    optimizers: str,
    mode: str,
    then: list[str] | None,
    steps: int = 12,
    moved_after: int = 5,
    pause: Callable[[int], None] = lambda _: None,
) -> Callable[[Fleet, int], dict[str, torch.Tensor]]:
    def body(fleet: Fleet, worker: int) -> dict[str, torch.Tensor]:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS[optimizers](model), ALL_MODES[mode](), model=model)
        fleet.init_worker()
        for step in range(steps):
            pause(step)
            if step == moved_after and then is not None and worker == 0:
                fleet.resize_servers(then)
            elif step == moved_after and worker == 0:
                flush(fleet)  # as who moves does
            optimizer.zero_grad()
            before = [param.detach().clone() for param in model.large.parameters()]
            loss = model()
            assert all(map(torch.equal, before, model.large.parameters())), "a parameter has changed under a forward"
            loss.backward()
            optimizer.step()
        fleet.barrier_worker()
        for each in range(fleet.worker_num() if mode == "geo" else 0):  # each hears what all have done, in turn
            if each == worker:
                exchange(fleet)
            fleet.barrier_worker()
        here = dict(model.named_parameters()) if mode == "geo" else {}  # where each has values of its own
        if here:
            here["table.weight"] = model.table(torch.arange(40))
        return {**fleet.state_dict(model), **{f"{name}, here": value.detach() for name, value in here.items()}}

    return body


@functools.cache
def undisturbed_freely(optimizers: str, mode: str) -> list[dict[str, torch.Tensor]]:
    return Job(training_freely(optimizers, mode, None), 3, 2).run()


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.pairs(1)
def test_every_update_counts_once_where_workers_share_no_steps(optimizers: str, mode: str, move: str) -> None:
    first, then = MOVES[move]
    # A server hears of each push later than the others: when it is to stand still they have pushes that it has not.
    last = Endpoint.parse(f"server{first[-1]}:1")
    late = [Fault(Action.DELAY, last, kind=kind, times=None, delay_s=0.01) for kind in ("push", "place")]
    network = FaultyNetwork(LoopbackNetwork(), *late)
    body = training_freely(optimizers, mode, names(then))
    states = Resized(body, first, then, workers=3, network=network).run()
    assert_close(states, undisturbed_freely(optimizers, mode))


@pytest.mark.parametrize("kind", ["halt", "fill", "switch", "hello", "push", "pull"])
@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE])
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.pairs(1)
def test_no_message_has_to_arrive_the_first_time_where_workers_share_no_steps(
    mode: str, action: Action, kind: str
) -> None:
    faults = [
        Fault(action, kind=kind, skip=skip) for skip in ((1, 3) if kind in ("halt", "hello", "switch") else (9, 20))
    ]
    network = FaultyNetwork(LoopbackNetwork(), *faults)
    body = training_freely("momentum", mode, names([1, 2]))
    states = Resized(body, [0, 1], [1, 2], workers=3, network=network).run()
    assert_close(states, undisturbed_freely("momentum", mode))


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY])
@pytest.mark.parametrize("mode", ["async", "half_async, all_reduce"])
@pytest.mark.pairs(1)
def test_a_server_that_a_job_has_left_ends_though_words_of_it_get_lost(mode: str, action: Action) -> None:
    lost = Fault(action, Endpoint.parse("server0:1"), 1, kind="switch", times=2)
    network = FaultyNetwork(LoopbackNetwork(), lost)
    Resized(training_freely("momentum", mode, names([1, 2])), [0, 1], [1, 2], workers=3, network=network).run()
    assert len(network.struck) == 2


def test_nobody_waits_for_a_push_whose_worker_does_not_know_that_it_is_lost() -> None:
    """It waits for the answer of a server that has it, in turns; another one has it too, and a third one lacks it."""
    lost = Fault(Action.DROP_REQUEST, Endpoint.parse("server2:1"), 1, kind="push", step=3)

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        model = constant()
        strategy = StrategyFactory.create_auto_strategy()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), strategy, model=model)
        fleet.init_worker()
        for step in range(4):
            if worker == 0 and step == 2 and moves:
                for each in names([0, 1]):
                    until(lambda name=each: (1, 3) in found_job(job.service(name)).rounds.pushed)
                fleet.resize_servers(names([1, 2]))
            optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model)

    job = Resized(body, [0, 1, 2], [1, 2], network=FaultyNetwork(LoopbackNetwork(), lost))
    (got, _), (expected, _) = job.run(), Job(functools.partial(body, moves=False), 2, 3).run()
    for name, value in got.items():
        assert torch.equal(value, expected[name])


def test_an_update_whose_norm_is_not_told_yet_is_made_before_the_job_moves() -> None:
    """By the one that moves it: the worker that closed the buffer tells the servers late."""
    strategy = functools.partial(StrategyFactory.create_gba_strategy, 2, 99, max_grad_norm=0.5)

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), strategy(), model=model)
        fleet.init_worker()
        fleet.barrier_worker()
        for step in range(4):
            if worker == 0 and step == 2 and moves:
                until(lambda: found_job(job.service("server0:1")).rounds.due)
                fleet.resize_servers(names([1, 2]))
            optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model)

    late = Fault(Action.DELAY, worker=1, kind="clip", times=None, delay_s=0.3)
    job = Resized(body, [0, 1], [1, 2], network=FaultyNetwork(LoopbackNetwork(), late))
    (got, _), (expected, _) = job.run(), Job(functools.partial(body, moves=False), 2, 2).run()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_came_too_late_before_a_move_is_counted_after_it() -> None:
    """And what a worker read before it is as old as it was."""
    strategy = functools.partial(StrategyFactory.create_gba_strategy, 1, 0)

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), strategy(), model=model)
        fleet.init_worker()
        for step in range(6):
            model().backward()
            fleet.barrier_worker()
            if worker == 0:
                optimizer.step()
            if step == 3 and worker == 0 and moves:
                fleet.resize_servers(names([1, 2]))
            fleet.barrier_worker()
            if worker == 1:
                optimizer.step()  # of what was read before the other one's step
            optimizer.zero_grad()
            fleet.barrier_worker()
            refresh(fleet)
        return fleet.summary()["late_gradients"], fleet.state_dict(model)

    (late, got), _ = Resized(body, [0, 1], [1, 2]).run()
    (expected, state), _ = Job(functools.partial(body, moves=False), 2, 2).run()
    assert late == expected == {1: 6}
    for name, value in got.items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("mode", ["gba", "auto"])
def test_what_a_worker_left_in_a_buffer_moves_when_it_has_gone(mode: str) -> None:
    """The last of its pushes waits there; nothing of it is lost, and who waits for it in turns goes on."""
    strategy = StrategyFactory.create_gba_strategy(2, 99) if mode == "gba" else StrategyFactory.create_auto_strategy()
    has_left = threading.Event()

    def body(fleet: Fleet, worker: int, moves: bool = True) -> Any:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), strategy, model=model)
        fleet.init_worker()
        for step in range(3):
            if worker == 0 and step == 2:
                assert has_left.wait(PATIENCE_S)
                if moves:
                    fleet.resize_servers(names([1, 2]))
            optimizer.minimize(model())
            if mode == "gba" and worker == 1 and step == 2:
                optimizer.minimize(model())
        if worker == 1:
            fleet.stop_worker()
            has_left.set()
            return None
        for _ in range(4):
            optimizer.minimize(model())
        refresh(fleet)
        return fleet.state_dict(model)

    if mode == "auto":
        has_left.set()
    job = Resized(body, [0, 1], [1, 2])
    got, _ = job.run()
    if mode == "gba":
        has_left.clear()
    expected, _ = Job(functools.partial(body, moves=False), 2, 2).run()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


#: What a job may be like in which a push waits for others while it moves: its strategy, and its table's rules.
WAITING: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (lambda: StrategyFactory.create_gba_strategy(2), {}),
    "bf16": (lambda: StrategyFactory.create_gba_strategy(2, wire_dtype="bf16"), {}),
    "norm": (lambda: StrategyFactory.create_gba_strategy(2, max_grad_norm=0.05), {}),
    "weights": (
        lambda: StrategyFactory.create_gba_strategy(2).with_settings(evict_every=2),
        {"admit": CountFilter(3, of="weight"), "evict": MaxRows(30, by="weight")},
    ),
    "time": (lambda: StrategyFactory.create_gba_strategy(2), {"evict": Unused(seconds=1e9)}),
    "in turns": (lambda: StrategyFactory.create_auto_strategy(), {}),
    "out of turn": (lambda: StrategyFactory.create_auto_strategy(changes=[2]), {}),
}


def in_lockstep(what: str, optimizers: str, then: list[str] | None, found: list[Any]) -> Callable[[Fleet, int], Any]:
    """What moves while the push of the second worker waits for that of the first, in every third step; ``found`` is
    where the servers are."""
    strategy, rules = WAITING[what]

    def waits(count: int) -> bool:
        services = [found[0].service(each) for each in fleets[0].server_endpoints()]
        return all(len(found_job(each).rounds.pushed) == count for each in services)

    fleets: dict[int, Fleet] = {}

    def body(fleet: Fleet, worker: int) -> Any:
        fleets[worker] = fleet
        model = model_of_all(rules=rules)
        optimizer = fleet.distributed_optimizer(OPTIMIZERS[optimizers](model), strategy(), model=model)
        fleet.init_worker()
        losses = []
        for step in range(8):
            loss = model(ids_of(worker, step))
            loss.backward()
            fleet.barrier_worker()
            if worker == 0:
                until(lambda: waits(1))
                if step % 3 == 2 and then is not None and fleet.server_endpoints() != then:
                    fleet.resize_servers(then)
                    assert waits(1) or what == "in turns", "it has moved, where nobody sends it again"
                    until(lambda: waits(1))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            fleet.barrier_worker()
            refresh(fleet)
        summary = fleet.summary()
        told = {key: summary["tables"]["table.weight"][key] for key in ("rows", "pending", "evicted")}
        return losses, fleet.state_dict(model), told, summary["changes"], summary["staleness"]

    return body


@functools.cache
def undisturbed_in_lockstep(what: str, optimizers: str, servers: int) -> Any:
    found: list[Any] = []
    job = Resized(in_lockstep(what, optimizers, None, found), range(servers), range(servers))
    found.append(job)
    return job.run()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("what", WAITING)
@pytest.mark.pairs(1)
def test_a_push_that_waits_for_others_moves_to_the_bit(what: str, optimizers: str, move: str) -> None:
    first, then = MOVES[move]
    found: list[Any] = []
    job = Resized(in_lockstep(what, optimizers, names(then), found), first, then)
    found.append(job)
    got, expected = job.run(), undisturbed_in_lockstep(what, optimizers, len(first))
    assert_same([each[:2] for each in got], [each[:2] for each in expected])
    assert [each[2:4] for each in got] == [each[2:4] for each in expected]


@pytest.mark.parametrize(
    ("mode", "kind", "server"),
    [
        ("half_async", "push", 1),
        ("geo", "push", 1),
        ("gba", "push", 1),
        ("gba", "push", 0),
        ("gba", "place", 1),
        ("auto, gba", "place", 1),
    ],
)
@pytest.mark.pairs(1)
def test_a_server_takes_what_others_have_before_it_moves(
    mode: str, kind: str, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pushes of one worker reach one server only when the others stand still, or it hears later what they are part
    of."""
    asked, let_go, halts = list[Any](), resizing.Copy._let_go, threading.Event()

    def noted(copy: Any, connection: Any, number: int, delivered: Any = None, **placed: Any) -> Any:
        asked.append(delivered or placed)
        if number == 0 and not halts.is_set():
            halts.set()
            gates = [found_job(job.service(each)).rounds.gate for each in job.endpoints]
            until(lambda: kind != "push" or len({gate.delivered(1) for gate in gates}) > 1)
        return let_go(copy, connection, number, delivered, **placed)

    def pause(step: int) -> None:
        if step == 7:  # nobody gets further until the one that moves the job has come to that
            until(halts.is_set)

    monkeypatch.setattr(resizing.Copy, "_let_go", noted)
    late = Fault(Action.DELAY, Endpoint.parse(f"server{server}:1"), 1, kind=kind, times=None, delay_s=0.2)
    network = FaultyNetwork(LoopbackNetwork(), late)
    body = training_freely("adam", mode, names([1, 2]), 12, moved_after=6, pause=pause)
    job = Resized(body, [0, 1], [1, 2], 3, network=network)
    states = job.run()
    assert any(asked)
    assert_close(states, Job(training_freely("adam", mode, None, 12, moved_after=6), 3, 2).run())


#: What servers remember of what each worker was given: what it was, and what has been compensated for; which rows it
#: holds, and which of them it is to be told of.
REMEMBERED: dict[str, Callable[[], Any]] = {
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
    "dc_asgd": lambda: StrategyFactory.create_half_async_strategy(max_merge_var_num=1, dc_asgd_lambda=9.0),
    "adaptive": lambda: StrategyFactory.create_half_async_strategy(
        max_merge_var_num=1, dc_asgd_lambda=9.0, dc_asgd_adaptive=True
    ),
}


def one_after_the_other(what: str, then: list[str] | None) -> Callable[[Fleet, int], Any]:
    """What moves when the second worker has computed, and has not told what."""
    turns = threading.Barrier(2, timeout=PATIENCE_S)

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), REMEMBERED[what](), model=model)
        fleet.init_worker()
        losses = []
        for step in range(8):
            turns.wait()
            loss = model(ids_of(worker, step))
            loss.backward()
            for each in range(2):
                turns.wait()
                if each == worker:
                    optimizer.step()
                if each == worker == 0 and step == MOVED_AFTER and then is not None:
                    fleet.resize_servers(then)
            optimizer.zero_grad()
            losses.append(loss.item())
        turns.wait()
        return losses, fleet.state_dict(model)

    return body


@functools.cache
def undisturbed_in_order(what: str) -> Any:
    return Job(one_after_the_other(what, None), 2, 2).run()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("what", REMEMBERED)
@pytest.mark.pairs(1)
def test_what_servers_remember_of_workers_moves_to_the_bit(what: str, move: str) -> None:
    first, then = MOVES[move]
    got, expected = Resized(one_after_the_other(what, names(then)), first, then).run(), undisturbed_in_order(what)
    assert_same(got, expected)


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY])
def test_a_change_that_was_rounded_is_the_same_for_other_servers(action: Action) -> None:
    """Whose parts of it have other scales. The former ones have it, and the worker does not know, or they do not."""
    lost = [Fault(action, Endpoint.parse(each), 1, kind="push", step=3, times=None) for each in names([0, 1])]
    inputs, begin, fleets = torch.linspace(0.5, 1.5, 9000), torch.zeros(3, 9000), dict[int, Fleet]()

    def is_in_doubt() -> bool:
        if action is Action.DROP_REQUEST:
            return completed(fleets[1]) == 2 and any(under_way(fleets[1]))
        return all(found_job(job.service(each)).rounds.gate.delivered(1) == 3 for each in names([0, 1]))

    def body(fleet: Fleet, worker: int) -> Any:
        model = torch.nn.Linear(9000, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(begin)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(sgd, StrategyFactory.create_geo_strategy(1, wire_dtype="int8"))
        fleet.init_worker()
        fleets[worker] = fleet
        for step in range(6):
            if worker == 0 and step == 3:
                until(lambda: 1 in fleets and is_in_doubt())
                fleet.resize_servers(names([2, 3, 4]))
            optimizer.minimize(model(inputs).sum())
        fleet.barrier_worker()
        if worker == 0:
            exchange(fleet)  # and so know what all have told
        return [torch.cat([flat["float32"] for flat in flats]).view(3, 9000) for flats in summed_up(fleet)]

    job = Resized(body, [0, 1], [2, 3, 4], network=FaultyNetwork(LoopbackNetwork(), *lost))
    (agreed, ahead), (_, ahead_too) = job.run()
    torch.testing.assert_close(agreed + ahead + ahead_too, begin - 0.1 * 6 * 2 * inputs, rtol=1e-6, atol=1e-5)


def test_who_starts_again_with_the_old_list_is_told_the_new_one() -> None:
    def body(fleet: Fleet, worker: int) -> Any:
        first = training("adagrad", names([1, 2]))(fleet, worker)
        fleet.barrier_worker()
        if worker == 1:
            leave(fleet)
            again = job.fleet(Role.WORKER, worker)
            model = model_of_all()
            again.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
            again.init_worker()
            state = again.state_dict(model)
            again.stop_worker()
            return first, state
        return first, first[1]

    job = Resized(body, [0, 1], [1, 2], environ={**SOON, "FLAGS_rpc_deadline": "20000"})
    results = job.run()
    for _, state in results:
        for name, value in state.items():
            assert torch.equal(value, results[0][1][name]), name


#: What else a job may have to take along: its strategy, and its table's rules.
ALONG: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bf16": (lambda: StrategyFactory.create_sync_strategy(wire_dtype="bf16"), {}),
    "int8": (lambda: StrategyFactory.create_sync_strategy(wire_dtype="int8"), {}),
    "norm": (lambda: StrategyFactory.create_sync_strategy(max_grad_norm=0.05), {}),
    "count": (lambda: None, {"admit": CountFilter(3)}),
    "weights": (lambda: None, {"admit": CountFilter(3, of="weight"), "evict": MaxRows(30, by="weight")}),
    "chance": (lambda: None, {"admit": Probability(0.5)}),
    "unused": (lambda: evicting(), {"evict": Unused(steps=2)}),
    "most": (lambda: evicting(), {"admit": CountFilter(2), "evict": [MaxRows(20), SmallNorm(0.01)]}),
}


def evicting() -> Any:
    return StrategyFactory.create_sync_strategy().with_settings(evict_every=2)


def taking_along(what: str, then: list[str] | None, asks: bool) -> Callable[[Fleet, int], Any]:
    strategy, rules = ALONG[what]

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all(rules=rules)
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adam"](model), strategy(), model=model)
        fleet.init_worker()
        told = []
        for step in range(2 * STEPS):
            if step == MOVED_AFTER and then is not None and worker == 0 and not asks:
                fleet.resize_servers(then)
            if step == MOVED_AFTER and then is not None and worker == 0 and asks:
                until(lambda: wanted_servers(fleet) or fleet.server_endpoints() == then)
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            told.append(loss.item())
            if asks and then is not None and worker == 0 and step >= MOVED_AFTER:
                until(lambda: not is_copying(fleet))
        fleet.barrier_worker()
        life = fleet.summary()["tables"]["table.weight"]
        return (
            told,
            fleet.state_dict(model),
            {key: life[key] for key in ("rows", "pending", "evicted", "dropped_gradients")},
        )

    return body


@functools.cache
def undisturbed_with(what: str, servers: int) -> Any:
    return Job(taking_along(what, None, False), 2, servers, environ=BEATING).run()


@pytest.mark.parametrize("asks", [False, True], ids=["in a call", "from outside"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("what", ALONG)
@pytest.mark.pairs(1)
def test_what_a_job_takes_along(what: str, move: str, asks: bool) -> None:
    first, then = MOVES[move]
    job = Resized(taking_along(what, names(then), asks), first, then, environ=BEATING)
    threads = job.start()
    if asks:
        move_from_outside(job)
    job.join(threads)
    assert job.errors == {}
    got, expected = [job.results[worker] for worker in range(2)], undisturbed_with(what, len(first))
    if what == "int8":  # scales are those of a server's part
        for (losses, *_), (other, *_) in zip(got, expected, strict=True):
            assert losses == pytest.approx(other, abs=5e-3)
        return
    assert_same([each[:2] for each in got], [each[:2] for each in expected])
    assert [each[2] for each in got] == [each[2] for each in expected]


@pytest.mark.parametrize("mode", [None, "async"])
@pytest.mark.parametrize("then", [[[1, 2]], [[2, 3]], [[1, 2], [2, 3, 4]]], ids=["one stays", "all leave", "two moves"])
@pytest.mark.pairs(1)
def test_a_worker_that_computes_for_long_while_others_move_lives(then: list[list[int]], mode: str | None) -> None:
    """Longer than servers wait for a worker that is silent; nobody there has heard of it since the job moved."""
    moved, idle = threading.Event(), 2.5 * float(SOON["FLAGS_rpc_deadline"]) / 1000

    def body(fleet: Fleet, worker: int, moves: Sequence[Sequence[int]] = then) -> Any:
        model = constant()
        strategy = None if mode is None else MODES[mode]()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), strategy, model=model)
        fleet.init_worker()
        for step in range(STEPS):
            if step == MOVED_AFTER and moves and worker == 0:
                for servers in moves:
                    fleet.resize_servers(names(servers))
                moved.set()
            if step == MOVED_AFTER and moves and worker == 1:
                assert moved.wait(PATIENCE_S)
                time.sleep(idle)
            optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model)

    job = Resized(body, [0, 1], sorted({each for servers in then for each in servers}), environ=SOON)
    job.lists = {name: names(next(servers for servers in then if name in names(servers))) for name in job.then}
    expected = Job(functools.partial(body, moves=[]), 2, 2).run()[0]
    for state in job.run():
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("servers", [[1, 2], [2, 3]], ids=["one stays", "all leave"])
def test_a_worker_that_has_heard_of_a_move_may_leave(servers: list[int]) -> None:
    """A connection that has met it, on whatever thread, is no job that has failed."""
    moved, has_left = threading.Event(), threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), MODES["async"](), model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        fleet.barrier_worker()
        if worker == 0:
            fleet.resize_servers(names(servers))
            moved.set()
            assert has_left.wait(PATIENCE_S)
            optimizer.minimize(model())
            return
        assert moved.wait(PATIENCE_S)
        first = connections(fleet)[0]
        until(lambda: first.failure is not None)
        with pytest.raises(ServersMovedError):
            first.call(Frame(first.request(0, where=pb.Where())), "a question")
        fleet.stop_worker()
        has_left.set()

    Resized(body, [0, 1], servers, environ=BEATING).run()


def test_a_worker_that_is_closed_while_it_goes_over_is_heard_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, as a signal may. Whoever takes its place would be refused as long as anything of it beats."""
    joins, moved = WorkerRuntime._join, threading.Event()

    def closed_meanwhile(worker: WorkerRuntime, *given: Any) -> Any:
        answers = joins(worker, *given)
        if worker.assignment.index == 1:
            worker.close()
        return answers

    def body(fleet: Fleet, worker: int) -> None:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), MODES["ssp"](), model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        fleet.barrier_worker()  # both have joined once
        if worker == 0:
            monkeypatch.setattr(WorkerRuntime, "_join", closed_meanwhile)
            fleet.resize_servers(names([1, 2]))
            moved.set()
            return
        assert moved.wait(PATIENCE_S)
        connected = connections(fleet)
        with pytest.raises(FleetError):
            optimizer.minimize(model())
        assert {str(each.endpoint) for each in connected} == {*names([1, 2])}
        assert not [each.name for each in threading.enumerate() if each.name.startswith("fleet-heartbeat-1-")]

    job = Resized(body, [0, 1], [1, 2], environ=SOON)
    job.end(job.start())
    assert not job.errors.keys() & {"worker 0"}


@pytest.mark.parametrize("mode", sorted({**MODES, **IN_BUFFERS, **GIVEN}))
@pytest.mark.parametrize("servers", [[2], [1, 2, 3]], ids=["to one", "to three"])
@pytest.mark.pairs(6)
def test_a_worker_that_has_not_heard_of_a_move_may_leave(mode: str, servers: list[int]) -> None:
    """What it asks as it stops finds the servers that there are now."""
    trained, moved, has_left = threading.Event(), threading.Event(), threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["momentum"](model), ALL_MODES[mode](), model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        if worker == 0:
            assert trained.wait(PATIENCE_S)
            fleet.resize_servers(names(servers))
            moved.set()
            assert has_left.wait(PATIENCE_S)
            optimizer.minimize(model())
            return
        trained.set()
        assert moved.wait(PATIENCE_S)
        fleet.stop_worker()
        has_left.set()

    Resized(body, [0, 1], servers).run()


@pytest.mark.parametrize("mode", [None, "async"])
@pytest.mark.parametrize(
    "lists",
    [[[0], [0, 1], [0]], [[0, 1], [1, 0], [0, 1]], [[0, 1], [1, 2], [2, 3, 4]], [[0, 1], [2, 0], [3, 2], [4]]],
    ids=["back", "back as two", "never all at once", "one after the other"],
)
@pytest.mark.pairs(2)
def test_a_worker_that_computes_while_a_job_moves_more_than_once_goes_along(
    lists: list[list[int]], mode: str | None
) -> None:
    """No heartbeat has told it of what was between, which may have been servers that it knows in another arrangement.
    Those that the job has left hear of it, and do not wait until it seems lost."""
    goes_on = threading.Event()

    def body(fleet: Fleet, worker: int, moves: Sequence[Sequence[int]] = tuple(lists[1:])) -> Any:
        model = constant()
        strategy = None if mode is None else MODES[mode]()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), strategy, model=model)
        fleet.init_worker()
        for step in range(6):
            if step == 3 and worker == 0:
                for numbers in moves:
                    fleet.resize_servers(names(numbers))
                goes_on.set()
            if step == 3:
                assert goes_on.wait(PATIENCE_S)
            optimizer.minimize(model())
        fleet.barrier_worker()
        return fleet.state_dict(model)

    quiet = {**PATIENT, "FLEET_HEARTBEAT_S": "5"}
    job = Resized(body, lists[0], sorted({*itertools.chain(*lists[1:])}), environ=quiet)
    job.lists = {name: next(names(each) for each in lists if name in names(each)) for name in job.then}
    results = job.run()
    expected = Job(functools.partial(body, moves=()), 2, len(lists[0])).run()
    for got, wanted in zip(results, expected, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", [None, "async"])
def test_a_worker_that_fails_before_it_goes_over_ends_the_job(mode: str | None) -> None:
    """Where the job is, and not only where it was."""
    moved = threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model = constant()
        strategy = None if mode is None else MODES[mode]()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        if worker == 1:
            assert moved.wait(PATIENCE_S)
            raise ValueError("a mistake of the script")
        fleet.resize_servers(names([1]))
        moved.set()
        while True:
            optimizer.minimize(model())

    job = Resized(body, [0], [1], environ={**PATIENT, "FLEET_HEARTBEAT_S": "5"})
    job.end(job.start())
    assert isinstance(job.errors["worker 1"], ValueError)
    assert "a mistake of the script" in str(job.errors["worker 0"]), "and not that worker 1 is silent"


def calling(what: str, tmp_path: Path) -> Callable[[Fleet, torch.nn.Module, Any], object]:
    """Return a call that a script may make at any time."""

    def prefetching(fleet: Fleet, model: Any, optimizer: Any) -> None:
        for ids in fleet.prefetch([IDS_HERE] * 3, lambda ids: {model.rows: ids}, depth=1, device="cpu"):
            optimizer.minimize(model(ids))

    return {
        "state_dict": lambda fleet, model, _: fleet.state_dict(model),
        "whole": lambda _fleet, model, _: model.rows.weight,
        "save": lambda fleet, model, _: fleet.save_inference_model(str(tmp_path / "model"), model, (IDS_HERE,)),
        "load": lambda fleet, model, _: model.load_state_dict(fleet.state_dict(model)),
        "summary": lambda fleet, _model, _: fleet.summary(),
        "prefetch": lambda fleet, model, optimizer: prefetching(fleet, model, optimizer),
        "evaluate": lambda _fleet, model, _: model.eval()(IDS_HERE),
        "grow": lambda _fleet, _model, optimizer: optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(3))]}
        ),
    }[what]


IDS_HERE = torch.arange(6)


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet_package.nn.Embedding(20, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).square().mean()


@pytest.mark.parametrize("what", ["state_dict", "whole", "save", "load", "summary", "prefetch", "evaluate"])
@pytest.mark.parametrize("mode", [None, "async"])
@pytest.mark.pairs
def test_any_call_of_a_worker_goes_over(what: str, mode: str | None, tmp_path: Path) -> None:
    go_over(what, mode, tmp_path)


def test_parameters_may_join_in_the_first_call_after_a_move(tmp_path: Path) -> None:
    go_over("grow", None, tmp_path)


@pytest.mark.parametrize("by", ["a call", "a step"])
@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
@pytest.mark.pairs(2)
def test_parameters_have_joined_though_servers_have_left_amid_it(by: str, dense: str) -> None:
    """The call, or the step, is made again, and is done with what it had begun."""

    def body(fleet: Fleet, worker: int) -> tuple[list[float], list[float]]:
        model, head = Rows(), torch.nn.Linear(2, 1)
        model.scale = torch.nn.Parameter(torch.ones(()))
        late = fleet_package.nn.Embedding(None, 2, initializer="zeros")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = StrategyFactory.create_sync_strategy(dense=dense)
        optimizer = fleet.distributed_optimizer(sgd, strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(model(IDS_HERE) * model.scale)
        values = worker_of(fleet)._values
        fetch, calls = values.fetch, iter([ServersMovedError("the job has moved to other servers")])

        def moved(*given: Any, **named: Any) -> Any:
            for error in calls:
                raise error
            return fetch(*given, **named)

        with torch.no_grad():
            for param in head.parameters():
                param.fill_(1.0)
        values.fetch = moved
        if by == "a call":
            optimizer.add_param_group({"params": [*head.parameters(), late.weight], "lr": 0.5})
        else:  # a table that joins so has nowhere to look its rows up before
            sgd.add_param_group({"params": [*head.parameters()], "lr": 0.5})
        for _ in range(2):
            optimizer.zero_grad()
            head(late(torch.tensor([3])) if by == "a call" else torch.zeros(1, 2)).sum().backward()
            optimizer.step()
        fleet.barrier_worker()
        with torch.no_grad():
            return head.bias.tolist(), late(torch.tensor([3])).flatten().tolist() if by == "a call" else [-1.0, -1.0]

    assert run_job(body, 2, 2) == [([0.0], [-1.0, -1.0])] * 2


def go_over(what: str, mode: str | None, tmp_path: Path) -> None:
    """Make a call as the first one after the job has moved, of which its worker has not heard."""
    goes_on = threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model = Rows()
        strategy = None if mode is None else MODES[mode]()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        optimizer.minimize(model(IDS_HERE))
        if worker == 0:
            fleet.resize_servers(names([1, 2]))
            goes_on.set()
        assert goes_on.wait(PATIENCE_S)
        if worker == 1 or what in ("save", "load", "prefetch", "grow"):
            calling(what, tmp_path)(fleet, model, optimizer)
        optimizer.minimize(model(IDS_HERE))
        fleet.barrier_worker()

    job = Resized(body, [0], [1, 2], environ={**PATIENT, "FLEET_HEARTBEAT_S": "5"})
    job.run()
    assert job.errors == {}


def test_a_look_at_all_rows_goes_over_while_it_waits_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet servers that the job has left when the look has begun."""
    queued, moved, flushing = threading.Event(), threading.Event(), threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model = Rows()
        optimizer = fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), MODES["async"](), model=model
        )
        fleet.init_worker()
        optimizer.minimize(model(IDS_HERE))
        fleet.barrier_worker()
        if worker == 0:
            assert queued.wait(PATIENCE_S)
            fleet.resize_servers(names([1, 2]))
            moved.set()
        else:
            communicator = communicator_of(fleet)
            push, flush = communicator._push, communicator.flush
            monkeypatch.setattr(communicator, "_push", lambda *given: flushing.wait(PATIENCE_S) and push(*given))
            monkeypatch.setattr(communicator, "flush", lambda: flushing.set() or flush())
            optimizer.minimize(model(IDS_HERE))
            queued.set()
            assert moved.wait(PATIENCE_S)
            assert model.rows.weight.detach().isfinite().all()
            assert flushing.is_set()
        fleet.barrier_worker()

    job = Resized(body, [0], [1, 2], environ={**PATIENT, "FLEET_HEARTBEAT_S": "5"})
    job.run()
    assert job.errors == {}


def test_a_call_finishes_what_was_interrupted_and_follows_moves_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of a script go this way."""

    def body(fleet: Fleet, _: int) -> None:
        model = constant()
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        worker, seen, moves = worker_of(fleet), list[tuple[str, bool]](), [ServersMovedError("the job has moved")] * 2

        def note(what: str) -> None:
            with worker.turns.if_free() as is_free:
                seen.append((what, not is_free))

        def act() -> int:
            note("act")
            if moves:
                raise moves.pop()
            return 7

        with monkeypatch.context() as patch:
            patch.setattr(worker, "_finish_interrupted", note)
            patch.setattr(worker, "_follow", lambda: note("follow"))
            assert worker.in_turn("finish", act) == 7
        assert seen == [(what, True) for what in ["finish", "act", "follow"] * 2 + ["finish", "act"]]

    run_job(body, workers=1)


def test_a_later_move_to_the_same_list_is_another_one() -> None:
    """Whichever worker asks for it, in modes without steps of all."""
    turns = [threading.Event(), threading.Event()]
    found = {}

    def body(fleet: Fleet, worker: int) -> None:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), MODES["async"](), model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        if worker == 0:
            fleet.resize_servers(names([0, 1]))
            fleet.resize_servers(names([0, 2]))
            turns[0].set()
            assert turns[1].wait(PATIENCE_S)
        else:
            assert turns[0].wait(PATIENCE_S)
            fleet.resize_servers(names([0, 3]))
            found[worker] = fleet.server_endpoints()
            turns[1].set()
        optimizer.minimize(model())
        fleet.barrier_worker()
        found[worker] = fleet.server_endpoints()

    job = Resized(body, [0], [0, 1, 2, 3], environ=BEATING)
    job.lists = {"server1:1": names([0, 1]), "server2:1": names([0, 2]), "server3:1": names([0, 3])}
    job.run()
    assert found == {0: names([0, 3]), 1: names([0, 3])}


class Renaming:
    """Is a network in which a server is known by another name as well."""

    def __init__(self) -> None:
        self._inner = LoopbackNetwork()

    def listen(self, endpoint: Endpoint, handler: Any) -> Any:
        return self._inner.listen(endpoint, handler)

    def connect(self, endpoint: Endpoint) -> Any:
        return self._inner.connect(Endpoint("server1", 1) if endpoint.host == "another-name" else endpoint)


def test_one_server_under_two_names_is_refused_before_anything_moves() -> None:
    """It would take one half of the rows for all."""
    goes_on = threading.Event()

    def body(fleet: Fleet, worker: int) -> Any:
        model = Rows()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet.init_worker()
        optimizer.minimize(model(IDS_HERE))
        assert goes_on.wait(PATIENCE_S)
        with pytest.raises(PlanMismatchError, match="one server is in the list under two names"):
            fleet.resize_servers(["server1:1", "another-name:1"])
        optimizer.minimize(model(IDS_HERE))
        return fleet.server_endpoints()

    job = Resized(body, [0], [0], workers=1, network=Renaming(), environ=BEATING)
    threads = job.start()
    joiner = Joiner(job, "server1:1", [])
    goes_on.set()
    job.join(threads)
    joiner.runtime.ask(pb.Request(status=pb.Status()))
    joiner.runtime._service.stop("nobody has moved here")
    joiner.thread.join(PATIENCE_S)
    assert job.errors == {}
    assert job.results[0] == names([0])


def test_one_server_under_two_names_begins_no_job() -> None:
    def body(fleet: Fleet, worker: int) -> None:
        model = Rows()
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        with pytest.raises(PlanMismatchError, match=r"another place in the list.*expected server 0; got server 1 of"):
            fleet.init_worker()

    job = Resized(body, [], [], workers=1, network=Renaming(), environ=BEATING)
    joiner = Joiner(job, "server1:1", [])
    job.endpoints = ["server1:1", "another-name:1"]
    worker = threading.Thread(target=job.work, args=(0,), daemon=True)
    worker.start()
    job.join([worker, joiner.thread])


def test_a_checkpoint_after_a_move_brings_no_rows_back_that_have_left(tmp_path: Path) -> None:
    """One that goes on from another would have to know which have left: the servers that there are do not."""

    def body(fleet: Fleet, worker: int, *, moves: bool = True) -> Any:
        model = torch.nn.Sequential(fleet_package.nn.Embedding(None, 4, evict=Unused(steps=3)))
        strategy = StrategyFactory.create_sync_strategy()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        if not moves:
            return fleet.state_dict(model)
        for step in range(12):
            if step == 5:
                fleet.save_persistables(str(tmp_path / "full"))
            if step == 7:
                fleet.resize_servers(names([1]))
            optimizer.minimize(model(torch.arange(step * 10, step * 10 + 10)).square().sum())
        fleet.save_persistables(str(tmp_path / "delta"), mode="delta")
        return fleet.state_dict(model)

    (state,) = Resized(body, [0], [1], workers=1).run()
    (back,) = Job(functools.partial(body, moves=False), 1, 2, model_dir=str(tmp_path / "delta")).run()
    assert sorted(back["0.ids"].tolist()) == sorted(state["0.ids"].tolist())


@pytest.mark.parametrize("then", [[0, 1], [1]], ids=["one stays", "all leave"])
@pytest.mark.pairs(1)
def test_a_server_whose_rows_lie_in_files_makes_room_for_those_to_come(then: list[int], tmp_path: Path) -> None:
    rows, batch = 40_000, 10_000

    def body(fleet: Fleet, worker: int, *, moves: bool = True) -> torch.Tensor:
        table = fleet_package.nn.Embedding(None, 16)
        optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(table.parameters(), lr=0.1), model=table)
        fleet.init_worker()
        for step in range(2 * rows // batch):
            if moves and step == rows // batch:
                fleet.resize_servers(names(then))
            ids = torch.arange(step * batch, (step + 1) * batch) % rows
            optimizer.minimize(table(ids).square().mean())
        table.eval()
        return torch.cat([table(torch.arange(at, at + batch)).detach() for at in range(0, rows, batch)])

    environ = {**PATIENT, "FLEET_TABLE_MEMORY_MB": "2", "FLEET_TABLE_DIR": str(tmp_path)}
    (got,) = Resized(body, [0], then, workers=1, environ=environ).run()
    (expected,) = Job(functools.partial(body, moves=False), 1, 1, environ=environ).run()
    assert torch.equal(got, expected)


def test_parameters_that_join_are_no_reason_to_wait() -> None:
    """For a worker that is to take the step in which they do."""
    joined, has_tried = threading.Event(), threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        model, more = constant(), torch.nn.Parameter(torch.ones(3))
        plain = torch.optim.Adagrad(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(plain, model=model)
        fleet.init_worker()
        optimizer.minimize(model())
        if worker == 0:
            server = job.service("server0:1")
            until(lambda: found_job(server).plans.outgrown or joined.is_set())
            with pytest.raises(MissedError, match="parameters join the job"):
                fleet.resize_servers(names([0, 1]))
            has_tried.set()
        plain.add_param_group({"params": [more]})
        optimizer.minimize(model() + more.sum())
        joined.set()

    job = Resized(body, [0], [0, 1], environ=BEATING)
    job.end(job.start())
    assert {*job.errors} == {"server1:1"}, "to which nobody has moved"
    assert has_tried.is_set()


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", ["async", "half_async"])
@pytest.mark.parametrize("asks", [False, True], ids=["in a call", "from outside"])
def test_workers_join_and_leave_around_a_move(mode: str, asks: bool) -> None:
    job = Resized(lambda *_: None, [0, 1], [1, 2, 3], environ=BEATING)
    lists = [(name, job.endpoints) for name in job.endpoints] + [(name, job.then) for name in job.then[1:]]
    threads = [threading.Thread(target=job.serve_at, args=each, daemon=True) for each in lists]
    for thread in threads:
        thread.start()
    zero, one = (part(job, index, 2, ELASTIC[mode]).join() for index in range(2))
    zero.train(3)
    one.train(2)
    five = part(job, 5, 6, ELASTIC[mode]).join()
    five.train(1)
    if asks:
        with closing(job.network.connect(Endpoint.parse(job.endpoints[0]))) as channel:
            channel.start(Frame(pb.Request(rearrange=pb.Rearrange(endpoints=job.then))), 10.0).result()
        until(lambda: zero.train(1) or zero.fleet.server_endpoints() == job.then)
        taken = zero.fleet.summary()["steps_by_worker"][0]
    else:
        zero.fleet.resize_servers(job.then)
        zero.train(4)
        taken = 7
    seven = part(job, 7, 8, ELASTIC[mode]).join()  # with the list that the job had at first
    one.train(2)
    seven.train(1)
    five.leave()
    zero.sees(taken, 4, 0, 0, 0, 1, 0, 1)
    one.leave()
    zero.leave()
    seven.train(2)
    seven.sees(taken, 4, 0, 0, 0, 1, 0, 3)
    seven.leave()
    job.join(threads)
    assert job.errors == {}


# ---------------------------------------------------------------------------------------------- followers


@pytest.mark.parametrize("strategy", [None, *MODES])
@pytest.mark.parametrize("move", [*MOVES, "one for another", "an outage"])
@pytest.mark.pairs(1)
def test_who_follows_a_job_goes_over_with_it(strategy: str | None, move: str) -> None:
    first, then = {"one for another": ([0, 1], [2, 1]), "an outage": ([0, 1], [1, 2])}.get(move) or MOVES[move]
    begun, gone_over = threading.Event(), threading.Event()

    def pause(step: int) -> None:
        """Let the job move when somebody follows it, and end when that one has gone over."""
        if step == 1:
            assert begun.wait(PATIENCE_S)
        if step == (MOVED_AFTER if strategy is None else 8) + 1:
            assert gone_over.wait(PATIENCE_S)

    if strategy is None:
        body = training("adagrad", names(then), pause=pause)
    else:
        body = training_freely("adagrad", strategy, names(then), pause=pause)
    job = Resized(body, first, then)
    threads = job.start()
    with closing(source_of(job)) as source:
        followed = Followed(source)
        followed.reach(1)
        begun.set()
        if move == "an outage":
            until(lambda: job.service("server2:1").job is not None)
        followed.to_the_end(lambda each: gone_over.set() if each.wholes > 1 else None)
    job.join(threads)
    assert job.errors == {}
    state = job.results[0] if strategy else job.results[0][1]
    for name in ("small.weight", "large.weight", "large.bias"):
        assert torch.equal(followed.dense[name], state[name]), name
    for id_, row in zip(state["table.ids"].tolist(), state["table.weight"], strict=True):
        assert torch.equal(followed.rows["table.weight"][id_], row)
    assert len(followed.rows["table.weight"]) == len(state["table.ids"])


# ---------------------------------------------------------------------------------------------- durable servers

#: What servers are asked for a move.
ASKED = ("where", "halt", "stage", "export", "fill", "switch")


class Struck:
    """Says to kill a server at so many-th message of a move that it gets."""

    def __init__(self, server: int, number: int, moment: str) -> None:
        self._server = server
        self._left = number
        self._moment = moment
        self.kind = ""

    def __call__(self, server: int, kind: str, number: int) -> str | None:
        if server != self._server or kind not in ASKED:
            return None
        self._left -= 1
        if self._left:
            return None
        self.kind = kind
        return self._moment


def moved_durably(
    folder: Path, plan: Any, mode: str | None = None, journal_bytes: int = 2000, hosts: list[Any] | None = None
) -> DyingJob:
    """Run a job whose servers keep what they have, and which moves from two of them to the second and another one."""
    if mode is None:
        body = training("adagrad", names([1, 2]))
    else:
        body = training_freely("adagrad", mode, names([1, 2]), STEPS, moved_after=MOVED_AFTER)
    job = DyingJob(body, folder, plan=plan, later=names([2]), journal_bytes=journal_bytes)
    job.counted |= {*ASKED}
    if hosts is not None:
        hosts += job.hosts
    job.run()
    assert not list(folder.iterdir()), "what a job kept is removed at its end"
    assert found_job(job.hosts[2].service).moves.servers == (*names([1, 2]),)
    results = [job.results[worker] for worker in range(2)]
    if mode is None:
        assert_same(results, undisturbed())
    else:
        assert_close(results, undisturbed_a_little(mode))
    return job


@pytest.mark.parametrize("mode", [None, *ALL_MODES])
@pytest.mark.parametrize("journal_bytes", [2000, 1 << 30], ids=["snapshots", "no snapshots"])
@pytest.mark.pairs(1)
def test_durable_servers_give_their_job_to_others(tmp_path: Path, mode: str | None, journal_bytes: int) -> None:
    moved_durably(tmp_path, lambda *_: None, mode, journal_bytes)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", KILLED)
@pytest.mark.parametrize("server", range(3), ids=["leaves", "stays", "comes"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_durable_servers_that_are_killed_at_any_message_of_a_move(
    tmp_path: Path, moment: str, server: int, mode: str | None
) -> None:
    """Where workers share no steps each message has one of the moments, and another one in the next mode: most of the
    code of these is the same."""
    begins = 1 + (server + KILLED.index(mode) + [*MOMENTS].index(moment)) % len(MOMENTS)
    for number in itertools.count(1) if mode is None else itertools.count(begins, len(MOMENTS)):
        struck = Struck(server, number, moment)
        moved_durably(tmp_path, struck, mode)
        if not struck.kind:
            break
    assert number > 4


@pytest.mark.parametrize(
    "mode", [None, "async", "gba", *(pytest.param(each, marks=pytest.mark.slow) for each in GIVEN)]
)
@pytest.mark.parametrize("journal_bytes", [1, 2000, 1 << 30])
@pytest.mark.pairs(1)
def test_servers_that_a_job_has_moved_to_keep_it(tmp_path: Path, journal_bytes: int, mode: str | None) -> None:
    """They are killed again and again, with their own list or that which the job had at first."""
    moments = itertools.cycle(MOMENTS)

    def plan(server: int, kind: str, number: int) -> str | None:
        is_one = server > 0 and number % 3 == 0 and hosts and found_job(hosts[0].service) is not None
        return next(moments) if is_one and found_job(hosts[0].service).moves.made else None

    hosts: list[Any] = []
    job = moved_durably(tmp_path, plan, mode, journal_bytes, hosts)
    assert sum(host.kills for host in job.hosts[1:]) > 4


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("lists", [[[0, 2], [0]], [[0], [0, 2]], [[0, 2], [0, 2, 3]]])
@pytest.mark.pairs(1)
def test_a_job_moves_again_and_again(lists: list[list[int]], is_durable: bool, tmp_path: Path) -> None:
    """Whichever worker is the one that moves it."""

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        losses = []
        for step in range(STEPS):
            if step - MOVED_AFTER in (0, 1) and worker == step % 2:
                fleet.resize_servers(names(lists[step - MOVED_AFTER]))
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        fleet.barrier_worker()
        if is_durable and worker == 0:
            assert not found_job(job.hosts[0].service).moves.is_noted, "snapshots are taken again"
        return losses, fleet.state_dict(model)

    every = sorted({number for servers in lists for number in servers})
    if is_durable:
        job: Any = DyingJob(body, tmp_path, later=names([number for number in every if number > 1]))
    else:
        job = Resized(body, [0, 1], every)
        job.lists = {name: names(next(each for each in lists if name in names(each))) for name in job.then}
    assert_same(job.run(), undisturbed())


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["export", "stage", "fill"])
@pytest.mark.pairs(1)
def test_a_durable_server_that_is_killed_beside_a_copy_holds_nothing_up(tmp_path: Path, kind: str, moment: str) -> None:
    """The job trains on meanwhile; the copy begins anew, and it moves."""

    def body(fleet: Fleet, worker: int) -> Any:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        for _ in itertools.count():
            optimizer.minimize(model())
            if fleet.all_reduce_worker(float(fleet.server_endpoints() == names([1, 2])), op="min"):
                break
        fleet.barrier_worker()

    plan = at(kind, moment, server=1)
    job = DyingJob(body, tmp_path, plan=plan, later=names([2]), environ={**ENVIRON, "FLEET_HEARTBEAT_S": "0.02"})
    job.counted |= {*ASKED}
    threads = job.start()
    until(lambda: found_job(job.hosts[0].service) is not None)
    with closing(job.network.connect(Endpoint.parse("server0:1"))) as channel:
        channel.start(Frame(pb.Request(rearrange=pb.Rearrange(endpoints=names([1, 2])))), 10.0).result()
    job.join(threads)
    assert job.errors == {}
    assert job.hosts[1].kills == 1


@pytest.mark.parametrize("then", [[0, 2], [2, 3]], ids=["the first stays", "all leave"])
@pytest.mark.pairs(1)
def test_a_durable_server_that_was_not_told_asks_the_others(tmp_path: Path, then: list[int]) -> None:
    """It is killed whenever somebody tells it that the job has moved."""
    job = DyingJob(
        training("adagrad", names(then)),
        tmp_path,
        plan=lambda server, kind, _: "before" if (server, kind) == (1, "switch") else None,
        later=names([each for each in then if each > 1]),
    )
    job.counted |= {*ASKED}
    assert_same(job.run(), undisturbed())
    assert job.hosts[1].kills >= 2  # a word that is not answered is sent again
    assert not list(tmp_path.iterdir())


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("action", "then"), [("add", [0, 1, 2]), ("remove", [0])])
def test_servers_that_were_told_no_list(tmp_path: Path, action: str, then: list[int]) -> None:
    """As ``fleet server`` is not: they know the others from the workers, also when they have been killed."""
    body, goes_on = asked_meanwhile("adagrad")
    killed = at("hello", ANSWERED, server=0, times=2)
    job = DyingJob(body, tmp_path, plan=killed, later=names([2]), environ={**ENVIRON, **BEATING})
    threads = job.start()
    try:
        assert changed(job, action, *({0, 1, 2} & {*then} ^ {0, 1}), at="server1:1") == tuple(names(then))
    finally:
        goes_on.set()
        job.join(threads[2:4])
    if action == "remove":
        job.hosts[2].disturb(lambda service: service.end.end())
    job.join(threads)
    assert job.hosts[0].kills == 2
    assert_same([job.results[worker] for worker in range(2)], undisturbed())


def test_what_a_worker_tells_of_the_servers() -> None:
    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        optimizer.minimize(model(ids_of(worker, 0)))
        fleet.resize_servers(names([1, 2, 3]))
        assert (fleet.server_num(), fleet.server_endpoints()) == (3, names([1, 2, 3]))
        optimizer.minimize(model(ids_of(worker, 1)))

    Resized(body, [0, 1], [1, 2, 3]).run()


def test_a_durable_server_that_was_not_told_of_two_moves_asks_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there again after the second one only."""
    over = threading.Event()

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        losses = []
        for step in range(STEPS):
            if step in (MOVED_AFTER, MOVED_AFTER + 1):
                fleet.resize_servers(names([0, 2] if step == MOVED_AFTER else [0]))
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        over.set()
        fleet.barrier_worker()
        return losses, fleet.state_dict(model)

    asks = dying.ask_where_the_job_is
    monkeypatch.setattr(dying, "ask_where_the_job_is", lambda *given: asks(*given) if over.is_set() else None)
    plan = lambda server, kind, _: "before" if (server, kind) == (1, "switch") else None  # noqa: E731
    job = DyingJob(body, tmp_path, plan=plan, later=names([2]))
    job.counted |= {*ASKED}
    assert_same(job.run(), undisturbed())
    assert not list(tmp_path.iterdir())


def test_a_piece_that_a_new_server_does_not_have_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose machine has stopped may have lost it. All is copied once more."""
    lost, fill = threading.Event(), resizing.Copy._fill

    def losing(copy: Any, about: dict[str, Any], tensors: Any) -> None:
        if lost.is_set() or "dense" in about:
            fill(copy, about, tensors)
        else:
            lost.set()
            copy._number += 1

    monkeypatch.setattr(resizing.Copy, "_fill", losing)
    assert_same(Resized(training("adagrad", names([1, 2])), [0, 1], [1, 2]).run(), undisturbed())
    assert lost.is_set()


@pytest.mark.parametrize("is_durable", [True, False])
def test_all_servers_keep_their_state_or_none(tmp_path: Path, is_durable: bool) -> None:
    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        optimizer.minimize(model(ids_of(worker, 0)))
        expected, got = ("a", "no") if is_durable else ("no", "a")
        told = f"all keep.*at server1:1; expected {expected} FLEET_DURABLE_DIR.*got {got} FLEET_DURABLE_DIR"
        with pytest.raises(UnsupportedError, match=told):
            fleet.resize_servers(names([0, 1]))
        optimizer.minimize(model(ids_of(worker, 1)))

    job = Resized(body, [0], [0, 1], workers=1)
    job.environs["server0:1" if is_durable else "server1:1"] = {**job.environ, "FLEET_DURABLE_DIR": str(tmp_path)}
    job.end(job.start())
    assert {name for name in job.errors if name.startswith("worker")} == set(), job.errors


# ---------------------------------------------------------------------------------------------- asked from outside


def asked_meanwhile(optimizers: str) -> tuple[Callable[[Fleet, int], Any], threading.Event]:
    """What trains, and stops after some steps until its first worker hears of other servers, takes a step, stops until
    it has copied what there is, takes a step, and stops until it is told to go on."""
    goes_on = threading.Event()

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS[optimizers](model), model=model)
        fleet.init_worker()
        losses = []
        for step in range(STEPS):
            if step == MOVED_AFTER and worker == 0:
                until(lambda: wanted_servers(fleet) or goes_on.is_set())
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == MOVED_AFTER and worker == 0:
                until(lambda: not is_copying(fleet))
            if step == MOVED_AFTER + 1 and worker == 0 and not goes_on.is_set():
                assert goes_on.wait(30)
        fleet.barrier_worker()
        return losses, fleet.state_dict(model)

    return body, goes_on


def changed(job: Job, action: str, *numbers: int, at: str = "") -> tuple[str, ...]:
    endpoints = [Endpoint.parse(name) for name in names(numbers)]
    asked = [Endpoint.parse(at or job.endpoints[0])]
    for _ in range(1000):
        try:
            return change_servers(asked, action, endpoints, 30.0, job.network)
        except ServerLostError as error:
            if "no server of the job answers" not in str(error):
                raise
            time.sleep(0.01)  # it has no job yet
    raise AssertionError("the job does not begin")


@pytest.mark.pairs(1)
@pytest.mark.parametrize(
    ("first", "action", "numbers", "then"),
    [([0, 1], "add", [2, 3], [0, 1, 2, 3]), ([0, 1, 2], "remove", [0, 2], [1])],
    ids=["add two", "remove two"],
)
def test_servers_that_somebody_outside_wants(
    first: list[int], action: str, numbers: list[int], then: list[int]
) -> None:
    body, goes_on = asked_meanwhile("adam")
    job = Resized(body, first, then, environ=BEATING)
    threads = job.start()
    try:
        assert changed(job, action, *numbers, at="server1:1") == tuple(names(then))
    finally:
        goes_on.set()
        job.join(threads)
    assert job.errors == {}
    assert sorted(job.served) == sorted({*names(first), *names(then)})
    expected = Job(training("adam", None), 2, len(first)).run()
    assert_same([job.results[worker] for worker in range(2)], expected)


@pytest.mark.parametrize("meanwhile", ["nothing", "values are loaded", "another move", "the job ends"])
@pytest.mark.pairs(1)
def test_rows_are_copied_while_they_change(meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step follows each piece that is copied, of few rows each: of all, then of those that have changed."""
    monkeypatch.setattr("fleet.ps.table.shard.PIECE_BYTES", 400)
    monkeypatch.setattr(resizing, "_FEW", 0)
    monkeypatch.setattr(resizing, "_REST", 0.0)
    pieces, copied, fill = threading.Semaphore(0), list[tuple[int, int]](), resizing.Copy._fill
    steps, taken, is_there, errands = 40, [0], threading.Event(), set[str]()

    def counted(copy: Any, about: dict[str, Any], tensors: Any) -> None:
        if copy.is_under_way:
            copied.append((taken[0], about["rows"]))
            errands.update(job.service(each).status()["errand"] for each in names([0, 3]))
            assert pieces.acquire(timeout=30)
        fill(copy, about, tensors)

    monkeypatch.setattr(resizing.Copy, "_fill", counted)

    def body(fleet: Fleet, worker: int) -> Any:
        model = model_of_all(large=5)  # so few bytes are a piece
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        losses = []
        for step in range(steps):
            if moves and worker == 0 and step == 10:
                is_there.set()
                until(lambda: wanted_servers(fleet))
            if step == 16 and meanwhile == "values are loaded":
                fleet.save_persistables(tmp_path / str(moves))
                fleet.load_persistables(tmp_path / str(moves))
            if moves and step == 16 and meanwhile == "another move":
                fleet.resize_servers(names([1]))
            optimizer.zero_grad()
            loss = model(ids_of(worker, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if worker == 0:
                taken[0] += 1
                if moves and step >= 10 and not ends:
                    pieces.release(1 if step < 20 else 1000)
            if step > 30 and worker == 0 and not ends:
                until(lambda: not is_copying(fleet))
        fleet.barrier_worker()
        return losses, fleet.state_dict(model)

    moves, ends = False, meanwhile == "the job ends"
    expected = Job(body, 2, 2).run()
    moves, taken[0] = True, 0
    job = Resized(body, [0, 1], [1, 2, 3], environ=BEATING)
    threads = job.start()
    asked = Endpoint.parse(job.endpoints[0])
    with closing(job.network.connect(asked)) as channel:

        def told(message: Any) -> Any:
            return channel.start(Frame(pb.Request(rearrange=message)), 10.0).result().message

        assert is_there.wait(30)
        told(pb.Rearrange(endpoints=names([1, 2, 3])))
        job.join(threads[2:4])
        pieces.release(1000)
        job.end(threads)
    assert {name for name in job.errors if name.startswith("worker")} == set(), job.errors
    assert_same([job.results[worker] for worker in range(2)], expected)
    assert len({step for step, _ in copied}) > (0 if ends else 2), "the training went on"
    if meanwhile == "nothing":
        assert job.errors == {}
        assert sum(rows for _, rows in copied) > 60, "some rows were copied more than once"
        assert {"copied to other servers, round 2", "taking over rows, 0 so far"} <= errands


def test_what_keeps_a_job_from_moving_is_told_outside_and_the_training_goes_on() -> None:
    body, goes_on = asked_meanwhile("adagrad")
    job = Resized(body, [0, 1], [0, 1, 2, 3], environ=BEATING)
    threads = job.start()
    try:
        with pytest.raises(StateError, match=r"the job stays with its servers.*another list of servers"):
            changed(job, "add", 2)  # which was told of four
        for action, numbers, error, told in [
            ("add", [1], ConfigurationError, "servers that the job has, .*; expected others than server0:1"),
            ("add", [7, 7], ConfigurationError, "one of them twice"),
            ("remove", [5], ConfigurationError, "servers that the job does not have, .*; expected some of server0:1"),
            ("remove", [0, 1], ConfigurationError, "a job needs a server"),
            ("add", [7], ServerLostError, "a server that is to be added does not answer; at server7:1"),
        ]:
            with pytest.raises(error, match=told):
                changed(job, action, *numbers)
    finally:
        goes_on.set()
        job.end(threads)
    assert set(job.errors) == {"server2:1", "server3:1"}, "they have waited for a job"
    assert_same([job.results[worker] for worker in range(2)], undisturbed())


def test_who_looks_at_a_job_goes_along() -> None:
    """As ``fleet top`` does, which was told of the servers that there were."""
    body, goes_on = asked_meanwhile("adagrad")
    job = Resized(body, [0, 1], [1, 2, 3], environ=BEATING)
    threads = job.start()
    try:
        until(lambda: job.service("server0:1") is not None and job.service("server1:1") is not None)
        with closing(Running([Endpoint.parse(each) for each in job.endpoints], job.network)) as source:
            until(lambda: {*source.look().servers} == {"server 0", "server 1"})  # they know which they are
            move_from_outside(job)
            assert "server server2:1" in source.look().servers, "which is to take over a part"
            until(lambda: {*source.look().servers} == {"server 0", "server 1", "server 2"})
    finally:
        goes_on.set()
        job.join(threads)
    assert job.errors == {}


def move_from_outside(job: Resized) -> None:
    """Ask the first server to have the job moved, and do not wait for it."""
    with closing(job.network.connect(Endpoint.parse(job.endpoints[0]))) as channel:
        until(lambda: (service := job.service(job.endpoints[0])) is not None and service.job is not None)
        channel.start(Frame(pb.Request(rearrange=pb.Rearrange(endpoints=job.then))), 10.0).result()


# ---------------------------------------------------------------------------------------------- drained


def steps_until(ends: threading.Event) -> Callable[[Fleet, int], dict[str, torch.Tensor]]:
    """What trains until an event is set, and as many steps after it as a move may need."""

    def body(fleet: Fleet, worker: int) -> dict[str, torch.Tensor]:
        model = constant()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adagrad"](model), model=model)
        fleet.init_worker()
        while True:
            optimizer.minimize(model())
            done = fleet.all_reduce_worker(float(ends.is_set()), op="min")
            taken.setdefault(worker, []).append(1)
            if done:
                break
        fleet.barrier_worker()
        return fleet.state_dict(model)

    taken: dict[int, list[int]] = {}
    return body


@pytest.mark.parametrize("numbers", [[0], [1], [0, 2], [1, 2]], ids=str)
@pytest.mark.pairs(1)
def test_a_server_that_is_drained_ends_and_the_job_goes_on(numbers: list[int]) -> None:
    ends = threading.Event()
    job = Resized(steps_until(ends), [0, 1, 2], [0, 1, 2], environ=BEATING)
    threads = job.start()
    try:
        until(lambda: all(job.service(each) is not None for each in names([0, 1, 2])))
        services = {number: job.service(names([number])[0]) for number in numbers}
        until(lambda: all(service.job is not None and service.job.is_whole for service in services.values()))
        for service in services.values():
            service.drain("signal SIGTERM")
        until(lambda: sorted(job.served) == names(numbers))
    finally:
        ends.set()
        job.join(threads)
    assert job.errors == {}
    assert job.results[0].keys() == job.results[1].keys()


class Joiner:
    """Is a server with no list but that of those whose job it joins, on a thread."""

    failure: FleetError | None = None

    def __init__(self, job: Resized, name: str, joins: Sequence[str], clock: Clock | None = None) -> None:
        self.is_ready = threading.Event()
        settings, clock = ProcessSettings.read({**BEATING, "FLEET_DRAIN": "1"}), clock or SystemClock()
        endpoint, others = Endpoint.parse(name), [Endpoint.parse(each) for each in joins]
        self.runtime = ServerRuntime(endpoint, job.network, settings, clock, joins=others, report=self.report)
        self.thread = threading.Thread(target=self.serve, name=f"job-join-{name}", daemon=True)
        self.thread.start()

    def report(self, is_ready: bool) -> None:
        self.is_ready.set() if is_ready else self.is_ready.clear()

    def serve(self) -> None:
        try:
            self.runtime.run()
        except (JobAbortedError, DeadlineError) as error:  # the tests look at the workers
            self.failure = error


@pytest.mark.slow
def test_servers_are_replaced_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is drained, and comes back; it is not ready before the job is there again."""
    monkeypatch.setattr(runtime, "ASKS_S", 0.3)
    ends = threading.Event()
    job = Resized(steps_until(ends), [0, 1], [0, 1], environ=BEATING)
    threads = job.start()
    joiners = []
    try:
        for name in [*names([0, 1]), *names([0])]:
            until(lambda name=name: job.service(name) is not None)
            service = job.service(name)
            until(lambda service=service: service.job is not None and service.job.is_whole)
            service.drain("signal SIGTERM")
            until(lambda name=name, service=service: job.service(name) is not service)
            joiner = Joiner(job, name, names([0, 1]))
            joiners.append(joiner)
            until(joiner.is_ready.is_set)
            assert job.service(name).job.moves.servers.count(name) == 1
            assert len(job.service(name).job.moves.servers) == 2
    finally:
        ends.set()
        job.join([*threads, *(joiner.thread for joiner in joiners)])
    assert job.errors == {}
    assert job.results[0].keys() == job.results[1].keys()


def test_a_server_that_joins_is_ready_where_a_job_is_yet_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ASKS_S", 0.3)
    ends = threading.Event()
    ends.set()
    job = Resized(steps_until(ends), [0, 1], [0, 1], environ=BEATING)
    joiners = [Joiner(job, name, names([0, 1])) for name in names([0, 1])]
    for joiner in joiners:
        until(joiner.is_ready.is_set)
    workers = [threading.Thread(target=job.work, args=(index,), daemon=True) for index in range(2)]
    for worker in workers:
        worker.start()
    job.join([*workers, *(joiner.thread for joiner in joiners)])
    assert job.errors == {}


class Silent:
    """Is a network at which somebody says nothing, for as long as that is wanted."""

    def __init__(self) -> None:
        self.is_silent = True

    def connect(self, _endpoint: Endpoint) -> Any:
        return self

    def start(self, _frame: Frame, timeout_s: float) -> Any:
        self._timeout_s = timeout_s
        return self

    def result(self) -> Frame:
        if self.is_silent:
            time.sleep(self._timeout_s)
        raise TransportError("nobody is there")

    def close(self) -> None:
        pass


def test_a_server_that_joins_is_not_ready_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a job. Those that are not there say so at once."""
    monkeypatch.setattr(runtime, "ASKS_S", 0.01)
    monkeypatch.setattr(runtime, "_MOST_SILENCES", 3)
    told: list[bool] = []
    endpoint, network = Endpoint.parse("server1:1"), Silent()
    service = Service(endpoint, ProcessSettings.read({}), SystemClock())
    joining = runtime.Joining(endpoint, [Endpoint.parse("server0:1")], told.append)
    network.is_silent = False
    joining.go_on(service, SystemClock(), network)
    network.is_silent = True
    for _ in range(4):
        joining.go_on(service, SystemClock(), network)
    assert told == [True, False, False, False, True], "and not for ever"


def test_a_job_that_does_not_take_a_server_in_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise StateError("it is to fail")

    monkeypatch.setattr(runtime, "ASKS_S", 0.3)
    monkeypatch.setattr(resizing.Copy, "move", refused)
    ends = threading.Event()
    job = Resized(steps_until(ends), [0], [0], environ=BEATING)
    threads = job.start()
    until(lambda: job.service("server0:1") is not None)
    until(lambda: job.service("server0:1").job is not None)
    joiner = Joiner(job, "server1:1", ["server0:1"])
    try:
        until(lambda: "goes on without this server" in caplog.text)
        assert "it is to fail" in caplog.text
        assert not joiner.is_ready.is_set()
    finally:
        ends.set()
        job.join(threads)
        job.service("server1:1").stop("nobody has moved here")
        joiner.thread.join(PATIENCE_S)


class Hurrying(SystemClock):
    """A clock that somebody puts forward."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def test_a_server_that_a_job_never_takes_in_ends_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another release, which is refused as soon as it is to get ready."""

    def refused(*_: object) -> None:
        raise PlanMismatchError("worker and server plan differently", todo="Install one version.")

    monkeypatch.setattr(runtime, "ASKS_S", 0.3)
    monkeypatch.setattr("fleet.ps.server.staging.check_fingerprint", refused)
    ends = threading.Event()
    job = Resized(steps_until(ends), [0], [0], environ=BEATING)
    threads = job.start()
    until(lambda: job.service("server0:1") is not None)
    until(lambda: job.service("server0:1").job is not None)
    clock = Hurrying()
    joiner = Joiner(job, "server1:1", ["server0:1"], clock)
    try:
        until(lambda: "goes on without this server" in caplog.text)
        clock.ahead_s = 1e4
        joiner.thread.join(PATIENCE_S)
        told = r"the job has not taken this server in; .* within .* s .*plan differently.* one version\. Mend that"
        assert re.search(told, str(joiner.failure))
    finally:
        ends.set()
        job.join(threads)
    assert "worker 0" not in job.errors


class Answering(Silent):
    """Is a network at which somebody answers a joining server."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = iter(answers)

    def result(self) -> Frame:
        return Frame(pb.Reply(about=json.dumps(next(self._answers))))


def test_what_a_job_refused_is_not_what_a_later_one_that_never_begins_is_told_of() -> None:
    """It has this server in its list, and no worker that comes."""
    refuses = {"servers": ["server0:1"], "wanted": [], "refusal": "it is to fail"}
    begins = {"servers": ["server0:1", "server1:1"], "wanted": [], "refusal": ""}
    clock, endpoint = Hurrying(), Endpoint.parse("server1:1")
    service = Service(endpoint, ProcessSettings.read({}), clock)
    joining = runtime.Joining(endpoint, [Endpoint.parse("server0:1")], lambda _: None)
    network: Any = Answering(refuses, refuses, begins)
    for _ in range(2):
        joining.go_on(service, clock, network)
    clock.ahead_s = 1e4
    service.tick()
    assert "no worker said hello" in str(service.failure)


@pytest.mark.parametrize("why", ["it is the only one", "the move is refused"])
def test_a_server_that_cannot_be_drained_ends_the_job(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise StateError("it is to fail")

    if why == "the move is refused":
        monkeypatch.setattr(resizing.Copy, "move", refused)
    ends, servers = threading.Event(), [0] if why == "it is the only one" else [0, 1]
    job = Resized(steps_until(ends), servers, servers, environ=BEATING)
    threads = job.start()
    until(lambda: job.service("server0:1") is not None)
    service = job.service("server0:1")
    until(lambda: service.job is not None and service.job.is_whole)
    service.drain("signal SIGTERM")
    job.join(threads)
    told = "it is to fail" if why == "the move is refused" else "signal SIGTERM"
    assert told in str(job.errors["worker 0"])
    assert told in str(job.errors["server0:1"])


@pytest.mark.parametrize("endpoints", [["nonsense"], ["a:1"] * 5000], ids=["no endpoint", "too many"])
def test_what_is_asked_from_outside_is_checked(endpoints: list[str]) -> None:
    body, goes_on = asked_meanwhile("adagrad")
    job = Resized(body, [0, 1], [0, 1], environ=BEATING)
    threads = job.start()
    with closing(job.network.connect(Endpoint.parse(job.endpoints[0]))) as channel:

        def told(message: Any) -> Any:
            return channel.start(Frame(pb.Request(rearrange=message)), 10.0).result().message

        until(lambda: job.network.listener(Endpoint.parse(job.endpoints[0])) is not None)
        until(lambda: not told(pb.Rearrange()).HasField("error"))
        assert told(pb.Rearrange(endpoints=endpoints)).error.kind in ("ConfigurationError", "ProtocolError")
        assert '"wanted": []' in told(pb.Rearrange()).about
        assert told(pb.Rearrange(failure="a stranger says so")).error.kind
    goes_on.set()
    job.join(threads)
    assert job.errors == {}


@pytest.mark.parametrize(
    ("clocks", "renewed", "expected"),
    [
        ([4, 4], [{}, {}], False),
        ([3, 4], [{}, {}], False),  # on its way
        ([3, 4], [{"1": 3}, {"1": 4}], True),  # of a process that was killed
        ([3, 4], [{"1": 3}, {"1": 3}], False),  # of the next process, on its way
        ([3, 4], [{"1": 3}, {}], False),  # the next process has not said hello there
        ([3, 4, 4], [{"1": 3}, {"1": 4}, {"1": 4}], True),
    ],
)
def test_whose_push_a_move_waits_for(clocks: list[int], renewed: list[dict[str, int]], expected: bool) -> None:
    assert resizing._is_taken_again("1", 4, [{"1": clock} for clock in clocks], renewed) is expected


class Count:
    """Is an object of a worker's own."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.pairs(2)
def test_a_state_that_is_given_to_servers_that_the_job_has_left_comes_to_the_others(
    mode: str, given: int, tmp_path: Path
) -> None:
    """Where workers share no steps they give theirs after every step, and nobody waits for the answer."""
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    strategy = {"async": StrategyFactory.create_async_strategy, "sync": StrategyFactory.create_sync_strategy}[mode]

    def body(fleet: Fleet, worker: int) -> None:
        model, count = constant(), Count()
        optimizer = fleet.distributed_optimizer(OPTIMIZERS["adam"](model), strategy(), model=model)
        fleet.init_worker()
        checkpoints = Checkpoints(tmp_path, every_steps=1000, state={"count": count}, background=False, fleet=fleet)
        for _ in range(3):
            optimizer.minimize(model())
            count.number += 1
            checkpoints.after_step()
        meeting.wait()
        if worker == 0:
            fleet.resize_servers(names([2]))
        meeting.wait()
        for _ in range(given):
            count.number += 10 + worker
            checkpoints.after_step()
        if mode == "async":
            fleet.barrier_worker()
        checkpoints.save()
        fleet.barrier_worker()

    job = Resized(body, [0], [2])
    job.join(job.start())
    assert job.errors == {}
    states = states_in(Checkpoint.open(Checkpoints.latest(tmp_path)))
    found = {of: values(state, "")["count.number"] for of, _, state in states}
    assert found == {worker: 3 + given * (10 + worker) for worker in range(2)}
