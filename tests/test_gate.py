"""The server half of every consistency mode, explored.

``explore`` walks every order in which the requests of a few workers can reach a gate, with a limited number of
repeated pushes and departures put in anywhere, and checks after every event what no order may break. A state that was
reached before is not walked again, so that all orders of three workers are a matter of seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from fleet.errors import ProtocolError
from fleet.ps.consistency import MODES
from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.auto import AutoGate
from fleet.ps.consistency.clock_gate import ClockGate
from fleet.ps.consistency.gate import (
    NO_RULES,
    Answer,
    Apply,
    ApplyBuffer,
    Buffer,
    Changed,
    Discard,
    Effect,
    Gate,
    Rules,
)
from fleet.ps.consistency.gba import GbaGate, GbaPolicy
from fleet.ps.consistency.policy import Mode
from fleet.ps.consistency.sync import SyncGate, SyncPolicy

STEPS = 3


class Violation(AssertionError):
    """Some order of events broke a property; the message tells which order."""


@dataclass(frozen=True)
class Ticket:
    """A waiting request: of which worker, after which of its steps, the original (0) or which repetition."""

    worker: int
    step: int
    repetition: int = 0


@dataclass(frozen=True)
class Event:
    kind: str
    worker: int
    step: int = 0


@dataclass(frozen=True)
class WorkerState:
    """A worker waits for its start version, then pushes a step and waits for what that step needs, and so on."""

    delivered: int
    waited: int
    applied: int
    parked: bool = False
    left: bool = False
    #: in a barrier
    resting: bool = False
    #: the version that it was answered with last, which its next gradient is computed on; and of each that waits
    token: int = 0
    tokens: tuple[int, ...] = ()


@dataclass
class State:
    gate: Gate
    workers: tuple[WorkerState, ...]
    parked: dict[Ticket, int]
    applied: int
    repeats_left: int
    departures_left: int

    def key(self) -> Hashable:
        return (
            frozen(self.gate),
            self.workers,
            frozenset(self.parked.items()),
            self.applied,
            self.repeats_left,
            self.departures_left,
        )


#: What is as it is, and no part of which changes.
ATOMS = frozenset({int, str, bool, type(None), Ticket})


def frozen(value: Any) -> Hashable:
    """A hashable picture of everything a gate remembers. What is a key or in a set can be hashed as it is."""
    kind = type(value)
    if kind in ATOMS:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return (*value, *[item if type(item) in ATOMS else frozen(item) for item in value.values()])
    if kind is set or kind is frozenset:
        return frozenset(value)
    if isinstance(value, list | tuple):
        return tuple([item if type(item) in ATOMS else frozen(item) for item in value])
    if hasattr(value, "__dict__"):
        return (kind, *[item if type(item) in ATOMS else frozen(item) for item in vars(value).values()])
    hash(value)
    return value  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """What ``copy.deepcopy`` makes of a gate, several times as fast: no part of one is in two places."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: item if type(item) in ATOMS else copied(item) for key, item in value.items()}
    if kind is set or kind is frozenset:
        return kind(value)
    if kind is list or kind is tuple:
        return kind([item if type(item) in ATOMS else copied(item) for item in value])
    if isinstance(value, ClockGate):
        made = object.__new__(kind)
        vars(made).update(copied(vars(value)))
        return made
    return copy.deepcopy(value)


