"""Barriers and reductions over all workers: the decisions explored, and whole jobs with every kind of value.

``explore`` walks every order in which the requests of a few workers can arrive, with a limited number of repetitions
and departures put in anywhere, as ``test_gate.py`` does for training.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, SOON, Job, run_job
from inside import parked, reductions_of

from fleet import Fleet, StrategyFactory
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    JobAbortedError,
    NotInitializedError,
    PlanMismatchError,
    ProtocolError,
    StateError,
)
from fleet.numeric import values as values_module
from fleet.numeric.reduction import (
    BARRIER,
    CARRIED,
    OPS,
    Asked,
    Close,
    Effect,
    Forget,
    Gatherings,
    Refuse,
    Tell,
    result_dtype,
)
from fleet.numeric.tensors import WireTensor
from fleet.ps.consistency import MODES
from fleet.ps.server import reductions
from fleet.ps.server.service import Service
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.wire_errors import error_reply
from fleet.ps.worker.describe import describe
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import Strategy

MEET = Asked(BARRIER)
SUM = Asked("sum", "float32", (2,))
PATIENCE_S = 30.0


# --- Every order ------------------------------------------------------------------------------------------------------


class Violation(AssertionError):
    """Some order of events broke a property; the message tells which order."""


@dataclass(frozen=True)
class WorkerState:
    came: int = 0
    told: int = 0
    left: bool = False


@dataclass
class State:
    made: Gatherings
    workers: tuple[WorkerState, ...]
    parked: frozenset[tuple[int, int, int]]  # (worker, number, repetition)
    outcomes: frozenset[tuple[int, Effect]]
    repeats_left: int
    departures_left: int

    def key(self) -> Hashable:
        made = {name: frozen(value) for name, value in vars(self.made).items()}
        rest = (self.workers, self.parked, self.outcomes, self.repeats_left, self.departures_left)
        return (tuple(made.items()), rest)


def frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, frozen(item)) for key, item in value.items())
    return frozenset(value) if isinstance(value, set) else value


@dataclass
class Explorer:
    """All orders of workers that each go through their program, one gathering after the other."""

    programs: tuple[tuple[Asked, ...], ...]
    repeats: int = 0
    departures: int = 0
    gatherings: type[Gatherings] = Gatherings
    trace: list[tuple[str, int, int]] = field(default_factory=list)
    seen: set[Hashable] = field(default_factory=set)
    closed: set[tuple[int, ...]] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    endings: int = 0

    def explore(self) -> Explorer:
        workers = len(self.programs)
        made = self.gatherings(range(workers))
        self.walk(State(made, (WorkerState(),) * workers, frozenset(), frozenset(), self.repeats, self.departures))
        return self

    def walk(self, state: State) -> None:
        key = state.key()
        if key in self.seen:
            return
        self.seen.add(key)
        due = list(self.due(state))
        if not due:
            self.check_ending(state)
        for event in [*due, *self.mishaps(state)]:
            self.trace.append(event)
            self.walk(self.after(state, event))
            self.trace.pop()

    def due(self, state: State) -> Iterator[tuple[str, int, int]]:
        for worker, at in enumerate(state.workers):
            if not at.left and at.told == at.came < len(self.programs[worker]):
                yield "come", worker, at.came + 1

    def mishaps(self, state: State) -> Iterator[tuple[str, int, int]]:
        for worker, at in enumerate(state.workers):
            if not at.left and state.departures_left:
                yield "leave", worker, 0
            if not at.left and state.repeats_left:
                # Any former request may come again late; the newest one is what a worker asks when no answer came.
                for number in range(1, at.came + 1):
                    yield "repeat", worker, number

    def after(self, before: State, event: tuple[str, int, int]) -> State:
        kind, worker, number = event
        state = copy.copy(before)
        state.made = copy.deepcopy(before.made)
        if kind == "leave":
            state.departures_left -= 1
            self.change(state, worker, left=True)
            state.parked = frozenset(each for each in state.parked if each[0] != worker)
            self.carry_out(state, state.made.leave(worker))
        else:
            asked = self.programs[worker][number - 1]
            repetition = 0
            if kind == "come":
                self.change(state, worker, came=number)
                effects = state.made.come(worker, number, asked)
            else:
                state.repeats_left -= 1
                repetition = state.repeats_left + 1
                other = MEET if asked is SUM else SUM  # what a repetition asks for is not looked at either
                effects = state.made.come(worker, number, other)
                if effects or frozen(vars(state.made)) != frozen(vars(before.made)):
                    self.fail("a repetition changed something", effects)
            ticket = (worker, number, repetition)
            state.parked |= {ticket}
            self.carry_out(state, effects + state.made.wait(ticket, worker, number))
        self.check_between(state)
        return state

    @staticmethod
    def change(state: State, worker: int, **changes: Any) -> None:
        changed = replace(state.workers[worker], **changes)
        state.workers = (*state.workers[:worker], changed, *state.workers[worker + 1 :])

    def carry_out(self, state: State, effects: list[Effect]) -> None:
        for effect in effects:
            known = {number for number, _ in state.outcomes}
            if isinstance(effect, Close | Refuse) and effect.number in known:
                self.fail("a gathering was decided twice", effect)
            if isinstance(effect, Close):
                came = tuple(worker for worker, at in enumerate(state.workers) if at.came >= effect.number)
                live = {worker for worker, at in enumerate(state.workers) if not at.left}
                if effect.contributors != came or not live <= set(came) or not live:
                    self.fail("a gathering closed without somebody", effect)
                asked = {self.programs[worker][effect.number - 1] for worker in came}
                if len(asked) > 1:
                    self.fail("different things were gathered", effect)
                self.closed.add(effect.contributors)
                state.outcomes |= {(effect.number, effect)}
            elif isinstance(effect, Refuse):
                pairs = [effect.one, effect.other]
                if any(self.programs[worker][effect.number - 1] != asked for worker, asked in pairs):
                    self.fail("a refusal tells what nobody asked", effect)
                if effect.one[1] == effect.other[1] or effect.one[0] == effect.other[0]:
                    self.fail("a refusal without a difference", effect)
                self.refused.add(effect.number)
                state.outcomes |= {(effect.number, effect)}
            elif isinstance(effect, Tell):
                assert isinstance(effect.ticket, tuple)
                worker, number, repetition = effect.ticket
                if effect.ticket not in state.parked or number != effect.number or state.workers[worker].left:
                    self.fail("an answer to nobody", effect)
                state.parked -= {effect.ticket}
                if state.workers[worker].came == number and number not in known:
                    self.fail("an answer before anything is decided, or after it is forgotten", effect)
                if not repetition:
                    self.change(state, worker, told=number)
            else:
                if any(not at.left and at.came <= effect.number for at in state.workers):
                    self.fail("forgotten while somebody could ask", effect)
                state.outcomes = frozenset(each for each in state.outcomes if each[0] != effect.number)

    def check_between(self, state: State) -> None:
        live = [(worker, at) for worker, at in enumerate(state.workers) if not at.left]
        kept = {number for number, _ in state.outcomes}
        if any(number < min((at.came for _, at in live), default=99) for number in kept):
            self.fail("kept for nobody", kept)
        told = [(number, missing) for number, _, missing in state.made.lacking()]
        begun = {at.came for _, at in live} - kept - {0}
        if {number for number, _ in told} != begun:
            self.fail("a wait is explained wrongly", told)
        for number, missing in told:
            if not missing or list(missing) != [worker for worker, at in live if at.came < number]:
                self.fail("a wait is explained wrongly", told)

    def check_ending(self, state: State) -> None:
        self.endings += 1
        live = [at for at in state.workers if not at.left]
        if state.parked or any(at.told < len(self.programs[0]) for at in live):
            self.fail("deadlock", state.parked)
        if len(state.outcomes) > 1:
            self.fail("more is kept than the newest", state.outcomes)

    def fail(self, what: str, about: object = "") -> NoReturn:
        raise Violation(f"{what}: {about} after: {self.trace}")


@pytest.mark.parametrize("repeats", [0, 1, 2])
@pytest.mark.parametrize(("workers", "departures"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)])
def test_every_order(workers: int, departures: int, repeats: int) -> None:
    walked = Explorer(((SUM, MEET, SUM)[: 4 - max(workers - 1, 1)],) * workers, repeats, departures).explore()
    assert walked.endings
    assert not walked.refused
    sizes = range(max(1, workers - departures), workers + 1)
    assert walked.closed == {group for size in sizes for group in itertools.combinations(range(workers), size)}


@pytest.mark.parametrize("departures", [0, 1, 2])
@pytest.mark.parametrize(
    "programs",
    [
        ((SUM, MEET), (MEET, SUM)),
        ((SUM, MEET), (replace(SUM, shape=(3,)), MEET)),
        ((SUM, MEET), (replace(SUM, dtype="int64"), MEET), (SUM, MEET)),
        ((MEET, SUM, MEET), (MEET, replace(SUM, op="max"), MEET), (MEET, SUM, MEET)),
        ((MEET, SUM), (SUM, MEET), (replace(SUM, op="min"), SUM)),
    ],
    ids=["other calls", "other shapes", "other types", "other ops", "three ways"],
)
@pytest.mark.pairs(5)
def test_every_order_of_workers_that_differ(programs: tuple[tuple[Asked, ...], ...], departures: int) -> None:
    """Those who differ are all refused, whoever comes later too, and the next gathering is as good as any."""
    walked = Explorer(programs, 1, departures).explore()
    assert walked.endings
    differing = {number for number, asked in enumerate(zip(*programs, strict=True), 1) if len(set(asked)) > 1}
    assert walked.refused == differing
    assert walked.closed or len(differing) == len(programs[0])


class ClosesEarly(Gatherings):
    def _absent(self, number: int) -> tuple[int, ...]:
        return super()._absent(number)[1:]


class CountsRepetitions(Gatherings):
    def come(self, worker: int, number: int, asked: Asked) -> list[Effect]:
        if number <= self.reached(worker) and number in self._open:
            self._open[number][worker] = asked
        return super().come(worker, number, asked)


class WaitsForTheGone(Gatherings):
    def leave(self, worker: int) -> list[Effect]:
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return self._effects()


class DropsWhatTheGoneBrought(Gatherings):
    def leave(self, worker: int) -> list[Effect]:
        for here in self._open.values():
            here.pop(worker, None)
        return super().leave(worker)


class ForgetsAtOnce(Gatherings):
    def _effects(self) -> list[Effect]:
        effects = super()._effects()
        over = sorted(self._decided)
        self._decided.clear()
        return [*effects, *(Forget(number) for number in over)]


class ForgetsNothing(Gatherings):
    def _effects(self) -> list[Effect]:
        return [effect for effect in super()._effects() if not isinstance(effect, Forget)]


class TakesEverything(Gatherings):
    def come(self, worker: int, number: int, asked: Asked) -> list[Effect]:
        return super().come(worker, number, MEET)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (ClosesEarly, "without somebody|explained wrongly"),
        (CountsRepetitions, "a repetition changed"),
        (WaitsForTheGone, "deadlock|explained wrongly|kept for nobody"),
        (DropsWhatTheGoneBrought, "without somebody"),
        (ForgetsAtOnce, "forgotten"),
        (ForgetsNothing, "kept for nobody"),
        (TakesEverything, "different things"),
    ],
)
def test_the_exploration_finds_what_is_broken(broken: type[Gatherings], words: str) -> None:
    def explore() -> None:
        for programs in [((SUM, MEET),) * 3, ((SUM, MEET), (MEET, SUM))]:
            Explorer(programs, 1, 1, broken).explore()

    with pytest.raises(Violation, match=words):
        explore()


def test_no_worker_skips_a_gathering() -> None:
    made = Gatherings(range(2))
    made.come(0, 1, MEET)
    with pytest.raises(ProtocolError, match=r"worker 0 skipped a gathering; expected number 2; got number 3"):
        made.come(0, 3, MEET)
    assert made.reached(0) == 1


def test_one_that_joins_while_others_wait_is_waited_for() -> None:
    made = Gatherings(range(2))
    assert made.come(0, 1, MEET) == []
    made.join(7)
    assert made.come(1, 1, MEET) == []
    assert made.lacking() == [(1, MEET, (7,))]
    assert made.come(7, 1, MEET) == [Close(1, (0, 1, 7))]
    made.join(8)
    assert made.reached(8) == 1, "what is decided is over"


# --- Values -----------------------------------------------------------------------------------------------------------


def joined(fleet: Fleet) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
    fleet.init_worker()
    return optimizer


def in_job(body: Callable[[Fleet, int], Any], workers: int = 2, servers: int = 1, **options: Any) -> list[Any]:
    def joined_body(fleet: Fleet, worker: int) -> Any:
        joined(fleet)
        return body(fleet, worker)

    return run_job(joined_body, workers, servers, **options)


SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4)]
NUMPY = [name for name in CARRIED if name != "bfloat16"]


def tensor_of(dtype: str, shape: tuple[int, ...], worker: int) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(17 + worker), dtype=torch.float64)
    if dtype == "bool":
        return drawn > 0.5
    unsigned = dtype == "uint8"
    return (drawn * 100 - (0 if unsigned else 50)).to(getattr(torch, dtype))


def expected(op: str, dtype: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """What torch makes of it, in the same order."""
    if op in ("max", "min"):
        wide = torch.stack([each.to(torch.float64) for each in tensors])
        return (wide.amax(0) if op == "max" else wide.amin(0)).to(tensors[0].dtype)
    exact = CARRIED[dtype] == "int64"
    work = torch.int64 if exact else torch.float32 if "16" in dtype else getattr(torch, dtype)
    total = tensors[0].to(work)
    for each in tensors[1:]:
        total = total + each.to(work)
    if op == "mean":
        total = (total.to(torch.float64) if exact else total) / len(tensors)
    return total.to(getattr(torch, result_dtype(op, dtype)))


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.pairs(6)
def test_every_element_type_and_shape(op: str, workers: int, servers: int) -> None:
    def body(fleet: Fleet, worker: int) -> list[Any]:
        got: list[Any] = []
        for dtype, shape in itertools.product(CARRIED, SHAPES):
            mine = tensor_of(dtype, shape, worker)
            before = mine.clone()
            got.append(fleet.all_reduce_worker(mine, op=op))
            if dtype in NUMPY:
                got.append(fleet.all_reduce_worker(mine.numpy(), op=op))
            assert torch.equal(mine, before)
        return got

    results = in_job(body, workers, servers)
    for got in results:
        given = iter(got)
        for dtype, shape in itertools.product(CARRIED, SHAPES):
            want = expected(op, dtype, [tensor_of(dtype, shape, worker) for worker in range(workers)])
            tensor = next(given)
            assert isinstance(tensor, torch.Tensor)
            assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape)
            assert torch.equal(tensor, want), (dtype, shape)
            if dtype in NUMPY:
                array = next(given)
                assert isinstance(array, np.ndarray)
                assert (array.dtype, array.shape) == (want.numpy().dtype, want.shape)
                np.testing.assert_array_equal(array, want.numpy())


def test_numbers_come_back_as_numbers() -> None:
    def body(fleet: Fleet, worker: int) -> list[Any]:
        values = [worker + 1, worker + 0.5, worker == 0, np.float32(worker), np.int8(worker)]
        return [[fleet.all_reduce_worker(value, op=op) for value in values] for op in OPS]

    for sums, means, highest, lowest in in_job(body):
        assert sums == [3, 2.0, 1, 1.0, 1]
        assert means == [1.5, 1.0, 0.5, 0.5, 0.5]
        assert highest == [2, 1.5, True, 1.0, 1]
        assert lowest == [1, 0.5, False, 0.0, 0]
        assert [type(each) for each in sums] == [int, float, int, np.float32, np.int64]
        assert [type(each) for each in means] == [float, float, float, np.float32, np.float64]
        assert [type(each) for each in highest] == [int, float, bool, np.float32, np.int8]


def test_sums_of_integers_are_exact_and_narrow_floats_add_up_in_float32() -> None:
    def body(fleet: Fleet, worker: int) -> tuple[Any, ...]:
        ints = fleet.all_reduce_worker(np.array([2**53, -(2**62)]) + worker)
        bools = fleet.all_reduce_worker(torch.ones(4, dtype=torch.bool))
        small = fleet.all_reduce_worker(np.full(3, 100, np.int8))
        # 2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16: adding one by one would lose both.
        half = fleet.all_reduce_worker(torch.tensor([2048.0 if worker == 0 else 1.0]).half())
        brain = fleet.all_reduce_worker(torch.tensor([256.0 if worker == 0 else 1.0]).bfloat16())
        high = fleet.all_reduce_worker(torch.tensor([60000.0]).half(), op="mean")
        return ints.tolist(), bools.tolist(), small.tolist(), half.item(), brain.item(), high.item()

    for got in in_job(body, 3):
        assert got == ([3 * 2**53 + 3, -3 * 2**62 + 3 + 2**64], [3] * 4, [300] * 3, 2050.0, 258.0, 60000.0)


def test_the_mean_of_large_integers_is_numpys() -> None:
    largest = np.array([2**62, -(2**63), 2**63 - 1, 5])

    def body(fleet: Fleet, worker: int) -> tuple[Any, ...]:
        brought = largest - np.array([worker, 0, worker, -worker])
        return brought, fleet.all_reduce_worker(brought, op="mean"), fleet.all_reduce_worker(2**63 - 1, op="mean")

    brought, means, numbers = zip(*in_job(body, 3), strict=True)
    for mean, number in zip(means, numbers, strict=True):
        np.testing.assert_array_equal(mean, np.mean(brought, axis=0))
        assert number == 2.0**63


def test_nan_and_infinity_reach_the_result() -> None:
    def body(fleet: Fleet, worker: int) -> list[Any]:
        values = np.array([[np.nan, 1.0, np.inf, -np.inf], [1.0, np.nan, np.inf, np.inf]][worker])
        return [fleet.all_reduce_worker(values.astype(t), op=op) for t in ("float16", "float64") for op in OPS]

    for got in in_job(body):
        for sums, means, highest, lowest in (got[:4], got[4:]):
            for each in (sums, means, highest, lowest):
                assert np.isnan(each[:2]).all()
            assert np.isposinf(sums[2])
            assert np.isnan(sums[3])
            assert (highest[3], lowest[3]) == (np.inf, -np.inf)


def test_what_is_strided_swapped_or_needs_a_gradient() -> None:
    base = np.arange(24.0).reshape(4, 6)

    def body(fleet: Fleet, worker: int) -> list[Any]:
        leaf = torch.nn.Parameter(torch.from_numpy(base[:, ::2].copy()))
        views = [base.T, base[::-1, 1::2], base.astype(">f8"), torch.from_numpy(base).t(), leaf]
        return [fleet.all_reduce_worker(each) for each in views]

    for got in in_job(body):
        for each, want in zip(got, [base.T, base[::-1, 1::2], base, base.T, base[:, ::2]], strict=True):
            assert not getattr(each, "requires_grad", False)
            np.testing.assert_array_equal(each, 2 * want)


def test_the_result_is_written_where_it_is_wanted() -> None:
    def body(fleet: Fleet, worker: int) -> list[Any]:
        mine = np.array([1.0, worker])
        assert fleet.all_reduce_worker(mine, mine) is mine
        tensor = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        assert fleet.all_reduce_worker(mine, tensor[0].detach()).tolist() == [4.0, 2.0]
        column = np.zeros((2, 3), np.int64)
        fleet.all_reduce_worker(torch.tensor([True, worker == 0]), column[:, 1])
        swapped = fleet.all_reduce_worker(np.float64(3), np.zeros((), ">f8"))
        return [mine.tolist(), tensor.tolist(), column.tolist(), swapped.item()]

    for got in in_job(body):
        assert got == [[2.0, 1.0], [[4.0, 2.0], [0.0, 0.0]], [[0, 2, 0], [0, 1, 0]], 6.0]


def test_many_rows_of_gatherings_of_a_large_value() -> None:
    def body(fleet: Fleet, worker: int) -> float:
        value = np.full(1 << 18, worker + 1, np.float32)
        for _ in range(8):
            value = fleet.all_reduce_worker(value, op="mean")
        return float(value[-1])

    assert in_job(body, 3, 2) == [2.0] * 3


# --- Refused before anything is sent ----------------------------------------------------------------------------------


def alone() -> Fleet:
    fleet = Fleet(environ={})
    fleet.init()
    joined(fleet)
    return fleet


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            (np.zeros(2), None, "median"),
            ConfigurationError,
            "op is unknown; expected sum, mean, max, min; got 'median'",
        ),
        ((np.zeros(2), None, BARRIER), ConfigurationError, "op is unknown"),
        ((np.zeros(2), None, None), ConfigurationError, "op is unknown"),
        (([1.0, 2.0],), ArgumentTypeError, "this cannot be reduced; expected a numpy array.*got list"),
        ((None,), ArgumentTypeError, "got NoneType"),
        (("three",), ArgumentTypeError, "got str"),
        ((1j,), ArgumentTypeError, "got complex"),
        ((np.zeros(2, np.complex64),), ArgumentTypeError, "element type.*float64.*bool; got complex64"),
        ((np.zeros(2, np.uint32),), ArgumentTypeError, "got uint32"),
        ((np.array([object()]),), ArgumentTypeError, "got object"),
        ((np.array(["a"]),), ArgumentTypeError, "got str"),
        ((np.ma.masked_array([1.0], [True]),), ArgumentTypeError, "masked array"),
        ((torch.zeros(2, dtype=torch.complex64),), ArgumentTypeError, "got complex64"),
        ((torch.eye(2).to_sparse(),), ArgumentTypeError, "sparse.*to_dense"),
        ((2**63,), ConfigurationError, "does not fit in 64 bits"),
        ((np.zeros(2), np.zeros(3)), ConfigurationError, r"output.*expected float64 \(2,\); got float64 \(3,\)"),
        ((np.zeros(2), torch.zeros(2)), ConfigurationError, r"output.*expected float64 \(2,\); got float32 \(2,\)"),
        ((np.zeros(2, int), np.zeros(2, int), "mean"), ConfigurationError, "expected float64.*got int64"),
        ((torch.ones(2) > 0, torch.ones(2) > 0), ConfigurationError, "expected int64.*got bool"),
        ((np.zeros(2), [0.0, 0.0]), ArgumentTypeError, "output is of the wrong type.*got list"),
        ((np.zeros(2), np.broadcast_to(np.zeros(1), 2)), ConfigurationError, "output is read-only"),
    ],
)
def test_what_cannot_be_reduced(arguments: tuple[Any, ...], error: type[FleetError], words: str) -> None:
    fleet = alone()
    try:
        with pytest.raises(error, match=rf"all_reduce_worker\(\): .*{words}"):
            fleet.all_reduce_worker(*arguments)
        assert fleet.all_reduce_worker(1) == 1
    finally:
        fleet.stop_worker()


def test_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "MAX_BYTES", 64)
    fleet = alone()
    try:
        assert fleet.all_reduce_worker(np.ones(8, bool)).sum() == 8
        with pytest.raises(ConfigurationError, match=r"too large; expected at most 64 bytes, as int64; got 72 bytes"):
            fleet.all_reduce_worker(np.ones(9, bool))
        monkeypatch.setattr(reductions, "MAX_BYTES", 32)
        with pytest.raises(ProtocolError, match="too large; expected at most 32 bytes; got 64"):
            fleet.all_reduce_worker(np.ones(8, bool))
    finally:
        fleet.stop_worker()


CALLS: dict[str, Callable[[Fleet], Any]] = {
    "barrier_worker": lambda fleet: fleet.barrier_worker(),
    "all_reduce_worker": lambda fleet: fleet.all_reduce_worker("not even a value", op="nor an op"),
    "metrics.sum": lambda fleet: fleet.metrics.sum("nor this"),
    "metrics.auc": lambda fleet: fleet.metrics.auc(2, 3),
    "metrics.mae": lambda fleet: fleet.metrics.mae([1], 3),
    "metrics.acc": lambda fleet: fleet.metrics.acc(2, 3),
    "metrics.Auc": lambda fleet: fleet.metrics.Auc(),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_at_the_wrong_time_or_place(name: str) -> None:
    call = CALLS[name]
    fleet = Fleet(environ={}, network=LoopbackNetwork())
    with pytest.raises(NotInitializedError, match=rf"fleet\.{name}\(\) came before fleet.init\(\)"):
        call(fleet)
    fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 2, ["s:1"]))
    with pytest.raises(NotInitializedError, match=rf"{name}\(\) came before fleet.init_worker\(\)"):
        call(fleet)
    fleet.init(UserDefinedRoleMaker(0, Role.SERVER, 2, ["s:1"]))
    with pytest.raises(StateError, match=rf"{name}\(\) was called on a server"):
        call(fleet)
    fleet = alone()
    fleet.stop_worker()
    with pytest.raises(StateError, match=rf"{name}\(\) came after the job ended"):
        call(fleet)


# --- In a job ---------------------------------------------------------------------------------------------------------


def test_alone_everything_works_at_once() -> None:
    fleet = alone()
    try:
        fleet.barrier_worker()
        assert [fleet.all_reduce_worker(7.0, op=op) for op in OPS] == [7.0] * 4
        fleet.barrier_worker()
    finally:
        fleet.stop_worker()


def test_nobody_passes_a_barrier_before_all_have_come() -> None:
    came: list[int] = []

    def body(fleet: Fleet, worker: int) -> list[int]:
        seen = []
        for number in range(1, 21):
            came.append(worker)
            fleet.barrier_worker()
            seen.append(len(came) - 3 * number)
            fleet.barrier_worker()
        return seen

    assert in_job(body, 3, 2) == [[0] * 20] * 3


class Late(FaultyNetwork):
    """Gatherings reach the server in the order that ``order`` says, whoever comes first."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__(LoopbackNetwork())
        self.order = order
        self.turn = threading.Condition()
        self.arrived: list[int] = []

    def listen(self, endpoint: Endpoint, handler: Any) -> Any:
        def ordered(frame: Frame, respond: Any) -> None:
            if frame.message.WhichOneof("kind") != "gather":
                handler(frame, respond)
                return
            with self.turn:
                worker = frame.message.worker
                assert self.turn.wait_for(lambda: self.order[len(self.arrived) % len(self.order)] == worker, PATIENCE_S)
                handler(frame, respond)
                self.arrived.append(worker)
                self.turn.notify_all()

        return super().listen(endpoint, ordered)


