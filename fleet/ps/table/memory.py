"""Rows in memory: columns that grow geometrically, and an open-addressing index over the ids.

The index has one 64-bit entry a place: 0 is empty, else the low 40 bits are slot + 1 and the high 24 bits repeat 24
bits of the id's hash. A probe compares those first and looks at the id itself only when they agree, so absent ids and
collisions cost no second cache miss, and no id has to be set aside to mean "empty". A place is found from the hash's
high bits: its low bits chose the server and are much alike on one server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.ps.kernels.jit import AHEAD, Array, Ids, compiled, prefetch
from fleet.ps.kernels.rows import mix, packed_ids

_SLOT_BITS = 40
_TAG_SHIFT = np.uint64(_SLOT_BITS)
_SLOT_MASK = np.uint64((1 << _SLOT_BITS) - 1)

#: The index doubles when more than this part of it is taken.
_MAX_LOAD = 0.7
_GROWTH = 1.5
_SMALLEST = 64


@dataclass
class _Column:
    values: Array
    fill: float


class MemoryStore:
    """The ``Store`` of a table that fits into memory."""

    def __init__(self) -> None:
        self._count = 0
        self._ids: Ids = np.empty(_SMALLEST, np.int64)
        self._columns: dict[str, _Column] = {}
        self._index = np.zeros(2 * _SMALLEST, np.uint64)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._index.nbytes + sum(c.values.nbytes for c in self._columns.values())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def find(self, ids: Ids) -> Ids:
        slots = np.empty(ids.size, np.int64)
        _find(self._index, self._shift, self._ids, packed_ids(ids), slots)
        return slots

    def insert(self, ids: Ids) -> Ids:
        slots = self.find(ids)
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            self._reserve(self._count + missing.size)
            before = self._count
            fresh = np.empty(missing.size, np.int64)
            self._count = _insert(self._index, self._shift, self._ids, before, packed_ids(ids)[missing], fresh)
            slots[missing] = fresh
            for column in self._columns.values():
                column.values[before : self._count] = column.fill
        return slots

    def ids(self, start: int = 0, stop: int | None = None) -> Ids:
        return self._ids[: self._count][start:stop]

    def ensure_column(self, name: str, width: int, fill: float, dtype: npt.DTypeLike) -> None:
        if name not in self._columns:
            values = np.empty((self._ids.size, width), dtype)
            values[: self._count] = fill
            self._columns[name] = _Column(values, fill)
        column = self._columns[name]
        if (column.values.shape[1], column.values.dtype) != (width, dtype):
            raise ConfigurationError(
                "a state column has another shape than the one that is there",
                where=name,
                expected=f"{column.values.shape[1]} x {column.values.dtype}",
                got=f"{width} x {np.dtype(dtype)}",
            )
        column.fill = fill

    def column(self, name: str) -> Array:
        return self._columns[name].values

    @property
    def _shift(self) -> int:
        return 65 - self._index.size.bit_length()

    def _reserve(self, count: int) -> None:
        # Room that was never written takes no memory on systems that hand out pages when touched.
        if count > self._ids.size:
            capacity = max(count, int(self._ids.size * _GROWTH))
            self._ids = self._grown(self._ids, capacity)
            for column in self._columns.values():
                column.values = self._grown(column.values, capacity)
        if count > self._index.size * _MAX_LOAD:
            size = self._index.size
            while count > size * _MAX_LOAD:
                size *= 2
            self._index = np.zeros(size, np.uint64)
            _reindex(self._index, self._shift, self._ids[: self._count])

    def _grown(self, old: Array, capacity: int) -> Array:
        new = np.empty((capacity, *old.shape[1:]), old.dtype)
        new[: self._count] = old[: self._count]
        return new


@compiled
def _place(index: Array, shift: int, keys: Ids, key: np.int64, hashed: np.uint64) -> np.int64:
    """Where the entry of ``key`` is, or the empty place where it would be."""
    tag = hashed << _TAG_SHIFT
    at = np.int64(hashed >> np.uint64(shift))
    while True:
        other = index[at] ^ tag  # small when the 24 bits agree; an empty entry is dealt with first
        if index[at] == 0 or (other <= _SLOT_MASK and keys[np.int64(other) - 1] == key):
            return at
        at = np.int64((at + 1) & (index.size - 1))


@compiled
def _find(index: Array, shift: int, keys: Ids, ids: Ids, slots: Ids) -> None:
    for k in range(ids.size):
        # Two rows of memory are needed one after the other: the entry far ahead, the id it points to less far.
        if k + 2 * AHEAD < ids.size:
            prefetch(index, np.int64(mix(np.uint64(ids[k + 2 * AHEAD])) >> np.uint64(shift)))
        if k + AHEAD < ids.size:
            entry = index[np.int64(mix(np.uint64(ids[k + AHEAD])) >> np.uint64(shift))]
            prefetch(keys, np.int64(entry & _SLOT_MASK) - 1)
        at = _place(index, shift, keys, ids[k], mix(np.uint64(ids[k])))
        slots[k] = np.int64(index[at] & _SLOT_MASK) - 1


@compiled
def _insert(index: Array, shift: int, keys: Ids, count: int, ids: Ids, slots: Ids) -> int:
    for k in range(ids.size):
        if k + AHEAD < ids.size:
            prefetch(index, np.int64(mix(np.uint64(ids[k + AHEAD])) >> np.uint64(shift)))
        hashed = mix(np.uint64(ids[k]))
        at = _place(index, shift, keys, ids[k], hashed)
        if index[at] == 0:
            keys[count] = ids[k]
            count += 1
            index[at] = (hashed << _TAG_SHIFT) | np.uint64(count)
        slots[k] = np.int64(index[at] & _SLOT_MASK) - 1
    return count


@compiled
def _reindex(index: Array, shift: int, keys: Ids) -> None:
    for k in range(keys.size):
        if k + AHEAD < keys.size:
            prefetch(index, np.int64(mix(np.uint64(keys[k + AHEAD])) >> np.uint64(shift)))
        hashed = mix(np.uint64(keys[k]))
        at = np.int64(hashed >> np.uint64(shift))
        while index[at] != 0:  # the ids are distinct: any empty place will do
            at = (at + 1) & (index.size - 1)
        index[at] = (hashed << _TAG_SHIFT) | np.uint64(k + 1)
