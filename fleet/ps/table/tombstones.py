"""Remembers which rows were removed, for checkpoints that save only what has changed.

Time is cut into the epochs of history.py. Ids are forgotten when no checkpoint can go on from a time before they were
removed. Should they become more than the rows, they are forgotten as well, and the next checkpoint has all rows.
"""

from __future__ import annotations

from fleet.numeric.jit import Ids

#: So many are remembered in any case.
_FEW = 1 << 20


class Tombstones:
    def __init__(self) -> None:
        #: the epoch, and the ids that were removed in it
        self._removed: list[tuple[int, Ids]] = []
        self._count = 0
        #: from which epoch on all are known
        self._from = 0

    @property
    def nbytes(self) -> int:
        return self._count * 8

    def add(self, epoch: int, ids: Ids, rows: int) -> None:
        """Remember ids that are removed in an epoch, from a table that has so many rows left."""
        if not ids.size:
            return
        self._removed.append((epoch, ids))
        self._count += ids.size
        if self._count > max(_FEW, rows):
            self.forget(epoch + 1)

    def forget(self, before: int) -> None:
        """Forget what was removed before an epoch."""
        self._from = max(self._from, before)
        self._removed = [each for each in self._removed if each[0] >= before]
        self._count = sum(ids.size for _, ids in self._removed)

    def reaches(self, since: int) -> bool:
        """Say whether everything is known that was removed in an epoch or later."""
        return since >= self._from

    def since(self, epoch: int) -> list[Ids]:
        """Return what was removed in an epoch or later; an id may be there several times."""
        return [ids for removed_in, ids in self._removed if removed_in >= epoch]
