"""A store is where rows live, apart from what they mean: ids, and columns of numbers beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy.typing as npt

from fleet.numeric.jit import Ids, Segments


class Store(Protocol):
    """Keeps rows by id. A row has a slot, given in the order of insertion and never changed.

    Not thread-safe: the caller holds a lock. No call takes longer because many rows are there: what growing costs is
    shared out among the rows that come.
    """

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Return the memory taken; room for growth counts where it takes any."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns, in the order they were made."""

    def find(self, ids: Ids) -> Ids:
        """Return the slot of every id, -1 where there is none."""

    def insert(self, ids: Ids) -> Ids:
        """Return the slot of every id; new ids get the next slots, with every column at its fill."""

    def reserve(self, count: int) -> None:
        """Prepare for so many rows in all, so that nothing need be moved while they come. The number is only a
        guess."""

    def touch(self) -> Iterator[int]:
        """Make the system provide the reserved memory before somebody waits for it, some of it at each step, and yield
        for how many rows it is there. Any thread may do so, and while rows come."""

    def ids(self, slots: Ids) -> Ids:
        """Return the ids at slots."""

    def ensure_column(self, name: str, width: int, fill: float, dtype: npt.DTypeLike) -> None:
        """Make a column unless it is there; rows inserted from now on get ``fill``."""

    def column(self, name: str) -> Segments:
        """Return the numbers of a column by slot, for compiled functions to read and write in place.

        Good while the store lives and until the next call that inserts; only the first ``len(self)`` rows are there.
        """
