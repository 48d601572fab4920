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


def are_alike(ids: Any, others: Any) -> bool:
    """Say whether both are jagged and have parts of the same lengths, or neither is."""
    if not (is_jagged(ids) and is_jagged(others)):
        return is_jagged(ids) == is_jagged(others)
    return ids.offsets() is others.offsets() or torch.equal(ids.offsets(), others.offsets())


def flat_weights(ids: torch.Tensor, weights: Any, where: torch.nn.Module) -> Any:
    """Return the ``per_sample_weights`` of ids as ``flat`` returns these; torch says what else is wrong with them."""
    if is_jagged(ids) and weights is not None and not are_alike(ids, weights):
        got = "one with others" if is_jagged(weights) else f"shape {tuple(weights.shape)}"
        raise ConfigurationError(
            "per_sample_weights do not fit jagged ids",
            where=f"{type(where).__name__}({where.extra_repr()})",
            expected="a jagged tensor with the same offsets",
            got=got,
        )
    return flat(weights) if is_jagged(ids) else weights


def like(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows for ``flat`` ids as torch's own function does for these."""
    if not is_jagged(ids):
        return rows
    jagged: Any = ids
    return torch.nested.nested_tensor_from_jagged(rows, jagged.offsets(), jagged_dim=jagged._ragged_idx)
