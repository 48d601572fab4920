"""Where rows live, apart from what they mean: ids, and columns of numbers beside them."""

from __future__ import annotations

from typing import Protocol

import numpy.typing as npt

from fleet.ps.kernels.jit import Array, Ids


class Store(Protocol):
    """Rows by id. A row has a slot, given in the order of insertion and never changed.

    Not thread-safe: the caller holds a lock. Arrays handed out are views, good until the next call that inserts.
    """

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory taken, room for growth included."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order they were made."""

    def find(self, ids: Ids) -> Ids:
        """The slot of every id, -1 where there is none."""

    def insert(self, ids: Ids) -> Ids:
        """The slot of every id; those without one get the next ones in their order, with every column at its fill."""

    def ids(self, start: int = 0, stop: int | None = None) -> Ids:
        """The ids at the slots from ``start`` to ``stop``."""

    def ensure_column(self, name: str, width: int, fill: float, dtype: npt.DTypeLike) -> None:
        """Make a column unless it is there; rows inserted from now on get ``fill``."""

    def column(self, name: str) -> Array:
        """The numbers of a column by slot, [capacity, width]; only the first ``len(self)`` rows mean anything."""
