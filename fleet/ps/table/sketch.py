"""Counts ids in a fixed amount of memory: a counting Bloom filter with conservative updates.

An id has a few cells, all in one block of a cache line, and its count is the smallest of them. Only cells that are
smaller than the new count are raised to it. So a count may be too large, as other ids share cells, and never too small.

Cells hold whole numbers. A sum of weights is a number of units, each a small part of what is to be reached, and every
weight is rounded up to some of them. The unit is a power of two, so that nothing else is rounded, and a sum is never
less than one that floats would have come to.

Where an id's cells are depends on a hash in such a way that blocks, and cells in a block, of another number cover
ranges of these. So the counts of one filter go into another of any size, or those of several into one: by the greatest.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import GAMMA, mix, packed, packed_ids
from fleet.numeric.jit import Array, Ids, compiled, prefetch

_LINE = 64
#: How many bits a cell may have.
_BITS = (2, 4, 8, 16, 32)
#: Cells of an id.
_CELLS = 4
#: Of one hash 32 bits choose the block; of another, 16 bits choose each cell.
_BLOCK_SHIFT = np.uint64(32)
_CELL_BITS, _CELL_MASK = np.uint64(16), np.uint64(0xFFFF)
_APART = 8
#: A sum of weights that is reached has this many bits at least, in units; and the least exponent of a unit.
_BITS_OF_A_SUM, _LEAST_EXPONENT = 30, -900


def unit_of(most: float) -> float:
    """Return what sums of weights up to ``most`` are counted in."""
    return math.ldexp(1.0, max(math.frexp(most)[1] - _BITS_OF_A_SUM - 1, _LEAST_EXPONENT))


class Sketch:
    """Counts by id, up to ``most``, in as few bits as that needs: look-ups, or weights in a ``unit``."""

    def __init__(self, nbytes: int, most: float, key: np.uint64, unit: float = 1.0) -> None:
        """``key`` chooses the hash."""
        self.unit = unit
        self._key = key
        self._most = math.ceil(most / unit)
        #: how many bits a cell has
        self.bits = next(bits for bits in _BITS if self._most < 1 << bits)
        self.blocks = max(1, nbytes // _LINE)
        self._cells = np.zeros((self.blocks, _LINE * 8 // max(8, self.bits)), _dtype(self.bits))
        #: ids that were counted and not let in, but for those of which all cells are others' as well
        self._counted = 0

    def __len__(self) -> int:
        return max(0, self._counted)

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    def add(self, ids: Ids, amounts: Array) -> Array:
        """Add to the counts of ids, and return what they are then, and at least. Those that have reached the most are
        let in."""
        totals = np.empty(ids.size, np.float64)
        self._counted += int(
            _add(
                self._cells,
                self.bits,
                float(self._most),
                self.unit,
                self._key,
                packed_ids(ids),
                packed(amounts, np.float64),
                totals,
            )
        )
        return totals

    def view(self, *, frozen: bool) -> SketchView:
        """Return the counts as they are now; ``frozen``, they stay so while others come."""
        return SketchView(self._cells.copy() if frozen else self._cells, self.bits, self.unit, len(self))

    def load(self, cells: Array, bits: int, start: int, blocks: int, unit: float = 1.0) -> None:
        """Take in a part of the cells of another filter of the same hash, which has so many blocks."""
        scale = unit / self.unit
        if start < 0 or blocks < start + len(cells) or bits not in _BITS or not 0 < scale < math.inf:
            what = f"cells of {bits} bits, in units of {unit:g},"
            raise ValueError(f"no filter of {blocks} blocks with {what} has {len(cells)} from {start} on")
        theirs, own = np.ceil(_spread(cells, bits) * scale), _LINE * 8 // self.bits
        # Blocks of one filter that lie where a block of the other does, and cells likewise.
        first, last = start * self.blocks // blocks, -(-(start + len(cells)) * self.blocks // blocks)
        targets = np.arange(first, min(last, self.blocks))
        low = np.clip(targets * blocks // self.blocks - start, 0, len(cells) - 1)
        high = np.clip(-(-(targets + 1) * blocks // self.blocks) - 1 - start, 0, len(cells) - 1)
        found = theirs[low]
        for step in range(1, int((high - low).max(initial=0)) + 1):
            found = np.maximum(found, theirs[np.minimum(low + step, high)])
        if found.shape[1] > own:
            found = found.reshape(len(found), own, -1).max(2)
        elif found.shape[1] < own:
            found = np.repeat(found, own // found.shape[1], 1)
        mine = _spread(self._cells[targets], self.bits)
        self._cells[targets] = _joined(np.minimum(np.maximum(mine, found), self._most), self.bits, self._cells.dtype)

    def count_on(self, counted: int) -> None:
        """Go on counting ids from there."""
        self._counted += counted


class SketchView:
    """Shows a filter."""

    def __init__(self, cells: Array, bits: int, unit: float, counted: int) -> None:
        self._cells = cells
        self.bits, self.blocks, self.unit, self.counted = bits, len(cells), unit, counted

    def export(self, start: int, most: int) -> tuple[dict[str, Array], int | None]:
        """Return the cells from a block on, about ``most`` of eight bytes, and which block is next."""
        stop = min(self.blocks, start + max(1, most * 8 // _LINE))
        cells = np.ascontiguousarray(self._cells[start:stop]).view(np.uint8)
        return {"cells": cells}, stop if stop < self.blocks else None

    def leave(self) -> None:
        """Do nothing: it was a copy, if any."""


def cells_of(raw: Array, bits: int) -> Array:
    """Return the cells that were exported as bytes."""
    return raw.view(_dtype(bits))


def _dtype(bits: int) -> npt.DTypeLike:
    return {16: np.uint16, 32: np.uint32}.get(bits, np.uint8)


def _spread(cells: Array, bits: int) -> Array:
    """Return a number for every cell."""
    if bits >= 8:
        return cells.astype(np.float64)
    each = np.arange(0, 8, bits, dtype=np.uint8)
    return ((cells[:, :, None] >> each) & np.uint8((1 << bits) - 1)).reshape(len(cells), -1).astype(np.float64)


def _joined(numbers: Array, bits: int, dtype: np.dtype[np.generic]) -> Array:
    if bits >= 8:
        return numbers.astype(dtype)
    each = np.arange(0, 8, bits, dtype=np.uint8)
    parts = numbers.astype(np.uint8).reshape(len(numbers), -1, 8 // bits) << each
    joined: Array = np.bitwise_or.reduce(parts, 2).astype(np.uint8)
    return joined


@compiled
def _add(
    cells: Array, bits: int, most: float, unit: float, key: np.uint64, ids: Ids, amounts: Array, totals: Array
) -> int:
    """Add, and return how many more ids than before are counted and not let in."""
    blocks, more = np.uint64(len(cells)), 0
    number = np.uint64(_LINE * 8 // bits)
    each, mask = 8 // bits if bits < 8 else 1, (1 << bits) - 1
    places = np.empty(_CELLS, np.int64)
    for k in range(ids.size):
        if k + _APART < ids.size:
            ahead = mix(mix(np.uint64(ids[k + _APART])) ^ key)
            prefetch(cells, np.int64(((ahead >> _BLOCK_SHIFT) * blocks) >> _BLOCK_SHIFT))
        hashed = mix(mix(np.uint64(ids[k])) ^ key)
        block = np.int64(((hashed >> _BLOCK_SHIFT) * blocks) >> _BLOCK_SHIFT)
        chosen = mix(hashed + GAMMA)
        least = np.inf
        for j in range(_CELLS):
            places[j] = np.int64(((chosen & _CELL_MASK) * number) >> _CELL_BITS)
            chosen >>= _CELL_BITS
            at = places[j]
            if bits < 8:
                count = np.float64((cells[block, at // each] >> np.uint8(at % each * bits)) & mask)
            else:
                count = np.float64(cells[block, at])
            least = min(least, count)
        total = least + np.ceil(amounts[k] / unit)
        totals[k] = total * unit
        total = min(total, most)
        if least < most:  # else it was let in before, or others of its cells were
            more += int(total > 0 and least == 0) - int(total == most)
        for j in range(_CELLS):
            at = places[j]
            if bits < 8:
                shift = np.uint8(at % each * bits)
                word = np.int64(cells[block, at // each])
                if np.float64((word >> shift) & mask) < total:
                    cells[block, at // each] = (word & ~(mask << shift)) | (np.int64(total) << shift)
            elif np.float64(cells[block, at]) < total:
                cells[block, at] = total
    return more
