"""A shard is filled with what the shards of other servers have exported, each of which had other blocks and rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.manifest import COUNTS, DENSE, TABLE
from fleet.errors import CheckpointError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.checkpoint_reader import reach_step, restore_piece, take_counts, write_whole
from fleet.ps.table.given import GivenPiece
from fleet.ps.table.living_table import LivingTable
from fleet.ps.table.shard import Shard
from fleet.ps.wire.move_names import GIVEN

#: What comes of reading what is not as it should be.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
#: So much is said of what does not fit.
_MOST_REASON = 300


class Refill:
    """Takes pieces in any order, each once."""

    def __init__(self, shard: Shard, where: str) -> None:
        self._shard = shard
        self._where = where
        self._tables = {table.spec.name: table for table in shard.tables}
        here = [shard.plan.param_of(slot.block) for slot in shard.dense.layout.slots]
        #: taken when all rows are there
        self._counted: list[tuple[LivingTable, Mapping[str, Any], Sequence[torch.Tensor]]] = []
        self._assembly = Assembly({param.name: param.numel for param in here}, where)
        shard.prepare()

    def add(self, text: str, tensors: Sequence[WireTensor]) -> None:
        """Take a piece of an export, which ``text`` tells of; what belongs to other servers is left out."""
        try:
            about = json.loads(text)
            if DENSE in about:
                self._assembly.add(about[DENSE], [tensor.torch() for tensor in tensors])
            elif GIVEN in about:
                self._take_given(about, tensors)
            elif COUNTS in about:
                self._counted.append((self._living(about[COUNTS]), about, [tensor.torch() for tensor in tensors]))
            else:
                arrays = [tensor.numpy() for tensor in tensors]
                table, server = self._tables[about[TABLE]], self._shard.server
                reach_step(table, about)
                restore_piece(table, about, arrays, self._shard, server, keeps_state=True)
        except UNREADABLE as error:
            raise ProtocolError(
                "a piece of a server's state does not fit", where=self._where, got=repr(error)
            ) from None

    def _take_given(self, about: Mapping[str, Any], tensors: Sequence[WireTensor]) -> None:
        worker, table = about[GIVEN]
        readers = self._shard.readers
        if readers is None or any(each is not None and (type(each) is not int or each < 0) for each in (worker, table)):
            raise LookupError("nobody remembers that here")
        if table is None:
            dtypes, sizes = about["dtypes"], self._shard.dense.layout.sizes
            _check_fit([(dtype, (sizes[dtype],)) for dtype in dict.fromkeys(dtypes)], tensors)
            readers.take_over((worker, table), GivenPiece([tensor.torch() for tensor in tensors], dtypes))
            return
        shape, dtype = readers.like(self._shard.table(table).spec)
        rows = tensors[0].array.size
        _check_fit([("int64", (rows,)), (dtype, (rows, *shape))], tensors)
        readers.take_over((worker, table), GivenPiece([tensor.numpy() for tensor in tensors]))

    def _living(self, name: str) -> LivingTable:
        table = self._tables[name]
        if not isinstance(table, LivingTable):
            raise TypeError(f"the table {name!r} counts nothing")
        return table

    def end(self) -> None:
        """Write the parameters, all pieces of which have come, and what was counted of ids without a row."""
        for living, about, tensors in self._counted:
            take_counts(living, about, tensors, self._shard.server, self._shard.plan.spec.settings.server_num)
        try:
            write_whole(self._shard, self._assembly, lacks=lambda _: False, keeps_state=lambda _: True)
        except CheckpointError as error:
            raise ProtocolError("the state of the servers is not whole", where=self._where, got=str(error)) from None


def _check_fit(wanted: Sequence[tuple[str, tuple[int, ...]]], tensors: Sequence[WireTensor]) -> None:
    got = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    if got != wanted:
        raise ValueError(f"{wanted} were expected, and not {got}"[:_MOST_REASON])
