"""Decides when a worker is lost, from counters that grow for as long as their workers live.

Pure: counts and instants come in.
"""

from __future__ import annotations

from collections.abc import Mapping


class Liveness:
    """Measures for how long each of some counters has stood still."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def still_for(self, worker: int, count: int, now: float) -> float:
        """Note a worker's counter as it is ``now``, and return for how long it has stood there."""
        known, since = self._last.get(worker, (None, now))
        if count != known:
            since = now
        self._last[worker] = (count, since)
        return now - since


def stopped(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """Return the workers whose counter has not moved from one look to the next."""
    return [worker for worker, count in after.items() if before[worker] == count]
