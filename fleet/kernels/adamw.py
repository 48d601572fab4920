"""AdamW: dense Adam's formula, whose ``eps`` stands beside the root of the corrected second moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.adam_family import AMSGRAD, OPTIONS, MomentRows, decay_and_shrink
from fleet.kernels.rule import Rule, column, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class AdamWRows(MomentRows):
    options = OPTIONS["AdamW"]

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
        lr, (beta1, beta2) = o["lr"], o["betas"]
        rate, root2 = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        betas = beta1, 1 - beta1, beta2, 1 - beta2
        numbers = scalars(weights.dtype, rate, *betas, root2, o["eps"], *decay_and_shrink(o))
        maxima = column(state, "max_exp_avg_sq", weights)
        flags = bool(o["amsgrad"]), bool(o["maximize"])
        _step(weights, state["exp_avg"], state["exp_avg_sq"], maxima, slots, grads, *flags, *numbers)


@compiled
def _step(
    weights: Rows,
    firsts: Rows,
    seconds: Rows,
    maxima: Rows,
    slots: Ids,
    grads: Array,
    amsgrad: bool,
    maximize: bool,
    rate: np.floating[Any],
    beta1: np.floating[Any],
    share1: np.floating[Any],
    beta2: np.floating[Any],
    share2: np.floating[Any],
    root2: np.floating[Any],
    eps: np.floating[Any],
    decay: np.floating[Any],
    shrink: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(firsts, slots[k + AHEAD])
            prefetch(seconds, slots[k + AHEAD])
        slot = slots[k]
        w, m, v, largest = row(weights, slot), row(firsts, slot), row(seconds, slot), row(maxima, slot)
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            if shrink != 1:
                w[j] *= shrink
            # torch's lerp: each end is met exactly by the form that starts from it
            m[j] = m[j] + share1 * (g - m[j]) if share1 < 0.5 else g - (g - m[j]) * beta1
            v[j] = v[j] * beta2 + share2 * g * g
            second = v[j]
            if amsgrad:
                if not second <= largest[j]:  # written so that NaN wins, as in torch
                    largest[j] = second
                second = largest[j]
            w[j] -= rate * m[j] / (np.sqrt(second) / root2 + eps)


RULE = Rule(torch.optim.AdamW, rows=AdamWRows(), kept_from_the_first=AMSGRAD)
