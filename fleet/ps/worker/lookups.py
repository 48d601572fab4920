"""Gets rows of the tables for a worker's forwards: asks for them when they are needed, or fetches them ahead.

However many tables a forward asks for at once, every server gets one request. What was fetched ahead is used where that
makes no difference to what the mode promises: if it is as new as rows asked for now would have to be, and no newer than
this worker's own steps allow without waiting for itself. Everything here runs on the user's threads, one at a time, and
what is predicted is for the thread whose forward it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from fleet.base.turns import PerThread
from fleet.errors import IdOutOfRangeError, ProtocolError
from fleet.nn.expand import ForeseenLookups
from fleet.nn.handle import Foreseen, Lookup, TableHandle, Wanted
from fleet.numeric.ids import partition, unique, unique_each
from fleet.numeric.jit import Array, Ids
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import TableSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.row_tensors import order_of, runs_of
from fleet.ps.worker.progress import ReadAt, Readings, moved
from fleet.telemetry.worker_figures import ProfilerRange

#: While so many requests wait for rows as they are after steps to come, nothing more is asked ahead.
_MOST_TO_COME = 32


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


#: The places of ids that go to one server.
Part: TypeAlias = Ids | slice


#: What tells the ids of one look-up from others.
Memory: TypeAlias = tuple[Any, ...]


class Query(NamedTuple):
    """Asks for distinct ids of one table, and says whether unknown ones read their initial value (training) or its
    mean; with ``since``, only for the rows that have changed after a version."""

    table: int
    ids: Ids
    training: bool
    since: int | None = None


class Fetch:
    """Follows rows under way: one request to every server that has any of them."""

    def __init__(self, queries: Sequence[Query], specs: Sequence[TableSpec], asked: Sequence[Asked]) -> None:
        self._queries = queries
        self._specs = specs
        self._asked = asked
        self._rows: list[Array] = []
        self._changed: list[Ids] = []
        #: the oldest version of which an answer is
        self.version: int | None = None
        self._clocks: list[list[tuple[int, ReadAt]]] = [[] for _ in queries]  #: by server, of each query
        self._noted: list[Readings | None] = [None] * len(queries)  #: where these stand already
        self._arrived = False
        self.failed = False

    def rows(self, place: int, read_at: Readings) -> Array:
        """Return the rows of one query; its table's clocks go into ``read_at`` unless older ones stand there."""
        if self._noted[place] is read_at:  # as for most, which were foreseen and are then looked up
            return self._rows[place]
        self.arrive()
        query = self._queries[place]
        if query.training or torch.is_grad_enabled():  # else no gradient will come of it
            for server, clock in self._clocks[place]:
                read_at.setdefault((server, query.table), clock)
            self._noted[place] = read_at
        return self._rows[place]

    def clocks(self, place: int) -> list[tuple[int, ReadAt]]:
        """Return the servers that were asked for one query, and the clock of its table there."""
        self.arrive()
        return self._clocks[place]

    def changed(self, place: int) -> tuple[Ids, Array]:
        """Return the positions of the ids of one query whose rows have changed since, and these rows. All queries ask
        like this."""
        self.arrive()
        return self._changed[place], self._rows[place]

    def arrive(self) -> None:
        """Wait for the answers."""
        if not self._arrived:
            try:
                self._arrive()
            except BaseException:  # interrupted, perhaps: a reply that was read in part cannot be read again
                self.failed = True
                self.abandon()
                raise
            self._arrived = True

    def _arrive(self) -> None:
        parts: list[list[tuple[Part, Array]]] = [[] for _ in self._queries]
        for asked in self._asked:
            with ProfilerRange("fleet.wait"):
                reply = asked.pending.result()
            message, tensors = reply.message, reply.tensors
            self.version = message.version if self.version is None else min(self.version, message.version)
            told: list[Part] = [part for _, part in asked.parts]
            if message.row_counts:
                told = _named(told, tensors[0].numpy(), message.row_counts)
                tensors = tensors[1:]
            tables = [self._specs[self._queries[place].table] for place, _ in asked.parts]
            here = iter(zip(asked.parts, told, message.table_clocks, strict=True))
            for run, tensor in zip(runs_of(tables), tensors, strict=True):
                rows, start = tensor.numpy(), 0
                for (place, _), part, clock in islice(here, run.stop - run.start):
                    stop = start + _size(part)
                    parts[place].append((part, rows[start:stop]))
                    self._clocks[place].append((asked.server, ReadAt(clock, reply.message.version)))
                    start = stop
        for query, each in zip(self._queries, parts, strict=True):
            spec = self._specs[query.table]
            if query.since is None:
                self._rows.append(_joined(query.ids.size, spec, each))
                continue
            self._changed.append(np.concatenate([np.empty(0, np.int64), *(_places(part) for part, _ in each)]))
            self._rows.append(np.concatenate([np.empty((0, spec.dim), spec.dtype), *(rows for _, rows in each)]))

    def abandon(self) -> None:
        if not self._arrived:
            for asked in self._asked:
                asked.pending.abandon()


