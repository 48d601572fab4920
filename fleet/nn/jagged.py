"""Looks up ids that torch keeps in a jagged tensor (``torch.nested``): as one list of all, whose rows are then laid out
as the ids are."""

from __future__ import annotations

from typing import Any

import torch

from fleet.errors import ConfigurationError


def is_jagged(ids: Any) -> bool:
    return isinstance(ids, torch.Tensor) and ids.layout is torch.jagged


def flat(ids: Any) -> Any:
    """Return all ids of a jagged tensor in one; anything else as it is."""
    if not is_jagged(ids):
        return ids
    if ids.lengths() is not None:
        raise ConfigurationError(
            "an embedding was given a jagged tensor with lengths, which leaves some of its ids out",
            expected="one without, where every id belongs to a part",
            todo="Give it ids.contiguous().",
        )
    return ids.values()


def like(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows for ``flat`` ids as torch's own function does for these."""
    if not is_jagged(ids):
        return rows
    jagged: Any = ids
    return torch.nested.nested_tensor_from_jagged(rows, jagged.offsets(), jagged_dim=jagged._ragged_idx)
