"""Memory that is taken from the system as it is needed, in large pages, and goes back when it is not."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from fleet.numeric.jit import Array

#: What a large page has, on the systems that Fleet runs on.
_LARGE = 2 << 20


class Room:
    """Reserves addresses for so many bytes, which are 0 at first. They take memory when they are written, and the
    system has it back when nobody refers to them any more."""

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory, which is the default, has no large pages, and a forked child would write into it.
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Array = np.frombuffer(self._memory, np.uint8)
        self._needed = 0

    def need(self, nbytes: int) -> None:
        """Say how many bytes are needed, from the first one on. Where rows lie anywhere, a small page costs a look-up
        of its own in each; but only where a large one is needed as a whole it takes no more memory."""
        before, self._needed = self._needed, nbytes
        first = -self.bytes.ctypes.data % _LARGE
        was, now = (first + max(0, each - first) // _LARGE * _LARGE for each in (before, nbytes))
        self._advise("MADV_HUGEPAGE", was, now)
        self._advise("MADV_NOHUGEPAGE", now, was)
        self._advise("MADV_DONTNEED", -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, before)

    def _advise(self, advice: str, start: int, stop: int) -> None:
        if start < stop and hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a system that does not know it, or has locked its memory
                self._memory.madvise(getattr(mmap, advice), start, stop - start)
