"""The gradients that the user's backwards have left, as they stand on the parameters and in the tables' handles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fleet.errors import NonFiniteGradientError, UnsupportedError
from fleet.numeric.merge import merge
from fleet.ps.worker.context import Floor
from fleet.ps.worker.gradient_merge import Rows


class UserGradients:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self.check_finite = floor.strategy.check_finite or floor.knobs.check_finite

    @torch.no_grad()
    def dense(self) -> list[torch.Tensor | None]:
        """The flat gradient of every parameter, on the CPU."""
        grads = [param.grad for param in self._floor.trained.description.params]
        # With many small parameters each look at a gradient counts.
        flat = [
            grad
            if grad is None or (grad.dim() == 1 and grad.is_cpu and not grad.is_sparse)
            else self._flat(place, grad)
            for place, grad in enumerate(grads)
        ]
        if self.check_finite:
            for index, grad in enumerate(flat):
                if grad is not None and not bool(torch.isfinite(grad).all()):
                    raise self._not_finite(f"the gradient of {self._name(index)}")
        return flat

    def _flat(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            raise UnsupportedError(
                f"the gradient of {self._name(index)} is sparse",
                todo="Hand the model to distributed_optimizer(…, model=…), so that its sparse tables go remote.",
            )
        return grad.reshape(-1).to("cpu")

    def rows(self) -> dict[int, Rows]:
        """For every table that was used, distinct ids and the gradients of their rows."""
        rows: dict[int, Rows] = {}
        for index, handle in enumerate(self._floor.trained.description.handles):
            collected = [(ids.numpy(), grads.numpy()) for ids, grads in handle.collected()]
            if not collected:
                continue
            ids, grads = collected[0] if len(collected) == 1 else merge(collected, 1)
            if self.check_finite and not np.isfinite(grads).all():
                got = f"id {ids[~np.isfinite(grads).all(axis=1)][0]}"
                raise self._not_finite(f"the gradient of a row of {handle.name!r}", got)
            rows[index] = (ids, grads)
        return rows

    def _name(self, index: int) -> str:
        return repr(self._floor.trained.plan.spec.params[index].name)

    def _not_finite(self, what: str, got: Any = None) -> NonFiniteGradientError:
        where = f"worker {self._floor.assignment.index}, step {self._floor.progress.taken + 1}"
        return NonFiniteGradientError(f"{what} holds NaN or infinity", where=where, got=got)
