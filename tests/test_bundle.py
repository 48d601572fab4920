"""Tables that a server reads and updates together end as those that it takes one by one, to the bit."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job
from hypothesis import given
from hypothesis import strategies as st

import fleet
from fleet import Fleet, StrategyFactory
from fleet.errors import ConfigurationError
from fleet.kernels import RULES
from fleet.numeric.merge import merge, merge_each
from fleet.plan.plan import make_plan
from fleet.plan.specs import GroupSpec, Initializer, JobSpec, PlanSettings, TableSpec
from fleet.ps.table.bundle import Bundle, Request, parts
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.shard import Contribution, JoinedRows, Shard
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.table import Table

DIMS = (4, 4, 3, 4, 4, 4)
ROWS = (9, None, 30, 2000, 9, None)

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": StrategyFactory.create_geo_strategy,
}


class Model(torch.nn.Module):
    """Tables of two widths, some without a last row, of which one has rules of its own."""

    def __init__(self) -> None:
        super().__init__()
        made = [
            fleet.nn.Embedding(rows, dim, initializer="normal(0, 1)", padding_idx=3 if place == 1 else None)
            for place, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
        ]
        self.tables = torch.nn.ModuleList(made)
        self.top = torch.nn.Linear(sum(DIMS), 1)
        with torch.no_grad():
            for each in self.top.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(ids[:, place]) for place, table in enumerate(self.tables)], 1))


def batch(step: int, worker: int) -> torch.Tensor:
    draw = np.random.default_rng([step, worker])
    ids = [draw.integers(0, min(rows or 10 * (step + 1), 40), 12) for rows in ROWS]
    return torch.from_numpy(np.stack(ids, 1))


def trained(mode: str, kind: str, options: dict[str, Any], workers: int, servers: int) -> list[Any]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Model()
        inner = getattr(torch.optim, kind)(model.parameters(), **options)
        optimizer = fleet_.distributed_optimizer(inner, STRATEGIES[mode](), model=model)
        fleet_.init_worker()
        for step in range(5):
            if step == 3:
                model.eval()
                model(batch(50, 0))  # unknown ids read the mean
                model.train()
            optimizer.minimize(model(batch(step, worker)).square().mean())
            if mode != "sync":
                fleet_.barrier_worker()
        fleet_.barrier_worker()
        with torch.no_grad():
            return [table(torch.arange(9)) for table in model.tables]

    return run_job(body, workers, servers)


@pytest.mark.parametrize(
    ("mode", "kind", "options", "workers", "servers"),
    [
        ("sync", "SGD", {"lr": 0.1}, 1, 1),
        ("sync", "Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}, 2, 2),
        ("sync", "SGD", {"lr": 0.1, "momentum": 0.9}, 2, 1),  # the state of which has two widths
        ("sync", "Adam", {"lr": 0.1, "amsgrad": True}, 2, 2),
        ("async", "RMSprop", {"lr": 0.01}, 1, 2),
        ("half-async", "Adam", {"lr": 0.1}, 1, 1),
        ("geo", "SGD", {"lr": 0.1}, 1, 1),
    ],
)
@pytest.mark.pairs(2)
def test_whole_jobs(
    monkeypatch: pytest.MonkeyPatch, mode: str, kind: str, options: dict[str, Any], workers: int, servers: int
) -> None:
    updated: list[int] = []
    apply = Bundle.apply

    def counted(self: Bundle, *args: Any, **more: Any) -> Any:
        updated.append(len(self.tables))
        return apply(self, *args, **more)

    monkeypatch.setattr(Bundle, "apply", counted)
    together = trained(mode, kind, options, workers, servers)
    assert (max(updated, default=0) == 5) == (mode != "geo" and "momentum" not in options)
    monkeypatch.setattr(Bundle, "can_be_read", False)
    monkeypatch.setattr(Bundle, "can_be_updated", lambda *_: False)
    apart = trained(mode, kind, options, workers, servers)
    for ours, theirs in zip(itertools.chain(*together), itertools.chain(*apart), strict=True):
        assert torch.equal(ours, theirs)


def filled(ids: np.ndarray, bound: int | None = None) -> Table:
    """A table with some rows that are told apart, in short segments."""
    spec = TableSpec("some", 2, "float32", 0, bound, Initializer("zeros"))
    rule = RULES["SGD"].rows
    assert rule is not None
    table = Table(spec, rule, 0, MemoryStore(segment_bytes=64))
    table.load(ids, {"weight": np.stack([ids, ids], 1).astype(np.float32)})
    return table


@given(st.lists(st.tuples(st.sets(st.integers(-50, 50)), st.lists(st.integers(-50, 50))), min_size=2, max_size=6))
def test_any_tables_are_read_as_one_by_one(some: list[tuple[set[int], list[int]]]) -> None:
    tables = [filled(np.array(sorted(held), np.int64)) for held, _ in some]
    ids = np.array([each for _, asked in some for each in asked], np.int64)
    stops = np.cumsum([len(asked) for _, asked in some])
    out = np.full((ids.size, 2), np.nan, np.float32)
    bundle = Bundle(tables, None)
    for _ in range(2):  # the second time among more rows
        bundle.read(ids, stops, True, out)
        expected = [table.read(ids[part], True) for table, part in zip(tables, parts(stops), strict=True)]
        assert np.array_equal(out, np.concatenate(expected))
        tables[0].load(np.arange(100, 200), {"weight": np.ones((100, 2), np.float32)})


@given(st.data())
def test_any_gradients_are_merged_as_table_by_table(data: st.DataObject) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 3))
    tables = [
        [
            (ids, draw.standard_normal((ids.size, 3)).astype(np.float32))
            for ids in (draw.permutation(9)[: draw.integers(0, 9)] for _ in range(count))
        ]
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    ids, stops, sums = merge_each(tables, count)
    for same, part in zip(tables, parts(stops), strict=True):
        expected, total = merge(same, count)
        assert np.array_equal(ids[part], expected)
        assert sums[part].tobytes() == total.tobytes()


def test_equal_ids_of_other_tables_are_not_taken_for_those_looked_up() -> None:
    """What two tables are asked for may be the same one after the other, and end elsewhere."""
    tables = [filled(np.arange(3)), filled(np.arange(3, 6))]
    bundle, ids = Bundle(tables, SlotCache()), np.array([1, 5, 4])
    bundle.read(ids, np.array([2, 3]), True, np.empty((3, 2), np.float32))
    bundle.apply(ids, np.array([1, 3]), np.ones((3, 2), np.float32), {"lr": 1.0}, keep=False)
    assert [len(table) for table in tables] == [3, 3]
    assert tables[0].read(np.arange(3), True)[:, 0].tolist() == [0, 0, 2]
    assert tables[1].read(np.arange(3, 6), True)[:, 0].tolist() == [3, 3, 4]


def test_the_table_is_named_whose_ids_are_out_of_range() -> None:
    tables = [filled(np.arange(3), bound) for bound in (5, None, 2**40)]
    request = Request(tables, [True] * 3, None)
    ids, stops = np.array([4, -(2**63), 2**63 - 1, 2**40 - 1]), np.array([1, 3, 4])
    request.check_range(ids, stops)
    for place, wrong in ((0, 5), (0, -1), (3, 2**40)):
        bad = ids.copy()
        bad[place] = wrong
        with pytest.raises(ConfigurationError, match=rf"out of the table's range.*got {wrong}"):
            request.check_range(bad, stops)


def test_tables_at_other_steps_are_updated_one_by_one() -> None:
    """What Adam does depends on how many steps a table has seen."""
    rule = RULES["Adam"].rows
    assert rule is not None
    spec = JobSpec(
        params=(),
        tables=tuple(TableSpec(name, 2, "float32", 0, None, Initializer("zeros")) for name in "abc"),
        groups=(GroupSpec("Adam", 0, tuple(rule.options)),),
        settings=PlanSettings(server_num=1, worker_num=1, mode="sync"),
    )
    options = (json.dumps(dict(rule.options)),)

    def pushed(names: tuple[int, ...], *, joined: bool) -> Contribution:
        ids, stops = np.arange(4 * len(names)), np.arange(4, 4 * len(names) + 1, 4)
        rows = JoinedRows(names, ids, stops, [slice(0, len(names))], [np.ones((ids.size, 2), np.float32)])
        of = rows.by_table()
        return Contribution(
            0, options, (b"", ()), of, frozenset(names), 0, dict.fromkeys(names, 0), joined=rows if joined else None
        )

    shards = []
    for joined in (True, False):
        shard = Shard(make_plan(spec), 0, 0, options)
        for names in ((0, 1, 2), (1, 2), (0, 1, 2), (0, 2)):
            shard.apply([pushed(names, joined=joined)])
        shards.append([table.read(np.arange(12), True) for table in shard.tables])
    assert all(map(np.array_equal, *shards))