def test_the_bits_do_not_depend_on_who_comes_first() -> None:
    def body(fleet: Fleet, worker: int) -> bytes:
        drawn = torch.randn(1000, generator=torch.Generator().manual_seed(worker)) * 10.0**worker
        sums = [fleet.all_reduce_worker(drawn.to(dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
        return b"".join(each.to(torch.float64).numpy().tobytes() for each in sums)

    found = set()
    for order in itertools.permutations(range(3)):
        network = Late(order)
        found |= set(in_job(body, 3, network=network))
        assert tuple(network.arrived) == order * 3
    assert len(found) == 1


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE, Action.DELAY])
@pytest.mark.parametrize("worker", [0, 1])
def test_requests_that_get_lost_or_come_twice(action: Action, worker: int) -> None:
    faults = [Fault(action, kind="gather", worker=worker, skip=skip, times=2, delay_s=0.05) for skip in (0, 3)]
    network = FaultyNetwork(LoopbackNetwork(), *faults)

    def body(fleet: Fleet, me: int) -> list[float]:
        got = []
        for number in range(4):
            got.append(fleet.all_reduce_worker(float(me * 10 + number)))
            fleet.barrier_worker()
        return got

    assert in_job(body, 2, network=network) == [[10.0, 12.0, 14.0, 16.0]] * 2
    assert [struck[:2] for struck in network.struck] == [(action, "gather")] * 4


def test_a_gathering_whose_answer_never_came_is_finished_by_the_next_call() -> None:
    """As a step is: the server has it, the worker gave up; what was brought counts, and later changes to it do not."""
    network = FaultyNetwork(LoopbackNetwork())

    def body(fleet: Fleet, worker: int) -> list[Any]:
        value = np.array([1.0 + worker])
        if worker == 0:
            lost = Fault(Action.DROP_REQUEST, kind="gather", worker=0, times=None)
            network.add(lost)
            with pytest.raises(DeadlineError, match=r"all_reduce 1 \(sum\)"):
                fleet.all_reduce_worker(value)
            value[:] = 100.0
            network.clear()
        else:
            assert fleet.all_reduce_worker(value).tolist() == [3.0]
        return [fleet.all_reduce_worker(5), fleet.all_reduce_worker(worker, op="max")]

    environ = {**PATIENT, "FLAGS_rpc_retry_times": "0", "FLEET_HEARTBEAT_S": "0.01"}
    assert in_job(body, 2, network=network, environ=environ) == [[10, 1]] * 2


def test_whoever_stops_is_not_waited_for() -> None:
    def body(fleet: Fleet, worker: int) -> list[float]:
        got = [fleet.all_reduce_worker(1.0)]
        for turn in range(1, worker + 1):
            got.append(fleet.all_reduce_worker(1.0, op=["sum", "mean"][turn % 2]))
            fleet.barrier_worker()
        return got

    assert in_job(body, 3) == [[3.0], [3.0, 1.0], [3.0, 1.0, 1.0]]


def test_what_somebody_brought_who_was_given_up_on_stays_in() -> None:
    """Worker 2 comes, and is silent from then on; worker 1 comes long after that."""
    network = FaultyNetwork(LoopbackNetwork())
    gone = threading.Event()

    def body(fleet: Fleet, worker: int) -> Any:
        if worker == 2:
            network.add(Fault(Action.SILENCE, kind="beat", worker=2, times=None))
            network.add(Fault(Action.SILENCE, kind="abort", worker=2, times=None))
        if worker == 1:
            assert gone.wait(PATIENCE_S)
        try:
            return fleet.all_reduce_worker(10.0**worker)
        finally:
            gone.set() if worker == 2 else None

    environ = SOON

    def whole(fleet: Fleet, worker: int) -> Any:
        joined(fleet)
        return body(fleet, worker)

    job = Job(whole, 3, network=network, environ=environ)
    job.join(job.start())
    assert (job.results.get(0), job.results.get(1)) == (111.0, 111.0)
    assert set(job.errors) == {"worker 2"}


def test_a_barrier_lets_go_when_the_one_it_waits_for_is_given_up_on() -> None:
    network = FaultyNetwork(LoopbackNetwork())
    over = threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        joined(fleet)
        if worker == 2:
            for kind in ("beat", "abort", "bye"):
                network.add(Fault(Action.SILENCE, kind=kind, worker=2, times=None))
            assert over.wait(PATIENCE_S)
            raise RuntimeError("it is gone")
        fleet.barrier_worker()
        assert fleet.all_reduce_worker(1) == 2
        over.set()

    environ = SOON
    job = Job(body, 3, network=network, environ=environ)
    job.join(job.start())
    assert set(job.errors) == {"worker 2"}


def test_workers_that_ask_for_different_things_are_both_told_and_can_go_on() -> None:
    def body(fleet: Fleet, worker: int) -> list[str]:
        asks: list[list[Callable[[], Any]]] = [
            [lambda: fleet.barrier_worker(), lambda: fleet.all_reduce_worker(np.zeros(2, np.float32))],
            [lambda: fleet.all_reduce_worker(1.0, op="max"), lambda: fleet.all_reduce_worker(1.0)],
            [lambda: fleet.all_reduce_worker(torch.zeros(2, 3)), lambda: fleet.all_reduce_worker(torch.zeros(3, 2))],
            [lambda: fleet.all_reduce_worker(np.int32(1)), lambda: fleet.all_reduce_worker(np.int64(1))],
        ]
        told = []
        for ask in asks:
            with pytest.raises(PlanMismatchError) as caught:
                ask[worker]()
            told.append(str(caught.value))
            assert fleet.all_reduce_worker(2) == 4
        return told

    first, second = in_job(body)
    assert first == second
    assert [text.split("; got ")[1].split(". ")[0] for text in first] == [
        "worker 0: barrier; worker 1: all_reduce sum of float32 (2,)",
        "worker 0: all_reduce max of float64 (); worker 1: all_reduce sum of float64 ()",
        "worker 0: all_reduce sum of float32 (2, 3); worker 1: all_reduce sum of float32 (3, 2)",
        "worker 0: all_reduce sum of int32 (); worker 1: all_reduce sum of int64 ()",
    ]


def test_a_third_worker_hears_of_the_difference_too_however_late() -> None:
    refused = threading.Barrier(3)

    def body(fleet: Fleet, worker: int) -> str:
        if worker == 2:
            refused.wait(PATIENCE_S)
        with pytest.raises(PlanMismatchError) as caught:
            fleet.all_reduce_worker(1) if worker else fleet.barrier_worker()
        if worker < 2:
            refused.wait(PATIENCE_S)
        assert fleet.all_reduce_worker(worker) == 3
        return str(caught.value)

    told = in_job(body, 3)
    assert len(set(told)) == 1
    assert "worker 0: barrier; worker 1: all_reduce sum of int64 ()" in told[0]


def test_a_failing_worker_ends_the_barrier_of_the_others() -> None:
    def body(fleet: Fleet, worker: int) -> None:
        joined(fleet)
        fleet.barrier_worker()
        if worker == 1:
            raise ZeroDivisionError("in the loop")
        fleet.barrier_worker()

    job = Job(body, 3, 2)
    job.join(job.start())
    assert isinstance(job.errors.pop("worker 1"), ZeroDivisionError)
    assert set(job.errors) == {"worker 0", "worker 2", "server 0", "server 1"}
    for error in job.errors.values():
        assert isinstance(error, JobAbortedError)
        assert "worker 1 failed" in str(error)
        assert "in the loop" in str(error)


def test_a_server_that_cannot_reduce_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(*_: object) -> NoReturn:
        raise MemoryError("none left")

    monkeypatch.setattr(reductions, "reduced", reduce)

    def body(fleet: Fleet, worker: int) -> None:
        with pytest.raises(FleetError, match=r"could not reduce what the workers brought.*none left"):
            fleet.all_reduce_worker(1)
        fleet.barrier_worker()

    in_job(body)


@pytest.mark.parametrize("servers", [1, 2])
def test_in_the_midst_of_training(servers: int) -> None:
    def body(fleet: Fleet, worker: int) -> tuple[list[float], list[float]]:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        losses = []
        for step in range(5):
            loss = (weight * (worker + step)).sum()
            losses.append(fleet.all_reduce_worker(float(loss.detach()), op="mean"))
            optimizer.minimize(loss)
            if step % 2:
                fleet.barrier_worker()
        return weight.tolist(), losses

    weight, want, losses = 0.0, [], []
    for step in range(5):
        losses.append(3 * weight * (step + 1))
        weight -= step + 1
        want = [weight] * 3
    assert run_job(body, 3, servers) == [(want, losses)] * 3


@pytest.mark.parametrize("mode", sorted(MODES))
def test_in_every_mode(mode: str) -> None:
    def body(fleet: Fleet, worker: int) -> list[Any]:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), Strategy(mode, staleness=1))
        fleet.init_worker()
        got = []
        for step in range(4):
            optimizer.minimize(weight.sum())
            got.append(fleet.all_reduce_worker(step + worker, op="max"))
            fleet.barrier_worker()
        return got

    assert run_job(body, 2, 2) == [[1, 2, 3, 4]] * 2


