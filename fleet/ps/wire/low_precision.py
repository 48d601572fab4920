"""Gradients travel in fewer bits than float32 or float64 where the job has a ``wire_dtype``.

A tensor is taken in lines, the rows of a matrix or 256 elements of a flat one. For fp16 and int8 each line is divided
by a scale that travels beside it, so that its largest element becomes the largest number in use: gradients are often
too small for float16, and always for int8. Where such a line holds NaN or an infinity, all of it arrives as NaN.
bfloat16 has the range of float32 and needs no scale.

Sender and receiver read what travels by the same function, so the sender knows to the bit what rounding has left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from fleet.errors import ProtocolError
from fleet.numeric import buffers
from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor, dtype_name

#: Elements of a flat tensor that share a scale: it costs 1.6 % of float32's bytes.
LINE = 256

_ELEMENTS_AT_ONCE = 1 << 16

#: Element types that are made narrower; the others are narrow already.
WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Format:
    dtype: str
    #: what a line's largest element becomes; None for numbers that need no scale
    largest: float | None = None

    @property
    def parts(self) -> int:
        return 1 if self.largest is None else 2

    @property
    def is_whole(self) -> bool:
        """Say whether the format holds whole numbers only, so that the small elements of a line are rounded to
        nothing."""
        return self.dtype == "int8"


FORMATS = {"bf16": Format("bfloat16"), "fp16": Format("float16", 2.0**15), "int8": Format("int8", 127.0)}


class Narrow:
    """Encodes a job's gradients for the wire; without a ``wire_dtype`` they travel as they are."""

    def __init__(self, wire_dtype: str | None) -> None:
        self._format = None if wire_dtype is None else FORMATS[wire_dtype]

    @property
    def is_plain(self) -> bool:
        return self._format is None

    @property
    def is_whole(self) -> bool:
        return self._format is not None and self._format.is_whole

    def of(self, dtype: str) -> Format | None:
        """Return the format in which tensors of an element type travel, if not in their own."""
        return self._format if dtype in WIDE else None

    def parts(self, dtype: str) -> int:
        """Return how many tensors travel for one tensor."""
        found = self.of(dtype)
        return 1 if found is None else found.parts

    def encode(
        self, tensor: torch.Tensor, noise: torch.Tensor | None = None, *, keep: bool = False
    ) -> list[WireTensor]:
        """Return the tensors that travel for a flat tensor or a matrix. ``noise`` between 0 and 1 decides which way
        whole numbers are rounded; without it they are rounded to the nearest. With ``keep`` the tensor, if it does not
        travel itself, becomes what rounding has left of it, or zero where it is not finite."""
        found = self.of(dtype_name(tensor.dtype))
        if found is None:
            return [WireTensor.of(tensor)]
        tensor = tensor.contiguous()
        numbers = buffers.take_flat(tensor.numel(), getattr(torch, found.dtype)).view(tensor.shape)
        scales = torch.empty(_count(tensor.shape), dtype=tensor.dtype, device="cpu")
        for part in _parts(tensor.shape):
            lines, into, scale = part.lines(tensor), part.lines(numbers), scales[part.scales, None]
            if found.largest is None:
                into.copy_(lines)
            else:
                torch.amax(lines.abs(), 1, keepdim=True, out=scale)
                scale.div_(found.largest).masked_fill_(~torch.isfinite(scale), math.nan)
                divided = lines / torch.where(scale > 0, scale, math.inf)
                if found.is_whole:
                    divided = divided.round_() if noise is None else divided.add_(part.lines(noise)).floor_()
                    divided.clamp_(-found.largest, found.largest)
                into.copy_(divided)
            if keep:
                lines.sub_(_read(into, scale, found)).nan_to_num_(0.0, 0.0, 0.0)
        return [WireTensor.of(numbers), WireTensor.of(scales)][: found.parts]

    def decode_flats(self, parts: Iterable[WireTensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return the flat tensors, one an element type, that have travelled one after the other."""
        rest = iter(parts)
        return {dtype: self.decode([*islice(rest, self.parts(dtype))], dtype, (size,)) for dtype, size in sizes.items()}

    def decode_rows(self, parts: Sequence[WireTensor], dtype: str, shape: tuple[int, int]) -> Array:
        """Return rows that have travelled, as ``decode`` does."""
        if self._format is None and len(parts) == 1 and parts[0].dtype == dtype and parts[0].shape == shape:
            return parts[0].numpy()
        return self.decode(parts, dtype, shape).numpy()

    def decode(self, parts: Sequence[WireTensor], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of this type and shape that has travelled; nothing is taken for one that does not fit."""
        found = self.of(dtype)
        expected = [(dtype if found is None else found.dtype, shape), (dtype, (_count(shape),))][: self.parts(dtype)]
        got = [(part.dtype, part.shape) for part in parts]
        if got != expected:
            raise ProtocolError("gradients do not fit", expected=expected, got=got)
        numbers = parts[0].torch()
        if found is None:
            return numbers
        tensor = buffers.take_flat(numbers.numel(), getattr(torch, dtype)).view(shape)
        scales = parts[-1].torch()
        for part in _parts(shape):
            part.lines(tensor).copy_(_read(part.lines(numbers), scales[part.scales, None], found))
        return tensor


def _read(numbers: torch.Tensor, scales: torch.Tensor, found: Format) -> torch.Tensor:
    return numbers if found.largest is None else numbers * scales


def _count(shape: Sequence[int]) -> int:
    """Return how many lines a shape has."""
    return shape[0] if len(shape) == 2 else -(-math.prod(shape) // LINE)


@dataclass(frozen=True)
class _Part:
    """Holds elements of a tensor that are lines of one width, and where their scales stand."""

    elements: slice
    width: int
    scales: slice

    def lines(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1)[self.elements].view(-1, self.width)


def _parts(shape: Sequence[int]) -> Iterator[_Part]:
    """Yield all of a tensor in parts so small that what is computed in between stays in the caches."""
    numel, width = math.prod(shape), shape[1] if len(shape) == 2 else LINE
    at_once = max(1, _ELEMENTS_AT_ONCE // width) * width
    whole = numel // width * width
    for start in range(0, whole, at_once):
        stop = min(start + at_once, whole)
        yield _Part(slice(start, stop), width, slice(start // width, stop // width))
    if whole < numel:
        yield _Part(slice(whole, numel), numel - whole, slice(whole // width, None))
