"""Memory for large tensors comes back when nobody looks into it any more, and not before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fleet.numeric import buffers

BIG = buffers.SMALLEST + 4096


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    buffers._free.clear()
    yield
    buffers._free.clear()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_used_again_once_its_last_view_is_gone() -> None:
    first = buffers.take(BIG)
    where, view = address(first), torch.from_numpy(first.view(np.float32))[5:10]
    del first
    assert address(buffers.take(BIG)) != where, "a view of it is still there"
    buffers._free.clear()
    del view
    assert address(buffers.take(BIG - 100)) == where


def test_tensors_are_writable_aligned_and_of_their_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = buffers.take_flat(BIG // dtype.itemsize, dtype)
        assert tensor.dtype is dtype
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(3)
        assert (tensor == 3).all()
    assert buffers.take_flat(0, torch.float32).shape == (0,)


def test_a_block_is_not_given_out_for_much_less_than_it_holds() -> None:
    buffers.take(4 * BIG)
    assert len(buffers._free) == 1
    small = buffers.take(BIG)
    assert len(buffers._free) == 1, "it is kept for somebody who needs it"
    assert len(small) == BIG


def test_only_so_many_blocks_are_kept() -> None:
    held = [buffers.take(BIG) for _ in range(buffers.KEPT + 3)]
    del held
    assert len(buffers._free) == buffers.KEPT


@pytest.mark.parametrize("nbytes", [0, 1, buffers.SMALLEST - 1])
def test_small_ones_are_numpys_own(nbytes: int) -> None:
    array = buffers.take(nbytes)
    assert array.shape == (nbytes,)
    assert array.base is None
