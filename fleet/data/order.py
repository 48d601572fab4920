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


@compiled
def _order(keys: Any) -> Any:
    """Return the places of the keys in their order, and of equal ones in the order of their places. The keys are as
    good as random, so their first bits deal them to boxes of a few."""
    shift = np.uint64(63)
    while shift > 0 and len(keys) >> np.int64(np.uint64(64) - shift) > 2:
        shift -= np.uint64(1)
    ends = np.zeros((np.uint64(2**64 - 1) >> shift) + np.uint64(2), np.int64)
    for key in keys:
        ends[np.int64(key >> shift) + 1] += 1
    for box in range(1, len(ends)):
        ends[box] += ends[box - 1]
    order = np.empty(len(keys), np.int64)
    begins = ends.copy()
    for place in range(len(keys)):
        mine = np.int64(keys[place] >> shift)
        at = ends[mine]
        ends[mine] += 1
        while at > begins[mine] and keys[order[at - 1]] > keys[place]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = place
    return order


def shuffled(number: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the numbers below ``number`` in an order that the key decides; another key gives another order."""
    return np.asarray(_order(_keys(np.array(key, np.int64), number)))


def dealt(pieces: Sequence[T], reader: int, readers: int, shuffle: Sequence[int] | None) -> list[T]:
    """Return the pieces that one of several processes reads; together they read each piece once."""
    order = range(len(pieces)) if shuffle is None else shuffled(len(pieces), *shuffle).tolist()
    return [pieces[index] for index in order[reader::readers]]
