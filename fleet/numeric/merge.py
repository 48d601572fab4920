"""Makes one of the gradients of the same rows that come from several sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet.errors import ConfigurationError
from fleet.numeric.ids import accumulate, packed, packed_ids, unique
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
