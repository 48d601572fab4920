"""Between the user's parameters and what travels: a server's blocks end to end, one flat tensor an element type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fleet.ps.layout import DenseLayout

#: By element type.
Flat = Mapping[str, torch.Tensor]


def pack(layout: DenseLayout, tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, Flat]:
    """Which blocks of a server are there, and these end to end. ``tensors`` has a flat one, or None, a parameter."""
    pieces: dict[str, list[torch.Tensor]] = {}
    present = bytearray(len(layout.slots))
    for slot in layout.slots:
        tensor = tensors[slot.block.param]
        if tensor is not None:
            present[slot.position] = 1
            pieces.setdefault(slot.dtype, []).append(tensor[slot.block.offset : slot.block.offset + slot.block.numel])
    return bytes(present), {dtype: torch.cat(pieces[dtype]) for dtype in sorted(pieces)}


def without_zeros(layout: DenseLayout, flat: Flat) -> tuple[bytes, Flat]:
    """Of all blocks end to end, those that are not zero all through."""
    present = bytearray(len(layout.slots))
    pieces: dict[str, list[torch.Tensor]] = {}
    for slot in layout.slots:
        piece = flat[slot.dtype][slot.start : slot.stop]
        if bool(piece.any()):
            present[slot.position] = 1
            pieces.setdefault(slot.dtype, []).append(piece)
    return bytes(present), flat if all(present) else {dtype: torch.cat(pieces[dtype]) for dtype in sorted(pieces)}


@torch.no_grad()
def unpack(params: Sequence[torch.Tensor], layouts: Sequence[DenseLayout], flats: Sequence[Flat]) -> None:
    """Write the values of all blocks of every server into the parameters, in place."""
    scattered: dict[int, torch.Tensor] = {}
    for layout, flat in zip(layouts, flats, strict=True):
        for slot in layout.slots:
            position, block = slot.block.param, slot.block
            data = params[position].detach()  # shares the version counter: a stale graph is an error, as in torch
            if not data.is_contiguous():
                # Blocks are ranges of the parameter read row by row; memory laid out otherwise needs a detour.
                data = scattered.setdefault(position, data.contiguous())
            target = data.view(-1)[block.offset : block.offset + block.numel]
            target.copy_(flat[slot.dtype][slot.start : slot.stop])
    for position, data in scattered.items():
        params[position].detach().copy_(data)
