"""Deals a push anew that waits on servers to become part of an update, for others: its worker has gone on.

Each server has its part of it. Put together they are what the worker has pushed, and are cut once more for those to
come. Nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet.numeric.ids import partition
from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.plan.plan import Plan
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.row_tensors import order_of, runs_of
from fleet.ps.worker.push import cut, end_to_end, rows_joined


@dataclass(frozen=True)
class Part:
    """Holds what one server has of a push; ``about`` is empty where it has nothing."""

    about: Mapping[str, Any]
    tensors: Sequence[WireTensor]


def layouts_of(plan: Plan) -> list[DenseLayout]:
    return [dense_layout(plan, server) for server in range(plan.spec.settings.server_num)]


def dealt(parts: Sequence[Part], former: Plan, plan: Plan, token: int) -> Iterator[tuple[pb.Push, list[WireTensor]]]:
    """Yield for each server of a plan its part of the push of which servers of the ``former`` one had these; the first
    of these has some part in any case. ``token`` is the push's."""
    dense, rows, weights = _put_together(parts, former)
    said, specs = parts[0].about, plan.spec.tables
    servers = plan.spec.settings.server_num
    read_at = {
        table: clock
        for part in parts
        if part.about
        for table, clock in zip(part.about["tables"], part.about["rows_read_at"], strict=True)
    }
    by_table = {
        index: _partitioned([*rows[index], *([weights[index]] if index in weights else [])], servers)
        for index in sorted(rows, key=lambda index: order_of(specs[index]))
    }
    for server, layout in enumerate(layouts_of(plan)):
        present, blocks = cut(layout, dense)
        sizes = layout.sizes_of(present)
        here = {index: each[server] for index, each in by_table.items() if len(each[server][0])}
        push = pb.Push(
            options=said["options"],
            present=present,
            row_tables=list(here),
            used_tables=said["used"],
            quiet=True,
            steps=1,
            read_at=said["read_at"],
            rows_read_at=[read_at[index] for index in here],
            row_counts=[len(ids) for ids, *_ in here.values()],
            now=said["now"],
            own_seconds=said["own_s"],
            token=token,
            unplaced=server > 0,
            plain=True,
        )
        of_dense = [end_to_end(pieces, sizes[dtype]) for dtype, pieces in blocks.items()]
        yield push, [*of_dense, *_joined(here, plan)]


def _put_together(
    parts: Sequence[Part], plan: Plan
) -> tuple[list[torch.Tensor | None], dict[int, list[Array]], dict[int, Array]]:
    """Return the flat gradient of each parameter, ids with gradients of each table, and weights where there are any."""
    dense: list[torch.Tensor | None] = [None] * len(plan.spec.params)
    rows: dict[int, list[list[Array]]] = {}
    weights: dict[int, list[Array]] = {}
    for layout, part in zip(layouts_of(plan), parts, strict=True):
        if not part.about:
            continue
        tensors, about, present = iter(part.tensors), part.about, bytes.fromhex(part.about["present"])
        flats = {dtype: next(tensors).torch() for dtype in layout.sizes_of(present)}
        slots = [slot for slot in layout.slots if present[slot.position]]
        for slot, (dtype, here, _) in zip(slots, layout.places(present), strict=True):
            whole = dense[slot.block.param]
            if whole is None:
                numel = plan.spec.params[slot.block.param].numel
                dense[slot.block.param] = whole = torch.zeros(numel, dtype=flats[dtype].dtype, device="cpu")
            whole[slot.part or slice(None)] = flats[dtype][here]
        for table in about["tables"]:
            rows.setdefault(table, []).append([next(tensors).array, next(tensors).array])
        for table in about["weighed"]:
            weights.setdefault(table, []).append(next(tensors).array)
    return (
        dense,
        {table: [np.concatenate(each) for each in zip(*found, strict=True)] for table, found in rows.items()},
        {table: np.concatenate(found) for table, found in weights.items()},
    )


def _partitioned(arrays: Sequence[Array], servers: int) -> list[list[Array]]:
    """Split what there is of some rows by server; ids come first."""
    if servers == 1:
        return [[*arrays]]
    return [[each[part] for each in arrays] for part in partition(arrays[0], servers)]


def _joined(here: Mapping[int, Sequence[Array]], plan: Plan) -> list[WireTensor]:
    """Return what travels of all tables that have rows for a server, as in any push."""
    if not here:
        return []
    specs, parts = [plan.spec.tables[index] for index in here], [[*map(WireTensor.of, each)] for each in here.values()]
    tensors = [rows_joined([ids for ids, *_ in parts])]
    tensors += [rows_joined([each[1] for each in parts[run]]) for run in runs_of(specs)]
    weighed = [each[-1] for each, spec in zip(parts, specs, strict=True) if spec.goes_by_weight]
    return [*tensors, rows_joined(weighed)] if weighed else tensors
