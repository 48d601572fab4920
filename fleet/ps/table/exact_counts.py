"""Counts ids that have no row yet, exactly, in as little memory as an open-addressing table can do with.

``mix`` is a bijection, so the hash of an id stands for it. Its high bits choose one of many parts, each a table of its
own with hashes and counts; a count of zero is an empty place. A part that is full moves into one a fifth larger, which
takes little time as it is a small part of all, and parts fill up one after the other, as each has sizes of its own.
Memory of a part goes back to the system as a whole.

A view shows the counts as they were at one moment: what changes in parts that it has not yet read is noted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import mix, packed, packed_ids
from fleet.numeric.jit import Array, Ids, Rows, Segments, compiled, prefetch, row
from fleet.numeric.pages import Room

_BITS = 8
_PARTS = 1 << _BITS
_PART_SHIFT = np.uint64(64 - _BITS)
#: What a part is numbered from: a place is the part's number, and the place within it.
_PLACE_BITS = 40
#: Of a hash, the 32 bits that follow those of the part give the place where probes begin.
_HOME_SHIFT, _HOME_BITS = np.uint64(32 - _BITS), np.uint64(32)
_HOME_MASK = np.uint64((1 << 32) - 1)

_SMALLEST = 16
_GROWTH = 1.2
#: A part is full when this many of its places in a hundred are taken.
_FULL = 85
#: From this size on a part has its memory from the system.
_MAPPED_BYTES = 1 << 16
#: Ids between one that is asked for and one that is needed.
_APART = 8

_NO_IDS = np.empty(0, np.int64)


class ExactCounts:
    """Counts by id. ``dtype`` is what a count is kept in."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        #: what counts are added up and told in
        self._wide = np.dtype(np.float64 if self.dtype.kind == "f" else np.int64)
        self._sizes = np.zeros(_PARTS, np.int64)
        self._taken = np.zeros(_PARTS, np.int64)
        self._steps = np.zeros(_PARTS, np.int64)
        self._parts: list[tuple[Array, Array]] = []
        self._views: list[ExactView] = []
        for number in range(_PARTS):
            self._parts.append(self._larger(number))
        self._point()

    def __len__(self) -> int:
        return int(self._taken.sum())

    @property
    def nbytes(self) -> int:
        return int(self._sizes.sum()) * (8 + self.dtype.itemsize)

    def add(self, ids: Ids, amounts: Array) -> Array:
        """Add to the counts of ids, which are distinct, and return what they are then."""
        ids, amounts = packed_ids(ids), packed(amounts, self._wide)
        self._tell_views(ids)
        totals = np.empty(ids.size, self._wide)
        done = 0
        while done < ids.size:
            full, done = _add(self._keys, self._counts, self._sizes, self._taken, ids, amounts, totals, done)
            if done < ids.size:
                self._grow(int(full))
        return totals

    def of(self, ids: Ids) -> Array:
        """Return the counts of ids, 0 for those that were not counted."""
        ids = packed_ids(ids)
        out = np.zeros(ids.size, self._wide)
        _find(self._keys, self._counts, self._sizes, ids, out)
        return out

    def remove(self, ids: Ids) -> None:
        """Forget the counts of ids."""
        ids = packed_ids(ids)
        self._tell_views(ids)
        _remove(self._keys, self._counts, self._sizes, self._taken, ids)

    def view(self, *, frozen: bool) -> ExactView:
        """Return the counts as they are now; ``frozen``, they stay so while others come."""
        view = ExactView(self._parts, self._taken, self._wide, self._views.remove if frozen else None)
        if frozen:
            self._views.append(view)
        return view

    def _tell_views(self, ids: Ids) -> None:
        for view in self._views:
            view.note(ids, self.of(ids))

    def _grow(self, number: int) -> None:
        keys, counts = self._parts[number]
        larger = self._larger(number)
        _refill(keys, counts, *larger)
        self._parts[number] = larger
        self._point(number)

    def _larger(self, number: int) -> tuple[Array, Array]:
        """Return room for a part, a step larger than it is: at no two parts are the steps the same."""
        size = math.ceil(_SMALLEST * _GROWTH ** (int(self._steps[number]) + number / _PARTS))
        self._steps[number] += 1
        self._sizes[number] = size
        nbytes = size * (8 + self.dtype.itemsize)
        if nbytes < _MAPPED_BYTES:
            room = np.zeros(size, np.uint64), np.zeros(size, self.dtype)
        else:
            memory = Room(nbytes)
            memory.need(nbytes)
            room = memory.bytes[: size * 8].view(np.uint64), memory.bytes[size * 8 :].view(self.dtype)
        return room[0].reshape(-1, 1), room[1].reshape(-1, 1)

    def _point(self, number: int | None = None) -> None:
        """Tell compiled functions where the parts are."""
        if number is None:
            self._keys, self._counts = (
                Segments(np.array([part[at].ctypes.data for part in self._parts], np.uint64), like, _PLACE_BITS)
                for at, like in enumerate((np.empty((1, 1), np.uint64), np.empty((1, 1), self.dtype)))
            )
        else:
            for at, rows in enumerate((self._keys, self._counts)):
                rows.addresses[number] = self._parts[number][at].ctypes.data


