"""Collective jobs over Gloo. The ranks are real processes, started once for each number of them; what they do is in
``scripts/collective_ranks.py``, one function a test."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_job, values
from prepared import Prepared
from ranks import SCRIPTS, Told, run

from fleet import Fleet

SCRIPT = "collective_ranks.py"


def _checks() -> dict[int, list[str]]:
    """The checks by their number of ranks, read from the script's decorators."""
    found: dict[int, list[str]] = {}
    for node in ast.parse((SCRIPTS / SCRIPT).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "check":
                    for size in [ast.literal_eval(argument) for argument in decorator.args]:
                        found.setdefault(size, []).append(node.name)
    return found


CHECKS = _checks()


#: What the ranks of a size returned, and where they left their files.
Outcome = Callable[[int], tuple[dict[str, list[Told]], Path]]


@pytest.fixture(scope="module")
def outcome(prepared: Prepared, shared: Callable[[str], AbstractContextManager[Path]]) -> Outcome:
    """The processes of one size run when the first test asks for them."""

    @cache
    def of(size: int) -> tuple[dict[str, list[Told]], Path]:
        with shared(f"ranks{size}") as folder:
            told = folder / "told.json"
            if not told.exists():
                _save_on_servers(folder)
                told.write_text(json.dumps(run(prepared, SCRIPT, size, CHECKS[size], folder)))
            return json.loads(told.read_text()), folder

    return of


def _save_on_servers(scratch: Path) -> None:
    """A checkpoint of a parameter-server job, and what is in it."""
    told = {}

    def body(fleet: Fleet, index: int) -> None:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 3))
        reference = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 3))
        reference.load_state_dict(model.state_dict())
        alone = torch.optim.Adam(reference.parameters(), lr=0.01)
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        fleet.init_worker()
        for step in range(4):
            x = torch.randn(5, 20, generator=torch.Generator().manual_seed(step))
            optimizer.minimize(model(x).square().mean())
            alone.zero_grad()
            reference(x).square().mean().backward()
            alone.step()
        fleet.save_persistables(str(scratch / "by-servers"))
        told["params"] = values(model)
        told["exp_avg"] = [alone.state[param]["exp_avg"] for param in reference.parameters()]

    run_job(body, workers=1, servers=2)
    torch.save(told, scratch / "by-servers.pt")


def _sized() -> list[Any]:
    """Four processes take their time on fewer cores."""
    marks = {4: pytest.mark.slow}
    return [
        pytest.param(size, name, marks=marks.get(size, ())) for size, names in sorted(CHECKS.items()) for name in names
    ]


@pytest.mark.parametrize(("size", "name"), _sized())
def test_ranks(outcome: Outcome, size: int, name: str) -> None:
    told, _ = outcome(size)
    failures = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told[name]) if "error" in each]
    assert not failures, "\n".join(failures)


def test_servers_start_from_a_checkpoint_of_a_collective_job(
    outcome: Outcome,
) -> None:
    told, scratch = outcome(2)
    first_weight = told["a_job_goes_on_where_it_was_saved"][0]["value"]

    def body(fleet: Fleet, index: int) -> tuple[int, list[float]]:
        model = torch.nn.Sequential(
            *(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.ReLU()),
            *(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)),
        )
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        fleet.init_worker()
        step, weight = fleet.resume_step(), model[0].weight.detach().reshape(-1).tolist()
        optimizer.minimize(model(torch.ones(4, 8)).sum())
        return step, weight

    results = run_job(body, workers=2, servers=2, model_dir=str(scratch / "by-all"))
    assert results == [(3, first_weight)] * 2
