"""What a worker pushed, out of its request: every size is checked against the plan before it becomes part of a round,
and before memory is taken for what travelled in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.errors import PlanMismatchError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import DTYPES
from fleet.ps.server.early_gradients import EarlyGradients
from fleet.ps.table.shard import Contribution, Shard
from fleet.ps.wire.low_precision import Narrow


def contribution_of(
    request: Any,
    tensors: Sequence[WireTensor],
    shard: Shard,
    parts: EarlyGradients,
    endpoint: Endpoint,
    most_bytes: int,
) -> Contribution:
    push, present = request.push, bytes(request.push.present)
    if len(present) != len(shard.dense.layout.slots):
        raise PlanMismatchError(
            f"worker {request.worker} pushes gradients of other parameters than the job has",
            where=f"{endpoint}",
            expected=f"{len(shard.dense.layout.slots)} blocks",
            got=f"{len(present)}",
            todo="If a param group was added, add it on every worker, after the same step.",
        )
    narrow = Narrow(shard.plan.spec.settings.wire_dtype)
    sizes = shard.dense.layout_of(present).sizes
    of_dense = sum(map(narrow.parts, sizes))
    tables = {index: shard.table(index).spec for index in push.row_tables}
    if len(tables) != len(push.row_tables):
        raise ProtocolError("a push names a table twice", got=list(push.row_tables)[:20])
    if len(tensors) != of_dense + sum(1 + narrow.parts(table.dtype) for table in tables.values()):
        raise ProtocolError("a push has the wrong number of tensors", got=len(tensors))
    if len(push.rows_read_at) != len(push.row_tables):
        raise ProtocolError("a push does not say when its rows were read", got=len(push.rows_read_at))
    rest = list(tensors[of_dense:])
    rows, nbytes = {}, 0
    for index, table in tables.items():
        ids, *encoded = rest[: 1 + narrow.parts(table.dtype)]
        del rest[: 1 + len(encoded)]
        nbytes += ids.array.size * table.dim * DTYPES[table.dtype]
        if not narrow.is_plain and nbytes > most_bytes:
            raise ProtocolError(
                "a push has more rows than a message may hold",
                expected=f"at most {most_bytes >> 20} MiB, in {table.dtype} (FLEET_MAX_MESSAGE_MB)",
                got=f"{nbytes / (1 << 20):.1f} MiB",
            )
        grads = narrow.decode(encoded, table.dtype, (ids.array.size, table.dim))
        rows[index] = (ids.numpy(), grads.numpy())
    dense = present, narrow.decode_flats(tensors[:of_dense], sizes)
    contribution = Contribution(
        worker=request.worker,
        options=tuple(push.options),
        dense=parts.joined(request, dense, shard.dense) if push.attempt else dense,
        rows=rows,
        used=frozenset(push.used_tables) | frozenset(push.row_tables),
        read_at=push.read_at,
        rows_read_at=dict(zip(push.row_tables, push.rows_read_at, strict=True)),
    )
    shard.check(contribution)
    return contribution
