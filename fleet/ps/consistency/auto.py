"""Synchronous training that ceases to wait where waiting costs time, and begins again where it does not.

Workers begin in rounds: what a round makes is what a buffer of GBA holds that has one push of every live worker, and is
divided by their number; nobody in it goes on before it is applied. Server 0 hears with each push how long the worker
took for its step by itself, and works out how much faster all would be if nobody waited. From ``LEAVES_FROM`` on the
following buffers are GBA's, until it is less than ``RETURNS_BELOW``. As both make an update of as many gradients,
nothing else changes. ``PAUSE_S`` lies between two changes, by the clock of the first worker, which comes with its
pushes; that of another counts from the time on when it is the first. So all of it is a function of what has been
pushed, and a journal that is done over makes the same changes.

A round waits for nobody who waits in a barrier or a reduction: after a time without rounds workers have taken steps of
different number. One that starts again amid a round, with its push in it, has its next one in the round that follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fleet.ps.consistency.gate import NO_RULES, Changed, Effect, Rules
from fleet.ps.consistency.gba import GbaGate, GbaPolicy
from fleet.ps.consistency.policy import Mode

#: By what factor all have to be faster without waiting for that to be worth it, and below which it no longer is.
LEAVES_FROM, RETURNS_BELOW = 1.03, 1.01
#: So many of every worker's last steps are looked at.
STEPS = 20
#: So much time lies between two changes: at most four an hour.
PAUSE_S = 900.0


def gain(own_s: Iterable[Iterable[float]]) -> float:
    """Return how much faster workers would be if none waited for another: of each the time of as many steps, which are
    rounds if they wait. A round takes as long as its slowest step, and without rounds speeds add up."""
    each = [[*steps] for steps in own_s]
    totals = [sum(steps) for steps in each]
    if not totals or min(totals) <= 0:
        return 1.0
    rounds = sum(map(max, zip(*each, strict=True)), 0.0)
    return rounds * sum(1 / total for total in totals) / len(totals)


class AutoGate(GbaGate):
    def __init__(self, workers: Iterable[int], version: int = 0, rules: Rules = NO_RULES) -> None:
        super().__init__(workers, version, rules)
        self._wanted = rules.changes
        #: whether workers wait for each other
        self._waits = True
        self._changes: list[Changed] = []
        #: by worker, its last steps and how long each took it
        self._own_s: dict[int, list[tuple[int, float]]] = {}
        #: the time that has passed by the clock of one worker, and then of another; and what that clock last said
        self._now = self._changed_at = -math.inf
        self._clock_of, self._clock_step, self._clock_said = -1, 0, -math.inf
        #: those that wait for all others in a barrier or a reduction: no round waits for them
        self._resting: set[int] = set()

    def note(self, worker: int, step: int, own_s: float, now: float) -> None:
        if step == self._clock.get(worker, step) + 1 and math.isfinite(own_s) and own_s >= 0:
            self._own_s[worker] = [*self._own_s.get(worker, [])[1 - STEPS :], (step, own_s)]
        if worker == min(self._clock, default=worker) and math.isfinite(now):
            if worker == self._clock_of and step <= self._clock_step:  # a journal is done over
                return
            if math.isinf(self._now):
                self._now = now
            elif worker == self._clock_of:
                self._now += max(0.0, now - self._clock_said)
            self._clock_of, self._clock_step, self._clock_said = worker, step, now

    def rests(self, worker: int) -> list[Effect]:
        self._resting.add(worker)
        return self._round_without()

    def goes_on(self, worker: int) -> None:
        self._resting.discard(worker)

    def join(self, worker: int) -> None:
        super().join(worker)
        self._resting.discard(worker)

    def starts_again(self, worker: int) -> list[Effect]:
        self._resting.discard(worker)
        return super().starts_again(worker)

    def holds(self, worker: int, step: int) -> int:
        if not (self._waits and self._admits):  # else a Place says what is waited for
            return super().holds(worker, step)
        at = self._version_of(worker, step)
        return 0 if at is None else at + 1

    def follow_first(self) -> None:
        super().follow_first()
        self._changes = []

    @property
    def changes(self) -> list[Changed]:
        return [*self._changes]

    def leave(self, worker: int) -> list[Effect]:
        self._own_s.pop(worker, None)
        self._resting.discard(worker)
        return [*super().leave(worker), *self._round_without()]

    def _round_without(self) -> list[Effect]:
        """Return what comes of it that the round waits for one worker less."""
        pushes = self._pushes.get(self._applied)
        if not pushes or not self._clock or self._applied in self._divisors or not self._admits:
            return []
        self._admit(pushes)
        return self._effects()

    def memory(self, clocks: Mapping[int, int], *, anew: bool = False) -> dict[str, Any]:
        own_s = {
            str(worker): [each for each in steps if each[0] <= clocks.get(worker, each[0])]
            for worker, steps in self._own_s.items()
        }
        changes = [(each.version, each.together, each.gain) for each in self._changes]
        times = [None if math.isinf(at) else at for at in (self._now, self._changed_at)]
        return {
            **super().memory(clocks, anew=anew),
            "waits": self._waits,
            "changes": changes,
            "own_s": own_s,
            "times": times,
            "clock": [self._clock_of, self._clock_step, None if math.isinf(self._clock_said) else self._clock_said],
        }

    def resume(
        self,
        clocks: Mapping[int, int],
        gone: Mapping[int, int],
        version: int,
        memory: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().resume(clocks, gone, version, memory)
        if not memory:  # a checkpoint has none, and a job begins with it in rounds, but for what its strategy says
            for at in sorted(at for at in self._wanted if at <= version):
                self._waits = not self._waits
                self._changes.append(Changed(at, self._waits, None))
            return
        self._waits = memory["waits"]
        self._changes = [Changed(*each) for each in memory["changes"]]
        self._own_s = {int(worker): [(step, s) for step, s in steps] for worker, steps in memory["own_s"].items()}
        self._now, self._changed_at = (-math.inf if at is None else at for at in memory["times"])
        self._clock_of, self._clock_step, said = memory.get("clock", (-1, 0, None))
        self._clock_said = -math.inf if said is None else said

    def _admit(self, pushes: set[tuple[int, int, int]]) -> None:
        if not self._waits:
            super()._admit(pushes)
        elif {worker for _, worker, _ in pushes}.issuperset(self._clock.keys() - self._resting):
            self._divisors[self._applied] = len(pushes)
            self._together.add(self._applied)

    def _place_for(self, worker: int, step: int) -> int:
        """Let one that has started again amid a round, with its push in it, push for the next."""
        version = self._applied
        while self._waits and any(who == worker and at != step for _, who, at in self._pushes.get(version, ())):
            version += 1
        return version

    def _effects(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._is_full():
            effects.append(self._close())
            if self._admits and (change := self._change()) is not None:
                self._waits = change.together
                self._changes.append(change)
                self._changed_at = self._now
                if not self._waits:
                    self._lower_waits()
                effects.append(change)
            if self._admits and (pushes := self._pushes.get(self._applied)) and self._applied not in self._divisors:
                self._admit(pushes)
        return [*effects, *self._answer(self._applied)]

    def _lower_waits(self) -> None:
        """Let nobody who waits for a round of later wait for more than without rounds: others may leave before it."""
        self._waiting = {
            ticket: (worker, min(version, max(self._applied, GbaGate.holds(self, worker, self._clock.get(worker, 0)))))
            for ticket, (worker, version) in self._waiting.items()
        }
        self._earliest = 0

    def _change(self) -> Changed | None:
        """Return what changes at this version, if anything does."""
        if self._wanted:
            is_due = self._applied in self._wanted
            return Changed(self._applied, not self._waits, None) if is_due else None
        if self._now - self._changed_at < PAUSE_S or len(self._clock) < 2:
            return None
        gained = self._gain()
        if (gained >= LEAVES_FROM) if self._waits else (gained < RETURNS_BELOW and self._is_measured):
            return Changed(self._applied, not self._waits, gained)
        return None

    @property
    def _is_measured(self) -> bool:
        return all(len(self._own_s.get(worker, ())) == STEPS for worker in self._clock)

    def _gain(self) -> float:
        if not self._is_measured:
            return 1.0
        return gain([s for _, s in self._own_s[worker]] for worker in self._clock)


class AutoPolicy(GbaPolicy):
    lets_rows_come_ahead = False  # in a round they are those after the last one


MODE = Mode("auto", AutoGate, AutoPolicy)
