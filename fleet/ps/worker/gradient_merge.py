"""Merges the gradients of several steps into one push: adds them up, rows by id, and takes the mean where that is due.

Summing keeps what plain SGD would have done step by step; for every other optimizer the mean is a gradient of the usual
size. Each param group is decided on its own. Weights of look-ups are summed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fleet.nn.lookup_weights import summed
from fleet.numeric.jit import Array, Ids
from fleet.numeric.merge import merge
from fleet.ps.worker.describe import Description
from fleet.ps.worker.push import Clocks, Gradients, Rows


class GradientMerge:
    """Merges steps: ``add`` returns gradients every ``steps`` steps. ``is_sgd`` says whether to sum; None finds it out
    for each group."""

    def __init__(self, described: Description, steps: int, is_sgd: bool | None) -> None:
        self.steps = steps
        self._described = described
        self._is_sgd = is_sgd
        self._count = 0
        self._dense: list[torch.Tensor | None] = []
        self._dense_counts: list[int] = []
        self._rows: dict[int, list[Rows]] = {}
        self._weights: dict[int, list[tuple[Ids, Array]]] = {}
        self._read = Clocks()
        self._options: Sequence[str] = ()
        self._state: np.ndarray[Any, Any] | None = None

    @torch.no_grad()
    def add(self, gradients: Gradients) -> Gradients | None:
        """Take one step's gradients; return them, merged with those before, when it is time to send."""
        self._count += 1
        missing = len(gradients.dense) - len(self._dense)
        self._dense += [None] * missing
        self._dense_counts += [0] * missing
        for place, grad in enumerate(gradients.dense):
            if grad is not None:
                total = self._dense[place]
                # The first is copied: it is still the parameter's .grad, which the user goes on to clear or fill.
                self._dense[place] = grad.clone() if total is None else total.add_(grad)
                self._dense_counts[place] += 1
        for table, pair in gradients.rows.items():
            self._rows.setdefault(table, []).append(pair)
        for table, weights in gradients.weights.items():
            self._weights.setdefault(table, []).append((gradients.rows[table][0], weights))
        self._read, self._options = self._read.or_earlier(gradients.read), gradients.options
        self._state = self._state if gradients.state is None else gradients.state
        return self.rest() if self._count == self.steps else None

    def rest(self) -> Gradients | None:
        """Return what has not been sent yet, if there is anything."""
        if self._count == 0:
            return None
        spec = self._described.spec
        for param, total, count in zip(spec.params, self._dense, self._dense_counts, strict=True):
            if total is not None and count > 1 and not self._sums(param.group):
                total.div_(count)
        rows = {}
        for table, pairs in self._rows.items():
            divisor = 1 if self._sums(spec.tables[table].group) else len(pairs)
            rows[table] = merge(pairs, divisor)
        weights = {table: summed(parts, rows[table][0], otherwise=0) for table, parts in self._weights.items()}
        merged = Gradients(
            self._dense, rows, self._read, self._options, self._count, state=self._state, weights=weights
        )
        self._count, self._dense, self._dense_counts, self._rows, self._read = 0, [], [], {}, Clocks()
        self._weights = {}
        self._state = None
        return merged

    def _sums(self, group: int) -> bool:
        if self._is_sgd is not None:
            return self._is_sgd
        return self._described.spec.groups[group].rule == "SGD" and not json.loads(self._options[group])["momentum"]
