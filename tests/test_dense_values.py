"""Values and gradients of many parameters move between the user's tensors and flat ones as torch would move them."""

from __future__ import annotations

import pytest
import torch
from test_runs import plan_of
from torch.autograd.graph import increment_version

from fleet.errors import ProtocolError
from fleet.numeric import scatter
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.ps.worker import trained_model
from fleet.ps.worker.push import COPIED, end_to_end, pack
from fleet.ps.worker.trained_model import Flat, ParameterWriter

#: Small ones, cut between servers and whole; one without elements before a large one; one without dimensions.
SHAPES = [(3,), (5, 7), (), (0,), (100, 100), (64,), (0, 2), (17, 1)]
DTYPES = ("float32", "bfloat16", "float64", "float16")


def made() -> tuple[list[torch.nn.Parameter], list[DenseLayout]]:
    shapes = SHAPES * len(DTYPES) + SHAPES[:3]
    plan = plan_of(lambda params: torch.optim.SGD(params, lr=0.1), shapes, DTYPES, servers=2)
    params = [
        torch.nn.Parameter(torch.zeros(each.shape, dtype=getattr(torch, each.dtype))) for each in plan.spec.params
    ]
    params[1].data = torch.zeros(7, 5, dtype=params[1].dtype).t()  # not as its rows lie
    return params, [dense_layout(plan, server) for server in range(2)]


def writer_of(params: list[torch.nn.Parameter], layouts: list[DenseLayout]) -> ParameterWriter:
    return ParameterWriter(params, layouts, [str(index) for index in range(len(params))])


def packed(layouts: list[DenseLayout], values: list[torch.Tensor]) -> list[Flat]:
    return [pack(layout, [value.reshape(-1) for value in values]) for layout in layouts]


@pytest.fixture(params=[1, 1 << 20], ids=["compiled", "by torch"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "MANY", request.param)


@pytest.mark.usefixtures("many")
def test_values_arrive_in_place_and_count_as_a_change() -> None:
    params, layouts = made()
    writer = writer_of(params, layouts)
    for turn in range(3):
        if turn == 2:
            params[0].data = torch.zeros_like(params[0])  # other memory, that has to be found
        values = [torch.randn(param.shape).to(param.dtype) for param in params]
        before = [(param.data_ptr(), param._version) for param in params]
        writer.write(packed(layouts, values))
        for param, value, (address, version) in zip(params, values, before, strict=True):
            assert torch.equal(param, value)
            assert param.data_ptr() == address
            assert param._version > version or not param.numel()


@pytest.mark.usefixtures("many")
def test_one_element_that_is_another_is_found() -> None:
    """In memory of every kind, whether it was there or has come, and to the bit."""
    params, layouts = made()
    writer = writer_of(params, layouts)
    values = packed(layouts, [torch.zeros(param.shape, dtype=param.dtype) for param in params])
    writer.write(values)
    assert writer.differing(values) == []
    for index, param in enumerate(params):
        for place in {0, param.numel() - 1} if param.numel() else ():
            if param.is_contiguous():
                param.data.view(-1)[place] = -0.0
            else:
                param.data.t().view(-1)[place] = float("nan")
            assert writer.differing(values) == [index]
            writer.write(values)
    params[3].data = torch.full_like(params[3], 1)  # without elements
    params[4].data = torch.zeros_like(params[4])
    params[5].data = torch.ones_like(params[5])
    assert writer.differing(values) == [5]


@pytest.mark.parametrize("refusal", [TypeError, RuntimeError])
def test_a_torch_that_counts_changes_one_at_a_time(monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]) -> None:
    def one_at_a_time(tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise refusal("increment_version expects a tensor")
        increment_version(tensor)

    monkeypatch.setattr(trained_model, "MANY", 1)
    monkeypatch.setattr(scatter, "increment_version", one_at_a_time)
    params, layouts = made()
    before = [param._version for param in params]
    writer_of(params, layouts).write(packed(layouts, [torch.ones_like(param) for param in params]))
    for param, version in zip(params, before, strict=True):
        assert param._version > version or not param.numel()


@pytest.mark.usefixtures("many")
def test_a_graph_of_values_that_are_gone_is_an_error_as_in_torch() -> None:
    params, layouts = made()
    writer = writer_of(params, layouts)
    values = packed(layouts, [torch.ones_like(param) for param in params])
    writer.write(values)
    loss = (params[0] ** 2).sum()
    writer.write(values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("wrong", [lambda flat: flat[:-1], lambda flat: flat.double(), lambda flat: flat[:, None]])
def test_values_of_another_form_are_refused(wrong) -> None:  # type: ignore[no-untyped-def]
    params, layouts = made()
    values = packed(layouts, [torch.ones_like(param) for param in params])
    values[1] = {**values[1], "float32": wrong(values[1]["float32"])}
    with pytest.raises(ProtocolError, match="a server's dense values do not fit"):
        writer_of(params, layouts).write(values)


def test_few_parameters_are_written_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load it takes seconds, which a job without tables would never get back."""

    def loaded(*_: object) -> None:
        pytest.fail("compiled code was called")

    monkeypatch.setattr(scatter, "_copy", loaded)
    params, layouts = made()
    writer_of(params, layouts).write(packed(layouts, [torch.ones_like(param) for param in params]))
    assert all((param == 1).all() for param in params)


def test_large_gradients_leave_from_where_they_are() -> None:
    small, large = [torch.rand(COPIED // 8) for _ in range(3)], [torch.rand(COPIED // 4) for _ in range(3)]
    for pieces, is_copied in ((small, True), (large, False), (large[:1], False)):
        sent = end_to_end(pieces, sum(map(len, pieces)))
        before = torch.cat(pieces)
        pieces[0].add_(1)
        assert torch.equal(sent.torch(), before if is_copied else torch.cat(pieces))


def test_gradients_that_have_a_graph_travel_without_it() -> None:
    params, layouts = made()
    grads = [torch.randn(param.numel()).to(param.dtype).requires_grad_() for param in params]
    for layout, flat in zip(layouts, packed(layouts, grads), strict=True):  # type: ignore[arg-type]
        assert not any(tensor.requires_grad for tensor in flat.values())
        for slot in layout.slots:
            expected = grads[slot.block.param][slot.block.offset : slot.block.offset + slot.block.numel]
            assert torch.equal(flat[slot.dtype][slot.start : slot.stop], expected)
