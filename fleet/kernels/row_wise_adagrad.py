"""Adagrad with one sum for each row: tables take little more memory than their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from fleet.kernels.one_by_one import OneByOne, refuse_negative
from fleet.kernels.rule import Column, Rule, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class RowWiseAdagrad(OneByOne):
    """Runs Adagrad with one sum for each row, as click models with very large tables are trained: a row of 16 numbers
    takes 17 with its state, where Adagrad's takes 32.

    Each step with gradient g of a row does::

        s = s + mean(g^2)
        w -= lr * g / (sqrt(s) + eps)

    Rows are the first dimension of a parameter. One that has no other, a bias say, has rows of one number: there this
    is Adagrad. Sparse gradients do what dense ones do.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
        >>> optimizer = fleet.optim.RowWiseAdagrad(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer, model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(ids).mean())
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        refuse_negative(lr=lr, eps=eps, initial_accumulator_value=initial_accumulator_value)
        defaults = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, rate = self.state[param], float(-group["lr"] if group["maximize"] else group["lr"])
        if not state:
            shape = (*param.shape[:1], *[1] * (param.dim() - 1))
            state["sum"] = param.new_full(shape, group["initial_accumulator_value"])
        ids: Any = ...
        if grad.is_sparse:
            grad = grad.coalesce()
            ids, grad = grad.indices()[0], grad.values()
        squares = grad.square()
        state["sum"][ids] += squares.mean(tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else squares
        param[ids] -= rate * grad / state["sum"][ids].sqrt().add_(group["eps"])

    def _usable(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if grad.is_sparse and grad.sparse_dim() == 1 else super()._usable(grad)


class RowWiseAdagradRows:
    options: Mapping[str, Any] = {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0, "maximize": False}

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:  # noqa: ARG002
        return {"sum": Column(1, options.get("initial_accumulator_value", 0.0))}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def step(
        self,
        weights: Rows,
        state: Mapping[str, Rows],
        slots: Ids,
        grads: Array,
        options: Mapping[str, Any],
        step: int,  # noqa: ARG002
    ) -> None:
        o = {**self.options, **options}
        rate = -o["lr"] if o["maximize"] else o["lr"]
        _step(weights, state["sum"], slots, grads, *scalars(weights.dtype, rate, o["eps"], grads.shape[1]))


@compiled
def _step(
    weights: Rows,
    sums: Rows,
    slots: Ids,
    grads: Array,
    rate: np.floating[Any],
    eps: np.floating[Any],
    dim: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(sums, slots[k + AHEAD])
        w, total = row(weights, slots[k]), row(sums, slots[k])
        squares = grads[k, 0] * grads[k, 0]
        for j in range(1, w.size):
            squares += grads[k, j] * grads[k, j]
        total[0] += squares / dim
        root = np.sqrt(total[0]) + eps
        for j in range(w.size):
            w[j] -= rate * grads[k, j] / root


RULE = Rule(RowWiseAdagrad, sliceable=False, rows=RowWiseAdagradRows(), takes_sparse=True)
