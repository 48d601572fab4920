"""Keeps memory for large tensors, which is used again and again.

The C library hands blocks beyond 32 MiB back to the system as soon as they are free, so the next one of that size is
faulted in page by page: filling 64 MiB takes two to three times as long in fresh memory as in memory that is there
already, and a step moves a model's values through several such blocks. A block taken here comes back by itself when the
last array that looks into it is gone, and serves the next request for about as much.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

#: Smaller blocks the C library keeps itself; larger ones are too much to hold on to.
SMALLEST, LARGEST = 16 << 20, 512 << 20

#: So many free blocks are kept; the one that has waited longest goes first.
KEPT = 4

#: A block may be larger than asked for by this factor.
SLACK = 1.5

#: Finds an array as long as anybody has it.
Watch = weakref.ref[np.ndarray[Any, Any]]

# Blocks come back whenever Python finds them unused, on any thread: nothing here may need a lock.
_free: deque[memoryview] = deque(maxlen=KEPT)


def take(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return so many bytes, with any content."""
    if not SMALLEST <= nbytes <= LARGEST:
        return np.empty(nbytes, np.uint8)
    block = _fitting(nbytes) or np.empty(nbytes, np.uint8).data
    array = np.frombuffer(block, np.uint8, nbytes)
    # Views of the array, and tensors made of them, keep the array itself alive: its memory is not numpy's own.
    weakref.finalize(array, _free.append, block).atexit = False
    return array


def installed() -> int | None:
    """Return how many bytes of memory this machine has, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def take_flat(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor with any content."""
    if numel * dtype.itemsize < SMALLEST:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.from_numpy(take(numel * dtype.itemsize)).view(dtype)


def window(flat: torch.Tensor) -> tuple[torch.Tensor, Watch]:
    """Return a tensor of the same memory, and a watch that finds nothing any more once nobody looks through the tensor
    or its views."""
    # What torch and numpy make of an array keeps the array alive; tensors made of a tensor keep its memory alone.
    array = np.frombuffer(flat.view(torch.uint8).numpy().data, np.uint8)
    return torch.from_numpy(array).view(flat.dtype), weakref.ref(array)


def _fitting(nbytes: int) -> memoryview | None:
    for _ in range(len(_free)):
        try:
            block = _free.popleft()
        except IndexError:
            return None
        if nbytes <= len(block) <= nbytes * SLACK:
            return block
        _free.append(block)
    return None
