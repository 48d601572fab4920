"""Checkpoints of what has changed, and states that come into a running job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_job
from small_job import STRATEGIES, join, same, train

from fleet import Fleet
from fleet.errors import CheckpointError, ConfigurationError


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
