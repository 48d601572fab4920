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
from fleet.plan.specs import TableSpec
from fleet.ps.table.initializers import InitialRows
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.store import Store

#: The column that is the table; the others are the optimizer's, but for this one.
WEIGHT = "weight"
#: In which epoch a row was changed last, once epochs are counted.
_CHANGED = "changed"
#: Rows are looked through for changed ones by so many at a time.
_LOOKED_THROUGH = 1 << 20

#: The kinds of tables for which this process has everything compiled.
_warm: set[tuple[TableSpec, RowKernel, str]] = set()


class Table:
    """Updates and reads rows. ``step`` is how many of the job's rounds used the table; the caller that drives the
    rounds counts them."""

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
        self._kernel = kernel
        self._seed = seed
        self._dtype = np.dtype(spec.dtype)
        self._initial = InitialRows(spec, seed)
        self._store: Store = MemoryStore() if store is None else store
        self._store.ensure_column(WEIGHT, spec.dim, 0.0, self._dtype)
        self._slot_cache = slot_cache
        self._epoch = 0
        self._watchers: tuple[Callable[[Ids], None], ...] = ()

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def columns(self) -> list[str]:
        """Return the names of a row's columns: its values and its optimizer's."""
        return [name for name in self._store.columns if name != _CHANGED]

    def read(self, ids: Ids, training: bool) -> Array:
        """Return the rows of ids, which may repeat. An unknown id reads its initial value, or outside training the mean
        of those."""
        ids = self._checked(ids)
        slots = self._store.find(ids)
        if training and self._slot_cache is not None:
            self._slot_cache.remember(self.spec.name, ids, slots)
        out = np.empty((ids.size, self.spec.dim), self._dtype)
        gather(self._store.column(WEIGHT), slots, out)
        missing = _missing(slots)
        if missing.size and training:
            rows = np.empty((missing.size, self.spec.dim), self._dtype)
            self._initial.fill(ids[missing], rows)
            out[missing] = rows
        elif missing.size:
            out[missing] = self.spec.initializer.mean
        return out

    def apply(
        self, ids: Ids, grads: Array, options: Mapping[str, Any], step: int, *, keep: bool = False
    ) -> Array | None:
        """Update the rows of ids, which are distinct, as step number ``step``; unknown ids get a row. With ``keep``
        return the weights that they had before."""
        ids, grads = self._checked(ids), self._shaped(WEIGHT, grads, ids, self.spec.dim)
        names = self.prepare(options)
        slots = self._insert(ids)
        self._announce(slots)
        before = self._copied(WEIGHT, slots) if keep else None
        state = {name: self._store.column(name) for name in names}
        self._kernel.step(self._store.column(WEIGHT), state, slots, grads, options, step)
        self.step = step
        self._mark(slots)
        return before

    def add(self, ids: Ids, changes: Array) -> None:
        """Add to the rows of ids, which are distinct; unknown ids get a row first."""
        ids, changes = self._checked(ids), self._shaped(WEIGHT, changes, ids, self.spec.dim)
        slots = self._insert(ids)
        self._announce(slots)
        accumulate(slots, changes, self._store.column(WEIGHT))
        self._mark(slots)

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for every id whether it has a row."""
        return self._store.find(self._checked(ids)) >= 0

    def prepare(self, options: Mapping[str, Any]) -> list[str]:
        """Create the columns that the kernel works on, filled with what untouched rows hold, and return their names."""
        columns = self._kernel.columns(options, self.spec.dim)
        for name, column in columns.items():
            self._store.ensure_column(name, column.width, column.fill, self._dtype)
        return list(columns)

    def load(self, ids: Ids, columns: Mapping[str, Array]) -> None:
        """Set columns of ids, which are distinct, from an upload or a checkpoint."""
        ids = self._checked(ids)
        widths = {name: np.shape(values)[-1] for name, values in columns.items()} | {WEIGHT: self.spec.dim}
        rows = {name: self._shaped(name, values, ids, widths[name]) for name, values in columns.items()}
        for name in rows:
            if name not in self._store.columns:
                # What untouched rows hold is the kernel's to say (prepare); this one it does not know.
                self._store.ensure_column(name, widths[name], 0.0, self._dtype)
        # Made-up weights would be written over at once.
        slots = self._store.insert(ids) if WEIGHT in rows else self._insert(ids)
        self._announce(slots)
        for name, values in rows.items():
            scatter(self._store.column(name), slots, values)
        self._mark(slots)

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

    def watch(self, watcher: Callable[[Ids], None]) -> None:
        """Give ``watcher`` the slots of rows that are about to change, from now on."""
        self._watchers += (watcher,)

    def unwatch(self, watcher: Callable[[Ids], None]) -> None:
        """Stop giving ``watcher`` slots; one that does not watch may be named as well."""
        self._watchers = tuple(each for each in self._watchers if each is not watcher)

    def _announce(self, slots: Ids) -> None:
        for watcher in self._watchers:
            watcher(slots)

    def _mark(self, slots: Ids) -> None:
        if self._epoch:
            stamp(self._store.column(_CHANGED), slots, self._epoch)

    def export(self, start: int = 0, stop: int | None = None) -> tuple[Ids, dict[str, Array]]:
        """Return copies of the ids from the ``start``-th to the ``stop``-th created, and of all their columns."""
        return self.rows_at(np.arange(start, len(self) if stop is None else min(stop, len(self))))

    def rows_at(self, slots: Ids) -> tuple[Ids, dict[str, Array]]:
        """Return copies of the ids at slots, and of all their columns."""
        return self._store.ids(slots), {name: self._copied(name, slots) for name in self.columns}

    def of_epochs(self, slots: Ids, since: int, until: int | None = None) -> Ids:
        """Return those slots whose rows were last changed in the epoch ``since`` or later, and before ``until``."""
        epochs = self._copied(_CHANGED, slots)[:, 0]
        return slots[(epochs >= since) if until is None else (epochs >= since) & (epochs < until)]

    def changed(self, since: int, until: int | None, start: int, most: int) -> tuple[Ids, int]:
        """Return, from slot ``start`` on, at most so many slots whose rows are ``of_epochs``; and the slot up to which
        was looked."""
        found, left = [np.empty(0, np.int64)], most
        while start < len(self) and left > 0:
            slots = np.arange(start, min(start + _LOOKED_THROUGH, len(self)))
            changed = self.of_epochs(slots, since, until)[:left]
            left -= changed.size
            start = int(slots[-1] if left else changed[-1]) + 1
            found.append(changed)
        return np.concatenate(found), start

    def warm(self, options: Mapping[str, Any] | None = None) -> None:
        """Compile, or load, everything that a table of this kind runs, on a table of a few rows that is thrown away."""
        options = self._kernel.options if options is None else options
        kind = replace(self.spec, name="", num_embeddings=None), self._kernel, repr(options)
        if kind in _warm:
            return
        trial = Table(replace(self.spec, num_embeddings=None), self._kernel, self._seed)
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
        _warm.add(kind)

    def _insert(self, ids: Ids) -> Ids:
        before = len(self._store)
        known = None if self._slot_cache is None else self._slot_cache.take(self.spec.name, ids)
        slots = self._store.insert(ids) if known is None else self._completed(ids, known)
        if len(self._store) > before:
            fresh = np.arange(before, len(self._store))
            rows = np.empty((fresh.size, self.spec.dim), self._dtype)
            self._initial.fill(self._store.ids(fresh), rows)
            scatter(self._store.column(WEIGHT), fresh, rows)
        return slots

    def _completed(self, ids: Ids, slots: Ids) -> Ids:
        """Return the slots of ids, of which some had none."""
        missing = _missing(slots)
        if missing.size:
            slots[missing] = self._store.insert(ids[missing])
        return slots

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
        return packed(values, self._dtype)


_NONE = np.empty(0, np.int64)


def _missing(slots: Ids) -> Ids:
    """Return the places of ids that have no slot; mostly there are none."""
    return np.flatnonzero(slots < 0) if slots.size and bounds(slots)[0] < 0 else _NONE
