"""A shard is everything that one server holds for a job: its dense blocks and its share of every table.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.entries import VALUE, cut, names, split
from fleet.checkpoint.pieces import PIECE_BYTES
from fleet.errors import ProtocolError
from fleet.kernels import HINTS, RULES
from fleet.kernels.rule import Rule
from fleet.numeric.merge import merge
from fleet.plan.plan import Plan
from fleet.ps.consistency import policy_of
from fleet.ps.consistency.staleness import DENSE, Staleness
from fleet.ps.table.changes import Changes
from fleet.ps.table.compensation import Compensation
from fleet.ps.table.dense_blocks import DenseBlocks, Gradient
from fleet.ps.table.frozen_view import FrozenView, HandOn, described
from fleet.ps.table.history import History
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.table import Table

Array = np.ndarray[Any, Any]

#: Where an export begins.
FIRST = "dense:0:0"

_CURSOR = re.compile(r"(?P<kind>dense|table):(?P<first>[0-9]{1,9}):(?P<second>[0-9]{1,18})")

#: The options of one group are a few numbers.
_MOST_OPTIONS = 64 << 10


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


@dataclass(frozen=True)
class Piece:
    """Holds a part of an export: tensors by name, what they are, and where the next part begins (empty at the end)."""

    about: dict[str, Any]
    tensors: Mapping[str, torch.Tensor | Array]
    next_cursor: str


def is_of_rows(cursor: str) -> bool:
    """Say whether rows begin at a cursor: all parameters come before them."""
    return cursor.startswith("table:")


class Shard:
    def __init__(self, plan: Plan, server: int, seed: int, options: Sequence[str]) -> None:
        self.plan = plan
        self.server = server
        self._seed = seed
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
        #: what is left of the last round
        self._pending: Callable[[], None] | None = None
        self.history = History()
        self._add_tables()

    @property
    def readers(self) -> Compensation | Changes | None:
        """Return the record of what each worker was given, in modes that keep one."""
        return self.compensation if self.changes is None else self.changes

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def options(self) -> tuple[str, ...]:
        """Return the param groups' options as they were pushed last."""
        return self._options_text

    def adopt(self, plan: Plan, options: Sequence[str]) -> None:
        """Take over a plan that continues the present one."""
        self._options, self._options_text = self.check_options(plan, options), tuple(options)
        self.plan = plan
        self.dense.adopt(plan, self._options)
        self._add_tables()

    def _add_tables(self) -> None:
        self._tables += [self._make_table(index) for index in range(len(self._tables), len(self.plan.spec.tables))]
        self.history.watch(self._tables)

    def _make_table(self, index: int) -> Table:
        spec = self.plan.spec.tables[index]
        rows = self.rule_of(self.plan, spec.group, rows=True).rows
        assert rows is not None
        return Table(spec, rows, self._seed, slot_cache=self._slot_cache)

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
            self._check_kinds(self.check_options(self.plan, contribution.options))
        for index, (ids, grads) in contribution.rows.items():
            spec = self.table(index).spec
            expected = (ids.size, spec.dim)
            if ids.ndim != 1 or ids.dtype != np.int64 or grads.shape != expected or grads.dtype.name != spec.dtype:
                raise ProtocolError(
                    f"gradients for the rows of {spec.name!r} do not fit",
                    expected=f"int64 ids and {spec.dtype} {expected}",
                    got=f"{ids.dtype} {ids.shape} and {grads.dtype} {grads.shape}",
                )
            self.table(index).check_range(ids)
        for index in contribution.used:
            self.table(index)

    def _check_kinds(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options of another kind: they may change from step to step, but a number stays a number."""
        for ours, theirs in zip(self._options, options, strict=True):
            for name, value in theirs.items():
                if _kind(value) != _kind(ours[name]) and not (name in HINTS and isinstance(value, bool | None)):
                    raise ProtocolError(
                        "an option has become something else", where=name, expected=ours[name], got=repr(value)[:80]
                    )

    def table(self, index: int) -> Table:
        tables = self.tables
        if not 0 <= index < len(tables):
            raise ProtocolError("a message names a table this job does not have", got=index)
        return tables[index]

    def apply(self, contributions: Sequence[Contribution], *, keep: bool = False) -> dict[int, tuple[Array, Array]]:
        """Take one optimizer step on the mean of the contributions; the first one's options rule the round. In a mode
        whose workers push changes, these are added. With ``keep`` it returns, by table, the ids of the rows that have
        changed and the weights that they had before.

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
        if self.compensation is not None:
            contributions = [self._compensated(each, self.compensation) for each in contributions]
        first = contributions[0]
        if first.options != self._options_text:
            self._options, self._options_text = self.check_options(self.plan, first.options), first.options
        self.dense.apply([c.dense for c in contributions], len(contributions), self._options)
        used = sorted(frozenset().union(*(c.used for c in contributions)))
        self._pending = partial(self._apply_rows, [c.rows for c in contributions], used, before if keep else None)
        return before

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
        contributions: Sequence[Mapping[int, tuple[Array, Array]]],
        used: Sequence[int],
        before: dict[int, tuple[Array, Array]] | None,
    ) -> None:
        """Update the rows of all tables; ``before``, if it is given, takes the weights that they had."""
        count = len(contributions)
        for index in used:
            table = self._tables[index]
            table.step += 1
            rows = [each[index] for each in contributions if index in each]
            if rows:
                ids, grads = merge(rows, count) if count > 1 else rows[0]
                options = self._options[table.spec.group]
                weights = table.apply(ids, grads, options, table.step, keep=before is not None)
                if before is not None and weights is not None:
                    before[index] = ids.copy(), weights  # a view of them would hold the whole push

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
        for index, read_at in contribution.rows_read_at.items():
            table = self.tables[index]
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
        return replace(contribution, rows=rows)

    def forget(self, worker: int) -> None:
        """Drop the record of what ``worker`` was given, as it has left."""
        if self.readers is not None:
            self.readers.forget(worker)

    def read(self, index: int, ids: Array, training: bool) -> Array:
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise ProtocolError("ids must be a flat int64 tensor", got=f"{ids.dtype} {ids.shape}")
        return self.table(index).read(ids, training)

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

    def freeze(self, since: int, hand_on: HandOn) -> FrozenView:
        """Return a view with which the tables are exported as they are now, while they change; ``hand_on`` gets those
        rows that will have changed by then, as they are now."""
        return FrozenView(self.tables, since, self.history.epoch, hand_on)

    def export(
        self, cursor: str, since: int = 0, *, dense_state: bool = True, frozen: FrozenView | None = None
    ) -> Piece:
        """Return the part of this shard's state that begins at ``cursor``; the first is ``FIRST``. Of the tables it has
        only the rows that were changed in the epoch ``since`` or later, if that is given, or those still ``frozen``,
        without tables that came later; of the blocks only the values, if their state is not wanted."""
        found = _CURSOR.fullmatch(cursor)
        if found and found["kind"] == "dense":
            return self._export_dense(int(found["first"]), int(found["second"]), dense_state)
        if found and int(found["first"]) < len(self.tables):
            return self._export_rows(int(found["first"]), int(found["second"]), since, frozen)
        raise ProtocolError("an export's cursor is unknown", got=repr(cursor)[:60])

    def _export_dense(self, position: int, start: int, state: bool) -> Piece:
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
        following = f"dense:{position}:{start}" if position < len(slots) else _cursor(0, 0, len(self.tables))
        named = dict(zip(names(about), tensors, strict=True))
        return Piece({"dense": about, "seed": self._seed}, named, following)

    def _export_rows(self, index: int, start: int, since: int, frozen: FrozenView | None) -> Piece:
        table = self.tables[index]
        until, step = None, self._step_to_keep(table)
        if frozen is not None:
            frozen.check()
            since, until, step = frozen.since, frozen.until, frozen.steps[index]
        most = max(1, PIECE_BYTES // max(1, table.nbytes // max(1, len(table))))
        if since:
            slots, stop = table.changed(since, until, start, most)
        else:
            stop = min(len(table), start + most)
            slots = np.arange(start, stop)
            if until is not None:
                slots = table.of_epochs(slots, since, until)
        tables = len(self.tables if frozen is None else frozen.steps)
        following = _cursor(index, stop, tables) if stop < len(table) else _cursor(index + 1, 0, tables)
        piece = Piece(*described(table, step, *table.rows_at(slots)), following)
        if frozen is not None and not following:
            frozen.end()
        return piece

    def _step_to_keep(self, table: Table) -> int:
        """Return the step count to keep with the rows' optimizer state; where workers have that state, it starts
        afresh."""
        return table.step if self.changes is None else 0


def _cursor(index: int, row: int, tables: int) -> str:
    """Return the cursor at which the rows of one of so many tables go on."""
    return f"table:{index}:{row}" if index < tables else ""


def _is_plain(value: object) -> bool:
    """Say whether an optimizer can compute with it."""
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or isinstance(value, float | str)


def _kind(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return bool if isinstance(value, bool) else float if isinstance(value, int | float) else type(value)
