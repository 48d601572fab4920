"""Expands the distinct rows of a look-up to a row for every id, or a sum for every bag, and takes the gradient back.

These are ``embedding`` and ``embedding_bag`` of ``torch.nn.functional``, except that torch adds up the gradient of
many rows ten times slower than a plain loop (benchmarks/RESULTS.md). The loops add in the order of the ids, as torch
does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fleet.numeric.compiler import uncompiled
from fleet.numeric.ids import accumulate, accumulate_apart, accumulate_bags

#: What compiled loops can add.
_ADDED = (torch.float32, torch.float64)


class Bags(NamedTuple):
    """Which ids belong together, and what becomes of them: the arguments of ``embedding_bag``."""

    offsets: torch.Tensor | None
    mode: str
    per_sample_weights: torch.Tensor | None
    include_last_offset: bool
    padding_idx: int | None

    def pooled(self, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(inverse, rows, **self._asdict())

    def sizes(self, inverse: torch.Tensor) -> torch.Tensor:
        if self.offsets is None:
            return torch.full((len(inverse),), inverse.shape[1])
        # The last bag ends with the ids, whatever a last offset says.
        starts = self.offsets.long()[: -1 if self.include_last_offset else None]
        return torch.cat([starts, starts.new_tensor([len(inverse)])]).diff()

    def members(self, rows: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For every id its bag, and what its row is multiplied by there."""
        counts = self.sizes(inverse)
        bags = torch.repeat_interleave(counts)
        weights = self.per_sample_weights
        scales = rows.new_ones(len(bags)) if weights is None else weights.reshape(-1).clone()
        if self.padding_idx is not None:
            padding = inverse.reshape(-1) == self.padding_idx
            scales[padding] = 0
            counts = counts - torch.zeros_like(counts).index_add(0, bags, padding.long())
        if self.mode == "mean":
            scales /= counts.clamp(min=1)[bags]
        return bags, scales


@uncompiled
def expand(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows[inverse]``."""
    if not _is_ours(rows):
        return F.embedding(inverse, rows)
    expanded: torch.Tensor = _Expand.apply(rows, inverse)  # type: ignore[no-untyped-call]
    return expanded


@uncompiled
def pool(rows: torch.Tensor, inverse: torch.Tensor, bags: Bags) -> torch.Tensor:
    """The sum or mean of each bag's rows."""
    weights = bags.per_sample_weights
    if not _is_ours(rows) or (weights is not None and weights.requires_grad):
        return bags.pooled(rows, inverse)
    pooled: torch.Tensor = _Pool.apply(rows, inverse, bags)  # type: ignore[no-untyped-call]
    return pooled


def _is_ours(rows: torch.Tensor) -> bool:
    return rows.requires_grad and rows.is_cpu and rows.dtype in _ADDED


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.count = len(rows)
        return F.embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inverse,) = ctx.saved_tensors
        places, dim = inverse.reshape(-1), grad.shape[-1]
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            return grad.new_zeros(ctx.count, dim).index_add(0, places, grad.reshape(-1, dim)), None
        total = grad.new_zeros(ctx.count, dim)
        if _lies_in_blocks(grad):
            size, apart = grad[0].numel(), grad.stride(0)
            memory = grad.as_strided(((len(grad) - 1) * apart + size,), (1,))
            accumulate_apart(places.numpy(), memory.numpy(), size // dim, apart, total.numpy())
        else:
            accumulate(places.numpy(), grad.reshape(-1, dim).contiguous().numpy(), total.numpy())
        return total, None


def _lies_in_blocks(grad: torch.Tensor) -> bool:
    """Whether something lies between one part of it and the next, as when a model puts rows beside other features.

    A copy without would take as long as adding it up does.
    """
    if grad.dim() < 2 or not grad.numel() or grad.is_contiguous():
        return False
    return grad.stride(0) > 0 and grad[0].is_contiguous()


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, inverse: torch.Tensor, bags: Bags) -> torch.Tensor:
        pooled = bags.pooled(rows, inverse)
        ctx.save_for_backward(inverse.reshape(-1), *bags.members(rows, inverse))
        ctx.count = len(rows)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        places, bags, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            parts = grad[bags] * scales[:, None]
            return grad.new_zeros(ctx.count, grad.shape[1]).index_add(0, places, parts), None, None
        total = grad.new_zeros(ctx.count, grad.shape[1])
        accumulate_bags(places.numpy(), bags.numpy(), scales.numpy(), grad.contiguous().numpy(), total.numpy())
        return total, None, None
