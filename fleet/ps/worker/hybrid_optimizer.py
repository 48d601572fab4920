"""Steps the wrapped optimizers on dense parameters in this process, and has the servers step on rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fleet.optimizer import DistributedOptimizer, KeptAt, Stepper


class HybridStepper(Stepper, Protocol):
    """Runs as a worker whose backwards average dense gradients among the workers."""

    def set_synchronized(self, wanted: bool) -> bool: ...


class HybridOptimizer(DistributedOptimizer):
    #: A GradScaler then hands its scale over and leaves to ``step`` what to skip, so that no worker misses a step.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stepper: Callable[[], HybridStepper],
        running: Callable[[], bool],
        kept_at: KeptAt,
    ) -> None:
        super().__init__(optimizers, stepper, running, kept_at)
        self._hybrid = stepper

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if not hasattr(self, "found_inf"):
            return super()._step(closure)
        # A GradScaler calls; it takes no closure. What it finds in gradients it finds on every worker.
        gradients = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        if self.grad_scale is not None:
            for gradient in gradients:
                gradient.div_(self.grad_scale.to(gradient.device))
        if not self.found_inf:
            return super()._step(None)
        self.zero_grad()
        return self._hybrid().step_here(lambda: None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surround backwards that only accumulate: they send nothing, and the first one outside sends everything."""
        worker = self._hybrid()
        before = worker.set_synchronized(False)
        try:
            yield
        finally:
            worker.set_synchronized(before)
