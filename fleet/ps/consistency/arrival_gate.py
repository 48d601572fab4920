"""Holds the gate of every mode without rounds: a gradient is applied when it arrives, alone and undivided.

A wait for version ``v`` is over when no live worker has delivered fewer than ``v`` steps. Modes that let workers run
free ask for version 0, which is always there; bounded staleness asks for a later one.
"""

from __future__ import annotations

from fleet.ps.consistency.clock_gate import ClockGate
from fleet.ps.consistency.gate import Apply, Effect


class ArrivalGate(ClockGate):
    def join(self, worker: int) -> None:
        self._clock[worker] = self._gone.pop(worker, 0)

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        slowest = self._slowest
        return slowest + 1, tuple(sorted(worker for worker, clock in self._clock.items() if clock == slowest))

    def _deliver(self, worker: int, step: int, token: int | None) -> list[Effect]:
        self._applied += 1
        return [Apply(step, (worker,))]

    def _effects(self) -> list[Effect]:
        return self._answer(self._slowest)

    @property
    def _slowest(self) -> int:
        return min(self._clock.values(), default=0)