@dataclass
class Explorer:
    """All orders of ``worker_num`` workers that take ``STEPS`` steps from version ``start``."""

    mode: Mode
    worker_num: int
    repeats: int = 0
    departures: int = 0
    start: int = 0
    staleness: int = 0
    #: how many gradients make one update, where they wait for each other
    gradients: int = 0
    #: when workers cease to wait for each other and begin again, where they do
    changes: tuple[int, ...] = ()
    trace: list[Event] = field(default_factory=list)
    seen: set[Hashable] = field(default_factory=set)
    rounds: set[tuple[int, ...]] = field(default_factory=set)
    endings: int = 0
    dropped: bool = False

    def explore(self) -> Explorer:
        begin = WorkerState(self.start, self.start - 1, self.start, token=self.start)
        gate = self.mode.gate(range(self.worker_num), self.start, Rules(self.staleness, self.gradients, self.changes))
        if isinstance(gate, GbaGate):
            gate.kept = 0  # what is past matters to other servers only
        self.walk(State(gate, (begin,) * self.worker_num, {}, self.start, self.repeats, self.departures))
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

    # What can happen

    def due(self, state: State) -> Iterator[Event]:
        """What the workers that are free to go on do next."""
        for worker, at in enumerate(state.workers):
            if at.left or at.parked:
                continue
            if at.waited < at.delivered:
                yield Event("wait", worker, at.waited + 1)
            elif at.delivered < self.start + STEPS:
                yield Event("push", worker, at.delivered + 1)
            elif self.mode.name == "auto":  # another one may have more steps to go, and wait for this one
                if not at.resting:
                    yield Event("rest", worker)
                elif all(each.resting or each.left for each in state.workers):
                    yield Event("bye", worker)

    def mishaps(self, state: State) -> Iterator[Event]:
        for worker, at in enumerate(state.workers):
            if at.left:
                continue
            if state.departures_left:
                yield Event("leave", worker)
            if state.repeats_left:
                for step in range(self.start + 1, at.delivered + 1):
                    yield Event("repeat", worker, step)

    def after(self, before: State, event: Event) -> State:
        state = State(
            copied(before.gate),
            before.workers,
            dict(before.parked),
            before.applied,
            before.repeats_left,
            before.departures_left,
        )
        worker, step = event.worker, event.step
        if event.kind == "push":
            told = (before.workers[worker].token,) if self.has_buffers else ()
            self.change(state, worker, delivered=step, tokens=(*before.workers[worker].tokens, *told))
            self.carry_out(state, state.gate.push(worker, step, *told))
        elif event.kind == "wait":
            self.change(state, worker, waited=step, parked=True)
            self.park(state, Ticket(worker, step))
        elif event.kind == "repeat":
            # As a server does it: the gradient is not taken again, and the sender gets a second answer.
            state.repeats_left -= 1
            if effects := state.gate.push(worker, step):
                self.fail("a repeated push had effects", effects)
            if frozen(state.gate) != frozen(before.gate):
                self.fail("a repeated push changed the gate")
            self.park(state, Ticket(worker, step, state.repeats_left + 1))
        elif event.kind == "rest":
            self.change(state, worker, resting=True)
            self.carry_out(state, state.gate.rests(worker))
        else:
            state.departures_left -= event.kind == "leave"
            self.change(state, worker, left=True, parked=False)
            state.parked = {ticket: need for ticket, need in state.parked.items() if ticket.worker != worker}
            self.carry_out(state, state.gate.leave(worker))
        self.check_between(state)
        return state

    def park(self, state: State, ticket: Ticket) -> None:
        needed = self.mode.policy(self.staleness).version_needed(ticket.step)
        if ticket.step and self.has_buffers:
            needed = max(needed, state.gate.holds(ticket.worker, ticket.step))
        state.parked[ticket] = needed
        self.carry_out(state, state.gate.wait(ticket, ticket.worker, needed))

    @staticmethod
    def change(state: State, worker: int, **changes: Any) -> None:
        changed = object.__new__(WorkerState)  # what `replace` makes, in a third of the time
        vars(changed).update(vars(state.workers[worker]) | changes)
        state.workers = (*state.workers[:worker], changed, *state.workers[worker + 1 :])

    # What must hold

    def carry_out(self, state: State, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.check_apply(state, effect)
            elif isinstance(effect, ApplyBuffer):
                self.check_buffer(state, effect)
            elif not isinstance(effect, Changed):
                assert isinstance(effect, Answer), "one server alone discards nothing"
                self.check_answer(state, effect)

    def check_apply(self, state: State, effect: Apply) -> None:
        contributors = effect.contributors
        self.rounds.add(contributors)
        if not contributors or list(contributors) != sorted(set(contributors)):
            self.fail("contributors are not in worker order", effect)
        for worker in contributors:
            at = state.workers[worker]
            if at.delivered < effect.step:
                self.fail("a gradient was applied that was not delivered", effect)
            if at.applied != effect.step - 1:
                self.fail("a worker's gradient was applied twice or out of order", effect)
            self.change(state, worker, applied=effect.step)
        state.applied += 1
        if self.mode.name != "sync" and "new" not in self.mode.name and len(contributors) != 1:
            self.fail("gradients were held back for others", effect)
        if self.mode.name == "sync":
            if effect.step != state.applied:
                self.fail("rounds are not applied in order", effect)
            live = {worker for worker, at in enumerate(state.workers) if not at.left}
            if not live <= set(contributors):
                self.fail("a round closed without a live worker", effect)
            delivered = {worker for worker, at in enumerate(state.workers) if at.delivered >= effect.step}
            if set(contributors) != delivered:
                self.fail("a delivered gradient is missing in its round", effect)

    def check_buffer(self, state: State, effect: ApplyBuffer) -> None:
        if effect.version != state.applied + 1:
            self.fail("updates are not in order", effect)
        state.applied = effect.version
        size, live = len(effect.pushes) + len(effect.dropped), any(not at.left for at in state.workers)
        most = self.gradients or self.worker_num
        if self.waits(effect.version - 1):
            pushed = {worker for worker, _ in (*effect.pushes, *effect.dropped)}
            there = {worker for worker, at in enumerate(state.workers) if not (at.left or at.resting)}
            if not there <= pushed or (live and (effect.divisor != size or len(pushed) != size)):
                self.fail("a round closed without a live worker", effect)
        elif effect.divisor != most or size > most or (live and size < most) or not size:
            self.fail("an update is of the wrong size", effect)
        order, late = [], set()
        for worker, step in sorted([*effect.pushes, *effect.dropped]):
            at = state.workers[worker]
            if at.applied != step - 1 or at.delivered < step:
                self.fail("a worker's gradient was applied twice or out of order", effect)
            token, *rest = at.tokens
            began_together = effect.version - 1 == self.start or self.waits(effect.version - 2)
            if self.waits(effect.version - 1) and began_together and token != effect.version - 1:
                self.fail("a gradient of a round is of older values", effect)
            self.change(state, worker, applied=step, tokens=tuple(rest))
            if effect.version - 1 - token > self.staleness:
                late.add((worker, step))
            else:
                order.append((token, worker, step))
        if set(effect.dropped) != late:
            self.fail("the wrong gradients were dropped", effect)
        if list(effect.pushes) != [(worker, step) for _, worker, step in sorted(order)]:
            self.fail("gradients are not in the order of their tokens", effect)
        self.dropped = self.dropped or bool(late)

    def check_answer(self, state: State, effect: Answer) -> None:
        ticket = effect.ticket
        assert isinstance(ticket, Ticket)
        if state.workers[ticket.worker].left:
            self.fail("a worker that left was answered", effect)
        if ticket not in state.parked:
            self.fail("a request was answered twice", effect)
        needed = state.parked.pop(ticket)
        if effect.version < needed:
            self.fail("an answer came too early", effect)
        if not ticket.repetition:
            read = {"token": effect.version} if self.has_buffers else {}
            self.change(state, ticket.worker, parked=False, **read)
        if self.mode.name == "sync":
            if effect.version != state.applied:
                self.fail("an answer tells another version than was applied", effect)
            if not ticket.repetition and effect.version != needed:
                self.fail("an answer is newer than the step it follows", effect)
        if self.mode.name == "ssp":
            slowest = min(at.delivered for at in state.workers if not at.left)
            if ticket.step - slowest > self.staleness:
                self.fail("a worker is too far ahead of the slowest", effect)
            if self.staleness == 0 and not ticket.repetition and slowest > ticket.step:
                self.fail("steps are not in order", effect)

    def check_between(self, state: State) -> None:
        if self.mode.name in ("async", "half_async", "gba") and state.parked:
            self.fail("somebody waits who waits for nobody", state.parked)
        for worker, at in enumerate(state.workers):
            if isinstance(state.gate, ArrivalGate) and at.applied != at.delivered:
                self.fail("a gradient was not applied when it arrived", at)
            if not at.left and state.gate.delivered(worker) != at.delivered:
                self.fail("the gate forgot what a worker delivered")
        if self.mode.name == "sync":
            if state.gate.version != state.applied:
                self.fail("the version is not the number of rounds")
            step, lacking = state.gate.lacking()
            awaited = [w for w, at in enumerate(state.workers) if not at.left and at.delivered <= state.applied]
            if step != state.applied + 1 or list(lacking) != awaited:
                self.fail("a wait is explained wrongly", (step, lacking))

    def check_ending(self, state: State) -> None:
        """Nobody has anything to do: everybody must be through, and nothing be left over."""
        self.endings += 1
        if self.mode.name == "gba":
            state = self.all_gone(state)
        if state.parked:
            self.fail("deadlock", state.parked)
        for at in state.workers:
            if not at.left and at.waited < self.start + STEPS:
                self.fail("deadlock", at)
            if at.applied != at.delivered:
                self.fail("a delivered gradient was never applied", at)
        anybody = any(not at.left for at in state.workers)
        if self.mode.name == "sync" and anybody and state.applied != self.start + STEPS:
            self.fail("not every round was applied", state.applied)

    @property
    def has_buffers(self) -> bool:
        return self.mode.policy.fills_buffers

    def waits(self, version: int) -> bool:
        """Whether workers wait for each other at a version."""
        return self.mode.name == "auto" and not sum(version >= change for change in self.changes) % 2

    def all_gone(self, before: State) -> State:
        """What there is when all have said goodbye: what fills no buffer is applied then."""
        state = copy.copy(before)
        state.gate = copied(before.gate)
        for worker, at in enumerate(before.workers):
            if not at.left:
                waiting = self.gradients or self.worker_num
                if sum(each.delivered - each.applied for each in state.workers) >= waiting:
                    self.fail("a full buffer was not applied", state.workers)
                self.change(state, worker, left=True)
                self.carry_out(state, state.gate.leave(worker))
                self.change(state, worker, waited=self.start + STEPS)
        return state

    def fail(self, what: str, about: object = "") -> NoReturn:
        order = ", ".join(f"{event.kind} {event.worker} {event.step or ''}".strip() for event in self.trace)
        raise Violation(f"{what}: {about} after: {order}")


def some_rounds(worker_num: int, departures: int) -> set[tuple[int, ...]]:
    """The sets of workers a synchronous round can have: anybody who has not left is in it."""
    found: set[tuple[int, ...]] = set()
    for bits in range(1, 1 << worker_num):
        inside = tuple(worker for worker in range(worker_num) if bits >> worker & 1)
        if worker_num - len(inside) <= departures:
            found.add(inside)
    return found


# --- Every order ------------------------------------------------------------------------------------------------------


LARGEST = (3, 2, 1)
#: Workers, departures and repetitions. A mishap that may come need not: orders with fewer of them are among these, and
#: are looked at in the same way. By themselves they tell which rounds there are.
SIZES = [
    *(
        (worker_num, departures, repeats)
        for worker_num in (1, 2)
        for departures in range(worker_num + 1)
        for repeats in (0, 1)
    ),
    LARGEST,
]
ROUNDS = [(3, 0, 0), (3, 1, 0), (3, 2, 0)]


def asked(name: str) -> Hashable:
    """All that an exploration takes from a mode but its name: its gate, and which versions its workers wait for."""
    policy = MODES[name].policy(0)
    return MODES[name].gate, tuple(policy.version_needed(step) for step in range(STEPS + 1))


#: The first mode of each kind: three workers of another one take the same orders.
KINDS = [name for name in MODES if next(each for each in MODES if asked(each) == asked(name)) == name]


@pytest.mark.parametrize(
    ("name", "worker_num", "departures", "repeats", "start"),
    [
        # Where counting starts, and the largest case, are looked at in one mode; in others that takes seconds.
        pytest.param(
            name, *size, start, marks=[pytest.mark.slow] if name != "sync" and (start or size == LARGEST) else []
        )
        for name in MODES
        for size in (*SIZES, *(ROUNDS if name == "sync" else ()))
        for start in ((0,) if size == LARGEST else (0, 41))
        if size != LARGEST or (name in KINDS and not MODES[name].policy.fills_buffers)
    ],
)
def test_every_order(name: str, worker_num: int, departures: int, repeats: int, start: int) -> None:
    stalenesses = (0,) if name != "ssp" else (1,) if (worker_num, departures, repeats) == LARGEST else (0, 1, 2)
    for staleness in stalenesses:
        walked = Explorer(MODES[name], worker_num, repeats, departures, start, staleness).explore()
        assert walked.endings
    if name == "sync":
        assert walked.rounds == some_rounds(worker_num, departures)


@pytest.mark.pairs(2)
@pytest.mark.parametrize(
    ("gradients", "staleness", "drops"), [(1, 0, True), (2, 0, True), (3, 1, False), (2, 9, False)]
)
def test_every_order_of_gradients_in_buffers(gradients: int, staleness: int, drops: bool) -> None:
    walked = Explorer(MODES["gba"], 2, 1, 1, 0, staleness, gradients).explore()
    assert walked.endings
    assert walked.dropped == drops


@pytest.mark.pairs(1)
@pytest.mark.parametrize("changes", [(1,), (1, 2), (2, 3)])
def test_every_order_around_a_change_of_who_waits_for_whom(changes: tuple[int, ...]) -> None:
    assert Explorer(MODES["auto"], 2, 1, 1, 0, 9, 0, changes).explore().endings


@pytest.mark.slow
def test_every_order_of_three_workers_with_buffers() -> None:
    assert Explorer(MODES["gba"], *(LARGEST[place] for place in (0, 2, 1)), 0, 1).explore().endings


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_order_of_three_workers_with_another_staleness(staleness: int) -> None:
    assert Explorer(MODES["ssp"], *(LARGEST[place] for place in (0, 2, 1)), 0, staleness).explore().endings


def test_the_number_of_orders_is_known() -> None:
    """One worker alone has one order of 2 * STEPS + 1 events; a departure can follow any of its states."""
    assert len(Explorer(MODES["sync"], 1).explore().seen) == 2 * STEPS + 2
    assert len(Explorer(MODES["sync"], 1, departures=1).explore().seen) == 2 * (2 * STEPS + 2)


# --- An exploration that cannot fail would prove nothing --------------------------------------------------------------


class ClosesEarly(SyncGate):
    """A round does not wait for everybody."""

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        step, missing = super().lacking()
        return step, missing if len(missing) > 1 else ()

    def _lacks_somebody(self) -> bool:
        return bool(self.lacking()[1])


class AppliesRepetitions(SyncGate):
    def push(self, worker: int, step: int) -> list[Effect]:
        if step <= self.delivered(worker):
            return [Apply(step, (worker,))]
        return super().push(worker, step)


class RemembersRepetitions(SyncGate):
    def push(self, worker: int, step: int) -> list[Effect]:
        if step <= self.delivered(worker):
            self._pending.setdefault(step, set()).add(worker)
        return super().push(worker, step)


class WaitsForTheGone(SyncGate):
    def leave(self, worker: int) -> list[Effect]:
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return self._effects()


class SleepsWhenSomebodyLeaves(SyncGate):
    def leave(self, worker: int) -> list[Effect]:
        super().leave(worker)
        return []


class SettlesNothingWhenSomebodyLeaves(SyncGate):
    def leave(self, worker: int) -> list[Effect]:
        self._clock.pop(worker, None)
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return []


class DropsWhatTheGoneDelivered(SyncGate):
    def leave(self, worker: int) -> list[Effect]:
        for delivered in self._pending.values():
            delivered.discard(worker)
        return super().leave(worker)


class AnswersTheGone(SyncGate):
    def leave(self, worker: int) -> list[Effect]:
        self._clock.pop(worker, None)
        return self._effects()


class ReversesTheWorkers(SyncGate):
    def _effects(self) -> list[Effect]:
        return [
            Apply(effect.step, effect.contributors[::-1]) if isinstance(effect, Apply) else effect
            for effect in super()._effects()
        ]


class WaitsForTheNextRound(SyncGate):
    """A request for what is already there is only looked at when something else happens."""

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        self._waiting[ticket] = (worker, version)
        return []


class AnswersTwice(SyncGate):
    def _effects(self) -> list[Effect]:
        effects = super()._effects()
        return [*effects, *(effect for effect in effects if isinstance(effect, Answer))]


class AnswersEarly(SyncGate):
    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        return super().wait(ticket, worker, version - 1)


class ForgetsARound(SyncGate):
    def _effects(self) -> list[Effect]:
        return [effect for effect in super()._effects() if effect != Apply(2, (0, 1))]


class ExplainsNothing(SyncGate):
    """Rounds close rightly, but whoever asks is not told who is missing."""

    asked_inside = False

    def _effects(self) -> list[Effect]:
        self.asked_inside = True
        effects = super()._effects()
        self.asked_inside = False
        return effects

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        step, missing = super().lacking()
        return step, missing if self.asked_inside else ()


BROKEN: dict[type[SyncGate], str] = {
    ClosesEarly: "closed without a live worker",
    AppliesRepetitions: "repeated push had effects",
    RemembersRepetitions: "repeated push changed the gate",
    WaitsForTheGone: "deadlock|explained wrongly",
    SleepsWhenSomebodyLeaves: "the version is not the number of rounds",
    SettlesNothingWhenSomebodyLeaves: "deadlock",
    DropsWhatTheGoneDelivered: "missing in its round|not in worker order",
    AnswersTheGone: "a worker that left was answered",
    ReversesTheWorkers: "not in worker order",
    WaitsForTheNextRound: "deadlock",
    AnswersTwice: "answered twice",
    AnswersEarly: "too early",
    ForgetsARound: "the version is not the number of rounds|another version",
    ExplainsNothing: "explained wrongly",
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("worker_num", [2, 3])
def test_a_broken_gate_is_found_out(worker_num: int, broken: type[SyncGate]) -> None:
    mode = Mode("sync", broken, SyncPolicy)
    with pytest.raises(Violation, match=BROKEN[broken]):
        Explorer(mode, worker_num, repeats=1, departures=1).explore()


def test_some_faults_need_a_departure_to_show() -> None:
    """Why departures are explored at all: without one, these gates look right."""
    for broken in (WaitsForTheGone, SettlesNothingWhenSomebodyLeaves, DropsWhatTheGoneDelivered, AnswersTheGone):
        Explorer(Mode("sync", broken, SyncPolicy), 3, repeats=1).explore()


@pytest.mark.parametrize(
    "broken",
    [AppliesRepetitions, RemembersRepetitions, WaitsForTheNextRound, AnswersTwice, AnswersEarly, AnswersTheGone],
)
def test_what_holds_in_every_mode_can_fail_too(broken: type[SyncGate]) -> None:
    """The properties that are not tied to the name of the synchronous mode find these by themselves."""
    Explorer(Mode("a new one", SyncGate, SyncPolicy), 2, repeats=1, departures=1).explore()
    with pytest.raises(Violation):
        Explorer(Mode("a new one", broken, SyncPolicy), 2, repeats=1, departures=1).explore()


def test_a_lost_gradient_is_found_in_every_mode() -> None:
    class Loses(SyncGate):
        def _effects(self) -> list[Effect]:
            return [
                Apply(effect.step, effect.contributors[:1]) if isinstance(effect, Apply) else effect
                for effect in super()._effects()
            ]

    with pytest.raises(Violation, match=r"never applied|twice or out of order"):
        Explorer(Mode("a new one", Loses, SyncPolicy), 2).explore()


class AppliesLate(ArrivalGate):
    """Keeps a gradient until the next one comes."""

    kept: tuple[Effect, ...] = ()

    def push(self, worker: int, step: int) -> list[Effect]:
        applied, *answers = super().push(worker, step) or [None]
        if applied is None:
            return []
        before, self.kept = self.kept, (applied,)
        return [*before, *answers]


class LetsThemRunAhead(ArrivalGate):
    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        return super().wait(ticket, worker, version - 1)


class WaitsForTheGoneToo(ArrivalGate):
    def leave(self, worker: int) -> list[Effect]:
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return []


class ForgetsWhoWaitsWhenSomebodyLeaves(ArrivalGate):
    def leave(self, worker: int) -> list[Effect]:
        super().leave(worker)
        return []


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (AppliesLate, "not applied when it arrived"),
        (LetsThemRunAhead, "too early|too far ahead"),
        (WaitsForTheGoneToo, "deadlock"),
        (ForgetsWhoWaitsWhenSomebodyLeaves, "deadlock"),
    ],
)
def test_a_broken_gate_without_rounds_is_found_out(broken: type[ArrivalGate], found: str) -> None:
    explorer = Explorer(replace(MODES["ssp"], gate=broken), 2, repeats=1, departures=1, staleness=1)
    with pytest.raises(Violation, match=found):
        explorer.explore()


