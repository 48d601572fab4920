"""Which rows each worker of a GEO job holds, and which of them others have changed since it was last told.

A worker that asks again for what it was already told (its answer was lost) is told the same rows once more, so what was
told last is kept until the worker's next push. Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import numpy as np

from fleet.ps.kernels.jit import Ids
from fleet.ps.table.memory import MemoryStore

_CHANGED = "changed"


class _Held:
    """The rows of one table that one worker holds: every one is marked or not, and the marked ones are listed."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._store.ensure_column(_CHANGED, 1, 0, np.uint8)
        self._marked: list[Ids] = []
        self._told = np.empty(0, np.int64)

    def hold(self, ids: Ids) -> None:
        self._store.insert(np.unique(ids))

    def mark(self, ids: Ids) -> None:
        slots = self._store.find(ids)
        slots = slots[slots >= 0]
        marks = self._store.column(_CHANGED)
        fresh = slots[marks[slots, 0] == 0]
        marks[fresh] = 1
        self._marked.append(fresh)

    def take(self, again: bool) -> Ids:
        marked = np.concatenate([*self._marked, self._told[: len(self._told) if again else 0]])
        self._marked.clear()
        self._told = np.unique(marked)
        self._store.column(_CHANGED)[self._told] = 0
        return self._store.ids()[self._told]


class Changes:
    def __init__(self) -> None:
        self._held: dict[int, dict[int, _Held]] = {}
        self._told_at: dict[int, int] = {}

    def hold(self, worker: int, table: int, ids: Ids) -> None:
        """``worker`` was handed these rows to train them."""
        self._held.setdefault(worker, {}).setdefault(table, _Held()).hold(ids)

    def mark(self, worker: int, table: int, ids: Ids) -> None:
        """``worker`` changed these rows: all others that hold them are to be told."""
        for other, tables in self._held.items():
            if other != worker and table in tables:
                tables[table].mark(ids)

    def take(self, worker: int, step: int) -> dict[int, Ids]:
        """The ids, by table, that ``worker`` is told with the answer to its push number ``step``."""
        again = self._told_at.get(worker) == step
        self._told_at[worker] = step
        taken = {table: held.take(again) for table, held in sorted(self._held.get(worker, {}).items())}
        return {table: ids for table, ids in taken.items() if len(ids)}

    def forget(self, worker: int) -> None:
        self._held.pop(worker, None)
        self._told_at.pop(worker, None)
