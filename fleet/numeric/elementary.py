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
            if not _are_found:
                _call_each()
            _are_found = True


@torch.no_grad()
def _call_each() -> None:
    for dtype in _DTYPES:
        argument = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _NAMES:
            getattr(torch, name)(argument)
