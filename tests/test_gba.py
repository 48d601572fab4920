"""GBA in whole jobs: what it computes, what it drops, and what becomes of a buffer when somebody dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import ENVIRON, DyingJob, every
from faults import Action, Fault, FaultyNetwork
from harness import SOON, Job, run_job, until
from inside import leave, refresh, worker_of
from patience import PATIENCE_S
from test_durable import Model, counts, same, state
from test_parity_dense import OPTIMIZERS

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import ArgumentTypeError, ConfigurationError, DeadlineError
from fleet.ps.consistency.gate import Answer, ApplyBuffer, Buffer, Rules
from fleet.ps.consistency.gba import GbaGate
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker.push import Pusher
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import Strategy


def trains(strategy: Strategy, name: str, steps: int = 5) -> Callable[[Fleet, int], Any]:
    """Workers in lockstep: each begins a step when all have ended the one before, with the values that there are."""

    def body(made: Fleet, index: int) -> Any:
        model = Model()
        inner = OPTIMIZERS[name](list(model.parameters()))
        wrapped = made.distributed_optimizer(inner, strategy, model=model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.8)
        made.init_worker()
        for step in range(steps):
            draw = torch.Generator().manual_seed(10 * step + index)
            wrapped.minimize((model(torch.randint(0, 40, (8, 3), generator=draw)) - 1).square().mean())
            schedule.step()
            made.barrier_worker()
            refresh(made)
            made.barrier_worker()
        return state(made, model)

    return body


@pytest.mark.pairs(2)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "adam", "adamw-amsgrad", "adagrad", "rmsprop-centered"])
def test_in_lockstep_it_is_synchronous_to_the_bit(name: str, servers: int) -> None:
    expected = run_job(trains(StrategyFactory.create_sync_strategy(), name), 3, servers)
    same(run_job(trains(StrategyFactory.create_gba_strategy(), name), 3, servers), expected)


def test_in_lockstep_gradients_in_fewer_bits_are_those_of_synchronous_training() -> None:
    expected = run_job(trains(StrategyFactory.create_sync_strategy(wire_dtype="bf16"), "adam"), 2, 2)
    same(run_job(trains(StrategyFactory.create_gba_strategy(wire_dtype="bf16"), "adam"), 2, 2), expected)


@pytest.mark.pairs(2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("gradients", [1, 2, 6])
def test_every_gradient_counts_once(gradients: int, servers: int) -> None:
    """Whoever they come from, and in which order: these do not depend on what was read."""
    strategy = StrategyFactory.create_gba_strategy(gradients, 99)
    total = sum(step + index + 1 for step in range(12) for index in range(3)) / gradients
    for result in run_job(counts(strategy, torch.optim.SGD), 3, servers):
        for value in result.values():
            torch.testing.assert_close(value, torch.full_like(value, -0.125 * total))


class Turns:
    """Lets the workers of a job take what they do in a fixed order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0

    def take(self, turn: int, act: Callable[[], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._taken == turn, PATIENCE_S)
        found = act()
        with self._changed:
            self._taken += 1
            self._changed.notify_all()
        return found


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("staleness", "expected"), [(0, -3.0), (1, -3.0), (2, -103.0)])
def test_what_is_too_late_is_dropped_and_counted(staleness: int, expected: float, servers: int) -> None:
    """The second worker brings a gradient of 100 when there have been two updates since it read, then one of 1."""
    turns = Turns()

    def body(made: Fleet, index: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(4))
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        inner = torch.optim.SGD([weight, *table.parameters()], lr=1.0)
        wrapped = made.distributed_optimizer(inner, StrategyFactory.create_gba_strategy(1, staleness))
        made.init_worker()

        def loss() -> torch.Tensor:
            return weight.sum() + table(torch.tensor([1, 2])).sum()

        first = turns.take(index, loss)
        if index == 0:
            turns.take(2, lambda: [wrapped.minimize(first), wrapped.minimize(loss())])
        else:
            turns.take(3, lambda: wrapped.minimize(100 * first))
            turns.take(4, lambda: wrapped.minimize(loss()))
        made.barrier_worker()
        refresh(made)
        return weight.detach().clone(), table(torch.tensor([1, 2])).detach(), made.summary()

    for weight, rows, summary in run_job(body, 2, servers):
        assert torch.equal(weight, torch.full((4,), expected))
        assert torch.equal(rows, torch.full((2, 2), expected))
        assert summary["late_gradients"] == ({1: 1} if staleness < 2 else {})
        assert summary["mode"] == "gba"


