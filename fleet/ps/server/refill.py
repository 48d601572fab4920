"""A shard is filled with what the shards of other servers have exported, each of which had other blocks and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.manifest import DENSE, TABLE
from fleet.errors import CheckpointError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.checkpoint_reader import restore_piece, write_whole
from fleet.ps.table.shard import Shard


class Refill:
    """Takes pieces in any order, each once."""

    def __init__(self, shard: Shard, where: str) -> None:
        self._shard = shard
        self._where = where
        self._tables = {table.spec.name: table for table in shard.tables}
        here = [shard.plan.param_of(slot.block) for slot in shard.dense.layout.slots]
        self._assembly = Assembly({param.name: param.numel for param in here}, where)
        shard.prepare()

    def add(self, about: Mapping[str, Any], tensors: Sequence[WireTensor]) -> None:
        """Take a piece of an export; what belongs to other servers is left out."""
        try:
            if DENSE in about:
                self._assembly.add(about[DENSE], [tensor.torch() for tensor in tensors])
            else:
                arrays = [tensor.numpy() for tensor in tensors]
                table, server = self._tables[about[TABLE]], self._shard.server
                restore_piece(table, about, arrays, self._shard, server, keeps_state=True)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(
                "a piece of a server's state does not fit", where=self._where, got=repr(error)
            ) from None

    def end(self) -> None:
        """Write the parameters, all pieces of which have come."""
        try:
            write_whole(self._shard, self._assembly, lacks=lambda _: False, keeps_state=lambda _: True)
        except CheckpointError as error:
            raise ProtocolError("the state of the servers is not whole", where=self._where, got=str(error)) from None
