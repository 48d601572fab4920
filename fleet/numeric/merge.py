"""Makes one of the gradients of the same rows that come from several sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet.errors import ConfigurationError
from fleet.numeric.ids import accumulate, lift, packed, packed_ids, unique, unique_each
from fleet.numeric.jit import Array, Ids


def merge(contributions: Sequence[tuple[Ids, Array]], divisor: float) -> tuple[Ids, Array]:
    """Sum up by id and divide. The order of the contributions is the order of the sum, down to the last bit."""
    ids = [packed_ids(each) for each, _ in contributions]
    distinct, places = unique(np.concatenate(ids))
    first = contributions[0][1]
    total = np.zeros((distinct.size, first.shape[1]), first.dtype)
    start = 0
    for each, (_, grads) in zip(ids, contributions, strict=True):
        if grads.shape != (each.size, first.shape[1]):  # the kernels do not check bounds
            raise ConfigurationError(
                "gradients do not fit their ids", expected=(each.size, first.shape[1]), got=grads.shape
            )
        accumulate(places[start : start + each.size], packed(grads, first.dtype), total)
        start += each.size
    if divisor != 1:
        total /= total.dtype.type(divisor)
    return distinct, total


def merge_each(tables: Sequence[Sequence[tuple[Ids, Array]]], divisor: float) -> tuple[Ids, Ids, Array]:
    """Do for several tables, whose rows fit and are alike, what ``merge`` does for one. Return the ids of each behind
    those of the one before, where each ends, and the sums."""
    ids = np.concatenate([ids for same in tables for ids, _ in same])
    grads = np.concatenate([grads for same in tables for _, grads in same])
    stops = np.cumsum([sum([each.size for each, _ in same]) for same in tables])
    found = unique_each(ids, stops)
    places = np.empty_like(found.inverse)
    lift(found.inverse, stops, np.concatenate([[0], found.stops[:-1]]), places)
    total = np.zeros((found.ids.size, grads.shape[1]), grads.dtype)
    accumulate(places, grads, total)
    if divisor != 1:
        total /= total.dtype.type(divisor)
    return found.ids, found.stops, total
