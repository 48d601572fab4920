"""Time as an argument: a clock that can be replaced."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary origin, never going back."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


def wall_time() -> float:
    """Seconds since 1970, to be compared between processes and machines as well as their clocks agree."""
    return time.time()


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
