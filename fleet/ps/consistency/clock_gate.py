"""Holds what the gates of all modes have in common: a clock for each live worker, and requests that wait for a
version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fleet.errors import ProtocolError
from fleet.ps.consistency.gate import NO_RULES, Answer, Buffer, Changed, Effect, Rules


class ClockGate(ABC):
    def __init__(self, workers: Iterable[int], version: int = 0, rules: Rules = NO_RULES) -> None:
        self._clock = dict.fromkeys(workers, version)
        self._applied = version
        self._gone: dict[int, int] = {}
        self._waiting: dict[Hashable, tuple[int, int]] = {}
        #: no request waits for an earlier version
        self._earliest = 0

    @property
    def version(self) -> int:
        return self._applied

    def push(self, worker: int, step: int, token: int | None = 0) -> list[Effect]:
        clock = self._clock[worker]
        if step <= clock:
            return []
        if step != clock + 1:
            raise ProtocolError(f"worker {worker} skipped a step", expected=f"step {clock + 1}", got=f"step {step}")
        self._clock[worker] = step
        return [*self._deliver(worker, step, token), *self._effects()]

    def place(
        self, worker: int, step: int, buffers: Sequence[Buffer], gone: Mapping[int, int] = MappingProxyType({})
    ) -> list[Effect]:
        raise ProtocolError("a push was given a place in a mode that has no buffers", got=f"step {step}")

    def is_elsewhere(self, version: int, worker: int, step: int) -> bool:
        return False

    def buffers(self, since: int) -> list[Buffer]:
        return []

    def follow_first(self) -> None:
        return None

    def note(self, worker: int, step: int, own_s: float, now: float) -> None:
        del worker, step, own_s, now  # most modes go by no time

    def rests(self, worker: int) -> list[Effect]:
        return []

    def goes_on(self, worker: int) -> None:
        return None

    def parts(self, worker: int) -> list[Effect]:
        return []

    def starts_again(self, worker: int) -> list[Effect]:
        return []

    @property
    def is_held_up(self) -> bool:
        return False

    def holds(self, worker: int, step: int) -> int:
        return 0

    @property
    def changes(self) -> list[Changed]:
        return []

    def memory(self, clocks: Mapping[int, int], *, anew: bool = False) -> dict[str, Any]:
        return {}

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        self._waiting[ticket] = (worker, version)
        self._earliest = min(self._earliest, version)
        return self._effects()

    def leave(self, worker: int) -> list[Effect]:
        self._gone[worker] = self._clock.pop(worker, 0)
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return self._effects()

    @property
    def clocks(self) -> dict[int, int]:
        return dict(self._clock)

    @property
    def gone(self) -> dict[int, int]:
        return dict(self._gone)

    def resume(
        self,
        clocks: Mapping[int, int],
        gone: Mapping[int, int],
        version: int,
        memory: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._clock, self._gone, self._applied = dict(clocks), dict(gone), version

    def delivered(self, worker: int) -> int:
        return self._clock[worker]

    def make_up(self, worker: int, step: int) -> list[Effect]:
        self._clock[worker] = step
        return self._effects()

    @abstractmethod
    def join(self, worker: int) -> None: ...

    @abstractmethod
    def lacking(self) -> tuple[int, tuple[int, ...]]: ...

    @abstractmethod
    def _deliver(self, worker: int, step: int, token: int | None) -> list[Effect]:
        """Return the effects that a new step has at once."""

    @abstractmethod
    def _effects(self) -> list[Effect]:
        """Return what can be applied and answered now."""

    def _answer(self, reached: int) -> list[Effect]:
        """Return the answers to all requests that waited for this version or an earlier one."""
        if reached < self._earliest:  # so it is with nearly every push of a round
            return []
        ready = [ticket for ticket, (_, version) in self._waiting.items() if version <= reached]
        for ticket in ready:
            del self._waiting[ticket]
        self._earliest = min((version for _, version in self._waiting.values()), default=reached + 1)
        return [Answer(ticket, self._applied) for ticket in ready]
