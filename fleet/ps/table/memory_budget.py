"""Shares a server's memory for rows among its tables.

Each table takes what it needs as long as there is some left. After that, room for one row is another row's: of the same
table, or of one that is asked for less for the memory it has.

The tables of a job share one budget. While other values are read that are to take their place, those have a budget of
their own, the *guest's*: it begins when the first one, the *host*, has given back what it can spare of half of the
memory. A guest that cannot do with what it has is refused, and a host that comes to need more than it kept takes it:
the training goes on in any case.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from fleet.errors import CheckpointError, ConfigurationError, TableFileError
from fleet.ps.table.row_file import Losses

#: The memory of another table is taken only if it is asked for so much less.
_CLEARLY = 0.8
#: A host makes room for a guest by so much at a time, or a thousandth of the memory.
_LEAST_STEP = 1 << 20


class SharedMemory:
    """Holds how much memory there is for all budgets."""

    def __init__(self, nbytes: int, losses: Losses) -> None:
        self.nbytes = nbytes
        self.losses = losses
        #: one that is dropped has no part any more; the first is the host
        self._budgets: tuple[weakref.ref[MemoryBudget], ...] = ()

    @property
    def budgets(self) -> list[MemoryBudget]:
        found = [each() for each in self._budgets]
        return [each for each in found if each is not None]

    def put(self, budget: MemoryBudget, *, first: bool) -> None:
        """Let a budget take part, or be the first from now on."""
        others = [each for each in self.budgets if each is not budget]
        self._budgets = tuple(map(weakref.ref, [budget, *others] if first else [*others, budget]))


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
        #: what the host may take while there is another budget
        self._limit = memory.nbytes
        #: whether a guest has to leave
        self._is_over = False
        #: a table that is dropped takes part no more
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        for number, other in enumerate(memory.budgets):
            other._limit, other._is_over = memory.nbytes, number > 0  # there is one guest at a time
        memory.put(self, first=False)

    @property
    def is_guest(self) -> bool:
        return self._memory.budgets[0] is not self

    @property
    def nbytes(self) -> int:
        others = [each for each in self._memory.budgets if each is not self]
        if not others:
            return self._memory.nbytes
        if not self.is_guest:
            return self._limit
        host, *guests = others
        return self._memory.nbytes - max(host._limit, host.taken) - sum(guest.taken for guest in guests)

    @property
    def left(self) -> int:
        """Return how much nobody has taken; less than nothing if it is too little."""
        return -1 if self._is_over else self.nbytes - self.taken

    def open(self, holder: Holder) -> Account:
        """Let a table take part."""
        self._holders.add(holder)
        return Account(self)

    def reserve(self, name: str, nbytes: int) -> None:
        """Refuse a table if there is not so much for it, which it takes in any case, beside what others take."""
        self._reserved += nbytes
        if self._reserved <= self.nbytes:
            return
        if self.is_guest:
            raise self._no_room(name, self._reserved)
        raise ConfigurationError(
            "the tables of a server do not fit into the memory they may take, even with few rows",
            where=f"table {name!r}",
            expected=f"FLEET_TABLE_MEMORY_MB={-(-self._reserved >> 20)} at least",
            got=f"FLEET_TABLE_MEMORY_MB={self._memory.nbytes >> 20}",
            todo="Give tables more memory, or the job more servers or fewer tables.",
        )

    def _no_room(self, name: str, nbytes: int) -> CheckpointError:
        return CheckpointError(
            "values that are to take the place of others do not fit into the memory for rows",
            where=f"table {name!r}",
            expected=f"at most {max(0, self.nbytes) / (1 << 20):.1f} MiB, as the rows that are there need the rest "
            f"of {self._memory.nbytes >> 20} MiB (FLEET_TABLE_MEMORY_MB)",
            got=f"{nbytes / (1 << 20):.1f} MiB",
            todo="Give the process more, or start it anew with these values. It goes on without them.",
        )

    # ---------------------------------------------------------------- two budgets

    def give_way(self) -> bool:
        """Give back a little of what guests are to have, and say whether that is all there is to give."""
        spare = sum(holder.spare_bytes for holder in self._holders)
        kept = max(self._memory.nbytes // 2, (self.taken - spare) * 9 // 8)
        self._limit = min(self._memory.nbytes, max(kept, self.taken - max(_LEAST_STEP, self._memory.nbytes >> 10)))
        if self.left < 0:
            self.reclaim()
        return self.taken <= kept

    def take_over(self) -> None:
        """Be the host from now on."""
        self._limit = self._memory.nbytes - sum(each.taken for each in self._memory.budgets if each is not self)
        self._memory.put(self, first=True)

    def donor(self, asking: Holder, nbytes: int) -> Holder:
        """Return who makes room for ``asking``: itself, or another that is asked for clearly less."""
        others = [each for each in self._holders if each is not asking and each.spare_bytes >= nbytes]
        if not others:
            return asking
        least = min(others, key=_worth)
        return least if not asking.spare_bytes or _worth(least) < _CLEARLY * _worth(asking) else asking

    def reclaim(self) -> None:
        """Make tables give back what is taken beyond the budget, as what is kept of every row has grown."""
        while self.left < 0:
            able = [holder for holder in self._holders if holder.spare_bytes > 0]
            if not able or self._is_over:
                self._cannot_reclaim()
                return
            giver = min(able, key=_worth)
            giver.give_back(min(-self.left, giver.spare_bytes))

    def _cannot_reclaim(self) -> None:
        largest = max(self._holders, key=lambda holder: holder.account.taken)
        if self.is_guest:
            raise self._no_room(largest.name, self.taken)
        guests = self._memory.budgets[1:]
        if guests and self.taken <= self._memory.nbytes:
            for guest in guests:
                guest._is_over = True  # its memory is needed here
            return
        with self._memory.losses:
            raise TableFileError(
                "tables have more rows than their memory can name, though most lie in files",
                where=f"table {largest.name!r}, which takes {largest.account.taken / (1 << 20):.1f} MiB",
                expected=f"at most {self.nbytes / (1 << 20):.1f} MiB for all (FLEET_TABLE_MEMORY_MB)",
                got=f"{self.taken / (1 << 20):.1f} MiB",
                todo="Give the server more of it (a row in a file takes 11 bytes of memory), the job more servers, "
                "or the table a filter (admit=) or a bound (evict=).",
            )


def _worth(holder: Holder) -> float:
    return holder.demand / max(1, holder.account.taken)
