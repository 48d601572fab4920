"""Steps the wrapped optimizers on dense parameters in this process, and has the servers step on rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from fleet.optimizer import AveragingOptimizer, AveragingStepper


class HybridStepper(AveragingStepper, Protocol):
    """Runs as a worker that can leave out a step, rows as well."""

    def step_here(self, update: Callable[[], None], *, if_finite: bool = False) -> None: ...


class HybridOptimizer(AveragingOptimizer):
    def _step_if_finite(self) -> None:
        cast(HybridStepper, self._stepper()).step_here(self._update, if_finite=True)
