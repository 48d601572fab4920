"""Tables of one kind are read and updated together: many small ones then take no more calls of compiled loops than one.

The segments of all tables are listed one after the other, so that a row has a number among all of them: its slot, and
behind how many rows of other tables its own begins. Loops over rows take such numbers as they take slots, which is why
kernels know nothing of this.

Not thread-safe: the caller holds a lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple

import numpy as np

from fleet.errors import ProtocolError
from fleet.numeric.ids import bounds, first_outside, gather, lift, packed, packed_ids, unique_each
from fleet.numeric.jit import Array, Ids, Segments
from fleet.plan.specs import TableSpec
from fleet.ps.table.index import find_each
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.store import Layout
from fleet.ps.table.table import WEIGHT, Table
from fleet.ps.wire.row_tensors import alike, runs_of

_LEAST, _GREATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_WEIGHTS = (WEIGHT,)

#: What is known of so many requests is kept: mostly a job's look-ups are of the same tables in every step.
_KEPT = 64


class Joined(NamedTuple):
    """Holds columns of several tables as one, and what is added to the slots of each table."""

    places: Ids  #: for ``find_each``
    keys: Segments
    columns: Mapping[str, Segments]
    offsets: Ids


class Bundle:
    """Reads and updates tables whose rows have one width, element type and kernel."""

    def __init__(self, tables: Sequence[Table], slot_cache: SlotCache | None) -> None:
        self.tables = tables
        self._stores = [table.store for table in tables]
        self._slot_cache = slot_cache
        #: by the names of columns, these joined, if they can be, and of which layouts they are
        self._joined: dict[tuple[str, ...], tuple[Sequence[Layout | None], Joined | None]] = {}
        #: the names of the columns that an update under some options needs
        self._prepared: tuple[Mapping[str, Any] | None, tuple[str, ...]] = None, ()

    @property
    def can_be_read(self) -> bool:
        """Say whether one call can read all tables, as they are now."""
        return self._join(_WEIGHTS) is not None

    def read(self, ids: Ids, stops: Ids, training: bool, out: Array) -> None:
        """Write the rows of ids into ``out``, as ``Table.read`` does; the ids of each table end at its stop, and are
        known to be in range."""
        ids, joined = packed_ids(ids), self._now(_WEIGHTS)
        slots = _found(joined, ids, stops)
        if training and self._slot_cache is not None:
            self._slot_cache.remember((self, stops.tobytes()), ids, slots)
        numbers = np.empty_like(slots)
        absent = lift(slots, stops, joined.offsets, numbers)
        gather(joined.columns[WEIGHT], numbers, out)
        if absent:
            for table, part in self._lacking(slots, stops):
                table.make_up(ids[part], slots[part], training, out[part])

    def can_be_updated(self, options: Mapping[str, Any]) -> bool:
        """Say whether one call can update all tables under these options, as they are now."""
        return len({table.step for table in self.tables}) == 1 and self._join(self._prepare(options)) is not None

    def apply(self, ids: Ids, stops: Ids, grads: Array, options: Mapping[str, Any], *, keep: bool) -> Array | None:
        """Update the rows of ids, as ``Table.apply`` does, as the step that all tables are at; the ids are known to be
        in range."""
        names, ids = self._prepare(options), packed_ids(ids)
        known = None if self._slot_cache is None else self._slot_cache.take((self, stops.tobytes()), ids)
        slots = _found(self._now(names), ids, stops) if known is None else known
        if slots.size and bounds(slots)[0] < 0:
            for table, part in self._lacking(slots, stops):
                table.complete(ids[part], slots[part])
        if any(table.is_watched for table in self.tables):
            for table, part in zip(self.tables, parts(stops), strict=True):
                table.prepare_change(slots[part])
        joined = self._now(names)
        numbers = np.empty_like(slots)
        lift(slots, stops, joined.offsets, numbers)
        weights = joined.columns[WEIGHT]
        before = np.empty_like(grads) if keep else None
        if before is not None:
            gather(weights, numbers, before)
        state = {name: joined.columns[name] for name in names[1:]}
        first = self.tables[0]
        first.kernel.step(weights, state, numbers, packed(grads, weights.dtype), options, first.step)
        return before

    def _prepare(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Create the columns that the kernel works on, and return their names, the weights first."""
        known, names = self._prepared
        if known is not options:
            for table in self.tables:
                names = (WEIGHT, *table.prepare(options))
            self._prepared = options, names
        return names

    def _lacking(self, slots: Ids, stops: Ids) -> Iterator[tuple[Table, slice]]:
        """Yield the tables some of whose ids have no slot, with the part of the ids that is theirs."""
        each = parts(stops)
        for place in np.unique(np.searchsorted(stops, np.flatnonzero(slots < 0), side="right")).tolist():
            yield self.tables[place], each[place]

    def _now(self, names: tuple[str, ...]) -> Joined:
        joined = self._join(names)
        assert joined is not None, "the caller has asked"
        return joined

    def _join(self, names: tuple[str, ...]) -> Joined | None:
        """Return these columns as they are now."""
        layouts = [store.layout for store in self._stores]
        known = self._joined.get(names)
        if known is None or any(map(is_not, layouts, known[0])):
            self._joined[names] = known = layouts, join(layouts, names)
        return known[1]