class ClosesTooSoon(GbaGate):
    def __init__(self, workers: Any, version: int = 0, rules: Rules = NO_RULES) -> None:
        super().__init__(workers, version, rules)
        self._gradients = max(1, self._gradients - 1)


class ForgetsTokens(GbaGate):
    def push(self, worker: int, step: int, token: int | None = 0) -> list[Effect]:
        return super().push(worker, step, self.version)


class AppliesWhatIsLate(GbaGate):
    def _close(self) -> ApplyBuffer:
        closed = super()._close()
        return replace(closed, pushes=(*closed.pushes, *closed.dropped), dropped=())


class DividesByThoseThere(GbaGate):
    def _close(self) -> ApplyBuffer:
        closed = super()._close()
        return replace(closed, divisor=len(closed.pushes))


class OrdersByWorker(GbaGate):
    def _close(self) -> ApplyBuffer:
        closed = super()._close()
        return replace(closed, pushes=tuple(sorted(closed.pushes)))


class TakesRepetitionsIn(GbaGate):
    def push(self, worker: int, step: int, token: int | None = 0) -> list[Effect]:
        if step <= self.delivered(worker):
            self._deliver(worker, step, token)
        return super().push(worker, step, token)


class LosesThoseOfTheGone(GbaGate):
    def leave(self, worker: int) -> list[Effect]:
        for version, pushes in self._pushes.items():
            self._pushes[version] = {each for each in pushes if each[1] != worker}
        return super().leave(worker)


