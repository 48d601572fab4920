"""RMSprop, plain or centered, with or without momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.rule import Column, Rule, column, named, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class RMSpropRows:
    options: Mapping[str, Any] = {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "maximize": False,
    }

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        needed = {
            "square_avg": True,
            "grad_avg": bool(options.get("centered")),
            "momentum_buffer": options.get("momentum", 0) > 0,
        }
        return {name: Column(dim) for name, used in needed.items() if used}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        o = {**self.options, **options}
        # Of an average that keeps nothing, or all, nothing fades.
        return named(o, *(() if o["alpha"] == 1 else ("alpha",)), "momentum", "weight_decay")

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
        averages, buffers = (column(state, name, weights) for name in ("grad_avg", "momentum_buffer"))
        numbers = scalars(
            weights.dtype, o["lr"], o["alpha"], 1 - o["alpha"], o["eps"], o["weight_decay"], o["momentum"]
        )
        flags = bool(o["centered"]), bool(o["maximize"])
        _step(weights, state["square_avg"], averages, buffers, slots, grads, *flags, *numbers)


@compiled
def _step(
    weights: Rows,
    squares: Rows,
    averages: Rows,
    buffers: Rows,
    slots: Ids,
    grads: Array,
    centered: bool,
    maximize: bool,
    lr: np.floating[Any],
    alpha: np.floating[Any],
    share: np.floating[Any],
    eps: np.floating[Any],
    decay: np.floating[Any],
    momentum: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(squares, slots[k + AHEAD])
        slot = slots[k]
        w, square = row(weights, slot), row(squares, slot)
        average, buffer = row(averages, slot), row(buffers, slot)
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            square[j] = square[j] * alpha + share * g * g
            spread = square[j]
            if centered:
                mean = average[j]
                # torch's lerp: each end is met exactly by the form that starts from it
                mean = mean + share * (g - mean) if share < 0.5 else g - (g - mean) * alpha
                average[j] = mean
                spread -= mean * mean
            change = g / (np.sqrt(spread) + eps)
            if momentum > 0:
                change += buffer[j] * momentum
                buffer[j] = change
            w[j] -= lr * change


RULE = Rule(
    torch.optim.RMSprop,
    rows=RMSpropRows(),
    kept_from_the_first={"momentum": "momentum_buffer", "centered": "grad_avg"},
)