def test_over_sockets(free_endpoints: Callable[[int], list[str]]) -> None:
    """More workers wait than the server has threads."""
    from fleet.ps.wire.grpc_server import GrpcNetwork

    def body(fleet: Fleet, worker: int) -> Any:
        fleet.barrier_worker()
        return fleet.all_reduce_worker(np.full(1 << 19, worker, np.float32))[-1]

    assert in_job(body, 16, network=GrpcNetwork(threads=4), endpoints=free_endpoints(1)) == [120.0] * 16


# --- The server -------------------------------------------------------------------------------------------------------


class Line:
    """A service and hand-made requests to it; ``replies`` has what came back, by worker."""

    def __init__(self, workers: int = 2) -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        self.description = describe([torch.optim.SGD([weight], lr=1.0)], None, Strategy(), 1, workers)
        self.service = Service(Endpoint("s", 1), ProcessSettings(), SystemClock())
        self.replies: list[tuple[int, Frame]] = []

    def say(self, worker: int, tensors: list[WireTensor] | None = None, **kind: Any) -> None:
        request = pb.Request(worker=worker, incarnation=worker + 1, **kind)
        try:
            self.service.handle(Frame(request, tensors or []), lambda frame: self.replies.append((worker, frame)))
        except FleetError as error:
            self.replies.append((worker, error_reply(error)))

    def hello(self, worker: int) -> None:
        from fleet.plan.plan import make_plan

        spec, options = self.description.spec, self.description.options()
        fingerprint = make_plan(spec).fingerprint
        hello = pb.Hello(spec=spec.to_json(), fingerprint=fingerprint, endpoints=["s:1"], options=options)
        hello.label = f"host{worker}:1"
        self.say(worker, hello=hello)
        assert not self.taken()[0][1].message.HasField("error")

    def taken(self) -> list[tuple[int, Frame]]:
        replies, self.replies = self.replies, []
        return replies