def test_rows_that_were_fetched_ahead_are_as_old_as_they_are() -> None:
    """Used after an update, they make the gradient late, and it is dropped where it may not be."""

    def body(made: Fleet, index: int) -> Any:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        strategy = StrategyFactory.create_gba_strategy(1, staleness=1)  # of two workers, so it is two updates at least
        wrapped = made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        made.init_worker()
        for ids in made.prefetch([torch.tensor([1])] * 8, lambda ids: {table: ids}, depth=1):
            wrapped.minimize(table(ids).sum())
            made.barrier_worker()
        return table(torch.tensor([1])).detach(), made.summary()["late_gradients"]

    (row, late), _ = run_job(body, 2)
    assert late
    assert torch.equal(row, torch.full((1, 2), -16.0 + sum(late.values())))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_are_not_asked_for_too_far_ahead(staleness: int, device: str | None) -> None:
    """Unless it is said how far, their gradients are not dropped for it."""

    def body(made: Fleet, index: int) -> Any:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        strategy = StrategyFactory.create_gba_strategy(staleness=staleness)
        wrapped = made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        made.init_worker()
        with pytest.raises(
            ConfigurationError, match=f"depth= of at most staleness={staleness}; got depth=2 in the mode"
        ):
            made.prefetch([], lambda ids: {table: ids}, depth=2, device=device)
        for ids in made.prefetch([torch.tensor([1])] * 4, lambda ids: {table: ids}, device=device):
            wrapped.minimize(table(ids).sum())
        return table(torch.tensor([1])).tolist(), made.summary()["late_gradients"]

    assert run_job(body) == [([[-4.0, -4.0]], {})]


def test_what_one_server_lacks_makes_nobodys_gradients_late() -> None:
    """A worker is held up between two servers: the others go on as far as theirs may be late, and no further."""
    network = FaultyNetwork(
        LoopbackNetwork(),
        Fault(Action.DELAY, Endpoint.parse("server1:1"), 2, kind="push", step=3, delay_s=1.0),
    )

    def body(made: Fleet, index: int) -> Any:
        # On both servers; with as many steps as could be taken meanwhile.
        weights = [torch.nn.Parameter(torch.zeros(9000)) for _ in range(2)]
        strategy = StrategyFactory.create_gba_strategy(staleness=8)
        wrapped = made.distributed_optimizer(torch.optim.SGD(weights, lr=1.0), strategy)
        made.init_worker()
        for _ in range(5 if index == 2 else 40):
            wrapped.minimize(sum(weight.sum() for weight in weights))
            time.sleep(0.02)
        made.barrier_worker()
        late = made.summary()["late_gradients"]
        return {worker: count for worker, count in late.items() if worker != 2}

    assert run_job(body, 3, 2, network=network) == [{}, {}, {}]
    assert network.struck


