"""Remembers ids for a while, each with when it came and a place of its own, in one pass over the ids of a batch.

The times never go back. What is too old is not looked for: it is met when its id comes again, which keeps the place, or
when the memory is full of it, which frees all such places at once. So there are at most about twice as many places as
ids that are remembered.
"""

from __future__ import annotations

import numpy as np

from fleet.numeric.ids import mix, packed_ids
from fleet.numeric.jit import Array, Ids, compiled

#: There is memory for so many ids, at least.
_FEWEST = 1 << 10

#: No time at all.
NEVER = np.iinfo(np.int64).max


#: What is known of an id, side by side, as each of them is met somewhere else in memory.
_ID, _PLACE, _TIME = range(3)


class RecentIds:
    def __init__(self) -> None:
        #: by hash; no id has the place -1
        self._known = _memory(2 * _FEWEST)
        self._count, self._most = 0, _FEWEST
        #: how many places there are, and which of them are free
        self.places = 0
        self._free = np.empty(_FEWEST, np.int64)
        self._freed = 0

    def meet(self, ids: Ids, now: int, since: int) -> tuple[Array, Ids, int]:
        """Say of distinct ids which have come since then, where each of them lies, and when the first of those has
        come. The others come now."""
        if self._count + len(ids) > self._most:
            self._rebuild(len(ids), since)
        held, places = np.empty(len(ids), np.bool_), np.empty(len(ids), np.int64)
        state = np.array([self._count, self.places, self._freed, now, since])
        self._count, self.places, self._freed, oldest = _meet(
            packed_ids(ids), self._known, self._free, state, held, places
        )
        return held, places, oldest

    def _rebuild(self, more: int, since: int) -> None:
        """Make room for more ids, without those that have not come since then."""
        live = int(np.count_nonzero((self._known[:, _PLACE] >= 0) & (self._known[:, _TIME] >= since)))
        self._most = max(_FEWEST, 2 * (live + more))
        size = 2 * _FEWEST
        while size < 2 * self._most:
            size *= 2
        known, free = _memory(size), np.empty(max(self.places, self._most), np.int64)
        free[: self._freed] = self._free[: self._freed]
        self._count, self._freed = _move(self._known, since, known, free, self._freed)
        self._known, self._free = known, free


def _memory(size: int) -> Ids:
    return np.full((size, 3), -1, np.int64)


@compiled
def _meet(ids: Ids, known: Ids, free: Ids, state: Ids, held: Array, places: Ids) -> tuple[int, int, int, int]:
    count, most, freed, now, since = state
    bits = 0
    while (1 << bits) < len(known):
        bits += 1
    shift, mask, oldest = np.uint64(64 - bits), len(known) - 1, NEVER
    for k in range(ids.size):  # by itself, as the processor computes several at once
        places[k] = np.int64(mix(np.uint64(ids[k])) >> shift)
    for k in range(ids.size):
        at = places[k]
        while known[at, _PLACE] >= 0 and known[at, _ID] != ids[k]:
            at = (at + 1) & mask
        held[k] = known[at, _PLACE] >= 0 and known[at, _TIME] >= since
        if held[k]:
            oldest = min(oldest, known[at, _TIME])
        else:
            known[at, _TIME] = now
            if known[at, _PLACE] < 0:
                known[at, _ID] = ids[k]
                count += 1
                if freed:
                    freed -= 1
                    known[at, _PLACE] = free[freed]
                else:
                    known[at, _PLACE] = most
                    most += 1
        places[k] = known[at, _PLACE]
    return count, most, freed, oldest


@compiled
def _move(known: Ids, since: int, into: Ids, free: Ids, freed: int) -> tuple[int, int]:
    bits = 0
    while (1 << bits) < len(into):
        bits += 1
    shift, mask, count = np.uint64(64 - bits), len(into) - 1, 0
    for k in range(len(known)):
        if known[k, _PLACE] < 0:
            continue
        if known[k, _TIME] < since:
            free[freed] = known[k, _PLACE]
            freed += 1
            continue
        at = np.int64(mix(np.uint64(known[k, _ID])) >> shift)
        while into[at, _PLACE] >= 0:
            at = (at + 1) & mask
        into[at, _ID], into[at, _PLACE], into[at, _TIME] = known[k, _ID], known[k, _PLACE], known[k, _TIME]
        count += 1
    return count, freed
