"""Whole jobs whose rows come and go: killed and recovered, saved and resumed, on several servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import DyingJob, every
from harness import run_job

import fleet
from fleet import Fleet
from fleet.plan.life import Admission, CountFilter, Eviction, MaxRows, Probability, SmallNorm, Unused
from fleet.ps import backend
from fleet.ps.worker import describe

Rules = tuple[Admission | None, tuple[Eviction, ...]]

RULED: dict[str, Rules] = {
    "counted": (CountFilter(2), (Unused(3),)),
    "sketched": (CountFilter(3, sketch_mb=0.01), (Unused(4), SmallNorm(1.0))),
    "sketched by weight": (CountFilter(2.5, of="weight", sketch_mb=0.01), (Unused(4), SmallNorm(1.0))),
    "by chance": (Probability(0.5), (Unused(2),)),
}
#: Servers agree on this among workers, so it takes one here.
ALONE: dict[str, Rules] = {**RULED, "at most": (CountFilter(2), (MaxRows(9, by="often"),))}


@pytest.fixture
def ruled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rules], None]:
    """Gives the tables of all jobs rules, and lets rows leave every second step."""

    def give(rules: Rules) -> None:
        monkeypatch.setattr(Model, "rules", rules)
        monkeypatch.setattr(backend, "describe", lambda *args: describe.describe(*args[:-1], evict_every=2))

    return give


class Model(torch.nn.Module):
    rules: Rules = (None, ())

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)  # of the rows
        admit, evict = self.rules
        self.rows = fleet.nn.Embedding(None, 3, admit=admit, evict=evict)
        self.head = torch.nn.Linear(3, 1)
        with torch.no_grad():  # workers are threads, and draw from one generator
            self.head.weight.copy_(torch.tensor([[0.3, -0.2, 0.5]]))
            self.head.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.rows(ids).mean(1)))


def trains(
    steps: int,
    *,
    start: int = 0,
    strategy: Any = None,
    between: Callable[[Fleet, int, int], None] | None = None,
) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> Any:
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        wrapped = made.distributed_optimizer(optimizer, strategy, model=model)
        made.init_worker()
        seen = []
        for step in range(start, start + steps):
            draw = torch.Generator().manual_seed(100 * index + step)
            ids = (torch.rand((6, 2), generator=draw) ** 2 * 40).long()
            loss = (model(ids) - 1).square().mean()
            wrapped.minimize(loss)
            seen.append(loss.detach())
            if between is not None:
                between(made, index, step)
        made.barrier_worker()
        with torch.no_grad():
            values = [*(p.detach().clone() for p in model.head.parameters()), model.rows(torch.arange(40))]
        made.barrier_worker()
        return [*seen, *values]

    return body


def same(got: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("rules", RULED.values(), ids=RULED)
@pytest.mark.parametrize(("offset", "journal_bytes"), [(0, 2000), (1, 1), (2, 600)])
def test_killed_at_every_request(
    tmp_path: Path, ruled: Callable[[Rules], None], rules: Rules, offset: int, journal_bytes: int
) -> None:
    ruled(rules)
    expected = run_job(trains(6), 2, 2)
    job = DyingJob(trains(6), tmp_path, plan=every(3, offset), journal_bytes=journal_bytes)
    same(job.run(), expected)
    assert job.kills > 6


@pytest.mark.parametrize(
    "rules",
    # With two servers the others are killed as well.
    [pytest.param(rules, id=name, marks=pytest.mark.slow if name in RULED else ()) for name, rules in ALONE.items()],
)
def test_killed_at_every_request_with_one_server(tmp_path: Path, ruled: Callable[[Rules], None], rules: Rules) -> None:
    ruled(rules)
    expected = run_job(trains(7), 2, 1)
    job = DyingJob(trains(7), tmp_path, servers=1, plan=every(2, 1), journal_bytes=500)
    same(job.run(), expected)
    assert job.kills > 6


@pytest.mark.pairs(2)
@pytest.mark.parametrize("rules", ALONE.values(), ids=ALONE)
def test_a_job_goes_on_from_its_checkpoint(tmp_path: Path, ruled: Callable[[Rules], None], rules: Rules) -> None:
    ruled(rules)

    def saves(made: Fleet, index: int, step: int) -> None:
        if step == 4:
            made.save_persistables(str(tmp_path / "saved"))

    whole = run_job(trains(10, between=saves), 2, 1)
    again = run_job(trains(5, start=5), 2, 1, model_dir=str(tmp_path / "saved"))
    for ours, theirs in zip(again, whole, strict=True):
        for mine, other in zip(ours, theirs[5:], strict=True):
            assert torch.equal(mine, other)


def test_rules_may_change_when_a_job_goes_on(tmp_path: Path, ruled: Callable[[Rules], None]) -> None:
    def saves(made: Fleet, index: int, step: int) -> None:
        if step == 4:
            made.save_persistables(str(tmp_path / "saved"))

    ruled((CountFilter(3), (Unused(4),)))
    run_job(trains(5, between=saves), 2, 2)
    others: list[Rules] = [
        (None, ()),
        (CountFilter(2), (MaxRows(3),)),
        (CountFilter(2, sketch_mb=0.01), (SmallNorm(0.1),)),
        (CountFilter(1.5, of="weight"), (MaxRows(5, by="weight"), Unused(1))),
    ]
    for rules in others:
        ruled(rules)
        run_job(trains(3, start=5), 1, 1, model_dir=str(tmp_path / "saved"))
