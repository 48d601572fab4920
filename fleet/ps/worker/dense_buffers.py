"""Between the user's parameters and what travels: a server's blocks end to end, one flat tensor an element type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from fleet.errors import ProtocolError
from fleet.numeric import buffers as memory
from fleet.numeric.scatter import LARGEST, Scattered
from fleet.numeric.tensors import EndToEnd, WireTensor
from fleet.plan.layout import DenseLayout

#: From so many small blocks on they are written by compiled code: to load it takes what it gains in a thousand steps.
MANY = 256

#: Blocks that are smaller on the average leave in a copy.
COPIED = 32 << 10

#: By element type.
Flat = Mapping[str, torch.Tensor]


def nbytes(layout: DenseLayout) -> int:
    """What all blocks of a server weigh."""
    return sum(numel * int(getattr(torch, dtype).itemsize) for dtype, numel in layout.sizes.items())


def cut(layout: DenseLayout, tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, dict[str, list[torch.Tensor]]]:
    """Which blocks of a server are there, and these, by element type in their order. ``tensors`` has a flat one, or
    None, a parameter."""
    present = bytes([tensors[param] is not None for param in layout.params])
    pieces = {
        dtype: [
            tensor if part is None else tensor[part]
            for _, param, part in cuts
            if (tensor := tensors[param]) is not None
        ]
        for dtype, cuts in layout.cuts.items()
    }
    return present, {dtype: blocks for dtype, blocks in pieces.items() if blocks}


def pack(layout: DenseLayout, tensors: Sequence[torch.Tensor]) -> Flat:
    """All blocks of a server end to end."""
    return {dtype: joined(blocks, layout.sizes[dtype]) for dtype, blocks in cut(layout, tensors)[1].items()}


def without_zeros(layout: DenseLayout, flat: Flat) -> tuple[bytes, Flat]:
    """Of all blocks end to end, those that are not zero all through."""
    present = bytearray(len(layout.slots))
    pieces: dict[str, list[torch.Tensor]] = {}
    for slot in layout.slots:
        piece = flat[slot.dtype][slot.start : slot.stop]
        if bool(piece.any()):
            present[slot.position] = 1
            pieces.setdefault(slot.dtype, []).append(piece)
    marks = bytes(present)
    if all(marks):
        return marks, flat
    return marks, {dtype: joined(pieces[dtype], size) for dtype, size in layout.sizes_of(marks).items()}


@torch.no_grad()
def joined(pieces: list[torch.Tensor], size: int) -> torch.Tensor:
    """Flat tensors end to end, ``size`` elements together, in memory of their own."""
    return torch.cat(pieces, out=memory.take_flat(size, pieces[0].dtype))


def end_to_end(pieces: list[torch.Tensor], size: int) -> WireTensor:
    """The same as one tensor that travels: large ones from where they are, small ones in a copy, which costs less than
    to send each."""
    if size * pieces[0].itemsize < len(pieces) * COPIED:
        return WireTensor.of(joined(pieces, size))
    return EndToEnd(pieces)


class ParameterWriter:
    """Writes the values of all blocks of every server into the parameters, in place.

    The places to write to are looked up once, and again when a parameter's memory has become another.
    """

    def __init__(self, params: Sequence[torch.Tensor], layouts: Sequence[DenseLayout]) -> None:
        self._params = params
        self._layouts = layouts
        self._memory: tuple[list[int], list[object]] | None = None
        #: for each server and element type, where its blocks go
        self._places: list[dict[str, _Places]] = []
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def write(self, flats: Sequence[Flat]) -> None:
        memory_now: tuple[list[int], list[object]] = (
            [param.data_ptr() for param in self._params],
            [param.is_contiguous() or param.stride() for param in self._params],
        )
        if memory_now != self._memory:
            self._memory = memory_now
            self._look_up()
        for places, flat in zip(self._places, flats, strict=True):
            for dtype, each in places.items():
                each.write(flat[dtype])
        for param, detour in self._detours:
            param.copy_(detour)

    def _look_up(self) -> None:
        # What is detached shares the version counter: a stale graph is an error, as in torch.
        detached = [param.detach() for param in self._params]
        # Blocks are ranges of the parameter read row by row; memory laid out otherwise needs a detour.
        dense = [data.contiguous() for data in detached]
        self._detours = [pair for pair in zip(detached, dense, strict=True) if not pair[0].is_contiguous()]
        flat = [data.view(-1) for data in dense]
        self._places = [
            {
                dtype: _Places([flat[param][part or ...] for _, param, part in cuts])
                for dtype, cuts in layout.cuts.items()
            }
            for layout in self._layouts
        ]


class _Places:
    """Where the blocks of a flat tensor go, one after the other."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        stops = list(accumulate(target.numel() for target in targets))
        placed = list(zip([0, *stops], stops, targets, strict=False))
        small = [each for each in placed if _is_small(each[2])]
        if len(small) < MANY:
            small, large = [], placed
        else:
            large = [each for each in placed if not _is_small(each[2])]
        self._form = targets[0].dtype, (stops[-1],)
        self._small = Scattered([(start * target.itemsize, target) for start, _, target in small])
        self._large = [target for _, _, target in large]
        self._ranges = [slice(start, stop) for start, stop, _ in large]
        self._sizes = [target.numel() for target in targets]

    def write(self, flat: torch.Tensor) -> None:
        if (flat.dtype, flat.shape) != self._form:  # compiled code would read on behind its end
            got = flat.dtype, tuple(flat.shape)
            raise ProtocolError("a server's dense values do not fit", expected=self._form, got=got)
        self._small.fill(flat)
        if len(self._large) == len(self._sizes):
            torch._foreach_copy_(self._large, torch.split_with_sizes(flat, self._sizes))
        elif self._large:
            torch._foreach_copy_(self._large, [flat[each] for each in self._ranges])


def _is_small(target: torch.Tensor) -> bool:
    return target.is_cpu and target.nbytes <= LARGEST
