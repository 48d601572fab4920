"""An index finds the slot of an id: an open-addressing table that grows a few places at a time.

An entry has 64 bits: 0 is empty, else the low 40 bits are slot + 1 and the high 24 bits repeat 24 bits of the id's
hash. A probe compares those first and looks at the id itself only when they agree, so absent ids and collisions cost
no second cache miss, and no id has to be set aside to mean "empty". An entry's home, where probes begin, is given by
the hash's high bits: its low bits chose the server and are much alike on one server.

To grow, a table twice as large is put beside the old one, and each id that comes in takes the entries of the next few
homes along. Which of the two tables has an id follows from its home in the old one, so none is looked up in both. Homes
move up to an empty place, so that an entry that lies behind its home goes with it. What has moved stays in the old
table until that goes as a whole, since probes for others lead over it. So to move an entry too early does no harm, nor
to move it twice: those that lie at the beginning because the end was full are.

An id that is removed leaves a dead entry, as probes for others lead over it. A dead entry keeps its 24 bits and leads
to one of two slots that no row has. Each of these holds an id, and a dead entry leads to the one whose id has other 24
bits, so that no probe takes it for what it looks for. Dead entries go when their table does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import mix, touch_pages
from fleet.numeric.jit import Ids, Rows, Segments, compiled, lying_at, prefetch, row

Entries = npt.NDArray[np.uint64]

_SLOT_BITS = 40
_TAG_SHIFT = np.uint64(_SLOT_BITS)
_SLOT_MASK = np.uint64((1 << _SLOT_BITS) - 1)

#: The table begins to grow when more than this part of it is taken.
_MAX_LOAD = 0.6
#: Where ids were removed, a table that is no fuller than this without them is left for one of the same size.
_ROOMY_LOAD = 0.4
#: Homes that move with an id that comes in: by the time that all have, the old table is a fifth of its places fuller.
MOVED_PER_ID = 5
_SMALLEST = 128

#: Ids between one that is asked for and one that is needed; more than rows have, as an id takes less time than a row.
_APART = 32


class Index:
    """Finds slots by id. The caller keeps the ids themselves: ``keys`` has the id of every slot."""

    def __init__(self) -> None:
        #: the next slot, the ids that are there, and the places that they take, with those of dead entries
        self._count = self._live = self._taken = 0
        self._now: Entries = np.zeros(_SMALLEST, np.uint64)
        #: the table that is left, and how many of its homes have moved, from the first one on
        self._old: Entries | None = None
        self._moved = 0

    @property
    def nbytes(self) -> int:
        return self._now.nbytes + (0 if self._old is None else self._old.nbytes)

    def find(self, keys: Rows, ids: Ids) -> Ids:
        """Return the slot of every id, -1 where there is none."""
        slots = np.empty(ids.size, np.int64)
        _find(*self._tables(), keys, ids, slots)
        return slots

    def places(self) -> tuple[int, ...]:
        """Return what ``find_each`` has to know of this index, until the next call that changes it."""
        now, _, old, _, moved = self._tables()
        return now.ctypes.data, now.size, old.ctypes.data, old.size, moved

    def insert(self, keys: Rows, ids: Ids) -> tuple[Ids, int]:
        """Return the slot of every id, where new ids get the next slots, and how many there are now. ``keys`` has room
        for all of them, and the new ids are put there."""
        if self._taken + ids.size > self._now.size * _MAX_LOAD:
            self._provide(keys, int((self.find(keys, ids) < 0).sum()))
        self._move(keys, MOVED_PER_ID * ids.size)
        slots, before = np.empty(ids.size, np.int64), self._count
        self._count = int(_insert(*self._tables(), keys, ids, slots, before))
        self._note(self._count - before)
        return slots, self._count

    def enter(self, keys: Rows, ids: Ids, slots: Ids, count: int) -> None:
        """Give these slots to ids that are new and distinct; after that, ``count`` is the next slot."""
        self._provide(keys, ids.size)
        self._move(keys, MOVED_PER_ID * ids.size)
        _enter_at(*self._tables(), keys, ids, slots)
        self._count = count
        self._note(ids.size)

    def remove(self, keys: Rows, ids: Ids, dead: Ids) -> Ids:
        """Return the slots that ids, which are distinct, have had until now, -1 where there was none. ``dead`` are two
        slots that no id has, and ``keys`` has two ids of other hashes there."""
        slots = np.full(ids.size, -1)
        for entries in [self._now] if self._old is None else [self._old, self._now]:
            # One that has moved has stayed where it was as well, and would move again where it lies at the beginning.
            _remove(entries, _shift(entries), keys, ids, dead, slots)
        self._live -= int((slots >= 0).sum())
        return slots

    def skip(self, slots: int) -> None:
        """Give the next slots to no id."""
        self._count += slots

    def _note(self, ids: int) -> None:
        self._live, self._taken = self._live + ids, self._taken + ids

    def _tables(self) -> tuple[Entries, int, Entries, int, int]:
        """Return the present table, the one that is being left, and how many of its homes have moved."""
        if self._old is None:
            return self._now, _shift(self._now), self._now, _shift(self._now), 0
        return self._now, _shift(self._now), self._old, _shift(self._old), self._moved

    def reserve(self, keys: Rows, count: int) -> None:
        """Provide places for so many ids in all."""
        self._provide(keys, count - self._live)

    def _provide(self, keys: Rows, more: int) -> None:
        """Provide places for so many more ids."""
        if self._taken + more <= self._now.size * _MAX_LOAD:
            return
        size, load = self._now.size, _MAX_LOAD if self._taken == self._live else _ROOMY_LOAD
        while self._live + more > size * load:
            size *= 2
        if self._old is not None:  # as many ids come at once as there are places
            self._move(keys, self._old.size)
        self._old, self._now, self._moved = self._now, np.zeros(size, np.uint64), 0
        self._taken = self._live

    def touch(self) -> None:
        """Make the system provide the memory of all places. Any thread may call this, and while ids come."""
        touch_pages(self._now)

    def _move(self, keys: Rows, homes: int) -> None:
        if self._old is not None:
            homes = min(homes, self._old.size - self._moved)
            self._moved += _move(self._old, self._now, _shift(self._now), keys, self._moved, homes)
            if self._moved >= self._old.size:
                self._old = None


def _shift(entries: Entries) -> int:
    """Return how far hashes are shifted right to be homes."""
    return 65 - entries.size.bit_length()


def find_each(places: Ids, like: Segments, ids: Ids, stops: Ids, slots: Ids) -> None:
    """Find in several indexes what ``find`` finds in one: the ids of each lie behind those of the one before, and end
    at its stop. ``places`` has for each index what its ``places`` returns, then where its keys' segments are listed,
    and how many they are; ``like`` are the keys of one."""
    _find_each(places, like, _LIKE_ENTRIES, ids, stops, slots)


#: For the type of the elements that lie at an address.
_LIKE_ENTRIES: Entries = np.zeros(1, np.uint64)


@compiled
def _slot(entry: np.uint64) -> np.int64:
    return np.int64(entry & _SLOT_MASK) - 1


@compiled
def _likely(entries: Entries, at: np.int64, hashed: np.uint64) -> np.int64:
    """Return the first place from ``at`` on whose entry has 24 equal bits, or is empty."""
    while entries[at] != 0 and entries[at] ^ (hashed << _TAG_SHIFT) > _SLOT_MASK:
        at = (at + 1) & (entries.size - 1)
    return at


@compiled
def _find(now: Entries, shift: int, old: Entries, old_shift: int, moved: int, keys: Rows, ids: Ids, slots: Ids) -> None:
    # Every id goes through three stages, with others between them, so that nothing waits for memory: its home is asked
    # for; the entry there gives a slot, and the id at that is asked for; the two ids are compared.
    for k in range(ids.size):
        slots[k] = np.int64(mix(np.uint64(ids[k])))  # until the slot is known
    for k in range(-_APART, ids.size + _APART):
        if k + _APART < ids.size:
            hashed = np.uint64(slots[k + _APART])
            home = np.int64(hashed >> np.uint64(old_shift))
            if home < moved:
                prefetch(now, np.int64(hashed >> np.uint64(shift)))
            else:
                prefetch(old, home)
        if 0 <= k < ids.size:
            hashed = np.uint64(slots[k])
            home = np.int64(hashed >> np.uint64(old_shift))
            if home < moved:
                slots[k] = _slot(now[_likely(now, np.int64(hashed >> np.uint64(shift)), hashed)])
            else:
                slots[k] = _slot(old[_likely(old, home, hashed)])
            prefetch(keys, slots[k])
        known = k - _APART
        if known >= 0 and slots[known] >= 0 and row(keys, slots[known])[0] != ids[known]:
            if np.int64(mix(np.uint64(ids[known])) >> np.uint64(old_shift)) < moved:
                slots[known] = _slot(now[_searched(now, shift, keys, ids[known])])
            else:
                slots[known] = _slot(old[_searched(old, old_shift, keys, ids[known])])


@compiled
def _find_each(places: Ids, like: Segments, entries: Entries, ids: Ids, stops: Ids, slots: Ids) -> None:
    start = 0
    for t in range(stops.size):
        at, size, old_at, old_size, moved, listed, segments = places[t]
        now, old = lying_at(entries, at, size), lying_at(entries, old_at, old_size)
        keys = Segments(lying_at(entries, listed, segments), like.like, like.bits)
        stop = stops[t]
        _find(now, _shift_of(size), old, _shift_of(old_size), moved, keys, ids[start:stop], slots[start:stop])
        start = stop


@compiled
def _shift_of(size: int) -> int:
    shift = 64
    while size > 1:
        shift, size = shift - 1, size >> 1
    return shift


@compiled
def _searched(entries: Entries, shift: int, keys: Rows, id: np.int64) -> np.int64:
    """Return the place where an id is or would be, when another one has the same 24 bits."""
    hashed = mix(np.uint64(id))
    at = _likely(entries, np.int64(hashed >> np.uint64(shift)), hashed)
    while entries[at] != 0 and row(keys, _slot(entries[at]))[0] != id:
        at = _likely(entries, (at + 1) & (entries.size - 1), hashed)
    return at


@compiled
def _insert(
    now: Entries, shift: int, old: Entries, old_shift: int, moved: int, keys: Rows, ids: Ids, slots: Ids, count: int
) -> int:
    # The three stages of ``_find``; an id whose place turns out to be empty takes it.
    for k in range(ids.size):
        slots[k] = np.int64(mix(np.uint64(ids[k])))
    for k in range(-_APART, ids.size + _APART):
        if k + _APART < ids.size:
            hashed = np.uint64(slots[k + _APART])
            home = np.int64(hashed >> np.uint64(old_shift))
            if home < moved:
                prefetch(now, np.int64(hashed >> np.uint64(shift)))
            else:
                prefetch(old, home)
        if 0 <= k < ids.size:
            hashed = np.uint64(slots[k])
            home = np.int64(hashed >> np.uint64(old_shift))
            if home < moved:
                at = _likely(now, np.int64(hashed >> np.uint64(shift)), hashed)
                count = _enter(now, at, hashed, keys, ids[k], count)
                slots[k] = _slot(now[at])
            else:
                at = _likely(old, home, hashed)
                count = _enter(old, at, hashed, keys, ids[k], count)
                slots[k] = _slot(old[at])
            prefetch(keys, slots[k])
        known = k - _APART
        if known >= 0 and row(keys, slots[known])[0] != ids[known]:
            hashed = mix(np.uint64(ids[known]))
            if np.int64(hashed >> np.uint64(old_shift)) < moved:
                at = _searched(now, shift, keys, ids[known])
                count = _enter(now, at, hashed, keys, ids[known], count)
                slots[known] = _slot(now[at])
            else:
                at = _searched(old, old_shift, keys, ids[known])
                count = _enter(old, at, hashed, keys, ids[known], count)
                slots[known] = _slot(old[at])
    return count


@compiled
def _enter(entries: Entries, at: np.int64, hashed: np.uint64, keys: Rows, id: np.int64, count: int) -> int:
    """Give an id the next slot if its place is empty, and return how many ids there are then."""
    if entries[at] != 0:
        return count
    entries[at] = (hashed << _TAG_SHIFT) | np.uint64(count + 1)
    row(keys, count)[0] = id
    return count + 1


@compiled
def _move(old: Entries, now: Entries, shift: int, keys: Rows, start: int, homes: int) -> int:
    """Move so many homes from ``start`` on, and those up to the next empty place. Return how many they were."""
    done, entry = 0, np.uint64(0)
    while done < homes or entry != 0:
        prefetch(keys, _slot(old[(start + done + _APART) & (old.size - 1)]))
        entry = old[(start + done) & (old.size - 1)]
        done += 1
        if entry == 0:
            continue
        hashed = mix(np.uint64(row(keys, _slot(entry))[0]))
        if entry ^ (hashed << _TAG_SHIFT) <= _SLOT_MASK:  # else it is dead
            at = np.int64(hashed >> np.uint64(shift))
            while now[at] != 0 and now[at] != entry:
                at = (at + 1) & (now.size - 1)
            now[at] = entry
    return done


@compiled
def _enter_at(
    now: Entries, shift: int, old: Entries, old_shift: int, moved: int, keys: Rows, ids: Ids, slots: Ids
) -> None:
    for k in range(ids.size):
        hashed = mix(np.uint64(ids[k]))
        entry = (hashed << _TAG_SHIFT) | np.uint64(slots[k] + 1)
        home = np.int64(hashed >> np.uint64(old_shift))
        if home < moved:
            at = np.int64(hashed >> np.uint64(shift))
            while now[at] != 0:
                at = (at + 1) & (now.size - 1)
            now[at] = entry
        else:
            while old[home] != 0:
                home = (home + 1) & (old.size - 1)
            old[home] = entry
        row(keys, slots[k])[0] = ids[k]


@compiled
def _remove(entries: Entries, shift: int, keys: Rows, ids: Ids, dead: Ids, slots: Ids) -> None:
    for k in range(ids.size):
        at = _searched(entries, shift, keys, ids[k])
        if entries[at] != 0:
            slots[k] = _slot(entries[at])
            entries[at] = _dead(keys, ids[k], dead)


@compiled
def _dead(keys: Rows, id: np.int64, dead: Ids) -> np.uint64:
    """Return the entry that takes the place of an id's."""
    tag, slot = mix(np.uint64(id)) << _TAG_SHIFT, dead[0]
    if mix(np.uint64(row(keys, slot)[0])) << _TAG_SHIFT == tag:
        slot = dead[1]
    return tag | np.uint64(slot + 1)
