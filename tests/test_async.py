"""The asynchronous mode: what is sent when, in which pieces, and what the user's thread notices of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, Job, run_job
from inside import flush, take_fresh, worker_of
from patience import PATIENCE_S

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.base.settings import CommunicatorSettings
from fleet.errors import FleetError, ProtocolError
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Channel, Handler, Listener, Respond
from fleet.ps.worker import communicator
from fleet.ps.worker import step as taking_steps
from fleet.ps.worker.communicator import Communicator
from fleet.ps.worker.gradient_merge import GradientMerge
from fleet.ps.worker.push import Clocks, Gradients, MadePush
from fleet.strategy.parameter_server import Strategy


class Held:
    """A loopback network whose servers take no push before ``release``, and remember what they were sent."""

    def __init__(self, *, held: bool = True) -> None:
        self._network = LoopbackNetwork()
        self._released = threading.Event()
        self.pushes: list[Any] = []
        self.pulls = 0
        self.fail = False
        if not held:
            self.release()

    def release(self) -> None:
        self._released.set()

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        def watched(frame: Frame, respond: Respond) -> None:
            kind = frame.message.WhichOneof("kind")
            if kind == "push":
                self.pushes.append(frame.message.push)
                assert self._released.wait(30)
                if self.fail:
                    raise ProtocolError("made to fail")
            self.pulls += kind == "pull" and frame.message.pull.dense
            handler(frame, respond)

        return self._network.listen(endpoint, watched)

    def connect(self, endpoint: Endpoint) -> Channel:
        return self._network.connect(endpoint)


def eventually(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.002)


def scalar_job(strategy: Strategy, lr: float = 1.0) -> Callable[[Fleet], tuple[torch.nn.Parameter, Any]]:
    def make(fleet_: Fleet) -> tuple[torch.nn.Parameter, Any]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=lr), strategy)
        fleet_.init_worker()
        return weight, optimizer

    return make


def settles_at(weight: torch.nn.Parameter, optimizer: Any, expected: float) -> None:
    """Steps that change nothing, until what is fetched behind them is what everybody's gradients come to."""

    def arrived() -> bool:
        optimizer.minimize(weight.sum() * 0)
        return weight[0].item() == expected

    eventually(arrived, f"{expected}, but {weight[0].item()}")


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.pairs(4)
def test_every_gradient_is_applied_once_and_undivided(
    workers: int, servers: int, independent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "WORTH_BYTES", 0)
    strategy = StrategyFactory.create_async_strategy(independent_recv_thread=independent)
    done = threading.Barrier(workers)

    def body(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(30))
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0), strategy)
        fleet_.init_worker()
        for _ in range(20):
            optimizer.minimize(weight.sum() + table(torch.tensor([7, 7, worker])).sum())
        done.wait(20)
        settles_at(weight, optimizer, -20.0 * workers)
        assert torch.equal(weight, torch.full((30,), -20.0 * workers))
        fleet_.barrier_worker()  # the rows are on other servers, which somebody's last push may reach later
        return table(torch.tensor([7, worker])).detach()

    for rows in run_job(body, workers, servers):
        assert torch.equal(rows, torch.tensor([[-40.0, -40], [-20, -20]]) * torch.tensor([[workers], [1]]))


def test_what_is_unsent_leaves_before_the_goodbye() -> None:
    make = scalar_job(StrategyFactory.create_async_strategy(send_queue_size=50))
    stopped = threading.Event()

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        if worker == 0:
            for _ in range(40):
                optimizer.minimize(weight.sum())
            fleet_.stop_worker()
            stopped.set()
            return
        assert stopped.wait(20)
        settles_at(weight, optimizer, -40.0)

    run_job(body, 2, 2)


@pytest.mark.parametrize(
    "strategy",
    [
        StrategyFactory.create_async_strategy(send_queue_size=20),
        StrategyFactory.create_half_async_strategy(max_merge_var_num=7),
    ],
    ids=lambda strategy: strategy.mode,
)
def test_what_was_computed_before_a_barrier_is_applied_after_it(strategy: Strategy) -> None:
    def body(fleet_: Fleet, worker: int) -> float:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        for _ in range(10):
            optimizer.minimize(table(torch.tensor([4])).sum())
        fleet_.barrier_worker()
        return table(torch.tensor([4])).item()

    assert run_job(body, 3, 2) == [-30.0] * 3


