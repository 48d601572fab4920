"""Tensors as bits: NaN is like itself, and -0.0 is not like 0.0."""

from __future__ import annotations

import ctypes

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: torch looks at elements, and takes twice as long where these lie in the caches.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def same_bytes(one: int, other: int, nbytes: int) -> bool:
    """Say whether memory at two addresses is alike. Nobody checks whose it is."""
    return not _memcmp(one, other, nbytes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in their order: its own memory where they lie so."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # An empty one that numpy made has a stride by which torch finds no bytes.
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8, device=flat.device)


def changed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Say of each element whether it differs, in tensors of one shape, element type and device."""
    kind = _INTEGERS[one.itemsize]
    return one.detach().view(kind) != other.detach().view(kind)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one element type and device have the same shape and numbers."""
    if one.shape != other.shape:
        return False
    one, other = one.contiguous(), other.contiguous()
    if one.device.type == "cpu":
        return same_bytes(one.data_ptr(), other.data_ptr(), one.nbytes)
    return not bool(changed(one, other).any())
