"""Brings rows to the device ahead of the forwards that will ask for them, with the values that these would have found.

Where steps are shared, a row has the value of a version, and only rounds change it. So rows are asked for twice, both
times ahead: at once, for what there is at the present version, and once more for the version of the forward. The second
answer leaves out what no round has changed, which only the servers know, as other workers' look-ups are in it. The
first answer is on the device when its forward comes, the second is what a step waits for. Rows that this worker's own
batches in between look up will change: they are left out of the first request.

Elsewhere rows are as old as their requests. There a script may say how old they may become, and until then they stay on
the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from fleet.nn.handle import Lookup, Wanted
from fleet.numeric.device_copies import Copies
from fleet.numeric.ids import among
from fleet.numeric.jit import Array, Ids
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.worker.lookups import Fetch, Known, Prefetched, Query, RowReader
from fleet.ps.worker.progress import ReadAt, Readings

#: Places for so many rows are made at once, at least.
_FEWEST = 1 << 10


class RowsOnDevice:
    """Keeps rows of one table on the device, each until it is too old for every batch to come.

    What is kept is decided when a batch is foreseen, and written and read when it comes; both happen in the order of
    the batches, so a place may be given to another row as soon as nobody decides for the first one any more.
    """

    def __init__(self, copies: Copies, dim: int, dtype: torch.dtype, most_age: int) -> None:
        """``most_age`` says in how many batches a row may be used after the one in which it was asked for."""
        self._copies = copies
        self._most_age = most_age
        self._index = MemoryStore()
        self._asked_at = np.empty(0, np.int64)
        #: which rows were asked for in which batch
        self._asked: deque[tuple[int, Ids]] = deque()
        self._rows = copies.empty((0, dim), dtype)

    def __len__(self) -> int:
        return len(self._index)

    def foresee(self, ids: Ids, now: int, batch: int) -> tuple[Array, Ids, int | None]:
        """Say, in batch ``now``, which of these rows ``batch`` finds here, where all of them are when it comes, and in
        which batch the oldest was asked for. Those that it does not find are asked for now."""
        self._forget(batch)
        slots = self._index.find(ids)
        held = slots >= 0
        oldest = int(self._asked_at[slots[held]].min()) if held.any() else None
        missing = ids[~held]
        if missing.size:
            slots[~held] = new = self._index.insert(missing)
            short = int(new.max()) + 1 - len(self._asked_at)
            if short > 0:
                more = np.zeros(max(short, len(self._asked_at), _FEWEST), np.int64)
                self._asked_at = np.concatenate([self._asked_at, more])
            self._asked_at[new] = now
            self._asked.append((now, missing))
        return held, slots, oldest

    def _forget(self, batch: int) -> None:
        """Forget the rows that are too old for this batch and all later ones."""
        while self._asked and batch - self._asked[0][0] > self._most_age:
            self._index.remove(self._asked.popleft()[1])

    def enter(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, beside the computation."""
        short = len(self._asked_at) - len(self._rows)
        if short > 0:
            self._rows = torch.cat([self._rows, self._rows.new_zeros(short, self._rows.shape[1])])
        self._rows.index_copy_(0, slots, rows)

    def read(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        """Read rows, beside the computation."""
        torch.index_select(self._rows, 0, slots, out=into)


class Places(NamedTuple):
    """Holds the ids of one table on the device, or on their way there: the distinct ones, for every id its place among
    them, and all as they were asked for."""

    distinct: torch.Tensor
    inverse: torch.Tensor
    ids: torch.Tensor


class Prepared(NamedTuple):
    """Holds what of a batch is known before anything is asked for it, in the order of its tables."""

    wanted: Sequence[Sequence[Wanted]]
    known: Sequence[Known]
    #: which of the distinct ids no batch shortly before looks up, where that matters
    apart: Sequence[Array | None]
    places: Sequence[Places]
    #: when these are on the device
    mark: object


class Part(NamedTuple):
    """Says what one batch wants of one table: the rows it has asked for at once, by their positions among the distinct
    ids, and, where rows stay on the device, where all of them are there."""

    known: Known
    wanted: Sequence[Wanted]
    places: Places
    asked: Ids
    slots: Ids | None = None
    #: of those that stayed there, in which batch the first was asked for
    oldest: int | None = None


@dataclass
class Coming:
    """Holds what is under way for one batch."""

    parts: Sequence[Part]
    #: the batch in which it was foreseen
    asked_at: int
    version: int
    completed: int
    replaced: int
    first: Fetch
    #: what will have changed, where there are versions
    second: Fetch | None
    #: when what was handed over last will be on the device
    mark: object
    #: where the rows will be, once the first ones are on their way to the device
    rows: list[torch.Tensor] = field(default_factory=list)

    def abandon(self) -> None:
        self.first.abandon()
        if self.second is not None:
            self.second.abandon()


@dataclass
class OnDevice(Prefetched):
    """Holds rows that are on the device, or on their way, with the place of every id among them."""

    copies: Copies = field(kw_only=True)
    mark: object = field(kw_only=True)
    rows: torch.Tensor = field(kw_only=True)
    places: Places = field(kw_only=True)
    #: of the oldest of these rows, as their servers had it
    clocks: Mapping[int, ReadAt] = field(kw_only=True)

    def is_of(self, ids: torch.Tensor, training: bool) -> bool:
        if ids.device != self.copies.device:
            return super().is_of(ids, training)
        # The device compares, and what it is asked for does not travel.
        self._wait()
        return self.known.training == training and torch.equal(self.places.ids, ids.detach().reshape(-1).long())

    def _wait(self) -> None:
        if self.mark is not None:
            self.copies.wait(self.mark, [self.rows, self.places.ids])
            self.mark = None

    def some(self, ids: Ids, read_at: Readings) -> Array | None:  # noqa: ARG002
        return None

    def lookup(self, read_at: Readings) -> Lookup:
        for server, clock in self.clocks.items():
            read_at.setdefault((server, self.known.table), clock)
        self.fetch.rows(self.place, read_at)
        if self.made is None:
            self._wait()
            distinct, inverse, _ = self.places
            self.made = Lookup(self.known.distinct, self.rows, inverse, self.foreseen, distinct)
        return self.made


class LookAhead:
    """Looks ahead for the batches of one ``fleet.prefetch``."""

    def __init__(
        self,
        reader: RowReader,
        copies: Copies,
        depth: int,
        most_age: int | None,
        waiting: AbstractContextManager[None],
        copying: AbstractContextManager[None],
        *,
        shares_steps: bool,
    ) -> None:
        """``most_age`` says for how many batches rows may stay on the device, if they may. ``waiting`` is around every
        wait for servers, ``copying`` around what is done for the device."""
        self._waiting = waiting
        self._copying = copying
        self._reader = reader
        self._copies = copies
        self._depth = depth
        self._most_age = most_age
        self._shares_steps = shares_steps
        self._kept: dict[int, RowsOnDevice] = {}
        self._replaced = reader.replaced
        self._batches = 0
        #: by batch in which rows were asked for, and by table: the clocks of the servers
        self._clocks: dict[int, dict[int, dict[int, ReadAt]]] = {}
        #: by table, the distinct ids of the last batches that were foreseen
        self._lately: deque[Mapping[int, Ids]] = deque(maxlen=depth)

    def prepare(self, wanted: Sequence[Wanted]) -> Prepared:
        """Find out which rows a batch will look up, and bring its ids to the device. Batches are prepared one after
        the other, by whatever thread."""
        by_table = self._reader.by_table(wanted)
        known = self._reader.distinct([*by_table.values()], keep=True)
        apart: list[Array | None] = []
        for each in known:
            if not self._shares_steps or self._reader.spec(each.table).has_rules:
                apart.append(None)
                continue
            before = [lately[each.table] for lately in self._lately if each.table in lately]
            apart.append(~among(each.distinct.numpy(), before))
        self._lately.append({each.table: each.distinct.numpy() for each in known if each.training})
        places, mark = self._placed(known)
        return Prepared([*by_table.values()], known, apart, places, mark)

    def _placed(self, known: Sequence[Known]) -> tuple[list[Places], object]:
        """Begin to copy all ids."""
        parts = [part for each in known for part in (each.distinct, each.inverse, each.ids)]
        if not parts:
            return [], None
        copies, sizes = self._copies, [len(part) for part in parts]
        there = copies.empty((sum(sizes),), torch.int64)
        host = copies.host([part.numpy() for part in parts])

        def work() -> None:
            there.copy_(host, non_blocking=True)

        mark = copies.run(work)
        split = iter(there.split_with_sizes(sizes))
        return [Places(*of_table) for of_table in zip(split, split, split, strict=True)], mark

    def foresee(self, prepared: Prepared, completed: int, steps: int) -> Coming:
        """Ask for what a batch will look up after so many more ``steps``."""
        reader = self._reader
        if self._replaced != reader.replaced:
            self._kept, self._replaced = {}, reader.replaced
        is_trained = any(each.training for each in prepared.known)
        version = reader.version_after(steps if is_trained else 0)
        parts, first, second = [], [], []
        for each, wanted, apart, places in zip(
            prepared.known, prepared.wanted, prepared.apart, prepared.places, strict=True
        ):
            ids = each.distinct.numpy()
            missing, slots, oldest = np.ones(len(ids), np.bool_), None, None
            if self._shares_steps and version > completed:
                # Rows that come and go change by themselves.
                missing = np.zeros(len(ids), np.bool_) if apart is None else apart
                second.append(Query(each.table, ids, each.training, since=completed))
            elif self._most_age is not None and each.training:
                held, slots, oldest = self._rows_of(each.table).foresee(ids, self._batches, self._batches + steps)
                missing = ~held
            asked = np.flatnonzero(missing)
            first.append(Query(each.table, ids[asked], each.training))
            parts.append(Part(each, wanted, places, asked, slots, oldest))
        # Rows for now, unless they are to be of some version, and there is but one request for them.
        begun = reader.begin(first, completed, completed if second else version)
        try:
            changed = reader.begin(second, completed, version) if second else None
        except BaseException:
            begun.abandon()
            raise
        return Coming(parts, self._batches, version, completed, reader.replaced, begun, changed, prepared.mark)

    def _rows_of(self, table: int) -> RowsOnDevice:
        if table not in self._kept:
            assert self._most_age is not None
            spec = self._reader.spec(table)
            self._kept[table] = RowsOnDevice(self._copies, spec.dim, getattr(torch, spec.dtype), self._most_age)
        return self._kept[table]

    def bring(self, coming: Coming) -> None:
        """Begin to copy what was asked for at once, unless that is of no use any more."""
        reader = self._reader
        if coming.rows or coming.first.failed or coming.replaced != reader.replaced:
            return
        if coming.second is None and coming.version > reader.version_after(0):
            return  # nobody knows yet when it is answered
        with self._waiting:
            coming.first.arrive()
        if coming.second is None or coming.first.version in (None, coming.completed):
            with self._copying:
                self._copy_first(coming)

    def arrive(self, coming: Coming, completed: int) -> dict[int, Prefetched]:
        """Return the rows of a batch whose turn it is, on their way to the device; none of them if they are not as new
        as they have to be."""
        self._batches += 1
        is_usable = self._reader.is_new_enough(coming.version, coming.replaced, completed)
        if is_usable:
            self.bring(coming)
        if not is_usable or not coming.rows:
            coming.abandon()
            return {}
        if coming.second is not None:
            self._copy_second(coming, coming.second, completed)
        with self._copying:
            return self._offered(coming)

    # ---------------------------------------------------------------- copies

    def _copy_first(self, coming: Coming) -> None:
        """Copy rows that were asked for at once; those of tables of one kind lie in one piece of memory."""
        copies, ignored = self._copies, dict[tuple[int, int], ReadAt]()
        if self._most_age is not None:
            self._note_clocks(coming)
        coming.rows = [torch.empty(0)] * len(coming.parts)
        work: list[Callable[[], None]] = []
        for places, sizes in self._runs(coming.parts):
            spec = self._reader.spec(coming.parts[places[0]].known.table)
            memory = copies.empty((sum(sizes), spec.dim), getattr(torch, spec.dtype))
            for place, rows in zip(places, memory.split_with_sizes(sizes), strict=True):
                coming.rows[place] = rows
            if coming.parts[places[0]].slots is None:
                offsets = np.cumsum([0, *sizes[:-1]]).tolist()
                at = [offset + coming.parts[place].asked for place, offset in zip(places, offsets, strict=True)]
                work += self._writing(memory, at, [coming.first.rows(place, ignored) for place in places])
                continue
            for place, rows in zip(places, memory.split_with_sizes(sizes), strict=True):
                work.append(self._exchanging(coming.parts[place], coming.first.rows(place, ignored), rows))
        self._do(coming, work)

    def _note_clocks(self, coming: Coming) -> None:
        """Note how old what was asked for is, as later batches may use it, too."""
        known = self._clocks.setdefault(coming.asked_at, {})
        for place, part in enumerate(coming.parts):
            clocks = known.setdefault(part.known.table, {})
            for server, clock in coming.first.clocks(place):
                clocks.setdefault(server, clock)
        assert self._most_age is not None
        for number in [each for each in self._clocks if each < self._batches - self._most_age - self._depth]:
            del self._clocks[number]

    def _do(self, coming: Coming, work: Sequence[Callable[[], None]]) -> None:
        """Hand all of this over at once, as each time costs something."""

        def all_of_it() -> None:
            for each in work:
                each()

        if work:
            coming.mark = self._copies.run(all_of_it)

    def _writing(self, memory: torch.Tensor, at: Sequence[Ids], rows: Sequence[Array]) -> list[Callable[[], None]]:
        """Return what writes rows to their places, if there are any."""
        places, values = self._copies.host(at), self._copies.host(rows)

        def work() -> None:
            here = places.to(memory.device, non_blocking=True)
            memory.index_copy_(0, here, values.to(memory.device, non_blocking=True))

        return [work] if len(places) else []

    def _exchanging(self, part: Part, rows: Array, into: torch.Tensor) -> Callable[[], None]:
        """Return what lets new rows of a table stay on the device, and takes those of a batch from what stays there."""
        assert part.slots is not None
        copies, kept = self._copies, self._kept[part.known.table]
        slots, fresh, values = copies.host([part.slots]), copies.host([part.slots[part.asked]]), copies.host([rows])

        def work() -> None:
            kept.enter(fresh.to(into.device, non_blocking=True), values.to(into.device, non_blocking=True))
            kept.read(slots.to(into.device, non_blocking=True), into)

        return work

    def _copy_second(self, coming: Coming, second: Fetch, completed: int) -> None:
        """Copy what has changed, and what has not though it was expected to: nothing was asked for of that."""
        with self._waiting:
            second.arrive()
        reader, lacking, where = self._reader, list[Query](), list[tuple[int, Ids]]()
        written: dict[int, list[tuple[Ids, Array]]] = {}
        for place, part in enumerate(coming.parts):
            positions, rows = second.changed(place)
            written[place] = [(positions, rows)]
            has = np.zeros(len(part.known.distinct), np.bool_)
            has[part.asked] = has[positions] = True
            if not has.all():
                rest = np.flatnonzero(~has)
                lacking.append(Query(part.known.table, part.known.distinct.numpy()[rest], part.known.training))
                where.append((place, rest))
        if lacking:
            with self._waiting:
                asked_now = reader.now(lacking, completed)
            for (place, rest), rows in zip(where, asked_now, strict=True):
                written[place].append((rest, rows))
        with self._copying:
            work: list[Callable[[], None]] = []
            for places, sizes in self._runs(coming.parts):
                memory = _together([coming.rows[place] for place in places])
                found: list[tuple[Ids, Array]] = []
                for place, offset in zip(places, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True):
                    found += [(offset + at, rows) for at, rows in written[place]]
                work += self._writing(memory, [at for at, _ in found], [rows for _, rows in found])
            self._do(coming, work)

    def _runs(self, parts: Sequence[Part]) -> Iterable[tuple[list[int], list[int]]]:
        """Yield the places of tables whose rows lie in one piece of memory, and how many rows each has."""
        kinds = []
        for place, part in enumerate(parts):
            spec = self._reader.spec(part.known.table)
            kinds.append((spec.dim, spec.dtype, part.slots is None, place))
        for _, run in groupby(sorted(kinds), itemgetter(0, 1, 2)):
            places = [place for *_, place in run]
            yield places, [len(parts[place].known.distinct) for place in places]

    # ---------------------------------------------------------------- what forwards find

    def _offered(self, coming: Coming) -> dict[int, Prefetched]:
        offered: dict[int, Prefetched] = {}
        moved: dict[int, Sequence[Wanted]] = {}
        for place, part in enumerate(coming.parts):
            table, clocks = part.known.table, dict[int, ReadAt]()
            if part.oldest is not None:
                clocks = self._clocks.get(part.oldest, {}).get(table, {})
            offered[table] = OnDevice(
                part.known,
                part.asked,
                True,
                coming.first if coming.second is None else coming.second,
                place,
                coming.version,
                coming.completed,
                coming.replaced,
                part.wanted,
                copies=self._copies,
                mark=coming.mark,
                rows=coming.rows[place],
                places=part.places,
                clocks=clocks,
            )
            if len(part.wanted) == 1:  # as it will ask if the model is on the device
                (only,) = part.wanted
                moved[table] = [only._replace(ids=part.places.inverse.view(only.ids.shape))]
        self._reader.expand_together(moved, offered)
        return offered


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the memory in which these lie one after the other."""
    first = rows[0]
    return first.as_strided((sum(map(len, rows)), first.shape[1]), (first.shape[1], 1))