def test_a_barrier_comes_before_the_initial_values_and_is_explained() -> None:
    line = Line()
    line.hello(1)
    line.say(1, gather=pb.Gather(number=1, op=BARRIER))
    assert line.taken() == []
    assert line.service.explain().startswith("barrier 1: waiting for worker 0, not there yet; initial values: waiting")
    line.hello(0)
    assert "barrier 1: waiting for worker 0 (host0:1), last heard 0.0 s ago; initial values" in line.service.explain()
    line.say(0, gather=pb.Gather(number=1, op=BARRIER))
    assert sorted(worker for worker, _ in line.taken()) == [0, 1]
    line.say(0, ready=pb.Ready())
    assert line.service.explain().startswith("round 1: waiting for worker 0 (host0:1)")
    value = WireTensor.of(np.ones(1))
    line.say(0, [value], gather=pb.Gather(number=2, op="max", dtype="float64"))
    assert line.service.explain().startswith("all_reduce 2 (max): waiting for worker 1 (host1:1)")
    assert "round" not in line.service.explain()


def test_a_round_and_a_barrier_that_wait_are_both_named() -> None:
    """Worker 2 has not come yet: it is not known that the two wait for each other."""
    line = Line(3)
    line.hello(0)
    line.hello(1)
    line.say(0, ready=pb.Ready())
    line.say(0, gather=pb.Gather(number=1, op=BARRIER))
    line.say(1, step=1, push=pb.Push(options=line.description.options(), present=b"\0"))
    assert [frame.message.error.what for _, frame in line.taken() if frame.message.HasField("error")] == []
    barrier, round_ = line.service.explain().split("; ")
    assert barrier.startswith("barrier 1: waiting for worker 1 (")
    assert round_.startswith("round 1: waiting for worker 0 (")
    line.hello(2)
    line.say(2, step=1, push=pb.Push(options=line.description.options(), present=b"\0"))
    told = [frame.message.error.what for _, frame in line.taken() if frame.message.HasField("error")]
    assert told == ["the workers wait for each other"] * 3


