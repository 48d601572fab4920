"""Shares a server's memory for rows among its tables.

Each table takes what it needs as long as there is some left. After that, room for one row is another row's: of the same
table, or of one that is asked for less for the memory it has.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from fleet.errors import ConfigurationError, TableFileError
from fleet.ps.table.row_file import Losses

#: The memory of another table is taken only if it is asked for so much less.
_CLEARLY = 0.8


class SharedMemory:
    """Holds how much memory there is for all budgets, which have equal parts."""

    def __init__(self, nbytes: int, losses: Losses) -> None:
        self.nbytes = nbytes
        self.losses = losses
        #: one that is dropped has no part any more
        self.budgets: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()


class Account:
    """Says what one table has taken of the budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.taken = 0

    @property
    def left(self) -> int:
        """Return how much of the whole budget nobody has taken; less than nothing if it is too little."""
        return self._budget.left

    def take(self, nbytes: int) -> None:
        """Take so much more, or give it back."""
        self.taken += nbytes
        self._budget.taken += nbytes


class Holder(Protocol):
    """Keeps rows in memory, and can give some of it back."""

    name: str
    account: Account
    #: how much its rows are asked for, of late
    demand: float

    @property
    def spare_bytes(self) -> int:
        """Return how much of its memory may be given back."""

    def give_back(self, nbytes: int) -> None:
        """Do with so much less, or a little less than that."""


class MemoryBudget:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.taken = 0
        self._reserved = 0
        memory.budgets.add(self)
        #: a table that is dropped takes part no more
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes // len(self._memory.budgets)

    @property
    def left(self) -> int:
        """Return how much nobody has taken; less than nothing if it is too little."""
        return self.nbytes - self.taken

    def open(self, holder: Holder) -> Account:
        """Let a table take part."""
        self._holders.add(holder)
        return Account(self)

    def reserve(self, name: str, nbytes: int) -> None:
        """Refuse a table if there is not so much for it, which it takes in any case, beside what others take."""
        self._reserved += nbytes
        if self._reserved > self.nbytes:
            shares = len(self._memory.budgets)
            raise ConfigurationError(
                "the tables of a server do not fit into the memory they may take, even with few rows",
                where=f"table {name!r}",
                expected=f"FLEET_TABLE_MEMORY_MB={-(-self._reserved * shares >> 20)} at least"
                + (", half of it for the values that are read beside the others" if shares > 1 else ""),
                got=f"FLEET_TABLE_MEMORY_MB={self._memory.nbytes >> 20}",
                todo="Give tables more memory, or the job more servers or fewer tables.",
            )

    def donor(self, asking: Holder, nbytes: int) -> Holder:
        """Return who makes room for ``asking``: itself, or another that is asked for clearly less."""
        others = [each for each in self._holders if each is not asking and each.spare_bytes >= nbytes]
        if not others:
            return asking
        least = min(others, key=_worth)
        return least if not asking.spare_bytes or _worth(least) < _CLEARLY * _worth(asking) else asking

    def settle(self) -> None:
        """Make tables give back what is taken beyond the budget, as what is kept of every row has grown."""
        with self._memory.losses:
            self._settle()

    def _settle(self) -> None:
        while self.left < 0:
            able = [holder for holder in self._holders if holder.spare_bytes > 0]
            if not able:
                largest = max(self._holders, key=lambda holder: holder.account.taken)
                raise TableFileError(
                    "tables have more rows than their memory can name, though most lie in files",
                    where=f"table {largest.name!r}, which takes {largest.account.taken / (1 << 20):.1f} MiB",
                    expected=f"at most {self.nbytes / (1 << 20):.1f} MiB for all (FLEET_TABLE_MEMORY_MB)",
                    got=f"{self.taken / (1 << 20):.1f} MiB",
                    todo="Give the server more of it (a row in a file takes 11 bytes of memory), the job more servers, "
                    "or the table a filter (admit=) or a bound (evict=).",
                )
            giver = min(able, key=_worth)
            giver.give_back(min(-self.left, giver.spare_bytes))


def _worth(holder: Holder) -> float:
    return holder.demand / max(1, holder.account.taken)
