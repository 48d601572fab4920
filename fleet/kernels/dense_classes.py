"""Optimizers of ``torch.optim`` that update dense parameters only."""

from __future__ import annotations

import torch

from fleet.kernels.rule import Rule

#: Elementwise, with nothing but step counts and functions of them beside: cutting a parameter changes no number.
_ELEMENTWISE = ("Rprop", "ASGD")

#: These mix the elements of a parameter (a matrix iteration, row and column means), so it stays in one piece.
_WHOLE = ("Muon", "Adafactor")

RULES = tuple(
    Rule(getattr(torch.optim, name), sliceable=name in _ELEMENTWISE)
    for name in (*_ELEMENTWISE, *_WHOLE)
    if hasattr(torch.optim, name)  # Muon is younger than the oldest torch supported
)
