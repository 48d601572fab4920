"""Calls torch's elementary functions once before any other thread of the process does.

Torch leaves square roots, exponentials and their like to MKL, which looks for the right code when a function is first
called. Up to 2024.2, which torch 2.13 has in it, a second thread that calls the function meanwhile may be given code
for lower accuracy: square roots were 4,000 units in the last place off, once and in silence
(github.com/pytorch/pytorch/issues/188792). An optimizer on a server that began so would end elsewhere to the bit.
"""

from __future__ import annotations

import threading

import torch

#: What torch may leave to MKL, in one release or another.
_NAMES = (
    *("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "erf", "erfc", "erfinv", "lgamma"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid", "trunc", "round"),
)
_DTYPES = (torch.float32, torch.float64)

_one_at_a_time = threading.Lock()
_are_found = False


def find_elementary_functions() -> None:
    """Return when the code of each function has been found; other threads that ask for this wait as well."""
    global _are_found
    if not _are_found:
        with _one_at_a_time:
            _are_found = _are_found or _call_each()


@torch.no_grad()
def _call_each() -> bool:
    """Return whether they were called: a mode of the script's may have its own tensors stand for torch's."""
    results = []
    for dtype in _DTYPES:
        argument = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        results += [getattr(torch, name)(argument) for name in _NAMES]
    return all(type(each) is torch.Tensor for each in results)
