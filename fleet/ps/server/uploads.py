"""Values that a worker uploads: blocks of dense parameters by their position, or rows of a table with their ids."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.errors import ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import Plan
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb


def check_upload(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]) -> None:
    """Refuse what does not fit when it comes: later it would be everybody's problem."""
    if upload.rows:
        if len(tensors) != 2:
            raise ProtocolError("an upload of rows needs ids and values", got=len(tensors))
        shard.check_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
    else:
        if len(tensors) != len(upload.blocks):
            raise ProtocolError("an upload's blocks and tensors differ in number")
        for position, tensor in zip(upload.blocks, tensors, strict=True):
            shard.dense.check_values(position, tensor.torch())


def write_upload(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor], after: Plan | None = None) -> None:
    """``after``: what this plan has stays as it is."""
    first_block, first_table = (0, 0) if after is None else (len(after.by_server[shard.server]), len(after.spec.tables))
    if upload.rows and upload.table >= first_table:
        shard.upload_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
    elif not upload.rows:
        for position, tensor in zip(upload.blocks, tensors, strict=True):
            if position >= first_block:
                shard.dense.write(position, tensor.torch())
