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
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from fleet.nn.handle import Lookup, Wanted
from fleet.numeric.device_copies import Copies
from fleet.numeric.ids import among
from fleet.numeric.jit import Array, Ids
from fleet.numeric.recent_ids import NEVER, RecentIds
from fleet.ps.worker.lookups import Fetch, Known, Prefetched, Query, RowReader
from fleet.ps.worker.progress import ReadAt, Readings

#: Places for so many rows are made at once, at least.
_FEWEST = 1 << 10

#: Rows of more bytes than this are asked for twice: at once, and for what has changed. Narrower ones are asked for as
#: their forward wants them, since what the second request costs is more than its answer lacks (benchmarks/RESULTS.md).
WIDE = 256


class RowsOnDevice:
    """Keeps rows of one table on the device, each until it is too old for every batch to come.

    What is kept is decided when a batch is prepared, and written and read when it comes; both happen in the order of
    the batches, so a place may be given to another row as soon as nobody decides for the first one any more.
    """

    def __init__(self, copies: Copies, dim: int, dtype: torch.dtype, most_age: int) -> None:
        """``most_age`` says in how many batches a row may be used after the one in which it was asked for."""
        self._most_age = most_age
        self._ids = RecentIds()
        self._rows = copies.empty((0, dim), dtype)

    def __len__(self) -> int:
        return self._ids.places

    def foresee(self, ids: Ids, now: int, batch: int) -> tuple[Array, Ids, int | None]:
        """Say, in batch ``now``, which of these rows ``batch`` finds here, where all of them are when it comes, and in
        which batch the oldest was asked for. Those that it does not find are asked for now."""
        held, slots, oldest = self._ids.meet(ids, now, batch - self._most_age)
        return held, slots, None if oldest == NEVER else oldest

    def enter(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, beside the computation."""
        short = len(self) - len(self._rows)
        if short > 0:
            more = max(short, len(self._rows), _FEWEST)
            self._rows = torch.cat([self._rows, self._rows.new_zeros(more, self._rows.shape[1])])
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


class Kept(NamedTuple):
    """Says which rows of one table a batch finds on the device, where all of them are when it comes, and in which batch
    the first of those that it finds was asked for."""

    rows: RowsOnDevice
    held: Array
    slots: Ids
    oldest: int | None


class Prepared(NamedTuple):
    """Holds what of a batch is known before anything is asked for it, in the order of its tables."""

    wanted: Sequence[Sequence[Wanted]]
    known: Sequence[Known]
    places: Sequence[Places]
    #: when these are on the device
    mark: object
    #: the batch that will be under way when rows are asked for, and how often values had been replaced when it was
    #: found out what stays on the device
    asked_at: int
    replaced: int
    kept: Sequence[Kept | None]
    #: which of the distinct ids no batch shortly before looks up; None where it is not worth asking for these alone
    apart: Sequence[Array] | None


class Part(NamedTuple):
    """Says what one batch wants of one table: the rows it has asked for at once, by their positions among the distinct
    ids, and, where rows stay on the device, where all of them are there."""

    known: Known
    wanted: Sequence[Wanted]
    places: Places
    asked: Ids
    kept: Kept | None = None


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
        #: how many batches were prepared, and how many have come
        self._prepared = self._batches = 0
        #: by batch in which rows were asked for, and by table: the clocks of the servers
        self._clocks: dict[int, dict[int, dict[int, ReadAt]]] = {}
        #: by table, the distinct ids of the last batches that were prepared
        self._lately: deque[Mapping[int, Ids]] = deque(maxlen=depth)

    @property
    def device(self) -> torch.device:
        return self._copies.device

    def prepare(self, wanted: Sequence[Wanted]) -> Prepared:
        """Find out which rows a batch will look up, and bring its ids to the device. Batches are prepared one after
        the other, by whatever thread."""
        by_table = self._reader.by_table(wanted)
        known = self._reader.distinct([*by_table.values()], keep=True)
        places, mark = self._placed(known)
        batch, replaced = self._prepared, self._reader.replaced
        self._prepared += 1
        if self._replaced != replaced:
            self._kept, self._replaced = {}, replaced
        asked_at = max(0, batch - self._depth)
        kept = [self._keep(each, asked_at, batch) for each in known]
        apart = [self._apart(each) for each in known] if self._shares_steps and self._is_wide(known) else None
        self._lately.append({each.table: each.distinct.numpy() for each in known if each.training})
        return Prepared([*by_table.values()], known, places, mark, asked_at, replaced, kept, apart)

    def _is_wide(self, known: Sequence[Known]) -> bool:
        """Say whether rows are so wide that to ask for some of them earlier pays."""
        counts = [len(each.distinct) for each in known]
        specs = [self._reader.spec(each.table) for each in known]
        total = sum(count * np.dtype(spec.dtype).itemsize * spec.dim for count, spec in zip(counts, specs, strict=True))
        return total > WIDE * sum(counts)

    def _apart(self, known: Known) -> Array:
        """Say which rows no batch shortly before looks up: not those that come and go, which change by themselves."""
        if self._reader.spec(known.table).has_rules:
            return np.zeros(len(known.distinct), np.bool_)
        before = [lately[known.table] for lately in self._lately if known.table in lately]
        return ~among(known.distinct.numpy(), before)

    def _keep(self, known: Known, asked_at: int, batch: int) -> Kept | None:
        if self._most_age is None or not known.training:
            return None
        if known.table not in self._kept:
            spec = self._reader.spec(known.table)
            self._kept[known.table] = RowsOnDevice(self._copies, spec.dim, getattr(torch, spec.dtype), self._most_age)
        rows = self._kept[known.table]
        return Kept(rows, *rows.foresee(known.distinct.numpy(), asked_at, batch))

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
        is_trained = any(each.training for each in prepared.known)
        version = reader.version_after(steps if is_trained else 0)
        apart = prepared.apart if version > completed else None
        parts, first, second = [], [], []
        for place, (each, wanted, places) in enumerate(
            zip(prepared.known, prepared.wanted, prepared.places, strict=True)
        ):
            ids = each.distinct.numpy()
            # Without its rows the device is as if this batch was not: others have been told of other values since.
            kept = prepared.kept[place] if prepared.replaced == reader.replaced else None
            asked = np.arange(len(ids))
            if apart is not None:
                asked = np.flatnonzero(apart[place])
                second.append(Query(each.table, ids, each.training, since=completed))
            elif kept is not None:
                asked = np.flatnonzero(~kept.held)
            first.append(Query(each.table, ids[asked], each.training))
            parts.append(Part(each, wanted, places, asked, kept))
        # Rows for now, unless they are to be of some version, and there is but one request for them.
        begun = reader.begin(first, completed, completed if second else version)
        try:
            changed = reader.begin(second, completed, version) if second else None
        except BaseException:
            begun.abandon()
            raise
        return Coming(parts, prepared.asked_at, version, completed, reader.replaced, begun, changed, prepared.mark)

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
        is_usable = self._reader.is_new_enough(coming, completed)
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
        coming.rows = [torch.empty(0, device="cpu")] * len(coming.parts)
        work: list[Callable[[], object]] = []
        for places, sizes in self._runs(coming.parts):
            spec = self._reader.spec(coming.parts[places[0]].known.table)
            memory = copies.empty((sum(sizes), spec.dim), getattr(torch, spec.dtype))
            for place, rows in zip(places, memory.split_with_sizes(sizes), strict=True):
                coming.rows[place] = rows
            if coming.parts[places[0]].kept is None:
                offsets = np.cumsum([0, *sizes[:-1]]).tolist()
                at = [offset + coming.parts[place].asked for place, offset in zip(places, offsets, strict=True)]
                arrived = [coming.first.rows(place, ignored) for place in places]
                work += self._writing(memory, at, arrived, is_ascending=True)
                continue
            for place, rows in zip(places, memory.split_with_sizes(sizes), strict=True):
                part = coming.parts[place]
                assert part.kept is not None, "which is what a run has in common"
                work.append(self._exchanging(part.kept, part.asked, coming.first.rows(place, ignored), rows))
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

    def _do(self, coming: Coming, work: Sequence[Callable[[], object]]) -> None:
        """Hand all of this over at once, as each time costs something."""

        def all_of_it() -> None:
            for each in work:
                each()

        if work:
            coming.mark = self._copies.run(all_of_it)

    def _writing(
        self, memory: torch.Tensor, at: Sequence[Ids], rows: Sequence[Array], *, is_ascending: bool = False
    ) -> list[Callable[[], object]]:
        """Return what writes rows to their places, which are distinct, if there are any."""
        count = sum(map(len, at))
        if not count:
            return []
        values = self._copies.host(rows)
        if is_ascending and count == len(memory):  # all places there are
            return [partial(memory.copy_, values, non_blocking=True)]
        places = self._copies.host(at)

        def work() -> None:
            here = places.to(memory.device, non_blocking=True)
            memory.index_copy_(0, here, values.to(memory.device, non_blocking=True))

        return [work]

    def _exchanging(self, kept: Kept, asked: Ids, rows: Array, into: torch.Tensor) -> Callable[[], None]:
        """Return what lets new rows of a table stay on the device, and takes those of a batch from what stays there."""
        copies = self._copies
        slots, values = copies.host([kept.slots[asked], kept.slots]), copies.host([rows])

        def work() -> None:
            fresh, wanted = slots.to(into.device, non_blocking=True).split_with_sizes([len(asked), len(kept.slots)])
            kept.rows.enter(fresh, values.to(into.device, non_blocking=True))
            kept.rows.read(wanted, into)

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
            work: list[Callable[[], object]] = []
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
            kinds.append((spec.dim, spec.dtype, part.kept is None, place))
        for _, run in groupby(sorted(kinds), itemgetter(0, 1, 2)):
            places = [place for *_, place in run]
            yield places, [len(parts[place].known.distinct) for place in places]

    # ---------------------------------------------------------------- what forwards find

    def _offered(self, coming: Coming) -> dict[int, Prefetched]:
        offered: dict[int, Prefetched] = {}
        moved: dict[int, Sequence[Wanted]] = {}
        for place, part in enumerate(coming.parts):
            table, clocks = part.known.table, dict[int, ReadAt]()
            if part.kept is not None and part.kept.oldest is not None:
                clocks = self._clocks.get(part.kept.oldest, {}).get(table, {})
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
