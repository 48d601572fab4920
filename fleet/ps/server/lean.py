"""A process that only serves does without what would only cost it time: torch's compiler, a last search for garbage,
and memory for every thread.

The compiler's import takes nearly as long as torch's own. torch imports it with the first optimizer, the user's or the
server's, only to have it leave some methods alone. torch remembers with such a method what it is handed instead of it,
and here that is the method itself. Nothing else about these methods changes, and code that is compiled all the same
finds methods that it may look into. The name is torch's own affair: a release that does without it goes on as if this
were not here, and starts later.

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
import sys

import torch

_LEFT_ALONE = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")

#: What glibc calls the number of areas (malloc.h).
_M_ARENA_MAX = -8


def be_lean() -> None:
    """Make a process lean, once and before its first optimizer. This is not for one that trains: it may compile, or be
    asked to later."""
    atexit.register(gc.freeze)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other systems have no such areas
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    if "torch._dynamo" in sys.modules:
        return
    for name in _LEFT_ALONE:
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            method.__dict__.setdefault("__dynamo_disable", method)