def test_a_table_that_is_used_now_and_then_makes_nothing_late() -> None:
    def body(made: Fleet, index: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        inner = torch.optim.SGD([weight, *table.parameters()], lr=1.0)
        wrapped = made.distributed_optimizer(inner, StrategyFactory.create_gba_strategy(staleness=0))
        made.init_worker()
        for step in range(4):
            wrapped.minimize(weight.sum() + (table(torch.tensor([1])).sum() if step == 0 else 0))
        return weight.item(), made.summary()["late_gradients"]

    assert run_job(body, 1, 2) == [(-4.0, {})]


def test_the_rate_is_that_of_the_first_in_order() -> None:
    """Of gradients on equally old values that is the one of the worker with the lowest index, whoever comes first."""
    turns = Turns()

    def body(made: Fleet, index: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=0.25 if index else 1.0)
        wrapped = made.distributed_optimizer(inner, StrategyFactory.create_gba_strategy())
        made.init_worker()
        turns.take(1 - index, lambda: wrapped.minimize(weight.sum()))
        made.barrier_worker()
        refresh(made)
        return weight.item()

    assert run_job(body, 2, 1) == [-1.0, -1.0]


# ---------------------------------------------------------------- somebody dies


@pytest.mark.parametrize(
    "journal_bytes",
    [pytest.param(1, id="snapshots"), pytest.param(1 << 30, id="a journal alone", marks=pytest.mark.slow)],
)
def test_a_half_filled_buffer_survives_a_kill(tmp_path: Path, journal_bytes: int) -> None:
    """Servers are killed at every third request; no gradient is lost, and none counts twice."""
    strategy = StrategyFactory.create_gba_strategy(4, 99)
    job = DyingJob(counts(strategy, torch.optim.SGD), tmp_path, plan=every(3, 1), journal_bytes=journal_bytes)
    total = sum(step + index + 1 for step in range(12) for index in range(2)) / 4
    for result in job.run():
        for value in result.values():
            assert torch.equal(value, torch.full_like(value, -0.125 * total))
    assert job.kills > 5


@pytest.mark.slow
def test_in_lockstep_servers_that_are_killed_give_the_same_bits(tmp_path: Path) -> None:
    body = trains(StrategyFactory.create_gba_strategy(), "adam")
    job = DyingJob(body, tmp_path, plan=every(3, 1), journal_bytes=1)
    same(job.run(), run_job(body, 2, 2))
    assert job.kills > 3


def adds_up(made: Fleet, strategy: Strategy, steps: int) -> Any:
    """Train on gradients of one, so that what comes of them tells how many there were."""
    model = torch.nn.ModuleDict({"line": torch.nn.Linear(100, 100), "rows": fleet.nn.Embedding(9, 2)})
    with torch.no_grad():
        for parameter in model["line"].parameters():
            parameter.zero_()
    wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy, model=model)
    made.init_worker()

    def train(steps: int) -> None:
        for _ in range(steps):
            of_rows = model["rows"](torch.arange(9)).sum()
            wrapped.minimize(sum(each.sum() for each in model["line"].parameters()) + of_rows)

    train(steps - made.resume_step())
    return model, train


@pytest.mark.parametrize(("kind", "server"), [("push", 0), ("push", 1), ("place", 1)])
@pytest.mark.pairs(2)
def test_a_worker_killed_in_the_midst_of_a_push_goes_on(kind: str, server: int) -> None:
    """One of two servers has not heard of its step; it takes that once more, and it counts once. The other worker has
    taken one step before, so it is this one that makes an update of two."""
    environ = {**ENVIRON, "FLEET_JOB_ID": "one"}
    strategy = StrategyFactory.create_gba_strategy(2, 99)
    pushed, killed = threading.Event(), threading.Event()

    def body(made: Fleet, index: int) -> Any:
        if index == 0:
            model, train = adds_up(made, strategy, 1)
            pushed.set()
            assert killed.wait(PATIENCE_S)
            train(5)
        else:
            lost = Fault(
                Action.DROP_REQUEST, endpoint=Endpoint.parse(job.endpoints[server]), kind=kind, step=3, times=None
            )
            first = Fleet(environ={**environ, "FLAGS_rpc_retry_times": "0"}, network=FaultyNetwork(job.network, lost))
            first.init(UserDefinedRoleMaker(1, Role.WORKER, 2, job.endpoints))
            _, train = adds_up(first, strategy, 0)
            assert pushed.wait(PATIENCE_S)
            with pytest.raises(DeadlineError, match=f"{kind} of step 3"):
                train(6)
            leave(first)
            killed.set()
            model, _ = adds_up(made, strategy, 6)
        made.barrier_worker()
        refresh(made)
        return [each.detach() for each in model["line"].parameters()]

    job = Job(body, 2, 2, environ=environ)
    for result in job.run():
        for value in result:
            assert torch.equal(value, torch.full_like(value, -6.0))


