"""Memory that is taken from the system as it is needed, in large pages, and goes back when it is not."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from fleet.numeric.jit import Array

#: What a large page has, on the systems that Fleet runs on.
_LARGE = 2 << 20


class Room:
    """Reserves addresses for so many bytes, which are 0. They take memory when they are written, and the system has it
    back when nobody refers to them any more."""

    def __init__(self, nbytes: int) -> None:
        # Not shared, as it would be else: of such memory there are no large pages, and a fork would write into it.
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Array = np.frombuffer(self._memory, np.uint8)
        self._needed = 0

    def need(self, nbytes: int) -> None:
        """Say how many bytes are needed, from the first one on. Where rows lie anywhere, a small page costs a look-up
        of its own in each; but only where a large one is needed as a whole it takes no more memory."""
        before, self._needed = self._needed, nbytes
        if nbytes > before and hasattr(mmap, "MADV_HUGEPAGE"):
            first = -self.bytes.ctypes.data % _LARGE
            start, stop = (first + max(0, each - first) // _LARGE * _LARGE for each in (before, nbytes))
            if start < stop:
                with contextlib.suppress(OSError):  # a system that has none
                    self._memory.madvise(mmap.MADV_HUGEPAGE, start, stop - start)
        elif nbytes < before and hasattr(mmap, "MADV_DONTNEED"):
            start = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if start < before:
                self._memory.madvise(mmap.MADV_DONTNEED, start, before - start)
