"""Carries values that users have reduced over all workers: how they travel, and how the result comes back in their
kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.numeric.reduction import CARRIED, MAX_BYTES, OPS, result_dtype
from fleet.numeric.tensors import WireTensor, checked_size, dtype_name

_COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


class UserValue:
    """Holds a user's numpy array, tensor or number that is to be reduced: what travels, and how it comes back."""

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
        nbytes = checked_size(CARRIED[self.dtype], self.shape)
        if nbytes > MAX_BYTES:
            raise ConfigurationError(
                f"{call}: the value is too large",
                expected=f"at most {MAX_BYTES} bytes, as {CARRIED[self.dtype]}",
                got=f"{nbytes} bytes",
                todo="Reduce it in parts.",
            )

    def wire(self) -> WireTensor:
        """Return a copy: a repetition must send what was sent before, whatever the user does to the value meanwhile."""
        name = CARRIED[self.dtype]
        if isinstance(self._value, torch.Tensor):
            return WireTensor.of(
                torch.empty(self.shape, dtype=getattr(torch, name), device="cpu").copy_(self._value.detach())
            )
        return WireTensor.of(np.array(self._value, dtype=name, order="C"))

    def back(self, result: WireTensor, dtype: str) -> Any:
        """Return the result as a value of the same kind, with elements of ``dtype``."""
        if isinstance(self._value, torch.Tensor):
            return result.torch().to(self._value.device, getattr(torch, dtype))
        array = result.numpy().astype(dtype, copy=False)
        if self._is_number:
            return array.item()
        return array if isinstance(self._value, np.ndarray) else array[()]


def reduce_over_workers(
    call: str, value: object, output: object, op: object, meet: Callable[[str, UserValue], WireTensor]
) -> Any:
    """Reduce the ``value`` of all workers to one, in the kind it came in, and write it into ``output`` if that is
    given. ``meet`` brings a worker's value to the others, and brings back the result."""
    if op not in OPS:
        raise ConfigurationError(f"{call}: op is unknown", expected=", ".join(OPS), got=repr(op))
    mine = UserValue(call, value)
    dtype = result_dtype(str(op), mine.dtype)
    if output is not None:
        _check_output(call, output, dtype, mine.shape)
    result = meet(str(op), mine)
    return mine.back(result, dtype) if output is None else _write_output(output, result)


def _check_output(call: str, output: object, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse an ``output`` that a result of this element type and shape does not fit into."""
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


def _write_output(output: Any, result: WireTensor) -> Any:
    if isinstance(output, torch.Tensor):
        output.detach().copy_(result.torch())
    else:
        output[...] = result.numpy()
    return output


def _dtype_and_shape(value: Any) -> tuple[str, tuple[int, ...]]:
    name = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else value.dtype.name
    return name, tuple(value.shape)


def _largest_sum(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return what no element of a sum of arrays of integers goes beyond."""
    return sum(max(abs(int(each.min())), abs(int(each.max()))) for each in arrays if each.size)


def reduced(op: str, tensors: Sequence[WireTensor]) -> WireTensor:
    """Return all tensors, which have one element type and shape, reduced in the order given: float16 and bfloat16 in
    float32, integers in int64, everything else as it is. The mean of integers whose sum may not fit is of float64, as
    numpy's is."""
    first = tensors[0]
    narrow = first.dtype in ("float16", "bfloat16")
    # One dimension and an output, so that no result becomes one of numpy's scalars, which warn where arrays do not.
    flat = [(t.torch().float().numpy() if narrow else t.numpy()).reshape(-1) for t in tensors]
    if op == "mean" and first.dtype == "int64" and _largest_sum(flat) > np.iinfo(np.int64).max:
        flat = [each.astype(np.float64) for each in flat]
    total = flat[0].copy()
    with np.errstate(all="ignore"):
        for each in flat[1:]:
            _COMBINE[op](total, each, out=total)
        if op == "mean":
            total = total / total.dtype.type(len(tensors)) if total.dtype.kind == "f" else total / len(tensors)
    total = total.reshape(first.shape)
    return WireTensor.of(torch.from_numpy(total).to(getattr(torch, first.dtype)) if narrow else total)
