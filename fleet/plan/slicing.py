"""Cuts parameters into blocks by the source system's rule, number for number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleet.base import checks


def block_sizes(shape: Sequence[int], slice_count: int, min_block_size: int) -> list[int]:
    """Return the sizes in elements of the blocks of one parameter, at most ``slice_count`` of them."""
    numel = math.prod(shape)
    if numel == 0:
        return [0]
    split = min(slice_count, max(1, numel // min_block_size))
    block = -(-numel // split)
    if len(shape) >= 2:
        # A block of a matrix holds whole rows, so that it can be read as a matrix itself.
        width = math.prod(shape[1:])
        block = -(-block // width) * width
    return [min(block, numel - start) for start in range(0, numel, block)]


def slice_variable(shapes: Sequence[Sequence[int]], slice_count: int, min_block_size: int = 8192) -> list[list[int]]:
    """Return for each shape the list of its block sizes in elements.

    Examples:
        >>> from fleet.transpiler import slice_variable
        >>> slice_variable([[28, 784], [800, 10], [1024]], 10, 1024)[1:]
        [[1150, 1150, 1150, 1150, 1150, 1150, 1100], [1024]]
    """
    checks.whole("slice_count", slice_count, 1)
    checks.whole("min_block_size", min_block_size, 1)
    for place, shape in enumerate(shapes):
        for axis, size in enumerate(shape):
            checks.whole(f"shapes[{place}][{axis}]", size, 0)
    return [block_sizes(tuple(shape), slice_count, min_block_size) for shape in shapes]
