"""Reads what every process can say of itself: memory, processor time, uptime."""

from __future__ import annotations

import os
import time

from fleet.base.clock import Clock


class ProcessFigures:
    """Measures a process. ``read`` gives memory, processor time, and the time since this was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()

    def read(self) -> dict[str, float]:
        return {
            "uptime_seconds": self._clock.now() - self._began,
            "cpu_seconds": time.process_time(),
            **_memory(),
        }


def _memory() -> dict[str, float]:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return {"memory_bytes": float(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except OSError:  # a system without it: better no figure than one that means something else
        return {}


def delay() -> dict[str, float]:
    """Return for how long the first thread, which trains in most scripts, was ready to run and did not get a
    processor."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as schedstat:
            return {"delay_seconds": float(schedstat.read().split()[1]) / 1e9}
    except (OSError, IndexError):  # no Linux, or one that does not count it
        return {}
