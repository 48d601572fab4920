"""Turns tensors into raw bytes and back: what a numpy or torch array looks like on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fleet.errors import ProtocolError

#: Each tensor of a payload starts at a multiple of this many bytes, so that it can be used in place.
ALIGNMENT = 16

#: More elements than any payload holds: past it numpy cannot even describe an array, be it empty.
_MAX_NUMEL = 1 << 40

#: numpy has no bfloat16; its bits travel as 16-bit words and only torch looks at them as numbers.
_NUMPY: dict[str, Any] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "uint8": np.uint8,
    "int8": np.int8,
}
_KINDS = {name: np.dtype(kind) for name, kind in _NUMPY.items()}
_ITEM_BYTES: dict[str, int] = {name: kind.itemsize for name, kind in _KINDS.items()}
_NUMPY_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items() if name != "bfloat16"}
_TORCH_NAMES = {getattr(torch, name): name for name in _NUMPY}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which an element type travels and is kept."""
    return str(dtype).removeprefix("torch.")


def kind_of(tensor: torch.Tensor) -> str:
    """Return in words what has to be the same for one tensor to take another's values."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def finite(gradient: torch.Tensor) -> torch.Tensor:
    """Return, as a tensor of one number, whether all of a gradient is finite: of a sparse one, for which torch has no
    ``isfinite``, whatever it holds."""
    held = gradient.coalesce().values() if gradient.is_sparse else gradient
    return held.isfinite().all()


class WireTensor:
    """Holds an array and the name of its element type; ``array`` is contiguous, and its memory is shared, not
    copied."""

    def __init__(self, dtype: str, array: np.ndarray[Any, Any]) -> None:
        self.dtype = dtype
        self._array = array

    @classmethod
    def of(cls, value: torch.Tensor | np.ndarray[Any, Any]) -> WireTensor:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            name = _TORCH_NAMES[value.dtype]
            return cls(name, value.view(torch.uint16).numpy() if name == "bfloat16" else value.numpy())
        return cls(_NUMPY_NAMES[value.dtype], np.asarray(value, order="C"))

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._array.shape
        return shape

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def buffers(self) -> list[memoryview]:
        """Return the tensor's bytes where they lie."""
        return [_bytes_of(self._array)] if self._array.size else []

    def kept(self) -> WireTensor:
        """Return what travels as it is now, whatever happens to its source."""
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array

    def torch(self) -> torch.Tensor:
        tensor = torch.from_numpy(self.array)
        return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor


class EndToEnd(WireTensor):
    """Holds tensors of one element type that travel as one, from where they lie: flat ones, or rows of one width. They
    belong to the user, who may change them when they have arrived."""

    _parts: Sequence[np.ndarray[Any, Any]]

    def __init__(self, tensors: Sequence[torch.Tensor | WireTensor]) -> None:
        parts = [each if isinstance(each, WireTensor) else WireTensor.of(each) for each in tensors]
        self.dtype, self._parts = parts[0].dtype, [part.array for part in parts]

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self._parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(len(part) for part in self._parts), *self._parts[0].shape[1:]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def buffers(self) -> list[memoryview]:
        return [_bytes_of(part) for part in self._parts if part.size]

    def kept(self) -> WireTensor:
        return WireTensor(self.dtype, self.array)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array that is contiguous and has some. A view as bytes by numpy takes seven times as
    long."""
    return array.data.cast("B")


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def checked_size(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor that a peer announces, before anything is allocated for it."""
    if dtype not in _NUMPY:
        raise ProtocolError("a tensor has an unknown element type", expected=", ".join(_NUMPY), got=repr(dtype)[:40])
    if len(shape) > 16:
        raise ProtocolError("a tensor has too many dimensions", expected="at most 16", got=len(shape))
    numel = math.prod(shape)
    if numel > _MAX_NUMEL or (not numel and math.prod(dim or 1 for dim in shape) > _MAX_NUMEL):
        raise ProtocolError("a tensor's shape is impossible", got=tuple(shape))
    return numel * _ITEM_BYTES[dtype]


def view(buffer: np.ndarray[Any, Any], offset: int, dtype: str, shape: tuple[int, ...]) -> WireTensor:
    """Return a tensor inside a received payload, whose size is checked; nothing is copied."""
    return WireTensor(dtype, np.ndarray(shape, _KINDS[dtype], buffer, offset))
