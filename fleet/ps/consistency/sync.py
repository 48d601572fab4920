"""Synchronous training: one optimizer step a round, on the mean over the workers in it.

Server half: round ``t`` closes when every live worker has delivered its step ``t``. A worker that leaves stops
being waited for, and what it delivered for a round that is still open stays in it.
Worker half: after ``t`` steps a worker needs version ``t``, no older and, since no later round can close without
this worker, no newer.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.ps.consistency.clock_gate import ClockGate
from fleet.ps.consistency.gate import NO_RULES, Apply, Effect, Rules
from fleet.ps.consistency.policy import Mode, Policy


class SyncGate(ClockGate):
    def __init__(self, workers: Iterable[int], version: int = 0, rules: Rules = NO_RULES) -> None:
        super().__init__(workers, version, rules)
        #: step -> who has delivered it, until its round closes
        self._pending: dict[int, set[int]] = {}
        #: one that the open round waited for when it was asked last
        self._awaited = -1

    def join(self, worker: int) -> None:
        self._clock[worker] = max(self._applied, self._gone.pop(worker, 0))

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        step = self._applied + 1
        return step, tuple(sorted(worker for worker, clock in self._clock.items() if clock < step))

    def _deliver(self, worker: int, step: int, token: int | None) -> list[Effect]:
        self._pending.setdefault(step, set()).add(worker)
        return []

    def _effects(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._applied + 1 in self._pending and not self._lacks_somebody():
            self._applied += 1
            effects.append(Apply(self._applied, tuple(sorted(self._pending.pop(self._applied)))))
        return [*effects, *self._answer(self._applied)]

    def _lacks_somebody(self) -> bool:
        """Say whether the open round waits for a worker. It is asked with each push, so it does not look at all."""
        step = self._applied + 1
        if self._clock.get(self._awaited, step) >= step:
            self._awaited = next((worker for worker in reversed(self._clock) if self._clock[worker] < step), -1)
        return self._awaited >= 0


class SyncPolicy(Policy):
    shares_steps = True

    def version_needed(self, step: int) -> int:
        return step

    def applies_one_lookup(self, worker_num: int) -> bool:
        """Say whether there is one worker: the gradients of several are summed."""
        return worker_num == 1


MODE = Mode("sync", SyncGate, SyncPolicy)
