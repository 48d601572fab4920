"""The strategy that changes between synchronous training and GBA by itself: when it does, and what it computes."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import DyingJob, every
from harness import PATIENT, Job, run_job, until
from inside import found_job, leave, refresh
from test_clipping import Model
from test_durable import same, state
from test_gba import Turns
from test_observing import status_of

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import ArgumentTypeError, ConfigurationError, StateError
from fleet.ps.consistency.auto import LEAVES_FROM, PAUSE_S, RETURNS_BELOW, AutoGate, gain
from fleet.ps.consistency.gate import Answer, ApplyBuffer, Changed, Effect, Rules
from fleet.ps.server.step_requests import told_change
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.role_maker import Role
from fleet.strategy.parameter_server import Strategy
from fleet.telemetry.diagnosis import diagnose
from fleet.telemetry.view import rows, seen

STEPS = 5


# ---------------------------------------------------------------- when it changes


@pytest.mark.parametrize(
    ("own_s", "expected"),
    [
        ([[1.0] * 4] * 3, 1.0),
        ([[1.0] * 4, [4.0] * 4], 4 * (1 / 1 + 1 / 4) / 2),
        ([[1.0, 4.0], [4.0, 1.0]], 8 / 5),  # each is slow at another time: waiting costs, though none is slower
        ([[4.0] * 2, *([[1.0] * 2] * 3)], 4 * (3 + 1 / 4) / 4),
        ([[0.0], [0.0]], 1.0),
        ([], 1.0),
    ],
)
def test_what_would_be_gained(own_s: list[list[float]], expected: float) -> None:
    assert gain(own_s) == pytest.approx(expected)


class Clockwork:
    """A gate whose workers take their steps, in rounds or not, as long as is said, while time passes."""

    def __init__(self, *own_s: float, changes: tuple[int, ...] = ()) -> None:
        self.gate = AutoGate(range(len(own_s)), 0, Rules(99, 0, changes))
        self.own_s = list(own_s)
        self.now = 0.0
        self.steps = [0] * len(own_s)
        self.effects: list[Effect] = []

    def take(self, rounds: int) -> list[Changed]:
        before = len(self.gate.changes)
        for _ in range(rounds):
            for worker, own_s in enumerate(self.own_s):
                self.steps[worker] += 1
                self.now += own_s
                self.gate.note(worker, self.steps[worker], own_s, self.now)
                self.effects += self.gate.push(worker, self.steps[worker], self.gate.version)
        return self.gate.changes[before:]


def test_even_workers_stay_synchronous() -> None:
    assert Clockwork(1.0, 1.0, 1.02).take(100) == []


@pytest.mark.parametrize(("slowest", "leaves"), [(1.058, False), (1.061, True)])
def test_rounds_are_left_from_three_parts_in_a_hundred_on(slowest: float, leaves: bool) -> None:
    assert gain([[1.0], [slowest]]) == pytest.approx((slowest + 1) / 2)
    assert [change.together for change in Clockwork(1.0, slowest).take(30)] == [False] * leaves


@pytest.mark.parametrize(("slowest", "returns"), [(1.018, True), (1.022, False)])
def test_rounds_begin_again_below_one_part_in_a_hundred(slowest: float, returns: bool) -> None:
    clockwork = Clockwork(1.0, 4.0)
    clockwork.take(20)
    clockwork.own_s = [1.0, slowest]
    assert [change.together for change in clockwork.take(1000)] == [True] * returns


def test_one_that_is_slow_is_no_longer_waited_for_once_that_is_known() -> None:
    clockwork = Clockwork(1.0, 1.0, 4.0)
    assert clockwork.take(19) == []
    (change,) = clockwork.take(1)
    assert (change.version, change.together) == (20, False)
    assert change.gain == pytest.approx(3.0)
    assert change in clockwork.effects


def test_it_goes_back_when_all_are_even_again_and_not_before_a_while() -> None:
    clockwork = Clockwork(1.0, 4.0)
    clockwork.take(20)
    clockwork.own_s = [1.0, 1.0]
    changed_at = clockwork.now
    changes: list[Changed] = []
    while not changes:
        changes = clockwork.take(1)
    assert changes[0].together
    assert changes[0].gain < RETURNS_BELOW < LEAVES_FROM
    assert clockwork.now - changed_at >= PAUSE_S - 5  # the first worker told the time a little before


@pytest.mark.parametrize("own_s", [(1.0, 1.0), (1.0, 4.0)])
def test_a_recorded_sequence_is_followed_and_nothing_else(own_s: tuple[float, float]) -> None:
    changes = Clockwork(*own_s, changes=(3, 40)).take(60)
    assert changes == [Changed(3, False, None), Changed(40, True, None)]
    assert told_change(changes[0]) == "GBA from update 3 on: as the strategy's changes say"


def test_a_job_that_never_changed_is_followed_too() -> None:
    strategy = StrategyFactory.create_auto_strategy(changes=[])
    assert Clockwork(1.0, 4.0, changes=strategy.changes).take(60) == []


def test_it_changes_four_times_an_hour_at_most() -> None:
    """Whatever workers do: here they are uneven and even in turns, as soon as it has changed."""
    clockwork, at = Clockwork(1.0, 4.0), []
    while clockwork.now < 4 * 3600:
        if clockwork.take(1):
            at.append(clockwork.now)
            clockwork.own_s = [1.0, 1.0] if len(at) % 2 else [1.0, 4.0]
    assert len(at) > 8
    assert all(sum(first <= each < first + 3600 for each in at) <= 4 for first in at)


def test_a_journal_that_is_done_over_makes_the_same_changes() -> None:
    """Also from a snapshot in the midst, of which the last steps are done over."""
    clockwork = Clockwork(1.0, 1.0, 4.0)
    clockwork.take(15)
    clocks = dict.fromkeys(range(3), 15)
    again = Clockwork(1.0, 1.0, 4.0)
    again.gate.resume(clocks, {}, 15, clockwork.gate.memory(clocks))
    again.steps, again.now = [15] * 3, clockwork.now
    assert again.take(10) == clockwork.take(10)
    assert again.gate.memory(clocks) == clockwork.gate.memory(clocks)


@pytest.mark.parametrize(("version", "waits"), [(2, True), (3, False), (7, False), (8, True)])
def test_from_a_checkpoint_it_goes_on_at_the_pace_that_its_strategy_says(version: int, waits: bool) -> None:
    gate = AutoGate(range(2), 0, Rules(99, 0, (3, 8)))
    gate.resume(dict.fromkeys(range(2), version), {}, version)
    gate.push(0, version + 1, version)
    assert (gate.holds(0, version + 1) > 0) == waits


def test_in_a_round_everybody_waits_for_everybody() -> None:
    gate = AutoGate(range(3))
    assert gate.push(0, 1, 0) == gate.push(2, 1, 0) == []
    assert gate.holds(0, 1) == 1
    assert gate.wait("zero", 0, 1) == []
    assert gate.leave(1) == [ApplyBuffer(1, ((0, 1), (2, 1)), (), 2), Answer("zero", 1)]
    assert gate.holds(0, 1) == 0


def test_who_waited_for_a_later_round_waits_no_more_when_there_are_none() -> None:
    """It has started again amid a round, with its push in it; the others may leave before there is another update."""
    gate = AutoGate(range(2), 0, Rules(99, 0, (1,)))
    assert gate.push(1, 1, 0) == []
    assert gate.starts_again(1) == []
    assert gate.push(1, 2, 0) == []
    assert gate.holds(1, 2) == 2
    assert gate.wait("one", 1, 2) == []
    applied, changed, *answers = gate.push(0, 1, 0)
    assert applied == ApplyBuffer(1, ((0, 1), (1, 1)), (), 2)
    assert changed == Changed(1, False, None)
    assert answers == [Answer("one", 1)]


def test_who_pushed_before_workers_waited_is_in_no_hurry() -> None:
    """Nothing is held back that was not, when workers begin to wait for each other."""
    gate = AutoGate(range(2), 0, Rules(99, 0, (1, 2)))
    for worker in (0, 1):
        gate.push(worker, 1, 0)
    assert gate.push(0, 2, 1) == []
    assert gate.holds(0, 2) == 0
    assert isinstance(gate.push(0, 3, 1)[-1], Changed)
    assert gate.push(0, 4, 2) == []
    assert gate.holds(0, 4) == 3
    assert gate.push(1, 2, 0) == [ApplyBuffer(3, ((1, 2), (0, 4)), (), 2)]


# ---------------------------------------------------------------- what it computes


def test_a_gate_that_goes_on_elsewhere_admits_what_the_first_one_has_admitted() -> None:
    """And where another server does, it closes no buffer by itself, and holds nobody for it."""
    gate = AutoGate(range(3))
    for worker in range(3):
        gate.push(worker, 1, 0)
    for worker in (0, 1):
        gate.push(worker, 2, 1)
    anew = gate.memory({0: 1, 1: 2, 2: 1}, anew=True)
    assert anew["buffers"][-1].pushes == ((1, 1, 2),), "what comes again is in none"
    moved = [AutoGate(range(3)) for _ in range(2)]
    for each in moved:
        each.resume(gate.clocks, gate.gone, gate.version, json.loads(json.dumps(gate.memory(gate.clocks))))
    first, other = moved
    other.follow_first()
    assert [first.holds(0, 2), other.holds(0, 2)] == [2, 1]
    assert ApplyBuffer(2, ((0, 2), (1, 2)), (), 2) in first.leave(2)
    assert other.leave(2) == []
    assert ApplyBuffer(2, ((0, 2), (1, 2)), (), 2) in other.place(0, 2, first.buffers(0))


def test_a_job_may_be_asked_never_to_change() -> None:
    same(run_job(trains(StrategyFactory.create_auto_strategy(changes=[])), 2), run_job(trains(Strategy()), 2))


def test_a_job_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def body(made: Fleet, index: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        wrapped = made.distributed_optimizer(inner, StrategyFactory.create_auto_strategy())
        made.init_worker()
        begin = weight.item()
        for _ in range(5):
            wrapped.minimize(weight.sum())
        made.save_persistables(f"{tmp_path}/made")
        return begin

    assert run_job(body, 2, 2) == [0.0, 0.0]
    assert Job(body, 2, 1, model_dir=f"{tmp_path}/made").run() == [-5.0, -5.0]


def trains(strategy: Strategy) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> Any:
        model = Model(sparse=True)
        wrapped = made.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), strategy, model=model)
        made.init_worker()
        for step in range(STEPS):
            wrapped.minimize(model.loss(step, index))
        return state(made, model)

    return body


@pytest.mark.pairs(2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("most", [None, 0.5])
def test_before_it_changes_it_is_synchronous_to_the_bit(servers: int, most: float | None) -> None:
    auto = StrategyFactory.create_auto_strategy(max_grad_norm=most)
    expected = run_job(trains(StrategyFactory.create_sync_strategy(max_grad_norm=most)), 3, servers)
    same(run_job(trains(auto), 3, servers), expected)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_recorded_sequence_reproduces_a_run(servers: int) -> None:
    """Synchronous, then GBA with its steps in a given order, then synchronous again."""
    strategy = StrategyFactory.create_auto_strategy(changes=[2, 4])

    def once() -> list[Any]:
        turns = Turns()

        def body(made: Fleet, index: int) -> Any:
            model = Model(sparse=True)
            wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
            made.init_worker()

            def step(number: int) -> None:
                wrapped.minimize(model.loss(number, index))

            step(0), step(1)
            made.barrier_worker()
            for number, turn in ((2, 0), (3, 2)) if index == 0 else ((2, 1), (3, 3)):
                turns.take(turn, lambda number=number: step(number))
            made.barrier_worker()
            refresh(made)
            step(4), step(5)
            return state(made, model), made.summary()["changes"]

        return run_job(body, 2, servers)

    first, second = once(), once()
    same([values for values, _ in first], [values for values, _ in second])
    assert [(each["update"], each["to"]) for each in first[0][1]] == [(2, "GBA"), (4, "synchronous")]


def test_a_change_is_told_in_the_log_in_top_by_the_doctor_and_in_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    network = LoopbackNetwork()

    def body(made: Fleet, index: int) -> None:
        model = Model(sparse=True)
        strategy = StrategyFactory.create_auto_strategy(changes=[2])
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        made.init_worker()
        for step in range(3):
            wrapped.minimize(model.loss(step, index))
        made.barrier_worker()
        if index == 0:
            before, now = (seen(at, {"server 0": status_of(network, "server0:1")}, {}) for at in (0.0, 1.0))
            told = "GBA from update 2 on: as the strategy's changes say"
            assert any(told in row.note for row in rows(before, now))
            assert f"They are {told}." in " ".join(diagnose(before, now))
            assert told in caplog.text
            assert made.summary()["changes"] == [{"update": 2, "to": "GBA", "gain": None}]
        made.barrier_worker()

    run_job(body, 2, 1, network=network)


@pytest.mark.parametrize("journal_bytes", [1, pytest.param(1 << 30, marks=pytest.mark.slow)])
def test_servers_that_are_killed_give_the_same_bits(tmp_path: Path, journal_bytes: int) -> None:
    body = trains(StrategyFactory.create_auto_strategy())
    job = DyingJob(body, tmp_path, plan=every(4, 1), journal_bytes=journal_bytes)
    same(job.run(), run_job(trains(StrategyFactory.create_sync_strategy()), 2, 2))
    assert job.kills > 3


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"changes": [3, 3]}, ConfigurationError, "changes are not updates in order"),
        ({"changes": [0]}, ConfigurationError, "changes is out of range"),
        ({"changes": "3"}, ArgumentTypeError, "changes must be a list"),
        ({"changes": [2.5]}, ArgumentTypeError, "changes must be an int"),
        ({"staleness": -1}, ConfigurationError, "staleness is out of range"),
        (
            {"dense": "all_reduce"},
            ConfigurationError,
            "the auto mode, .* and dense='all_reduce' exclude each other",
        ),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        StrategyFactory.create_auto_strategy(**options)


# ---------------------------------------------------------------- what else goes on meanwhile


@pytest.mark.parametrize("gathers", ["barrier_worker", "all_reduce_worker"])
def test_workers_that_took_more_steps_than_others_may_wait_for_them(gathers: str) -> None:
    """After a time without rounds one comes to the end of its epoch before another."""

    def body(made: Fleet, index: int) -> tuple[float, int]:
        weight = torch.nn.Parameter(torch.zeros(1))
        strategy = StrategyFactory.create_auto_strategy(changes=[2, 10], staleness=99)
        wrapped = made.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        made.init_worker()
        for _ in range(2):
            for _ in range(16):
                turns.take(index)
                wrapped.minimize(weight.sum())
            made.barrier_worker() if gathers == "barrier_worker" else made.all_reduce_worker(1)
            turns.over(index)
        made.barrier_worker()
        refresh(made)
        return weight.item(), len(made.summary()["changes"])

    turns = Epochs()
    (value, changes), (same_value, _) = run_job(body, 2)
    assert changes == 2
    assert value == same_value
    assert value <= -32  # as many updates as there are of two gradients each, and more where a round had one


class Epochs:
    """Worker 1 takes a step where worker 0 takes four, as long as that is still in its epoch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = [0, 0]
        self._over = [0, 0]

    def take(self, worker: int) -> None:
        with self._changed:
            if worker == 1:
                patient = time.monotonic() + 0.05  # in a round worker 0 may wait for this step
                while self._over[0] == self._over[1] and self._steps[0] < 4 * (self._steps[1] + 1):
                    if not self._changed.wait(max(0.0, patient - time.monotonic())):
                        break
            self._steps[worker] += 1
            self._changed.notify_all()

    def over(self, worker: int) -> None:
        with self._changed:
            self._over[worker] += 1
            self._steps[worker] = 0
            self._changed.notify_all()


