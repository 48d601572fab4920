"""Steps the wrapped optimizers in this process, on gradients that are the same on every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fleet.errors import UnsupportedError
from fleet.optimizer import DistributedOptimizer, Stepper


class Synchronized(Stepper, Protocol):
    """Runs as a worker whose backwards can be kept from sending anything."""

    def set_synchronized(self, wanted: bool) -> bool: ...


class SynchronizedOptimizer(DistributedOptimizer):
    """Wraps the user's optimizers in a collective job. ``scaler`` scales the loss in ``minimize``, where the strategy
    asks for AMP; ``compressed`` says that gradients of different scales must not be mixed."""

    #: A GradScaler then hands its scale over and leaves to ``step`` what to skip, so that no worker misses a round.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stepper: Callable[[], Synchronized],
        running: Callable[[], bool],
        scaler: torch.amp.GradScaler | None,
        compressed: bool,
    ) -> None:
        super().__init__(optimizers, stepper, running)
        self._collective = stepper
        self._scaler = scaler
        self._compressed = compressed

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if not hasattr(self, "found_inf"):
            return super()._step(closure)
        # A GradScaler calls; it takes no closure.
        if self._compressed:
            raise UnsupportedError(
                "dgc and a GradScaler exclude each other: what is held back would mix gradients of different scales",
                todo="Train in bfloat16, which needs no scaler, or leave dgc out.",
            )
        if self.grad_scale is not None:
            for gradient in self._gradients():
                gradient.div_(self.grad_scale.to(gradient.device))
        return self._stepper().step_here(self._update_if_finite)

    def _update_if_finite(self) -> None:
        """Update unless a gradient is not finite. All workers decide alike, as the gradients are everybody's; in local
        SGD each decides for itself."""
        if all(bool(torch.isfinite(gradient).all()) for gradient in self._gradients()):
            self._update()

    def _gradients(self) -> list[torch.Tensor]:
        return [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]

    def minimize(self, loss: torch.Tensor) -> None:
        """Take a step on ``loss``: ``zero_grad(); loss.backward(); step()``, with the loss scaled where the strategy
        asks for AMP."""
        if self._scaler is None:
            super().minimize(loss)
            return
        self.zero_grad()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self)
        self._scaler.update()
        self._stepper().figures.saw(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surround backwards that only accumulate: they send nothing, and the first one outside sends everything."""
        worker = self._collective()
        before = worker.set_synchronized(False)
        try:
            yield
        finally:
            worker.set_synchronized(before)