class KeepsTheRest(GbaGate):
    def _is_full(self) -> bool:
        return self._applied in self._divisors


class WaitsForNobody(AutoGate):
    def holds(self, worker: int, step: int) -> int:
        return 0


class WaitsForThoseInABarrier(AutoGate):
    def rests(self, worker: int) -> list[Effect]:
        return []


class WaitsForTheGoneInARound(AutoGate):
    def leave(self, worker: int) -> list[Effect]:
        return GbaGate.leave(self, worker)


class DividesByAll(AutoGate):
    def _close(self) -> ApplyBuffer:
        return replace(super()._close(), divisor=self._gradients)


class ClosesARoundEarly(AutoGate):
    def _admit(self, pushes: set[tuple[int, int, int]]) -> None:
        self._divisors[self._applied] = len(pushes)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (WaitsForNobody, "of older values"),
        (WaitsForThoseInABarrier, "deadlock|never applied"),
        (WaitsForTheGoneInARound, "deadlock|never applied"),
        (DividesByAll, "without a live worker"),
        (ClosesARoundEarly, "without a live worker"),
    ],
)
def test_a_broken_gate_of_rounds_of_buffers_is_found_out(broken: type[AutoGate], found: str) -> None:
    changes = (1, 2) if broken is WaitsForThoseInABarrier else ()  # in between, one takes more steps than another
    with pytest.raises(Violation, match=found):
        Explorer(Mode("auto", broken, GbaPolicy), 2, 1, 1, 0, 9, 0, changes).explore()