@pytest.mark.parametrize(
    ("strategy", "environ", "queue"),
    [
        (StrategyFactory.create_async_strategy(), {}, 2),
        (StrategyFactory.create_async_strategy(send_queue_size=5), {}, 5),
        (StrategyFactory.create_async_strategy(), {"FLAGS_communicator_send_queue_size": "3"}, 3),
        (StrategyFactory.create_async_strategy(send_queue_size=1), {"FLAGS_communicator_send_queue_size": "3"}, 1),
    ],
)
def test_a_full_queue_holds_the_user_up_and_drops_nothing(
    strategy: Strategy, environ: dict[str, str], queue: int
) -> None:
    network, make, taken = Held(), scalar_job(strategy), []

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for step in range(10):
            optimizer.minimize(weight.sum())
            taken.append(step)
        settles_at(weight, optimizer, -10.0)

    job = Job(body, 1, 1, network=network, environ={**PATIENT, **environ})
    threads = job.start()
    eventually(lambda: len(taken) == 1 + queue, "one under way and a full queue")
    time.sleep(0.05)
    assert len(taken) == 1 + queue
    network.release()
    job.join(threads)
    assert job.errors == {}


def test_a_step_that_is_interrupted_where_it_waits_for_room_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not counted, and what goes with it, such as the state of the worker's own objects, goes with the next."""

    def interrupted(self: Communicator) -> None:
        raise KeyboardInterrupt

    def body(fleet_: Fleet, worker: int) -> None:
        table = torch.nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), StrategyFactory.create_async_strategy(), model=table
        )
        fleet_.init_worker()
        optimizer.minimize(table(torch.arange(3)).sum())
        worker_of(fleet_).own_states.send_with_step(np.array([7], np.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(Communicator, "_await_room", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.minimize(table(torch.arange(3)).sum())
        assert worker_of(fleet_).progress.taken == 1
        assert worker_of(fleet_).own_states.take() == 7
        optimizer.step()
        assert worker_of(fleet_).progress.taken == 2
        flush(fleet_)
        assert table(torch.arange(3)).tolist() == [[-2.0]] * 3

    run_job(body)


class Sent:
    """A communicator and what it has sent."""

    def __init__(self, *, gives_way: bool = True, prepares_ahead: bool = False, fetched_after: int = 1) -> None:
        self.steps: list[int] = []
        #: steps of which a push was made, how many pushes ahead, and whether its answer brings values
        self.prepared: list[tuple[int, int, bool]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.communicator = Communicator(
            CommunicatorSettings(send_wait_times=0, min_send_grad_num_before_recv=fetched_after),
            GradientMerge(None, True),  # type: ignore[arg-type]  # never merges here
            self.prepare,
            self.send,
            list,
            "test",
            values_bytes=0,
            gives_way=gives_way,
            prepares_ahead=prepares_ahead,
        )

    def prepare(self, gradients: Gradients, brings: bool, ahead: int) -> MadePush:
        self.prepared.append((gradients.steps, ahead, brings))
        return MadePush(gradients, brings, None, [], list)  # type: ignore[arg-type]

    def send(self, push: MadePush, *, meanwhile: Callable[[], object]) -> list[Frame]:
        self.steps.append(push.gradients.steps)
        assert self.goes_on.wait(PATIENCE_S)
        meanwhile()
        return []

    def put(self, number: int) -> None:
        self.communicator.put(lambda: Gradients((), {}, Clocks(), (), number))

    def close(self) -> None:
        self.communicator.end()
        self.communicator.join()


@pytest.mark.parametrize("fetched_after", [1, 2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_a_push_is_made_while_the_one_before_is_under_way(waits: bool, fetched_after: int) -> None:
    """If its step waits by then; each is made once, and brings values when it is time for them."""
    with closing(Sent(gives_way=False, prepares_ahead=True, fetched_after=fetched_after)) as sent:
        for number in range(1, 7, 2):
            sent.goes_on.clear()
            sent.put(number)
            eventually(lambda number=number: sent.steps[-1:] == [number], "the push is under way")
            if waits:
                sent.put(number + 1)
            sent.goes_on.set()
            sent.communicator.flush()
            if not waits:
                sent.put(number + 1)
                sent.communicator.flush()
    assert sent.steps == [1, 2, 3, 4, 5, 6]
    brings = [number % fetched_after == 0 for number in sent.steps]
    ahead = [int(waits and number % 2 == 0) for number in sent.steps]
    assert sent.prepared == list(zip(sent.steps, ahead, brings, strict=True))


@pytest.fixture
def courteous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "COURTESY_S", 600.0)  # longer than any test waits


@pytest.mark.usefixtures("courteous")
@pytest.mark.parametrize("end", ["look-up", "flush", "full queue", "end"])
def test_gradients_let_the_next_look_up_go_first(end: str) -> None:
    with closing(Sent()) as sent:
        sent.put(1)
        time.sleep(0.05)
        assert sent.steps == []
        if end == "look-up":
            sent.communicator.looked_up()
        elif end == "flush":
            sent.communicator.flush()
            assert sent.steps == [1], "all that had been put"
        elif end == "full queue":
            sent.put(2)
            sent.put(3)
        else:
            sent.communicator.end()
            eventually(lambda: not any(thread.is_alive() for thread in sent.communicator._threads), "its threads end")
            return
        eventually(lambda: sent.steps[:1] == [1], "the first step is sent")


@pytest.mark.usefixtures("courteous")
def test_gradients_wait_for_no_look_up_where_none_will_come() -> None:
    with closing(Sent(gives_way=False)) as sent:
        sent.put(1)
        eventually(lambda: sent.steps == [1], "the step is sent")


@pytest.mark.usefixtures("courteous")
@pytest.mark.parametrize("dc_asgd_lambda", [0.0, 1.0])
def test_compensated_gradients_go_before_the_next_look_up(dc_asgd_lambda: float) -> None:
    """What they are compensated from is what the rows were when they were read last."""
    network = Held(held=False)
    strategy = StrategyFactory.create_async_strategy(dc_asgd_lambda=dc_asgd_lambda)

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(10, 1, initializer="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = fleet_.distributed_optimizer(optimizer, strategy, model=table)
        fleet_.init_worker()
        optimizer.minimize(table(torch.tensor([3])).sum())
        if dc_asgd_lambda:
            eventually(lambda: len(network.pushes) == 1, "the push")
        else:
            time.sleep(0.05)
            assert network.pushes == []

    run_job(body, 1, 1, network=network)
    assert len(network.pushes) == 1


def test_gradients_wait_for_a_look_up_no_longer_than_is_polite() -> None:
    with closing(Sent()) as sent:
        sent.put(1)
        eventually(lambda: sent.steps == [1], "the step is sent")


@pytest.mark.usefixtures("courteous")
@pytest.mark.parametrize("ahead", [False, True])
def test_each_look_up_lets_the_step_before_go(ahead: bool) -> None:
    network = Held(held=False)

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(10, 1, initializer="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = fleet_.distributed_optimizer(optimizer, StrategyFactory.create_async_strategy(), model=table)
        fleet_.init_worker()
        batches = [torch.tensor([number]) for number in range(5)]
        for ids in fleet_.prefetch(batches, lambda ids: {table: ids}) if ahead else batches:
            optimizer.minimize(table(ids).sum())

    run_job(body, 1, 1, network=network)
    assert len(network.pushes) == 5


@pytest.mark.parametrize(("momentum", "summed"), [(0.0, True), (0.9, False)])
def test_what_has_gathered_is_merged_into_one_push(momentum: float, summed: bool) -> None:
    """The first push is held up; the four gradients behind it become one, summed for plain SGD, averaged otherwise."""
    network = Held()
    strategy = StrategyFactory.create_async_strategy(max_merge_var_num=4, send_queue_size=4, send_wait_times=0)

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0, momentum=momentum), strategy)
        fleet_.init_worker()
        for step in range(5):
            optimizer.minimize(weight.sum() * (step + 1))
            if step == 0:
                eventually(lambda: len(network.pushes) == 1, "the first push is under way")
        network.release()
        eventually(lambda: len(network.pushes) == 2, "the second push")
        merged = 2 + 3 + 4 + 5 if summed else (2 + 3 + 4 + 5) / 4
        expected = -1 - merged if not momentum else -1 - (momentum * 1 + merged)
        eventually(lambda: arrived(weight, optimizer, expected), f"{expected}")

    def arrived(weight: torch.nn.Parameter, optimizer: Any, expected: float) -> bool:
        take_fresh(optimizer)
        return abs(weight[0].item() - expected) < 1e-5

    run_job(body, 1, 1, network=network)
    assert len(network.pushes) == 2


def test_the_sender_waits_a_little_for_more_to_merge() -> None:
    network = Held(held=False)
    make = scalar_job(StrategyFactory.create_async_strategy(max_merge_var_num=3, send_wait_times=2000))

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for _ in range(6):
            optimizer.minimize(weight.sum())
            time.sleep(0.01)

    run_job(body, 1, 1, network=network)
    assert len(network.pushes) == 2


@pytest.mark.parametrize("independent", [True, False])
def test_parameters_come_with_the_push_when_no_thread_fetches_them(
    independent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "WORTH_BYTES", 5 if independent else 0)
    network = Held(held=False)
    strategy = StrategyFactory.create_async_strategy(
        independent_recv_thread=independent, min_send_grad_num_before_recv=3
    )
    make = scalar_job(strategy)

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for _ in range(9):
            optimizer.minimize(weight.sum())

    run_job(body, 1, 1, network=network)
    assert [push.quiet for push in network.pushes] == [True, True, False] * 3
    assert network.pulls == 1, "the initial parameters"


def test_a_thread_fetches_parameters_after_so_many_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "WORTH_BYTES", 4)
    network = Held(held=False)
    make = scalar_job(StrategyFactory.create_async_strategy(min_send_grad_num_before_recv=4))

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for step in range(1, 9):
            optimizer.minimize(weight.sum())
            eventually(lambda step=step: len(network.pushes) == step, "the push")
        eventually(lambda: network.pulls >= 2, "a fetch")

    run_job(body, 1, 1, network=network)
    assert all(push.quiet for push in network.pushes)
    assert 2 <= network.pulls <= 3, "the initial parameters and one or two fetches"


def test_few_parameters_are_not_worth_a_thread() -> None:
    def pulls(numel: int) -> int:
        network = Held(held=False)

        def body(fleet_: Fleet, worker: int) -> None:
            weight = torch.nn.Parameter(torch.zeros(numel))
            optimizer = torch.optim.SGD([weight], lr=1.0)
            optimizer = fleet_.distributed_optimizer(optimizer, StrategyFactory.create_async_strategy())
            fleet_.init_worker()
            optimizer.minimize(weight.sum())
            settles_at(weight, optimizer, -1.0)

        run_job(body, 1, 1, network=network)
        return network.pulls

    worth_it = communicator.WORTH_BYTES // 4
    assert pulls(worth_it - 1) == 1, "the initial parameters"
    assert pulls(worth_it) > 1


def test_the_learning_rate_travels_with_the_gradient_it_was_set_for() -> None:
    network = Held()
    strategy = StrategyFactory.create_async_strategy(send_queue_size=10)

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        optimizer = fleet_.distributed_optimizer(inner, strategy)
        fleet_.init_worker()
        for _ in range(5):
            optimizer.minimize(weight.sum())
            schedule.step()
        network.release()
        settles_at(weight, optimizer, -(1 + 0.5 + 0.25 + 0.125 + 0.0625))

    run_job(body, 1, 1, network=network)


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_are_taken_as_they_were_at_the_step(zeroed: bool) -> None:
    """What the user does to .grad afterwards is too late to matter."""
    network = Held()
    make = scalar_job(StrategyFactory.create_async_strategy(send_queue_size=10))

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=zeroed)
            weight.sum().backward()
            optimizer.step()
        assert weight.grad is not None
        weight.grad.fill_(1e9)
        network.release()
        settles_at(weight, optimizer, -4.0)

    run_job(body, 1, 1, network=network)


@pytest.mark.parametrize("mode", ["async", "half_async"])
@pytest.mark.parametrize("wide", ["sparse", "once"])
def test_gradients_of_rows_are_taken_as_they_were_at_the_step(mode: str, wide: str) -> None:
    """What the user does to ``weight.grad`` afterwards, in place, is too late to matter."""
    network = Held(held=mode == "async")
    strategy = {
        "async": StrategyFactory.create_async_strategy(send_queue_size=10),
        "half_async": StrategyFactory.create_half_async_strategy(max_merge_var_num=3),
    }[mode]
    ids = torch.arange(3) if wide == "once" else torch.tensor([0, 1, 2, 0, 1, 2])

    def body(fleet_: Fleet, _: int) -> list[float]:
        table = torch.nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
        sgd = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = fleet_.distributed_optimizer(sgd, strategy, model=table)
        fleet_.init_worker()
        for _ in range(4):
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()
            assert table.weight.grad is not None
            table.weight.grad.mul_(1e9)
            table.weight.grad._indices().zero_()
        network.release()
        fleet_.barrier_worker()
        return [*table.weight.detach().flatten().tolist()]

    assert run_job(body, network=network) == [[-4.0 * len(ids) / 3] * 3]


class LateReading:
    """Stands for a device whose gradients are copied when somebody waits for them, and hold no number before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[str] = []
        monkeypatch.setattr(taking_steps, "is_away", lambda tensor: True)
        monkeypatch.setattr(taking_steps, "bring", self._bring)

    def _bring(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        now = [each.detach().clone() for each in tensors]  # what comes after this on a device changes no copy
        copies = [torch.full_like(each, float("nan") if each.is_floating_point() else -1) for each in now]

        def wait() -> None:
            self.waits.append(threading.current_thread().name)
            for copy, values in zip(copies, now, strict=True):
                copy.copy_(values)

        return copies, wait


@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_a_device_are_awaited_behind_the_users_back(
    monkeypatch: pytest.MonkeyPatch, set_to_none: bool, checked: bool, dense: Any
) -> None:
    late = LateReading(monkeypatch)

    def body(fleet_: Fleet, worker: int) -> tuple[list[float], list[float]]:
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        table = fleet.nn.Embedding(None, 2, initializer="zeros", padding_idx=7)
        strategy = StrategyFactory.create_async_strategy(check_finite=checked, dense=dense)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0), strategy)
        fleet_.init_worker()
        for _ in range(10):
            optimizer.zero_grad(set_to_none=set_to_none)
            (weight.sum() + table(torch.tensor([5, 7, 5])).sum() + table(torch.tensor([6])).sum()).backward()
            optimizer.step()
            with torch.no_grad():
                weight.grad.fill_(100)  # type: ignore[union-attr]
        fleet_.barrier_worker()
        state = fleet_.state_dict(torch.nn.ParameterDict({"weight": weight}))
        return state["weight"].flatten().tolist(), table(torch.tensor([5, 6])).flatten().tolist()

    ((weights, rows),) = run_job(body, 1, 2)
    assert weights == [-10.0] * 6
    assert rows == [-20.0] * 2 + [-10.0] * 2
    behind = [name for name in late.waits if name.startswith("fleet-send")]
    assert len(behind) == (0 if checked else len(late.waits))
    assert late.waits


def test_a_failure_behind_the_users_back_is_raised_in_the_next_step() -> None:
    network = Held()
    make = scalar_job(StrategyFactory.create_async_strategy())

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        optimizer.minimize(weight.sum())
        network.fail = True
        network.release()

        def step() -> None:
            for _ in range(1000):
                optimizer.minimize(weight.sum())
                time.sleep(0.002)

        with pytest.raises(FleetError, match="made to fail"):
            step()
        with pytest.raises(FleetError, match="made to fail"):
            fleet_.stop_worker()
        raise ZeroDivisionError

    job = Job(body, 1, 1, network=network)
    job.join(job.start())
    assert isinstance(job.errors["worker 0"], ZeroDivisionError)


@pytest.fixture(params=[0, 5], ids=["fetched apart", "with the answer"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How one parameter of four bytes comes."""
    monkeypatch.setattr(communicator, "WORTH_BYTES", request.param)


@pytest.mark.usefixtures("either_way")
def test_parameters_never_change_between_two_steps() -> None:
    """A forward and its backward see one state, however much arrives meanwhile."""
    make = scalar_job(StrategyFactory.create_async_strategy())

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        for _ in range(50):
            before = weight.detach().clone()
            loss = (weight * weight).sum() + weight.sum()
            time.sleep(0.001)
            assert torch.equal(weight, before)
            optimizer.minimize(loss)

    run_job(body, 2, 1)


@pytest.mark.usefixtures("either_way")
def test_a_goodbye_leaves_no_thread_and_comes_twice() -> None:
    make = scalar_job(StrategyFactory.create_async_strategy())

    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = make(fleet_)
        optimizer.minimize(weight.sum())
        fleet_.stop_worker()
        fleet_.stop_worker()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith(("fleet-send", "fleet-recv"))]
        with pytest.raises(FleetError, match="after the job ended"):
            optimizer.minimize(weight.sum())

    run_job(body, 1, 1)
