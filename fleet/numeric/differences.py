"""Differences of values, some of which may be infinite."""

from __future__ import annotations

import torch


def difference(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return ``now - before``, and zero where both are the same infinity: nothing has changed there."""
    found = now - before
    if not bool(found.sum().isfinite()):  # one look at all of it; a sum may overflow too
        found.masked_fill_(now == before, 0)
    return found


def not_addable(now: torch.Tensor, before: torch.Tensor, found: torch.Tensor) -> torch.Tensor | None:
    """Say of each element whether ``before + found`` is another value than ``now``, as it is if an infinity or NaN has
    become a number; None if that holds of none."""
    if bool(found.sum().isfinite()):
        return None
    leads_elsewhere = ~before.isfinite() | (now.isfinite() & ~found.isfinite())
    lost = leads_elsewhere & (now != before) & ~now.isnan()
    return lost if bool(lost.any()) else None
