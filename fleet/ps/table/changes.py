"""A GEO server knows which rows each worker holds, and which of them others have changed since it last heard.

A worker that asks again, as its answer was lost, is sent the same rows once more, so the rows sent last are kept until
the worker's next push. Where a job moves to other servers they are sent with the next answer there: a row that has
not changed since changes nothing. Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fleet.numeric.jit import Array, Ids
from fleet.plan.specs import TableSpec
from fleet.ps.table.given import NOTHING, GivenPiece, Key, end_of, slots_of_piece
from fleet.ps.table.memory_store import MemoryStore


class _Held:
    """Holds which rows of one table one worker has, and which of them it is to be sent."""

    def __init__(self) -> None:
        self._held = MemoryStore()
        self._marked = MemoryStore()
        self._sent = np.empty(0, np.int64)

    def hold(self, ids: Ids) -> None:
        self._held.insert(np.unique(ids))

    def mark(self, ids: Ids) -> None:
        self._marked.insert(ids[self._held.find(ids) >= 0])

    def take(self, again: bool) -> Ids:
        if again:  # what has been marked since stays so: its worker may read the first of the two answers
            return np.union1d(self._sent, self.marked)
        self._sent = self.marked
        self._marked = MemoryStore()
        return self._sent

    @property
    def marked(self) -> Ids:
        return self._marked.ids(np.arange(len(self._marked)))

    def piece(self, start: int) -> GivenPiece:
        """Return ids that are held from one on, and which of them are to be sent, or were sent last: who moves may not
        have got those."""
        count = len(self._held)
        here = slots_of_piece(start, count, 1)
        ids = self._held.ids(np.arange(here.start, here.stop))
        marked = self._marked.has(ids) | np.isin(ids, self._sent)
        return GivenPiece([ids, marked.astype(np.uint8)], stop=end_of(here, count))

    def take_over(self, ids: Ids, marked: Array) -> None:
        self._held.insert(ids)
        self._marked.insert(ids[marked])

    def dump(self) -> list[Ids]:
        return [*(store.ids(np.arange(len(store))) for store in (self._held, self._marked)), self._sent]

    def restore(self, held: Ids, marked: Ids, sent: Ids) -> None:
        self._held.insert(held)
        self._marked.insert(marked)
        self._sent = sent


class Changes:
    def __init__(self) -> None:
        self._held: dict[int, dict[int, _Held]] = {}
        self._sent_at: dict[int, int] = {}

    def hold(self, worker: int, table: int, ids: Ids) -> None:
        """Note that ``worker`` was handed these rows to train them."""
        self._held.setdefault(worker, {}).setdefault(table, _Held()).hold(ids)

    def mark(self, worker: int, table: int, ids: Ids) -> None:
        """Note that ``worker`` changed these rows: they are to be sent to all others that hold them."""
        for other, tables in self._held.items():
            if other != worker and table in tables:
                tables[table].mark(ids)

    def take(self, worker: int, step: int) -> dict[int, Ids]:
        """Return by table the ids that ``worker`` is sent with the answer to its push number ``step``."""
        if step < self._sent_at.get(worker, 0):
            return {}  # a late copy of an older push, whose sender has gone on
        again = self._sent_at.get(worker) == step
        self._sent_at[worker] = step
        taken = {table: held.take(again) for table, held in sorted(self._held.get(worker, {}).items())}
        return {table: ids for table, ids in taken.items() if len(ids)}

    def marked(self, worker: int) -> dict[int, Ids]:
        """Return by table the ids that others have changed since ``worker`` heard of them."""
        return {table: held.marked for table, held in sorted(self._held.get(worker, {}).items())}

    def forget(self, worker: int) -> None:
        self._held.pop(worker, None)
        self._sent_at.pop(worker, None)

    # ---------------------------------------------------------------- for a server that goes on in its place

    def dump(self) -> Iterator[tuple[dict[str, Any], list[Ids]]]:
        """Yield everything that is kept, in parts: what they are, and the ids."""
        for worker, step in self._sent_at.items():
            yield {"worker": worker, "told_at": step}, []
        for worker, tables in self._held.items():
            for table, held in tables.items():
                yield {"worker": worker, "table": table}, held.dump()

    def restore(self, about: Mapping[str, Any], ids: Sequence[torch.Tensor]) -> None:
        """Take one of these parts in the place of what there is. A server that was killed may not have told the
        others."""
        if "told_at" in about:
            self._sent_at[about["worker"]] = about["told_at"]
            return
        held = self._held.setdefault(about["worker"], {})[about["table"]] = _Held()
        held.restore(*(each.numpy() for each in ids))

    # ---------------------------------------------------------------- for other servers

    @property
    def keys(self) -> list[Key]:
        return [(worker, table) for worker, tables in self._held.items() for table in tables]

    def piece(self, key: Key, start: int) -> GivenPiece:
        worker, table = key
        held = None if worker is None or table is None else self._held.get(worker, {}).get(table)
        return NOTHING if held is None else held.piece(start)

    def like(self, spec: TableSpec) -> tuple[tuple[int, ...], str]:
        del spec
        return (), "uint8"

    def take_over(self, key: Key, piece: GivenPiece) -> None:
        worker, table = key
        if worker is None or table is None:
            raise ValueError("what a worker holds are rows of a table")
        ids, marked = (np.asarray(each) for each in piece.tensors)
        self._held.setdefault(worker, {}).setdefault(table, _Held()).take_over(ids, marked.astype(bool))
