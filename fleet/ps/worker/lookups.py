"""Gets rows of the tables for a worker's forwards: asks for them when they are needed, or fetches them ahead.

However many tables a forward asks for at once, every server gets one request. What was fetched ahead is used where that
makes no difference to what the mode promises: if it is as new as rows asked for now would have to be, and no newer than
this worker's own steps allow without waiting for itself. Everything here runs on the user's threads, one at a time, and
what is predicted is for the thread whose forward it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fleet.base.turns import PerThread
from fleet.errors import IdOutOfRangeError
from fleet.nn.handle import Lookup, TableHandle, Wanted
from fleet.numeric.ids import partition, unique
from fleet.numeric.jit import Array, Ids
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import TableSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.telemetry.worker_figures import ProfilerRange


class PendingRows(Protocol):
    """Follows a request under way."""

    def send(self) -> None: ...

    def result(self) -> Frame: ...

    def abandon(self) -> None: ...


class ServerLink(Protocol):
    """Connects the worker to one server."""

    def request(self, step: int, **kind: object) -> Any: ...

    def start(self, frame: Frame, what: str, *, ahead: bool = False) -> PendingRows: ...


class HeldRows(Protocol):
    """Gives the rows that a worker holds itself, in the mode in which it does."""

    def lookup(self, index: int, ids: Ids, training: bool, fetch: Callable[[Ids], Array]) -> Array: ...

    def missing(self, index: int, ids: Ids) -> Ids: ...


@dataclass(frozen=True)
class Query:
    """Asks for distinct ids of one table, and says whether unknown ones read their initial value (training) or its
    mean."""

    table: int
    ids: Ids
    training: bool


class Fetch:
    """Follows rows under way: one request to every server that has any of them."""

    def __init__(self, queries: Sequence[Query], specs: Sequence[TableSpec], asked: Sequence[Asked]) -> None:
        self._queries = queries
        self._specs = specs
        self._asked = asked
        self._rows: list[Array] = []
        self._clocks: list[list[tuple[int, int]]] = [[] for _ in queries]  #: (server, clock) of each query
        self._arrived = False
        self.failed = False

    def rows(self, place: int, read_at: dict[tuple[int, int], int]) -> Array:
        """Return the rows of one query; its table's clocks go into ``read_at`` unless older ones stand there."""
        if not self._arrived:
            try:
                self._arrive()
            except BaseException:  # interrupted, perhaps: a reply that was read in part cannot be read again
                self.failed = True
                self.abandon()
                raise
            self._arrived = True
        query = self._queries[place]
        if query.training or torch.is_grad_enabled():  # else no gradient will come of it
            for server, clock in self._clocks[place]:
                read_at.setdefault((server, query.table), clock)
        return self._rows[place]

    def _arrive(self) -> None:
        parts: list[list[tuple[Ids, Array]]] = [[] for _ in self._queries]
        for asked in self._asked:
            with ProfilerRange("fleet.wait"):
                reply = asked.pending.result()
            for (place, part), tensor, clock in zip(
                asked.parts, reply.tensors, reply.message.table_clocks, strict=True
            ):
                parts[place].append((part, tensor.numpy()))
                self._clocks[place].append((asked.server, clock))
        self._rows = [
            _joined(query.ids.size, self._specs[query.table], each)
            for query, each in zip(self._queries, parts, strict=True)
        ]

    def abandon(self) -> None:
        if not self._arrived:
            for asked in self._asked:
                asked.pending.abandon()


def _joined(count: int, spec: TableSpec, parts: Sequence[tuple[Ids, Array]]) -> Array:
    """Return all rows of a query, each in its place."""
    if len(parts) == 1:
        return parts[0][1]
    rows = np.empty((count, spec.dim), spec.dtype)
    for part, here in parts:
        rows[part] = here
    return rows


@dataclass(frozen=True)
class Asked:
    """Describes a request to one server: of which queries, by position, it asks for which ids, by position."""

    server: int
    parts: Sequence[tuple[int, Ids]]
    pending: PendingRows


