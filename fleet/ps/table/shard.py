"""A shard is everything that one server holds for a job: its dense blocks and its share of every table.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fleet.checkpoint.entries import VALUE, cut, names, split
from fleet.checkpoint.pieces import PIECE_BYTES
from fleet.errors import ConfigurationError, ProtocolError
from fleet.kernels import HINTS, RULES
from fleet.kernels.rule import Rule
from fleet.numeric.merge import merge, merge_each
from fleet.plan.plan import Plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import policy_of
from fleet.ps.consistency.staleness import DENSE, Staleness
from fleet.ps.table.bundle import Bundle, Request, Requests, parts, warm
from fleet.ps.table.changes import Changes
from fleet.ps.table.compensation import Compensation
from fleet.ps.table.dense_blocks import DenseBlocks, Gradient
from fleet.ps.table.eviction import Last
from fleet.ps.table.frozen_view import FrozenView, HandOn, described, without
from fleet.ps.table.given import Given
from fleet.ps.table.history import History
from fleet.ps.table.living_table import Life, LivingTable
from fleet.ps.table.reader import Reader
from fleet.ps.table.row_file import Backlog, Reading
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.stores import MemoryStores, NewStore, Stores
from fleet.ps.table.table import EPOCH_BYTES, Table
from fleet.ps.wire.row_tensors import order_of

Array = np.ndarray[Any, Any]

#: Makes a shard of a plan, for a server, from a seed and the options of its groups.
MakeShard = Callable[[Plan, int, int, Sequence[str]], "Shard"]

#: Where an export begins.
FIRST = "dense:0:0"

_CURSOR = re.compile(r"(?P<kind>dense|counts|removed|table):(?P<first>[0-9]{1,9}):(?P<second>[0-9]{1,36})")

#: The least number of rows that is looked at after a round, to sweep those that are due.
_SWEPT = 1 << 14
#: An id and its count.
_COUNT_BYTES = 16

#: The options of one group are a few numbers.
_MOST_OPTIONS = 64 << 10


class JoinedRows(NamedTuple):
    """Holds ids of several tables, those of each behind those of the one before and up to its stop; and a row for each
    id, in one array for every run of neighbours whose rows have one width and element type."""

    tables: tuple[int, ...]
    ids: Array
    stops: Array
    runs: Sequence[slice]
    rows: Sequence[Array]

    def each(self) -> Iterator[tuple[int, Array, Array]]:
        """Yield each table, its ids and its rows."""
        all_parts = parts(self.stops)
        for run, rows in zip(self.runs, self.rows, strict=True):
            begin = all_parts[run.start].start
            for index, part in zip(self.tables[run], all_parts[run], strict=True):
                yield index, self.ids[part], rows[part.start - begin : part.stop - begin]

    def part(self, run: int, places: slice) -> tuple[Array, Array, Array]:
        """Return the ids, stops and rows of neighbours in one of the runs."""
        each = parts(self.stops)
        begin, start, stop = each[self.runs[run].start].start, each[places.start].start, each[places.stop - 1].stop
        return self.ids[start:stop], self.stops[places] - start, self.rows[run][start - begin : stop - begin]

    def by_table(self) -> dict[int, tuple[Array, Array]]:
        """Return the ids and the rows of each table."""
        return {index: (ids, rows) for index, ids, rows in self.each()}


@dataclass(frozen=True)
class Contribution:
    """Holds what one worker pushed for one step. ``options`` has one JSON object for each param group."""

    worker: int
    options: tuple[str, ...]
    dense: Gradient
    rows: Mapping[int, tuple[Array, Array]]
    used: frozenset[int]
    #: the clocks of the dense values, and of the tables in ``rows``, when the worker read what this was computed on
    read_at: int
    rows_read_at: Mapping[int, int]
    #: by table, the weights of the look-ups, one for each id in ``rows``; whoever gives none gives each of one
    weights: Mapping[int, Array] | None = None
    #: seconds since the epoch by the worker's clock, where a rule goes by time
    now: float | None = None
    #: ``rows``, if they came as those of several tables
    joined: JoinedRows | None = None
    #: how long the worker took for the step by itself, and what time it was there, as its push has said
    own_s: float = -1.0
    sent_at: float = 0.0

    @property
    def brings_any(self) -> bool:
        """Say whether there is any gradient in it, on this server or on another one."""
        return bool(self.used) or any(self.dense[0])


class _Course(NamedTuple):
    """Says what an export of rows has, in which order, and who reads it."""

    since: int
    frozen: FrozenView | None = None
    removed_last: bool = False
    reader: Reader | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of parts in their order."""
        return ("counts", "table", "removed") if self.removed_last else ("counts", "removed", "table")