F32 = WireTensor.of(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("gather", "tensors", "words"),
    [
        ({"number": 1, "op": "median", "dtype": "float32"}, [F32], "unknown kind"),
        ({"number": 1, "op": "sum", "dtype": "float32"}, [], "needs one tensor"),
        ({"number": 1, "op": "sum", "dtype": "float32"}, [F32, F32], "needs one tensor"),
        ({"number": 1, "op": BARRIER}, [F32], "a barrier brings no tensor"),
        ({"number": 1, "op": "sum", "dtype": "int32"}, [F32], "another element type"),
        ({"number": 1, "op": "sum", "dtype": "object"}, [F32], "another element type"),
        ({"number": 1, "op": "sum"}, [F32], "another element type"),
        ({"number": 2, "op": BARRIER}, [], "skipped a gathering"),
    ],
)
def test_requests_that_contradict_themselves_concern_nobody_else(
    gather: dict[str, Any], tensors: list[WireTensor], words: str
) -> None:
    line = Line()
    line.hello(0)
    line.hello(1)
    line.say(0, tensors, gather=pb.Gather(**gather))
    ((_, told),) = line.taken()
    assert told.message.error.kind == "ProtocolError"
    assert words in told.message.error.what
    for worker in (0, 1):
        line.say(worker, gather=pb.Gather(number=1, op=BARRIER))
    assert [frame.message.HasField("error") for _, frame in line.taken()] == [False, False]


