"""Makes time an argument: a clock that can be replaced."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Counts seconds from an arbitrary origin, never going back."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


def wall_time() -> float:
    """Return seconds since 1970, which can be compared between processes and machines as well as their clocks agree."""
    return time.time()


class SystemClock:
    """Reads the machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


#: A wait that goes on is logged about this often.
NOTICE_S = 10.0


def notice_every_s(deadline_s: float) -> float:
    """Return how often to log that a wait goes on which ends at this deadline: several times before it."""
    return min(NOTICE_S, deadline_s / 4)


class Wait:
    """Measures a wait that has begun now and is logged from time to time."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock = clock
        self._every_s = notice_every_s(deadline_s)
        self._began = self._told = clock.now()

    @property
    def so_far_s(self) -> float:
        return self._clock.now() - self._began

    def is_due(self) -> bool:
        """Say whether it is time to log again that the wait goes on."""
        now = self._clock.now()
        if now - self._told < self._every_s:
            return False
        self._told = now
        return True
