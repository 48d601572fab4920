"""Tensors as bytes: also those without elements, which numpy makes with strides by which torch finds no bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.checkpoint import state
from fleet.checkpoint.comparison import difference
from fleet.checkpoint.pieces import encoded
from fleet.numeric.bits import as_bytes
from fleet.ps.server import digests
from fleet.ps.worker import batch_memory
from fleet.serving import replica

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_bytes_are_those_of_the_elements_in_their_order(dtype: torch.dtype, shape: list[int], turned: bool) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    tensor = tensor.t() if turned and tensor.dim() == 2 else tensor
    found = as_bytes(tensor)
    assert found.dtype == torch.uint8
    assert found.shape == (tensor.nbytes,)
    if len(found):
        assert torch.equal(found.view(dtype).reshape(tensor.shape), tensor)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize(
    "read",
    [
        as_bytes,
        lambda empty: state.restore({"x": None}, state.encoded({"x": empty}), "here"),
        lambda empty: difference(empty, empty),
        lambda empty: encoded({"x": empty}),
        lambda empty: digests._rows_of_bytes(empty),
        digests._bytes_of,
        batch_memory._sample,
        replica._raw,
    ],
    ids=["bytes", "state", "diff", "checkpoint", "digest of rows", "digest", "batch", "replica"],
)
def test_what_has_no_elements_is_read_like_anything_else(read: Callable[[torch.Tensor], Any], dtype: Any) -> None:
    read(torch.from_numpy(np.empty(0, dtype)))
    read(torch.empty(0, dtype=torch.float32))
