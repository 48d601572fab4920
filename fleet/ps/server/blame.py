"""Finds out whose gradients have made a row of a table what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fleet.errors import ConfigurationError
from fleet.numeric.ids import partition
from fleet.numeric.jit import Array
from fleet.plan.specs import JobSpec
from fleet.ps.server.job import Due, Job
from fleet.ps.server.replay import Replay


@dataclass(frozen=True)
class Part:
    """Holds one worker's part in an update: its gradient, of the row, and the norm of that."""

    worker: int
    norm: float
    gradient: Array


@dataclass(frozen=True)
class Change:
    """Says how an update, or what was done right after it, has changed a row: ``step`` is the number of updates by
    then, ``moved`` the norm of the change. Without ``parts`` no gradient has changed it."""

    step: int
    parts: tuple[Part, ...]
    divisor: float
    moved: float
    after: Array


@dataclass(frozen=True)
class Blame:
    """Holds how a row was when the journals begin, and what has changed it since."""

    first: int
    last: int
    before: Array
    changes: tuple[Change, ...]


def server_of(spec: JobSpec, id: int) -> int:
    """Return the server that has the row of an id."""
    shares = partition(np.array([id]), spec.settings.server_num)
    return next(server for server, places in enumerate(shares) if len(places))


def check_row(spec: JobSpec, table: str, id: int) -> None:
    """Refuse a row that a job does not have."""
    found = next((each for each in spec.tables if each.name == table), None)
    if found is None:
        names = ", ".join(repr(each.name) for each in spec.tables)
        raise ConfigurationError("the job has no such table", expected=names or "a job with tables", got=repr(table))
    first, last = (-1 << 63, (1 << 63) - 1) if found.num_embeddings is None else (0, found.num_embeddings - 1)
    if not first <= id <= last:
        raise ConfigurationError(
            f"the table {table!r} has no such row", expected=f"an id from {first} to {last}", got=id
        )


def blame(replay: Replay, table: str, id: int, until: int | None = None) -> Blame:
    """Follow a row through everything that was kept, or up to so many updates."""
    ids, states, parts = np.array([id]), list[tuple[int, Array]](), dict[int, tuple[tuple[Part, ...], float]]()

    def visit(job: Job, version: int, due: Due | None) -> bool:
        index = _index_of(job, table)
        if index is not None:
            states.append((version, job.held().read(index, ids, training=True)[0].copy()))
            if due is not None and version != until:
                parts[version + 1] = _parts(due, index, id), due.divisor
        return False

    replay.each(visit, until)
    if not states:
        raise ConfigurationError("the job has no such table", where=f"step {until}", got=repr(table))
    changes = []
    for (_, before), (version, after) in pairwise(states):
        made, divisor = parts.get(version, ((), 1))
        moved = float(np.linalg.norm(after.astype(np.float64) - before))
        if made or before.tobytes() != after.tobytes():
            changes.append(Change(version, made, divisor, moved, after))
    return Blame(states[0][0], states[-1][0], states[0][1], tuple(changes))


def _index_of(job: Job, table: str) -> int | None:
    tables: Sequence[str] = [each.name for each in job.plans.current.spec.tables]
    return tables.index(table) if table in tables else None


def _parts(due: Due, index: int, id: int) -> tuple[Part, ...]:
    """Return whose gradients for a row are in an update."""
    found = []
    for contribution in due.contributions:
        ids, gradients = contribution.rows.get(index, (np.empty(0, np.int64), np.empty(0)))
        for place in np.flatnonzero(ids == id):
            gradient = gradients[place].copy()
            norm = float(np.linalg.norm(gradient.astype(np.float64)))
            found.append(Part(contribution.worker, norm, gradient))
    return tuple(found)
