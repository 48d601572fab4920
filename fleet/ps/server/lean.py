"""A process that only serves does without what only takes its time: a last search for garbage, and memory for every
thread.

When Python ends it looks through all of torch's objects once more, which takes half a second, and the system frees them
at once anyway.

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