@dataclass(frozen=True)
class Piece:
    """Holds a part of an export: tensors by name, what they are, and where the next part begins (empty at the end)."""

    about: dict[str, Any]
    tensors: Mapping[str, torch.Tensor | Array]
    next_cursor: str

    def known_to(self, spec: JobSpec) -> Piece:
        """Return what a worker knows of it whose job is this one, before further parameters joined: nothing, and no
        ``about``, where it is of a table that came later."""
        if "dense" not in self.about:
            (table,) = (self.about[kind] for kind in ("table", "counts") if kind in self.about)
            return self if any(each.name == table for each in spec.tables) else Piece({}, {}, self.next_cursor)
        known = {each.name for each in spec.params}
        entries = [each for each in self.about["dense"] if each["param"] in known]
        tensors = {name: self.tensors[name] for name in names(entries)}
        return Piece({**self.about, "dense": entries}, tensors, self.next_cursor)


def is_of_rows(cursor: str) -> bool:
    """Say whether rows, or what is known of rows, begin at a cursor: all parameters come before them."""
    return bool(cursor) and not cursor.startswith("dense:")


class Shard:
    def __init__(
        self, plan: Plan, server: int, seed: int, options: Sequence[str], new_store: NewStore | None = None
    ) -> None:
        """``new_store`` makes the stores of its tables, which are in memory unless it is given."""
        self.plan = plan
        self.evict_every = plan.spec.settings.evict_every
        #: the time in seconds, as worker 0 has told it last
        self.now = 0.0
        self.server = server
        self._seed = seed
        self._new_store = new_store or MemoryStores().share()
        self._options_text = tuple(options)
        self._options = self.check_options(plan, options)
        self.dense = DenseBlocks(plan, server, self._options)
        settings = plan.spec.settings
        policy = policy_of(settings)
        self.compensation = Compensation(settings.dc_lambda, settings.dc_adaptive) if settings.dc_lambda else None
        self.changes = Changes() if policy.tells_changed_rows else None
        self.staleness = Staleness()
        self._slot_cache = SlotCache() if policy.applies_one_lookup(settings.worker_num) else None
        self._tables: list[Table] = []
        self._requests = Requests(self._tables, self._slot_cache)
        #: those of rows that come and go
        self._living: dict[int, LivingTable] = {}
        #: what is left of the last round
        self._pending: Callable[[], None] | None = None
        self.history = History()
        self._add_tables()

    @property
    def readers(self) -> Given | None:
        """Return the record of what each worker was given, in modes that keep one."""
        return self.compensation if self.changes is None else self.changes

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def options(self) -> tuple[str, ...]:
        """Return the param groups' options as they were pushed last."""
        return self._options_text

    def set_options(self, options: Sequence[str]) -> None:
        """Have the param groups' options be what they are on other servers."""
        self._options, self._options_text = self.check_options(self.plan, options), tuple(options)

    def adopt(self, plan: Plan, options: Sequence[str]) -> None:
        """Take over a plan that continues the present one."""
        self._options, self._options_text = self.check_options(plan, options), tuple(options)
        self.plan = plan
        self.dense.adopt(plan, self._options)
        self._add_tables()

    def _add_tables(self) -> None:
        self._tables += [self._make_table(index) for index in range(len(self._tables), len(self.plan.spec.tables))]
        self._living = {index: table for index, table in enumerate(self._tables) if isinstance(table, LivingTable)}
        self.history.watch(self._tables)

    def _make_table(self, index: int) -> Table:
        spec = self.plan.spec.tables[index]
        rows = self.rule_of(self.plan, spec.group, rows=True).rows
        assert rows is not None
        columns = rows.columns(self._options[spec.group], spec.dim).values()
        row_bytes = (spec.dim + sum(column.width for column in columns)) * np.dtype(spec.dtype).itemsize + EPOCH_BYTES
        store = self._new_store(spec.name, len(self.plan.spec.tables), row_bytes)
        if spec.admit is not None or spec.evict:
            if self.changes is not None:
                raise ConfigurationError(
                    "rows cannot come and go by rules where workers train copies of them",
                    where=f"table {spec.name!r}",
                    expected="a table without admit= and evict=, or another mode",
                    got=f"{self.plan.spec.settings.mode} with admit={spec.admit}, evict={spec.evict}",
                )
            return LivingTable(spec, rows, self._seed, store, is_whole=self.plan.spec.settings.server_num == 1)
        return Table(spec, rows, self._seed, store, slot_cache=self._slot_cache)

    @staticmethod
    def rule_of(plan: Plan, group: int, *, rows: bool) -> Rule:
        """Return the rule that updates a group's parameters, or the rows of its tables."""
        name = plan.spec.groups[group].rule
        rule = RULES.get(name)
        if rule is None or (rule.rows is None if rows else not rule.dense):
            what = "the rows of a table" if rows else "a dense parameter"
            raise ProtocolError(f"{name[:80]!r} cannot update {what}")
        return rule

    @staticmethod
    def check_options(plan: Plan, options: Sequence[str]) -> list[dict[str, Any]]:
        """Read the options of every group: the names the plan has, and plain values."""
        groups = plan.spec.groups
        if len(options) != len(groups):
            raise ProtocolError("a message speaks of other param groups", expected=len(groups), got=len(options))
        parsed = []
        for group, text in zip(groups, options, strict=True):
            try:
                values = json.loads(text) if len(text) <= _MOST_OPTIONS else None
            except (ValueError, RecursionError):
                raise ProtocolError("a group's options cannot be read", got=text[:80]) from None
            if not isinstance(values, dict) or sorted(values) != sorted(group.options):
                raise ProtocolError("a group has other options", expected=group.options, got=text[:200])
            for name, value in values.items():
                if not all(map(_is_plain, value if isinstance(value, list) else [value])):
                    raise ProtocolError("an option has no plain value", where=name[:80], got=repr(value)[:80])
            # JSON has no tuples; betas and their like are tuples in torch.
            parsed.append({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
        return parsed

    def check(self, contribution: Contribution) -> None:
        """Refuse what does not fit before it becomes part of a round, where it would be everybody's problem."""
        if contribution.options != self._options_text:
            options = self.check_options(self.plan, contribution.options)
            self._check_kinds(options)
            self._check_state(options)
        if contribution.joined is None:
            for index, (ids, grads) in contribution.rows.items():
                table = self.table(index)
                self._check_shape(table, ids, grads)
                table.check_range(ids)
        else:
            self.check_joined(contribution.joined)
        for index in contribution.used:
            self.table(index)
        for index, weights in (contribution.weights or {}).items():
            self._check_weights(index, contribution.rows, weights)

    def check_joined(self, joined: JoinedRows) -> None:
        """Refuse rows of several tables that do not fit."""
        request, each = self.request(joined.tables), parts(joined.stops)
        for run, rows in zip(joined.runs, joined.rows, strict=True):
            ids = joined.ids[each[run.start].start : each[run.stop - 1].stop]
            self._check_shape(request.tables[run.start], ids, rows)
        request.check_range(joined.ids, joined.stops)

    @staticmethod
    def _check_shape(table: Table, ids: Array, grads: Array) -> None:
        spec, expected = table.spec, (ids.size, table.spec.dim)
        if ids.ndim != 1 or ids.dtype != np.int64 or grads.shape != expected or grads.dtype != spec.dtype:
            raise ProtocolError(
                f"gradients for the rows of {spec.name!r} do not fit",
                expected=f"int64 ids and {spec.dtype} {expected}",
                got=f"{ids.dtype} {ids.shape} and {grads.dtype} {grads.shape}",
            )

    def _check_weights(self, index: int, rows: Mapping[int, tuple[Array, Array]], weights: Array) -> None:
        fits = index in rows and weights.shape == rows[index][0].shape and weights.dtype.kind == "f"
        if not fits or not (np.isfinite(weights) & (weights >= 0)).all():
            raise ProtocolError(
                f"weights of look-ups in {self.table(index).spec.name!r} do not fit",
                expected="a number from 0 for each id",
                got=f"{weights.dtype} {weights.shape}",
            )

    def _check_kinds(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options of another kind: they may change from step to step, but a number stays a number."""
        for ours, theirs in zip(self._options, options, strict=True):
            for name, value in theirs.items():
                if _kind(value) != _kind(ours[name]) and not (name in HINTS and isinstance(value, bool | None)):
                    raise ProtocolError(
                        "an option has become something else", where=name, expected=ours[name], got=repr(value)[:80]
                    )

    def _check_state(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options that are turned on too late."""
        groups = self.plan.spec.groups
        for group, ours, theirs in zip(groups, self._options, options, strict=True):
            # Of dense parameters that are trained on the workers a server knows neither rule nor options.
            names = RULES[group.rule].kept_from_the_first if group.options else ()
            if any(theirs[name] and not ours[name] for name in names):
                self.dense.check_state(options)
                for table in [each for each in self.tables if each.step]:
                    rule, name = RULES[groups[table.spec.group].rule], repr(table.spec.name)
                    rule.refuse_late(options[table.spec.group], table.columns, name)

    def table(self, index: int) -> Table:
        tables = self.tables
        if not 0 <= index < len(tables):
            raise ProtocolError("a message names a table this job does not have", got=index)
        return tables[index]

    def request(self, tables: tuple[int, ...], training: tuple[bool, ...] | None = None) -> Request:
        """Return what is known of a request that names these tables."""
        self.apply_pending()
        return self._requests.of(tables, training)

    def apply(
        self, contributions: Sequence[Contribution], divisor: float | None = None, *, keep: bool = False
    ) -> dict[int, tuple[Array, Array]]:
        """Take one optimizer step on the sum of the contributions over ``divisor``, their number unless given; if there
        are none, do nothing. The first one's options rule the round. In a mode whose workers push changes, these are
        added. With ``keep`` it returns, by table, the ids of the rows that have changed and the weights that they had
        before.

        Dense values have changed when this returns. Rows follow with ``apply_pending``, or when somebody looks at a
        table, and so does what is returned."""
        self.apply_pending()
        before: dict[int, tuple[Array, Array]] = {}
        for contribution in contributions:
            self._count_staleness(contribution)
        if self.changes is not None:
            for contribution in contributions:
                self._add(contribution, self.changes)
            return before
        if not contributions:
            return before
        divisor = len(contributions) if divisor is None else divisor
        if self.compensation is not None:
            contributions = [self._compensated(each, self.compensation) for each in contributions]
        # One that brings nothing has no say.
        first = next((each for each in contributions if each.brings_any), contributions[0])
        if first.options != self._options_text:
            self._options, self._options_text = self.check_options(self.plan, first.options), first.options
        self.dense.apply([c.dense for c in contributions], divisor, self._options)
        used = sorted(frozenset().union(*(c.used for c in contributions)))
        self._pending = partial(self._apply_rows, contributions, divisor, used, before if keep else None, self.now)
        return before

    def squares(self, contributions: Sequence[Contribution], divisor: float) -> float:
        """Return the squared norm of the sum of the contributions over ``divisor``, of this server's part of it."""
        found = self.dense.squares([each.dense for each in contributions], divisor)
        for index in sorted(frozenset().union(*(each.rows for each in contributions))):
            _, grads = merge([each.rows[index] for each in contributions if index in each.rows], divisor)
            found += float(np.square(grads, dtype=np.float64).sum())
        return found

    @property
    def has_pending(self) -> bool:
        """Say whether a part of the last round is left to do."""
        return self._pending is not None

    def apply_pending(self) -> None:
        """Do what is left of the last round."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    @property
    def tables(self) -> list[Table]:
        self.apply_pending()
        return self._tables

    def _apply_rows(
        self,
        contributions: Sequence[Contribution],
        count: float,
        used: Sequence[int],
        before: dict[int, tuple[Array, Array]] | None,
        now: float,
    ) -> None:
        """Update the rows of all tables with the sum of the contributions over ``count``; ``before``, if it is given,
        takes the weights that they had."""
        for living in self._living.values():
            living.sweep(max(_SWEPT, 2 * len(living) // self.evict_every))
        for index in used:
            self._tables[index].step += 1
        done = self._apply_bundles(contributions, count, before)
        for index in used:
            if index in done:
                continue
            table = self._tables[index]
            rows = [each.rows[index] for each in contributions if index in each.rows]
            if not rows:
                continue
            options = self._options[table.spec.group]
            if isinstance(table, LivingTable):
                told = [(each.weights or {}).get(index) for each in contributions if index in each.rows]
                ids, weights = table.train(rows, told, count, options, now, keep=before is not None)
            else:
                ids, grads = merge(rows, count) if len(rows) > 1 or count != 1 else rows[0]
                weights = table.apply(ids, grads, options, table.step, keep=before is not None)
            if before is not None and weights is not None:
                before[index] = ids.copy(), weights  # a view of them would hold the whole push
        for index in used:
            if index in self._living and self._tables[index].step % self.evict_every == 0:
                self._living[index].evict(now)

    def _apply_bundles(
        self, contributions: Sequence[Contribution], count: float, before: dict[int, tuple[Array, Array]] | None
    ) -> set[int]:
        """Update the rows of tables that can be updated together, and return which these are."""
        done: set[int] = set()
        for indices, bundle, ids, stops, grads in self._together(contributions, count):
            options = self._options[bundle.tables[0].spec.group]
            weights = bundle.apply(ids, stops, grads, options, keep=before is not None)
            done.update(indices)
            if before is not None and weights is not None:
                kept = ids.copy()  # a view of them would hold the whole push
                for index, part in zip(indices, parts(stops), strict=True):
                    before[index] = kept[part], weights[part]
        return done

    def _together(
        self, contributions: Sequence[Contribution], count: float
    ) -> Iterator[tuple[Sequence[int], Bundle, Array, Array, Array]]:
        """Yield tables that can be updated together, and their gradients: the distinct ids of each, up to its stop, and
        a row for every id."""
        joined = contributions[0].joined if len(contributions) == count == 1 else None
        if joined is None:
            named = sorted(frozenset().union(*(each.rows for each in contributions)))
            indices = tuple(sorted(named, key=lambda index: order_of(self._tables[index].spec)))
        else:
            indices = joined.tables
        for run_number, run in enumerate(self._requests.of(indices).runs):
            for places, bundle in run.parts:
                if bundle is None or not bundle.can_be_updated(self._options[bundle.tables[0].spec.group]):
                    continue
                if joined is None:
                    each = [[c.rows[index] for c in contributions if index in c.rows] for index in indices[places]]
                    yield indices[places], bundle, *merge_each(each, count)
                else:
                    yield indices[places], bundle, *joined.part(run_number, places)

    # ---------------------------------------------------------------- rows that come and go

    def life(self, index: int) -> Life | None:
        """Return how the rows of a table come and go; None if it has no rules for that."""
        table = self.tables[index]
        return table.life if isinstance(table, LivingTable) else None

    @property
    def past(self) -> dict[str, Any]:
        """Return by table what it has to remember beside its rows and counts, as JSON has it."""
        return {str(index): table.past for index, table in self._living.items()}

    def resume_past(self, past: Mapping[str, Any], now: float) -> None:
        """Go on from ``past``, at the time that was told last."""
        self.now = now
        for index, told in past.items():
            self._living[int(index)].resume(told, now)

    def shrink(self, now: float | None) -> None:
        """Let rows leave that have to at this moment. ``now`` is the time in seconds, if it is told anew."""
        self.apply_pending()
        self.now = self.now if now is None else now
        for table in self._living.values():
            table.evict(self.now)

    @property
    def awaits_cut(self) -> list[tuple[int, str, int]]:
        """Return what servers have to agree on before anybody reads or changes a table: the table, what ``MaxRows``
        goes by, and how many of its rows may stay on all servers."""
        self.apply_pending()
        return [
            (index, kind, most)
            for index, table in self._living.items()
            for kind, most in table.budgets.items()
            if kind in table.awaits
        ]

    def bounds(self, index: int, kind: str) -> tuple[int, int]:
        """Return the least score and the greatest here, while a cut is awaited."""
        return self._awaiting(index, kind).ranking(kind).bounds

    def rank(self, index: int, kind: str, score: int, id: int) -> int:
        """Return how many rows stay here if this one is the last: those of greater scores, and of the same score those
        whose id is not greater."""
        return self._awaiting(index, kind).ranking(kind).rank((score, id))

    def cut(self, index: int, kind: str, last: Last | None) -> None:
        """Take the last row that stays, its score and its id, as the servers agree on it; None if all do."""
        self._awaiting(index, kind).agree(kind, last)

    def _awaiting(self, index: int, kind: str) -> LivingTable:
        table = self.table(index)
        if not isinstance(table, LivingTable) or kind not in table.awaits:
            raise ProtocolError("no cut is awaited", where=f"table {table.spec.name!r}", got=kind[:80])
        return table

    def _add(self, contribution: Contribution, changes: Changes) -> None:
        self.dense.add(contribution.dense)
        for index in contribution.used:
            self.tables[index].step += 1
        for index, (ids, values) in contribution.rows.items():
            self.tables[index].add(ids, values)
            changes.mark(contribution.worker, index, ids)

    def _count_staleness(self, contribution: Contribution) -> None:
        worker, (present, _) = contribution.worker, contribution.dense
        if any(present):
            self.staleness.add(worker, DENSE, max(0, self.dense.clock - contribution.read_at))
        tables = self.tables
        for index, read_at in contribution.rows_read_at.items():
            table = tables[index]
            self.staleness.add(worker, table.spec.name, max(0, table.step - read_at))

    def _compensated(self, contribution: Contribution, compensation: Compensation) -> Contribution:
        self.dense.compensate(contribution.worker, contribution.dense, compensation)
        rows = {
            index: (
                ids,
                compensation.rows(contribution.worker, index, ids, grads, self.tables[index].read(ids, training=True)),
            )
            for index, (ids, grads) in contribution.rows.items()
        }
        return replace(contribution, rows=rows, joined=None)

    def forget(self, worker: int) -> None:
        """Drop the record of what ``worker`` was given, as it has left."""
        if self.readers is not None:
            self.readers.forget(worker)

    def read(self, index: int, ids: Array, training: bool) -> Array:
        """Return rows of one table."""
        return self.table(index).read(ids, training)

    def read_joined(
        self, tables: tuple[int, ...], training: tuple[bool, ...], ids: Array, stops: Array, *, before_cut: bool = False
    ) -> list[Array]:
        """Return rows of several tables, in one array for every run of neighbours whose rows have one width and element
        type; with ``before_cut`` also those that have left since the last round. The ids of each table end at its
        stop."""
        request, each, found = self.request(tables, training), parts(stops), []
        request.check_range(ids, stops)
        for run in request.runs:
            begin, spec = each[run.places.start].start, request.tables[run.places.start].spec
            rows = np.empty((each[run.places.stop - 1].stop - begin, spec.dim), spec.dtype)
            found.append(rows)
            for places, bundle in run.parts:
                if bundle is not None and bundle.can_be_read:
                    start, stop = each[places.start].start, each[places.stop - 1].stop
                    part = rows[start - begin : stop - begin]
                    bundle.read(ids[start:stop], stops[places] - start, training[places.start], part)
                    continue
                for place in range(places.start, places.stop):
                    table, here = request.tables[place], each[place]
                    part = rows[here.start - begin : here.stop - begin]
                    if before_cut and isinstance(table, LivingTable):
                        table.read(ids[here], training[place], part, before_cut=True)
                    else:
                        table.read(ids[here], training[place], part)
        return found

    def rows_of(self, tables: Sequence[int], ids: Sequence[Array]) -> list[tuple[Table, Array]]:
        """Return the tables of a request with the ids that it names, without what makes no sense."""
        return [
            (self._tables[index], each)
            for index, each in zip(tables, ids, strict=False)
            if index < len(self._tables) and each.dtype == np.int64 and each.ndim == 1
        ]

    @property
    def loses_rows(self) -> bool:
        """Say whether rows leave by rules of their tables."""
        return any(table.spec.evict for table in self._living.values())

    def give_way(self) -> bool:
        """Give back a little of the memory that another shard is to have, and say whether that is all."""
        return self._new_store.give_way()

    def take_over(self) -> None:
        """Note that this is the shard that is trained from now on."""
        self._new_store.take_over()

    def backlogs(self) -> list[Backlog]:
        """Return what has to be written before more rows leave memory, if somebody would wait for it."""
        found = [table.backlog() for table in self._tables]
        return [backlog for backlog in found if backlog is not None]

    def to_rewrite(self) -> tuple[Table, Reading] | None:
        """Return a part of a file that should be written anew, with its table, if there is one."""
        for table in self._tables:
            reading = table.to_rewrite()
            if reading is not None:
                return table, reading
        return None

    def upload_rows(self, index: int, ids: Array, values: Array) -> None:
        self.check_rows(index, ids, values)
        self.tables[index].load(ids, {"weight": values})

    def check_rows(self, index: int, ids: Array, values: Array) -> None:
        """Refuse rows that do not fit their table."""
        table = self.table(index)
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise ProtocolError("ids must be a flat int64 tensor", got=f"{ids.dtype} {ids.shape}")
        if values.shape != (len(ids), table.spec.dim) or values.dtype.name != table.spec.dtype:
            raise ProtocolError(f"initial rows of {table.spec.name!r} do not fit", got=f"{values.dtype} {values.shape}")
        table.check_range(ids)

    def replaced(self) -> None:
        """Forget what belongs to the values before, as others stand here now."""
        if self.compensation is not None:
            self.compensation.forget_all()
        if self.changes is not None:
            self.dense.forget_state()  # a checkpoint's, from before the workers trained on with theirs

    def prepare(self) -> None:
        """Give every table its optimizer columns, before rows are saved or loaded that may lack some of them. Where
        workers push changes, they keep the rows' optimizer state."""
        if self.changes is None:
            for table in self.tables:
                table.prepare(self._options[table.spec.group])

    def warm(self) -> None:
        """Compile every kernel before somebody waits for it."""
        for table in self.tables:
            table.warm(self._options[table.spec.group])
        warm(self.tables)

    def freeze(self, since: int, hand_on: HandOn) -> FrozenView:
        """Return a view with which the tables are exported as they are now, while they change; ``hand_on`` gets those
        rows that will have changed by then, as they are now."""
        return FrozenView(self.tables, since, self.history.epoch, hand_on)

    def export(
        self,
        cursor: str,
        since: int = 0,
        *,
        dense_state: bool = True,
        frozen: FrozenView | None = None,
        counts: bool = True,
        removed_last: bool = False,
        reader: Reader | None = None,
    ) -> Piece:
        """Return the part of this shard's state that begins at ``cursor``; the first is ``FIRST``. Of the tables it has
        only the rows that were changed in the epoch ``since`` or later, if that is given, or those still ``frozen``,
        without tables that came later; of the blocks only the values, if their state is not wanted; and what is counted
        of ids without rows, if that is. What was removed comes before the rows, or ``removed_last``: rows may leave in
        between. ``reader`` is who goes through rows that are not frozen."""
        found = _CURSOR.fullmatch(cursor)
        if found is None or (found["kind"] != "dense" and int(found["first"]) >= len(self.tables)):
            raise ProtocolError("an export's cursor is unknown", got=repr(cursor)[:60])
        kind, first, second = found["kind"], int(found["first"]), int(found["second"])
        course = _Course(since, frozen, removed_last, reader if frozen is None else frozen.reader)
        if kind == "dense":
            return self._export_dense(first, second, course, state=dense_state, counts=counts)
        export = {"counts": self._export_counts, "removed": self._export_removed, "table": self._export_rows}
        return export[kind](first, second, course)

    def first_rows(self, since: int = 0) -> str:
        """Return the cursor of the first rows that were removed or changed in the epoch ``since`` or later."""
        return self._cursor("removed", 0, _Course(since))

    def _export_dense(self, position: int, start: int, course: _Course, *, state: bool, counts: bool) -> Piece:
        """Export blocks from one on, a large one in parts."""
        about: list[dict[str, Any]] = []
        tensors: list[torch.Tensor | Array] = []
        slots, left = self.dense.layout.slots, PIECE_BYTES
        while position < len(slots) and left > 0:
            entries = [each for each in self.dense.export(position) if state or each[0]["key"] == VALUE]
            each = sum(tensor.itemsize for entry, tensor in entries if tensor is not None and entry["elementwise"])
            stop = min(slots[position].block.numel, start + max(1, left // each))
            cuts, copies = split(cut(entries, start, stop))
            about += cuts
            tensors += copies
            left -= sum(tensor.nbytes for tensor in copies)
            position, start = (position, stop) if stop < slots[position].block.numel else (position + 1, 0)
        following = (
            f"dense:{position}:{start}"
            if position < len(slots)
            else self._cursor("counts" if counts else course.kinds[1], 0, course)
        )
        named = dict(zip(names(about), tensors, strict=True))
        return Piece({"dense": about, "seed": self._seed}, named, following)

    def _export_rows(self, index: int, start: int, course: _Course) -> Piece:
        table, since, frozen = self.tables[index], course.since, course.frozen
        until, step, cut = None, self._step_to_keep(table), table.cut
        if frozen is not None:
            frozen.check()
            since, until, step, cut = frozen.since, frozen.until, frozen.steps[index], frozen.cuts[index]
        # What rows take where they are loaded: with their part of an index.
        row_bytes = max(table.row_bytes, table.nbytes // max(1, len(table)))
        batch, stop = table.scan(start, max(1, PIECE_BYTES // row_bytes), since, until)
        if course.reader is not None:
            course.reader.went_on(table.store, start, stop)
        following = self._cursor("table", index + 1, course) if stop is None else f"table:{index}:{stop}"
        piece = Piece(*described(table, step, *without(cut, batch)), following)
        if frozen is not None and not following:
            frozen.end()
        return piece

    def _export_removed(self, index: int, start: int, course: _Course) -> Piece:
        table, frozen = self.tables[index], course.frozen
        if frozen is None:
            table.take_out_due()
        parts = table.removed_since(course.since) if frozen is None else frozen.removed[index]
        ids = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        stop = start + PIECE_BYTES // ids.itemsize
        following = f"removed:{index}:{stop}" if stop < ids.size else self._cursor("removed", index + 1, course)
        about = {"table": table.spec.name, "step": 0, "rows": ids[start:stop].size, "columns": [], "removed": True}
        return Piece(about, {"ids": ids[start:stop]}, following)

    def _export_counts(self, index: int, start: int, course: _Course) -> Piece:
        table, frozen = self.tables[index], course.frozen
        assert isinstance(table, LivingTable)
        view = table.counts(frozen=False) if frozen is None else frozen.counts[index]
        assert view is not None
        arrays, stop = view.export(start, PIECE_BYTES // _COUNT_BYTES)
        following = self._cursor("counts", index + 1, course) if stop is None else f"counts:{index}:{stop}"
        servers = self.plan.spec.settings.server_num
        place = {"start": start, "server": self.server, "servers": servers}
        return Piece({"counts": table.spec.name, **table.about_counts(view), **place}, arrays, following)

    def _cursor(self, kind: str, index: int, course: _Course) -> str:
        """Return the cursor of the first part of something, from one kind and table on."""
        tables = len(self._tables if course.frozen is None else course.frozen.steps)
        living = {each: table for each, table in self._living.items() if each < tables}
        parts: dict[str, Iterable[int]] = {
            "counts": (each for each, table in living.items() if table.counts(frozen=False) is not None),
            "removed": living if course.since else (),
            "table": range(tables),
        }
        for each in course.kinds[course.kinds.index(kind) :]:
            for place in parts[each]:
                if each != kind or place >= index:
                    return f"{each}:{place}:0"
        return ""

    def _step_to_keep(self, table: Table) -> int:
        """Return the step count to keep with the rows' optimizer state; where workers have that state, it starts
        afresh."""
        return table.step if self.changes is None else 0


def make_shard_in(stores: Stores, plan: Plan, server: int, seed: int, options: Sequence[str]) -> Shard:
    """Make a shard whose tables keep their rows in ``stores``."""
    return Shard(plan, server, seed, options, stores.share())


def _is_plain(value: object) -> bool:
    """Say whether an optimizer can compute with it."""
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or isinstance(value, float | str)


def _kind(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return bool if isinstance(value, bool) else float if isinstance(value, int | float) else type(value)
