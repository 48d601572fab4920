"""Gradients may come ahead of their push, while the worker's backward still runs.

They are kept, for each worker those of one attempt, and count for nothing until a push names that attempt: a backward
that fails, or is not followed by its step, has done nothing. What is kept is at most what a push may bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet.errors import ProtocolError
from fleet.numeric import buffers
from fleet.numeric.tensors import WireTensor
from fleet.ps.table.dense_blocks import DenseBlocks, Gradient


@dataclass(frozen=True)
class _Begun:
    """Holds what has come of a push; ``flats`` have room for all blocks, of which ``present`` marks those that have
    come."""

    named: tuple[int, int]  #: step and attempt
    present: bytearray
    flats: Mapping[str, torch.Tensor]


class EarlyGradients:
    def __init__(self) -> None:
        self._by_worker: dict[int, _Begun] = {}

    def add(self, request: Any, tensors: Sequence[WireTensor], dense: DenseBlocks) -> None:
        part, named = request.part, (request.step, request.part.attempt)
        if len(tensors) != len(part.blocks):
            raise ProtocolError("a part's blocks and tensors differ in number")
        values = [tensor.torch() for tensor in tensors]
        for position, each in zip(part.blocks, values, strict=True):
            dense.check_values(position, each)
        begun = self._by_worker.get(request.worker)
        if begun is None or begun.named != named or len(begun.present) != len(dense.layout.slots):
            sizes = dense.layout.sizes
            flats = {dtype: buffers.take_flat(size, getattr(torch, dtype)) for dtype, size in sizes.items()}
            begun = self._by_worker[request.worker] = _Begun(named, bytearray(len(dense.layout.slots)), flats)
        for position, each in zip(part.blocks, values, strict=True):
            slot = dense.layout.slots[position]
            begun.flats[slot.dtype][slot.start : slot.stop] = each.view(-1)
            begun.present[position] = 1

    def joined(self, request: Any, rest: Gradient, dense: DenseBlocks) -> Gradient:
        """Return a push's gradient with the parts that came ahead of it."""
        begun = self._by_worker.pop(request.worker, None)
        present, flats = rest
        if begun is None or begun.named != (request.step, request.push.attempt):
            raise ProtocolError(
                "the parts that came ahead of a push are not here", got=f"attempt {request.push.attempt}"
            )
        if any(map(min, begun.present, present)):
            raise ProtocolError("a block came ahead of its push, and with it")
        for dtype, here, place in dense.layout.places(present):
            begun.flats[dtype][place] = flats[dtype][here]
        both = bytes(map(max, begun.present, present))
        if all(both):
            return both, begun.flats
        pieces: dict[str, list[torch.Tensor]] = {}
        for dtype, _, place in dense.layout.places(both):
            pieces.setdefault(dtype, []).append(begun.flats[dtype][place])
        return both, {dtype: torch.cat(pieces[dtype]) for dtype in sorted(pieces)}

    def forget(self, worker: int) -> None:
        self._by_worker.pop(worker, None)
