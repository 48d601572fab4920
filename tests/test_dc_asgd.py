"""Delay compensation, number by number: two workers whose pushes come in an order that is forced."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from harness import assert_close, run_job, values
from inside import move_given

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.plan.layout import DenseLayout, Slot
from fleet.plan.plan import Block
from fleet.ps.table import given
from fleet.ps.table.compensation import EPSILON, KEPT, Compensation
from fleet.strategy.parameter_server import Strategy, as_strategy
from fleet.transpiler import DistributeTranspilerConfig

STEPS, ROWS, DIM = 6, 12, 3

#: Who pushes when: gradients are up to three pushes old.
ORDER = [1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0]


def _template() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 5), torch.nn.Linear(5, 1))


TEMPLATE = _template()


def loss_of(model: torch.nn.Module, step: int, worker: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * 100 + worker)
    ids = torch.randint(0, ROWS, (7,), generator=draw)
    return ((model(ids) - torch.randn(7, 1, generator=draw)) ** 2).mean()


def reference(strength: float, adaptive: bool, lr: float) -> list[torch.Tensor]:
    """SGD by the formula. Rows that a worker does not read keep the value that it was handed for them last."""
    now = [p.detach().clone() for p in TEMPLATE.parameters()]
    handed = {worker: [p.clone() for p in now] for worker in range(2)}
    squares = [torch.zeros_like(p) for p in now]
    taken = [0, 0]
    model = copy.deepcopy(TEMPLATE)
    for worker in ORDER:
        # Its gradient is computed before its turn: dense values as handed after its last push, rows as handed then.
        with torch.no_grad():
            for param, old in zip(model.parameters(), handed[worker], strict=True):
                param.copy_(old)
        model.zero_grad()
        loss_of(model, taken[worker], worker).backward()
        taken[worker] += 1
        for place, (param, value) in enumerate(zip(model.parameters(), now, strict=True)):
            grad, drift = param.grad, value - handed[worker][place]
            assert grad is not None
            touched = (grad != 0).any(1, keepdim=True) if place == 0 else torch.ones_like(grad, dtype=torch.bool)
            if adaptive:
                moved = KEPT * squares[place] + (1 - KEPT) * grad * grad
                squares[place] = torch.where(touched, moved, squares[place])
                drift = drift / (squares[place] + EPSILON).sqrt()
            value -= lr * torch.where(touched, grad + strength * grad * grad * drift, 0)
        # Its push is answered with dense values; the rows of its next batch are read at once, before others' turns.
        handed[worker][1:] = [value.clone() for value in now[1:]]
        draw = torch.Generator().manual_seed(taken[worker] * 100 + worker)
        ids = torch.randint(0, ROWS, (7,), generator=draw)
        handed[worker][0][ids] = now[0][ids]
    return now


@pytest.mark.parametrize(("strength", "adaptive"), [(0.0, False), (1.0, False), (7.5, False), (0.5, True)])
@pytest.mark.parametrize("servers", [1, 3])
def test_two_workers_in_a_forced_order_follow_the_formula(servers: int, strength: float, adaptive: bool) -> None:
    lr = 0.1
    strategy = StrategyFactory.create_half_async_strategy(dc_asgd_lambda=strength, dc_asgd_adaptive=adaptive)
    turns = [threading.Event() for _ in range(len(ORDER) + 1)]
    ready = threading.Barrier(2)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        model[0] = torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=TEMPLATE[0].weight.detach().clone())
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=lr), strategy, model=model)
        fleet_.init_worker()
        mine = [place for place, who in enumerate(ORDER) if who == worker]
        loss = loss_of(model, 0, worker)
        ready.wait(20)
        if worker == 0:
            turns[0].set()
        for step, place in enumerate(mine):
            optimizer.zero_grad()
            loss.backward()
            assert turns[place].wait(20)
            optimizer.step()
            loss = loss_of(model, step + 1, worker)  # reads its rows now
            turns[place + 1].set()
        assert turns[-1].wait(20)
        optimizer.zero_grad()
        (sum(p.sum() for p in model[1:].parameters()) * 0).backward()
        optimizer.step()
        return [model[0](torch.arange(ROWS)).detach(), *values(model[1:])]

    for got in run_job(body, 2, servers):
        assert_close(got, reference(strength, adaptive, lr), 2e-6)


def flat_layout(size: int) -> DenseLayout:
    return DenseLayout((Slot(0, Block(0, 0, 0, size), "float32", 0, is_whole=True),), {"float32": size})


def test_dense_gradients_are_compensated_as_numpy_does() -> None:
    random = torch.Generator().manual_seed(0)
    grad, old, new = (torch.randn(9, generator=random) for _ in range(3))
    compensation, layout, given = Compensation(2.5, False), flat_layout(9), grad.clone()
    compensation.dense(0, layout, layout, {"float32": given}, {"float32": new})
    assert torch.equal(given, grad), "a worker that was handed nothing has nothing to compensate"
    compensation.handed_dense(0, {"float32": old})
    compensation.dense(0, layout, layout, {"float32": given}, {"float32": new})
    torch.testing.assert_close(given, grad + 2.5 * grad * grad * (new - old))


def test_rows_that_were_never_handed_out_have_not_drifted() -> None:
    compensation = Compensation(1.0, False)
    ids, ones = np.array([4, 9]), np.ones((2, 2), np.float32)
    compensation.handed_rows(0, 0, np.array([4, 4]), np.zeros((2, 2), np.float32))
    got = compensation.rows(0, 0, ids, ones, ones * 3)
    assert got.tolist() == [[4, 4], [1, 1]]
    assert compensation.rows(1, 0, ids, ones, ones * 3).tolist() == [[1, 1], [1, 1]]
    compensation.forget(0)
    assert compensation.rows(0, 0, ids, ones, ones * 3).tolist() == [[1, 1], [1, 1]]


def test_asynchronous_jobs_compensate_too() -> None:
    """With one worker and an answer to every push there is no drift: the end is plain SGD's."""
    strategy = StrategyFactory.create_async_strategy(dc_asgd_lambda=3.0, independent_recv_thread=False)

    def body(fleet_: Fleet, worker: int) -> float:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        for _ in range(5):
            optimizer.minimize(table(torch.tensor([4])).sum())
            fleet_.barrier_worker()
        return table(torch.tensor([4])).item()

    assert run_job(body, 1, 1) == [-5.0]


