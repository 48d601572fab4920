"""A sparse table says what rows mean, over a store that keeps them and a kernel that updates them.

Not thread-safe: the caller holds a lock around every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.kernels.rule import RowKernel
from fleet.numeric.ids import accumulate, bounds, gather, packed, packed_ids, scatter, stamp
from fleet.numeric.jit import Array, Ids
from fleet.numeric.merge import merge
from fleet.plan.life import PREFIX
from fleet.plan.specs import TableSpec
from fleet.ps.table.eviction import Cut
from fleet.ps.table.initializers import InitialRows
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.row_file import Backlog, Reading
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.store import Batch, Between, Layout, Store

#: The column that is the table; the others are the optimizer's, but for this one.
WEIGHT = "weight"
#: In which epoch a row was changed last, once epochs are counted.
_CHANGED = "changed"
#: what a row takes for that
EPOCH_BYTES = 4

#: The kinds of tables for which this process has everything compiled.
_warm: set[tuple[TableSpec, RowKernel, str]] = set()


class Table:
    """Updates and reads rows. ``step`` is how many of the job's rounds used the table; the caller that drives the
    rounds counts them."""

    #: says which rows are gone although they are still there
    cut: Cut | None = None

    def __init__(
        self,
        spec: TableSpec,
        kernel: RowKernel,
        seed: int,
        store: Store | None = None,
        slot_cache: SlotCache | None = None,
    ) -> None:
        """``slot_cache``, if it is given, remembers the ids that are read for training."""
        self.spec = spec
        self.step = 0
        self.kernel = kernel
        self._seed = seed
        self._dtype = np.dtype(spec.dtype)
        self._initial = InitialRows(spec, seed)
        self._store: Store = MemoryStore() if store is None else store
        self._store.ensure_column(WEIGHT, spec.dim, 0.0, self._dtype)
        self._slot_cache = slot_cache if self._store.most is None else None  # else rows may have other slots by then
        self._epoch = 0
        self._watchers: tuple[Callable[[Ids], None], ...] = ()

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def figures(self) -> dict[str, int]:
        """Return what is told of the table, by the names in ``figures.TABLE``."""
        return {"rows": len(self), "bytes": self.nbytes, **self._store.figures()}

    @property
    def row_bytes(self) -> int:
        """Return what one row has: its id, its values and its optimizer's."""
        return self._store.row_bytes

    @property
    def columns(self) -> list[str]:
        """Return the names of a row's columns: its values and its optimizer's."""
        return [name for name in self._store.columns if name != _CHANGED]

    @property
    def store(self) -> Store:
        """Return what keeps the rows."""
        return self._store

    @property
    def layout(self) -> Layout | None:
        """Return where all of it lies, the same object for as long as nothing moves; None if it cannot be updated
        together with others."""
        return self._store.layout

    def read(self, ids: Ids, training: bool, out: Array | None = None) -> Array:
        """Return the rows of ids, which may repeat. An unknown id reads its initial value, or outside training the mean
        of those. They are written into ``out`` if that is given."""
        ids = self._checked(ids)
        if out is None:
            out = np.empty((ids.size, self.spec.dim), self._dtype)
        for part in self._parts(ids):
            self._read(ids[part], training, out[part])
        return out

    def _read(self, ids: Ids, training: bool, out: Array) -> None:
        slots = self._find(ids)
        if training and self._slot_cache is not None:
            self._slot_cache.remember(self.spec.name, ids, slots)
        if gather(self._store.column(WEIGHT), slots, out):
            self.make_up(ids, slots, training, out)

    def make_up(self, ids: Ids, slots: Ids, training: bool, out: Array) -> None:
        """Write into ``out`` what ids without a slot read."""
        missing = _missing(slots)
        if missing.size and training:
            rows = np.empty((missing.size, self.spec.dim), self._dtype)
            self._initial.fill(ids[missing], rows)
            out[missing] = rows
        elif missing.size:
            out[missing] = self.spec.initializer.mean

    def apply(
        self, ids: Ids, grads: Array, options: Mapping[str, Any], step: int, *, keep: bool = False
    ) -> Array | None:
        """Update the rows of ids, which are distinct, as step number ``step``; unknown ids get a row. With ``keep``
        return the weights that they had before."""
        ids, grads = self._checked(ids), self._shaped(WEIGHT, grads, ids, self.spec.dim)
        names = self.prepare(options)
        before = np.empty_like(grads) if keep else None
        for part in self._parts(ids):
            slots = self._writable(ids[part])
            weights = self._store.column(WEIGHT)
            if before is not None:
                gather(weights, slots, before[part])
            state = {name: self._store.column(name) for name in names}
            self.kernel.step(weights, state, slots, grads[part], options, step)
        self.step = step
        return before

    def add(self, ids: Ids, changes: Array) -> None:
        """Add to the rows of ids, which are distinct; unknown ids get a row first."""
        ids, changes = self._checked(ids), self._shaped(WEIGHT, changes, ids, self.spec.dim)
        for part in self._parts(ids):
            slots = self._writable(ids[part])
            accumulate(slots, changes[part], self._store.column(WEIGHT))

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for every id whether it has a row."""
        return self._store.has(self._checked(ids))

    def _find(self, ids: Ids) -> Ids:
        return self._store.find(ids)

    def prepare(self, options: Mapping[str, Any]) -> list[str]:
        """Create the columns that the kernel works on, filled with what untouched rows hold, and return their names."""
        columns = self.kernel.columns(options, self.spec.dim)
        for name, column in columns.items():
            self._store.ensure_column(name, column.width, column.fill, self._dtype)
        return list(columns)

    def load(self, ids: Ids, columns: Mapping[str, Array]) -> None:
        """Set columns of ids, which are distinct, from an upload or a checkpoint."""
        ids = self._checked(ids)
        known = {name: self._store.column(name).like.shape[1] for name in self._store.columns}
        widths = {name: np.shape(values)[-1] for name, values in columns.items()} | known | {WEIGHT: self.spec.dim}
        rows = {
            name: self._shaped(name, values, ids, widths[name]) for name, values in columns.items() if self._keeps(name)
        }
        for name in rows:
            if name not in self._store.columns:
                # What untouched rows hold is the kernel's to say (prepare); this one it does not know.
                self._store.ensure_column(name, widths[name], 0.0, self._dtype)
        for part in self._parts(ids):
            # Made-up weights would be written over at once.
            slots = self._writable(ids[part], is_filled=WEIGHT not in rows)
            for name, values in rows.items():
                scatter(self._store.column(name), slots, values[part])

    def reading(self, ids: Ids, *, expected: bool) -> Reading | None:
        """Return what has to be read from a file before ids can be found, if anything, for ``take``; ``expected`` says
        that they will be looked up."""
        return self._store.reading(packed_ids(ids), expected=expected)

    def backlog(self) -> Backlog | None:
        """Return what has to be written before more rows leave memory, if somebody would wait for it."""
        return self._store.backlog()

    def take(self, reading: Reading) -> None:
        """Bring rows into memory that have been read."""
        self._store.take(reading)

    def to_rewrite(self) -> Reading | None:
        """Return the part of a file that should be written anew, if there is one, for ``rewrite``."""
        return self._store.to_rewrite()

    def rewrite(self, reading: Reading) -> None:
        """Write anew what is still needed of a part of a file that has been read."""
        self._store.rewrite(reading)

    def expect(self, rows: int) -> None:
        """Prepare for about so many rows, which will be there soon."""
        self._store.reserve(rows)

    def touch(self) -> Iterator[int]:
        """Make the system provide the memory for the expected rows before they come, some of it at each step, and yield
        for how many it is there. Any thread may do so, and while rows come."""
        return self._store.touch()

    def begin_epoch(self, epoch: int) -> None:
        """Mark rows that change, or come, with this epoch from now on; the numbers grow."""
        if not self._epoch:
            self._store.ensure_column(_CHANGED, 1, 0, np.uint32)
        self._epoch = epoch
        self._store.ensure_column(_CHANGED, 1, epoch, np.uint32)

    def remove(self, ids: Ids) -> None:
        """Take away the rows of ids, which are distinct, while a checkpoint is loaded."""
        self._store.remove(self._checked(ids))

    def take_out_due(self) -> None:
        """Take out all rows that are due: none."""

    def removed_since(self, epoch: int) -> list[Ids]:
        """Return the rows that were removed in an epoch or later: none."""
        del epoch
        return []

    def knows_removed(self, since: int) -> bool:
        """Say whether all rows are known that were removed in an epoch or later."""
        del since
        return True

    def forget_removed(self, before: int) -> None:
        """Forget the rows that were removed before an epoch."""

    def watch(self, watcher: Callable[[Ids], None]) -> None:
        """Give ``watcher`` the slots of rows that are about to change, from now on."""
        self._watchers += (watcher,)

    def unwatch(self, watcher: Callable[[Ids], None]) -> None:
        """Stop giving ``watcher`` slots; one that does not watch may be named as well."""
        self._watchers = tuple(each for each in self._watchers if each is not watcher)

    def scan(self, start: int, most: int, since: int = 0, until: int | None = None) -> tuple[Batch, int | None]:
        """Return copies of at most so many rows from a place on, and where the rest begins (``Store.scan``): those last
        changed in the epoch ``since`` or later, and before ``until``."""
        only = None if not since and until is None else Between(_CHANGED, since, until)
        return self._store.scan(start, most, self.columns, only)

    def export(self) -> Batch:
        """Return copies of all rows."""
        found: list[Batch] = []
        start: int | None = 0
        while start is not None:
            batch, start = self.scan(start, max(1, len(self)))
            found.append(batch)
        columns = {name: np.concatenate([rows[name] for _, rows in found]) for name in self.columns}
        return np.concatenate([ids for ids, _ in found]), columns

    def rows_of(self, slots: Ids, since: int, until: int) -> Batch:
        """Return copies of those rows at slots that were last changed in the epoch ``since`` or later, and before
        ``until``."""
        slots = slots[Between(_CHANGED, since, until)(self._copied(_CHANGED, slots))]
        return self._store.ids(slots), {name: self._copied(name, slots) for name in self.columns}

    def warm(self, options: Mapping[str, Any] | None = None) -> None:
        """Compile, or load, everything that a table of this kind runs, on a table of a few rows that is thrown away."""
        options = self.kernel.options if options is None else options
        kind = replace(self.spec, name="", num_embeddings=None), self.kernel, repr(options)
        if kind in _warm:
            return
        trial = Table(replace(self.spec, num_embeddings=None), self.kernel, self._seed)
        trial.begin_epoch(1)
        trial.expect(1)
        for _ in trial.touch():
            pass
        ids = np.arange(1024)
        rows = trial.read(ids, training=True)
        for start in range(0, ids.size, 64):  # in parts, as look-ups are others while the store grows
            part = slice(start, start + 64)
            trial.load(ids[part], {WEIGHT: rows[part]})
            trial.read(ids, training=True)
        trial.apply(*merge([(ids, rows)], 1), options, step=1)
        trial.add(ids + ids.size, rows)  # new ones, whose rows have to be made up
        trial.scan(0, ids.size, since=1)
        _warm.add(kind)

    def _parts(self, ids: Ids) -> list[slice]:
        """Return parts of ids of which each may be in memory as a whole."""
        most = self._store.most
        if most is None or ids.size <= most:
            return _WHOLE
        return [slice(start, start + most) for start in range(0, ids.size, most)]

    def _writable(self, ids: Ids, *, is_filled: bool = True) -> Ids:
        """Return the slots of ids, for the caller to write to; unknown ids get a row, with its initial values if it is
        to be filled."""
        known = None if self._slot_cache is None else self._slot_cache.take(self.spec.name, ids)
        if known is None:
            slots, fresh = self._store.insert(ids), self._store.created
        else:
            slots, fresh = known, self._completed(ids, known)
        if fresh.size and is_filled:
            self._fill(ids[fresh], slots[fresh])
        self.prepare_change(slots)
        return slots

    def complete(self, ids: Ids, slots: Ids) -> None:
        """Give rows, with their initial values, to those of the ids that have no slot, and write their slots beside the
        others."""
        fresh = self._completed(ids, slots)
        if fresh.size:
            self._fill(ids[fresh], slots[fresh])

    def _completed(self, ids: Ids, slots: Ids) -> Ids:
        """Write the slots of ids that have none beside the others, and return the places of the new ones."""
        missing = _missing(slots)
        if not missing.size:
            return missing
        slots[missing] = self._store.insert(ids[missing])
        return missing[self._store.created]  # others have come since they were looked up

    def _fill(self, ids: Ids, slots: Ids) -> None:
        rows = np.empty((ids.size, self.spec.dim), self._dtype)
        self._initial.fill(ids, rows)
        scatter(self._store.column(WEIGHT), slots, rows)

    @property
    def is_watched(self) -> bool:
        """Say whether somebody has to hear of rows that are about to change, or it is noted on them."""
        return bool(self._watchers) or self._epoch > 0

    def prepare_change(self, slots: Ids) -> None:
        """Tell whoever has to know that the rows at slots are about to change."""
        for watcher in self._watchers:
            watcher(slots)
        self._store.write(slots)
        if self._epoch:
            stamp(self._store.column(_CHANGED), slots, self._epoch)

    def _copied(self, name: str, slots: Ids) -> Array:
        column = self._store.column(name)
        rows = np.empty((slots.size, column.like.shape[1]), column.dtype)
        gather(column, slots, rows)
        return rows

    def check_range(self, ids: Ids) -> None:
        """Refuse ids the table was not made for."""
        bound = self.spec.num_embeddings
        if bound is None or not ids.size:
            return
        low, high = bounds(packed_ids(ids))
        if low < 0 or high >= bound:
            raise ConfigurationError(
                "an id is out of the table's range",
                where=f"table {self.spec.name!r}",
                expected=f"0 <= id < {bound}",
                got=int(ids[(ids < 0) | (ids >= bound)][0]),
            )

    def _checked(self, ids: Ids) -> Ids:
        ids = packed_ids(ids)
        self.check_range(ids)
        return ids

    def _shaped(self, name: str, values: Array, ids: Ids, width: int) -> Array:
        # The kernels do not check bounds.
        if np.shape(values) != (ids.size, width):
            raise ConfigurationError(
                f"rows of {name!r} have the wrong shape",
                where=f"table {self.spec.name!r}",
                expected=(ids.size, width),
                got=np.shape(values),
            )
        return packed(values, self._type_of(name))

    def _keeps(self, column: str) -> bool:
        """Say whether a column that is loaded belongs here: those of rules that the table does not have do not."""
        return not column.startswith(PREFIX)

    def _type_of(self, column: str) -> np.dtype[Any]:
        del column
        return self._dtype


_NONE = np.empty(0, np.int64)
_WHOLE = [slice(None)]


def _missing(slots: Ids) -> Ids:
    """Return the places of ids that have no slot; mostly there are none."""
    return np.flatnonzero(slots < 0) if slots.size and bounds(slots)[0] < 0 else _NONE
