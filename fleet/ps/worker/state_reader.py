"""Reads a server's state piece by piece, for a checkpoint or to take it over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from fleet.ps.table.shard import FIRST, Piece
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connection, Connections


def exported(connection: Connection, step: int, checkpoint: str = "") -> Iterator[Piece]:
    """Yield the pieces of a server's state: first the dense blocks, then the tables. ``step`` is the worker's; with a
    ``checkpoint`` that the server has begun they are what belongs into that."""
    cursor = FIRST
    while cursor:
        export = pb.Export(cursor=cursor, version=step, checkpoint=checkpoint)
        reply = connection.call(Frame(connection.request(step, export=export)), f"export of {cursor}")
        cursor, about = reply.message.cursor, json.loads(reply.message.about)
        names = about.pop("tensors")
        if about:
            yield Piece(about, dict(zip(names, (tensor.torch() for tensor in reply.tensors), strict=True)), cursor)


def dense_record(
    connection: Connection, step: int, *, begins: bool
) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Yield what the checkpoint that the job has gone on from has of dense parameters: what it is, and the tensors.
    ``begins`` says that no worker has any values."""
    cursor = "origin:0" if begins else "record:0"
    while cursor:
        request = connection.request(step, export=pb.Export(cursor=cursor))
        reply = connection.call(Frame(request), f"export of {cursor}")
        cursor = reply.message.cursor
        yield json.loads(reply.message.about), [tensor.torch() for tensor in reply.tensors]


def exported_dense(connections: Connections, step: int) -> Iterator[Piece]:
    """Yield the pieces of all servers' dense blocks."""
    for connection in connections.by_server:
        for piece in exported(connection, step):
            if "dense" not in piece.about:
                break
            yield piece
