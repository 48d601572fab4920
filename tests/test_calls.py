"""What a call writes into is known before it is made, or known not to be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from habits.habit import halve
from torch.nn import init

from fleet.nn.calls import name_of, written

A, B, C = (torch.zeros(2) for _ in range(3))
AMP = torch._amp_foreach_non_finite_check_and_unscale_


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "into", "is_all"),
    [
        (torch.Tensor.mul, (A, B), {}, [], True),
        (torch.Tensor.mul_, (A, B), {}, [A], True),
        (torch.relu_, (), {"input": A}, [A], True),
        (torch.Tensor.__getitem__, (A, 0), {}, [], True),
        (torch.Tensor.__setitem__, (A, 0, B), {}, [A], True),
        (torch.Tensor.__imul__, (A, B), {}, [A], True),
        (torch.Tensor.T.__get__, (A,), {}, [], True),
        (torch.Tensor.real.__set__, (A, B), {}, [A], True),
        (torch.mul, (A, B), {"out": C}, [C], True),
        (torch.max, (A, 0), {"out": (B, C)}, [B, C], True),
        (torch.sort, ([A],), {}, [], True),  # TorchScript sorts lists in place
        (torch._foreach_mul_, ([A, B], 2), {}, [A, B], True),
        (AMP, ([A, B], C, 2), {}, [A, B, C], True),
        (torch.ops.aten.mul_.Tensor, (A, B), {}, [A], True),
        (torch.ops.aten.mul_, (A, B), {}, [A], True),
        (torch.ops.aten.add.out, (A, B), {"out": C}, [C], True),
        (torch.ops.habits.halve.default, (A,), {}, [A], False),
        (torch.ops.habits.halve, (A,), {}, [A], False),
        (init.normal_, (), {"tensor": A}, [A], False),
        (F.relu, (A,), {"inplace": True}, [], False),
        (torch.batch_norm, (A, None, None, B, C, True, 0.1, 1e-5, False), {}, [], False),
    ],
)
def test_what_a_call_writes_into(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], into: list[Any], is_all: bool
) -> None:
    found = written(func, args, kwargs)
    assert {id(each) for each in found.into} == {id(each) for each in into}
    assert found.is_all is is_all


def test_an_operator_of_ones_own_is_not_taken_for_one_of_torchs() -> None:
    assert [name_of(each) for each in (torch.ops.aten.mul_.Scalar, torch.ops.habits.halve)] == ["mul_", "habits::halve"]
    assert halve._qualname == "habits::halve"
