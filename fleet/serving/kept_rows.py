"""Keeps the rows of one table of a followed job, and finds them by their ids, as evaluation reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fleet.errors import UnsupportedError
from fleet.numeric.ids import gather, packed, scatter
from fleet.numeric.jit import Array, Ids
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.store import Layout, Store
from fleet.serving.source import RowChanges, TableDescription

WEIGHT = "weight"
#: How many numbers a row has, and of which type.
Kind = tuple[int, np.dtype[Any]]
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class KeptRows:
    """Holds the rows of one table. Where all lie in memory, many threads may look up at a time, while none changes it;
    elsewhere one at a time."""

    def __init__(self, name: str, table: TableDescription, store: Store | None = None) -> None:
        """``store`` is where the rows lie, if not in memory."""
        if table.dtype not in _DTYPES:
            raise UnsupportedError(
                f"the rows of {name!r} cannot be kept", expected=", ".join(map(str, _DTYPES)), got=table.dtype
            )
        self.table = table
        self.dtype = np.dtype(_DTYPES[table.dtype])
        self._store: Store = MemoryStore() if store is None else store
        self._store.ensure_column(WEIGHT, table.embedding_dim, 0.0, self.dtype)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def kind(self) -> Kind:
        return self.table.embedding_dim, self.dtype

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def layout(self) -> Layout | None:
        """Return where everything lies, as long as nothing changes."""
        return self._store.layout

    def change(self, changes: RowChanges) -> None:
        """Take in rows that are new or others, once those that are gone are taken out."""
        if changes.gone.size:
            self._store.remove(np.unique(changes.gone))
        for start, stop in self._parts(changes.ids.size):
            slots = self._store.insert(changes.ids[start:stop])
            self._store.write(slots)
            scatter(self._store.column(WEIGHT), slots, packed(changes.values[start:stop].numpy(), self.dtype))

    def rows(self, ids: Ids) -> torch.Tensor:
        """Return the row of every id; one without a row has the mean of the initializer."""
        found = np.full((ids.size, self.table.embedding_dim), self.table.mean, self.dtype)
        self.read_over(ids, found)
        return torch.from_numpy(found)

    def read_over(self, ids: Ids, found: Array) -> int:
        """Write the rows of the ids over ``found``; an id without a row leaves its row there as it is. Return how many
        of these there are."""
        absent = 0
        for start, stop in self._parts(ids.size):
            slots = self._store.find(ids[start:stop])
            absent += gather(self._store.column(WEIGHT), slots, found[start:stop])
        return absent

    def _parts(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield where as many begin and end as may be in memory at once."""
        most = self._store.most or max(1, count)
        for start in range(0, count, most):
            yield start, min(start + most, count)

    def lacks(self, ids: Ids) -> Ids:
        """Return those of the ids that have no row."""
        return ids[~self._store.has(ids)]

    def all(self) -> torch.Tensor:
        """Return a row for every id that there may be."""
        assert self.table.num_embeddings is not None
        return self.rows(np.arange(self.table.num_embeddings))