class ClosesWhenSomebodyLeaves(GbaGate):
    def leave(self, worker: int) -> list[Effect]:
        if self._pushes.get(self._applied):
            self._divisors[self._applied] = self._gradients
        return super().leave(worker)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (ClosesTooSoon, "wrong size"),
        (ForgetsTokens, "wrong gradients were dropped"),
        (AppliesWhatIsLate, "wrong gradients were dropped"),
        (DividesByThoseThere, "wrong size"),
        (OrdersByWorker, "order of their tokens"),
        (TakesRepetitionsIn, "repeated push changed|repeated push had"),
        (LosesThoseOfTheGone, "wrong size|never applied|not applied"),
        (KeepsTheRest, "never applied"),
        (ClosesWhenSomebodyLeaves, "wrong size"),
    ],
)
def test_a_broken_gate_with_buffers_is_found_out(broken: type[GbaGate], found: str) -> None:
    staleness = 1 if broken is OrdersByWorker else 0
    with pytest.raises(Violation, match=found):
        Explorer(Mode("gba", broken, GbaPolicy), 2, 1, 1, 0, staleness, 2).explore()


@dataclass(frozen=True)
class Line:
    """How far a worker is between two servers: the steps that either has of it, and the last that is over; -1 when it
    has died, after the last that ``was``. With the answer of the second server came the version ``seen``."""

    first: int = 0
    second: int = 0
    told: int = 0
    was: int = 0
    seen: int = 0
    #: to whom it has said that it pushes no more
    parting: tuple[bool, bool] = (False, False)
    gone: tuple[bool, bool] = (False, False)


