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


def bag_parts(
    module: Any, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor | None, Any, bool]:
    """Return where the bags of ``flat`` ids begin, their ``per_sample_weights``, and whether the last offset is an end;
    torch says what is wrong with those of ids that are not jagged."""
    if not is_jagged(ids):
        return offsets, weights, module.include_last_offset
    if weights is not None and not are_alike(ids, weights):
        raise ConfigurationError(
            "per_sample_weights do not fit jagged ids",
            where=f"{type(module).__name__}({module.extra_repr()})",
            expected="a jagged tensor with the same offsets",
            got="one with others" if is_jagged(weights) else f"shape {tuple(weights.shape)}",
        )
    jagged: Any = ids
    return jagged.offsets(), flat(weights), True


def like(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows for ``flat`` ids as torch's own function does for these."""
    if not is_jagged(ids):
        return rows
    jagged: Any = ids
    return torch.nested.nested_tensor_from_jagged(rows, jagged.offsets(), jagged_dim=jagged._ragged_idx)
