"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleet.kernels.rule import Column, Rule, column, named, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class SGDRows:
    options: Mapping[str, Any] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        if not options.get("momentum", 0):
            return {}
        # The first step sets the buffer to the gradient, undamped. A row may exist before its first step
        # (uploaded values), so that it had one is state too.
        return {"momentum_buffer": Column(dim), "started": Column(1)}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return named({**self.options, **options}, "momentum", "weight_decay")

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
        buffer, started = (column(state, name, weights) for name in ("momentum_buffer", "started"))
        numbers = scalars(weights.dtype, o["lr"], o["momentum"], 1 - o["dampening"], o["weight_decay"])
        _step(weights, buffer, started, slots, grads, bool(o["nesterov"]), bool(o["maximize"]), *numbers)


@compiled
def _step(
    weights: Rows,
    buffers: Rows,
    started: Rows,
    slots: Ids,
    grads: Array,
    nesterov: bool,
    maximize: bool,
    lr: np.floating[Any],
    momentum: np.floating[Any],
    undamped: np.floating[Any],
    decay: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            if momentum != 0:
                prefetch(buffers, slots[k + AHEAD])
        slot = slots[k]
        w = row(weights, slot)
        if momentum == 0:
            for j in range(w.size):
                g = -grads[k, j] if maximize else grads[k, j]
                if decay != 0:
                    g += decay * w[j]
                w[j] -= lr * g
            continue
        buffer = row(buffers, slot)
        first = row(started, slot)[0] == 0
        row(started, slot)[0] = 1
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            if decay != 0:
                g += decay * w[j]
            buffer[j] = g if first else buffer[j] * momentum + undamped * g
            w[j] -= lr * (g + momentum * buffer[j] if nesterov else buffer[j])


RULE = Rule(torch.optim.SGD, rows=SGDRows(), takes_sparse=True)