class Pair:
    """Two servers that fill the same buffers: every order in which requests of workers reach them. A worker sends each
    push to both, and tells the second what the first has answered where that one has closed a buffer which the second
    has not applied; it may die at any moment, which both find out when they do."""

    def __init__(self, gate: type[GbaGate], worker_num: int, deaths: int, gradients: int) -> None:
        self.gate, self.worker_num, self.deaths, self.gradients = gate, worker_num, deaths, gradients
        self.seen: set[Hashable] = set()
        self.endings = 0

    def explore(self) -> Pair:
        gates = [self.gate(range(self.worker_num), 0, Rules(1, self.gradients)) for _ in range(2)]
        self.walk(gates, (Line(),) * self.worker_num, ((), ()), ((),) * self.worker_num, self.deaths)
        return self

    def walk(self, gates: Any, lines: Any, done: Any, answers: Any, deaths: int) -> None:
        key = frozen((gates, [vars(line) for line in lines], done, answers, deaths))
        if key in self.seen:
            return
        self.seen.add(key)
        moved = False
        under_way = any(line.gone != (True, True) and not line.first == line.second == line.told for line in lines)
        if not under_way and any(buffer.divisor for buffer in gates[1].buffers(gates[1].version)):
            raise Violation(f"a buffer is closed, nothing of it is on its way, and it is not applied: {lines}")
        for worker, line in enumerate(lines):
            for event in ("first", "second", "tell", "part", "part 1", "bye", "found 0", "found 1", "die"):
                after = self.after(event, worker, line, gates, deaths, answers[worker])
                if after is None:
                    continue
                moved = moved or event != "die"
                became, there, effects, answer, left = after
                all_lines = (*lines[:worker], became, *lines[worker + 1 :])
                all_answers = (*answers[:worker], answer, *answers[worker + 1 :])
                all_done = tuple(
                    (*before, *(each for each in new if isinstance(each, ApplyBuffer)))
                    for before, new in zip(done, effects, strict=True)
                )
                self.walk(there, all_lines, all_done, all_answers, left)
        if not moved:
            self.check(gates, lines, done)

    def after(self, event: str, worker: int, line: Line, before: Any, deaths: int, answer: Any) -> Any:
        """What an event makes of a worker, the gates, and what is told; None if it cannot happen now. The gates that
        there were stay as they are."""
        effects: list[list[Effect]] = [[], []]

        def at(server: int) -> GbaGate:
            gates[server] = copied(before[server])
            return gates[server]

        gates = [*before]
        alive = line.gone == (False, False) and line.told >= 0
        step = max(line.told, 0) + 1
        token = min(gates[0].version, gates[1].version)
        if event == "first" and alive and line.first < step <= STEPS - 1:
            effects[0] = at(0).push(worker, step, token)
            became, answer = replace(line, first=step), (tuple(gates[0].buffers(token)), tuple(gates[0].gone.items()))
        elif event == "second" and alive and line.second < step <= STEPS - 1:
            effects[1] = at(1).push(worker, step, None)
            became = replace(line, second=step, seen=gates[1].version)
        elif event == "tell" and alive and line.first == line.second == step:
            if any(buffer.divisor and buffer.version >= line.seen for buffer in answer[0]):
                effects[1] = at(1).place(worker, step, answer[0], dict(answer[1]))
            became, answer = replace(line, told=step), ()
        elif event == "part" and alive and line.told == STEPS - 1 and not line.parting[0]:
            effects[0] = at(0).parts(worker)
            became = replace(line, parting=(True, False))
            answer = tuple(gates[0].buffers(0)), tuple(gates[0].gone.items())
        elif event == "part 1" and alive and line.parting == (True, False):
            effects[1] = at(1).place(worker, STEPS - 1, answer[0], dict(answer[1]))
            became, answer = replace(line, parting=(True, True)), ()
        elif event == "bye" and alive and line.parting == (True, True):
            effects = [at(server).leave(worker) for server in range(2)]
            became = replace(line, gone=(True, True))
        elif event == "die" and alive and deaths:
            return replace(line, told=-1, was=line.told), gates, effects, (), deaths - 1
        elif event.startswith("found") and line.told < 0 and not line.gone[int(event[-1])]:
            server = int(event[-1])
            effects[server] = at(server).leave(worker)
            became = replace(line, gone=(True, line.gone[1]) if server == 0 else (line.gone[0], True))
        else:
            return None
        return became, gates, effects, answer, deaths

    def check(self, gates: Any, lines: Any, done: Any) -> None:
        self.endings += 1
        if not all(line.gone == (True, True) for line in lines):
            raise Violation(f"somebody waits for ever: {lines}")
        first, second = done
        live = {worker for worker, line in enumerate(lines) if line.told >= 0}
        known = [[[each for each in effect.pushes if each[0] in live] for effect in of] for of in (first, second)]
        known = [[pushes for pushes in of if pushes] for of in known]
        if known[0] != known[1] or (len(live) == len(lines) and first != second):
            raise Violation(f"two servers have made different updates: {first} and {second}")
        whole = [(worker, step) for effect in second for worker, step in (*effect.pushes, *effect.dropped)]
        if len(whole) != len(set(whole)):
            raise Violation(f"a gradient counted twice: {second}")
        if any((worker, step) not in whole for worker in live for step in range(1, STEPS)):
            raise Violation(f"a gradient never counted: {second}")
        # Of a worker that has died too, all whose steps were over; but for an update that nobody was left to tell of.
        over = [STEPS - 1 if worker in live else line.was for worker, line in enumerate(lines)]
        for one, other in zip(first, second, strict=False):
            sure = [{(who, at) for who, at in (*of.pushes, *of.dropped) if at <= over[who]} for of in (one, other)]
            if sure[0] != sure[1]:
                raise Violation(f"a step that was over counts at one server alone: {one} and {other}")


