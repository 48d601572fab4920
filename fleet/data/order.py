"""Decides who reads what in which order: the same for the same numbers, on every machine and with every release.

Shuffling is in two steps, as in CorgiPile (Xu et al., SIGMOD 2022): pieces of files in a random order, and, of as many
of them as fit into memory, all samples in a random order. So a sample's place follows from a few numbers, and a reading
goes on from anywhere without what was held in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import GAMMA, mix
from fleet.numeric.jit import compiled

T = TypeVar("T")


@compiled
def _keys(parts: Any, number: int) -> Any:
    state = GAMMA
    for part in parts:
        state = mix(state ^ mix(np.uint64(part) + GAMMA))
    keys = np.empty(number, np.uint64)
    for k in range(number):
        state += GAMMA
        keys[k] = mix(state)
    return keys


def shuffled(number: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the numbers below ``number`` in an order that the key decides; another key gives another order."""
    return np.argsort(_keys(np.array(key, np.int64), number), kind="stable")


def dealt(pieces: Sequence[T], reader: int, readers: int, shuffle: Sequence[int] | None) -> list[T]:
    """Return the pieces that one of several processes reads; together they read each piece once."""
    order = range(len(pieces)) if shuffle is None else shuffled(len(pieces), *shuffle).tolist()
    return [pieces[index] for index in order[reader::readers]]
