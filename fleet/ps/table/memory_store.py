"""Rows lie in memory: in segments that stay where they are, with an index over the ids.

A column grows by whole segments, and nothing is moved for it. They are large, so that systems back them with large
pages, and zeros nobody has written yet, which take no memory where pages are handed out when they are touched. Only
while a column is small its one segment is short, and copied into longer ones. Compiled functions find a row by the
addresses of the segments.

Segments stay when rows are removed, and rows that come take the slots that are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import gather, packed_ids, scatter, stamp, touch_pages, unique
from fleet.numeric.jit import Array, Ids, Segments
from fleet.ps.table.index import Index
from fleet.ps.table.row_file import Reading
from fleet.ps.table.store import Batch, Between, Layout, check_shape

_SEGMENT_BYTES = 32 << 20
#: No more than this is copied when a column grows.
_COPIED_BYTES = 4 << 20
#: A short segment grows by this factor.
_GROWTH = 1.5
#: Rows begin where lines of the cache do, if they are as long: to fetch one is to fetch no other.
_CACHE_LINE = 64
#: About so much memory is touched at a step.
_TOUCHED_BYTES = 2 << 20
#: Rows are looked through for some of them by so many at a time.
_LOOKED_THROUGH = 1 << 20

_NONE = np.empty(0, np.int64)
#: What the two slots hold to which the index's dead entries lead.
_DEAD_IDS = np.array([[0], [1]], np.int64)


class MemoryStore:
    """Implements ``Store`` for a table that fits into memory. Slots are given in the order of insertion, until rows
    are removed."""

    #: all rows are in memory
    most = None

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._count = 0
        self._reserved = 0
        self._keys = _Column(1, 0, np.dtype(np.int64), segment_bytes)
        self._columns: dict[str, _Column] = {}
        self._index = Index()
        #: what is free, once a row was removed
        self._free: _Free | None = None
        self.created = _NONE
        #: None when something may have moved
        self._layout: Layout | None = None

    def __len__(self) -> int:
        return self._count if self._free is None else self._count - self._free.slots_without_rows

    @property
    def nbytes(self) -> int:
        free = 0 if self._free is None else self._free.nbytes
        return self._index.nbytes + self._count * self.row_bytes + free

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self._all())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def figures(self) -> dict[str, int]:
        return {"in_memory": len(self), "on_disk": 0}

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self.find(ids) >= 0

    def find(self, ids: Ids) -> Ids:
        return self._index.find(self._keys.rows, packed_ids(ids))

    def insert(self, ids: Ids) -> Ids:
        self._layout = None
        if self._free is not None:
            return self._insert_where_free(packed_ids(ids), self._free)
        ids, before = packed_ids(ids), self._count
        self._keys.extend(before, before + ids.size)
        slots, self._count = self._index.insert(self._keys.rows, ids)
        for column in self._columns.values():
            column.extend(before, self._count)
        self.created = np.flatnonzero(slots >= before) if self._count > before else _NONE
        return slots

    def _insert_where_free(self, ids: Ids, free: _Free) -> Ids:
        slots = self.find(ids)
        self.created = np.flatnonzero(slots < 0)
        if self.created.size:
            new, places = unique(ids[self.created])
            again, before = free.take(new.size), self._count
            self._count += new.size - again.size
            given = np.concatenate([again, np.arange(before, self._count)])
            for column in self._all():
                column.extend(before, self._count)
                column.clear(again)
            free.extend(self._count)
            self._index.enter(self._keys.rows, new, given, self._count)
            slots[self.created] = given[places]
        return slots

    def remove(self, ids: Ids) -> None:
        self._layout = None
        if self._free is None:
            dead = np.arange(self._count, self._count + 2)
            self._count += 2
            for column in self._all():
                column.extend(dead[0], self._count)
            scatter(self._keys.rows, dead, _DEAD_IDS)
            self._index.skip(2)
            self._free = _Free(dead, self._count, self._segment_bytes)
        slots = self._index.remove(self._keys.rows, packed_ids(ids), self._free.dead)
        self._free.give(slots[slots >= 0])

    def write(self, slots: Ids) -> None:
        """Do nothing: a row has one place."""

    def reserve(self, count: int) -> None:
        self._layout = None
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
            self._layout = None
            self._columns[name] = _Column(width, fill, np.dtype(dtype), self._segment_bytes)
            self._columns[name].extend(0, self._count)
        column = self._columns[name]
        check_shape(name, (column.width, column.dtype), (width, np.dtype(dtype)))
        column.fill = fill

    def column(self, name: str) -> Segments:
        return self._columns[name].rows

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            keys = self._keys.rows
            places = *self._index.places(), keys.addresses.ctypes.data, keys.addresses.size
            self._layout = Layout(places, keys, {name: column.rows for name, column in self._columns.items()})
        return self._layout

    def reading(self, ids: Ids, *, expected: bool) -> None:
        """Return nothing: all rows are in memory."""

    def backlog(self) -> None:
        """Return nothing: no row leaves memory."""

    def take(self, reading: Reading) -> None:
        raise NotImplementedError("nothing is read")

    def to_rewrite(self) -> None:
        """Return nothing: there is no file."""

    def rewrite(self, reading: Reading) -> None:
        raise NotImplementedError("nothing is read")

    def scan(
        self, start: int, most: int, names: Sequence[str], only: Between | None = None, *, briefly: bool = False
    ) -> tuple[Batch, int | None]:
        found: list[Batch] = []
        left = most
        while start < self._count and left > 0:
            if only is None:
                stop = min(start + left, self._count)
                found.append(self._between(start, stop, names, briefly))
            else:
                slots = self._with_rows(np.arange(start, min(start + _LOOKED_THROUGH, self._count)))
                slots = slots[only(self._copied(only.column, slots))][:left]
                found.append(self._batch(slots, names))
                is_full = slots.size == left
                stop = int(slots[-1]) + 1 if is_full else min(start + _LOOKED_THROUGH, self._count)
            left -= found[-1][0].size
            start = stop
        batch, *more = found or [self._batch(_NONE, names)]
        if more:
            rows = {name: np.concatenate([rows[name] for _, rows in found]) for name in names}
            batch = np.concatenate([ids for ids, _ in found]), rows
        return batch, start if start < self._count else None

    def leave(self, place: int) -> None:
        """Do nothing: nothing is kept for a scan."""

    def _between(self, start: int, stop: int, names: Sequence[str], briefly: bool) -> Batch:
        """Return the rows from one slot to another."""
        briefly = briefly or self._free is not None  # then those that are there are copied below
        ids, rows = (
            self._keys.between(start, stop, briefly)[:, 0],
            {name: self._columns[name].between(start, stop, briefly) for name in names},
        )
        if self._free is None:
            return ids, rows
        there = self._free.left_between(start, stop)
        return ids[there], {name: values[there] for name, values in rows.items()}

    def sample(self, count: int, names: Sequence[str]) -> Batch:
        slots = np.linspace(0, self._count, min(count, self._count), endpoint=False, dtype=np.int64)
        return self._batch(self._with_rows(slots), names)

    def _with_rows(self, slots: Ids) -> Ids:
        return slots if self._free is None else self._free.without(slots)

    def _batch(self, slots: Ids, names: Sequence[str]) -> Batch:
        return self.ids(slots), {name: self._copied(name, slots) for name in names}

    def _copied(self, name: str, slots: Ids) -> Array:
        column = self._columns[name]
        rows = np.empty((slots.size, column.width), column.dtype)
        gather(column.rows, slots, rows)
        return rows

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

    def clear(self, slots: Ids) -> None:
        """Make the rows at slots as untouched ones."""
        if slots.size:
            scatter(self.rows, slots, np.full((slots.size, self.width), self.fill, self.dtype))

    def reserve(self, count: int) -> None:
        """Provide segments for so many rows in all."""
        if count > self._room:
            self._grow(count)

    def between(self, start: int, stop: int, briefly: bool) -> Array:
        """Return the rows from ``start`` to ``stop``; copies, unless they are needed ``briefly``."""
        parts: list[Array] = []
        for number in range(start >> self._bits, (stop - 1 >> self._bits) + 1):
            begin = number << self._bits
            parts.append(self._segments[number][max(0, start - begin) : stop - begin])
        return parts[0] if briefly and len(parts) == 1 else np.concatenate(parts)

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


class _Free:
    """Knows the slots that have no row: those that are free, and two dead ones."""

    def __init__(self, dead: Ids, count: int, segment_bytes: int) -> None:
        self.dead = dead
        #: the free slots, the one that was freed last at the end
        self._slots = _Column(1, 0, np.dtype(np.int64), segment_bytes)
        self._count = 0
        #: for every slot, whether it has no row
        self._has_none = _Column(1, 0, np.dtype(np.uint8), segment_bytes)
        self._known = 0
        self.extend(count)
        stamp(self._has_none.rows, dead, 1)

    @property
    def slots_without_rows(self) -> int:
        return self._count + self.dead.size

    @property
    def nbytes(self) -> int:
        return self._count * self._slots.row_bytes + self._known

    def extend(self, count: int) -> None:
        """Know so many slots in all."""
        self._has_none.extend(self._known, count)
        self._known = count

    def give(self, slots: Ids) -> None:
        stamp(self._has_none.rows, slots, 1)
        self._slots.reserve(self._count + slots.size)
        scatter(self._slots.rows, np.arange(self._count, self._count + slots.size), slots.reshape(-1, 1))
        self._count += slots.size

    def take(self, most: int) -> Ids:
        """Return at most so many slots, which are free no longer."""
        taken = min(most, self._count)
        self._count -= taken
        slots = np.empty((taken, 1), np.int64)
        gather(self._slots.rows, np.arange(self._count, self._count + taken), slots)
        stamp(self._has_none.rows, slots[:, 0], 0)
        return slots[:, 0]

    def left_between(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return for the slots from one to another whether they have a row."""
        left: npt.NDArray[np.bool_] = self._has_none.between(start, stop, True)[:, 0] == 0
        return left

    def without(self, slots: Ids) -> Ids:
        """Return those of the slots that have a row."""
        has_none = np.empty((slots.size, 1), np.uint8)
        gather(self._has_none.rows, slots, has_none)
        left: Ids = slots[has_none[:, 0] == 0]
        return left
