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
from fleet.ps.worker.push import Clocks, Gradients, Rows, kept


class GradientMerge:
    """Merges steps: each is added, ``merged`` returns what they come to, and ``clear`` forgets them when that is on its
    way. So what fails in between leaves all of them here. ``is_sgd`` says whether to sum; None finds it out for each
    group."""

    def __init__(self, described: Description, is_sgd: bool | None) -> None:
        self._described = described
        self._is_sgd = is_sgd
        self.clear()

    def clear(self) -> None:
        """Have no steps."""
        #: how many there are
        self.count = 0
        self._dense: list[torch.Tensor | None] = []
        self._dense_counts: list[int] = []
        self._rows: dict[int, list[Rows]] = {}
        self._weights: dict[int, list[tuple[Ids, Array]]] = {}
        self._read = Clocks()
        self._options: Sequence[str] = ()
        self._state: np.ndarray[Any, Any] | None = None

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Take one step's gradients: all of them, or none where there is no memory for them."""
        missing = len(gradients.dense) - len(self._dense)
        dense, counts = [*self._dense, *[None] * missing], [*self._dense_counts, *[0] * missing]
        # The first is copied: it is still the parameter's .grad, which the user goes on to clear or fill.
        mine = [
            grad.clone() if total is None and grad is not None else total
            for total, grad in zip(dense, gradients.dense, strict=True)
        ]
        rows = {table: kept(pair) for table, pair in gradients.rows.items()}
        for place, grad in enumerate(gradients.dense):
            if grad is not None:
                total = dense[place]
                if total is not None:
                    total.add_(grad)
                counts[place] += 1
        self._dense, self._dense_counts = mine, counts
        for table, pair in rows.items():
            self._rows.setdefault(table, []).append(pair)
        for table, weights in gradients.weights.items():
            self._weights.setdefault(table, []).append((rows[table][0], weights))
        self._read, self._options = self._read.or_earlier(gradients.read), gradients.options
        self._state = self._state if gradients.state is None else gradients.state
        self.count += 1

    @torch.no_grad()
    def merged(self) -> Gradients:
        """Return what all steps come to, of which there are some. Nothing changes here."""
        spec = self._described.spec
        dense = [
            total if total is None or count == 1 or self._sums(param.group) else total / count
            for param, total, count in zip(spec.params, self._dense, self._dense_counts, strict=True)
        ]
        rows = {}
        for table, pairs in self._rows.items():
            divisor = 1 if self._sums(spec.tables[table].group) else len(pairs)
            rows[table] = merge(pairs, divisor)
        weights = {table: summed(parts, rows[table][0], otherwise=0) for table, parts in self._weights.items()}
        return Gradients(dense, rows, self._read, self._options, self.count, state=self._state, weights=weights)

    def _sums(self, group: int) -> bool:
        if self._is_sgd is not None:
            return self._is_sgd
        return self._described.spec.groups[group].rule == "SGD" and not json.loads(self._options[group])["momentum"]
