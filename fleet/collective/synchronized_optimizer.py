"""Steps the wrapped optimizers in this process, on gradients that are the same on every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fleet.errors import UnsupportedError
from fleet.numeric.tensors import finite
from fleet.optimizer import AveragingOptimizer, AveragingStepper


class SynchronizedOptimizer(AveragingOptimizer):
    """Wraps the user's optimizers in a collective job. ``scaler`` scales the loss in ``minimize``, where the strategy
    asks for AMP; ``compressed`` says that gradients of different scales must not be mixed."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stepper: Callable[[], AveragingStepper],
        running: Callable[[], bool],
        scaler: torch.amp.GradScaler | None,
        compressed: bool,
    ) -> None:
        super().__init__(optimizers, stepper, running)
        self._scaler = scaler
        self._compressed = compressed

    def _step_if_finite(self) -> None:
        if self._compressed:
            raise UnsupportedError(
                "dgc and a GradScaler exclude each other: what is held back would mix gradients of different scales",
                todo="Train in bfloat16, which needs no scaler, or leave dgc out.",
            )
        self._stepper().step_here(self._update_if_finite)

    def _update_if_finite(self) -> None:
        """Update unless a gradient is not finite. All workers decide alike, as the gradients are everybody's; in local
        SGD each decides for itself."""
        if all(bool(finite(gradient)) for gradient in self._gradients()):
            self._update()

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
