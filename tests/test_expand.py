"""Rows for every id and sums for every bag: torch's functions and torch's gradients, by a faster loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fleet.errors import ConfigurationError
from fleet.nn import expand as expanding
from fleet.nn.expand import Bags, expand, pool
from fleet.nn.handle import Found
from fleet.numeric.ids import Summed, accumulate_apart, accumulate_each

ROWS, DIM = 7, 3
FLAT = torch.tensor([2, 0, 2, 6, 2, 5, 0, 1])

BAGS: dict[str, dict[str, Any]] = {
    "two dimensions": {"inverse": FLAT.view(4, 2)},
    "no bags": {"inverse": FLAT[:0].view(0, 2)},
    "offsets": {"inverse": FLAT, "offsets": torch.tensor([0, 3, 3, 6])},
    "a last offset": {"inverse": FLAT, "offsets": torch.tensor([0, 3, 3, 8]), "include_last_offset": True},
    "a short last offset": {"inverse": FLAT, "offsets": torch.tensor([0, 3, 5]), "include_last_offset": True},
    "int32 offsets": {"inverse": FLAT, "offsets": torch.tensor([0, 3, 5], dtype=torch.int32), "padding_idx": 2},
    "padding": {"inverse": FLAT.view(4, 2), "padding_idx": 2},
    "padding, offsets": {"inverse": FLAT, "offsets": torch.tensor([0, 1, 6]), "padding_idx": 2},
}


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * DIM, dtype=dtype).view(ROWS, DIM).requires_grad_()


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    return {"offsets": None, "include_last_offset": False, "padding_idx": None, "per_sample_weights": None, **given}


def found_in(leaf: torch.Tensor, inverse: torch.Tensor) -> Found:
    """All rows of a leaf, as a look-up finds those of a table."""
    return Found(leaf.detach(), inverse, None, torch.arange(len(leaf)), leaf if leaf.requires_grad else None)


def expanded(leaf: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return expand([found_in(leaf, inverse)])[0]


def ours_of(leaf: torch.Tensor, *, inverse: torch.Tensor, **how: Any) -> torch.Tensor:
    return pool(found_in(leaf, inverse), Bags(**how))


def gradient(out: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)
    (found,) = torch.autograd.grad((out * weights).sum(), leaf)
    return found.to_dense() if found.is_sparse else found


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offsets", [[], [0, 3, 1], [0, 9], [0, -1, 8]])
def test_offsets_with_which_torch_leaves_its_memory_are_refused(offsets: list[int], last: bool, mode: str) -> None:
    how = defaults({"offsets": torch.tensor(offsets, dtype=torch.int64), "include_last_offset": last, "mode": mode})
    with pytest.raises(ConfigurationError, match="offsets do not divide the ids of an EmbeddingBag"):
        ours_of(rows(), inverse=FLAT, **how)
    weights = torch.ones(8, dtype=torch.float64).requires_grad_()  # which torch looks up itself
    with pytest.raises(ConfigurationError, match="up to 8"):
        ours_of(rows(), inverse=FLAT, **how | {"per_sample_weights": weights})
    none = defaults({"offsets": torch.tensor([0] * last, dtype=torch.int64), "include_last_offset": last, "mode": mode})
    assert ours_of(rows(), inverse=FLAT[:0], **none).shape == (0, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (2, 2, 2), (0,), (0, 3), ()])
@pytest.mark.parametrize("large", [0, 100])
def test_expanding_is_torchs(
    large: int, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanding, "LARGE", large)
    inverse = FLAT[: torch.Size(shape).numel()].reshape(shape)
    ours, theirs = rows(dtype), rows(dtype)
    got, expected = expanded(ours, inverse), F.embedding(inverse, theirs)
    assert torch.equal(got, expected)
    assert torch.equal(gradient(got, ours), gradient(expected, theirs))


@pytest.mark.parametrize("large", [0, 100])
def test_gradients_that_are_no_matrix_in_memory(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanding, "LARGE", large)
    inverse = FLAT.view(4, 2)
    random = torch.rand(100).double()
    for grad in (
        random[0].expand(4, 2, DIM),
        random[:2].view(2, 1).expand(4, 2, DIM),
        random[: 8 * DIM].view(DIM, 2, 4).permute(2, 1, 0),
        random[: 16 * DIM].view(8, 2, DIM)[::2],  # with something between its parts
        random[: 8 * DIM + 8].view(4, 2, DIM + 1)[..., 1:],  # and between rows
        random[: 5 * DIM].unfold(0, 2 * DIM, DIM).view(4, 2, DIM),  # with parts that begin in each other
    ):
        ours, theirs = rows(), rows()
        expanded(ours, inverse).backward(grad)
        F.embedding(inverse, theirs).backward(grad)
        assert ours.grad is not None
        assert torch.equal(ours.grad.to_dense(), theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 2, 2), (1, 8), (0, 3)])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("large", [0, 100])
def test_rows_beside_other_features(
    large: int, before: int, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []

    def adding(tables: Sequence[Summed], dim: int, kind: Any) -> None:
        added.extend(each.apart for each in tables)
        accumulate_each(tables, dim, kind)

    def adding_apart(places: Any, grads: Any, together: int, apart: int, total: Any) -> None:
        added.append(apart)
        accumulate_apart(places, grads, together, apart, total)

    monkeypatch.setattr(expanding, "LARGE", large)
    monkeypatch.setattr(expanding, "accumulate_each", adding)
    monkeypatch.setattr(expanding, "accumulate_apart", adding_apart)
    inverse = FLAT[: torch.Size(shape).numel()].reshape(shape)

    def wide(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out.new_ones(len(out), before), out.flatten(1), out.new_ones(len(out), 2)], 1)

    ours, theirs = rows(dtype), rows(dtype)
    got, expected = gradient(wide(expanded(ours, inverse)), ours), gradient(wide(F.embedding(inverse, theirs)), theirs)
    assert torch.equal(got, expected)
    assert (added and all(added)) or shape[0] <= 1, "a copy was made without what is between"


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("given", BAGS.values(), ids=BAGS)
def test_pooling_is_torchs(given: dict[str, Any], mode: str) -> None:
    ours, theirs, how = rows(), rows(), defaults(given)
    got = ours_of(ours, mode=mode, **how)
    expected = F.embedding_bag(how.pop("inverse"), theirs, mode=mode, **how)
    assert torch.equal(got, expected)
    torch.testing.assert_close(gradient(got, ours), gradient(expected, theirs), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("learnt", [False, True], ids=["given", "learnt"])
def test_weights_of_samples(learnt: bool) -> None:
    how = defaults({"inverse": FLAT.view(4, 2), "padding_idx": 0})
    found = []
    for ours in (True, False):
        leaf = rows()
        how["per_sample_weights"] = torch.linspace(0, 2, 8).double().view(4, 2).requires_grad_(learnt)
        if ours:
            out = ours_of(leaf, mode="sum", **how)
        else:
            theirs = dict(how)
            out = F.embedding_bag(theirs.pop("inverse"), leaf, mode="sum", **theirs)
        found.append([out, gradient(out, leaf)] if not learnt else [out, gradient(out, how["per_sample_weights"])])
    assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))


class Dense(torch.autograd.Function):
    """Makes the gradient of a weight dense, as torch's check of gradients wants it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to_dense()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_of_gradients(mode: str) -> None:
    inverse = FLAT.view(4, 2)
    assert torch.autograd.gradgradcheck(lambda leaf: expanded(Dense.apply(leaf), inverse).square(), (rows(),))
    how = defaults({"inverse": inverse, "padding_idx": 2})
    assert torch.autograd.gradgradcheck(lambda leaf: ours_of(Dense.apply(leaf), mode=mode, **how).square(), (rows(),))


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        assert expanded(rows(), FLAT).grad_fn is None
        assert ours_of(rows(), mode="sum", **defaults({"inverse": FLAT.view(4, 2)})).grad_fn is None
    assert expanded(rows().detach(), FLAT).grad_fn is None
