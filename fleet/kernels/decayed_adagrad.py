"""Adagrad that forgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from fleet.kernels.one_by_one import OneByOne, refuse_negative
from fleet.kernels.rule import Column, Rule, named, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class DecayedAdagrad(OneByOne):
    """Runs Adagrad over a running mean of squared gradients instead of their sum, as PaddlePaddle's ``DecayedAdagrad``
    does.

    Each step with gradient g does::

        m = decay * m + (1 - decay) * g^2
        w -= lr * g / (sqrt(m) + eps)

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
        >>> optimizer = fleet.optim.DecayedAdagrad(model.parameters(), lr=0.1, decay=0.9)  # rows of tables as well
        >>> optimizer = fleet.distributed_optimizer(optimizer, model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(ids).mean())
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        decay: float = 0.95,
        eps: float = 1e-6,
        *,
        maximize: bool = False,
    ) -> None:
        refuse_negative(lr=lr, eps=eps)
        if not 0 <= decay <= 1:
            raise ValueError(f"Invalid decay value: {decay}")
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps, "maximize": maximize})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, lr = self.state[param], float(group["lr"])
        if not state:
            state["moment"] = torch.zeros_like(param)
        moment = state["moment"].mul_(group["decay"]).addcmul_(grad, grad, value=1 - group["decay"])
        param.addcdiv_(grad, moment.sqrt().add_(group["eps"]), value=lr if group["maximize"] else -lr)


class DecayedAdagradRows:
    options: Mapping[str, Any] = {"lr": 1e-3, "decay": 0.95, "eps": 1e-6, "maximize": False}

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:  # noqa: ARG002
        return {"moment": Column(dim)}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        o = {**self.options, **options}
        # Of an average that keeps nothing, or all, nothing fades.
        return named(o, *(() if o["decay"] == 1 else ("decay",)))

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
        numbers = scalars(weights.dtype, rate, o["decay"], 1 - o["decay"], o["eps"])
        _step(weights, state["moment"], slots, grads, *numbers)


@compiled
def _step(
    weights: Rows,
    moments: Rows,
    slots: Ids,
    grads: Array,
    rate: np.floating[Any],
    decay: np.floating[Any],
    share: np.floating[Any],
    eps: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(moments, slots[k + AHEAD])
        w, m = row(weights, slots[k]), row(moments, slots[k])
        for j in range(w.size):
            g = grads[k, j]
            m[j] = m[j] * decay + share * g * g
            w[j] -= rate * g / (np.sqrt(m[j]) + eps)


RULE = Rule(DecayedAdagrad, rows=DecayedAdagradRows())
