"""Remembers which rows the last rounds have changed, for workers that have had rows before these rounds.

A worker asks ahead for rows that it will need some steps later, has them at once, and asks again for those of them that
have changed when its step comes. Who has changed them is the server's to know: other workers' look-ups are nobody
else's. Nothing is remembered before somebody has asked like this, and where it is not known all rows count as changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from fleet.numeric.ids import among
from fleet.numeric.jit import Ids
from fleet.ps.table.shard import Contribution

#: So many rounds are remembered, and no more ids than this in all of them. Who asks further ahead gets all rows.
MOST_ROUNDS, MOST_IDS = 64, 1 << 22


class RecentChanges:
    def __init__(self) -> None:
        #: the version since which all rounds are remembered; None before anybody has asked
        self._since: int | None = None
        #: of each round: the version that it led to, and by table the ids of its rows
        self._rounds: deque[tuple[int, dict[int, list[Ids]]]] = deque()
        self._ids = 0

    def begin(self, version: int) -> None:
        """Remember what rounds change from this version on."""
        if self._since is None:
            self._since = version

    def forget(self) -> None:
        """Note that rows have other values, and not because of a round."""
        self._since = None
        self._rounds.clear()
        self._ids = 0

    def note(self, version: int, contributions: Sequence[Contribution]) -> None:
        """Note the round that leads to a version."""
        if self._since is None:
            return
        changed: dict[int, list[Ids]] = {}
        for contribution in contributions:
            for table, (ids, _) in contribution.rows.items():
                changed.setdefault(table, []).append(ids.copy())  # a view would hold the whole push
        self._rounds.append((version, changed))
        self._ids += _count(changed)
        while self._rounds and (len(self._rounds) > MOST_ROUNDS or self._ids > MOST_IDS):
            self._since, dropped = self._rounds.popleft()
            self._ids -= _count(dropped)

    def changed(self, table: int, ids: Ids, since: int) -> Ids:
        """Return the positions of the ids whose rows may have changed after a version."""
        if self._since is None or since < self._since:
            return np.arange(len(ids))
        rounds = [each for version, by_table in self._rounds if version > since for each in by_table.get(table, ())]
        return np.flatnonzero(among(ids, rounds))


def _count(changed: dict[int, list[Ids]]) -> int:
    return sum(len(ids) for each in changed.values() for ids in each)
