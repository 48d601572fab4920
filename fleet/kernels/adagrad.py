"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.rule import Column, Rule, named, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class AdagradRows:
    options: Mapping[str, Any] = {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "maximize": False,
    }

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        return {"sum": Column(dim, options.get("initial_accumulator_value", 0.0))}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return named({**self.options, **options}, "weight_decay")

    def step(
        self,
        weights: Rows,
        state: Mapping[str, Rows],
        slots: Ids,
        grads: Array,
        options: Mapping[str, Any],
        step: int,
    ) -> None:
        o = {**self.options, **options}
        rate = o["lr"] / (1 + (step - 1) * o["lr_decay"])
        numbers = scalars(weights.dtype, rate, o["weight_decay"], o["eps"])
        _step(weights, state["sum"], slots, grads, bool(o["maximize"]), *numbers)


@compiled
def _step(
    weights: Rows,
    sums: Rows,
    slots: Ids,
    grads: Array,
    maximize: bool,
    rate: np.floating[Any],
    decay: np.floating[Any],
    eps: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(sums, slots[k + AHEAD])
        w, total = row(weights, slots[k]), row(sums, slots[k])
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            total[j] += g * g
            w[j] -= rate * g / (np.sqrt(total[j]) + eps)


RULE = Rule(
    torch.optim.Adagrad,
    rows=AdagradRows(),
    takes_sparse=True,
    constructor_only=frozenset({"initial_accumulator_value"}),
)
