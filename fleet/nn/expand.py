"""From the distinct rows of a lookup to a row for every id that was asked for, and its gradient back.

It is ``torch.nn.functional.embedding``, except that torch adds up the gradient of a dense table ten to fifteen times
slower than a plain loop does, in the same order and to the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo

from fleet.ps.kernels.rows import accumulate

#: What compiled loops can add.
_ADDED = (torch.float32, torch.float64)


@_disable_dynamo
def expand(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows[inverse]``."""
    if rows.requires_grad and rows.is_cpu and rows.dtype in _ADDED:
        expanded: torch.Tensor = _Expand.apply(rows, inverse)  # type: ignore[no-untyped-call]
        return expanded
    return F.embedding(inverse, rows)


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
