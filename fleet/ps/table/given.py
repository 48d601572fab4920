"""Says what there is to know of a record of what each worker was given, in modes whose servers keep one: how it goes on
in the place of another one, and how it moves to other servers.

It moves part by part, each with a key: of which worker (None: of all), and of which table (None: of dense values, which
have one tensor for each element type). Parts of tables come in pieces, ids first, so that they can be dealt anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fleet.checkpoint.pieces import PIECE_BYTES
from fleet.numeric.jit import Array
from fleet.plan.specs import TableSpec

#: A worker, or all; a table, or dense values.
Key = tuple[int | None, int | None]

_ID_BYTES = 8


class GivenPiece(NamedTuple):
    """Holds a piece of one part: its tensors, the element types of dense ones, and where the next piece begins."""

    tensors: Sequence[torch.Tensor | Array]
    dtypes: Sequence[str] = ()
    stop: int | None = None


#: What there is of a part whose worker has gone.
NOTHING = GivenPiece([])


class Given(Protocol):
    """Remembers what each worker was given."""

    def forget(self, worker: int) -> None: ...

    def dump(self) -> Iterator[tuple[dict[str, Any], Sequence[torch.Tensor | Array]]]:
        """Yield everything, for a server that goes on in this one's place."""

    def restore(self, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Take what another one has dumped."""

    @property
    def keys(self) -> Sequence[Key]:
        """Return which parts move to other servers."""

    def piece(self, key: Key, start: int) -> GivenPiece:
        """Return the piece of a part that begins there."""

    def like(self, spec: TableSpec) -> tuple[tuple[int, ...], str]:
        """Return the shape and the element type of what is kept beside each id of a table."""

    def take_over(self, key: Key, piece: GivenPiece) -> None:
        """Take a piece beside those that have come, as this server is to have it. It fits: ids are flat and ``like``
        says what is beside them, and dense values are as those of the server."""


def slots_of_piece(start: int, rows: int, row_bytes: int) -> slice:
    """Return which of so many rows of this size, beside their ids, are in the piece that begins there."""
    return slice(min(start, rows), min(rows, start + max(1, PIECE_BYTES // (row_bytes + _ID_BYTES))))


def end_of(here: slice, rows: int) -> int | None:
    """Return where the piece after this one begins, if there is one."""
    stop: int = here.stop
    return stop if stop < rows else None
