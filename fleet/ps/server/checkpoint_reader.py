"""A server fills its shard from a checkpoint that was written by any number of servers, sliced in any way."""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import VALUE
from fleet.checkpoint.manifest import COUNTS, DENSE, TABLE, Checkpoint, Fit
from fleet.checkpoint.pieces import REMOVED
from fleet.checkpoint.state import states_in, steps_in
from fleet.errors import CheckpointError
from fleet.numeric.ids import partition
from fleet.numeric.jit import Array
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import MODES
from fleet.ps.server.object_states import ObjectState
from fleet.ps.table.eviction import SEEN, TIME, WEIGHTS
from fleet.ps.table.living_table import LivingTable
from fleet.ps.table.runs import BlockState
from fleet.ps.table.shard import Shard
from fleet.ps.table.table import WEIGHT, Table

_log = logging.getLogger("fleet.server")


#: Memory is taken when it is needed so much later, by the rows' weights, and looked after so often.
_AHEAD_BYTES, _PAUSE_S = 64 << 20, 0.002


@dataclass(frozen=True)
class Origin:
    """Says what a job begins with: a checkpoint, all of which has to fit if it is ``strict``; or nothing."""

    id: str = ""
    url: str = ""
    strict: bool = True


NOTHING = Origin()


@dataclass(frozen=True)
class Restore:
    """Holds a checkpoint to start from: what its manifest says, how to fill a new shard from it, and the names in a job
    that it does not fill."""

    id: str
    url: str
    seed: int
    version: int
    fill: Callable[[Shard, int], None]
    lacks: Callable[[JobSpec], frozenset[str]]
    strict: bool
    #: reads the states of the workers that it has
    states: Callable[[], Mapping[int, ObjectState]]
    #: the workers whose states those are -> after how many of their steps
    steps: Mapping[int, int]
    #: how many workers the job had
    workers: int

    @property
    def origin(self) -> Origin:
        return Origin(self.id, self.url, self.strict)


def restore_from(dirname: object, *, strict: bool = True) -> Restore:
    """Prepare to start from a checkpoint; its manifest is read now, its pieces when the job is known. Unless it is
    ``strict``, what does not fit is logged and left out."""
    checkpoint = Checkpoint.open(dirname)

    def fill(shard: Shard, server: int) -> None:
        if strict:
            checkpoint.check_fits(shard.plan.spec)
        fit = checkpoint.fit(shard.plan.spec)
        if fit.problems:
            _log.warning("%s is loaded as far as it fits: %s", checkpoint.where, "; ".join(fit.problems))
        try:
            _restore_dense(checkpoint, shard, fit)
            _restore_rows(checkpoint, shard, server, fit)
            _restore_counts(checkpoint, shard, server, fit)
            shard.history.begin(checkpoint.manifest.id, "")
            shard.history.exists(checkpoint.manifest.id)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError, RuntimeError, StopIteration) as error:
            raise CheckpointError(
                "the checkpoint's contents do not fit the job", where=checkpoint.where, got=repr(error)
            ) from error

    manifest = checkpoint.manifest
    mode = manifest.spec.settings.mode
    has_rounds = mode not in MODES or MODES[mode].policy.shares_steps
    # After a round all are at the job's step, however many of its own a worker has taken that joined late.
    steps = {worker: manifest.version if has_rounds else taken for worker, taken in steps_in(checkpoint).items()}

    def states() -> dict[int, ObjectState]:
        return {worker: ObjectState(data, steps[worker]) for worker, _, data in states_in(checkpoint)}

    return Restore(
        manifest.id,
        checkpoint.where,
        manifest.seed,
        manifest.version,
        fill,
        lambda spec: frozenset() if strict else checkpoint.fit(spec).lacking,
        strict,
        states,
        steps,
        manifest.spec.settings.worker_num,
    )


def _restore_dense(checkpoint: Checkpoint, shard: Shard, fit: Fit) -> None:
    """Assemble every parameter that has a block here from the blocks it was saved in, then cut our blocks."""
    plan, slots = shard.plan, shard.dense.layout.slots
    here = {plan.param_of(slot.block).name: plan.param_of(slot.block).numel for slot in slots}
    wanted = {name: numel for name, numel in here.items() if name not in fit.lacking}
    assembly = Assembly(wanted, checkpoint.where)
    for about, tensors in checkpoint.pieces(DENSE):
        assembly.add(about["dense"], tensors)
    write_whole(shard, assembly, lacks=fit.lacking.__contains__, keeps_state=fit.whole.__contains__)


