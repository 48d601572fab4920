"""Tensors as raw bytes: what a numpy or torch array looks like on the wire, and back; users' own values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet.errors import ArgumentTypeError, ConfigurationError, ProtocolError
from fleet.ps.consistency.gathering import CARRIED, MAX_BYTES

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
}
_TORCH = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "uint8")}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


@dataclass(frozen=True)
class WireTensor:
    """An array and the name of its element type; ``array`` is contiguous, its memory is shared, not copied."""

    dtype: str
    array: np.ndarray[Any, Any]

    @classmethod
    def of(cls, value: torch.Tensor | np.ndarray[Any, Any]) -> WireTensor:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            name = _NAMES[value.dtype]
            return cls(name, value.view(torch.uint16).numpy() if name == "bfloat16" else value.numpy())
        return cls(value.dtype.name, np.asarray(value, order="C"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def bytes(self) -> memoryview:
        return self.array.reshape(-1).view(np.uint8).data

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array

    def torch(self) -> torch.Tensor:
        tensor = torch.from_numpy(self.array)
        return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def checked_size(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor a peer announces, before anything is allocated for it."""
    if dtype not in _NUMPY:
        raise ProtocolError("a tensor has an unknown element type", expected=", ".join(_NUMPY), got=repr(dtype)[:40])
    if len(shape) > 16:
        raise ProtocolError("a tensor has too many dimensions", expected="at most 16", got=len(shape))
    if math.prod(dim or 1 for dim in shape) > _MAX_NUMEL:
        raise ProtocolError("a tensor's shape is impossible", got=tuple(shape))
    return math.prod(shape) * int(np.dtype(_NUMPY[dtype]).itemsize)


def view(buffer: np.ndarray[Any, Any], offset: int, dtype: str, shape: Sequence[int]) -> WireTensor:
    """A tensor inside a received payload; nothing is copied."""
    nbytes = checked_size(dtype, shape)
    return WireTensor(dtype, buffer[offset : offset + nbytes].view(_NUMPY[dtype]).reshape(tuple(shape)))


# ---------------------------------------------------------------- values of the user's


class UserValue:
    """A numpy array, tensor or number of the user's that is to be reduced: what travels, and how it comes back."""

    def __init__(self, call: str, value: object) -> None:
        self._value: Any = value
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise ArgumentTypeError(f"{call}: a sparse tensor cannot be reduced", todo="Call to_dense() on it.")
            self.dtype, self.shape = _dtype_and_shape(value)
        elif isinstance(value, np.ma.MaskedArray):
            raise ArgumentTypeError(f"{call}: a masked array cannot be reduced", todo="Call filled(value) on it.")
        elif isinstance(value, np.ndarray | np.generic):
            self.dtype, self.shape = _dtype_and_shape(value)
        elif isinstance(value, bool | int | float):
            try:
                self._value = np.asarray(value, np.int64 if type(value) is int else type(value))
            except OverflowError:
                raise ConfigurationError(f"{call}: an int does not fit in 64 bits", got=value) from None
            self.dtype, self.shape = _dtype_and_shape(self._value)
        else:
            raise ArgumentTypeError(
                f"{call}: this cannot be reduced",
                expected="a numpy array, a torch tensor or a number",
                got=type(value).__name__,
            )
        self._is_number = self._value is not value
        if self.dtype not in CARRIED:
            raise ArgumentTypeError(
                f"{call}: this element type cannot be reduced", expected=", ".join(CARRIED), got=self.dtype
            )
        nbytes = math.prod(self.shape) * int(np.dtype(_NUMPY[CARRIED[self.dtype]]).itemsize)
        if nbytes > MAX_BYTES:
            raise ConfigurationError(
                f"{call}: the value is too large",
                expected=f"at most {MAX_BYTES} bytes, as {CARRIED[self.dtype]}",
                got=f"{nbytes} bytes",
                todo="Reduce it in parts.",
            )

    def wire(self) -> WireTensor:
        """A copy: what is sent again must be what was sent before, whatever the user does to it meanwhile."""
        name = CARRIED[self.dtype]
        if isinstance(self._value, torch.Tensor):
            return WireTensor.of(torch.empty(self.shape, dtype=_TORCH[name]).copy_(self._value.detach()))
        return WireTensor.of(np.array(self._value, dtype=_NUMPY[name], order="C"))

    def back(self, result: WireTensor, dtype: str) -> Any:
        """The result as a value of the same kind, with elements of ``dtype``."""
        if isinstance(self._value, torch.Tensor):
            return result.torch().to(self._value.device, getattr(torch, dtype))
        array = result.numpy().astype(dtype, copy=False)
        if self._is_number:
            return array.item()
        return array if isinstance(self._value, np.ndarray) else array[()]


def check_output(call: str, output: object, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse an ``output`` that a result of this element type and shape cannot be written into."""
    if not isinstance(output, torch.Tensor | np.ndarray):
        raise ArgumentTypeError(
            f"{call}: output is of the wrong type",
            expected="a numpy array or a torch tensor",
            got=type(output).__name__,
        )
    if _dtype_and_shape(output) != (dtype, shape):
        got_dtype, got_shape = _dtype_and_shape(output)
        raise ConfigurationError(
            f"{call}: output does not fit the result", expected=f"{dtype} {shape}", got=f"{got_dtype} {got_shape}"
        )
    if isinstance(output, np.ndarray) and not output.flags.writeable:
        raise ConfigurationError(f"{call}: output is read-only")


def write_output(output: Any, result: WireTensor) -> Any:
    if isinstance(output, torch.Tensor):
        output.detach().copy_(result.torch())
    else:
        output[...] = result.numpy()
    return output


def _dtype_and_shape(value: Any) -> tuple[str, tuple[int, ...]]:
    name = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else value.dtype.name
    return name, tuple(value.shape)
