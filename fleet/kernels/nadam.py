"""NAdam: Adam with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fleet.kernels.adam_family import OPTIONS, MomentRows, decay_and_shrink
from fleet.kernels.rule import Rule, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class NAdamRows(MomentRows):
    options = OPTIONS["NAdam"]

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
        mu, following = (_mu(beta1, o["momentum_decay"], t) for t in (step, step + 1))
        product = _mu_product(beta1, o["momentum_decay"], step)
        rates = lr * (1 - mu) / (1 - product), lr * following / (1 - product * following)
        betas = beta1, 1 - beta1, beta2, 1 - beta2
        numbers = scalars(weights.dtype, *rates, *betas, 1 - beta2**step, o["eps"], *decay_and_shrink(o))
        _step(weights, state["exp_avg"], state["exp_avg_sq"], slots, grads, bool(o["maximize"]), *numbers)


def _mu(beta1: float, momentum_decay: float, t: int) -> float:
    """Return the momentum of step ``t``."""
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (t * momentum_decay)))


@lru_cache(maxsize=256)  # the tables of a server often stand at the same step
def _mu_product(beta1: float, momentum_decay: float, t: int) -> float:
    """Return the product of the momenta of steps 1 to ``t``.

    torch keeps it in the state, in float32 and multiplied on from step to step; as long as nobody changes the options
    in mid-training the two agree to float32's rounding. Every factor is at most beta1, so the product is soon too small
    to change 1 - product: factors after that are left out, and a step late in training costs no more than an early one.
    """
    product = 1.0
    for i in range(1, t + 1):
        product *= _mu(beta1, momentum_decay, i)
        if product < 1e-30:
            break
    return product


@compiled
def _step(
    weights: Rows,
    firsts: Rows,
    seconds: Rows,
    slots: Ids,
    grads: Array,
    maximize: bool,
    rate: np.floating[Any],
    momentum_rate: np.floating[Any],
    beta1: np.floating[Any],
    share1: np.floating[Any],
    beta2: np.floating[Any],
    share2: np.floating[Any],
    correction: np.floating[Any],
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
            spread = np.sqrt(v[j] / correction) + eps
            w[j] -= rate * g / spread
            w[j] -= momentum_rate * m[j] / spread


RULE = Rule(torch.optim.NAdam, rows=NAdamRows())
