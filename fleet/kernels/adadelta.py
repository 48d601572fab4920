"""Adadelta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.rule import Column, Rule, named, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class AdadeltaRows:
    options: Mapping[str, Any] = {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False}

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:  # noqa: ARG002
        return {"square_avg": Column(dim), "acc_delta": Column(dim)}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        o = {**self.options, **options}
        forgets = () if o["rho"] == 1 else (f"rho={o['rho']}",)
        return forgets + named(o, "weight_decay")

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
        numbers = scalars(weights.dtype, o["lr"], o["rho"], 1 - o["rho"], o["eps"], o["weight_decay"])
        _step(weights, state["square_avg"], state["acc_delta"], slots, grads, bool(o["maximize"]), *numbers)


@compiled
def _step(
    weights: Rows,
    squares: Rows,
    deltas: Rows,
    slots: Ids,
    grads: Array,
    maximize: bool,
    lr: np.floating[Any],
    rho: np.floating[Any],
    share: np.floating[Any],
    eps: np.floating[Any],
    decay: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(squares, slots[k + AHEAD])
            prefetch(deltas, slots[k + AHEAD])
        slot = slots[k]
        w, square, moved = row(weights, slot), row(squares, slot), row(deltas, slot)
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            square[j] = square[j] * rho + share * g * g
            delta = np.sqrt(moved[j] + eps) / np.sqrt(square[j] + eps) * g
            moved[j] = moved[j] * rho + share * delta * delta
            w[j] -= lr * delta


RULE = Rule(torch.optim.Adadelta, rows=AdadeltaRows())