def test_the_config_switches_it_on_with_lambda_one() -> None:
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    config.enable_dc_asgd = True
    assert as_strategy(config) == Strategy(mode="async", dc_lambda=1.0)
    config.half_async = True
    assert as_strategy(config) == Strategy(mode="half_async", dc_lambda=1.0)
    config.sync_mode = True
    with pytest.raises(ValueError, match="exclude each other"):
        as_strategy(config)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"dc_asgd_lambda": -1}, ValueError, "dc_asgd_lambda"),
        (
            {"dc_asgd_lambda": 1e300},
            ValueError,
            "dc_asgd_lambda is out of range; expected at least 0 and below 1e\\+38",
        ),
        ({"dc_asgd_lambda": float("nan")}, ValueError, "dc_asgd_lambda"),
        ({"dc_asgd_lambda": float("inf")}, ValueError, "dc_asgd_lambda"),
        ({"dc_asgd_lambda": "1"}, TypeError, "dc_asgd_lambda"),
        ({"dc_asgd_lambda": True}, TypeError, "dc_asgd_lambda"),
        ({"dc_asgd_lambda": 1.0, "dc_asgd_adaptive": 1}, TypeError, "dc_asgd_adaptive"),
        ({"dc_asgd_adaptive": True}, ValueError, "nothing to act on"),
    ],
)
@pytest.mark.parametrize("make", [StrategyFactory.create_async_strategy, StrategyFactory.create_half_async_strategy])
def test_its_numbers_are_checked(make: object, arguments: dict[str, object], kind: type[Exception], words: str) -> None:
    assert callable(make)
    with pytest.raises(kind, match=words):
        make(**arguments)


def test_what_is_kept_is_recalled_whole_or_in_part() -> None:
    """A server that goes on is told all of it; one that was killed while it wrote that down, some of what it has."""
    random = np.random.default_rng(0)
    compensation, layout = Compensation(0.5, True), flat_layout(9)
    for worker in range(2):
        compensation.handed_dense(worker, {"float32": torch.randn(9)})
        compensation.handed_rows(worker, 3, np.array([7, -2, 7, 5 + worker]), random.random((4, 2), np.float32))
        compensation.dense(worker, layout, layout, {"float32": torch.randn(9)}, {"float32": torch.randn(9)})
        rows = [random.random((3, 2), np.float32) for _ in range(2)]
        compensation.rows(worker, 3, np.array([5, 6, 7]), rows[0], rows[1])

    def told(by: Compensation) -> list[tuple[str, list[list[float]]]]:
        return [(str(about), [each.tolist() for each in tensors]) for about, tensors in by.dump()]

    expected, parts = told(compensation), list(compensation.dump())
    assert len(parts) == 6
    after = Compensation(0.5, True)
    for about, tensors in parts:
        values = [torch.as_tensor(each).clone() for each in tensors]
        after.restore(about, values)
        compensation.restore(about, values)
        assert told(compensation) == expected
    assert told(after) == expected


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_other_servers_have_what_each_worker_was_given(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "PIECE_BYTES", piece_bytes)
    compensation, other, layout = Compensation(0.5, True), Compensation(0.5, True), flat_layout(9)
    random = np.random.default_rng(0)
    for worker in range(2):
        compensation.handed_dense(worker, {"float32": torch.randn(9)})
        compensation.handed_rows(worker, 3, np.arange(worker, 7), random.random((7 - worker, 2), np.float32))
        compensation.dense(worker, layout, layout, {"float32": torch.randn(9)}, {"float32": torch.randn(9)})
        compensation.rows(worker, 3, np.arange(5), np.ones((5, 2), np.float32), np.ones((5, 2), np.float32))
    move_given(compensation, other)
    assert compensation.piece((2, 3), 0) == compensation.piece((0, 4), 0) == compensation.piece((2, None), 0)

    def told(by: Compensation) -> dict[str, list[list[float]]]:
        return {str(about): [each.tolist() for each in tensors] for about, tensors in by.dump()}

    assert told(other) == told(compensation)
    assert len(told(other)) == 6
