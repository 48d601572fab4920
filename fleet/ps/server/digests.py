"""Sums up what a server has, block by block and table by table, so that two runs can be compared at every step.

A digest is of all bits: values, the optimizer's state, and of a table its step count. That of a table does not depend
on the order of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from fleet.checkpoint.manifest import TABLE
from fleet.errors import ConfigurationError
from fleet.numeric.bits import as_bytes
from fleet.numeric.jit import Array
from fleet.ps.server.job import Due, Job
from fleet.ps.server.replay import Replay
from fleet.ps.table.shard import FIRST, Piece

_MASK = (1 << 64) - 1
#: The constants of splitmix64.
_STEP, _FIRST_MIX, _SECOND_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: So many rows, or elements that differ, are named.
MOST_NAMED = 5


@dataclass(frozen=True)
class Parting:
    """Says where two runs of a server part: after which update, and what differs then, the first of it first.
    ``is_later`` says that there is a state before, which is the same."""

    server: int
    step: int
    names: tuple[str, ...]
    is_later: bool


@dataclass(frozen=True)
class Compared:
    """Says what two runs of a server have in common: the updates from ``first`` to ``last``, and where they part."""

    first: int
    last: int
    parting: Parting | None


def digests(job: Job) -> dict[str, str]:
    """Return a digest of each block and of each table that a server has, by its name, in the order of the plan."""
    shard, plan = job.held(), job.plans.current
    shard.prepare()
    of_blocks = {slot.position: blake2b(digest_size=8) for slot in shard.dense.layout.slots}
    for position, told in of_blocks.items():
        for entry, tensor in shard.dense.export(position):
            told.update(json.dumps(entry, sort_keys=True).encode())
            if tensor is not None:
                told.update(_bytes_of(tensor))
    found = {
        plan.block_name(shard.dense.layout.slots[each].block): told.hexdigest() for each, told in of_blocks.items()
    }
    sums = {table.spec.name: _mixed_number(table.step) for table in shard.tables}
    for piece in _pieces_of_rows(job):
        sums[piece.about[TABLE]] = (sums[piece.about[TABLE]] + _sum_of_rows(piece)) & _MASK
    return {**found, **{name: f"{total:016x}" for name, total in sums.items()}}


def each_step(replay: Replay, until: int | None = None) -> dict[int, dict[str, str]]:
    """Return the digests of everything after each update that was kept, or up to one."""
    found: dict[int, dict[str, str]] = {}

    def visit(job: Job, version: int, _: Due | None) -> bool:
        found[version] = digests(job)
        return False

    replay.each(visit, until)
    return found


def compare(left: Replay, right: Replay, until: int | None = None) -> Compared:
    """Find where two runs of a server part, after as many updates as both have."""
    first = max(left.kept.first, right.kept.first)
    ours: dict[int, dict[str, str]] = {}

    def keep(job: Job, version: int, _: Due | None) -> bool:
        if version >= first:
            ours[version] = digests(job)
        return False

    left.each(keep, until)
    last = -1
    parting: Parting | None = None

    def look(job: Job, version: int, _: Due | None) -> bool:
        nonlocal last, parting
        if version not in ours:
            return version > max(ours, default=-1)
        last = version
        theirs, mine = digests(job), ours[version]
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if differing:
            parting = Parting(left.kept.server, version, tuple(differing), version > first)
        return parting is not None

    right.each(look, until)
    if last < 0:
        raise ConfigurationError(
            "two runs have no step in common",
            where=left.kept.name,
            expected=f"{left.kept.first} or more" if ours else f"a run that has step {first}",
            got=f"{right.kept.first} or more",
            todo="With FLEET_DURABLE_KEEP=all servers keep every step from the first one on.",
        )
    return Compared(first, last, parting)


def differing_places(left: Replay, right: Replay, step: int, name: str) -> tuple[list[int], int]:
    """Return the first rows of a table, by id, or else the first elements of a block, that differ after a step, and how
    many do."""
    ours, theirs = _content(left, step, name), _content(right, step, name)
    places = sorted(each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    return places[:MOST_NAMED], len(places)


def _content(replay: Replay, step: int, name: str) -> dict[int, bytes]:
    """Return the bytes of a table's rows by id, or of a block's elements by place."""
    found: dict[int, bytes] = {}

    def act(job: Job, _: int) -> None:
        shard, plan = job.held(), job.plans.current
        shard.prepare()
        for slot in shard.dense.layout.slots:
            if plan.block_name(slot.block) == name:
                for _entry, tensor in shard.dense.export(slot.position):
                    if tensor is not None and tensor.numel() == slot.block.numel:
                        for place, each in enumerate(_rows_of_bytes(tensor.detach().reshape(-1, 1))):
                            found[place] = found.get(place, b"") + each.tobytes()
        for piece in _pieces_of_rows(job):
            if piece.about[TABLE] == name:
                columns = [_rows_of_bytes(values) for key, values in piece.tensors.items() if key != "ids"]
                for id, row in zip(_array(piece.tensors["ids"]), np.concatenate(columns, axis=1), strict=True):
                    found[int(id)] = row.tobytes()

    replay.to(step, act)
    return found


def _pieces_of_rows(job: Job) -> Iterator[Piece]:
    shard, cursor = job.held(), FIRST
    while cursor:
        piece = shard.export(cursor, counts=False)
        if TABLE in piece.about:
            yield piece
        cursor = piece.next_cursor


def _sum_of_rows(piece: Piece) -> int:
    """Return the sum of a number for each row, which its id and all of its columns decide."""
    ids = _array(piece.tensors["ids"]).astype(np.uint64)
    total = _mixed(ids + np.uint64(_STEP))
    for name in sorted(piece.about["columns"]):
        rows = _rows_of_bytes(piece.tensors[name])
        factors = _mixed(np.arange(rows.shape[1], dtype=np.uint64) + np.uint64(_number_of(name)))
        total = _mixed(total ^ (rows.astype(np.uint64) * (factors | np.uint64(1))).sum(1, dtype=np.uint64))
    return int(total.sum(dtype=np.uint64))


def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")


def _mixed_number(number: int) -> int:
    return int(_mixed(np.array([number], np.uint64))[0])


def _mixed(numbers: Array) -> Array:
    """Spread numbers over all of 64 bits, as splitmix64 does."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST_MIX)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_MIX)
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found


def _array(values: torch.Tensor | Array) -> Array:
    return values.numpy() if isinstance(values, torch.Tensor) else values


def _rows_of_bytes(values: torch.Tensor | Array) -> Array:
    """Return the bytes of each row."""
    if isinstance(values, torch.Tensor):
        flat: Array = as_bytes(values).numpy()
    else:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.reshape(len(values), flat.size // max(1, len(values)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor.cpu()).numpy().tobytes()
