"""A worker gives values to the servers: the initial ones, others by name, and what its script has changed by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from fleet.errors import UnsupportedError
from fleet.nn.table_weight import TableWeight
from fleet.numeric.ids import partition
from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import Slot
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.trained_model import Elements, TrainedModel

#: Values travel in requests of about this size.
UPLOAD_BYTES = 8 << 20


def initialize(
    connections: Connections, trained: TrainedModel, answers: Sequence[Any], first_param: int = 0, first_table: int = 0
) -> None:
    """Send servers that have none the values of their blocks and rows, from the given parameter and table on.
    ``answers`` say which servers these are. Worker 0 does this."""
    for server, (connection, answer) in enumerate(zip(connections.by_server, answers, strict=True)):
        if not answer.initialized:
            for frame in _initial_values(trained, server, len(answers), first_param, first_table):
                connection.call(Frame(connection.request(0, upload=frame.message), frame.tensors), "initial values")
            connection.call(Frame(connection.request(0, ready=pb.Ready())), "initial values")


def replace(
    connections: Connections,
    trained: TrainedModel,
    step: int,
    dense: Mapping[str, torch.Tensor],
    rows: Mapping[str, tuple[Array, torch.Tensor]],
) -> None:
    """Give the servers, after a step, other values of some parameters and rows, by name; rows come with their ids."""
    spec, by_server = trained.plan.spec, connections.by_server
    params = {index: dense[each.name] for index, each in enumerate(spec.params) if each.name in dense}
    for server, connection in enumerate(by_server):
        blocks = [slot for slot in trained.layouts[server].slots if slot.block.param in params]
        tables = (
            frame
            for index, each in enumerate(spec.tables)
            if each.name in rows
            for frame in _rows_of(server, len(by_server), index, *rows[each.name])
        )
        for frame in chain(_blocks_of(blocks, params), tables):
            frame.message.anew = True
            request = connection.request(step, upload=frame.message)
            connection.call(Frame(request, frame.tensors), "other values")


def send_edits(
    connections: Connections,
    trained: TrainedModel,
    step: int,
    dense: Mapping[int, Elements],
    rows: Sequence[tuple[int, Array, torch.Tensor]],
    *,
    with_step: bool = False,
) -> None:
    """Give the servers, after a step, some elements of parameters and some rows of tables, by their places in the plan.
    They hold at once, or rows with the next step; to send them again changes nothing."""
    servers = len(connections.by_server)
    for server, connection in enumerate(connections.by_server):
        blocks = _edited_blocks(trained.layouts[server].slots, dense)
        of_tables = (frame for index, ids, values in rows for frame in _rows_of(server, servers, index, ids, values))
        for frame in chain(blocks, of_tables):
            frame.message.edit, frame.message.with_step = True, with_step
            request = connection.request(step, upload=frame.message)
            connection.call(Frame(request, frame.tensors), "values that the script has changed")


def _edited_blocks(slots: Sequence[Slot], dense: Mapping[int, Elements]) -> Iterator[Frame]:
    """Yield uploads of the changed elements of these blocks."""
    for slot in slots:
        if slot.block.param in dense:
            mask, values = (each[slot.part or slice(None)] for each in dense[slot.block.param])
            if mask.all():
                marks = np.empty(0, np.uint8)
            elif mask.any():
                marks, values = np.packbits(mask.numpy()), values[mask]
            else:
                continue
            yield Frame(pb.Upload(blocks=[slot.position]), [WireTensor.of(marks), WireTensor.of(values)])


def _initial_values(
    trained: TrainedModel, server: int, servers: int, first_param: int, first_table: int
) -> Iterator[Frame]:
    described = trained.description
    slots = [slot for slot in trained.layouts[server].slots if slot.block.param >= first_param]
    yield from _blocks_of(slots, dict(enumerate(described.params)))
    for index, handle in enumerate(described.handles):
        if index >= first_table and handle.uploaded:
            if isinstance(handle.weight, TableWeight):
                raise UnsupportedError(
                    f"the rows of {handle.name!r} went to an earlier job's servers and are gone from this model",
                    expected=f"{handle.num_embeddings} rows to start from",
                    got=0,
                    todo="Build the model anew, or load a checkpoint with fleet.init_server(model_dir).",
                )
            weight = handle.weight.detach()
            yield from _rows_of(server, servers, index, np.arange(len(weight)), weight)


def _blocks_of(slots: Sequence[Slot], params: Mapping[int, torch.Tensor]) -> Iterator[Frame]:
    """Yield uploads of these blocks, with their values from ``params``."""
    upload, tensors, size = pb.Upload(), [], 0
    for slot in slots:
        values = params[slot.block.param].detach().reshape(-1)
        piece = WireTensor.of(values[slot.block.offset : slot.block.offset + slot.block.numel])
        upload.blocks.append(slot.position)
        tensors.append(piece)
        size += piece.array.nbytes
        if size >= UPLOAD_BYTES:
            yield Frame(upload, tensors)
            upload, tensors, size = pb.Upload(), [], 0
    yield Frame(upload, tensors)


def _rows_of(server: int, servers: int, index: int, ids: Array, rows: torch.Tensor) -> Iterator[Frame]:
    """Yield uploads of those of a table's rows that belong to a server."""
    rows_a_piece = max(1, UPLOAD_BYTES // max(1, rows.element_size() * rows.shape[1]))
    for start in range(0, len(ids), rows_a_piece):
        some = ids[start : start + rows_a_piece]
        here = partition(some, servers)[server]
        values = rows[torch.from_numpy(start + here).to(rows.device)]
        yield Frame(pb.Upload(rows=True, table=index), [WireTensor.of(some[here]), WireTensor.of(values)])
