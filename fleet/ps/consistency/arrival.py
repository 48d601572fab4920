"""The gate of every mode without rounds: a gradient is applied when it arrives, alone and undivided.

A wait for version ``v`` is over when no live worker has delivered fewer than ``v`` steps. Modes that let workers run
free ask for version 0, which is always there; bounded staleness asks for a later one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from fleet.errors import ProtocolError
from fleet.ps.consistency.base import Answer, Apply, Effect


class ArrivalGate:
    def __init__(self, workers: Iterable[int], version: int = 0) -> None:
        self._clock = dict.fromkeys(workers, version)
        self._applied = version
        self._gone: dict[int, int] = {}
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
        self._applied += 1
        return [Apply(step, (worker,)), *self._settle()]

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
        self._clock[worker] = self._gone.pop(worker, 0)

    def delivered(self, worker: int) -> int:
        return self._clock[worker]

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        slowest = min(self._clock.values(), default=0)
        return slowest + 1, tuple(sorted(worker for worker, clock in self._clock.items() if clock == slowest))

    def _settle(self) -> list[Effect]:
        slowest = min(self._clock.values(), default=0)
        ready = [ticket for ticket, (_, version) in self._waiting.items() if version <= slowest]
        for ticket in ready:
            del self._waiting[ticket]
        return [Answer(ticket, self._applied) for ticket in ready]
