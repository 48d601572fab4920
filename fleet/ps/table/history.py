"""A history knows which rows have changed since which checkpoint, for checkpoints that save only these.

Time is cut into epochs: one begins with every checkpoint, and rows remember the epoch in which they were last changed.
The rows to be saved after a checkpoint are those of the epoch that began with it, or of a later one. Nothing has to be
undone when a checkpoint fails: the one before it is still the one to go on from. Epochs are counted from the first
checkpoint on; a job without checkpoints pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet.ps.table.table import Table


class History:
    def __init__(self) -> None:
        self._tables: Sequence[Table] = ()
        self._epoch = 0
        #: the newest checkpoint that is known to exist, and the epoch that began with it
        self._last: tuple[str, int] = ("", 0)
        #: one that is being written, and its epoch
        self._begun: tuple[str, int] = ("", 0)
        #: who goes on from something that was saved, and the epochs that began with it
        self._bases: dict[str, tuple[int, ...]] = {}

    @property
    def epoch(self) -> int:
        """Return the present epoch."""
        return self._epoch

    def watch(self, tables: Sequence[Table]) -> None:
        """Mark changes in these tables, which may be more than before."""
        self._tables = tables
        if self._epoch:
            for table in tables:
                table.begin_epoch(self._epoch)

    def next_epoch(self) -> int:
        """Begin a new epoch, and return its number."""
        self._epoch += 1
        self.watch(self._tables)
        return self._epoch

    def begin(self, checkpoint: str, after: str) -> int:
        """Begin an epoch with a checkpoint, and return from which epoch on rows belong into it if it follows on
        ``after``; 0 means that all rows do."""
        known, since = self._last
        self._begun = (checkpoint, self.next_epoch())
        self.goes_on_from("checkpoint", *(epoch for _, epoch in (self._last, self._begun) if epoch))
        return since if after and after == known and self.knows_removed(since) else 0

    def exists(self, checkpoint: str) -> None:
        """Note that the checkpoint that was begun has been written."""
        if self._begun[0] == checkpoint:
            self._last = self._begun
            self.goes_on_from("checkpoint", self._last[1])

    def knows_removed(self, since: int) -> bool:
        """Say whether it is known which rows were removed in an epoch or later."""
        return all(table.knows_removed(since) for table in self._tables)

    def leave(self, who: str) -> None:
        """Note that somebody asks no more for what has changed."""
        self._bases.pop(who, None)

    def goes_on_from(self, who: str, *epochs: int) -> None:
        """Note from which epochs on somebody may ask for what has changed; nobody else needs to be known to."""
        self._bases[who] = epochs
        for table in self._tables:
            table.forget_removed(min(min(each) for each in self._bases.values()))
