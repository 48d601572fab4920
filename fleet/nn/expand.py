"""From the distinct rows of a lookup to a row for every id, or a sum for every bag, and the gradient back.

These are ``embedding`` and ``embedding_bag`` of ``torch.nn.functional``, except that torch adds up the gradient of
many rows ten times slower than a plain loop (benchmarks/RESULTS.md). The loops add in the order of the ids, as torch
does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo

from fleet.ps.kernels.rows import accumulate, accumulate_bags

#: What compiled loops can add.
_ADDED = (torch.float32, torch.float64)


@_disable_dynamo
def expand(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows[inverse]``."""
    if not _is_ours(rows):
        return F.embedding(inverse, rows)
    expanded: torch.Tensor = _Expand.apply(rows, inverse)  # type: ignore[no-untyped-call]
    return expanded


@_disable_dynamo
def pool(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor | None,
    mode: str,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> torch.Tensor:
    """The sum or mean of each bag's rows."""
    ours = _is_ours(rows) and (per_sample_weights is None or not per_sample_weights.requires_grad)
    pooled: torch.Tensor = (_Pool.apply if ours else _pooled)(
        rows, inverse, offsets, mode, per_sample_weights, include_last_offset, padding_idx
    )
    return pooled


def _is_ours(rows: torch.Tensor) -> bool:
    return rows.requires_grad and rows.is_cpu and rows.dtype in _ADDED


def _pooled(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor | None,
    mode: str,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> torch.Tensor:
    return F.embedding_bag(
        inverse,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.count = len(rows)
        return F.embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inverse,) = ctx.saved_tensors
        places, parts = inverse.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            return parts.new_zeros(ctx.count, parts.shape[1]).index_add(0, places, parts), None
        total = np.zeros((ctx.count, parts.shape[1]), parts.numpy().dtype)
        accumulate(places.numpy(), parts.contiguous().numpy(), total)
        return torch.from_numpy(total), None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        inverse: torch.Tensor,
        offsets: torch.Tensor | None,
        mode: str,
        per_sample_weights: torch.Tensor | None,
        include_last_offset: bool,
        padding_idx: int | None,
    ) -> torch.Tensor:
        pooled = _pooled(rows, inverse, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
        places = inverse.reshape(-1)
        if offsets is None:
            sizes = torch.full((len(inverse),), inverse.shape[1] if inverse.dim() > 1 else 0)
        else:
            # The last bag ends with the ids, whatever a last offset says.
            starts = offsets.long()[: -1 if include_last_offset else None]
            sizes = torch.cat([starts, starts.new_tensor([len(places)])]).diff()
        bags = torch.repeat_interleave(sizes)
        scales = rows.new_ones(len(bags)) if per_sample_weights is None else per_sample_weights.reshape(-1).clone()
        counts = sizes
        if padding_idx is not None:
            padding = places == padding_idx
            scales[padding] = 0
            counts = sizes - torch.zeros_like(sizes).index_add(0, bags, padding.long())
        if mode == "mean":
            scales /= counts.clamp(min=1)[bags]
        ctx.save_for_backward(places, bags, scales)
        ctx.count = len(rows)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places, bags, scales = ctx.saved_tensors
        nothing = (None,) * 6
        if torch.is_grad_enabled():
            parts = grad[bags] * scales[:, None]
            return grad.new_zeros(ctx.count, grad.shape[1]).index_add(0, places, parts), *nothing
        total = np.zeros((ctx.count, grad.shape[1]), grad.numpy().dtype)
        accumulate_bags(places.numpy(), bags.numpy(), scales.numpy(), grad.contiguous().numpy(), total)
        return torch.from_numpy(total), *nothing
