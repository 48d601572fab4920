"""A process that only serves does without what only takes its time: searches for garbage among what stays, and memory
for every thread.

Torch and what else is imported are some hundred thousand objects. Python looks through all of them now and then, which
takes a tenth of a second, and every worker waits meanwhile; and once more when it ends, where the system frees them at
once anyway. So they are left out of all searches, and those for what requests leave behind take little.

The C library of most Linux systems gives threads areas of their own to take memory from, up to 64 MiB each, and hands
back to the system what is free at their ends. Requests that wait for the end of a round fill such areas, and with the
next round every page of them was asked for again: with 64 workers a tenth of a server's time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc

from fleet.numeric.compiler import put_off_compiler

#: What glibc calls the number of areas (malloc.h).
_M_ARENA_MAX = -8


def be_lean() -> None:
    """Make a process lean, once and before its first optimizer. This is not for one that trains."""
    atexit.register(gc.freeze)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other systems have no such areas
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    put_off_compiler()
    gc.freeze()