def _named(asked: Sequence[Part], positions: Ids, counts: Sequence[int]) -> list[Part]:
    """Return which of the ids that a server was asked for it names: of those of each table some positions."""
    ends = np.cumsum(counts)
    if len(counts) != len(asked) or len(positions) != ends[-1]:
        raise ProtocolError("a server names other rows than it was asked for", got=f"{len(positions)} positions")
    found: list[Part] = []
    for part, mine in zip(asked, np.split(positions, ends[:-1]), strict=True):
        if len(mine) and not 0 <= mine.min() <= mine.max() < _size(part):
            raise ProtocolError("a server names other rows than it was asked for", got=int(mine.max()))
        found.append(_places(part)[mine])
    return found


def _joined(count: int, spec: TableSpec, parts: Sequence[tuple[Part, Array]]) -> Array:
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
    parts: Sequence[tuple[int, Part]]
    pending: PendingRows


class FetchedAhead(Protocol):
    """Says what rows that were fetched ahead are."""

    version: int
    completed: int  #: how many steps the worker had completed when they were asked for
    replaced: int  #: how often the servers' values had been replaced by then, as far as this worker knew


class Known(NamedTuple):
    """Holds the ids of look-ups of one table, the distinct ones, and for every id its place among these."""

    table: int
    training: bool
    ids: torch.Tensor
    distinct: torch.Tensor
    inverse: torch.Tensor


@dataclass
class Prefetched:
    """Holds what was fetched ahead for one table and one batch."""

    known: Known
    asked: Ids  #: of the distinct ids those that were asked for
    has_all: bool  #: whether these are all of them
    fetch: Fetch
    place: int  #: of this table among the fetch's queries
    version: int
    completed: int  #: how many steps the worker had completed when it was asked for
    replaced: int  #: how often the servers' values had been replaced by then, as far as this worker knew
    wanted: Sequence[Wanted]  #: the look-ups that were foreseen
    memory: Memory | None = field(init=False)  #: of their ids, if it is one look-up

    #: other tables of the same forward, if it was foreseen
    foreseen: Foreseen | None = None
    made: Lookup | None = None
    #: the step in which its table was first looked up while it was offered
    used_in: int | None = None

    def __post_init__(self) -> None:
        self.memory = _memory(self.wanted)

    def is_of(self, ids: torch.Tensor, training: bool) -> bool:
        """Say whether these very ids were asked for, or are held."""
        return self.known.training == training and torch.equal(self.known.ids, flat(ids))

    def some(self, ids: Ids, read_at: Readings) -> Array | None:
        """Return the rows of distinct ids, if all of them were asked for."""
        # What was asked for comes first and is distinct, so its places are its positions.
        _, places = unique(np.concatenate([self.asked, ids]))
        places = places[len(self.asked) :]
        return None if (places >= len(self.asked)).any() else self.fetch.rows(self.place, read_at)[places]

    def lookup(self, read_at: Readings) -> Lookup:
        """Return the look-up that was expected, of which all ids were asked for."""
        rows = self.fetch.rows(self.place, read_at)
        if self.made is None:
            self.made = Lookup(self.known.distinct, torch.from_numpy(rows), self.known.inverse, self.foreseen)
        return self.made


