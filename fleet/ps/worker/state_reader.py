"""Reads a server's state piece by piece, for a checkpoint or to take it over."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fleet.ps.table.shard import FIRST, Piece
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connection


def exported(connection: Connection, step: int, checkpoint: str = "") -> Iterator[Piece]:
    """Yield the pieces of a server's state: first the dense blocks, then the tables. ``step`` is the worker's; with a
    ``checkpoint`` that the server has begun they are what belongs into that."""
    cursor = FIRST
    while cursor:
        export = pb.Export(cursor=cursor, version=step, checkpoint=checkpoint)
        reply = connection.call(Frame(connection.request(step, export=export)), f"export of {cursor}")
        cursor, about = reply.message.cursor, json.loads(reply.message.about)
        names = about.pop("tensors")
        yield Piece(about, dict(zip(names, (tensor.torch() for tensor in reply.tensors), strict=True)), cursor)
