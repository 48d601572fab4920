"""Copies beside the computation: what is handed over here is done in order, on a stream of its own where the device has
streams, and a computation waits for it before it looks. Two threads may hand something over.

What is not waited for may be missing, so a device for tests does everything as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from fleet.errors import ConfigurationError, UnsupportedError
from fleet.numeric.jit import Array


class Copies(Protocol):
    device: torch.device

    def host(self, parts: Sequence[Array]) -> torch.Tensor:
        """Return arrays, one after the other, where a copy may start from and where nobody writes any more."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory on the device, to be written by what ``run`` is given."""
        ...

    def run(self, work: Callable[[], None]) -> object:
        """Do this after all that was handed over before, and return a mark by which it can be waited for."""
        ...

    def wait(self, mark: object, used: Sequence[torch.Tensor]) -> None:
        """Let what is computed from now on come after all up to a mark; it uses these tensors."""
        ...


class HostCopies:
    """Copies at once: on the CPU there is nothing to wait for."""

    device = torch.device("cpu")

    def host(self, parts: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def run(self, work: Callable[[], None]) -> object:
        work()
        return None

    def wait(self, mark: object, used: Sequence[torch.Tensor]) -> None:
        pass


class CudaCopies:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host(self, parts: Sequence[Array]) -> torch.Tensor:
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        dtype = torch.from_numpy(parts[0][:0]).dtype
        # torch keeps it until copies from it are over
        pinned = torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
        np.concatenate(parts, out=pinned.numpy())
        return pinned

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._beside():
            return torch.empty(*shape, dtype=dtype, device=self.device)

    def run(self, work: Callable[[], None]) -> object:
        with self._beside():
            work()
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        return mark

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Do what ``torch.cuda.stream`` does, which takes a tenth of a step of a small model for it."""
        here: Any = torch.cuda.current_stream()
        if here.device_index != self.device.index:
            with torch.cuda.stream(self._stream):
                yield
            return
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(here)

    def wait(self, mark: Any, used: Sequence[torch.Tensor]) -> None:
        here: Any = torch.cuda.current_stream(self.device)
        here.wait_event(mark)
        for each in used:
            each.record_stream(here)  # else its memory could be another copy's before this stream is through with it


def work_on(device: torch.device) -> None:
    """Let the calling thread have this device for its present one, and touch no other."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_away(tensor: torch.Tensor) -> bool:
    """Say whether the CPU cannot read a tensor."""
    return not tensor.is_cpu


def await_all(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@torch.no_grad()
def bring(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Begin to copy tensors to where the CPU can read them, in the order of what their devices do; return the copies,
    and what waits for them. What is there already stays where it is."""
    found, marks = [], dict[torch.device, Any]()
    for each in tensors:
        here = each
        if each.device.type == "cuda":
            here = torch.empty(each.shape, dtype=each.dtype, pin_memory=True, device="cpu")
            here.copy_(each, non_blocking=True)
            marks.setdefault(each.device)
        elif not each.is_cpu:
            here = each.cpu()
        found.append(here)
    for device in marks:
        # A thread that waits for it leaves its core to others.
        marks[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        marks[device].record(torch.cuda.current_stream(device))

    def wait() -> None:
        for mark in marks.values():
            mark.synchronize()

    return found, wait


def copies_to(device: object) -> Copies:
    """Return what copies to a device, by its name or as torch has it."""
    try:
        wanted = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ConfigurationError(
            "device= of prefetch() is none", expected="a torch.device, or its name", got=repr(device)
        ) from None
    if wanted.type == "cpu":
        return HostCopies()
    if wanted.type != "cuda":
        raise UnsupportedError(f"rows cannot be brought ahead to {wanted}", expected="a CUDA device, or the CPU")
    found = torch.cuda.device_count()
    if (wanted.index or 0) >= found:
        raise ConfigurationError(
            f"there is no device {wanted} to bring rows to",
            got=f"{found} CUDA devices",
            todo="Leave device= out where the model is on the CPU.",
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    return CudaCopies(torch.device("cuda", index))