@pytest.mark.parametrize("kind", ["push", "place"])
def test_others_go_on_when_a_worker_dies_between_two_servers(kind: str) -> None:
    """It is given up on. What one server alone has of it counts there alone; nobody waits for the rest."""
    strategy = StrategyFactory.create_gba_strategy(2, 99)
    pushed, died = threading.Event(), threading.Event()

    def dies(made: Fleet) -> None:
        _, train = adds_up(made, strategy, 0)
        assert pushed.wait(PATIENCE_S)
        with pytest.raises(DeadlineError, match=f"{kind} of step 3"):
            train(4)
        leave(made)
        died.set()

    def comes_to(made: Fleet, model: Any) -> bool:
        """Whether it is 17 of one worker and 2 or 3 of the other, two at a time: the second server gives up later."""
        refresh(made)
        return {each for values in model["line"].parameters() for each in values.flatten().tolist()} <= {-9.5, -10.0}

    def body(made: Fleet, index: int) -> Any:
        if index == 0:
            model, train = adds_up(made, strategy, 1)
            pushed.set()
            assert died.wait(PATIENCE_S)
            train(12)
            made.barrier_worker()  # one server has given up on the other worker, which would hold it up
            train(4)
            until(lambda: comes_to(made, model))
        return None

    lost = Fault(Action.DROP_REQUEST, Endpoint.parse("server1:1"), 1, kind, 3, times=None)
    job = Job(
        body, 2, 2, environ={**SOON, "FLAGS_rpc_retry_times": "0"}, network=FaultyNetwork(LoopbackNetwork(), lost)
    )

    def work(index: int) -> None:
        made = job.fleet(Role.WORKER, index)
        if index == 1:
            dies(made)
        else:
            job.results[0] = body(made, 0)
            made.stop_worker()

    job.work = work  # type: ignore[method-assign]
    job.join(job.start())
    assert not job.errors


def test_pushes_that_no_server_but_the_first_has_a_place_for_count_when_their_worker_has_died() -> None:
    """Nobody has told the second one, as they lie in an open buffer. When it is closed, their worker is long gone."""
    strategy = StrategyFactory.create_gba_strategy(3, 99)
    job = Job(lambda made, index: None, 2, 2, environ={**SOON, "FLAGS_rpc_retry_times": "0"})
    died = threading.Event()

    def work(index: int) -> None:
        made = job.fleet(Role.WORKER, index)
        if index == 1:
            adds_up(made, strategy, 2)
            leave(made)
            died.set()
        else:
            model, train = adds_up(made, strategy, 0)
            assert died.wait(PATIENCE_S)
            made.barrier_worker()  # all servers have given up on the other worker
            train(1)
            refresh(made)
            for values in model["line"].parameters():
                assert torch.equal(values, torch.full_like(values, -1.0))
            made.stop_worker()

    job.work = work  # type: ignore[method-assign]
    job.join(job.start())
    assert not job.errors


