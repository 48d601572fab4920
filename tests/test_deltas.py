"""Checkpoints of what has changed, and states that come into a running job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_job

import fleet.nn
from fleet import Fleet
from fleet.errors import CheckpointError, ConfigurationError
from fleet.strategy import StrategyFactory

IDS = torch.arange(-20, 60)

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
    "ssp": StrategyFactory.create_ssp_strategy,
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.open = fleet.nn.Embedding(None, 4)
        self.closed = torch.nn.Embedding(30, 4, sparse=True)

    def loss(self, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 30, (6,), generator=draw)
        return self.dense(self.open(ids * 2 - 20 + step) + self.closed(ids)).square().mean()

    def seen(self) -> list[torch.Tensor]:
        """All a job has learnt."""
        with torch.no_grad():
            rows = [self.open(IDS), self.closed(torch.arange(30))]
        return [*(p.detach().clone() for p in self.dense.parameters()), *rows]


def join(fleet_: Fleet, strategy: str = "sync") -> tuple[Net, Any]:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    wrapped = fleet_.distributed_optimizer(optimizer, STRATEGIES[strategy](), model=model)
    fleet_.init_worker()
    return model, wrapped


def train(model: Net, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.minimize(model.loss(step))


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("into", ["the same directory", "directories of their own"])
def test_base_and_deltas_are_what_a_full_one_is(strategy: str, into: str, tmp_path: Path) -> None:
    def place(number: int) -> Path:
        return tmp_path / ("ckpt" if into == "the same directory" else f"ckpt-{number}")

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(4))
        fleet_.save_persistables(place(0))
        for number in (1, 2, 3):
            train(model, optimizer, range(4 + number, 5 + number))
            fleet_.save_persistables(place(number), mode="delta")
        fleet_.save_persistables(tmp_path / "full")
        return model.seen()

    def again(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        assert fleet_.resume_step() == 7
        seen = model.seen()
        if strategy == "sync":
            train(model, optimizer, range(20, 22))
        return [*seen, *model.seen()]

    (there,) = run_job(body, 1, 2)
    (expected,) = run_job(again, 1, 2, model_dir=str(tmp_path / "full"))
    if strategy == "sync":
        assert same(expected[: len(there)], there)
    for servers in (2, 3):
        (found,) = run_job(again, 1, servers, model_dir=str(place(3)))
        assert same(found, expected), servers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", ["one", "all"])
def test_a_running_job_goes_on_from_a_checkpoint(strategy: str, who: str, tmp_path: Path) -> None:
    """As a job does that starts from it; whoever did not call it takes part from the next barrier on."""

    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(5))
        fleet_.save_persistables(tmp_path / "ckpt")

    def restarted(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        return join(fleet_, strategy)[0].seen()

    def running(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(30, 33))
        fleet_.barrier_worker()
        if who == "all" or fleet_.is_first_worker():
            fleet_.load_persistables(tmp_path / "ckpt")
        fleet_.barrier_worker()
        assert fleet_.resume_step() == 5
        return model.seen()

    run_job(source, 1, 2)
    (expected,) = run_job(restarted, 1, 2, model_dir=str(tmp_path / "ckpt"))
    for found in run_job(running, 2, 3):
        assert same(found, expected)


def test_a_synchronous_job_that_loads_ends_where_a_restarted_one_ends(tmp_path: Path) -> None:
    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(5))
        fleet_.save_persistables(tmp_path / "ckpt")

    def restarted(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(5, 9))
        return model.seen()

    def running(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        for _ in range(2):
            train(model, optimizer, range(30, 33))
            fleet_.load_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(5, 9))
        return model.seen()

    run_job(source, 1, 2)
    expected = run_job(restarted, 2, 2, model_dir=str(tmp_path / "ckpt"))
    assert all(same(found, expected[0]) for found in (*run_job(running, 2, 2), *expected))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_tensors_start_a_job(strategy: str) -> None:
    torch.manual_seed(9)
    dense, closed, ids = torch.nn.Linear(4, 3), torch.randn(30, 4), torch.arange(-20, 60, 2)
    opened = torch.randn(len(ids), 4)
    state = {
        **{f"dense.{name}": value for name, value in dense.state_dict().items()},
        "closed.weight": closed,
        "open.ids": ids,
        "open.weight": opened,
    }

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        fleet_.barrier_worker()
        fleet_.load_state_dict(model, state)
        fleet_.barrier_worker()
        with torch.no_grad():
            assert torch.equal(model.dense.weight, dense.weight)
            assert torch.equal(model.dense.bias, dense.bias)
            assert torch.equal(model.closed(torch.arange(30)), closed)
            assert torch.equal(model.open(ids), opened)
        fleet_.barrier_worker()
        train(model, optimizer, range(3))

    run_job(body, 2, 3)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    state = {
        "dense.weight": torch.zeros(3, 5),
        "closed.weight": torch.zeros(30, 4),
        "open.weight": torch.zeros(2, 4),
        "open.ids": torch.tensor([1, 1]),
        "more": torch.zeros(1),
    }

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        before = model.seen()
        with pytest.raises(CheckpointError) as caught:
            fleet_.load_state_dict(model, state)
        for problem in (
            "'dense.weight': (3, 5) in the state, (3, 4) in the model",
            "'dense.bias': in the model, absent in the state",
            "'open.ids': not one int64 id of its own for each of the 2 rows",
            "'more': in the state, absent in the model",
        ):
            assert problem in str(caught.value)
        assert same(model.seen(), before)
        train(model, optimizer, range(2))

    run_job(body, 1, 2)


def test_a_mode_that_is_none(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        join(fleet_)
        with pytest.raises(ConfigurationError, match="'full' or 'delta'; got 'partial'"):
            fleet_.save_persistables(tmp_path / "ckpt", mode="partial")
        assert not (tmp_path / "ckpt").exists()

    run_job(body, 1, 1)
