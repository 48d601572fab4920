"""A feed is what a server knows of those who follow the model from outside the job, and what it has for each.

A follower has something, or nothing yet, and asks for what has changed since. What it is given then is a *load*: ids,
whose rows are read when they are sent, or an *exact* one, whose rows were copied at one moment together with the dense
values. Where versions mean the same on all servers a follower names the version, and each server takes the load when
its values are at that: between two rounds, so that nothing is frozen and no round waits. All rows there are, or very
many, come first as they are while training goes on; the exact load that follows has what has changed meanwhile, and
is small. So what a follower costs in memory is one small load and the ids of rows that have changed, each once.

The caller holds the server's lock; a load itself does not change.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fleet.errors import FleetError, ProtocolError, ServerBusyError
from fleet.numeric.jit import Array, Ids
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.pending import cannot_answer
from fleet.ps.table.change_log import ChangeLog
from fleet.ps.table.reader import Reader
from fleet.ps.table.shard import Shard
from fleet.ps.table.table import WEIGHT

_log = logging.getLogger("fleet.server")

#: Who is silent for so long has gone, and begins anew if it comes back.
LAPSE_S = 120.0
#: A job that is over waits so long for those who were heard in so many seconds, that they may have the last version.
LAST_S, HEARD_S = 10.0, 4.0
#: So many may follow one server.
MOST = 64
#: Rows are copied at one moment if they are no more than this, or than such a part of all.
_COPIED_BYTES, _PART = 64 << 20, 4
#: Pieces are about this large: a piece of rows that are read when they are sent holds up the training.
_PIECE_BYTES = 4 << 20
#: For what it takes to make a load, the training has so many times as long to itself.
_REST = 30.0


@dataclass(frozen=True, eq=False)
class Load:
    """Holds what a follower is given. ``rows`` has by table ids, rows or None if they are read when they are sent, and
    ids that are gone; None stands for all rows there are."""

    number: int
    version: int
    replaced: int
    mark: int
    revision: int
    dense: Sequence[torch.Tensor]
    rows: Sequence[tuple[Ids, Array | None, Ids]] | None
    is_exact: bool
    took_s: float = 0.0
    #: goes through all rows there are
    reader: Reader = field(default_factory=Reader)

    def without_values(self) -> Load:
        """Return what has to be known of it when a follower has it."""
        return replace(self, dense=(), rows=())


@dataclass
class Asked:
    """Holds a request for a version that is not there yet."""

    version: int
    until: float
    #: takes what there is, and whether the version was there
    answer: Callable[[Load | None, bool], None]
    refuse: Callable[[FleetError], None]


@dataclass
class Follower:
    """Holds how far a follower is: the load that it has, None before the first, and what it was given since."""

    heard: float
    has: Load | None = None
    given: Load | None = None
    asked: Asked | None = None
    #: the last exact version that it has, and whether it knows that there is nothing newer
    version: int = 0
    is_told: bool = False

    def give(self, load: Load | None) -> None:
        """Give a load, in whose place there is none, or another one."""
        if self.given is not None:
            self.given.reader.leave()
        self.given = load

    @property
    def marks(self) -> Iterator[int]:
        """Yield the marks from which on it may ask."""
        return (load.mark for load in (self.has, self.given) if load is not None)


@dataclass
class Feed:
    """Holds the followers by the number that each has given itself. ``where`` is the server, for errors."""

    where: str
    followers: dict[int, Follower] = field(default_factory=dict)
    _shard: Shard | None = None
    _log: ChangeLog | None = None
    _next_mark: int = 1
    _numbers: int = 0
    _over_since: float | None = None
    _shared: weakref.WeakValueDictionary[tuple[object, ...], Load] = field(default_factory=weakref.WeakValueDictionary)

    # ---------------------------------------------------------------- who follows

    def join(self, follower: int, now: float) -> None:
        """Let somebody follow, who has nothing yet."""
        if follower not in self.followers and len(self.followers) >= MOST:
            raise ServerBusyError(
                "as many follow this server as may",
                where=self.where,
                expected=f"at most {MOST} followers",
                todo="Let several predictors share a process, and the model in it.",
            )
        self._drop(follower)
        self.followers[follower] = Follower(now)

    def send_away(self, follower: int) -> None:
        """Note that somebody knows of other servers that the job has moved to."""
        if follower in self.followers:
            self.followers[follower].is_told = True

    def leave(self, follower: int) -> None:
        """Forget somebody."""
        self._drop(follower)
        self._tidy()

    def _drop(self, follower: int) -> None:
        if (each := self.followers.pop(follower, None)) is not None:
            each.give(None)

    def tick(self, now: float) -> None:
        """Forget who has gone."""
        for number, each in list(self.followers.items()):
            if now - each.heard > LAPSE_S:
                self._drop(number)
        self._tidy()

    def lag(self, version: int) -> int:
        """Return how many versions the follower that is furthest behind does not have."""
        return max((version - each.version for each in self.followers.values()), default=0)

    def holds_up_the_end(self, now: float) -> bool:
        """Say whether a job that is over should stay a little, as somebody does not have its last version."""
        if self._over_since is None:
            self._over_since = now
        if now - self._over_since > LAST_S:
            return False
        return any(not each.is_told and now - each.heard < HEARD_S for each in [*self.followers.values()])

    def _tidy(self) -> None:
        if self._log is None:
            return
        marks = [mark for each in self.followers.values() for mark in each.marks]
        if marks:
            self._log.keep(marks)
        else:
            self._forget()

    def _forget(self) -> None:
        for each in self.followers.values():
            if each.given is not None and each.given.rows is None:  # of which the rest is not there any more
                each.give(None)
        if self._log is not None:
            self._next_mark = self._log.mark() + 1
            self._log.close()
        self._log = self._shard = None

    # ---------------------------------------------------------------- what there is for them

    def watch(self, shard: Shard) -> ChangeLog:
        """Return the log of this shard; there is a new one when it is another shard, or has more tables."""
        if self._log is None or self._shard is not shard or len(self._log.tables) != len(shard.tables):
            self._forget()
            self._shard, self._log = shard, ChangeLog(shard.tables, self._next_mark)
        return self._log

    def serves(self, shard: Shard | None) -> bool:
        """Say whether what has been given is of this shard, as it is."""
        return shard is not None and self._shard is shard and self._log is not None

    def accept(self, each: Follower, number: int) -> bool:
        """Take in which load a follower has, by its number, 0 for none; return False if that cannot be gone on from."""
        if number == 0:
            each.has = None
            each.give(None)
            return True
        if each.given is not None and each.given.number == number:
            each.has = each.given.without_values()
            each.give(None)
            each.version = each.has.version if each.has.is_exact else each.version
            self._tidy()
        return each.has is not None and each.has.number == number

    def is_behind(self, each: Follower, shard: Shard, version: int) -> bool:
        """Say whether there is anything that a follower does not have."""
        has = each.has
        if has is None or not has.is_exact or has.version != version or has.revision != shard.dense.revision:
            return True
        return self.watch(shard).has_changed(has.mark)

    def all_rows(self, each: Follower, shard: Shard, version: int, replaced: int) -> Load:
        """Return the first load of a follower: all rows, as they are when they are sent."""
        log = self.watch(shard)
        load = self._load(version, replaced, log.mark(), 0, (), None, is_exact=False)
        each.give(load)
        log.note_cuts_again()
        return load

    def take(self, each: Follower, shard: Shard, version: int, replaced: int, now: Callable[[], float]) -> Load | None:
        """Return what a follower lacks, at this moment; None if that is not known."""
        log, has, began = self.watch(shard), each.has, now()
        assert has is not None, "all rows come first"
        changed, mark, revision = log.since(has.mark), log.mark(), shard.dense.revision
        if changed is None:
            return None
        # A load that was not exact came without dense values.
        known = has.revision if has.is_exact else None
        key = (has.mark, known, mark, revision, version, replaced)
        load = self._shared.get(key)
        if load is None:
            nbytes = [ids.size * (8 + _row_bytes(shard, index)) for index, ids in enumerate(changed)]
            room = max(_COPIED_BYTES, sum(len(t) * _row_bytes(shard, i) for i, t in enumerate(shard.tables)) // _PART)
            is_exact = sum(nbytes) <= room
            rows = [_read(shard, index, ids) if is_exact else (ids, None, _NONE) for index, ids in enumerate(changed)]
            dense = shard.dense.snapshot() if is_exact and revision != known else []
            load = self._load(
                version, replaced, mark, revision, dense, rows, is_exact=is_exact, took_s=max(0.0, now() - began)
            )
            self._shared[key] = load
        each.give(load)
        return load

    def _load(
        self,
        version: int,
        replaced: int,
        mark: int,
        revision: int,
        dense: Sequence[torch.Tensor],
        rows: Sequence[tuple[Ids, Array | None, Ids]] | None,
        *,
        is_exact: bool,
        took_s: float = 0.0,
    ) -> Load:
        self._numbers += 1
        return Load(self._numbers, version, replaced, mark, revision, dense, rows, is_exact, took_s)

    # ---------------------------------------------------------------- for requests that wait

    def is_awaited(self, version: int) -> bool:
        """Say whether somebody waits for this version."""
        return any(each.asked is not None and each.asked.version == version for each in self.followers.values())

    @property
    def least_awaited(self) -> int | None:
        """Return the first version that somebody waits for. Who does not hold the lock may ask as well."""
        asked = [each.asked for each in [*self.followers.values()]]
        return min((each.version for each in asked if each is not None), default=None)

    def give(self, shard: Shard, version: int, replaced: int, now: Callable[[], float]) -> None:
        """Give this version, at which the values are, to all who wait for it. A failure is nobody else's concern."""
        for each in self.followers.values():
            if each.asked is not None and each.asked.version == version:
                asked, each.asked = each.asked, None
                try:
                    asked.answer(self.take(each, shard, version, replaced, now), True)
                except Exception as error:
                    _log.exception("%s: a follower could not be given version %d", self.where, version)
                    asked.refuse(error if isinstance(error, FleetError) else cannot_answer(error))

    def dismiss(self, version: int, now: float, *, everybody: bool) -> None:
        """Answer those who wait for a version that is past, or have waited long enough, that they do not get it."""
        for each in self.followers.values():
            if each.asked is not None and (everybody or each.asked.version < version or now >= each.asked.until):
                asked, each.asked = each.asked, None
                asked.answer(None, False)

    def fail(self, error: FleetError) -> None:
        """Tell those who wait why the job has ended."""
        for each in self.followers.values():
            if each.asked is not None:
                asked, each.asked = each.asked, None
                asked.refuse(error)


