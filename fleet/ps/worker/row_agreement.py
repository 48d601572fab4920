"""Lets workers that step on dense parameters alike agree where that depends on gradients of rows, which differ between
them: by what norm to clip, and whether to skip a step.

The servers get the mean of what all push. By its norm all clip, and a number in it that is not finite is one on every
worker: whoever does not have it adds it to its own gradient, which changes nothing about the mean.
"""

from __future__ import annotations

import torch

from fleet.ps.worker.dense_group import DenseGroup


def has_gradient(weight: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return weight.grad is not None


def is_infinite(weight: torch.Tensor) -> bool:
    """Say whether the gradient of a table holds anything that is not finite."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = weight.grad
        if gradient is None:
            return False
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        # A sum of finite numbers may overflow too.
        return not bool(values.sum().isfinite()) and not bool(values.isfinite().all())


def set_rows(weight: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Give a table a gradient of these rows."""
    with torch._C.DisableTorchFunctionSubclass():
        weight.grad = torch.sparse_coo_tensor(ids[None], rows, weight.shape, check_invariants=False, device=rows.device)


def share_infinite(weight: torch.Tensor, group: DenseGroup) -> None:
    """Give this worker a row that is not finite in another one's gradient of a table, if it has none itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = weight.grad
        assert gradient is not None
        sparse = gradient if gradient.layout is torch.sparse_coo else gradient.to_sparse(1)
        ids, rows = sparse._indices()[0], sparse._values()
    bad = ~rows.isfinite().all(1)
    shared_ids, shared_rows = torch.cat(group.gather(ids[bad][:1])), torch.cat(group.gather(rows[bad][:1]))
    if not bool(bad.any()):
        set_rows(weight, torch.cat([ids, shared_ids[:1]]), torch.cat([rows, shared_rows[:1]]))


def mean_rows(group: DenseGroup, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over the workers of gradients of rows, by distinct ids."""
    every, grads = torch.cat(group.gather(ids)), torch.cat(group.gather(rows))
    distinct, place = torch.unique(every, return_inverse=True)
    return grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, place, grads).div_(group.size)