@pytest.mark.parametrize(
    ("worker_num", "deaths", "gradients"),
    [
        *((2, 0, 2), (2, 0, 3)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, 2), (2, 1, 3), (2, 2, 2), (2, 2, 3))),
    ],
)
def test_two_servers_fill_the_same_buffers(worker_num: int, deaths: int, gradients: int) -> None:
    assert Pair(GbaGate, worker_num, deaths, gradients).explore().endings


class WaitsForTheDead(GbaGate):
    def _missing(self) -> list[tuple[int, int]]:
        pushes = self._pushes.get(self._applied, ())
        return [each[1:] for each in pushes if each[1:] not in self._here]


class AppliesAsTheyCome(GbaGate):
    def push(self, worker: int, step: int, token: int | None = 0) -> list[Effect]:
        return super().push(worker, step, token or 0)


class DoesNotWaitForWhatIsOnItsWay(GbaGate):
    def _missing(self) -> list[tuple[int, int]]:
        return []


class ForgetsThePlaces(GbaGate):
    def place(self, worker: int, step: int, buffers: Any, gone: Any = MappingProxyType({})) -> list[Effect]:
        return super().place(worker, step, [buffer for buffer in buffers if not buffer.divisor], gone)


class DropsWhatTheFirstHas(GbaGate):
    def leave(self, worker: int) -> list[Effect]:
        lost = self._discarded([each for each in self._unplaced if each[0] == worker])
        return [Discard(lost), *super().leave(worker)]


@pytest.mark.parametrize(
    ("broken", "gradients"),
    [
        (WaitsForTheDead, 2),
        (AppliesAsTheyCome, 2),
        (DoesNotWaitForWhatIsOnItsWay, 2),
        (ForgetsThePlaces, 2),
        (DropsWhatTheFirstHas, 3),
    ],
)
def test_servers_that_disagree_are_found_out(broken: type[GbaGate], gradients: int) -> None:
    with pytest.raises(Violation):
        Pair(broken, 2, 1, gradients).explore()


def test_a_first_server_that_has_lost_a_push_is_found_out() -> None:
    """The other one had made an update of it, and is told that it is part of a later one."""
    second = GbaGate(range(2), 0, Rules(4, 2))
    for worker in (0, 1):
        second.push(worker, 1, None)
    assert second.place(1, 1, [Buffer(0, 2, ((0, 0, 1), (0, 1, 1)))]) == [ApplyBuffer(1, ((0, 1), (1, 1)), (), 2)]
    assert [second.is_elsewhere(0, worker, step) for worker, step in ((0, 1), (1, 1), (0, 2))] == [False, False, True]
    assert [second.is_elsewhere(1, worker, step) for worker, step in ((0, 1), (1, 1), (0, 2))] == [True, True, False]


