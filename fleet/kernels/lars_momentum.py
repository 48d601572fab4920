"""Momentum with a learning rate for each parameter, for very large batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fleet.kernels.one_by_one import OneByOne, refuse_negative
from fleet.kernels.rule import Rule


class LarsMomentum(OneByOne):
    """Adapts the learning rate layer by layer (You et al., 2017), as PaddlePaddle's ``LarsMomentum`` does.

    Each step with gradient g does, with norms of the whole parameter::

        rate = lr * lars_coeff * |w| / (|g| + weight_decay * |w| + eps)
        v = momentum * v + rate * (g + weight_decay * w)
        w -= v

    Where one of the norms is zero the rate is ``lr``. The same holds with ``weight_decay=0``, which leaves plain
    momentum: PaddlePaddle has it so, for parameters that are not to be scaled (biases, norms) in a param group of their
    own.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = fleet.distributed_optimizer(fleet.optim.LarsMomentum(model.parameters(), lr=0.1), model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(torch.ones(2, 4)).mean())
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        weight_decay: float = 0.0005,
        eps: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        refuse_negative(lr=lr, momentum=momentum, lars_coeff=lars_coeff, weight_decay=weight_decay, eps=eps)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "lars_coeff": lars_coeff,
            "weight_decay": weight_decay,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, lr, decay = self.state[param], float(group["lr"]), group["weight_decay"]
        if not state:
            state["velocity"] = torch.zeros_like(param)
        change = (-grad if group["maximize"] else grad).add(param, alpha=decay)
        if decay > 0:
            # The rate stays a tensor: reading it would make the processor wait for the device.
            dtype = torch.promote_types(param.dtype, torch.float32)
            weight_norm, grad_norm = (torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in (param, grad))
            scale = group["lars_coeff"] * weight_norm / (grad_norm + decay * weight_norm + group["eps"])
            change.mul_(torch.where((weight_norm == 0) | (grad_norm == 0), lr, lr * scale))
        else:
            change.mul_(lr)
        param.sub_(state["velocity"].mul_(group["momentum"]).add_(change))


RULE = Rule(LarsMomentum, sliceable=False)
