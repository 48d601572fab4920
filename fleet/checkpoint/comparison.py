"""Compares two checkpoints, one parameter and one table at a time.

A table's rows come in another order in each checkpoint. So those of the first are put into files of a temporary
directory, sorted by id, and those of the second are looked up there as they pass by.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.inspection import Array, Parameter, Rows, buffers, parameters, scratch, states
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import writing
from fleet.numeric.bits import as_bytes
from fleet.numeric.tensors import kind_of
from fleet.plan.specs import JobSpec


@dataclass(frozen=True)
class Difference:
    """Compares two tensors of one shape: whether they are the same bits, the largest difference, and the norm of the
    difference, as a part of the first one's norm."""

    same: bool
    most: float
    relative: float


@dataclass(frozen=True)
class RowDifference:
    """Compares two tables: rows that only one has, rows that are not the same bits in some column, and the largest
    difference in each column."""

    added: int
    removed: int
    changed: int
    most: Mapping[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed)


@dataclass(frozen=True)
class Told:
    """Reports a difference that cannot be measured: in numbers of the job, or in something that one checkpoint lacks or
    has of another kind."""

    left: str
    right: str

    @property
    def same(self) -> bool:
        return self.left == self.right


#: What there is to say of one name.
Finding = tuple[str, "Difference | RowDifference | Told"]


def compare(left: Checkpoint, right: Checkpoint) -> Iterator[Finding]:
    """Yield everything that either has, in the order in which it is found: numbers of the job, parameters, their state,
    buffers, the states of workers' own objects, tables."""
    yield "step", Told(str(left.manifest.version), str(right.manifest.version))
    yield "seed of rows", Told(str(left.manifest.seed), str(right.manifest.seed))
    mine_told, theirs_told = _described(left.manifest.spec), _described(right.manifest.spec)
    both = {name for name in mine_told if mine_told[name] == theirs_told.get(name)}
    for name in sorted((mine_told.keys() | theirs_told.keys()) - both):
        yield name, Told(mine_told.get(name, "absent"), theirs_told.get(name, "absent"))
    yield from _parameters(left, right, both)
    yield from _values(buffers(left), buffers(right))
    yield from _values(_own(left), _own(right))
    for spec in left.manifest.spec.tables:
        if spec.name in both:
            other = next(each for each in right.manifest.spec.tables if each.name == spec.name)
            before, after = Rows(left, spec), Rows(right, other)
            yield spec.name, _compare_rows(before, after)
            yield f"{spec.name} step", Told(str(before.step), str(after.step))


def _own(checkpoint: Checkpoint) -> dict[str, Any]:
    return {f"worker {own.worker} {path}": value for own in states(checkpoint) for path, value in own.values.items()}


def _described(spec: JobSpec) -> dict[str, str]:
    """Return by name what must be the same for two parameters or tables to be compared."""
    rules = [group.rule for group in spec.groups]
    params = {each.name: f"{each.dtype} {each.shape}, {rules[each.group]}" for each in spec.params}
    for each in spec.tables:
        start = f"{each.initializer.kind}({each.initializer.a:g}, {each.initializer.b:g})"
        ids = "any id" if each.num_embeddings is None else f"{each.num_embeddings} ids"
        params[each.name] = f"table of {each.dtype} x {each.dim}, {ids}, {rules[each.group]}, initializer {start}"
    return params


def _parameters(left: Checkpoint, right: Checkpoint, both: set[str]) -> Iterator[Finding]:
    """Compare the parameters. Each checkpoint goes through them in an order of its own, so the second is asked for one
    at a time."""
    theirs = (each for each in parameters(right) if each.spec.name in both)
    waiting: dict[str, Parameter] = {}
    for mine in parameters(left):
        name = mine.spec.name
        if name not in both:
            continue
        while name not in waiting:
            other = next(theirs)
            waiting[other.spec.name] = other
        other = waiting.pop(name)
        yield name, difference(mine.value, other.value)
        yield from _values(
            {f"{name} {key}": value for key, value in mine.state.items()},
            {f"{name} {key}": value for key, value in other.state.items()},
        )


def _values(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Finding]:
    for name in [*left, *(name for name in right if name not in left)]:
        mine, theirs = left.get(name), right.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and _kind(mine) == _kind(theirs):
            yield name, difference(mine, theirs)
        else:
            yield name, Told(_kind(mine, name in left), _kind(theirs, name in right))


def _kind(value: Any, present: bool = True) -> str:
    if isinstance(value, torch.Tensor):
        return kind_of(value)
    return repr(value) if present else "absent"


def difference(left: torch.Tensor, right: torch.Tensor) -> Difference:
    if torch.equal(as_bytes(left), as_bytes(right)):
        return Difference(True, 0.0, 0.0)
    apart = left.double() - right.double()
    size, whole = float(apart.norm()), float(left.double().norm())
    return Difference(False, float(apart.abs().max()), size / whole if whole else math.inf if size else 0.0)


def _compare_rows(left: Rows, right: Rows) -> RowDifference:
    widths = {name: max(left.widths.get(name, 0), right.widths.get(name, 0)) for name in left.widths | right.widths}
    if any(rows.widths.get(name, width) != width for rows in (left, right) for name, width in widths.items()):
        return RowDifference(0, 0, len(left.ids), dict.fromkeys(widths, math.nan))
    most, changed, found = dict.fromkeys(widths, 0.0), 0, 0
    with tempfile.TemporaryDirectory(prefix="fleet-diff-") as folder, np.errstate(invalid="ignore"):
        with writing("what is compared", folder):
            mine = {
                name: scratch(Path(folder) / str(index), (len(left.ids), width), left.spec.dtype)
                for index, (name, width) in enumerate(widths.items())
            }
        left.fill(mine)
        for ranks, columns in right.parts():
            known, places = _places(right.ids[ranks], left.ids)
            found += len(places)
            differ = np.zeros(len(places), bool)
            for name, width in widths.items():
                theirs = columns.get(name, np.zeros((len(ranks), width), mine[name].dtype))[known]
                ours = mine[name][places]
                differ |= (ours.view(np.uint8) != theirs.view(np.uint8)).any(axis=1)
                apart = np.abs(ours.astype(np.float64) - theirs)
                most[name] = float(np.maximum(most[name], apart.max(initial=0.0)))
            changed += int(differ.sum())
        del mine
    return RowDifference(len(right.ids) - found, len(left.ids) - found, changed, most)


def _places(ids: Array, known: Array) -> tuple[Array, Array]:
    """Return which of ``ids`` are among the ``known`` ones, which are sorted, and where they stand there."""
    if not len(known):
        return np.zeros(len(ids), bool), np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    found = known[places] == ids
    return found, places[found]
