"""Keeps what rows were before they changed, in order of their ids: they are looked up again and again, and never added
to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fleet.numeric.ids import find_ordered, gather
from fleet.numeric.jit import Array, Ids


class EarlierRows:
    """Holds rows of several tables, which have one width and element type. Many threads may look up at a time."""

    def __init__(self, rows: Mapping[int, tuple[Ids, Array]]) -> None:
        """``rows`` has of each table, by its place, distinct ids in ascending order and their rows."""
        places = sorted(rows)
        self._ids = np.concatenate([rows[place][0] for place in places])
        self._rows = np.concatenate([rows[place][1] for place in places])
        counts = np.zeros(places[-1] + 1, np.int64)
        counts[places] = [rows[place][0].size for place in places]
        self._stops = counts.cumsum()  # of the tables at all places, also those that have nothing here

    def __len__(self) -> int:
        return self._ids.size

    def write_over(self, places: Ids, ids: Ids, stops: Ids, found: Array) -> None:
        """Write the rows of the ids over ``found``; an id without a row leaves its row there as it is. The ids of the
        table at each of the places end at its stop."""
        numbers = np.empty(ids.size, np.int64)
        if find_ordered(self._ids, self._stops, places, ids, stops, numbers):
            gather(self._rows, numbers, found)
