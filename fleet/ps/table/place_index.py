"""Finds where the row of an id lies, in memory or in a file, with some eleven bytes an id.

An entry has 64 bits: 0 is empty, else the low 38 bits are place + 1 and the high 26 bits are a tag, 26 bits of the id's
hash. The ids themselves lie beside the rows. So an id that has a row in a file is only *likely* to be there: whoever
reads the row looks at its id, and asks for the next place if it is another's.

The hash's first ten bits choose one of 1024 parts, each an open-addressing table of its own. A home in a part follows
from its size and the tag alone, so a part grows without a look at the ids, and by a quarter at a time: nothing is ever
twice as large as it has to be, and no call does more than a few parts' work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import mix
from fleet.numeric.jit import AHEAD, Ids, Rows, Segments, compiled, prefetch, row

_PLACE_BITS, _TAG_BITS, _PART_BITS = 38, 26, 10
_TAG_SHIFT = np.uint64(_PLACE_BITS)
_PLACE_MASK = np.uint64((1 << _PLACE_BITS) - 1)
_TAG_MASK = np.uint64((1 << _TAG_BITS) - 1)
_PART_SHIFT = np.uint64(64 - _PART_BITS)
_BELOW_PART = np.uint64(64 - _PART_BITS - _TAG_BITS)
#: Entries are numbered through, each part in a range of its own.
_RANGE_BITS = 40

_PARTS = 1 << _PART_BITS
_SMALLEST = 8
_MAX_LOAD = 0.8
_GROWTH = 1.25

#: Where a row lies: in memory at a slot, or in a file as a record with a number below this.
MOST_RECORDS = 1 << (_PLACE_BITS - 1)

#: Where the row of a record is, if not at a slot.
ONLY_THERE, ELSEWHERE = -1, -2

Sizes = npt.NDArray[np.int64]


class PlaceIndex:
    """Keeps a place for each id: ``slot << 1 | 1`` in memory, ``record << 1`` in a file. The caller keeps the ids of
    slots in ``keys``."""

    #: what it takes when it is empty
    LEAST_BYTES = 8 * _PARTS * _SMALLEST

    def __init__(self) -> None:
        self._parts = [np.zeros((_SMALLEST, 1), np.uint64) for _ in range(_PARTS)]
        self._sizes = np.full(_PARTS, _SMALLEST, np.int64)
        self._counts = np.zeros(_PARTS, np.int64)
        addresses = np.array([part.ctypes.data for part in self._parts], np.uint64)
        self._entries = Segments(addresses, np.zeros((1, 1), np.uint64), _RANGE_BITS)

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def nbytes(self) -> int:
        return 8 * int(self._sizes.sum())

    def find(self, keys: Rows, ids: Ids) -> tuple[Ids, Ids]:
        """Return for every id its place, which is likely in a file and sure in memory, or -1; and the number of the
        entry that says so."""
        places, numbers = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        _find(self._entries, self._sizes, keys, ids, places, numbers)
        return places, numbers

    def find_next(self, keys: Rows, id: int, number: int) -> tuple[int, int]:
        """Return the next place of an id after the entry that turned out to be another's, and its entry's number."""
        return _find_next(self._entries, self._sizes, keys, id, number)

    def trace(self, keys: Rows, records_by_slot: Rows, ids: Ids, records: Ids) -> Ids:
        """Return for every record of a file, which has this id: the slot of the row that is in memory as it is there,
        ``ONLY_THERE`` if it is not in memory, or ``ELSEWHERE`` if the row is another one by now, or gone."""
        out = np.empty(ids.size, np.int64)
        _trace(self._entries, self._sizes, keys, records_by_slot, ids, records, out)
        return out

    def enter(self, ids: Ids, places: Ids) -> None:
        """Add ids that have no place."""
        wanted = self._counts + np.bincount(_parts_of(ids), minlength=_PARTS)
        for part in np.flatnonzero(wanted > self._sizes * _MAX_LOAD).tolist():
            self._grow(part, int(wanted[part]))
        _enter(self._entries, self._sizes, self._counts, ids, places)

    def move(self, ids: Ids, old: Ids, new: Ids) -> None:
        """Change the places of ids."""
        _move(self._entries, self._sizes, ids, old, new)

    def remove(self, ids: Ids, places: Ids) -> None:
        """Take ids away, which have these places."""
        _remove(self._entries, self._sizes, self._counts, ids, places)

    def _grow(self, part: int, count: int) -> None:
        old, size = self._parts[part], int(self._sizes[part])
        while count > size * _MAX_LOAD:
            size = int(size * _GROWTH) + _SMALLEST
        self._parts[part] = new = np.zeros((size, 1), np.uint64)
        _fill(old, new)
        self._sizes[part] = size
        self._entries.addresses[part] = new.ctypes.data


@compiled
def _parts_of(ids: Ids) -> Ids:
    out = np.empty(ids.size, np.int64)
    for k in range(ids.size):
        out[k] = np.int64(mix(np.uint64(ids[k])) >> _PART_SHIFT)
    return out


@compiled
def _start(id: int, sizes: Sizes) -> tuple[Any, Any, Any]:
    """Return the tag of an id, its part, and its home there."""
    hashed = mix(np.uint64(id))
    part = np.int64(hashed >> _PART_SHIFT)
    tag = (hashed >> _BELOW_PART) & _TAG_MASK
    return tag, part, np.int64((tag * np.uint64(sizes[part])) >> np.uint64(_TAG_BITS))


@compiled
def _search(entries: Rows, size: int, keys: Rows, id: int, tag: np.uint64, base: int, at: int) -> tuple[Any, Any]:
    """Return the first place from an entry on that may be the id's, and the entry's number."""
    while True:
        entry = row(entries, base + at)[0]
        if entry == 0:
            return -1, -1
        if entry >> _TAG_SHIFT == tag:
            place = np.int64(entry & _PLACE_MASK) - 1
            if place & 1 == 0 or row(keys, place >> 1)[0] == id:
                return place, base + at
        at += 1
        if at == size:
            at = 0


@compiled
def _prefetch_home(entries: Rows, sizes: Sizes, ids: Ids, k: int) -> None:
    """Ask for the entry where the search for an id begins, if there is such an id."""
    if k < ids.size:
        _, part, home = _start(ids[k], sizes)
        prefetch(entries, (part << _RANGE_BITS) + home)


@compiled
def _find(entries: Rows, sizes: Sizes, keys: Rows, ids: Ids, places: Ids, numbers: Ids) -> None:
    # Entries are asked for some ids ahead, and the keys at their homes half as many.
    for k in range(-2 * AHEAD, ids.size):
        first = k + 2 * AHEAD
        if first < ids.size:
            _, part, home = _start(ids[first], sizes)
            numbers[first] = (part << _RANGE_BITS) + home
            prefetch(entries, numbers[first])
        second = k + AHEAD
        if 0 <= second < ids.size:
            place = np.int64(row(entries, numbers[second])[0] & _PLACE_MASK) - 1
            if place & 1 == 1:
                prefetch(keys, place >> 1)
        if k >= 0:
            tag, part, home = _start(ids[k], sizes)
            places[k], numbers[k] = _search(entries, sizes[part], keys, ids[k], tag, part << _RANGE_BITS, home)


@compiled
def _find_next(entries: Rows, sizes: Sizes, keys: Rows, id: int, number: int) -> tuple[int, int]:
    tag, part, _ = _start(id, sizes)
    base = part << _RANGE_BITS
    at = number - base + 1
    return _search(entries, sizes[part], keys, id, tag, base, 0 if at == sizes[part] else at)


@compiled
def _trace(entries: Rows, sizes: Sizes, keys: Rows, records_by_slot: Rows, ids: Ids, records: Ids, out: Ids) -> None:
    for k in range(ids.size):
        _prefetch_home(entries, sizes, ids, k + AHEAD)
        tag, part, at = _start(ids[k], sizes)
        place, number = _search(entries, sizes[part], keys, ids[k], tag, part << _RANGE_BITS, at)
        while place >= 0 and place & 1 == 0 and place >> 1 != records[k]:
            place, number = _find_next(entries, sizes, keys, ids[k], number)
        if place & 1 == 0:
            out[k] = ONLY_THERE
        elif place >= 0 and row(records_by_slot, place >> 1)[0] == records[k]:
            out[k] = place >> 1
        else:
            out[k] = ELSEWHERE


@compiled
def _enter(entries: Rows, sizes: Sizes, counts: Sizes, ids: Ids, places: Ids) -> None:
    for k in range(ids.size):
        tag, part, at = _start(ids[k], sizes)
        base = part << _RANGE_BITS
        while row(entries, base + at)[0] != 0:
            at += 1
            if at == sizes[part]:
                at = 0
        row(entries, base + at)[0] = (tag << _TAG_SHIFT) | np.uint64(places[k] + 1)
        counts[part] += 1


@compiled
def _entry_of(entries: Rows, sizes: Sizes, id: int, place: int) -> Any:
    """Return the number of an id's entry, which is there and says this place."""
    tag, part, at = _start(id, sizes)
    base = part << _RANGE_BITS
    wanted = (tag << _TAG_SHIFT) | np.uint64(place + 1)
    while row(entries, base + at)[0] != wanted:
        at += 1
        if at == sizes[part]:
            at = 0
    return base + at


