"""RAdam: Adam that leaves the second moment aside as long as too few steps went into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.adam_family import OPTIONS, MomentRows, decay_and_shrink
from fleet.kernels.rule import Rule, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row

#: Averages that are no longer than this have no variance that could be computed.
TRACTABLE = 5


class RAdamRows(MomentRows):
    options = OPTIONS["RAdam"]

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        beta1, beta2 = {**self.options, **options}["betas"]
        if beta1 == 0 and _longest(beta2) <= TRACTABLE:  # the second moment has no say
            options = {**options, "betas": (0, 0)}
        return super().idle_changes(options)

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
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        rect = _rectification(beta2, step)
        numbers = scalars(
            weights.dtype,
            *(lr, beta1, 1 - beta1, beta2, 1 - beta2, correction1, math.sqrt(correction2)),
            *(rect, o["eps"], *decay_and_shrink(o)),
        )
        flags = bool(o["maximize"]), rect > 0
        _step(weights, state["exp_avg"], state["exp_avg_sq"], slots, grads, *flags, *numbers)


def _longest(beta2: float) -> float:
    """Return the length of the average in the end, as if it were a simple one."""
    return float(2 / (1 - beta2) - 1)


def _rectification(beta2: float, step: int) -> float:
    """Return the factor of the adaptive rate; 0 where its variance is not tractable and torch does without the rate."""
    longest = _longest(beta2)
    length = longest - 2 * step * beta2**step / (1 - beta2**step)  # of the average, as if it were a simple one
    if length <= TRACTABLE:
        return 0.0
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


@compiled
def _step(
    weights: Rows,
    firsts: Rows,
    seconds: Rows,
    slots: Ids,
    grads: Array,
    maximize: bool,
    rectified: bool,
    lr: np.floating[Any],
    beta1: np.floating[Any],
    share1: np.floating[Any],
    beta2: np.floating[Any],
    share2: np.floating[Any],
    correction1: np.floating[Any],
    root2: np.floating[Any],
    rect: np.floating[Any],
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
        w, m, v = row(weights, slot), row(firsts, slot), row(seconds, slot)
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            if shrink != 1:
                w[j] *= shrink
            # torch's lerp: each end is met exactly by the form that starts from it
            m[j] = m[j] + share1 * (g - m[j]) if share1 < 0.5 else g - (g - m[j]) * beta1
            v[j] = v[j] * beta2 + share2 * g * g
            change = m[j] / correction1 * lr
            if rectified:
                change = change * (root2 / (np.sqrt(v[j]) + eps)) * rect
            w[j] -= change


RULE = Rule(torch.optim.RAdam, rows=RAdamRows())