# -------------------------------------------------------------------- pieces of a load


def rest_s(load: Load) -> float:
    """Return how long the training is to be left alone after a load."""
    return _REST * load.took_s


def piece_of(load: Load, cursor: str, shard: Shard, where: str) -> tuple[int, list[int], list[WireTensor], str]:
    """Return the piece of a load that begins at a cursor: its tensors, dense elements first, if it has any; where these
    begin; the tables whose rows follow; and the cursor of the next one."""
    kind, first, second = _parsed(cursor or "dense:0:0", where)
    begin, tensors, left = 0, list[WireTensor](), _PIECE_BYTES
    if kind == "dense":
        while first < len(load.dense) and second >= len(load.dense[first]):
            first, second = first + 1, 0
        if first < len(load.dense):
            flat = load.dense[first]
            part = flat[second : second + max(1, _PIECE_BYTES // flat.element_size())]
            begin, second = second, second + len(part)
            tensors.append(WireTensor.of(part))
            left -= part.nbytes
            if second < len(flat) or first + 1 < len(load.dense):
                return begin, [], tensors, f"dense:{first}:{second}"
        first, second = 0, 0
    tables, rows, following = _rows_from(load, first, second, shard, where, left)
    return begin, tables, tensors + rows, following


def _rows_from(
    load: Load, index: int, start: int, shard: Shard, where: str, left: int
) -> tuple[list[int], list[WireTensor], str]:
    """Return the rows of as many tables as there is room for, from a place in one of them on."""
    tables: list[int] = []
    tensors: list[WireTensor] = []
    count = len(shard.tables) if load.rows is None else len(load.rows)
    if index > count or len(shard.tables) < count:
        raise ProtocolError("a load of rows has other tables", where=where, got=index)
    while index < count and left > 0:
        most = max(1, left // (8 + _row_bytes(shard, index)))
        ids, rows, gone, following = _part(load, index, start, most, shard)
        if ids.size or gone.size:
            tables.append(index)
            tensors += [WireTensor.of(ids), WireTensor.of(rows), WireTensor.of(gone)]
            left -= ids.nbytes + rows.nbytes + gone.nbytes
        if following is not None:
            return tables, tensors, f"rows:{index}:{following}"
        index, start = index + 1, 0
    return tables, tensors, f"rows:{index}:{start}" if index < count else ""


def _part(load: Load, index: int, start: int, most: int, shard: Shard) -> tuple[Ids, Array, Ids, int | None]:
    """Return at most so many rows of a table from a place on, ids that are gone, and where the rest begins."""
    if load.rows is None:
        store = shard.tables[index].store
        (ids, columns), following = store.scan(start, most, [WEIGHT])
        load.reader.went_on(store, start, following)
        return ids, columns[WEIGHT], _NONE, following
    ids, rows, gone = load.rows[index]
    following = start + most if start + most < max(ids.size, gone.size) else None
    ids, gone = ids[start : start + most], gone[start : start + most]
    if rows is None:
        return *_read(shard, index, ids), following
    return ids, rows[start : start + most], gone, following


def _read(shard: Shard, index: int, ids: Ids) -> tuple[Ids, Array, Ids]:
    """Return the ids that have rows, their rows as they are now, and the ids that have none."""
    table = shard.tables[index]
    known = table.known(ids)
    there = ids if known.all() else ids[known]
    return there, table.read(there, training=False), ids[~known]


def _row_bytes(shard: Shard, index: int) -> int:
    spec = shard.tables[index].spec
    return spec.dim * np.dtype(spec.dtype).itemsize


def _parsed(cursor: str, where: str) -> tuple[str, int, int]:
    kind, _, rest = cursor.partition(":")
    first, _, second = rest.partition(":")
    if kind not in ("dense", "rows") or not (first.isdecimal() and second.isdecimal()) or len(cursor) > 60:
        raise ProtocolError("the cursor of a load is unknown", where=where, got=repr(cursor)[:60])
    return kind, int(first), int(second)


_NONE = np.empty(0, np.int64)