@compiled
def _move(entries: Rows, sizes: Sizes, ids: Ids, old: Ids, new: Ids) -> None:
    for k in range(ids.size):
        _prefetch_home(entries, sizes, ids, k + AHEAD)
        entry = row(entries, _entry_of(entries, sizes, ids[k], old[k]))
        entry[0] = (entry[0] & ~_PLACE_MASK) | np.uint64(new[k] + 1)


@compiled
def _remove(entries: Rows, sizes: Sizes, counts: Sizes, ids: Ids, places: Ids) -> None:
    for k in range(ids.size):
        _, part, _ = _start(ids[k], sizes)
        base, size = part << _RANGE_BITS, sizes[part]
        hole = _entry_of(entries, sizes, ids[k], places[k]) - base
        at = hole
        while True:  # entries that were pushed on from the hole, or from before it, move up
            at += 1
            if at == size:
                at = 0
            entry = row(entries, base + at)[0]
            if entry == 0:
                break
            home = np.int64(((entry >> _TAG_SHIFT) * np.uint64(size)) >> np.uint64(_TAG_BITS))
            if (at - home + size) % size >= (at - hole + size) % size:
                row(entries, base + hole)[0] = entry
                hole = at
        row(entries, base + hole)[0] = 0
        counts[part] -= 1


@compiled
def _fill(old: npt.NDArray[np.uint64], new: npt.NDArray[np.uint64]) -> None:
    size = len(new)
    at: Any
    for k in range(len(old)):
        entry = old[k, 0]
        if entry != 0:
            at = np.int64(((entry >> _TAG_SHIFT) * np.uint64(size)) >> np.uint64(_TAG_BITS))
            while new[at, 0] != 0:
                at += 1
                if at == size:
                    at = 0
            new[at, 0] = entry