@pytest.mark.parametrize("servers", [1, 2])
def test_one_that_starts_again_amid_a_round_is_in_it_once(servers: int) -> None:
    environ = {**PATIENT, "FLEET_JOB_ID": "one", "FLEET_HEARTBEAT_S": "0.05"}

    def body(made: Fleet, index: int) -> Any:
        weight, optimizer = begin(made)
        first = made.resume_step()
        if index == 0:
            first_waits.wait(20)
        for step in range(first, 4):
            if index == 0 and step == 1:
                assert pushed_again.wait(20)
            if index == 1 and step == first:
                threading.Timer(0.2, pushed_again.set).start()  # the next push of the new process is there by then
            optimizer.minimize((weight * (index + 1) * 10.0**step).sum())
        made.barrier_worker()
        refresh(made)
        made.barrier_worker()
        return weight.item(), made.summary()["steps_by_worker"]

    def begin(made: Fleet) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        strategy = StrategyFactory.create_auto_strategy(changes=[])
        optimizer = made.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        made.init_worker()
        return weight, optimizer

    def before(made: Fleet) -> None:
        weight, optimizer = begin(made)
        with contextlib.suppress(StateError):  # it dies amid its second step
            for step in range(2):
                optimizer.minimize((weight * 2 * 10.0**step).sum())

    class Restarting(Job):
        def work(self, index: int) -> None:
            if index == 1:
                made = self.fleet(Role.WORKER, 1)
                thread = threading.Thread(target=before, args=(made,))
                thread.start()
                first_waits.set()
                until(lambda: all(self.has_pushed(at) for at in self.endpoints))
                leave(made)
                thread.join()
            super().work(index)

        def has_pushed(self, endpoint: str) -> bool:
            listener = self.network.listener(Endpoint.parse(endpoint))
            job = None if listener is None else found_job(listener.handler.__self__)
            return job is not None and (1, 2) in job.rounds.pushed

    first_waits, pushed_again = threading.Event(), threading.Event()
    ended = Restarting(body, 2, servers, environ=environ).run()
    assert ended == [(-1.5 * 1111, {0: 4, 1: 4})] * 2


