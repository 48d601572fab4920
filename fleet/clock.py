"""Time as an argument: a clock that can be replaced, and deadlines made from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary origin, never going back."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Deadline:
    """An instant by which something has to have happened; ``timeout_s`` is kept for the error's text."""

    started_at: float
    timeout_s: float

    def remaining_s(self, now: float) -> float:
        return max(0.0, self.started_at + self.timeout_s - now)

    def passed(self, now: float) -> bool:
        return now - self.started_at >= self.timeout_s

    def waited_s(self, now: float) -> float:
        return now - self.started_at
