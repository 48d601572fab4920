"""Adamax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.adam_family import OPTIONS, fading
from fleet.kernels.rule import Column, Rule, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class AdamaxRows:
    options = OPTIONS["Adamax"]

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:  # noqa: ARG002
        return {"exp_avg": Column(dim), "exp_inf": Column(dim)}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return fading({**self.options, **options})

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
        beta1, beta2 = o["betas"]
        rate = o["lr"] / (1 - beta1**step)
        numbers = scalars(weights.dtype, rate, beta1, 1 - beta1, beta2, o["eps"], o["weight_decay"])
        _step(weights, state["exp_avg"], state["exp_inf"], slots, grads, bool(o["maximize"]), *numbers)


@compiled
def _step(
    weights: Rows,
    firsts: Rows,
    norms: Rows,
    slots: Ids,
    grads: Array,
    maximize: bool,
    rate: np.floating[Any],
    beta1: np.floating[Any],
    share1: np.floating[Any],
    beta2: np.floating[Any],
    eps: np.floating[Any],
    decay: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(firsts, slots[k + AHEAD])
            prefetch(norms, slots[k + AHEAD])
        slot = slots[k]
        w, m, norm = row(weights, slot), row(firsts, slot), row(norms, slot)
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            # torch's lerp: each end is met exactly by the form that starts from it
            m[j] = m[j] + share1 * (g - m[j]) if share1 < 0.5 else g - (g - m[j]) * beta1
            old, new = norm[j] * beta2, np.abs(g) + eps
            norm[j] = old if old > new or old != old else new  # written so that NaN wins, as in torch
            w[j] -= rate * m[j] / norm[j]


RULE = Rule(torch.optim.Adamax, rows=AdamaxRows())
