"""Knows which ids requests name again and again, and how many rows they name in all.

Of some sixteen requests one is kept as it is, the last ones of these, and nothing is counted before somebody asks: what
training pays for is a copy of some ids now and then. Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleet.numeric.ids import packed_ids, unique
from fleet.numeric.jit import Array, Ids

#: A request is kept after so many others at most; how many is another number each time, as requests take turns.
_LONGEST_GAP = 32
#: So many requests are kept, with so many ids in all.
_MOST_KEPT, _MOST_IDS = 64, 1 << 17
#: Of fewer requests of a table nothing is said.
_LEAST_KEPT = 4
#: An id is named that so large a part of them names; of each table no more than this, nor in all.
_LEAST_SHARE = 0.25
_MOST_OF_TABLE, MOST_NAMED = 3, 8


class Kept(NamedTuple):
    """Holds what one request named: tables, and ids, those of each table up to its stop."""

    tables: tuple[int, ...]
    ids: Ids
    stops: Ids


class HotId(NamedTuple):
    """Says which part of the requests that name ids of a table names this one."""

    table: int
    id: int
    share: float


class AskedIds:
    def __init__(self) -> None:
        #: how many rows were asked for, or got gradients
        self.rows = 0
        self._gap, self._draws = 0, 1
        self._kept: deque[Kept] = deque()
        self._held = 0

    def note(self, tables: Sequence[int], ids: Array, stops: Array) -> None:
        """Count a request that names ids of these tables."""
        self.rows += ids.size
        if self._gap:
            self._gap -= 1
            return
        self._draws = (self._draws * 1103515245 + 12345) & 0x7FFFFFFF  # the C standard's generator of numbers
        self._gap = (self._draws >> 16) % _LONGEST_GAP
        if not 0 < ids.size <= _MOST_IDS // _LEAST_KEPT:
            return
        self._kept.append(Kept(tuple(tables), np.array(ids, np.int64), np.array(stops, np.int64)))
        self._held += ids.size
        while len(self._kept) > _MOST_KEPT or self._held > _MOST_IDS:
            self._held -= self._kept.popleft().ids.size

    def kept(self) -> list[Kept]:
        """Return what is kept, for ``hottest``, which needs no lock."""
        return list(self._kept)


def hottest(kept: Sequence[Kept]) -> list[HotId]:
    """Return the ids that most requests name, these first."""
    named: dict[int, list[Ids]] = {}
    for each in kept:
        start = 0
        for table, stop in zip(each.tables, each.stops.tolist(), strict=True):
            if stop > start:
                named.setdefault(table, []).append(each.ids[start:stop])
            start = stop
    found: list[HotId] = []
    for table, requests in named.items():
        if len(requests) < _LEAST_KEPT:
            continue
        ids, places = unique(packed_ids(np.concatenate(requests)))
        counts = np.bincount(places, minlength=ids.size)
        most = np.argsort(-counts, kind="stable")[:_MOST_OF_TABLE]
        found += [HotId(table, int(ids[place]), min(1.0, counts[place] / len(requests))) for place in most]
    return sorted((each for each in found if each.share >= _LEAST_SHARE), key=lambda each: -each.share)[:MOST_NAMED]
