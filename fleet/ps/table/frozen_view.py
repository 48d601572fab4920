"""A frozen view shows tables as they were at one moment, for a checkpoint or a snapshot that is written while they
change.

The moment is the beginning of an epoch (history.py), and rows remember the epoch in which they were last changed. So
rows that have not changed since are read as they are, in their order, and the others were set aside before their first
change. Only a few of those are kept in memory: a thread that changes more rows waits until they have been handed on.
Several moments may be frozen at once.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fleet.numeric.jit import Array, Ids
from fleet.ps.table.eviction import Cut
from fleet.ps.table.living_table import LivingTable
from fleet.ps.table.reader import Reader
from fleet.ps.table.store import Batch
from fleet.ps.table.table import Table

#: Rows that are set aside are handed on in pieces of about this size.
_HELD_BYTES = 4 << 20

#: Takes what rows are, and the tensors with them.
HandOn = Callable[[dict[str, Any], Mapping[str, Array]], None]


#: Rows that are exported: what they are, and the tensors.
Described = tuple[dict[str, Any], dict[str, Array]]


def described(table: Table, step: int, ids: Ids, columns: Mapping[str, Array]) -> Described:
    about = {"table": table.spec.name, "step": step, "rows": len(ids), "columns": list(columns)}
    return about, {"ids": ids, **columns}


def without(cut: Cut | None, batch: Batch) -> Batch:
    """Return rows without those that a cut takes."""
    if cut is None:
        return batch
    ids, columns = batch
    left = ~cut.takes(ids, columns)
    return ids[left], {name: values[left] for name, values in columns.items()}


class FrozenView:
    def __init__(self, tables: Sequence[Table], since: int, until: int, hand_on: HandOn) -> None:
        """``hand_on`` gets rows as they were before a change: those last changed in the epoch ``since`` or later that
        change now, in the epoch ``until`` or later."""
        self.since, self.until = since, until
        self.steps = [table.step for table in tables]
        for table in tables if since else ():
            table.take_out_due()
        #: what the rows that are gone are told by, and those that were removed
        self.cuts = [table.cut for table in tables]
        self.removed = [table.removed_since(since) for table in tables]
        #: what is counted of ids without a row, by table
        self.counts = {
            index: view
            for index, table in enumerate(tables)
            if isinstance(table, LivingTable) and (view := table.counts(frozen=True)) is not None
        }
        self._failure: Exception | None = None
        self._tables = tuple(tables)
        #: others that an optimizer asks for later are in every row as in untouched ones
        self._columns = [table.columns for table in tables]
        self._hand_on = hand_on
        self._aside: list[list[tuple[Ids, dict[str, Array]]]] = [[] for _ in tables]
        self._held = 0
        #: goes through the tables
        self.reader = Reader()
        self._watchers = [partial(self._set_aside, index) for index in range(len(tables))]
        for table, watcher in zip(tables, self._watchers, strict=True):
            table.watch(watcher)

    def end(self) -> None:
        """Hand on what is left, as all rows have been read or set aside."""
        self.leave()
        self._hand_all_on()
        self.check()

    def check(self) -> None:
        """Raise the error that kept rows from being handed on, if there is one."""
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Keep nothing any more."""
        self.reader.leave()
        for table, watcher in zip(self._tables, self._watchers, strict=True):
            table.unwatch(watcher)
        for view in self.counts.values():
            view.leave()

    def _set_aside(self, index: int, slots: Ids) -> None:
        table = self._tables[index]
        ids, columns = without(self.cuts[index], table.rows_of(slots, self.since, self.until))
        self._aside[index].append((ids, columns))
        self._held += ids.nbytes + sum(values.nbytes for values in columns.values())
        if self._held >= _HELD_BYTES:
            self._hand_all_on()

    def _hand_all_on(self) -> None:
        aside, self._aside, self._held = self._aside, [[] for _ in self._tables], 0
        try:
            for table, step, names, parts in zip(self._tables, self.steps, self._columns, aside, strict=True):
                if parts:
                    ids = np.concatenate([ids for ids, _ in parts])
                    columns = {name: np.concatenate([part[name] for _, part in parts]) for name in names}
                    self._hand_on(*described(table, step, ids, columns))
        except Exception as error:  # the thread that changes rows has nothing to do with it
            self._failure = error
            self.leave()
