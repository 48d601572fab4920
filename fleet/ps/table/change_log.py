"""A change log knows which rows have changed since a mark, for those who follow a model from mark to mark.

It is told of rows before they change, as frozen views are (frozen_view.py), and keeps nothing but their ids: whoever
asks reads the rows as they are then, and those that are not there any more are gone. What it takes goes with the rows
that change and not with those there are, so that a follower may ask often. An id is kept once between two marks; should
there be more ids than rows, everything is forgotten, and who follows begins anew.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from fleet.numeric.ids import unique
from fleet.numeric.jit import Ids
from fleet.ps.table.eviction import Cut
from fleet.ps.table.living_table import LivingTable
from fleet.ps.table.table import Table

#: So many ids of a table are kept in any case.
_FEW = 1 << 20
#: So many are kept as they come, before each is there but once.
_RAW = 1 << 16

_NONE = np.empty(0, np.int64)


class _Distinct:
    """Collects ids, of which it keeps each once."""

    def __init__(self) -> None:
        self._parts: list[Ids] = []
        self._bound = _RAW
        self.count = 0

    def add(self, ids: Ids) -> None:
        if ids.size:
            self._parts.append(ids)
            self.count += ids.size
            if self.count > self._bound:
                self._bound = max(_RAW, 2 * self.ids.size)

    @property
    def ids(self) -> Ids:
        """Return the ids, each once."""
        if len(self._parts) > 1:
            self._parts = [unique(np.concatenate(self._parts))[0]]
            self.count = self._parts[0].size
        return self._parts[0] if self._parts else _NONE


class ChangeLog:
    def __init__(self, tables: Sequence[Table], first: int) -> None:
        """Watch tables from now on. Marks are numbers from ``first`` on."""
        self.tables = tuple(tables)
        self._mark = first
        #: by table, the cut whose rows are known to be gone, although they may still be there
        self._cuts: list[Cut | None] = [None for _ in tables]
        #: by the mark at which they begin, in order: by table, the rows that have changed from there to the next one
        self._since: dict[int, list[_Distinct]] = {first: self._nothing()}
        self._watchers: list[Callable[[Ids], None]] = [partial(self._note, index) for index in range(len(tables))]
        for table, watcher in zip(self.tables, self._watchers, strict=True):
            table.watch(watcher)

    def close(self) -> None:
        """Watch no more."""
        for table, watcher in zip(self.tables, self._watchers, strict=True):
            table.unwatch(watcher)
        self._since = {}

    def mark(self) -> int:
        """Return a mark that stands for this moment."""
        self._note_cuts()
        if self._mark not in self._since or any(each.count for each in self._since[self._mark]):
            self._mark += 1
            self._since[self._mark] = self._nothing()
        return self._mark

    def has_changed(self, mark: int) -> bool:
        """Say whether a row has changed since a mark, or that is not known."""
        self._note_cuts()
        return mark not in self._since or any(each.count for at in self._from(mark) for each in self._since[at])

    def since(self, mark: int) -> list[Ids] | None:
        """Return by table the rows that have changed since a mark, each once; None if that is not known."""
        self._note_cuts()
        if mark not in self._since:
            return None
        found = []
        for index, _ in enumerate(self.tables):
            together = _Distinct()
            for at in self._from(mark):
                together.add(self._since[at][index].ids)
            found.append(together.ids)
        return found

    def note_cuts_again(self) -> None:
        """Count rows that are gone and still there as such that go from now on, as somebody will have met them."""
        self._cuts = [None for _ in self.tables]

    def keep(self, marks: Iterable[int]) -> None:
        """Forget what has changed before the first of these marks, and all others."""
        wanted = {*marks}
        kept: dict[int, list[_Distinct]] = {}
        for at, changed in self._since.items():
            if at in wanted:
                kept[at] = changed
            elif kept:
                for before, more in zip(kept[next(reversed(kept))], changed, strict=True):
                    before.add(more.ids)
        self._since = kept
        for index, table in enumerate(self.tables):
            if sum(each[index].count for each in kept.values()) > max(_FEW, 2 * len(table)):
                self._since = {}

    def _from(self, mark: int) -> list[int]:
        return [at for at in self._since if at >= mark]

    def _note(self, index: int, slots: Ids) -> None:
        if self._since:
            self._since[next(reversed(self._since))][index].add(self.tables[index].store.ids(slots))

    def _note_cuts(self) -> None:
        for index, table in enumerate(self.tables):
            if table.cut is not self._cuts[index]:
                self._cuts[index] = table.cut
                for ids in table.due() if isinstance(table, LivingTable) and self._since else ():
                    self._since[next(reversed(self._since))][index].add(ids)

    def _nothing(self) -> list[_Distinct]:
        return [_Distinct() for _ in self.tables]
