"""One piece of memory copied to many places, or compared with them: a thousand in less time than torch takes to look at
ten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from fleet.numeric.ids import packed
from fleet.numeric.jit import Array, Ids, Segments, compiled, copy_bytes, row

#: Pieces have at most so many bytes. Larger copies are worth torch's threads, and all that it does beside.
LARGEST = 1 << 15


class Scattered:
    """Copies pieces of a flat tensor to where they belong: each has the byte it begins at, and a contiguous target on
    the CPU, whose length it has. The targets' memory is held."""

    def __init__(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._targets = [target for _, target in pieces]
        addresses = np.array([target.data_ptr() for target in self._targets], np.uint64)
        self._rows = Segments(addresses, np.empty((1, LARGEST), np.uint8), 0)
        self._starts = np.array([start for start, _ in pieces], np.int64)
        self._sizes = np.array([target.nbytes for target in self._targets], np.int64)

    def fill(self, flat: torch.Tensor) -> None:
        """Copy, and count it as a change of each target, as torch does. Nobody checks the length of ``flat``."""
        if not self._targets:
            return
        _copy(self._rows, packed(flat.view(torch.uint8).numpy(), np.uint8), self._starts, self._sizes)
        try:
            increment_version(self._targets)
        except (TypeError, RuntimeError):  # older ones of torch take one at a time, and say so in either way
            for target in self._targets:
                increment_version(target)

    def differing(self, flat: torch.Tensor) -> list[int]:
        """Return the targets, by position, that do not hold what ``fill`` would copy there, to the bit."""
        if not self._targets:
            return []
        differ = np.zeros(self._sizes.size, np.bool_)
        _compare(self._rows, packed(flat.view(torch.uint8).numpy(), np.uint8), self._starts, self._sizes, differ)
        return np.flatnonzero(differ).tolist()


@compiled
def _copy(targets: Segments, flat: Array, starts: Ids, sizes: Ids) -> None:
    for place in range(sizes.size):
        copy_bytes(targets, place, flat, starts[place], sizes[place])


@compiled
def _compare(targets: Segments, flat: Array, starts: Ids, sizes: Ids, differ: Array) -> None:
    for place in range(sizes.size):
        target, size = row(targets, place), sizes[place]
        piece = flat[starts[place] : starts[place] + size]
        total = np.uint8(0)
        for byte in range(size):  # all of them: a loop that may end early is not done many at a time
            total |= target[byte] ^ piece[byte]
        differ[place] = total != 0
