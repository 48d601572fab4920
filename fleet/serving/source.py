"""Says what a follower is told, and by whom: one version of a model after the other.

A source is running servers, or the directory of a job's checkpoints. It describes what there is once, and then gives
updates, each of which leads from one version to a later one, or brings a whole version. An update comes in pieces, as a
table may be larger than what should travel at once; nobody reads a version before its last piece is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fleet.numeric.ids import bounds, packed_ids
from fleet.plan.specs import JobSpec

#: So many differences of two models are told one by one.
_MOST_TOLD = 5


@dataclass(frozen=True)
class TableDescription:
    """Describes a table: ``mean`` is what ids without a row read."""

    embedding_dim: int
    num_embeddings: int | None
    mean: float
    dtype: torch.dtype = torch.float32

    def fits(self, changes: RowChanges) -> bool:
        """Say whether these can be rows of the table."""
        most, named = self.num_embeddings, [ids for ids in (changes.ids, changes.gone) if ids.size]
        if most is not None and any(low < 0 or high >= most for low, high in map(bounds, map(packed_ids, named))):
            return False
        return changes.values.dtype == self.dtype and changes.values.shape == (changes.ids.size, self.embedding_dim)


@dataclass(frozen=True)
class SourceDescription:
    """Describes the model that a source has: the shapes of its dense parameters, and its tables, by the names that they
    have in the model."""

    dense: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tables: Mapping[str, TableDescription]


def description_of(spec: JobSpec) -> SourceDescription:
    """Return what servers and checkpoints of a job have."""
    return SourceDescription(
        {param.name: (param.shape, getattr(torch, param.dtype)) for param in spec.params},
        {
            table.name: TableDescription(
                table.dim, table.num_embeddings, table.initializer.mean, getattr(torch, table.dtype)
            )
            for table in spec.tables
        },
    )


def differences(before: SourceDescription, now: SourceDescription) -> str:
    """Return in words what a source that came in the place of another lacks, or has otherwise; empty if it is all
    there. A job may be given more parameters while it runs."""
    told = []
    for had, has in ((before.dense, now.dense), (before.tables, now.tables)):
        told += [f"{name!r} is not there" for name in had.keys() - has.keys()]
        told += [
            f"{name!r} is {has[name]}, not {had[name]}" for name in had.keys() & has.keys() if has[name] != had[name]
        ]
    shown = sorted(told)[:_MOST_TOLD]
    return "; ".join([*shown, f"{len(told) - len(shown)} more"] if len(shown) < len(told) else shown)


@dataclass(frozen=True, eq=False)
class RowChanges:
    """Holds rows of a table that are new or have other values, and ids whose rows are gone."""

    ids: npt.NDArray[np.int64]
    values: torch.Tensor
    gone: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class Piece:
    """Holds a part of an update."""

    dense: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, RowChanges] = field(default_factory=dict)


def _nothing() -> None:
    """Stand for a source that need not know whether an update was taken."""


@dataclass(frozen=True, eq=False)
class Update:
    """Leads to ``version``: from the one before, or, if it is ``whole``, from nothing. ``pieces`` may be read once;
    an error of the source that comes out of it means that the update did not happen. ``taken`` is called when it is in
    place: until then the source begins with what was there before."""

    version: int
    whole: bool
    pieces: Iterator[Piece]
    taken: Callable[[], None] = _nothing


class Source(Protocol):
    """Gives the versions of a model. One thread at a time uses it, except for ``heard_at`` and ``close``."""

    def describe(self) -> SourceDescription:
        """Return what there is; waits until there is something, or raises what is wrong."""

    def next(self, timeout_s: float) -> Update | None:
        """Return what leads on from the last update that was taken, or None if there is nothing new within that time.
        The first one is whole, and so is one after an outage that was too long."""

    @property
    def heard_at(self) -> float:
        """Return when, on the monotonic clock, the source was last heard to have nothing newer than the last update."""

    @property
    def ended(self) -> bool:
        """Return whether there will be nothing more: the job is over."""

    def close(self) -> None:
        """Let go of whatever is held, from any thread; ``next`` returns soon."""
