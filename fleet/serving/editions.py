"""Keeps what a replica answers from: one edition of a model after the other, of which the last few can be read.

Rows are changed in place when an edition comes. What the changed ones were before is kept beside them for a while, so
that a reader who has the dense parameters of an earlier edition reads the rows of that one: from the newest rows, and
over them, edition by edition backwards, what each has changed. Dense parameters are kept of the newest edition alone,
since their reader gets all of them at once.

A whole version replaces everything, and no edition before it can be read any more.

Where rows lie in files, the disk may fail, and then they are lost: nothing is answered any more, rather than rows of no
edition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from fleet.errors import FleetError, IdOutOfRangeError, NotInitializedError, PlanMismatchError, TableFileError
from fleet.numeric.ids import first_outside, gather, lift
from fleet.numeric.jit import Array, Ids
from fleet.ps.table.bundle import join
from fleet.ps.table.index import find_each
from fleet.ps.table.stores import MemoryStores, NewStore, Stores
from fleet.serving.earlier_rows import EarlierRows
from fleet.serving.kept_rows import WEIGHT, KeptRows, Kind
from fleet.serving.source import Piece, RowChanges, SourceDescription

#: So many editions before the newest can be read, and so many of their rows are kept.
MOST_EDITIONS, MOST_ROWS = 64, 1 << 20
#: What is known of so many requests is kept: mostly they are for the same tables.
_KEPT = 64
_LEAST, _GREATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Edition(NamedTuple):
    number: int
    version: int


class Found(NamedTuple):
    """Holds the rows that were asked for, in one part or in one for each table; None: the edition is not to be had."""

    edition: Edition
    parts: list[Array] | None


@dataclass(frozen=True, eq=False)
class _Before:
    """Holds what the rows that an edition has changed were before it, in a version."""

    version: int
    rows: Mapping[Kind, EarlierRows]

    @property
    def count(self) -> int:
        return sum(map(len, self.rows.values()))


class Editions:
    """Implements ``Holder``. Any thread may read."""

    def __init__(self, stores: Stores | None = None) -> None:
        """``stores`` says where rows lie, if not in memory."""
        self._stores = stores or MemoryStores()
        self._share = self._stores.share()
        self._lock = threading.Lock()
        self._edition: Edition | None = None
        self._described: SourceDescription | None = None
        self.names: tuple[str, ...] = ()
        self._kept: list[KeptRows] = []
        self._widths = np.empty(0, np.int64)
        #: of the newest edition; nobody changes it
        self._dense: Mapping[str, torch.Tensor] = {}
        #: the last of it is what the newest edition has changed
        self._before: deque[_Before] = deque()
        #: by the places of tables, until rows change
        self._asked: dict[tuple[int, ...], _TablesAsked] = {}
        self._is_closed = False
        #: is set when rows cannot be had any more, for the reason beside it
        self.lost = threading.Event()
        self.loss: FleetError | None = None
        self.lookups = self.rows_asked = self.misses = 0

    # ---------------------------------------------------------------- one edition after the other

    def fit(self, source: SourceDescription) -> None:
        self.names = tuple(source.tables)
        self._kept = self.new_rows(source, self._share)
        self._widths = np.array([each.table.embedding_dim * each.dtype.itemsize for each in self._kept], np.int64)
        self._described = source

    def new_rows(self, source: SourceDescription, share: NewStore) -> list[KeptRows]:
        tables = source.tables.items()
        return [
            KeptRows(name, table, share(name, len(tables), 8 + table.embedding_dim * table.dtype.itemsize))
            for name, table in tables
        ]

    def another_share(self) -> NewStore:
        """Return what makes stores for all rows once more; those that are read now leave it memory."""
        share = self._stores.share()
        is_all = False
        while not is_all:
            with self._lock:
                is_all = self._share.give_way()
        return share

    def begin(self, whole: bool, version: int) -> _Draft:
        return _Draft(self, self.described, whole, version)

    def publish(self, draft: _Draft) -> bool:
        # Nobody else changes any rows: readers go on meanwhile.
        reading: AbstractContextManager[object] = self._lock if self._stores.has_files else nullcontext()
        with reading, self._as_whole(TableFileError):
            before = {} if draft.whole else self._rows_before(draft.rows)
        with self._lock:
            if self._is_closed:
                return False
            number = 1 if self._edition is None else self._edition.number + 1
            if draft.whole:
                self._kept = draft.kept
                if draft.share is not None:
                    self._share = draft.share
                    self._share.take_over()
                self._before.clear()
            else:
                with self._as_whole(BaseException):  # half of the changes is no edition
                    for place, each in draft.rows.items():
                        for changes in each:
                            self._kept[place].change(changes)
                self._before.append(_Before(self.newest.version, before))
                while len(self._before) > MOST_EDITIONS or sum(each.count for each in self._before) > MOST_ROWS:
                    self._before.popleft()
            self._asked.clear()
            self._dense = {**self._dense, **draft.dense}
            self._edition = Edition(number, draft.version)
        return True

    @contextmanager
    def _as_whole(self, kind: type[BaseException]) -> Iterator[None]:
        """Note that rows are lost if what is done with them fails in this way."""
        try:
            yield
        except kind as error:
            if self.loss is None:
                self.loss = error if isinstance(error, FleetError) else FleetError("it failed", got=repr(error))
            self.lost.set()
            raise

    def _rows_before(self, changed: Mapping[int, Sequence[RowChanges]]) -> Mapping[Kind, EarlierRows]:
        """Return what the rows are that are to be changed."""
        before: dict[Kind, dict[int, tuple[Ids, Array]]] = {}
        for place, each in changed.items():
            kept = self._kept[place]
            touched = np.unique(np.concatenate([part for changes in each for part in (changes.ids, changes.gone)]))
            before.setdefault(kept.kind, {})[place] = touched, kept.rows(touched).numpy()
        return {kind: EarlierRows(rows) for kind, rows in before.items()}

    def reading(self) -> AbstractContextManager[object]:
        return self._lock

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def remove_files(self) -> None:
        """Remove what lies on the disk, when nobody reads any more."""
        self._stores.close()

    # ---------------------------------------------------------------- for readers

    @property
    def described(self) -> SourceDescription:
        if self._described is None:
            raise _unfilled()
        return self._described

    @property
    def is_filled(self) -> bool:
        return self._edition is not None

    @property
    def newest(self) -> Edition:
        if self._edition is None:
            raise _unfilled()
        if self.loss is not None:
            raise NotInitializedError("the replica has lost rows, and ends", got=str(self.loss))
        return self._edition

    def dense(self) -> tuple[Edition, Mapping[str, torch.Tensor]]:
        """Return the dense parameters of the newest edition."""
        with self._lock:
            return self.newest, self._dense

    @property
    def widths(self) -> Ids:
        """Return how many bytes a row of each table has."""
        if self._described is None:
            raise _unfilled()
        return self._widths

    @property
    def row_count(self) -> int:
        return sum(map(len, self._kept))

    def look_up(self, number: int | None, places: tuple[int, ...], ids: Ids, stops: Ids, count: int = 1) -> Found:
        """Return rows of the edition with this number, or of the newest: of each of the tables at these places for its
        ids, which end at its stop. So many requests ask for them."""
        with self._lock, self._as_whole(TableFileError):
            edition = self.newest
            back = 0 if number is None else edition.number - number
            if not 0 <= back <= len(self._before):
                return Found(edition, None)
            asked = self._tables_asked(places)
            asked.check_range(ids, stops)
            parts, absent = asked.read(ids, stops)
            if back:
                asked.go_back([before.rows for before in islice(reversed(self._before), back)], ids, stops, parts)
                edition = Edition(edition.number - back, self._before[-back].version)
            self.lookups += count
            self.rows_asked += ids.size
            self.misses += absent
        return Found(edition, parts)

    def _tables_asked(self, places: tuple[int, ...]) -> _TablesAsked:
        if places not in self._asked:
            if len(self._asked) >= _KEPT:
                self._asked.clear()
            kept = [self._kept[place] for place in places]
            self._asked[places] = _TablesAsked(places, [self.names[place] for place in places], kept)
        return self._asked[places]


class _TablesAsked:
    """Reads the tables of a request until something changes: with one call of each loop, if their rows are alike."""

    def __init__(self, places: Sequence[int], names: Sequence[str], kept: Sequence[KeptRows]) -> None:
        self._places = np.array(places, np.int64)
        self._names = names
        self._kept = kept
        numbers = [each.table.num_embeddings for each in kept]
        self._limits = np.array([(_LEAST, _GREATEST) if n is None else (0, n - 1) for n in numbers], np.int64)
        self._means = np.array([each.table.mean for each in kept])
        self._has_one_mean = len(set(self._means.tolist())) == 1
        are_alike = len(kept) > 1 and len({each.kind for each in kept}) == 1
        #: all tables as one
        self._joined = join([each.layout for each in kept], (WEIGHT,)) if are_alike else None

    def check_range(self, ids: Ids, stops: Ids) -> None:
        place = first_outside(ids, stops, self._limits) if stops.size else -1
        if place >= 0:
            raise IdOutOfRangeError(
                f"an id is out of range for {self._names[place]!r}",
                expected=f"0 <= id < {self._kept[place].table.num_embeddings}",
            )

    def read(self, ids: Ids, stops: Ids) -> tuple[list[Array], int]:
        """Return the rows, in one part or in one for each table, and how many ids have none."""
        joined = self._joined
        if joined is None:
            return self._read_each(ids, stops)
        first = self._kept[0]
        found = np.empty((ids.size, first.table.embedding_dim), first.dtype)
        if self._has_one_mean:
            found.fill(self._means[0])
        else:
            found[:] = np.repeat(self._means, np.diff(stops, prepend=0))[:, None]
        slots = np.empty(ids.size, np.int64)
        find_each(joined.places, joined.keys, ids, stops, slots)
        numbers = np.empty_like(slots)
        absent = lift(slots, stops, joined.offsets, numbers)
        gather(joined.columns[WEIGHT], numbers, found)
        return [found], absent

    def _read_each(self, ids: Ids, stops: Ids) -> tuple[list[Array], int]:
        parts, absent = [], 0
        for kept, (start, stop) in zip(self._kept, _ranges(stops), strict=True):
            part = np.full((stop - start, kept.table.embedding_dim), kept.table.mean, kept.dtype)
            absent += kept.read_over(ids[start:stop], part)
            parts.append(part)
        return parts, absent

    def go_back(
        self, changed: Sequence[Mapping[Kind, EarlierRows]], ids: Ids, stops: Ids, parts: Sequence[Array]
    ) -> None:
        """Write over the rows that were read what they were before they changed, the last change first."""
        if self._joined is not None:
            asked = [(self._kept[0].kind, self._places, ids, stops, parts[0])]
        else:
            asked = [
                (kept.kind, self._places[t : t + 1], ids[start:stop], np.array([stop - start]), part)
                for t, (kept, part, (start, stop)) in enumerate(zip(self._kept, parts, _ranges(stops), strict=True))
            ]
        for before in changed:
            for kind, *each in asked:
                if kind in before:
                    before[kind].write_over(*each)


class _Draft:
    """Collects what leads to the next edition."""

    def __init__(self, editions: Editions, source: SourceDescription, whole: bool, version: int) -> None:
        self.whole, self.version = whole, version
        self.dense: dict[str, torch.Tensor] = {}
        self.rows: dict[int, list[RowChanges]] = {}
        self.share = editions.another_share() if whole else None
        self.kept = [] if self.share is None else editions.new_rows(source, self.share)
        self._editions = editions
        self._source = source
        self._places = {name: place for place, name in enumerate(source.tables)}

    def add(self, piece: Piece) -> None:
        for name, values in piece.dense.items():
            if self._source.dense.get(name) != (tuple(values.shape), values.dtype):
                raise _misfit(name)
            self.dense[name] = values
        for name, changes in piece.rows.items():
            if name not in self._places or not self._source.tables[name].fits(changes):
                raise _misfit(name)
            place = self._places[name]
            if self.whole:
                self.kept[place].change(changes)
            elif changes.ids.size or changes.gone.size:
                self.rows.setdefault(place, []).append(changes)

    def publish(self) -> bool:
        if self.whole and (lacking := self._source.dense.keys() - self.dense.keys()):
            raise _misfit(min(lacking))
        return self._editions.publish(self)


def _ranges(stops: Ids) -> list[tuple[int, int]]:
    ends = stops.tolist()
    return list(zip([0, *ends][: len(ends)], ends, strict=True))


def _unfilled() -> NotInitializedError:
    return NotInitializedError("the replica has no version yet", todo="Ask again soon.")


def _misfit(name: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the source gives something for {name!r} that it has not described", todo="Start the replica anew."
    )
