"""Rows of many tables travel as few tensors.

The ids of all tables of a request are one tensor: those of each lie behind those of the one before, and the request
says how many they are. Rows lie in the same order, and are one tensor for every run of neighbours among the tables that
have rows of one width and element type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, groupby

import numpy as np

from fleet.errors import ProtocolError
from fleet.numeric.jit import Ids
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import TableSpec


def runs_of(tables: Sequence[TableSpec]) -> list[slice]:
    """Return the runs of neighbours whose rows travel as one tensor, as places among the tables."""
    return alike([(table.dim, table.dtype) for table in tables], slice(0, len(tables)))


def order_of(table: TableSpec) -> tuple[int, str, int]:
    """Return by what a worker orders tables, so that those of one kind are neighbours."""
    return table.dim, table.dtype, table.group


def alike(kinds: Sequence[Hashable], places: slice) -> list[slice]:
    """Cut some places into runs of one kind each."""
    if len({*kinds[places]}) == 1:  # as mostly
        return [places]
    runs = []
    for _, group in groupby(range(places.start, places.stop), kinds.__getitem__):
        first, *rest = group
        runs.append(slice(first, rest[-1] + 1 if rest else first + 1))
    return runs


def ids_of(tensors: Sequence[WireTensor], counts: Iterable[int]) -> tuple[Ids, Ids]:
    """Return the ids of all tables, and where those of each end, out of what travelled: the first tensor, or none where
    there are no tables."""
    ends = [*accumulate(counts)]
    ids = tensors[0].array if ends and tensors else _NONE
    if ids.ndim != 1 or ids.dtype != np.int64 or ids.size != (ends[-1] if ends else 0):
        raise ProtocolError(
            "ids must be a flat int64 tensor, with those of all tables",
            expected=f"{ends[-1] if ends else 0} ids",
            got=f"{ids.dtype} {ids.shape}",
        )
    return ids, np.array(ends, np.int64)


_NONE = np.empty(0, np.int64)
