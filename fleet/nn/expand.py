"""Expands the distinct rows of a look-up to a row for every id, or a sum for every bag, and takes the gradient back.

These are ``embedding`` and ``embedding_bag`` of ``torch.nn.functional``, except that torch adds up the gradient of
many rows ten times slower than a plain loop (benchmarks/RESULTS.md). The loops add in the order of the ids, as torch
does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fleet.nn.handle import Found
from fleet.numeric.compiler import uncompiled
from fleet.numeric.ids import accumulate, accumulate_apart, accumulate_bags

#: What compiled loops can add.
_ADDED = (torch.float32, torch.float64)


class Bags(NamedTuple):
    """Says which ids belong together, and what becomes of them: the arguments of ``embedding_bag``."""

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
        """Return for every id its bag, and the factor of its row there."""
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
def expand(found: Found) -> torch.Tensor:
    """``rows[inverse]``, with a gradient of rows for the weight."""
    rows, inverse = found.rows, found.inverse
    if not _is_ours(found):
        return F.embedding(inverse, _differentiable(found))
    with torch._C.DisableTorchFunctionSubclass():
        expanded: torch.Tensor = _Expand.apply(found.weight, rows, inverse, found)  # type: ignore[no-untyped-call]
    return expanded


@uncompiled
def pool(found: Found, bags: Bags) -> torch.Tensor:
    """Return the sum or mean of each bag's rows."""
    weights = bags.per_sample_weights
    if not _is_ours(found) or (weights is not None and weights.requires_grad):
        return bags.pooled(_differentiable(found), found.inverse)
    with torch._C.DisableTorchFunctionSubclass():
        pooled: torch.Tensor = _Pool.apply(found.weight, found.rows, found, bags)  # type: ignore[no-untyped-call]
    return pooled


def _is_ours(found: Found) -> bool:
    return found.weight is not None and found.rows.is_cpu and found.rows.dtype in _ADDED


def _differentiable(found: Found) -> torch.Tensor:
    """Return the rows, through which torch's own functions have a gradient."""
    if found.weight is None:
        return found.rows
    with torch._C.DisableTorchFunctionSubclass():
        rows: torch.Tensor = _Rows.apply(found.weight, found.rows, found)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor, found: Found) -> torch.Tensor:
        ctx.found, ctx.like = found, (weight.shape, weight.device)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _of_weight(ctx, grad), None, None


class _Sparse(torch.autograd.Function):
    """Makes the gradient of a weight of gradients of rows: a gradient of it is, for these, its rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ids: torch.Tensor, like: tuple[torch.Size, torch.device]) -> torch.Tensor:
        ctx.ids = ids
        return _sparse(rows, ids, like)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if grad.layout is torch.strided:
            return grad[ctx.ids.to(grad.device)], None, None
        if not grad._nnz():
            return grad.new_zeros(len(ctx.ids), grad.shape[1], layout=torch.strided), None, None
        held, rows = grad._indices()[0], grad._values()
        distinct, places = torch.unique(torch.cat([ctx.ids, held]), return_inverse=True)
        total = rows.new_zeros(len(distinct), rows.shape[1]).index_add(0, places[len(ctx.ids) :], rows)
        return total[places[: len(ctx.ids)]], None, None


def _of_weight(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight, of which the padding row has none."""
    ids, padding = ctx.found.ids, ctx.found.padding
    rows = rows[: len(ids)]  # a bag may have had one more
    if padding is not None:
        ids = torch.cat([ids[:padding], ids[padding + 1 :]])
        rows = torch.cat([rows[:padding], rows[padding + 1 :]])
    if torch.is_grad_enabled():  # somebody differentiates the gradient
        made: torch.Tensor = _Sparse.apply(rows, ids, ctx.like)  # type: ignore[no-untyped-call]
        return made
    return _sparse(rows, ids, ctx.like)


def _sparse(rows: torch.Tensor, ids: torch.Tensor, like: tuple[torch.Size, torch.device]) -> torch.Tensor:
    shape, device = like
    # That every id is there once is not said: torch would take it for granted of sums of these, too.
    return torch.sparse_coo_tensor(ids[None].to(device), rows.to(device), shape, check_invariants=False)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, inverse: torch.Tensor, found: Found
    ) -> torch.Tensor:
        ctx.found, ctx.like = found, (weight.shape, weight.device)
        return F.embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        found = ctx.found
        places, dim = found.inverse.reshape(-1), grad.shape[-1]
        if torch.is_grad_enabled():
            total = grad.new_zeros(len(found.ids), dim).index_add(0, places, grad.reshape(-1, dim))
            return _of_weight(ctx, total), None, None, None
        total = grad.new_zeros(len(found.ids), dim)
        if _lies_in_blocks(grad):
            size, apart = grad[0].numel(), grad.stride(0)
            memory = grad.as_strided(((len(grad) - 1) * apart + size,), (1,))
            accumulate_apart(places.numpy(), memory.numpy(), size // dim, apart, total.numpy())
        else:
            accumulate(places.numpy(), grad.reshape(-1, dim).contiguous().numpy(), total.numpy())
        return _of_weight(ctx, total), None, None, None


def _lies_in_blocks(grad: torch.Tensor) -> bool:
    """Say whether something lies between one part of it and the next, as when a model puts rows beside other features.

    A copy without would take as long as adding it up does.
    """
    if grad.dim() < 2 or not grad.numel() or grad.is_contiguous():
        return False
    return grad.stride(0) > 0 and grad[0].is_contiguous()


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor, found: Found, bags: Bags) -> torch.Tensor:
        ctx.found, ctx.like = found, (weight.shape, weight.device)
        ctx.save_for_backward(*bags.members(rows, found.inverse))
        return bags.pooled(rows, found.inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        bags, scales = ctx.saved_tensors
        places, count = ctx.found.inverse.reshape(-1), len(ctx.found.ids)
        if torch.is_grad_enabled():
            parts = grad[bags] * scales[:, None]
            total = grad.new_zeros(count, grad.shape[1]).index_add(0, places, parts)
            return _of_weight(ctx, total), None, None, None
        total = grad.new_zeros(count, grad.shape[1])
        accumulate_bags(places.numpy(), bags.numpy(), scales.numpy(), grad.contiguous().numpy(), total.numpy())
        return _of_weight(ctx, total), None, None, None