def test_a_worker_that_comes_back_gives_what_is_missing() -> None:
    """It died when the first server had its push, and goes on with a new one of that step at the second."""
    first, second = (GbaGate(range(2), 0, Rules(4, 2)) for _ in range(2))
    first.push(0, 1, 0)
    first.push(1, 1, 0)
    second.push(1, 1, None)
    told = first.buffers(0)
    assert told == [Buffer(0, 2, ((0, 0, 1), (0, 1, 1)))]
    assert second.place(1, 1, told) == []
    assert second.lacking() == (1, (0,))
    assert second.push(0, 1, None) == [ApplyBuffer(1, ((0, 1), (1, 1)), (), 2)]
    assert second.place(0, 1, told) == []


def test_a_gate_goes_on_with_the_buffers_that_it_had() -> None:
    gate, again = (GbaGate(range(3), 0, Rules(4, 3)) for _ in range(2))
    for worker in (0, 1):
        gate.push(worker, 1, 0)
    again.resume({0: 0, 1: 0, 2: 0}, {}, 0, gate.memory({0: 0, 1: 0, 2: 0}))
    assert again.push(0, 1, 0) == again.push(1, 1, 0) == []
    assert again.push(2, 1, 0) == gate.push(2, 1, 0) == [ApplyBuffer(1, ((0, 1), (1, 1), (2, 1)), (), 3)]


# --- Examples ---------------------------------------------------------------------------------------------------------


def test_a_round() -> None:
    gate = SyncGate(range(2))
    assert gate.version == 0
    assert gate.wait("start", 1, 0) == [Answer("start", 0)]
    assert gate.push(1, 1) == []
    assert gate.wait("b", 1, 1) == []
    assert gate.lacking() == (1, (0,))
    assert gate.push(0, 1) == [Apply(1, (0, 1)), Answer("b", 1)]
    assert gate.wait("a", 0, 1) == [Answer("a", 1)]
    assert gate.version == 1
    assert gate.lacking() == (2, (0, 1))


def test_the_last_one_to_wait_for_leaves() -> None:
    gate = SyncGate(range(3))
    gate.push(0, 1)
    gate.push(2, 1)
    gate.wait("two", 2, 1)
    gate.wait("nought", 0, 1)
    assert gate.leave(1) == [Apply(1, (0, 2)), Answer("two", 1), Answer("nought", 1)]
    assert gate.lacking() == (2, (0, 2))


def test_what_was_delivered_before_leaving_counts() -> None:
    gate = SyncGate(range(2))
    gate.push(1, 1)
    gate.wait("gone", 1, 1)
    assert gate.leave(1) == []
    assert gate.push(0, 1) == [Apply(1, (0, 1))]
    assert gate.push(0, 2) == [Apply(2, (0,))]


def test_several_rounds_can_close_at_once() -> None:
    gate = SyncGate(range(2))
    for step in (1, 2, 3):
        assert gate.push(0, step) == []
    assert gate.push(1, 1) == [Apply(1, (0, 1))]
    assert gate.wait("third", 0, 3) == []
    assert gate.leave(1) == [Apply(2, (0,)), Apply(3, (0,)), Answer("third", 3)]


def test_everybody_leaves() -> None:
    gate = SyncGate(range(2))
    gate.push(0, 1)
    assert gate.leave(0) == []
    assert gate.leave(1) == [Apply(1, (0,))]
    assert gate.lacking() == (2, ())
    assert gate.leave(1) == []
    assert gate.version == 1


def test_leaving_twice_is_leaving_once() -> None:
    gate = SyncGate(range(2))
    assert gate.leave(1) == gate.leave(1) == []
    assert gate.push(0, 1) == [Apply(1, (0,))]
    assert gate.leave(1) == []


def test_a_late_repetition_is_answered_again() -> None:
    gate = SyncGate(range(1))
    assert gate.push(0, 1) == [Apply(1, (0,))]
    assert gate.push(0, 2) == [Apply(2, (0,))]
    assert gate.push(0, 1) == []
    assert gate.delivered(0) == 2
    assert gate.wait("again", 0, 1) == [Answer("again", 2)]


def test_it_goes_on_from_a_checkpoint() -> None:
    gate = SyncGate(range(2), 7)
    assert (gate.version, gate.delivered(0), gate.lacking()) == (7, 7, (8, (0, 1)))
    assert gate.push(0, 7) == []
    assert gate.push(0, 8) == []
    assert gate.push(1, 8) == [Apply(8, (0, 1))]


@pytest.mark.parametrize("step", [2, 3, 1000])
def test_skipping_a_step_is_refused_and_changes_nothing(step: int) -> None:
    gate = SyncGate(range(2))
    before = frozen(gate)
    with pytest.raises(ProtocolError, match=f"worker 1 skipped a step; expected step 1; got step {step}"):
        gate.push(1, step)
    assert frozen(gate) == before
    assert gate.push(1, 1) == []
    with pytest.raises(ProtocolError, match="expected step 2; got step 3"):
        gate.push(1, 3)


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_registered_under_its_name(name: str) -> None:
    assert MODES[name].name == name
    assert MODES[name].gate(range(3), 5).delivered(2) == 5


def test_synchronous_training_needs_its_own_step() -> None:
    assert [MODES["sync"].policy().version_needed(step) for step in range(4)] == [0, 1, 2, 3]
    assert [MODES["ssp"].policy(2).version_needed(step) for step in range(5)] == [0, 0, 0, 1, 2]
    assert {MODES[name].policy().version_needed(step) for name in ("async", "half_async") for step in range(4)} == {0}
