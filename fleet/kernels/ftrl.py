"""FTRL-Proximal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from fleet.kernels.one_by_one import OneByOne, refuse_negative
from fleet.kernels.rule import Column, Rule, scalars
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, compiled, prefetch, row


class Ftrl(OneByOne):
    """Follows the regularized leader (McMahan et al., 2013), as PaddlePaddle's ``Ftrl`` does.

    With n the sum of squared gradients and p = ``-lr_power``, each step with gradient g does::

        z += g - ((n + g^2)^p - n^p) / lr * w
        n += g^2
        w = (l1 * sign(z) - z) / (n^p / lr + 2 * l2)  where |z| > l1, else 0

    ``l1`` makes weights exactly zero, ``l2`` makes them small.

    A weight is made from n and z alone. Its initial value is therefore kept only as far as gradients have taken it
    into z: an element whose gradients have all been exactly zero becomes 0 at the first step, and a large
    ``initial_accumulator_value`` pulls the others towards 0. With ``lr=0`` nothing changes, neither weights nor state.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
        >>> optimizer = fleet.optim.Ftrl(model.parameters(), lr=0.1, l1=0.01)  # rows of tables as well
        >>> optimizer = fleet.distributed_optimizer(optimizer, model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(ids).mean())
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        refuse_negative(lr=lr, l1=l1, l2=l2, initial_accumulator_value=initial_accumulator_value)
        if not lr_power <= 0:
            raise ValueError(f"Invalid lr_power value: {lr_power}")
        defaults = {
            "lr": lr,
            "l1": l1,
            "l2": l2,
            "lr_power": lr_power,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        lr = float(group["lr"])
        if lr == 0:  # the formula divides by it
            return
        state = self.state[param]
        if not state:
            state["squared_accum"] = torch.full_like(param, group["initial_accumulator_value"])
            state["linear_accum"] = torch.zeros_like(param)
        squares, linear, power = state["squared_accum"], state["linear_accum"], -group["lr_power"]
        before = squares.pow(power)
        squares.addcmul_(grad, grad)
        root = squares.pow(power)
        linear.add_(grad, alpha=-1 if group["maximize"] else 1).addcmul_(root - before, param, value=-1 / lr)
        scale = root.div_(lr).add_(2 * group["l2"])
        param.copy_(linear.sign().mul_(group["l1"]).sub_(linear).div_(scale))
        # The second: squares of the smallest gradients are zero. Said this way round, a nan stays one.
        param.masked_fill_((linear.abs() <= group["l1"]) | (scale == 0), 0)


class FtrlRows:
    options: Mapping[str, Any] = {
        "lr": 1e-3,
        "l1": 0.0,
        "l2": 0.0,
        "lr_power": -0.5,
        "initial_accumulator_value": 0.0,
        "maximize": False,
    }

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        fill = options.get("initial_accumulator_value", 0.0)
        return {"squared_accum": Column(dim, fill), "linear_accum": Column(dim)}

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        return ("weights made anew of gradients alone",)

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
        if o["lr"] == 0:
            return
        flags = o["lr_power"] == -0.5, bool(o["maximize"])
        numbers = scalars(weights.dtype, o["lr"], o["l1"], 2 * o["l2"], -o["lr_power"])
        _step(weights, state["squared_accum"], state["linear_accum"], slots, grads, *flags, *numbers)


@compiled
def _step(
    weights: Rows,
    squares: Rows,
    linear: Rows,
    slots: Ids,
    grads: Array,
    square_root: bool,
    maximize: bool,
    lr: np.floating[Any],
    l1: np.floating[Any],
    double_l2: np.floating[Any],
    power: np.floating[Any],
) -> None:
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(weights, slots[k + AHEAD])
            prefetch(squares, slots[k + AHEAD])
            prefetch(linear, slots[k + AHEAD])
        w, n, z = row(weights, slots[k]), row(squares, slots[k]), row(linear, slots[k])
        for j in range(w.size):
            g = -grads[k, j] if maximize else grads[k, j]
            total = n[j] + g * g
            if square_root:
                before, root = np.sqrt(n[j]), np.sqrt(total)
            else:
                before, root = n[j] ** power, total**power
            n[j] = total
            z[j] += g - (root - before) / lr * w[j]
            scale = root / lr + double_l2
            if np.abs(z[j]) <= l1 or scale == 0:
                w[j] = 0
            else:
                w[j] = (np.sign(z[j]) * l1 - z[j]) / scale


#: torch's vector loops have a power function of their own, unlike the C library's in the last bit.
RULE = Rule(Ftrl, rows=FtrlRows(), seamless=False)
