"""A store is where rows live, apart from what they mean: ids, and columns of numbers beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.numeric.jit import Array, Ids, Segments
from fleet.ps.table.row_file import Backlog, Reading


class Between(NamedTuple):
    """Chooses rows by the first number in a column: ``low`` or more, and less than ``high`` if that is given."""

    column: str
    low: int
    high: int | None = None

    def __call__(self, numbers: Array) -> npt.NDArray[np.bool_]:
        """Return for every row, of which these are the numbers in the column, whether it is chosen."""
        first = numbers[:, 0]
        chosen: npt.NDArray[np.bool_] = first >= self.low
        return chosen if self.high is None else chosen & (first < self.high)


#: Rows of a store: their ids, and their columns by name.
Batch = tuple[Ids, dict[str, Array]]


class Layout(NamedTuple):
    """Says where everything lies that a store has in memory: what ``find_each`` has to know, the ids by slot, and the
    columns."""

    places: tuple[int, ...]
    keys: Segments
    columns: Mapping[str, Segments]


def check_shape(name: str, there: tuple[int, np.dtype[Any]], wanted: tuple[int, np.dtype[Any]]) -> None:
    """Refuse a column, wanted with a width and an element type, that is there with others."""
    if there != wanted:
        raise ConfigurationError(
            "a state column has another shape than the one that is there",
            where=name,
            expected=f"{there[0]} x {there[1]}",
            got=f"{wanted[0]} x {wanted[1]}",
        )


class Store(Protocol):
    """Keeps rows by id. While a row is in memory it has a slot there, by which its columns are read and written.

    A slot is good until the next call that finds, inserts or removes, and where rows stay in memory (``most`` is None)
    for as long as the row is there.

    Not thread-safe: the caller holds a lock. No call takes longer because many rows are there: what growing costs is
    shared out among the rows that come.
    """

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Return the memory taken; room for growth counts where it takes any."""

    @property
    def row_bytes(self) -> int:
        """Return what one row has: its id, and a number or several in each column."""

    @property
    def most(self) -> int | None:
        """Return how many ids may be found or inserted at once, as their rows have to be in memory together."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns, in the order they were made."""

    def figures(self) -> dict[str, int]:
        """Return where the rows are and what that took, by the names in ``figures.TABLE``; what is not named is 0."""

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for every id whether it has a row, wherever that lies."""

    def find(self, ids: Ids) -> Ids:
        """Return the slot of every id, -1 where there is none."""

    def insert(self, ids: Ids) -> Ids:
        """Return the slot of every id; new ids get a row, with every column at its fill."""

    @property
    def created(self) -> Ids:
        """Return which of the ids that were inserted last were new: their places among them."""

    def remove(self, ids: Ids) -> None:
        """Take away the rows of ids, which are distinct; those that have none may be among them. The memory is for rows
        that come."""

    def write(self, slots: Ids) -> None:
        """Note that the rows at slots are about to be written to."""

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

        Good while the store lives and until the next call that inserts.
        """

    @property
    def layout(self) -> Layout | None:
        """Return where everything lies, the same object for as long as nothing moves; None where rows are elsewhere
        than in memory."""

    def reading(self, ids: Ids, *, expected: bool) -> Reading | None:
        """Return what has to be read from a file before ids can be found, if anything: its ``run`` waits for the disk,
        and ``take`` brings the rows into memory. A caller that does without waits for the disk under its lock.
        ``expected`` says that they are found next, for which those in memory stay."""

    def take(self, reading: Reading) -> None:
        """Bring rows into memory that have been read."""

    def backlog(self) -> Backlog | None:
        """Return what has to be written before more rows leave memory, if a caller would wait for it under its
        lock."""

    def to_rewrite(self) -> Reading | None:
        """Return the part of a file that should be written anew, if there is one: its ``run`` waits for the disk."""

    def rewrite(self, reading: Reading) -> None:
        """Write anew what is still needed of that."""

    def sample(self, count: int, names: Sequence[str]) -> Batch:
        """Return copies of about so many rows with these columns, which lie evenly among all of them."""

    def scan(
        self, start: int, most: int, names: Sequence[str], only: Between | None = None, *, briefly: bool = False
    ) -> tuple[Batch, int | None]:
        """Return copies of at most so many rows from a place on, with these columns, and the place at which the rest
        begins, if there may be more; the first place is 0. ``only`` leaves out rows. Where they are needed ``briefly``,
        until something is written, they need not be copies. Whoever goes through all places
        gets every row that was there all the time at least once, and once if nothing was written meanwhile."""

    def leave(self, place: int) -> None:
        """Note that nobody goes on with a scan from this place, so that nothing is kept for it."""