class ExactView:
    """Shows counts as they were at one moment, part by part."""

    def __init__(
        self,
        parts: list[tuple[Array, Array]],
        taken: Ids,
        wide: np.dtype[Any],
        leave: Callable[[ExactView], None] | None,
    ) -> None:
        """``leave`` ends that changes are noted, if they are."""
        self._parts, self._taken, self._wide, self._leave = parts, taken, wide, leave
        self._next = 0
        #: hashes that changed since, in parts that are not read yet, and their counts before
        self._changed: list[tuple[Array, Array]] = []

    def note(self, ids: Ids, counts: Array) -> None:
        """Note what ids are about to be changed from."""
        hashes = _hashed(ids)
        later = np.int64(self._next) <= (hashes >> _PART_SHIFT).astype(np.int64)
        if later.any():
            self._changed.append((hashes[later], counts[later]))

    def export(self, start: int, most: int) -> tuple[dict[str, Array], int | None]:
        """Return ids and counts of parts from a number on, about ``most`` of them, and which part is next."""
        stop, room = start, most
        while stop < _PARTS and (room > 0 or stop == start):
            room -= int(self._taken[stop])
            stop += 1
        hashes, counts = [], []
        for keys, numbers in self._parts[start:stop]:
            there = numbers[:, 0] != 0
            hashes.append(keys[there, 0])
            counts.append(numbers[there, 0].astype(self._wide))
        found, numbers = self._undone(np.concatenate(hashes), np.concatenate(counts), start, stop)
        self._next = stop
        if stop == _PARTS:
            self.leave()
        return {"ids": _unhashed(found), "counts": numbers}, stop if stop < _PARTS else None

    def leave(self) -> None:
        """Note nothing any more."""
        leave, self._leave = self._leave, None
        self._changed.clear()
        if leave is not None:
            leave(self)

    def _undone(self, hashes: Array, counts: Array, start: int, stop: int) -> tuple[Array, Array]:
        """Return hashes and counts of some parts without what has changed."""
        if not self._changed:
            return hashes, counts
        changed, before = (np.concatenate(each) for each in zip(*self._changed, strict=True))
        part = (changed >> _PART_SHIFT).astype(np.int64)
        here = (part >= start) & (part < stop)
        self._changed = [(changed[~here], before[~here])] if not here.all() else []
        changed, first = np.unique(changed[here], return_index=True)
        before = before[here][first]
        left = ~np.isin(hashes, changed)
        there = before != 0
        return np.concatenate([hashes[left], changed[there]]), np.concatenate([counts[left], before[there]])


@compiled
def _home(hashed: np.uint64, size: int) -> Any:
    return np.int64((((hashed >> _HOME_SHIFT) & _HOME_MASK) * np.uint64(size)) >> _HOME_BITS)