class RowReader:
    """Reads rows for forwards: asks the servers, or takes what was fetched ahead."""

    def __init__(
        self,
        connections: Sequence[ServerLink],
        version_after: Callable[[int], int],
        most_steps_ahead: int,
    ) -> None:
        """``version_after`` returns the version that this worker needs when it has completed so many more steps;
        ``most_steps_ahead`` is how many of its own steps rows may lack."""
        self._connections = connections
        self.version_after = version_after
        self._most_steps_ahead = most_steps_ahead
        #: how many steps this worker has taken, on their way to the servers or there
        self._step = 0
        #: the versions to come that requests have asked for
        self._asked_to_come: list[int] = []
        self.read_at: Readings = {}
        self._read_before: Readings = {}
        self._offered: Mapping[int, Prefetched] = {}
        self._offered_by: object = None
        self._predicted_here = PerThread[Mapping[int, Prefetched]]()
        #: how often rows were dropped because the servers had other values
        self.replaced = 0

    def discard_fetched(self) -> None:
        """Drop what was fetched before, as the servers' values have been replaced."""
        self.replaced += 1

    def move(self, servers: int) -> None:
        """Ask other servers from now on, which have what the former ones had."""
        self.read_at, self._read_before = moved(self.read_at, servers), moved(self._read_before, servers)
        self.discard_fetched()

    def adopt(self, specs: Sequence[TableSpec], handles: Sequence[TableHandle]) -> None:
        self._specs = specs
        self._tables = {id(handle): index for index, handle in enumerate(handles)}

    def take_clocks(self) -> Readings:
        """Return when the rows of this step were read; the next step's are read anew. Gradients that the user did not
        clear are of rows that were read for an earlier step."""
        self._read_before, self.read_at = {**self._read_before, **self.read_at}, {}
        self._step += 1
        return self._read_before

    def reach(self, depth: int) -> int:
        """Return for how many batches ahead to ask: no longer ``depth`` of them where many have been asked for without
        a step, as where gradients are accumulated. Each waits at the servers for steps, and these hold only so many."""
        return depth if len(self._still_to_come()) < _MOST_TO_COME else 0

    def _still_to_come(self) -> list[int]:
        now = self.version_after(0)
        return [version for version in self._asked_to_come if version > now]

    # ---------------------------------------------------------------- a forward

    def lookup(self, wanted: Sequence[Wanted], completed: int, held: HeldRows | None) -> list[Lookup]:
        found: dict[int, Lookup] = {}
        rest: list[tuple[int, Prefetched | None]] = []
        fresh: list[Wanted] = []
        for place, each in enumerate(wanted):
            ahead = self._ahead_of(self._tables[id(each.handle)])
            if ahead is None or not ahead.is_of(each.ids, each.training):
                fresh.append(each)
                rest.append((place, None))
            elif held is None and ahead.has_all and self._is_current(ahead, completed):
                found[place] = ahead.lookup(self.read_at)
            else:
                rest.append((place, ahead))
        if not rest:
            return [found[place] for place in range(len(wanted))]
        return self._look_up(
            wanted, found, rest, self.distinct([[each] for each in fresh], keep=False), completed, held
        )

    def _look_up(
        self,
        wanted: Sequence[Wanted],
        found: dict[int, Lookup],
        rest: Sequence[tuple[int, Prefetched | None]],
        fresh: Sequence[Known],
        completed: int,
        held: HeldRows | None,
    ) -> list[Lookup]:
        """Complete what was ``found`` by the ``rest``: look-ups that were known ahead, and ``fresh`` ones."""
        coming = iter(fresh)
        asking: list[tuple[int, Known]] = []
        for place, expected in rest:
            known = next(coming) if expected is None else expected.known
            ahead = self._ahead_of(known.table)
            distinct = known.distinct.numpy()
            if held is None:
                rows = self._prefetched(ahead, distinct, known.training, completed)
            else:
                if ahead is not None and ahead.completed != completed:
                    ahead = None  # the servers may have told of changes to rows that are not held yet
                missing = partial(self._missing, known.table, ahead, known.training, completed)
                rows = held.lookup(known.table, distinct, known.training, missing)
            if rows is None:
                asking.append((place, known))
            else:
                found[place] = Lookup(known.distinct, torch.from_numpy(rows), known.inverse)
        if asking:
            queries = [Query(known.table, known.distinct.numpy(), known.training) for _, known in asking]
            for (place, known), rows in zip(asking, self.now(queries, completed), strict=True):
                found[place] = Lookup(known.distinct, torch.from_numpy(rows), known.inverse)
        return [found[place] for place in range(len(wanted))]

    def distinct(self, by_table: Sequence[Sequence[Wanted]], *, keep: bool) -> list[Known]:
        """Return, for each of some tables, the distinct ones of the ids that are wanted of it; none is out of range.
        With ``keep`` the ids are a copy, which stays as it is."""
        if not by_table:
            return []
        of_each = [[flat(each.ids) for each in same] for same in by_table]
        sizes = [sum([ids.numel() for ids in each]) for each in of_each]
        parts = [part for each in of_each for part in each]
        ids = parts[0] if len(parts) == 1 and not keep else torch.cat(parts)
        found = unique_each(ids.numpy(), np.cumsum(sizes))
        stops = found.stops.tolist()
        counts = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        for same, count, low, high in zip(by_table, counts, found.low.tolist(), found.high.tolist(), strict=True):
            if count:
                same[0].handle.check_range(low, high)
        split = zip(
            by_table,
            ids.split_with_sizes(sizes),
            torch.from_numpy(found.ids).split_with_sizes(counts),
            torch.from_numpy(found.inverse).split_with_sizes(sizes),
            strict=True,
        )
        return [Known(self._tables[id(same[0].handle)], same[0].training, *each) for same, *each in split]

    def _ahead_of(self, index: int) -> Prefetched | None:
        """Return what was fetched ahead of a table."""
        return self._offered_of(index) or self._innermost(index)

    def _offered_of(self, index: int) -> Prefetched | None:
        """Return what was fetched ahead of a table for this batch. It serves the step that first looks the table up,
        with whatever ids, and not the next one, which may be taken with the same batch: its rows would lack a step that
        its script has seen."""
        ahead = self._offered.get(index)
        if ahead is None:
            return None
        if ahead.used_in is None:
            ahead.used_in = self._step
        return ahead if ahead.used_in == self._step else None

    @property
    def _predicted(self) -> list[Mapping[int, Prefetched]]:
        """Return what was predicted for this thread's forwards, each inside the one before."""
        return self._predicted_here.list

    def _innermost(self, index: int) -> Prefetched | None:
        """Return what the last forward that predicted anything of a table has predicted."""
        for predicted in reversed(self._predicted):
            if index in predicted:
                return predicted[index]
        return None

    def _missing(self, index: int, ahead: Prefetched | None, training: bool, completed: int, ids: Ids) -> Array:
        """Return rows that the worker does not hold."""
        rows = self._prefetched(ahead, ids, training, completed)
        return self.fetch(index, ids, completed, training=training) if rows is None else rows

    def whole(self, handle: TableHandle, completed: int, held: HeldRows | None, most_bytes: int) -> torch.Tensor:
        """Return all rows of a table as a look-up of training would see them, asked for in parts. None of them is
        held."""
        index = self._tables[id(handle)]
        self._offered_of(index)  # which is for this step now: the next one finds rows that this one changes
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
                index, ids[there], True, partial(self._missing, index, None, True, completed)
            )
            if len(missing):
                rows[missing] = self.fetch(index, missing, completed, training=True)
        return torch.from_numpy(rows)

    def fetch(self, index: int, ids: Ids, completed: int, *, training: bool) -> Array:
        """Fetch rows of one table."""
        return self.now([Query(index, ids, training)], completed)[0]

    def now(self, queries: Sequence[Query], completed: int) -> list[Array]:
        fetch = self._start(queries, completed, self.version_after(0))
        return [fetch.rows(place, self.read_at) for place in range(len(queries))]

    def _prefetched(self, ahead: Prefetched | None, ids: Ids, training: bool, completed: int) -> Array | None:
        """Return rows that were fetched ahead, if all are there and as new as they have to be."""
        if ahead is None or ahead.known.training != training or not self._is_current(ahead, completed):
            return None
        return ahead.some(ids, self.read_at)

    def _is_current(self, ahead: Prefetched, completed: int) -> bool:
        return not ahead.fetch.failed and self.is_new_enough(ahead, completed)

    def is_new_enough(self, ahead: FetchedAhead, completed: int) -> bool:
        """Say whether rows that were fetched ahead are as new as they have to be, and no newer, after this worker's
        ``completed`` steps: a script may take any number of them before it looks rows up, and with one batch."""
        lacks = completed - ahead.completed
        is_of_version = self.version_after(0) <= ahead.version <= completed
        return ahead.replaced == self.replaced and is_of_version and lacks <= self._most_steps_ahead

    # ---------------------------------------------------------------- ahead of it

    def prefetch(
        self, wanted: Sequence[Wanted], completed: int, steps: int, held: HeldRows | None
    ) -> dict[int, Prefetched]:
        """Begin to fetch what a forward will ask for after so many more ``steps``."""
        return self._begin(wanted, completed, steps, held, ahead=True)

    def begin(self, queries: Sequence[Query], completed: int, version: int) -> Fetch:
        """Begin to fetch what some forward will use of a version, ahead of it."""
        return self._start(queries, completed, version, ahead=True, aside=True)

    def by_table(self, wanted: Sequence[Wanted]) -> dict[int, list[Wanted]]:
        """Return look-ups by the table that they are of."""
        found: dict[int, list[Wanted]] = {}
        for each in wanted:
            found.setdefault(self._tables[id(each.handle)], []).append(each)
        return found

    def spec(self, table: int) -> TableSpec:
        return self._specs[table]

    def _begin(
        self, wanted: Sequence[Wanted], completed: int, steps: int, held: HeldRows | None, *, ahead: bool
    ) -> dict[int, Prefetched]:
        # Between evaluations come no steps.
        version = self.version_after(steps if any(each.training for each in wanted) else 0)
        by_table = self.by_table(wanted)
        if not ahead and self._predicted:
            by_table = {index: same for index, same in by_table.items() if not self._is_predicted(index, same)}
        if not by_table:
            return {}
        known = self.distinct([*by_table.values()], keep=True)
        asked = [each.distinct.numpy() for each in known]
        if held is not None:
            asked = [held.missing(each.table, ids) for each, ids in zip(known, asked, strict=True)]
        queries = [Query(each.table, ids, each.training) for each, ids in zip(known, asked, strict=True)]
        # Replies for which nobody waits yet must not be in the way of those that somebody does.
        fetch = self._start(queries, completed, version, ahead=ahead, aside=ahead or bool(self._predicted))
        begun = {
            each.table: Prefetched(
                each,
                ids,
                ids.size == each.distinct.numel(),
                fetch,
                place,
                version,
                completed,
                self.replaced,
                by_table[each.table],
            )
            for place, (each, ids) in enumerate(zip(known, asked, strict=True))
        }
        if held is None:
            self.expand_together(by_table, begun)
        return begun

    def _is_predicted(self, index: int, same: Sequence[Wanted]) -> bool:
        """Say whether a forward around this one has asked for exactly this."""
        there = self._innermost(index)
        if there is not None and there.memory is not None and there.memory == _memory(same):
            return True  # if somebody has changed the ids behind torch's back, the look-up will see it
        return there is not None and there.is_of(torch.cat([flat(each.ids) for each in same]), same[0].training)

    def expand_together(self, by_table: Mapping[int, Sequence[Wanted]], begun: Mapping[int, Prefetched]) -> None:
        """Let rows of tables that are looked up once each be expanded together, but for look-ups that are weighed:
        their weights are not foreseen."""
        single = {
            index: same[0]
            for index, same in by_table.items()
            if len(same) == 1 and same[0].expands and not same[0].handle.goes_by_weight
        }
        if len(single) > 1:
            of_handle = {id(each.handle): begun[index] for index, each in single.items()}
            foreseen = ForeseenLookups([*single.values()], lambda each: of_handle[id(each.handle)].lookup(self.read_at))
            for each in of_handle.values():
                each.foreseen = foreseen

    def offer(self, ahead: Mapping[int, Prefetched], by: object) -> None:
        """Let forwards use this from now on, and nothing that was offered before."""
        self.abandon(self._offered)
        self._offered, self._offered_by = ahead, by

    def withdraw(self, by: object) -> None:
        """Offer nothing any more that was offered ``by`` this."""
        if self._offered_by is by:
            self.offer({}, None)

    def abandon(self, ahead: Mapping[int, Prefetched]) -> None:
        """Give up what no forward will use."""
        for each in ahead.values():
            each.foreseen = each.made = None  # which know of it, too
        for fetch in {each.fetch for each in ahead.values()}:
            fetch.abandon()

    def fetch_predicted(
        self, wanted: Sequence[Wanted], completed: int, held: HeldRows | None
    ) -> Mapping[int, Prefetched]:
        """Ask for what the coming look-ups will ask for, except of tables of which something was fetched ahead. An id
        that is out of range is left to the look-up, which refuses it if it comes."""
        rest = [each for each in wanted if self._offered_of(self._tables[id(each.handle)]) is None]
        try:
            begun = self._begin(rest, completed, 0, held, ahead=False)
        except IdOutOfRangeError:
            rest = [each for each in rest if not each.ids.numel() or each.handle.has(*_bounds(each.ids))]
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
        if version > self.version_after(0):
            self._asked_to_come = [*self._still_to_come(), version]
        if len(self._connections) == 1:
            parts: list[list[Part]] = [[slice(0, len(query.ids))] for query in queries]
        else:
            parts = [[*partition(query.ids, len(self._connections))] for query in queries]
        order = sorted(range(len(queries)), key=lambda place: order_of(self._specs[queries[place].table]))
        asked: list[Asked] = []
        try:
            for server, connection in enumerate(self._connections):
                here = [(place, parts[place][server]) for place in order if _size(parts[place][server])]
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
        here: Sequence[tuple[int, Part]],
        connection: ServerLink,
        completed: int,
        version: int,
        ahead: bool,
    ) -> tuple[Frame, str]:
        """Return a request for parts of some queries, and its name in errors."""
        ids = [queries[place].ids[part] for place, part in here]
        pull = pb.Pull(
            version=version,
            tables=[queries[place].table for place, _ in here],
            training=[queries[place].training for place, _ in here],
            counts=map(len, ids),
            ahead=ahead,
        )
        if any(queries[place].since is not None for place, _ in here):
            pull.since.extend(1 + (-1 if (since := queries[place].since) is None else since) for place, _ in here)
        tensors = [WireTensor.of(ids[0] if len(ids) == 1 else np.concatenate(ids))]
        names = ", ".join(repr(self._specs[queries[place].table].name) for place, _ in here[:3])
        what = f"rows of {names}{' …' if len(here) > 3 else ''} at step {completed}"
        return Frame(connection.request(completed, pull=pull), tensors), what


def _memory(wanted: Sequence[Wanted]) -> Memory | None:
    """Return where the ids of a single look-up lie and how often torch has written there; None if that is not known."""
    if len(wanted) != 1 or wanted[0].ids.is_inference():
        return None
    ids = wanted[0].ids
    return ids.data_ptr(), ids._version, ids.dtype, ids.shape, ids.stride(), wanted[0].training


def flat(ids: torch.Tensor) -> torch.Tensor:
    """Return ids one after the other, as numbers of 64 bits on the CPU."""
    if ids.dtype is not torch.int64 or not ids.is_cpu:
        ids = ids.to("cpu", torch.int64)
    return ids if ids.dim() == 1 else ids.reshape(-1)


def _places(part: Part) -> Ids:
    return np.arange(part.stop) if isinstance(part, slice) else part


def _size(part: Part) -> int:
    return part.stop if isinstance(part, slice) else len(part)


def _bounds(ids: torch.Tensor) -> tuple[int, int]:
    low, high = flat(ids).aminmax()
    return int(low), int(high)
