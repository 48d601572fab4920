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

from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.plan.plan import Plan
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.wire.row_tensors import order_of
from fleet.ps.worker.push import by_server, cut, end_to_end, tables_joined


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
        index: by_server([*map(WireTensor.of, [*rows[index], *weights.get(index, [])])], servers)
        for index in sorted(rows, key=lambda index: order_of(specs[index]))
    }
    for server, layout in enumerate(layouts_of(plan)):
        present, blocks = cut(layout, dense)
        sizes = layout.sizes_of(present)
        here = {index: each[server] for index, each in by_table.items() if len(each[server][0].array)}
        push = pb.Push(
            options=said["options"],
            present=present,
            row_tables=list(here),
            used_tables=said["used"],
            quiet=True,
            steps=1,
            read_at=said["read_at"],
            rows_read_at=[read_at[index] for index in here],
            row_counts=[len(ids.array) for ids, *_ in here.values()],
            now=said["now"],
            own_seconds=said["own_s"],
            token=token,
            unplaced=server > 0,
            plain=True,
        )
        of_dense = [end_to_end(pieces, sizes[dtype]) for dtype, pieces in blocks.items()]
        yield push, [*of_dense, *tables_joined(here, specs, Narrow(None))]


def _put_together(
    parts: Sequence[Part], plan: Plan
) -> tuple[list[torch.Tensor | None], dict[int, list[Array]], dict[int, list[Array]]]:
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
        {table: [np.concatenate(found)] for table, found in weights.items()},
    )