def write_whole(
    shard: Shard, assembly: Assembly, *, lacks: Callable[[str], bool], keeps_state: Callable[[str], bool]
) -> None:
    """Write our blocks of whole parameters; by name, what is lacking, and whose optimizer state is kept."""
    states: list[BlockState] = []
    for slot in shard.dense.layout.slots:
        block, name = slot.block, shard.plan.param_of(slot.block).name
        if lacks(name):
            states.append(({}, set()))
            continue
        whole, flat = assembly.whole(name)
        mine = {
            key: value[block.offset : block.offset + block.numel] if key in flat else value
            for key, value in whole.items()
        }
        shard.dense.write(slot.position, mine.pop(VALUE))
        states.append((mine, flat) if keeps_state(name) else ({}, set()))
    shard.dense.restore(states)


def _restore_rows(checkpoint: Checkpoint, shard: Shard, server: int, fit: Fit) -> None:
    tables = {table.spec.name: table for table in shard.tables if table.spec.name not in fit.lacking}
    servers = shard.plan.spec.settings.server_num
    shard.prepare()
    for name, table in tables.items():
        table.expect(_rows_saved(checkpoint, name) // servers)
    for _, piece in checkpoint.files(TABLE):
        if piece.about[TABLE] in tables and piece.about[TABLE] in fit.whole:
            reach_step(tables[piece.about[TABLE]], piece.about)  # before rows come that count as used when they do
    with room_taken(shard.tables):
        for about, tensors in checkpoint.pieces(TABLE, once=servers == 1):
            # A table may have joined the job while a worker that did not know of it yet saved.
            if about[TABLE] in tables:
                table, arrays = tables[about[TABLE]], [tensor.numpy() for tensor in tensors]
                restore_piece(table, about, arrays, shard, server, keeps_state=table.spec.name in fit.whole)


def _restore_counts(checkpoint: Checkpoint, shard: Shard, server: int, fit: Fit) -> None:
    """Take over what was counted of ids that have no row, as far as the tables still count in that way."""
    tables = {table.spec.name: table for table in shard.tables if table.spec.name not in fit.lacking}
    servers, dropped = shard.plan.spec.settings.server_num, set[str]()
    for about, tensors in checkpoint.pieces(COUNTS, once=servers == 1):
        table = tables.get(about[COUNTS])
        if table is None:
            continue
        if not isinstance(table, LivingTable) or not take_counts(table, about, tensors, server, servers):
            dropped.add(about[COUNTS])
    if dropped:
        text = "%s: what was counted of ids without a row says nothing to other rules, and is left out: %s"
        _log.warning(text, checkpoint.where, ", ".join(sorted(map(repr, dropped))))


def take_counts(
    table: LivingTable, about: Mapping[str, Any], tensors: Sequence[torch.Tensor], server: int, servers: int
) -> bool:
    """Take over a piece of what some server counted of ids without a row; return whether it says anything here."""
    if len(tensors) == 1:
        # The cells of all servers go into each, unless these are the servers that wrote them.
        is_same = about["servers"] == servers
        if is_same and about["server"] != server:
            return True
        counted = about["counted"] if is_same else about["counted"] // servers
        return table.load_counts({**about, "counted": counted}, {"cells": tensors[0].numpy()})
    ids, counts = (tensor.numpy() for tensor in tensors)
    _check_ids(table, ids)
    mine = partition(ids, servers)[server] if servers > 1 else slice(None)
    return table.load_counts(about, {"ids": ids[mine], "counts": counts[mine]})


@contextlib.contextmanager
def room_taken(tables: Sequence[Table]) -> Iterator[None]:
    """Take the memory that the tables expect to need on a thread, in the order in which rows come. It keeps a little
    ahead of them, since no number of rows is believed before they have come.

    Systems hand memory out page by page when it is first written to. That takes as long as everything else that is done
    with the rows, and longer where a virtual machine has to get it from its host first."""
    done = threading.Event()

    def touch() -> None:
        for table in tables:
            for rows in table.touch():
                while (rows - len(table)) * table.spec.dim * np.dtype(table.spec.dtype).itemsize > _AHEAD_BYTES:
                    if done.wait(_PAUSE_S):
                        return
                if done.is_set():
                    return

    thread = threading.Thread(target=touch, name="fleet-checkpoint-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rows_saved(checkpoint: Checkpoint, table: str) -> int:
    """Return how many rows were saved at first: deltas mostly have the same ones again."""
    every = checkpoint.lineage()[0].manifest.pieces
    pieces = [piece for piece in every if piece.about.get(TABLE) == table and REMOVED not in piece.about]
    # Every save has a folder of its own. A row has at least its id in the file.
    first = [piece for piece in pieces if PurePosixPath(piece.file).parent == PurePosixPath(pieces[0].file).parent]
    return sum(min(int(piece.about["rows"]), piece.bytes // 8) for piece in first)


def reach_step(table: Table, about: Mapping[str, Any]) -> None:
    """Let a table be at least at the step at which a piece of its rows was exported."""
    table.step = max(table.step, int(about["step"]))


def restore_piece(
    table: Table, about: Mapping[str, Any], arrays: Sequence[Any], shard: Shard, server: int, *, keeps_state: bool
) -> None:
    _check_ids(table, arrays[0])
    if REMOVED in about:
        table.remove(arrays[0])
        return
    servers = shard.plan.spec.settings.server_num
    # All are mine where there is no other server, and nothing need be copied.
    mine = partition(arrays[0], servers)[server] if servers > 1 else slice(None)
    if len(arrays[0][mine]):
        columns = dict(zip(about["columns"], (array[mine] for array in arrays[1:]), strict=True))
        # Where workers push changes, they keep the rows' optimizer state, and it starts afresh.
        is_whole = keeps_state and shard.changes is None
        # What was counted is no optimizer's; in which step a row was used says nothing where steps start afresh.
        lasting = [WEIGHT, *(name for name in (TIME, SEEN, WEIGHTS) if name in columns)]
        table.load(arrays[0][mine], columns if is_whole else {name: columns[name] for name in lasting})


def _check_ids(table: Table, ids: Array) -> None:
    """Refuse what no writer of ids has written: compiled functions do not look."""
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise CheckpointError(
            "ids are whole numbers of 64 bits in a row",
            where=f"table {table.spec.name!r}",
            got=f"{ids.dtype} {ids.shape}",
        )


def fill_own(shard: Shard, pieces: Iterable[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
    """Fill a shard with the pieces that a shard of the same plan has exported."""
    tables = {table.spec.name: table for table in shard.tables}
    slots = {(shard.plan.param_of(slot.block).name, slot.block.offset): slot for slot in shard.dense.layout.slots}
    starts: dict[str, list[int]] = {}
    for name, offset in sorted(slots):
        starts.setdefault(name, []).append(offset)
    assembly = Assembly({_of_block(*key): slot.block.numel for key, slot in slots.items()}, "its own snapshot")
    counted: list[tuple[LivingTable, dict[str, Any], list[torch.Tensor]]] = []
    shard.prepare()
    for about, tensors in pieces:
        if DENSE in about:
            entries = []
            for entry in about[DENSE]:
                offsets = starts[entry["param"]]
                start = offsets[bisect_right(offsets, entry["offset"]) - 1]
                entries.append({**entry, "param": _of_block(entry["param"], start), "offset": entry["offset"] - start})
            assembly.add(entries, tensors)
        elif COUNTS in about:
            living = tables[about[COUNTS]]
            assert isinstance(living, LivingTable)
            counted.append((living, about, tensors))
        elif REMOVED in about:
            tables[about[TABLE]].remove(tensors[0].numpy())
        else:
            ids, *columns = [tensor.numpy() for tensor in tensors]
            tables[about[TABLE]].load(ids, dict(zip(about["columns"], columns, strict=True)))
    for living, about, tensors in counted:
        take_counts(living, about, tensors, shard.server, shard.plan.spec.settings.server_num)
    states: list[BlockState] = []
    for slot in shard.dense.layout.slots:
        whole, flat = assembly.whole(_of_block(shard.plan.param_of(slot.block).name, slot.block.offset))
        shard.dense.write(slot.position, whole.pop(VALUE))
        states.append((whole, flat))
    shard.dense.restore(states)


def _of_block(name: str, offset: int) -> str:
    return f"{name}[{offset}]"
