"""Ends the job's processes if the launcher itself is gone, however it ended; runs as a program of its own.

The launcher holds the other end of this program's standard input and writes the process groups it starts, one a line.
The pipe closes when the launcher ends, even by SIGKILL. Unlike the kernel's parent-death signal this reaches whole
groups, escalates, and does not depend on which thread started a process. A launcher that ends in good order kills
this program before closing the pipe.

It runs isolated and without site packages, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_POLL_S = 0.05
#: SIGKILL cannot be refused, but it may take a moment.
_KILL_PATIENCE_S = 2.0


def end_groups(groups: Iterable[int], grace_s: float, hurries: Callable[[], bool] = bool) -> None:
    """Send SIGTERM, wait up to ``grace_s`` seconds or until somebody ``hurries``, and send SIGKILL; groups that are
    already gone are fine."""
    left = [group for group in groups if is_there(group)]
    asked, killed = (signal.SIGTERM, grace_s, hurries), (signal.SIGKILL, _KILL_PATIENCE_S, bool)
    for signum, patience_s, is_cut_short in (asked, killed):
        for group in left:
            _signal(group, signum)
        deadline = time.monotonic() + patience_s
        while left and time.monotonic() < deadline and not is_cut_short():
            time.sleep(_POLL_S)
            left = [group for group in left if is_there(group)]


def is_there(group: int) -> bool:
    """Say whether any process of ``group`` is left, after collecting those that have ended and are ours to collect."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    return _signal(group, 0) and _has_members(group)


def _has_members(group: int) -> bool:
    """Say whether a group has processes that are no zombies, which in a container may have nobody to collect them;
    without /proc, all count."""
    with contextlib.suppress(OSError), open("/proc/self/stat"):
        return any(_lives_in(group, pid) for pid in os.listdir("/proc") if pid.isdigit())
    return True


def _lives_in(group: int, pid: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        state, _, its_group, *_ = stat.read().rpartition(")")[2].split()
        return int(its_group) == group and state not in "ZX"
    return False


def _signal(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups([int(line) for line in sys.stdin.buffer], grace_s=float(sys.argv[1]))