@compiled
def _search(keys: Rows, counts: Rows, sizes: Ids, id: int) -> tuple[Any, Any, Any, Any]:
    """Return an id's hash, its part, where that begins, and its place there, which is empty if it has no count."""
    hashed = mix(np.uint64(id))
    part = np.int64(hashed >> _PART_SHIFT)
    base, size = part << _PLACE_BITS, sizes[part]
    at = _home(hashed, size)
    while row(counts, base + at)[0] != 0 and row(keys, base + at)[0] != hashed:
        at = at + 1 if at + 1 < size else 0
    return hashed, part, base, at


@compiled
def _add(
    keys: Rows, counts: Rows, sizes: Ids, taken: Ids, ids: Ids, amounts: Array, totals: Array, start: int
) -> tuple[Any, int]:
    """Add from an id on, and return how far that went; the part to which the next one belongs is full, if there is
    one."""
    for k in range(start, ids.size):
        if k + _APART < ids.size:
            ahead = mix(np.uint64(ids[k + _APART]))
            part = np.int64(ahead >> _PART_SHIFT)
            prefetch(keys, (part << _PLACE_BITS) + _home(ahead, sizes[part]))
            prefetch(counts, (part << _PLACE_BITS) + _home(ahead, sizes[part]))
        hashed, part, base, at = _search(keys, counts, sizes, ids[k])
        count = row(counts, base + at)
        if count[0] == 0 and amounts[k] > 0:
            if (taken[part] + 1) * 100 > sizes[part] * _FULL:
                return part, k
            taken[part] += 1
            row(keys, base + at)[0] = hashed
        count[0] += amounts[k]
        totals[k] = count[0]
    return 0, ids.size


@compiled
def _find(keys: Rows, counts: Rows, sizes: Ids, ids: Ids, out: Array) -> None:
    for k in range(ids.size):
        _, _, base, at = _search(keys, counts, sizes, ids[k])
        out[k] = row(counts, base + at)[0]


@compiled
def _remove(keys: Rows, counts: Rows, sizes: Ids, taken: Ids, ids: Ids) -> None:
    for k in range(ids.size):
        _, part, base, at = _search(keys, counts, sizes, ids[k])
        size = sizes[part]
        if row(counts, base + at)[0] == 0:
            continue
        taken[part] -= 1
        # Those that follow and would no longer be found come forward.
        other = at
        while True:
            other = other + 1 if other + 1 < size else 0
            if row(counts, base + other)[0] == 0:
                break
            moved = row(keys, base + other)[0]
            home = _home(moved, size)
            if (other - home + size) % size >= (other - at + size) % size:
                row(keys, base + at)[0] = moved
                row(counts, base + at)[0] = row(counts, base + other)[0]
                at = other
        row(counts, base + at)[0] = 0


@compiled
def _refill(keys: Array, counts: Array, larger_keys: Array, larger_counts: Array) -> None:
    size = len(larger_keys)
    for k in range(len(keys)):
        if counts[k, 0] != 0:
            at = _home(keys[k, 0], size)
            while larger_counts[at, 0] != 0:
                at = at + 1 if at + 1 < size else 0
            larger_keys[at, 0], larger_counts[at, 0] = keys[k, 0], counts[k, 0]


@compiled
def _hashed(ids: Ids) -> npt.NDArray[np.uint64]:
    out = np.empty(ids.size, np.uint64)
    for k in range(ids.size):
        out[k] = mix(np.uint64(ids[k]))
    return out


@compiled
def _unhashed(hashes: npt.NDArray[np.uint64]) -> Ids:
    """Return the ids that ``mix`` makes these of."""
    out = np.empty(hashes.size, np.int64)
    for k in range(hashes.size):
        x = hashes[k]
        x ^= (x >> np.uint64(31)) ^ (x >> np.uint64(62))
        x *= np.uint64(0x319642B2D24D8EC3)
        x ^= (x >> np.uint64(27)) ^ (x >> np.uint64(54))
        x *= np.uint64(0x96DE1B173F119089)
        x ^= (x >> np.uint64(30)) ^ (x >> np.uint64(60))
        out[k] = np.int64(x)
    return out