def test_a_request_that_is_too_late_for_its_result_is_told_so() -> None:
    line = Line(1)
    line.hello(0)
    for number in (1, 2, 2, 1, 0):
        line.say(0, gather=pb.Gather(number=number, op=BARRIER))
    assert [frame.message.error.what for _, frame in line.taken()] == [
        "",
        "",
        "",
        *["a gathering is over and forgotten"] * 2,
    ]


def test_a_repetition_brings_nothing_new() -> None:
    line = Line()
    line.hello(0)
    line.hello(1)
    for worker, value in [(0, 1.0), (0, 7.0), (1, 20.0), (0, 7.0), (1, 7.0)]:
        line.say(worker, [WireTensor.of(np.array(value))], gather=pb.Gather(number=1, op="sum", dtype="float64"))
    told = [(worker, float(frame.tensors[0].numpy())) for worker, frame in line.taken()]
    assert told == [(0, 21.0), (0, 21.0), (1, 21.0), (0, 21.0), (1, 21.0)]
    assert reductions_of(line.service)._brought == {}


def test_who_waits_hears_at_once_that_the_job_is_over() -> None:
    line = Line()
    line.hello(0)
    line.hello(1)
    line.say(0, gather=pb.Gather(number=1, op=BARRIER))
    line.say(1, abort=pb.Abort(reason="out of luck"))
    (waiting, told), (aborting, _) = line.taken()
    assert (waiting, aborting) == (0, 1)
    assert (told.message.error.kind, told.message.error.got) == ("JobAbortedError", "out of luck")


