"""A slot cache remembers where the ids of recent look-ups stand, for the updates that follow them.

A worker that has looked rows up brings gradients for exactly these ids, in this order. Comparing two arrays takes a
small part of the time that it takes to find every id once more.
"""

from __future__ import annotations

from collections.abc import Hashable

from fleet.numeric.jit import Ids

#: How many ids of all tables are remembered, 16 bytes each. The oldest look-ups are forgotten first.
MOST_IDS = 2 << 20

#: A table's name, or who reads several, and something that is the same for equal ids and seldom for others.
_Key = tuple[Hashable, int, int, int]


class SlotCache:
    def __init__(self) -> None:
        self._known: dict[_Key, tuple[bytes, Ids]] = {}
        self._count = 0

    def remember(self, of: Hashable, ids: Ids, slots: Ids) -> None:
        """Remember the slots that ids had, -1 where there was none."""
        if not 0 < ids.size <= MOST_IDS:
            return
        key = _key(of, ids)
        if key in self._known:
            self._forget(key)
        while self._count + ids.size > MOST_IDS:
            self._forget(next(iter(self._known)))
        self._known[key] = ids.tobytes(), slots
        self._count += ids.size

    def take(self, of: Hashable, ids: Ids) -> Ids | None:
        """Return the slots that exactly these ids had, if that is known. They are given once."""
        if not ids.size or (key := _key(of, ids)) not in self._known:
            return None
        known, slots = self._forget(key)
        return slots if known == ids.tobytes() else None

    def _forget(self, key: _Key) -> tuple[bytes, Ids]:
        known = self._known.pop(key)
        self._count -= known[1].size
        return known


def _key(of: Hashable, ids: Ids) -> _Key:
    return of, ids.size, int(ids[0]), int(ids[-1])