@pytest.mark.pairs(2)
@pytest.mark.parametrize("depth", [None, 1, 5])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_rows_that_are_asked_for_ahead_are_those_of_synchronous_training(depth: int | None, device: str | None) -> None:
    def trains_ahead(strategy: Strategy) -> Callable[[Fleet, int], Any]:
        def body(made: Fleet, index: int) -> Any:
            table = fleet.nn.Embedding(None, 2, initializer="constant(1)")
            wrapped = made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy)
            made.init_worker()
            batches = [torch.tensor([step % 3, index + 2]) for step in range(8)]
            for ids in made.prefetch(batches, lambda ids: {table: ids}, depth, device=device):
                wrapped.minimize(table(ids).square().sum())
            made.barrier_worker()
            return table(torch.arange(5)).detach(), made.summary()["late_gradients"]

        return body

    auto = StrategyFactory.create_auto_strategy(changes=[], staleness=0)
    expected = run_job(trains_ahead(Strategy()), 2, 2)
    for (found, late), (wanted, _) in zip(run_job(trains_ahead(auto), 2, 2), expected, strict=True):
        assert torch.equal(found, wanted)
        assert late == {}


def test_the_pause_between_changes_is_time_that_has_passed_whoever_tells_it() -> None:
    """The first worker leaves, and the next one's clock is another."""
    clockwork = Clockwork(1.0, 4.0, 1.0)
    assert len(clockwork.take(40)) == 1
    ahead = AutoGate(range(3), 0, Rules(99))
    assert (ahead._now, ahead._changed_at) == (-math.inf, -math.inf)
    at = clockwork.gate._now
    clockwork.gate.leave(0)
    for step, now in enumerate((at + 7200.0, at - 7200.0, at - 7100.0), 41):
        clockwork.gate.note(1, step, 1.0, now)
    assert clockwork.gate._now == at + 100.0
    for step, now in enumerate((at + 7200.0, at - 7200.0, at - 7100.0), 41):
        clockwork.gate.note(1, step, 1.0, now)
    assert clockwork.gate._now == at + 100.0, "it comes again when a journal is done over"


def test_a_round_waits_for_one_that_has_started_again_in_place_of_one_in_a_barrier() -> None:
    gate = AutoGate(range(2))
    assert gate.rests(1) == []
    assert gate.starts_again(1) == []
    assert gate.push(0, 1, 0) == []
    assert gate.push(1, 1, 0) == [ApplyBuffer(1, ((0, 1), (1, 1)), (), 2)]


def test_what_a_job_was_told_to_do_before_a_checkpoint_is_among_its_changes() -> None:
    gate = AutoGate(range(2), 0, Rules(99, 0, (3, 8, 20)))
    gate.resume(dict.fromkeys(range(2), 10), {}, 10)
    assert gate.changes == [Changed(3, False, None), Changed(8, True, None)]
