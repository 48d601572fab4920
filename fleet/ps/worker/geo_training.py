"""What a GEO worker trains: its own parameters by the user's own optimizers, and its own rows of the tables.

Every so many steps it tells the servers how far it has come since they last agreed, ``d = (x - old) / N``, and takes
in what the others have done meanwhile: ``x += p - old``, where ``p`` is what the servers have then. ``old`` is what
servers and worker agreed on, for every parameter and every row that the worker holds. With one worker ``p - old`` is
zero to the bit, and ``x`` what plain torch computes.

A row is fetched when it is first trained here, and is held from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.entries import Entry, set_state, state_entries
from fleet.kernels import RULES
from fleet.numeric.ids import unique
from fleet.numeric.jit import Array, Ids
from fleet.plan.layout import DenseLayout
from fleet.plan.specs import TableSpec
from fleet.ps.table.table import WEIGHT, Table
from fleet.ps.worker.dense_buffers import Flat, ParameterWriter, pack
from fleet.ps.worker.describe import Description

Rows = tuple[Ids, Array]


@dataclass(frozen=True)
class Change:
    """How far a worker has come: for every server all its blocks end to end, and the touched rows of every table."""

    dense: Sequence[Flat]
    rows: Mapping[int, Rows]


class HeldRows:
    """The rows of one table that this worker holds, with their optimizer state; and what they were agreed to be."""

    def __init__(self, spec: TableSpec, rule: str) -> None:
        kernel = RULES[rule].rows
        assert kernel is not None, "describe() refuses such a table"
        self._mine = Table(spec, kernel, seed=0)
        self._agreed = Table(spec, kernel, seed=0)
        self._touched: list[Ids] = []

    def read(self, ids: Ids, training: bool, fetch: Callable[[Ids], Array]) -> Array:
        """The rows of ids, which are distinct. What is not held is fetched, and held if it is to be trained."""
        if training:
            self.hold(ids, fetch)
            return self._mine.read(ids, training)
        known, rows = self._mine.known(ids), self._mine.read(ids, training)
        if not known.all():
            rows[~known] = fetch(ids[~known])
        return rows

    def hold(self, ids: Ids, fetch: Callable[[Ids], Array]) -> None:
        missing = self.missing(ids)
        if len(missing):
            fetched = fetch(missing)
            self._agreed.load(missing, {WEIGHT: fetched})
            self._mine.load(missing, {WEIGHT: fetched})

    def missing(self, ids: Ids) -> Ids:
        """The ids among these that are not held."""
        missing: Ids = ids[~self._mine.known(ids)]
        return missing

    def train(self, ids: Ids, grads: Array, options: Mapping[str, Any]) -> None:
        self._mine.step += 1
        if len(ids):
            self._touched.append(ids)
            self._mine.apply(ids, grads, options, self._mine.step)

    def change(self, divisor: int) -> Rows | None:
        if not self._touched:
            return None
        ids, _ = unique(np.concatenate(self._touched))
        change = self._mine.read(ids, True) - self._agreed.read(ids, True)
        return ids, change / change.dtype.type(divisor)

    def told(self, ids: Ids, change: Array) -> None:
        """The servers have added this change."""
        self._agreed.add(ids, change)
        self._touched.clear()

    def take(self, ids: Ids, values: Array) -> None:
        """Others have changed these rows to what they are now. Of those that are not held after all (fetched ahead and
        never used) there is nothing to change."""
        held = self._agreed.known(ids)
        ids, values = ids[held], values[held]
        self._mine.add(ids, values - self._agreed.read(ids, True))
        self._agreed.load(ids, {WEIGHT: values})

    def warm(self, options: Mapping[str, Any]) -> None:
        self._mine.warm(options)


class Replica:
    def __init__(
        self,
        described: Description,
        layouts: Sequence[DenseLayout],
        writer: ParameterWriter,
        workers: int,
        agreed: Sequence[Flat],
    ) -> None:
        """``agreed``: the values of every server's blocks, which the parameters have too."""
        self._described = described
        self._layouts = layouts
        self._writer = writer
        self._workers = workers
        self._agreed = agreed
        groups = described.spec.groups
        self._tables = [HeldRows(spec, groups[spec.group].rule) for spec in described.spec.tables]
        for spec, table in zip(described.spec.tables, self._tables, strict=True):
            table.warm(described.option_values(spec.group))

    # ---------------------------------------------------------------- training

    def lookup(self, index: int, ids: Ids, training: bool, fetch: Callable[[Ids], Array]) -> Array:
        return self._tables[index].read(ids, training, fetch)

    def missing(self, index: int, ids: Ids) -> Ids:
        return self._tables[index].missing(ids)

    def train(self, update: Callable[[], None], rows: Mapping[int, Rows], fetch: Callable[[int, Ids], Array]) -> None:
        """One step: ``update`` runs the user's optimizers; ``fetch`` brings rows of a table from the servers."""
        for index, (ids, _) in rows.items():  # what was read in evaluation mode is not held yet
            self._tables[index].hold(ids, partial(fetch, index))
        with self._tables_aside():
            update()
        for index, (ids, grads) in rows.items():
            options = self._described.option_values(self._described.spec.tables[index].group)
            self._tables[index].train(ids, grads, options)

    @contextmanager
    def _tables_aside(self) -> Iterator[None]:
        """Gradients of rows are none of torch's optimizers' business."""
        weights = [handle.weight for handle in self._described.handles]
        grads = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        try:
            yield
        finally:
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad

    # ---------------------------------------------------------------- agreeing with the servers

    def change(self) -> Change:
        """How far this worker has come, its share of it. Nothing is altered."""
        dense = [
            {dtype: (value - agreed[dtype]).div_(self._workers) for dtype, value in now.items()}
            for now, agreed in zip(self._values(), self._agreed, strict=True)
        ]
        rows = {index: table.change(self._workers) for index, table in enumerate(self._tables)}
        return Change(dense, {index: change for index, change in rows.items() if change is not None})

    def agree(self, change: Change, values: Sequence[Flat], others: Iterable[tuple[int, Ids, Array]]) -> None:
        """The servers have added ``change``, and have these values now; ``others`` have changed these rows."""
        fresh = []
        for now, agreed, mine, theirs in zip(self._values(), self._agreed, change.dense, values, strict=True):
            fresh.append({d: now[d] + (theirs[d] - (agreed[d] + mine[d])) for d in now})
        self._writer.write(fresh)
        self._agreed = values
        for index, (ids, rows) in change.rows.items():
            self._tables[index].told(ids, rows)
        for index, ids, rows in others:
            self._tables[index].take(ids, rows)

    def _values(self) -> list[Flat]:
        flat = [param.detach().reshape(-1).to("cpu") for param in self._described.params]
        return [pack(layout, flat) for layout in self._layouts]

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> Iterator[Entry]:
        """The state of the user's optimizers for the dense parameters, as it stands in a checkpoint."""
        for spec, param in zip(self._described.spec.params, self._described.params, strict=True):
            yield from state_entries(spec.name, 0, param, self._owner(spec.group).state.get(param, {}))

    def restore(self, name: str, pieces: Mapping[str, Any], flat: set[str]) -> None:
        """Give one parameter's optimizer the state that a checkpoint has for it."""
        (position,) = [index for index, spec in enumerate(self._described.spec.params) if spec.name == name]
        owner = self._owner(self._described.spec.params[position].group)
        set_state(owner, self._described.params[position], pieces, flat)

    def _owner(self, group: int) -> torch.optim.Optimizer:
        return self._described.optimizers[self._described.spec.groups[group].optimizer]
