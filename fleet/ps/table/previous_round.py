"""What the last round has changed is kept as it was before, for a worker that was killed in the middle of its push.

Some servers may have that push and have closed the round with it, others may not. When the worker starts again it has
to compute the step once more, and on the same values, or each server would get another gradient. One round is enough:
the next one does not close without this worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PreviousRound:
    version: int
    #: all dense values, one flat tensor an element type
    dense: Sequence[torch.Tensor]
    #: by table: the ids of the rows, distinct, and their weights
    rows: Mapping[int, tuple[Array, Array]]

    def restore(self, index: int, ids: Array, rows: Array) -> None:
        """Turn rows that were read after the round back into those that were there before it."""
        if index not in self.rows:
            return
        changed, weights = self.rows[index]
        here = np.isin(ids, changed)
        order = np.argsort(changed)
        rows[here] = weights[order[np.searchsorted(changed, ids[here], sorter=order)]]
