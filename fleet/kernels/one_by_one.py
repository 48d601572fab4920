"""Holds what the optimizers that torch lacks have in common: a step goes through the parameters one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: What torch calls an option in its errors, where that is not its name.
_WORDS = {"lr": "learning rate", "eps": "epsilon value"}


def refuse_negative(**options: float | torch.Tensor) -> None:
    """Refuse options below zero, and NaN, as torch's classes do."""
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"Invalid {_WORDS.get(name, f'{name} value')}: {value}")


class OneByOne(torch.optim.Optimizer):
    """Steps through the parameters one by one; a derived class says what a step does to one of them."""

    @abstractmethod
    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self._usable(param.grad), group)
        return loss

    def _usable(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided or grad.is_complex():
            raise RuntimeError(f"{type(self).__name__} supports neither sparse nor complex gradients")
        return grad