def _found(joined: Joined, ids: Ids, stops: Ids) -> Ids:
    """Return the slot of every id in its own table, -1 where there is none."""
    slots = np.empty(ids.size, np.int64)
    find_each(joined.places, joined.keys, ids, stops, slots)
    return slots


def join(layouts: Sequence[Layout | None], names: Sequence[str]) -> Joined | None:
    """Join columns of several tables; None where their rows are not divided into segments in one way."""
    there = [layout for layout in layouts if layout is not None]
    if len(there) < len(layouts) or not all(name in layout.columns for layout in there for name in names):
        return None
    shapes = {(layout.columns[name].bits, layout.columns[name].dtype) for layout in there for name in names}
    if len(shapes) > 1 or len({layout.keys.bits for layout in there}) > 1:
        return None
    ((bits, _),) = shapes
    # A column that was made later may have fewer segments, of as many rows.
    longest = [max(len(layout.columns[name].addresses) for name in names) for layout in there]
    columns = {}
    for name in names:
        addresses = np.zeros(sum(longest), np.uint64)
        start = 0
        for layout, segments in zip(there, longest, strict=True):
            listed = layout.columns[name].addresses
            addresses[start : start + len(listed)] = listed
            start += segments
        columns[name] = Segments(addresses, there[0].columns[name].like, bits)
    offsets = np.cumsum([0, *longest[:-1]]) << bits
    places = np.array([layout.places for layout in there], np.int64)
    return Joined(places, there[0].keys, columns, offsets)


class Part(NamedTuple):
    """Names neighbours among the tables of a request, and with a bundle says that they may be read and updated
    together."""

    places: slice
    bundle: Bundle | None


class Run(NamedTuple):
    """Names neighbours whose rows travel as one tensor, and the parts of these."""

    places: slice
    parts: Sequence[Part]


class Request:
    """Knows the tables of a request: the range of their ids, and which of them can be read and updated together."""

    def __init__(self, tables: Sequence[Table], training: Sequence[bool], slot_cache: SlotCache | None) -> None:
        self.tables = tables
        self._limits = np.array([_limits(table.spec) for table in tables], np.int64).reshape(-1, 2)
        kinds = [
            (table.kernel, table.spec.group, is_trained, table.layout is None)
            for table, is_trained in zip(tables, training, strict=True)
        ]

        def part(places: slice) -> Part:
            is_one = places.stop - places.start > 1 and tables[places.start].layout is not None
            return Part(places, Bundle(tables[places], slot_cache) if is_one else None)

        self.runs = [
            Run(run, [part(places) for places in alike(kinds, run)])
            for run in runs_of([table.spec for table in tables])
        ]

    def check_range(self, ids: Ids, stops: Ids) -> None:
        """Refuse ids that one of the tables was not made for; those of each table end at its stop."""
        wrong = first_outside(packed_ids(ids), stops, self._limits)
        if wrong >= 0:
            self.tables[wrong].check_range(ids[parts(stops)[wrong]])


def _limits(spec: TableSpec) -> tuple[int, int]:
    """Return the least and the greatest that an id may be."""
    return (_LEAST, _GREATEST) if spec.num_embeddings is None else (0, spec.num_embeddings - 1)


class Requests:
    """Remembers what is known of requests that name the same tables, as most of a job do."""

    def __init__(self, tables: Sequence[Table], slot_cache: SlotCache | None) -> None:
        """``tables`` are all there are, to which others may be added."""
        self._tables = tables
        self._slot_cache = slot_cache
        self._known: dict[tuple[tuple[int, ...], tuple[bool, ...]], Request] = {}

    def of(self, indices: tuple[int, ...], training: tuple[bool, ...] | None = None) -> Request:
        """Return the request that names these tables, each for training or not; a push is for training."""
        key = indices, (True,) * len(indices) if training is None else training
        found = self._known.get(key)
        if found is None:
            found = Request([self._table(index) for index in indices], key[1], self._slot_cache)
            if len(indices) <= len(self._tables):
                while len(self._known) >= _KEPT:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        return found

    def _table(self, index: int) -> Table:
        if not 0 <= index < len(self._tables):
            raise ProtocolError("a message names a table this job does not have", got=index)
        return self._tables[index]


def warm(tables: Sequence[Table]) -> None:
    """Compile, or load, what these tables run together beside that which each runs by itself."""
    none = np.empty(0, np.int64)
    if tables:
        first_outside(none, none, np.empty((0, 2), np.int64))
        lift(none, none, none, none)
        unique_each(none, none)
    for layout in [table.layout for table in tables if table.layout is not None][:1]:
        find_each(np.empty((0, len(layout.places)), np.int64), layout.keys, none, none, none)


def parts(stops: Ids) -> list[slice]:
    """Return for every table the part of the ids that is its own, where each ends at its stop."""
    ends = stops.tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
