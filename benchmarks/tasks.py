"""What studies of quality learn: flights, which are real, and two sets that are made up, so that the best AUC is known.

Each label of a made-up set is drawn with a probability that a hidden teacher gives the example. Nothing can rank the
examples better than the teacher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from flights import Examples, Task, flights

#: How many values each of the 14 columns of UCI Adult has, its numbers in at most a hundred ranges.
ADULT_VALUES = (73, 9, 100, 16, 16, 7, 15, 6, 5, 2, 100, 92, 94, 42)
#: The people there, and how many of them are for testing.
ADULT_PEOPLE, ADULT_TESTED = 48842, 16281

#: 26 fields, as Criteo has them, with ten million ids together.
FIELDS, IDS = 26, 10_000_000
ZIPF = 1.1


@dataclass(frozen=True)
class Problem:
    """A task, and the AUC of the teacher on what is tested, if there is one."""

    name: str
    task: Task
    best: float | None = None


def as_large_as_adult() -> Problem:
    """Not UCI Adult, which is not at hand, but a set of its shape: as many people, columns and values, about a quarter
    positive. The teacher adds up a weight for each value, and one for each pair of values of some columns."""
    draw = np.random.default_rng(1994)
    columns, score, first = [], np.zeros(ADULT_PEOPLE), 0
    for values in ADULT_VALUES:
        chance = draw.dirichlet(np.full(values, 0.5))
        column = draw.choice(values, ADULT_PEOPLE, p=chance)
        score += draw.normal(0, 0.45, values)[column]
        columns.append(first + column)
        first += values
    for one, other in ((0, 3), (5, 6), (3, 6), (9, 12)):
        weights = draw.normal(0, 0.45, (ADULT_VALUES[one], ADULT_VALUES[other]))
        starts = np.cumsum((0, *ADULT_VALUES))
        score += weights[columns[one] - starts[one], columns[other] - starts[other]]
    return _taught("as large as Adult", np.stack(columns, 1), score, 0.24, ADULT_TESTED, draw)


def ten_million_ids(examples: int = 400_000, tested: int = 60_000) -> Problem:
    """Clicks as Criteo's: in each field some ids are very frequent and most are rare. The teacher adds up a weight for
    each id, and what the model does not see of an example is chance."""
    draw = np.random.default_rng(2014)
    values = IDS // FIELDS
    frequency = np.cumsum(1 / np.arange(1, values + 1) ** ZIPF)
    frequency /= frequency[-1]
    ids = np.searchsorted(frequency, draw.random((examples, FIELDS)))
    ids = np.minimum(ids, values - 1) + values * np.arange(FIELDS)
    score = draw.normal(0, 0.35, values * FIELDS)[ids].sum(1)
    return _taught("ten million ids", ids, score, 0.25, tested, draw)


def new_york() -> Problem:
    return Problem("flights", flights())


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "flights": cache(new_york),
    "adult": cache(as_large_as_adult),
    "ids": cache(ten_million_ids),
}


def _taught(
    name: str, ids: np.ndarray, score: np.ndarray, positive: float, tested: int, draw: np.random.Generator
) -> Problem:
    """The examples with labels; the last ones are tested, and as many before them, a quarter of that, are for
    validation."""
    from sklearn.metrics import roc_auc_score

    low, high = -30.0, 30.0  # the bias with which so many are positive
    for _ in range(60):
        bias = (low + high) / 2
        low, high = (bias, high) if _sigmoid(score + bias).mean() < positive else (low, bias)
    labels = (draw.random(len(score)) < _sigmoid(score + low)).astype(np.float32)
    examples = Examples(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(labels))
    stops: Sequence[int] = (0, len(score) - tested - tested // 4, len(score) - tested, len(score))
    parts = [examples.part(slice(start, stop)) for start, stop in pairwise(stops)]
    return Problem(name, Task(*parts), float(roc_auc_score(labels[-tested:], score[-tested:])))


def _sigmoid(score: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-score))
