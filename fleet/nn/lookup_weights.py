"""Adds up the weights of look-ups whose gradients stand in a table's ``weight.grad``.

A look-up counts when its gradient travels. So its weights are noted when its backward runs, and they stand as long as
the gradient does: a backward that finds no gradient begins anew, and one that adds to a gradient adds to them. A
look-up without a backward leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fleet.errors import ConfigurationError
from fleet.numeric.ids import unique
from fleet.numeric.jit import Array, Ids


class LookupWeights:
    """Holds the sums by id of one table, look-up by look-up."""

    def __init__(self) -> None:
        self._begun = 0
        self._noted: list[tuple[int, Ids, Array]] = []
        self._backward = -1

    def look_up(self, ids: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None) -> WeighedLookup:
        """Return what notes this look-up of distinct ``ids`` when its backward runs. ``weights`` has one number for
        every id that was asked for; none is 1 each."""
        self._begun += 1
        given = None if weights is None else weights.detach().to("cpu", torch.float64, copy=True).reshape(-1)
        if given is not None and not bool(((given >= 0) & given.isfinite()).all()):
            wrong = ~((given >= 0) & given.isfinite())
            raise ConfigurationError(
                "a weight of a look-up is impossible", expected="a finite number, 0 or more", got=float(given[wrong][0])
            )
        return WeighedLookup(self, self._begun, ids, inverse, given)

    def note(self, number: int, ids: Ids, sums: Array, *, adds: bool) -> None:
        """Note a look-up whose backward runs; ``adds`` says that there is a gradient, to which this one is added."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not adds:
            self._noted.clear()
        self._backward = backward
        self._noted.append((number, ids, sums))

    def of(self, ids: Ids) -> Array:
        """Return the sums for these ids, which are distinct, in the order of the look-ups. An id whose gradient came
        without a look-up counts 1."""
        noted = [(each, weights) for _, each, weights in sorted(self._noted, key=lambda each: each[0])]
        return summed(noted, ids, otherwise=1)


@dataclass(frozen=True, eq=False)
class WeighedLookup:
    """Holds one look-up until its backward runs."""

    table: LookupWeights
    number: int
    ids: torch.Tensor
    inverse: torch.Tensor
    weights: torch.Tensor | None

    def note(self, *, adds: bool) -> None:
        places = self.inverse.reshape(-1).numpy()
        given = None if self.weights is None else self.weights.numpy()
        sums = np.bincount(places, given, len(self.ids)).astype(np.float64)
        self.table.note(self.number, self.ids.numpy(), sums, adds=adds)


def summed(parts: Sequence[tuple[Ids, Array]], ids: Ids, *, otherwise: float) -> Array:
    """Return for distinct ``ids`` the sums over the parts, in their order; ``otherwise`` for an id that none of them
    has."""
    sums, seen = np.zeros(ids.size), np.zeros(ids.size, bool)
    for each, weights in parts:
        # The ids come first, so what is among them has the place that it has there.
        _, places = unique(np.concatenate([ids, each]))
        places = places[ids.size :]
        here = places < ids.size
        sums[places[here]] += weights[here]
        seen[places[here]] = True
    sums[~seen] = otherwise
    return sums
