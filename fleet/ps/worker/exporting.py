"""Reading a server's state piece by piece, for a checkpoint or to take it over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.client import ServerClient


def exported(client: ServerClient, step: int) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """What each piece is, and its tensors: first the dense blocks, then the tables. ``step`` is the worker's."""
    cursor = "dense:0"
    while cursor:
        request = client.request(step, export=pb.Export(cursor=cursor, version=step))
        reply = client.call(Frame(request), f"export of {cursor}")
        yield json.loads(reply.message.about), [tensor.torch() for tensor in reply.tensors]
        cursor = reply.message.cursor
