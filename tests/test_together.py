"""Tables that are looked up in one forward are expanded in one function of autograd; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job
from hypothesis import given
from hypothesis import strategies as st

from fleet import Fleet
from fleet.nn import expand as expanding
from fleet.numeric.ids import unique, unique_each

ROWS, DIM = 6, 3
IDS = torch.tensor([[0, 5, 2], [1, 5, 2], [0, 4, 3], [3, 5, 0]])


class Three(torch.nn.Module):
    """Three tables in a list, of which one has a padding row. What becomes of their rows is up to a test."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, DIM, padding_idx=pad) for pad in (None, 5, None))
        self.used = 0
        with torch.no_grad():
            for place, table in enumerate(self.tables):
                table.weight.copy_(torch.linspace(-1, 1 + place, ROWS * DIM).view(ROWS, DIM))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [table(ids[:, place]) for place, table in enumerate(self.tables)]


def separately(found: list[torch.Tensor], model: Three) -> None:
    for out in found:
        out.square().sum().backward()


def with_one_left_out(found: list[torch.Tensor], model: Three) -> None:
    (found[0] * found[2]).sum().backward()


def changed_in_place(found: list[torch.Tensor], model: Three) -> None:
    found[0].mul_(2)
    found[1][0] = 1
    torch.cat(found, 1).square().sum().backward()


def twice(found: list[torch.Tensor], model: Three) -> None:
    loss = torch.cat(found, 1).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_one_weight(found: list[torch.Tensor], model: Three) -> None:
    weight = model.tables[1].weight
    (grad,) = torch.autograd.grad(torch.cat(found, 1).square().sum(), [weight])
    weight.grad = grad


def of_a_gradient(found: list[torch.Tensor], model: Three) -> None:
    weights = [table.weight for table in model.tables]
    grads = torch.autograd.grad(torch.cat(found, 1).pow(3).sum(), weights, create_graph=True)
    (torch.stack([grad.square().sum() for grad in grads]).sum() * 1e-3).backward()


def with_hooks(found: list[torch.Tensor], model: Three) -> None:
    (found[0] * 2).sum().backward()
    torch.cat(found[1:], 1).square().sum().backward()


WAYS: list[Callable[[list[torch.Tensor], Three], None]] = [
    *(separately, with_one_left_out, changed_in_place, twice, of_one_weight, of_a_gradient, with_hooks)
]


def trained(model: Three, optimizer: Any, way: Callable[[list[torch.Tensor], Three], None]) -> list[torch.Tensor]:
    if way is with_hooks:
        for table in model.tables:
            table.weight.register_hook(lambda grad: grad * 3)
    for _ in range(3):
        optimizer.zero_grad()
        way(model(IDS), model)
        optimizer.step()
    with torch.no_grad():
        return [table(torch.arange(ROWS)) for table in model.tables]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tables each function of autograd expands."""
    counts: list[int] = []
    expanded = expanding._expanded

    def counted(found: Any) -> Any:
        counts.append(len(found))
        return expanded(found)

    monkeypatch.setattr(expanding, "_expanded", counted)
    return counts


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_with_the_rows(way: Callable[[list[torch.Tensor], Three], None], counts: list[int]) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Three()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(sgd, model=model, remote="all")
        fleet_.init_worker()
        return trained(model, optimizer, way)

    (got,) = run_job(body)
    model = Three()
    expected = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), way)
    assert counts == [1] * 9 if way is with_hooks else [1] * 3 + [3] * 2
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_what_is_looked_up_twice_is_there_twice() -> None:
    """Rows that one look-up has given away are not another one's."""

    class Twice(Three):
        again = False

        def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
            found = super().forward(ids)
            if self.again:
                found[0].zero_()
                found[0] = self.tables[0](ids[:, 0])
            return found

    def body(fleet_: Fleet, worker: int) -> None:
        model = Twice()
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, remote="all")
        fleet_.init_worker()
        first = model(IDS)
        model.again = True
        assert all(torch.equal(one, other) for one, other in zip(first, model(IDS), strict=True))

    run_job(body)


def test_ids_that_change_in_between() -> None:
    """What was foreseen is of the ids as they were when the forward began."""

    class Changing(Three):
        def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
            first = self.tables[0](ids[:, 0])
            ids[:, 1] = 4
            return [first, self.tables[1](ids[:, 1]), self.tables[2](ids[:, 2])]

    def body(fleet_: Fleet, worker: int) -> None:
        model = Changing()
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, remote="all")
        fleet_.init_worker()
        expected = Three().tables[1].weight[4]
        for _ in range(3):
            assert torch.equal(model(IDS.clone())[1], expected.expand(len(IDS), DIM))

    run_job(body)


def test_what_was_fetched_ahead_is_expanded_together_too(counts: list[int]) -> None:
    """Also where a batch is used twice, where a table of it is not looked up, and where another is twice."""

    def body(ahead: bool, fleet_: Fleet) -> list[torch.Tensor]:
        model = Three()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(sgd, model=model, remote="all")
        fleet_.init_worker()

        def lookup(ids: torch.Tensor) -> dict[torch.nn.Module, Any]:
            return {table: ids[:, place] for place, table in enumerate(model.tables)}

        batches = [IDS.roll(shift, 0) for shift in range(4)]
        for number, ids in enumerate(fleet_.prefetch(batches, lookup) if ahead else batches):
            optimizer.zero_grad()
            found = model(ids) if number != 1 else [model.tables[place](ids[:, place]) for place in (0, 2, 2)]
            found += model(ids) if number == 2 else []
            torch.cat(found, 1).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            return [table(torch.arange(ROWS)) for table in model.tables]

    (expected,) = run_job(lambda fleet_, _: body(False, fleet_))
    counts.clear()
    (got,) = run_job(lambda fleet_, _: body(True, fleet_))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert counts == [3, 3, 1, 3, 1, 1, 1, 3], "all but what is looked up once more"


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=40), max_size=6))
def test_distinct_ids_of_each_of_several_tables(ids: list[list[int]]) -> None:
    stops = np.cumsum([len(each) for each in ids]).astype(np.int64)
    found = unique_each(np.array([one for each in ids for one in each], np.int64), stops)
    starts, ends = [0, *stops], [0, *found.stops]
    for table, each in enumerate(ids):
        distinct, inverse = unique(np.array(each, np.int64))
        assert found.ids[ends[table] : ends[table + 1]].tolist() == distinct.tolist()
        assert found.inverse[starts[table] : starts[table + 1]].tolist() == inverse.tolist()
        if each:
            assert (found.low[table], found.high[table]) == (min(each), max(each))