def test_nothing_is_kept_of_gatherings_that_are_over() -> None:
    line = Line()
    line.hello(0)
    line.hello(1)
    line.say(0, ready=pb.Ready())
    for number in range(1, 6):
        for worker in (0, 1):
            line.say(worker, [F32], gather=pb.Gather(number=number, op="sum", dtype="float32"))
    hall = reductions_of(line.service)
    assert (len(hall._outcomes), len(hall._ops), len(hall._brought)) == (1, 1, 0)
    line.say(0, [F32], gather=pb.Gather(number=6, op="sum", dtype="float32"))
    line.say(0, bye=pb.Bye())
    line.say(1, [F32], gather=pb.Gather(number=6, op="min", dtype="float32"))
    assert (len(hall._outcomes), len(hall._brought)) == (1, 0)
    line.say(1, bye=pb.Bye())
    assert (len(hall._outcomes), len(hall._ops), len(hall._brought)) == (0, 0, 0)
    assert line.service.ended.is_set()
    assert parked(line.service) == {}


@pytest.mark.parametrize("strategy", [None, StrategyFactory.create_ssp_strategy(0)], ids=["sync", "ssp"])
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_that_wait_for_each_other_are_told_so(servers: int, strategy: Strategy | None) -> None:
    """One has run out of data and meets the others; they are in a step that waits for it."""

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet_.init_worker()
        for _ in range(3 if worker else 2):
            optimizer.minimize(weight.sum())
        fleet_.barrier_worker()

    job = Job(body, 3, servers)
    job.join(job.start(), 30)
    for worker in range(3):
        error = job.errors[f"worker {worker}"]
        assert isinstance(error, JobAbortedError)
        assert "workers [0] in barrier 1, workers [1, 2] in step 3" in str(error)
