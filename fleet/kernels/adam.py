"""Adam and SparseAdam. Rows follow the formula of ``torch.optim.SparseAdam`` for both names.

It differs from dense Adam in where ``eps`` stands: beside the square root of the uncorrected second moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.adam_family import AMSGRAD, OPTIONS, MomentRows, decay_and_shrink
from fleet.kernels.rule import Rule, column, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class AdamRows(MomentRows):
    options = OPTIONS["Adam"]

    def step(
        self,
        weights: Rows,
        state: Mapping[str, Rows],
        slots: Ids,
        grads: Array,
        options: Mapping[str, Any],
        step: int,
    ) -> None:
        o = {**AdamRows.options, **options}
        beta1, beta2 = o["betas"]
        rate = o["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        numbers = scalars(weights.dtype, rate, 1 - beta1, 1 - beta2, o["eps"], *decay_and_shrink(o))
        maxima = column(state, "max_exp_avg_sq", weights)
        flags = bool(o["amsgrad"]), bool(o["maximize"])
        _step(weights, state["exp_avg"], state["exp_avg_sq"], maxima, slots, grads, *flags, *numbers)


class SparseAdamRows(AdamRows):
    options = OPTIONS["SparseAdam"]

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        return ()  # torch's class is lazy itself


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
    share1: np.floating[Any],
    share2: np.floating[Any],
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
            m[j] += (g - m[j]) * share1
            v[j] += (g * g - v[j]) * share2
            second = v[j]
            if amsgrad:
                if not second <= largest[j]:  # written so that NaN wins, as in torch
                    largest[j] = second
                second = largest[j]
            w[j] -= rate * (m[j] / (np.sqrt(second) + eps))


RULES = (
    Rule(torch.optim.Adam, rows=AdamRows(), kept_from_the_first=AMSGRAD),
    Rule(torch.optim.SparseAdam, dense=False, rows=SparseAdamRows()),
)
