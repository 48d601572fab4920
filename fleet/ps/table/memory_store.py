"""Rows lie in memory: in segments that stay where they are, with an index over the ids.

A column grows by whole segments, and nothing is moved for it. They are large, so that systems back them with large
pages, and zeros nobody has written yet, which take no memory where pages are handed out when they are touched. Only
while a column is small its one segment is short, and copied into longer ones. Compiled functions find a row by the
addresses of the segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.numeric.ids import gather, packed_ids, touch_pages
from fleet.numeric.jit import Array, Ids, Segments
from fleet.ps.table.index import Index

_SEGMENT_BYTES = 32 << 20
#: No more than this is copied when a column grows.
_COPIED_BYTES = 4 << 20
#: A short segment grows by this factor.
_GROWTH = 1.5
#: Rows begin where lines of the cache do, if they are as long: to fetch one is to fetch no other.
_CACHE_LINE = 64
#: About so much memory is touched at a step.
_TOUCHED_BYTES = 2 << 20


class MemoryStore:
    """Implements ``Store`` for a table that fits into memory."""

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._count = 0
        self._reserved = 0
        self._keys = _Column(1, 0, np.dtype(np.int64), segment_bytes)
        self._columns: dict[str, _Column] = {}
        self._index = Index()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._count * sum(column.row_bytes for column in self._all())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def find(self, ids: Ids) -> Ids:
        return self._index.find(self._keys.rows, packed_ids(ids))

    def insert(self, ids: Ids) -> Ids:
        ids, before = packed_ids(ids), self._count
        self._keys.extend(before, before + ids.size)
        slots, self._count = self._index.insert(self._keys.rows, ids)
        for column in self._columns.values():
            column.extend(before, self._count)
        return slots

    def reserve(self, count: int) -> None:
        self._reserved = count
        self._index.reserve(self._keys.rows, count)
        for column in self._all():
            column.reserve(count)

    def touch(self) -> Iterator[int]:
        columns, count = (self._keys, *self._columns.values()), self._reserved
        step = max(1, _TOUCHED_BYTES // sum(column.row_bytes for column in columns))
        self._index.touch()
        for start in range(0, count, step):
            stop = min(count, start + step)
            for column in columns:
                column.touch(start, stop)
            yield stop

    def ids(self, slots: Ids) -> Ids:
        ids = np.empty((slots.size, 1), np.int64)
        gather(self._keys.rows, slots, ids)
        return ids[:, 0]

    def ensure_column(self, name: str, width: int, fill: float, dtype: npt.DTypeLike) -> None:
        if name not in self._columns:
            self._columns[name] = _Column(width, fill, np.dtype(dtype), self._segment_bytes)
            self._columns[name].extend(0, self._count)
        column = self._columns[name]
        if (column.width, column.dtype) != (width, dtype):
            raise ConfigurationError(
                "a state column has another shape than the one that is there",
                where=name,
                expected=f"{column.width} x {column.dtype}",
                got=f"{width} x {np.dtype(dtype)}",
            )
        column.fill = fill

    def column(self, name: str) -> Segments:
        return self._columns[name].rows

    def _all(self) -> Iterator[_Column]:
        yield self._keys
        yield from self._columns.values()


class _Column:
    def __init__(self, width: int, fill: float, dtype: np.dtype[Any], segment_bytes: int) -> None:
        self.width = width
        self.fill = fill
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize
        self._bits = max(1, segment_bytes // self.row_bytes).bit_length() - 1
        self._segments = [self._zeros(1)]
        self._grow(1)

    def extend(self, start: int, stop: int) -> None:
        """Provide rows up to ``stop``; those from ``start`` on are as untouched ones."""
        self.reserve(stop)
        if self.fill:  # zeros they are
            for number in range(start >> self._bits, len(self._segments)):
                begin = number << self._bits
                self._segments[number][max(0, start - begin) : max(0, stop - begin)] = self.fill

    def reserve(self, count: int) -> None:
        """Provide segments for so many rows in all."""
        if count > self._room:
            self._grow(count)

    def touch(self, start: int, stop: int) -> None:
        segments = tuple(self._segments)  # a short one that is replaced meanwhile stays until this is done
        for number in range(start >> self._bits, min(len(segments), (stop - 1 >> self._bits) + 1)):
            begin = number << self._bits
            touch_pages(segments[number][max(0, start - begin) : stop - begin])

    @property
    def _room(self) -> int:
        """Return how many rows have their place in the segments."""
        return (len(self._segments) - 1 << self._bits) + len(self._segments[-1])

    def _grow(self, count: int) -> None:
        first, whole = self._segments[0], 1 << self._bits
        if len(first) < whole:
            longer = max(count, int(len(first) * _GROWTH))
            self._segments[0] = self._zeros(longer if longer * self.row_bytes <= _COPIED_BYTES else whole)
            self._segments[0][: len(first)] = first
        while len(self._segments) << self._bits < count:
            self._segments.append(self._zeros(whole))
        addresses = [segment.ctypes.data for segment in self._segments]
        self.rows = Segments(np.array(addresses, np.uint64), self._segments[0], self._bits)

    def _zeros(self, rows: int) -> Array:
        size = min(rows, 1 << self._bits) * self.row_bytes
        room = np.zeros(size + _CACHE_LINE, np.uint8)
        start = -room.ctypes.data % _CACHE_LINE
        return room[start : start + size].view(self.dtype).reshape(-1, self.width)