@dataclass
class Prefetched:
    """Holds what was fetched ahead for one table and one batch."""

    ids: torch.Tensor
    distinct: Ids
    inverse: Ids
    training: bool
    asked: Ids  #: of the distinct ids those that were asked for
    fetch: Fetch
    place: int  #: of this table among the fetch's queries
    version: int
    completed: int  #: how many steps the worker had completed when it was asked for
    replaced: int  #: how often the servers' values had been replaced by then, as far as this worker knew


class RowReader:
    """Reads rows for forwards: asks the servers, or takes what was fetched ahead."""

    def __init__(self, connections: Sequence[ServerLink], version_after: Callable[[int], int]) -> None:
        """``version_after`` returns the version that this worker needs when it has completed so many more steps."""
        self._connections = connections
        self._version_after = version_after
        self.read_at: dict[tuple[int, int], int] = {}
        self._read_before: dict[tuple[int, int], int] = {}
        self._offered: Mapping[int, Prefetched] = {}
        self._predicted_here = PerThread[Mapping[int, Prefetched]]()
        self._replaced = 0

    def discard_fetched(self) -> None:
        """Drop what was fetched before, as the servers' values have been replaced."""
        self._replaced += 1

    def adopt(self, specs: Sequence[TableSpec], handles: Sequence[TableHandle]) -> None:
        self._specs = specs
        self._tables = {id(handle): index for index, handle in enumerate(handles)}

    def take_clocks(self) -> dict[tuple[int, int], int]:
        """Return when the rows of this step were read; the next step's are read anew. Gradients that the user did not
        clear are of rows that were read for an earlier step."""
        self._read_before, self.read_at = {**self._read_before, **self.read_at}, {}
        return self._read_before

    # ---------------------------------------------------------------- a forward

    def lookup(self, wanted: Sequence[Wanted], completed: int, held: HeldRows | None) -> list[Lookup]:
        known = [self._known(*each) for each in wanted]  # and none is out of range
        found: dict[int, Lookup] = {}
        asking: list[tuple[int, Query, Ids]] = []
        for place, ((_, _, training), (index, distinct, inverse, ahead)) in enumerate(zip(wanted, known, strict=True)):
            if held is None:
                rows = self._prefetched(ahead, distinct, training, completed)
            else:
                if ahead is not None and ahead.completed != completed:
                    ahead = None  # the servers may have told of changes to rows that are not held yet
                rows = held.lookup(index, distinct, training, partial(self._missing, index, ahead, training, completed))
            if rows is None:
                asking.append((place, Query(index, distinct, training), inverse))
            else:
                found[place] = _lookup(distinct, rows, inverse)
        if asking:
            fetched = self._now([query for _, query, _ in asking], completed)
            for (place, query, inverse), rows in zip(asking, fetched, strict=True):
                found[place] = _lookup(query.ids, rows, inverse)
        return [found[place] for place in range(len(wanted))]

    def _known(
        self, handle: TableHandle, given: torch.Tensor, training: bool
    ) -> tuple[int, Ids, Ids, Prefetched | None]:
        """Return the table of a look-up, its distinct ids and the places of all among them, and what was fetched
        ahead."""
        index, ids = self._tables[id(handle)], _flat(given)
        ahead = self._offered.get(index) or self._innermost(index)
        if ahead is not None and ahead.training == training and torch.equal(ahead.ids, ids):
            return index, ahead.distinct, ahead.inverse, ahead
        distinct, inverse = unique(ids.numpy())
        handle.check_range(distinct)
        return index, distinct, inverse, ahead

    @property
    def _predicted(self) -> list[Mapping[int, Prefetched]]:
        """Return what was predicted for this thread's forwards, each inside the one before."""
        return self._predicted_here.list

    def _innermost(self, index: int) -> Prefetched | None:
        """Return what the last forward that predicted anything of a table has predicted."""
        return next((predicted[index] for predicted in reversed(self._predicted) if index in predicted), None)

    def _missing(self, index: int, ahead: Prefetched | None, training: bool, completed: int, ids: Ids) -> Array:
        """Return rows that the worker does not hold."""
        rows = self._prefetched(ahead, ids, training, completed)
        return self.fetch(index, ids, completed, training=training) if rows is None else rows

    def whole(self, handle: TableHandle, completed: int, held: HeldRows | None, most_bytes: int) -> torch.Tensor:
        """Return all rows of a table as a look-up of training would see them, asked for in parts. None of them is
        held."""
        index = self._tables[id(handle)]
        spec = self._specs[index]
        assert spec.num_embeddings is not None, "the handle checks this"
        rows = np.empty((spec.num_embeddings, spec.dim), spec.dtype)
        step = max(1, most_bytes // max(8, rows.itemsize * spec.dim))
        for start in range(0, len(rows), step):
            ids = np.arange(start, min(start + step, len(rows)))
            if held is None:
                rows[ids] = self.fetch(index, ids, completed, training=True)
                continue
            missing = held.missing(index, ids)
            there = ~np.isin(ids, missing, assume_unique=True)
            rows[ids[there]] = held.lookup(
                index, ids[there], False, partial(self._missing, index, None, False, completed)
            )
            if len(missing):
                rows[missing] = self.fetch(index, missing, completed, training=True)
        return torch.from_numpy(rows)

    def fetch(self, index: int, ids: Ids, completed: int, *, training: bool) -> Array:
        """Fetch rows of one table."""
        return self._now([Query(index, ids, training)], completed)[0]

    def _now(self, queries: Sequence[Query], completed: int) -> list[Array]:
        fetch = self._start(queries, completed, self._version_after(0))
        return [fetch.rows(place, self.read_at) for place in range(len(queries))]

    def _prefetched(self, ahead: Prefetched | None, ids: Ids, training: bool, completed: int) -> Array | None:
        """Return rows that were fetched ahead, if all are there and as new as they have to be."""
        if (
            ahead is None
            or ahead.fetch.failed
            or ahead.training != training
            or ahead.replaced != self._replaced
            or not self._version_after(0) <= ahead.version <= completed
        ):
            return None
        if ids is ahead.distinct and ids is ahead.asked:
            return ahead.fetch.rows(ahead.place, self.read_at).copy()
        # What was asked for comes first and is distinct, so its places are its positions.
        _, places = unique(np.concatenate([ahead.asked, ids]))
        places = places[len(ahead.asked) :]
        if (places >= len(ahead.asked)).any():
            return None
        return ahead.fetch.rows(ahead.place, self.read_at)[places]

    # ---------------------------------------------------------------- ahead of it

    def prefetch(
        self, wanted: Sequence[Wanted], completed: int, steps: int, held: HeldRows | None
    ) -> dict[int, Prefetched]:
        """Begin to fetch what a forward will ask for after so many more ``steps``."""
        return self._begin(wanted, completed, steps, held, ahead=True)

    def _begin(
        self, wanted: Sequence[Wanted], completed: int, steps: int, held: HeldRows | None, *, ahead: bool
    ) -> dict[int, Prefetched]:
        # Between evaluations come no steps.
        version = self._version_after(steps if any(each.training for each in wanted) else 0)
        by_table: dict[int, list[Wanted]] = {}
        for each in wanted:
            by_table.setdefault(self._tables[id(each.handle)], []).append(each)
        prepared = []
        for index, same in by_table.items():
            ids, training = torch.cat([_flat(each.ids) for each in same]), same[0].training
            there = None if ahead else self._innermost(index)
            if there is not None and there.training == training and torch.equal(there.ids, ids):
                continue
            distinct, inverse = unique(ids.numpy())
            same[0].handle.check_range(distinct)
            asked = distinct if held is None else held.missing(index, distinct)
            prepared.append((index, ids, distinct, inverse, training, asked))
        if not prepared:
            return {}
        queries = [Query(index, asked, training) for index, _, _, _, training, asked in prepared]
        # Replies for which nobody waits yet must not be in the way of those that somebody does.
        fetch = self._start(queries, completed, version, ahead=ahead, aside=ahead or bool(self._predicted))
        return {
            index: Prefetched(ids, distinct, inverse, training, asked, fetch, place, version, completed, self._replaced)
            for place, (index, ids, distinct, inverse, training, asked) in enumerate(prepared)
        }

    def offer(self, ahead: Mapping[int, Prefetched]) -> None:
        """Let forwards use this from now on, and nothing that was offered before."""
        self.abandon(self._offered)
        self._offered = ahead

    def abandon(self, ahead: Mapping[int, Prefetched]) -> None:
        """Give up what no forward will use."""
        for fetch in {each.fetch for each in ahead.values()}:
            fetch.abandon()

    def fetch_predicted(
        self, wanted: Sequence[Wanted], completed: int, held: HeldRows | None
    ) -> Mapping[int, Prefetched]:
        """Ask for what the coming look-ups will ask for, except of tables of which something was fetched ahead. An id
        that is out of range is left to the look-up, which refuses it if it comes."""
        rest = [each for each in wanted if self._tables[id(each.handle)] not in self._offered]
        try:
            begun = self._begin(rest, completed, 0, held, ahead=False)
        except IdOutOfRangeError:
            rest = [each for each in rest if each.handle.has(_flat(each.ids).numpy())]
            begun = self._begin(rest, completed, 0, held, ahead=False)
        self._predicted.append(begun)
        return begun

    def drop_predicted(self, begun: Mapping[int, Prefetched] | None) -> None:
        """Drop what was fetched for look-ups that are over; for all of them if None."""
        over = [each for each in self._predicted if begun is None or each is begun]
        self._predicted[:] = [each for each in self._predicted if begun is not None and each is not begun]
        for each in over:
            self.abandon(each)

    # ---------------------------------------------------------------- asking

    def _start(
        self, queries: Sequence[Query], completed: int, version: int, *, ahead: bool = False, aside: bool = False
    ) -> Fetch:
        parts = [partition(query.ids, len(self._connections)) for query in queries]
        asked: list[Asked] = []
        try:
            for server, connection in enumerate(self._connections):
                here = [(place, split[server]) for place, split in enumerate(parts) if len(split[server])]
                if here:
                    frame, what = self._pull(queries, here, connection, completed, version, ahead)
                    asked.append(Asked(server, here, connection.start(frame, what, ahead=aside)))
            for request in asked:
                request.pending.send()
        except BaseException:
            for request in asked:
                request.pending.abandon()
            raise
        return Fetch(queries, self._specs, asked)

    def _pull(
        self,
        queries: Sequence[Query],
        here: Sequence[tuple[int, Ids]],
        connection: ServerLink,
        completed: int,
        version: int,
        ahead: bool,
    ) -> tuple[Frame, str]:
        """Return a request for parts of some queries, and its name in errors."""
        pull = pb.Pull(
            version=version,
            tables=[queries[place].table for place, _ in here],
            training=[queries[place].training for place, _ in here],
            ahead=ahead,
        )
        tensors = [WireTensor.of(queries[place].ids[part]) for place, part in here]
        names = ", ".join(repr(self._specs[queries[place].table].name) for place, _ in here[:3])
        what = f"rows of {names}{' …' if len(here) > 3 else ''} at step {completed}"
        return Frame(connection.request(completed, pull=pull), tensors), what


def _flat(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.detach()
    if ids.dtype is not torch.int64 or not ids.is_cpu:
        ids = ids.to("cpu", torch.int64)
    return ids if ids.dim() == 1 else ids.reshape(-1)


def _lookup(distinct: Ids, rows: Array, inverse: Ids) -> Lookup:
    return Lookup(torch.from_numpy(distinct), torch.from_numpy(rows), torch.from_numpy(inverse))
