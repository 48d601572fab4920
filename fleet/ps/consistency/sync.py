"""Synchronous training: one optimizer step a round, on the mean over the workers in it.

Server half: round ``t`` closes when every live worker has delivered its step ``t``. A worker that leaves stops
being waited for, and what it delivered for a round that is still open stays in it.
Worker half: after ``t`` steps a worker needs version ``t``, no older and, since no later round can close without
this worker, no newer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from fleet.errors import ProtocolError
from fleet.ps.consistency.base import Answer, Apply, Effect, Mode


class SyncGate:
    def __init__(self, workers: Iterable[int], version: int = 0) -> None:
        self._clock = dict.fromkeys(workers, version)
        self._applied = version
        self._gone: dict[int, int] = {}
        self._pending: dict[int, set[int]] = {}
        self._waiting: dict[Hashable, tuple[int, int]] = {}

    @property
    def version(self) -> int:
        return self._applied

    def push(self, worker: int, step: int) -> list[Effect]:
        clock = self._clock[worker]
        if step <= clock:
            return []
        if step != clock + 1:
            raise ProtocolError(f"worker {worker} skipped a step", expected=f"step {clock + 1}", got=f"step {step}")
        self._clock[worker] = step
        self._pending.setdefault(step, set()).add(worker)
        return self._settle()

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        self._waiting[ticket] = (worker, version)
        return self._settle()

    def leave(self, worker: int) -> list[Effect]:
        self._gone[worker] = self._clock.pop(worker, 0)
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return self._settle()

    @property
    def clocks(self) -> dict[int, int]:
        return dict(self._clock)

    @property
    def gone(self) -> dict[int, int]:
        return dict(self._gone)

    def resume(self, clocks: Mapping[int, int], gone: Mapping[int, int], version: int) -> None:
        self._clock, self._gone, self._applied = dict(clocks), dict(gone), version

    def join(self, worker: int) -> None:
        self._clock[worker] = max(self._applied, self._gone.pop(worker, 0))

    def delivered(self, worker: int) -> int:
        return self._clock[worker]

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        step = self._applied + 1
        return step, tuple(sorted(worker for worker, clock in self._clock.items() if clock < step))

    def _settle(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._applied + 1 in self._pending and not self.lacking()[1]:
            self._applied += 1
            effects.append(Apply(self._applied, tuple(sorted(self._pending.pop(self._applied)))))
        ready = [ticket for ticket, (_, version) in self._waiting.items() if version <= self._applied]
        for ticket in ready:
            del self._waiting[ticket]
        return [*effects, *(Answer(ticket, self._applied) for ticket in ready)]


MODE = Mode("sync", SyncGate, version_needed=lambda step, _staleness: step, lockstep=True)