def test_a_push_counts_though_its_worker_is_gone_when_an_old_word_comes() -> None:
    """A worker asked where its push belongs before another pushed, and tells the second server when it has gone."""
    strategy = StrategyFactory.create_gba_strategy(3, 99, elastic=True)
    late = Fault(Action.DELAY, Endpoint.parse("server1:1"), 0, kind="place", step=1, delay_s=1.0)
    asked, told, came = (threading.Event() for _ in range(3))
    network = FaultyNetwork(LoopbackNetwork(), late)

    def body(made: Fleet, index: int) -> Any:
        model, train = adds_up(made, strategy, 0)
        made.barrier_worker()
        if index == 0:
            assert came.wait(PATIENCE_S)
            train(1)  # makes an update of three, and its word to the second server takes long
            asked.set()
        elif index == 1:
            assert told.wait(PATIENCE_S)
            train(1)
            worker_of(made).end("it is told to end")
        else:
            train(2)
            came.set()
            until(lambda: network.struck)
            train(1)  # which finds the second server behind, and tells it
            told.set()
            assert asked.wait(PATIENCE_S)
            train(1)
            refresh(made)
            return [each.detach().clone() for each in model["line"].parameters()]
        return None

    for values in run_job(body, 3, 2, network=network)[2]:
        assert torch.equal(values, torch.full_like(values, -2.0))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"gradients": 0}, ConfigurationError, "gradients is out of range"),
        ({"gradients": 2.0}, ArgumentTypeError, "gradients must be an int"),
        ({"gradients": True}, ArgumentTypeError, "gradients must be an int"),
        ({"gradients": 1 << 17}, ConfigurationError, "gradients is out of range"),
        ({"staleness": -1}, ConfigurationError, "staleness is out of range"),
        ({"staleness": None}, ArgumentTypeError, "staleness must be an int"),
        ({"elastic": 1}, ArgumentTypeError, "elastic must be True or False"),
        ({"wire_dtype": "fp8"}, ConfigurationError, "wire_dtype is unknown"),
        ({"dense": "all_reduce"}, ConfigurationError, "GBA and dense='all_reduce' exclude each other"),
        ({"dense": "gpu"}, ConfigurationError, "dense is unknown"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        StrategyFactory.create_gba_strategy(**options)


def test_nobody_waits_for_what_a_process_that_has_died_was_about_to_send() -> None:
    """At a server that is not the first, which lacks its push; another process may be in a barrier before it pushes."""
    gate = GbaGate(range(2), 0, Rules(staleness=4, gradients=1))
    lacked = Buffer(0, 1, ((0, 1, 1),))
    for step in range(1, 7):
        gate.push(0, step, None)
        assert gate.place(0, step, [lacked, *(Buffer(at, 1, ((0, 0, at),)) for at in range(1, step + 1))]) == []
    assert gate.holds(0, 6) == 3
    assert gate.wait("held", 0, gate.holds(0, 6)) == []
    assert gate.starts_again(1) == [Answer("held", 0)]
    assert gate.holds(0, 6) == 0
    kept = GbaGate(range(2), 0, Rules(staleness=4, gradients=1))
    kept.resume(gate.clocks, gate.gone, gate.version, json.loads(json.dumps(gate.memory(gate.clocks))))
    for each in (gate, kept):
        assert [effect.version for effect in each.push(1, 1, None) if isinstance(effect, ApplyBuffer)] == [*range(1, 8)]


def test_other_servers_make_updates_of_as_many_gradients_whoever_moved_the_job() -> None:
    """A worker that joined later was told another number of workers."""
    gate = GbaGate(range(2))
    moved = GbaGate(range(3))
    moved.resume({0: 0, 1: 0, 2: 0}, {}, 0, json.loads(json.dumps(gate.memory({}, anew=True))))
    assert moved.push(2, 1, 0) == []
    assert moved.push(0, 1, 0) == [ApplyBuffer(1, ((0, 1), (2, 1)), (), 2)]


def test_nobody_asks_for_a_norm_again_and_again_that_no_server_knows() -> None:
    """One server forgot it, and waits for nothing; what comes after it at the other one has been told already."""
    asked: list[pb.Clip] = []
    replies = [
        Frame(pb.Reply(norms=[pb.Norm(version=9, squares=1.0, told=True, total=2.0)])),
        Frame(pb.Reply(norms=[pb.Norm(version=8, squares=1.0), pb.Norm(version=9, squares=1.0)])),
    ]

    class Asking:
        def ask(self, what: str, *, clip: pb.Clip, step: int) -> list[Frame]:
            asked.append(clip)
            return replies

    pusher = object.__new__(Pusher)
    pusher._connections = Asking()  # type: ignore[assignment]
    assert pusher._clipped(7, replies) is replies
    assert [(list(each.versions), list(each.totals), list(each.awaited)) for each in asked] == [([9], [2.0], [8, 9])]
