"""Between the user's parameters and what travels: a server's blocks end to end, one flat tensor an element type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fleet.ps import memory
from fleet.ps.layout import DenseLayout

#: By element type.
Flat = Mapping[str, torch.Tensor]


def pack(layout: DenseLayout, tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, Flat]:
    """Which blocks of a server are there, and these end to end. ``tensors`` has a flat one, or None, a parameter."""
    present = bytearray(len(layout.slots))
    packed: dict[str, torch.Tensor] = {}
    for dtype, cuts in layout.cuts.items():
        pieces = []
        for position, param, start, stop in cuts:
            tensor = tensors[param]
            if tensor is not None:
                present[position] = 1
                pieces.append(tensor if stop - start == tensor.numel() else tensor[start:stop])
        if pieces:
            packed[dtype] = _joined(pieces)
    return bytes(present), packed


def without_zeros(layout: DenseLayout, flat: Flat) -> tuple[bytes, Flat]:
    """Of all blocks end to end, those that are not zero all through."""
    present = bytearray(len(layout.slots))
    pieces: dict[str, list[torch.Tensor]] = {}
    for slot in layout.slots:
        piece = flat[slot.dtype][slot.start : slot.stop]
        if bool(piece.any()):
            present[slot.position] = 1
            pieces.setdefault(slot.dtype, []).append(piece)
    return bytes(present), flat if all(present) else {dtype: _joined(pieces[dtype]) for dtype in sorted(pieces)}


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    out = memory.take_flat(sum(piece.numel() for piece in pieces), pieces[0].dtype)
    return torch.cat(list(pieces), out=out)


class ParameterWriter:
    """Writes the values of all blocks of every server into the parameters, in place.

    The places to write to are looked up once, and again when a parameter's memory has become another.
    """

    def __init__(self, params: Sequence[torch.Tensor], layouts: Sequence[DenseLayout]) -> None:
        self._params = params
        self._layouts = layouts
        self._memory: list[tuple[int, tuple[int, ...]]] | None = None
        #: for each server and element type, where its blocks go, and how long they are
        self._places: list[dict[str, tuple[list[torch.Tensor], list[int]]]] = []
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def write(self, flats: Sequence[Flat]) -> None:
        memory_now = [(param.data_ptr(), param.stride()) for param in self._params]
        if memory_now != self._memory:
            self._memory = memory_now
            self._look_up()
        for places, flat in zip(self._places, flats, strict=True):
            for dtype, (targets, sizes) in places.items():
                torch._foreach_copy_(targets, torch.split_with_sizes(flat[dtype], sizes))
        for param, detour in self._detours:
            param.copy_(detour)

    def _look_up(self) -> None:
        # What is detached shares the version counter: a stale graph is an error, as in torch.
        detached = [param.detach() for param in self._params]
        # Blocks are ranges of the parameter read row by row; memory laid out otherwise needs a detour.
        dense = [data.contiguous() for data in detached]
        self._detours = [pair for pair in zip(detached, dense, strict=True) if not pair[0].is_contiguous()]
        flat = [data.view(-1) for data in dense]

        def places(cuts: Sequence[tuple[int, int, int, int]]) -> tuple[list[torch.Tensor], list[int]]:
            targets = [flat[param][start:stop] for _, param, start, stop in cuts]
            return targets, [target.numel() for target in targets]

        self._places = [{dtype: places(cuts) for dtype, cuts in layout.cuts.items()} for layout in self._layouts]
