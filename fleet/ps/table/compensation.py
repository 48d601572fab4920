"""Delay compensation (Zheng et al., 2017) makes of a gradient what it would be on today's values, to first order.

A gradient ``g`` computed on ``b``, when the values are ``w`` by now, becomes ``g + lambda * g * g * (w - b)``. So the
server keeps, for each worker, the values it last handed to it: of dense blocks the snapshot that was sent, of rows the
rows. The adaptive variant divides lambda by the root of a running mean of the squared gradients, element by element.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fleet.numeric.differences import difference
from fleet.numeric.ids import gather, scatter
from fleet.numeric.jit import Array, Ids
from fleet.plan.layout import DenseLayout
from fleet.plan.specs import TableSpec
from fleet.ps.table.given import NOTHING, GivenPiece, Key, end_of, slots_of_piece
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.table import WEIGHT

#: The adaptive variant's running mean keeps this share of itself, and adds this under the root: the paper's values.
KEPT, EPSILON = 0.95, 1e-7
_SQUARES = "mean_square"


@dataclass
class Handed:
    """Holds what one worker was last given."""

    dense: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, MemoryStore] = field(default_factory=dict)


class Compensation:
    def __init__(self, strength: float, adaptive: bool) -> None:
        self._strength = strength
        self._adaptive = adaptive
        self._handed: dict[int, Handed] = {}
        self._dense_squares: dict[str, torch.Tensor] = {}
        self._row_squares: dict[int, MemoryStore] = {}

    def forget(self, worker: int) -> None:
        self._handed.pop(worker, None)

    def forget_all(self) -> None:
        self._handed.clear()

    # ---------------------------------------------------------------- for a server that goes on in its place

    def dump(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor] | list[Array]]]:
        """Yield everything that is kept, in parts: what they are, and the tensors."""
        for worker, handed in self._handed.items():
            yield {"worker": worker, "dense": [*handed.dense]}, [*handed.dense.values()]
            for table, rows in handed.rows.items():
                yield {"worker": worker, "table": table}, _rows_of(rows, WEIGHT, slice(0, len(rows)))
        yield {"dense": [*self._dense_squares]}, [*self._dense_squares.values()]
        for table, squares in self._row_squares.items():
            yield {"table": table}, _rows_of(squares, _SQUARES, slice(0, len(squares)))

    def restore(self, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Take one of these parts in the place of what there is. A server that was killed may not have told the
        others."""
        worker = about.get("worker")
        if "table" in about:
            rows, name = self._rows(worker)
            rows[about["table"]] = MemoryStore()
            _put(rows[about["table"]], name, *(each.numpy() for each in tensors))
            return
        dense = dict(zip(about["dense"], tensors, strict=True))
        if worker is None:  # which change in place
            self._dense_squares = {dtype: each.clone() for dtype, each in dense.items()}
        else:
            self._handed.setdefault(worker, Handed()).dense = dense

    # ---------------------------------------------------------------- for other servers

    @property
    def keys(self) -> list[Key]:
        squares = [(None, table) for table in (None, *self._row_squares)]
        return squares + [(worker, table) for worker, each in self._handed.items() for table in (None, *each.rows)]

    def piece(self, key: Key, start: int) -> GivenPiece:
        worker, table = key
        if worker is not None and worker not in self._handed:
            return NOTHING
        if table is None:
            dense = self._dense_squares if worker is None else self._handed[worker].dense
            return GivenPiece([*dense.values()], [*dense])
        rows, name = self._rows(worker)
        if table not in rows:
            return NOTHING
        column, count = rows[table].column(name), len(rows[table])
        here = slots_of_piece(start, count, column.like.shape[1] * column.dtype.itemsize)
        return GivenPiece(_rows_of(rows[table], name, here), stop=end_of(here, count))

    def like(self, spec: TableSpec) -> tuple[tuple[int, ...], str]:
        return (spec.dim,), spec.dtype

    def take_over(self, key: Key, piece: GivenPiece) -> None:
        worker, table = key
        if table is None:
            self.restore(
                {"worker": worker, "dense": piece.dtypes},
                [torch.as_tensor(each, device="cpu") for each in piece.tensors],
            )
            return
        rows, name = self._rows(worker)
        _put(rows.setdefault(table, MemoryStore()), name, *(np.asarray(each) for each in piece.tensors))

    def _rows(self, worker: int | None) -> tuple[dict[int, MemoryStore], str]:
        """Return what is kept of rows, of a worker or of none, and in which column."""
        if worker is None:
            return self._row_squares, _SQUARES
        return self._handed.setdefault(worker, Handed()).rows, WEIGHT

    # ---------------------------------------------------------------- what was handed out

    def handed_dense(self, worker: int, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Remember the ``snapshot`` that ``worker`` was given. Nobody may change it: workers that were given the same
        one share it."""
        self._handed.setdefault(worker, Handed()).dense = snapshot

    def handed_rows(self, worker: int, table: int, ids: Ids, rows: Array) -> None:
        kept = self._handed.setdefault(worker, Handed()).rows.setdefault(table, MemoryStore())
        distinct, first = np.unique(ids, return_index=True)
        _put(kept, WEIGHT, distinct, np.ascontiguousarray(rows[first]))

    # ---------------------------------------------------------------- what becomes of a gradient

    def dense(
        self,
        worker: int,
        layout: DenseLayout,
        full: DenseLayout,
        grads: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """Compensate in place. ``layout`` says which blocks have a gradient, ``full`` where they lie in ``values``."""
        handed = self._handed.get(worker, Handed()).dense
        for slot in layout.slots:
            old = handed.get(slot.dtype)
            whole = full.slots[slot.position]
            if old is None or old.numel() < whole.stop:
                continue
            grad, here = grads[slot.dtype][slot.start : slot.stop], slice(whole.start, whole.stop)
            drift = difference(values[slot.dtype][here], old[here])
            if self._adaptive:
                squares = self._dense_squares.setdefault(slot.dtype, torch.zeros_like(values[slot.dtype]))[here]
                squares.mul_(KEPT).addcmul_(grad, grad, value=1 - KEPT)
                drift /= (squares + EPSILON).sqrt_()
            grad.addcmul_(grad * grad, drift, value=self._strength)

    def rows(self, worker: int, table: int, ids: Ids, grads: Array, now: Array) -> Array:
        """Return the gradients of rows, compensated; ``now`` holds the rows' present values."""
        kept = self._handed.get(worker, Handed()).rows.get(table)
        if kept is None:
            return grads
        slots = kept.find(ids)
        old = now.copy()  # a row that was never handed out has not drifted
        gather(kept.column(WEIGHT), slots, old)
        drift = difference(torch.from_numpy(now), torch.from_numpy(old)).numpy()
        if self._adaptive:
            drift /= np.sqrt(self._mean_squares(table, ids, grads) + grads.dtype.type(EPSILON))
        compensated: Array = grads + grads.dtype.type(self._strength) * grads * grads * drift
        return compensated

    def _mean_squares(self, table: int, ids: Ids, grads: Array) -> Array:
        store = self._row_squares.setdefault(table, MemoryStore())
        store.ensure_column(_SQUARES, grads.shape[1], 0.0, grads.dtype)
        slots, before = store.insert(ids), np.empty_like(grads)
        gather(store.column(_SQUARES), slots, before)
        squares: Array = grads.dtype.type(KEPT) * before + grads.dtype.type(1 - KEPT) * grads * grads
        scatter(store.column(_SQUARES), slots, squares)
        return squares


def _rows_of(store: MemoryStore, name: str, here: slice) -> list[Array]:
    """Return the ids and one column of some rows, in order."""
    column, slots = store.column(name), np.arange(here.start, here.stop)
    values = np.empty((slots.size, column.like.shape[1]), column.dtype)
    gather(column, slots, values)
    return [store.ids(slots), values]


def _put(store: MemoryStore, name: str, ids: Ids, values: Array) -> None:
    store.ensure_column(name, values.shape[1], 0.0, values.dtype)
    slots = store.insert(ids)
    scatter(store.column(name), slots, values)
