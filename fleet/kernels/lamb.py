"""Adam with a trust ratio for each parameter, for very large batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fleet.kernels.one_by_one import OneByOne, refuse_negative
from fleet.kernels.rule import Rule


class Lamb(OneByOne):
    """Adapts moments layer by layer (You et al., 2020), as PaddlePaddle's ``Lamb`` does.

    With m and v Adam's moments, corrected for their start at zero, each step does::

        r = m / (sqrt(v) + eps) + weight_decay * w
        w -= lr * |w| / |r| * r

    The norms are those of the whole parameter; where one of them is zero their ratio is taken as 1. Parameters that
    should have no weight decay (biases, norms) go into a param group of their own.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = fleet.distributed_optimizer(fleet.optim.Lamb(model.parameters(), lr=0.1), model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(torch.ones(2, 4)).mean())
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        refuse_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2:
            raise ValueError(f"Invalid betas: {betas}")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        step = float(state["step"])
        mean = state["exp_avg"].lerp_(-grad if group["maximize"] else grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        change = (mean / (1 - beta1**step)).div_(spread).add_(param, alpha=group["weight_decay"])
        # The ratio stays a tensor: reading it would make the processor wait for the device.
        dtype = torch.promote_types(param.dtype, torch.float32)
        weight_norm, change_norm = (torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in (param, change))
        trust = torch.where((weight_norm == 0) | (change_norm == 0), 1.0, weight_norm / change_norm)
        param.sub_(change.mul_(trust * float(group["lr"])))


RULE = Rule(Lamb, sliceable=False)
