"""Rows that come and go: which ids get one, which leave, and that nobody can tell when they were taken out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import tiny_tiers

from fleet.base.cluster import Endpoint
from fleet.errors import ConfigurationError, MissedError, ProtocolError
from fleet.kernels import RULES
from fleet.numeric.ids import owner
from fleet.plan.life import Admission, CountFilter, Eviction, MaxRows, Probability, SmallNorm, Unused
from fleet.plan.plan import make_plan
from fleet.plan.specs import GroupSpec, Initializer, JobSpec, PlanSettings, TableSpec
from fleet.ps.server.checkpoint_reader import fill_own
from fleet.ps.server.durability.state_directory import StateDirectory
from fleet.ps.table import frozen_view
from fleet.ps.table.eviction import Last, Ranking, last_here
from fleet.ps.table.exact_counts import ExactCounts
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.living_table import LivingTable
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.shard import FIRST, Contribution, Piece, Shard
from fleet.ps.table.sketch import Sketch, cells_of, unit_of
from fleet.ps.table.stores import TieredStores
from fleet.ps.worker.row_cuts import Span, search

SPEC = TableSpec("user", 2, "float32", 0, None, Initializer.parse("constant(0.5)"))
KERNEL = RULES["SGD"].rows
assert KERNEL is not None
OPTIONS = {**KERNEL.options, "lr": 1.0}


def some_ids(*values: int) -> Any:
    return np.array(values, np.int64)


# ---------------------------------------------------------------------------------------------- a table is a dict


@dataclass
class Row:
    value: list[float]
    used: int
    time: float
    seen: int
    weights: float


@dataclass
class Model:
    """What a table with rules is: rows leave at once, and every look-up is counted where it stands."""

    admit: CountFilter | None
    evict: Sequence[Eviction]
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    step: int = 0
    evicted: int = 0
    dropped: int = 0
    now: float = 0
    #: the first time that was told; who came before came then
    began: float = 0

    def edit(self, ids: Sequence[int], value: float) -> None:
        for id in ids:
            row = self.rows.setdefault(id, Row([], self.step, self.now, 1, 1.0))
            row.value = [value, value]
            self.counts.pop(id, None)

    def train(self, pushes: list[dict[int, tuple[float, float]]], now: float) -> None:
        self.step, self.now, self.began = self.step + 1, now, self.began or now
        for id in dict.fromkeys(id for push in pushes for id in push):
            mine = [push[id] for push in pushes if id in push]
            looked, weighed = len(mine), sum(weight for _, weight in mine)
            if id not in self.rows and self.admit is not None:
                by_weight = self.admit.of == "weight"
                self.counts[id] = self.counts.get(id, 0) + (weighed if by_weight else looked)
                if self.counts[id] < self.admit.n:
                    self.dropped += looked
                    continue
                total = self.counts.pop(id)
                looked, weighed = (looked, total) if by_weight else (int(total), weighed)
            row = self.rows.setdefault(id, Row([0.5, 0.5], 0, 0, 0, 0))
            grad = sum(np.float32(grad) for grad, _ in mine) / np.float32(len(pushes))
            row.value = [float(np.float32(value) - np.float32(grad)) for value in row.value]
            row.used, row.time, row.seen, row.weights = self.step, now, row.seen + looked, row.weights + weighed

    def shrink(self, now: float) -> None:
        gone = set[int]()
        if self.evict:
            self.now, self.began = now, self.began or now
        for rule in self.evict:
            if isinstance(rule, Unused) and rule.steps is not None:
                gone |= {id for id, row in self.rows.items() if self.step - row.used >= rule.steps}
            elif isinstance(rule, Unused) and rule.seconds is not None:
                gone |= {id for id, row in self.rows.items() if now - (row.time or self.began) >= rule.seconds}
            elif isinstance(rule, SmallNorm):
                gone |= {id for id, row in self.rows.items() if np.hypot(*row.value) < rule.below}
            elif isinstance(rule, MaxRows):
                name = {"recent": "used", "often": "seen", "weight": "weights"}[rule.by]
                order = sorted(self.rows, key=lambda id: (-getattr(self.rows[id], name), id))
                gone |= set(order[rule.n :])
        for id in gone:
            del self.rows[id]
        self.evicted += len(gone)


ids_st = st.integers(-6, 12)
pushes_st = st.lists(
    st.dictionaries(
        ids_st, st.tuples(st.sampled_from([-0.5, 0.25, 0.5]), st.sampled_from([0.0, 0.5, 2.0])), max_size=9
    ),
    min_size=1,
    max_size=2,
)
operations_st = st.lists(
    st.one_of(
        st.tuples(st.just("train"), pushes_st),
        st.tuples(st.just("shrink"), st.integers(0, 2)),
        st.tuples(st.just("sweep"), st.integers(1, 5)),
        st.tuples(st.just("look"), st.none()),
        st.tuples(st.just("save"), st.none()),
        st.tuples(st.just("edit"), st.lists(ids_st, max_size=5, unique=True)),
    ),
    max_size=30,
)
admit_st: st.SearchStrategy[CountFilter | None] = st.sampled_from(
    [None, CountFilter(2), CountFilter(3), CountFilter(2.5, of="weight")]
)
evict_st: st.SearchStrategy[list[Eviction]] = st.lists(
    st.sampled_from(
        [
            Unused(2),
            Unused(4),
            Unused(seconds=3),
            MaxRows(4),
            MaxRows(6, by="often"),
            MaxRows(5, by="weight"),
            SmallNorm(0.6),
        ]
    ),
    max_size=3,
)


def table_of(admit: Admission | None, evict: Sequence[Eviction], **changes: Any) -> LivingTable:
    assert KERNEL is not None
    return LivingTable(replace(SPEC, admit=admit, evict=tuple(evict), **changes), KERNEL, 7, MemoryStore(256))


def push_of(push: Mapping[int, tuple[float, float]]) -> tuple[tuple[Any, Any], Any]:
    ids = some_ids(*push)
    grads = np.array([[grad, grad] for grad, _ in push.values()], np.float32).reshape(-1, 2)
    return (ids, grads), np.array([weight for _, weight in push.values()], np.float64)


def train(table: LivingTable, pushes: Sequence[Mapping[int, tuple[float, float]]], now: float) -> None:
    table.step += 1
    rows, weights = zip(*map(push_of, pushes), strict=True)
    table.train(rows, weights, len(pushes), OPTIONS, now)


def exported(table: LivingTable) -> dict[int, list[float]]:
    """What is there without the rows that are due, without taking them out."""
    found: dict[int, list[float]] = {}
    place: int | None = 0
    while place is not None:
        (ids, columns), place = table.scan(place, 3)
        if table.cut is not None:
            left = ~table.cut.takes(ids, columns)
            ids, columns = ids[left], {name: values[left] for name, values in columns.items()}
        found |= dict(zip(ids.tolist(), columns["weight"].tolist(), strict=True))
    return found


class Saved:
    """A checkpoint that is written beside the training, a few rows at a time."""

    def __init__(self, table: LivingTable, epoch: int, model: Model) -> None:
        self.table = table
        self.rows = {id: row.value for id, row in model.rows.items()}
        self.counts = dict(model.counts)
        self.found: dict[int, list[float]] = {}
        table.begin_epoch(epoch)
        self.view = FrozenView([table], 0, epoch, self._take)
        self.place: int | None = 0

    def _take(self, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self._add(tensors["ids"], tensors)

    def _add(self, ids: Any, columns: Mapping[str, Any]) -> None:
        rows = dict(zip(ids.tolist(), columns["weight"].tolist(), strict=True))
        assert all(self.found.get(id, row) == row for id, row in rows.items())
        self.found |= rows

    def go_on(self) -> None:
        if self.place is not None:
            (ids, columns), self.place = self.table.scan(self.place, 2, 0, self.view.until)
            if (cut := self.view.cuts[0]) is not None:
                left = ~cut.takes(ids, columns)
                ids, columns = ids[left], {name: values[left] for name, values in columns.items()}
            self._add(ids, columns)

    def end(self) -> None:
        while self.place is not None:
            self.go_on()
        counts: dict[int, float] = {}
        if 0 in self.view.counts:
            place: int | None = 0
            while place is not None:
                arrays, place = self.view.counts[0].export(place, 100)
                counts |= dict(zip(arrays["ids"].tolist(), arrays["counts"].tolist(), strict=True))
        self.view.end()
        assert self.found == self.rows
        assert counts == {id: count for id, count in self.counts.items() if count}


@settings(max_examples=100, deadline=None)
@given(admit=admit_st, evict=evict_st, operations=operations_st)
def test_a_table_with_rules_is_a_dict(
    admit: CountFilter | None, evict: list[Eviction], operations: list[tuple[str, Any]]
) -> None:
    by = {rule.by: rule for rule in evict if isinstance(rule, MaxRows)}
    evict = [rule for rule in evict if not isinstance(rule, MaxRows)] + list(by.values())
    table, model, saved = table_of(admit, evict), Model(admit, evict), list[Saved]()
    now, every = 100.0, np.arange(-6, 13)
    for epoch, (kind, what) in enumerate(operations, 1):
        now += 1
        if kind == "train":
            train(table, what, now)
            model.train(what, now)
        elif kind == "shrink":
            table.evict(now + what)
            model.shrink(now + what)
        elif kind == "sweep":
            table.sweep(what)
        elif kind == "edit":
            table.load(some_ids(*what), {"weight": np.full((len(what), 2), epoch, np.float32)})
            model.edit(what, epoch)
        elif kind == "save":
            saved.append(Saved(table, epoch, model))
        else:
            assert exported(table) == {id: row.value for id, row in model.rows.items()}
        for each in saved:
            each.go_on()
        values = [model.rows[id].value if id in model.rows else [0.5, 0.5] for id in every.tolist()]
        assert table.read(every, training=True).tolist() == values
        assert table.known(every).tolist() == [id in model.rows for id in every.tolist()]
        assert table.life.rows == len(model.rows)
        assert table.life.evicted == model.evicted
        assert table.life.dropped_gradients == model.dropped
        assert table.life.pending == sum(count > 0 for count in model.counts.values())
    for each in saved:
        each.end()
    assert exported(table) == {id: row.value for id, row in model.rows.items()}


def test_rows_of_a_large_table_leave_while_it_is_trained() -> None:
    table = table_of(None, [Unused(2)])
    table.step += 1
    table.train([(np.arange(200_000), np.ones((200_000, 2), np.float32))], [None], 1, OPTIONS, 0)
    for _ in range(2):
        table.step += 1
        table.train([(np.arange(100), np.ones((100, 2), np.float32))], [None], 1, OPTIONS, 0)
    table.evict(0.0)
    assert len(table) == 200_000, "nothing was taken out yet"
    assert table.life.rows == 100
    figures = table.figures()
    assert (figures["rows"], figures["in_memory"], figures["on_disk"]) == (100, 100, 0)
    assert not table.known(np.arange(100, 200_000)).any()
    table.sweep(1 << 16)
    assert 100 < len(table) < 200_000
    table.step += 1
    table.train([(np.arange(150_000, 150_010), np.ones((10, 2), np.float32))], [None], 1, OPTIONS, 0)
    while table.cut is not None:
        assert table.life.rows == 110
        table.sweep(1 << 16)
    assert len(table) == table.life.rows == 110
    assert (table.read(some_ids(150_000, 7), training=True) == [[-0.5] * 2, [-2.5] * 2]).all()


@pytest.mark.parametrize("evict", [[Unused(3)], [MaxRows(40)], [MaxRows(40, by="often"), Unused(5)]], ids=repr)
@pytest.mark.parametrize("seed", [8, 3, 4, 6, 13, 17, 18])
@pytest.mark.pairs(1)
def test_who_asks_how_many_rows_are_due_changes_nothing_where_rows_lie_in_files(
    seed: int, evict: list[Eviction], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A table in files is one in memory, whenever rows are swept, counted and written anew."""
    tiny_tiers(monkeypatch)
    monkeypatch.setattr("fleet.ps.table.tiered_store._LOOKED_THROUGH", 3)
    monkeypatch.setattr("fleet.ps.table.living_table._AT_ONCE", 5)
    assert KERNEL is not None
    stores, random = TieredStores(tmp_path, "a-server", 1 << 20, 10.0), np.random.default_rng(seed)
    spec = replace(SPEC, dim=120, evict=tuple(evict))
    cold, warm = (LivingTable(spec, KERNEL, 7, each) for each in (stores.share()("user", 1, 500), MemoryStore()))
    with closing(stores):
        for moment in range(1, 400):
            act = random.choice(
                ["train", "evict", "sweep", "count", "read", "rewrite"], p=[0.25, 0.03, 0.17, *[0.2] * 2, 0.15]
            )
            ids = np.unique(random.integers(0, random.choice([30, 200]), 12))
            for table in (cold, warm):
                if act == "train":
                    table.step += 1
                    table.train([(ids, np.ones((ids.size, 120), np.float32))], [None], 1, OPTIONS, moment)
                elif act == "evict":
                    table.evict(moment)
                elif act == "sweep":
                    table.sweep(3)
                elif act == "rewrite" and (reading := table.to_rewrite()) is not None:
                    reading.run()
                    table.rewrite(reading)
            if act == "count":
                assert cold.life == warm.life
            assert act != "read" or cold.read(ids, training=True).tolist() == warm.read(ids, training=True).tolist()
        (ids, rows), (others, wanted) = cold.export(), warm.export()
        found = dict(zip(ids.tolist(), rows["weight"].tolist(), strict=True))
        assert found == dict(zip(others.tolist(), wanted["weight"].tolist(), strict=True))
        assert cold.life == warm.life


# ---------------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("admit", [Probability(0.5), CountFilter(2), CountFilter(2, sketch_mb=0.1)], ids=repr)
def test_any_seed_is_one(admit: Admission) -> None:
    assert KERNEL is not None
    for seed in (0, -1, 2**63, 2**64 - 1):
        table = LivingTable(replace(SPEC, admit=admit), KERNEL, seed)
        for table.step in range(1, 3):
            table.train([(np.arange(64), np.ones((64, 2), np.float32))], [None], 1, OPTIONS, 0.0)
        assert 30 < len(table) <= 64


def test_chance_depends_on_seed_table_id_and_step_alone() -> None:
    def admitted(seed: int, name: str, ids: Any, step: int) -> set[int]:
        assert KERNEL is not None
        table = LivingTable(replace(SPEC, name=name, admit=Probability(0.25)), KERNEL, seed)
        table.step = step
        table.train([(ids, np.ones((len(ids), 2), np.float32))], [None], 1, OPTIONS, 0.0)
        return set(table.export()[0].tolist())

    ids = np.arange(4000)
    first = admitted(1, "user", ids, 1)
    assert 850 < len(first) < 1150
    assert admitted(1, "user", ids[::-1].copy(), 1) == first
    assert admitted(1, "user", ids[1000:2000].copy(), 1) == {id for id in first if 1000 <= id < 2000}
    for others in (admitted(2, "user", ids, 1), admitted(1, "item", ids, 1), admitted(1, "user", ids, 2)):
        assert 150 < len(first & others) < 350


# ---------------------------------------------------------------------------------------------- the last that stays


@settings(max_examples=60, deadline=None)
@given(
    rows=st.dictionaries(st.integers(-20, 20), st.integers(0, 5), max_size=30),
    most=st.integers(1, 30),
    servers=st.integers(1, 3),
)
def test_servers_find_the_last_row_that_stays(rows: dict[int, int], most: int, servers: int) -> None:
    parts: list[dict[int, int]] = [{} for _ in range(servers)]
    for id, score in rows.items():
        parts[id % servers][id] = score
    rankings = [Ranking(some_ids(*part), some_ids(*part.values())) for part in parts]
    last = found_last([each.bounds for each in rankings], [each.rank for each in rankings], len(rows), most)
    order = sorted(rows, key=lambda id: (-rows[id], id))
    assert [id for id in order if (-rows[id], id) <= (-last[0], last[1])] == order[:most]


def rank_in(shard: Shard, index: int, kind: str, last: Last) -> int:
    return shard.rank(index, kind, *last)


def found_last(bounds: list[tuple[int, int]], ranks: list[Callable[[Last], int]], rows: int, most: int) -> Last:
    """Search for the last row that stays, as a worker does among its servers."""
    low, high = zip(*bounds, strict=True)
    searching = search(Span(rows, min(low), max(high)), most)
    try:
        asked = next(searching)
        while True:
            asked = searching.send([sum(rank(last) for rank in ranks) for last in asked])
    except StopIteration as found:
        return cast("Last", found.value)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.dictionaries(st.integers(-2000, 2000), st.integers(0, 5), min_size=2, max_size=150),
    share=st.floats(0, 1),
    batch=st.integers(1, 150),
    sampled=st.lists(st.tuples(st.integers(-2000, 2000), st.integers(0, 9)), max_size=40, unique=True),
)
def test_the_last_row_that_stays_is_found_whatever_the_sample(
    rows: dict[int, int], share: float, batch: int, sampled: list[tuple[int, int]]
) -> None:
    most = min(len(rows) - 1, max(1, round(share * len(rows))))
    items = list(rows.items())
    batches = [items[start : start + batch] for start in range(0, len(items), batch)]
    arrays = [(some_ids(*(id for id, _ in each)), some_ids(*(score for _, score in each))) for each in batches]
    sample = some_ids(*(id for id, _ in sampled)), some_ids(*(score for _, score in sampled))
    found = last_here(lambda: iter(arrays), sample, len(rows), most)
    order = sorted(rows, key=lambda id: (-rows[id], id))
    assert found == (rows[order[most - 1]], order[most - 1])


# ---------------------------------------------------------------------------------------------- counting


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["uint32", "float64"]),
    operations=st.lists(
        st.tuples(st.sampled_from("aarv"), st.lists(st.integers(-2000, 2000), unique=True, max_size=400)), max_size=12
    ),
)
def test_exact_counts_are_a_dict(dtype: str, operations: list[tuple[str, list[int]]]) -> None:
    counts, model = ExactCounts(dtype), dict[int, int]()
    views: list[tuple[Any, dict[int, int], dict[int, int], int | None]] = []
    for kind, values in operations:
        if kind == "a":
            for value in values:
                model[value] = model.get(value, 0) + abs(value) % 3
            totals = counts.add(some_ids(*values), np.array([abs(value) % 3 for value in values]))
            assert totals.tolist() == [model[value] for value in values]
            model = {value: count for value, count in model.items() if count}
        elif kind == "r":
            counts.remove(some_ids(*values))
            model = {value: count for value, count in model.items() if value not in values}
        else:
            views.append((counts.view(frozen=True), dict(model), {}, 0))
        for at, (view, then, found, place) in enumerate(views):
            if place is not None:
                arrays, place = view.export(place, 100)
                found |= dict(zip(arrays["ids"].tolist(), arrays["counts"].tolist(), strict=True))
                views[at] = view, then, found, place
        assert len(counts) == len(model)
    for view, then, found, place in views:
        while place is not None:
            arrays, place = view.export(place, 1000)
            found |= dict(zip(arrays["ids"].tolist(), arrays["counts"].tolist(), strict=True))
        assert found == then
    assert counts.of(np.arange(-2000, 2001)).tolist() == [model.get(value, 0) for value in range(-2000, 2001)]


def test_exact_counts_take_at_most_twenty_bytes_an_id_at_any_moment() -> None:
    counts = ExactCounts(np.uint32)
    for start in range(0, 700_000, 20_000):
        counts.add(np.arange(start, start + 20_000) * 7919, np.ones(20_000, np.int64))
        if start >= 100_000:
            assert counts.nbytes / len(counts) < 17.5
    assert len(counts) == 700_000


@pytest.mark.parametrize("most", [3, 10, 100, 1000, 100_000])
def test_a_sketch_is_never_late_and_seldom_early(most: int) -> None:
    random = np.random.default_rng(most)
    sketch, times = Sketch(1 << 18, most, np.uint64(5)), np.zeros(25_000, np.int64)
    early = 0
    for _ in range(6):
        some = random.permutation(25_000)[:15_000]
        times[some] += 1
        totals = sketch.add(some, np.ones(15_000))
        assert (totals >= np.minimum(times[some], most)).all()
        early += int((totals > times[some]).sum())
    assert early < 6 * 15_000 * (0.001 if most <= 10 else 0.3)


@pytest.mark.parametrize(
    ("most", "weight", "before"),
    [
        (5, 0.1, 0),
        (10, 0.7, 0),
        (3, 0.3, 0),
        (2.1, 0.7, 0),
        (200, 0.1, 0),
        (40_000, 0.001, 39_999.0),
        (1e-200, 1e-203, 0),
    ],
)
def test_a_sum_of_weights_in_a_sketch_is_never_late_and_hardly_early(most: float, weight: float, before: float) -> None:
    sketch, exact = Sketch(1 << 12, most, np.uint64(5), unit_of(most)), ExactCounts(np.float64)
    one = some_ids(7)
    reached: dict[str, int] = {}
    for step, amount in enumerate([before, *[weight] * 3000]):
        for name, counts in (("exact", exact), ("sketch", sketch)):
            if counts.add(one, np.array([amount]))[0] >= most:
                reached.setdefault(name, step)
    assert 0.97 * reached["exact"] - 1 <= reached["sketch"] <= reached["exact"]


@settings(max_examples=60, deadline=None)
@given(
    most=st.one_of(st.floats(1e-6, 1e6), st.sampled_from([1.0, 2.5, 2.0**53, 5e-324])),
    pushes=st.lists(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=20), max_size=20),
    nbytes=st.sampled_from([64, 4096]),
)
def test_no_sum_of_weights_is_late_in_a_sketch(most: float, pushes: list[list[tuple[int, float]]], nbytes: int) -> None:
    sketch, exact = Sketch(nbytes, most, np.uint64(5), unit_of(most)), ExactCounts(np.float64)
    for push in pushes:
        parts = dict(push)
        ids, weights = some_ids(*parts), np.array([share * most / 3 for share in parts.values()])
        assert (sketch.add(ids, weights) >= np.minimum(exact.add(ids, weights), most)).all()


def test_sums_in_a_sketch_go_into_one_up_to_another_number() -> None:
    ids, key = np.arange(300), np.uint64(3)
    weights = ids % 7 / 3
    sketch = Sketch(1 << 14, 2.0, key, unit_of(2.0))
    sketch.add(ids, weights)
    view = sketch.view(frozen=True)
    arrays, _ = view.export(0, 1 << 20)
    for most in (0.3, 1.1, 2.0, 500.0, 1e12):
        into = Sketch(1 << 13, most, key, unit_of(most))
        into.load(cells_of(arrays["cells"], view.bits), view.bits, 0, view.blocks, view.unit)
        got = into.add(ids, np.zeros(300))
        assert (got >= np.minimum(np.minimum(weights, 2.0), most)).all()
        assert np.count_nonzero(got > weights + 1e-8 * most) < 30, "as others have the same cells, or a unit is large"


def test_ids_that_wait_in_a_sketch_are_counted_once_and_not_when_they_have_come_and_left() -> None:
    table = table_of(CountFilter(2, sketch_mb=0.1), [Unused(1)])
    for _ in range(3):
        for ids in ((1, 2), (1, 2), (3,)):  # 1 and 2 get their rows, or get them back, and leave as 3 is looked up
            train(table, [dict.fromkeys(ids, (0.5, 1.0))], 0.0)
        table.evict(0.0)
        train(table, [dict.fromkeys((10 * table.step,), (0.5, 1.0))], 0.0)
    assert sorted(exported(table)) == [3]
    assert table.life.pending == 3


@pytest.mark.parametrize(("sketch_mb", "again"), [(None, [0.5, 0.5]), (0.1, [0.0, 0.0])])
def test_an_id_whose_row_has_left_begins_anew_and_in_a_sketch_with_its_count(
    sketch_mb: float | None, again: list[float]
) -> None:
    table = table_of(CountFilter(3, sketch_mb=sketch_mb), [Unused(1)])
    for id in (7, 7, 7, 7, 1):
        train(table, [{id: (0.5, 1.0)}], 0.0)
    assert exported(table) == {7: [-0.5, -0.5]}
    table.evict(0.0)
    train(table, [{7: (0.5, 1.0)}], 0.0)
    assert table.read(some_ids(7), training=True).tolist() == [again]


def test_a_sketch_keeps_less_than_one_and_a_half_bytes_an_id() -> None:
    """Half a million ids, each seen once, of which next to none is taken for one seen three times."""
    sketch = Sketch(700_000, 3, np.uint64(9))
    early = sum(
        int((sketch.add(np.arange(start, start + 100_000) * 31, np.ones(100_000)) >= 3).sum())
        for start in range(0, 500_000, 100_000)
    )
    assert sketch.nbytes < 1.5 * 500_000
    assert early < 500


@pytest.mark.parametrize("nbytes", [1 << 14, 10_000, 30_000, 1 << 17])
@pytest.mark.parametrize("most", [3, 15, 200])
def test_counts_of_several_sketches_go_into_another_of_any_size(nbytes: int, most: int) -> None:
    ids, key = np.arange(3000), np.uint64(3)
    times = ids % 3 + 1
    into = Sketch(nbytes, most, key)
    for server in range(2):
        mine = owner(ids, 2) == server
        sketch = Sketch(1 << 14, 7, key)
        sketch.add(ids[mine], times[mine].astype(np.float64))
        view, place = sketch.view(frozen=True), 0
        following: int | None = 0
        while following is not None:
            place = following
            arrays, following = view.export(place, 200)
            into.load(cells_of(arrays["cells"], view.bits), view.bits, place, view.blocks)
    assert (into.add(ids, np.zeros(3000)) >= np.minimum(times, most)).all()


# ---------------------------------------------------------------------------------------------- shards


def plan_of(servers: int, *tables: TableSpec, mode: str = "sync", workers: int = 2, every: int = 1000) -> Any:
    groups = (GroupSpec("SGD", 0, tuple(KERNEL.options)),) if KERNEL is not None else ()
    return make_plan(JobSpec((), tables, groups, PlanSettings(servers, workers, mode, evict_every=every)))


OPTIONS_TEXT = json.dumps({**KERNEL.options, "lr": 0.5})


class Servers:
    """The shards of all servers of a job, which are driven as workers and servers do it together."""

    def __init__(self, count: int, *tables: TableSpec, every: int = 4) -> None:
        plan = plan_of(count, *tables, every=every)
        self.shards = [Shard(plan, server, 3, [OPTIONS_TEXT]) for server in range(count)]

    def step(self, pushes: Sequence[tuple[Any, Any, Any]], now: float, *, order: int = 1) -> None:
        del order
        for server, shard in enumerate(self.shards):
            contributions = []
            for worker, (ids, grads, weights) in enumerate(pushes):
                mine = owner(ids, len(self.shards)) == server
                rows = {0: (ids[mine], grads[mine])}
                contributions.append(
                    Contribution(worker, (OPTIONS_TEXT,), ((), ()), rows, frozenset([0]), 0, {0: 0}, {0: weights[mine]})
                )
            shard.now = now
            for each in contributions:
                shard.check(each)
            shard.dense.apply = lambda *_: None  # type: ignore[method-assign]  # there is nothing dense
            shard._count_staleness = lambda *_: None  # type: ignore[method-assign]
            shard.apply(contributions)
        self.agree()

    def shrink(self, now: float) -> None:
        for shard in self.shards:
            shard.shrink(now)
        self.agree()

    def agree(self) -> None:
        asked = [shard.awaits_cut for shard in self.shards]
        assert all(each == asked[0] for each in asked)
        for index, kind, most in asked[0]:
            bounds = [shard.bounds(index, kind) for shard in self.shards]
            ranks = [partial(rank_in, shard, index, kind) for shard in self.shards]
            last = found_last(bounds, ranks, sum(len(shard.tables[index]) for shard in self.shards), most)
            for shard in self.shards:
                shard.cut(index, kind, last)

    def rows(self) -> dict[int, tuple[Any, ...]]:
        found: dict[int, tuple[Any, ...]] = {}
        for shard in self.shards:
            for piece in pieces_of(shard):
                if "table" in piece.about:
                    columns = [piece.tensors[name].tolist() for name in piece.about["columns"]]
                    found |= dict(zip(piece.tensors["ids"].tolist(), zip(*columns, strict=True), strict=True))
        return found

    def counts(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for shard in self.shards:
            for piece in pieces_of(shard):
                if "counts" in piece.about:
                    found |= dict(zip(piece.tensors["ids"].tolist(), piece.tensors["counts"].tolist(), strict=True))
        return found


def pieces_of(shard: Shard, since: int = 0, frozen: FrozenView | None = None) -> Iterator[Piece]:
    cursor = FIRST
    while cursor:
        piece = shard.export(cursor, since, frozen=frozen)
        yield piece
        cursor = piece.next_cursor


def steps_of(seed: int, count: int) -> Iterator[list[tuple[Any, Any, Any]]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        pushes = []
        for _ in range(2):
            ids = np.unique(random.zipf(1.3, 30) % 200).astype(np.int64)
            grads = random.normal(size=(ids.size, 2)).astype(np.float32)
            pushes.append((ids, grads, random.random(ids.size)))
        yield pushes


RULED = [
    (CountFilter(2), [Unused(6)]),
    (None, [MaxRows(20)]),
    (CountFilter(3), [MaxRows(15, by="often"), SmallNorm(0.2)]),
    (CountFilter(1.5, of="weight"), [MaxRows(15, by="weight"), MaxRows(30), Unused(9)]),
    (Probability(0.4), [Unused(seconds=5)]),
]


@pytest.mark.parametrize(("admit", "evict"), RULED)
@pytest.mark.pairs(1)
def test_the_number_of_servers_makes_no_difference(admit: Admission | None, evict: list[Eviction]) -> None:
    spec = replace(SPEC, admit=admit, evict=tuple(evict))
    jobs = [Servers(count, spec) for count in (1, 2, 3)]
    for number, pushes in enumerate(steps_of(1, 40)):
        for job in jobs:
            job.step(pushes, 50.0 + number)
            if number == 21:
                job.shrink(50.0 + number)
        assert jobs[0].rows() == jobs[1].rows() == jobs[2].rows()
        assert jobs[0].counts() == jobs[1].counts() == jobs[2].counts()
    lives = [[shard.life(0) for shard in job.shards] for job in jobs]
    for name in ("rows", "pending", "evicted", "dropped_gradients"):
        assert len({sum(getattr(life, name) for life in each) for each in lives}) == 1, name
    assert sum(life.evicted for life in lives[0] if life is not None) > 10


@pytest.mark.parametrize(("admit", "evict"), RULED)
@pytest.mark.parametrize("moment", [7, 8, 11, 16])
@pytest.mark.pairs
def test_a_snapshot_goes_on_to_the_bit(admit: Admission | None, evict: list[Eviction], moment: int) -> None:
    spec = replace(SPEC, admit=admit, evict=tuple(evict))
    whole = Servers(1, spec)
    for number, pushes in enumerate(steps_of(2, 24), 1):
        whole.step(pushes, 50.0 + number)
        if number == moment:
            (shard,) = whole.shards
            shard.history.next_epoch()
            frozen = shard.freeze(0, lambda *_: None)
            pieces = [
                (piece.about, [as_tensor(each) for each in piece.tensors.values()])
                for piece in pieces_of(shard, 0, frozen)
            ]
            again = Servers(1, spec)
            (other,) = again.shards
            fill_own(other, pieces)
            for table, theirs in zip(other.tables, shard.tables, strict=True):
                table.step = theirs.step
            other.resume_past(json.loads(json.dumps(shard.past)), shard.now)
        elif number > moment:
            again.step(pushes, 50.0 + number)
            assert again.rows() == whole.rows()
            assert again.counts() == whole.counts()
            assert again.shards[0].life(0) == whole.shards[0].life(0)


def as_tensor(array: Any) -> Any:
    import torch

    return torch.as_tensor(array)


@pytest.mark.parametrize(("admit", "evict"), RULED)
def test_a_delta_tells_which_rows_are_gone(admit: Admission | None, evict: list[Eviction]) -> None:
    job = Servers(1, replace(SPEC, admit=admit, evict=tuple(evict)))
    (shard,) = job.shards
    state: dict[int, tuple[Any, ...]] = {}
    told = 0
    last = ""
    for number, pushes in enumerate(steps_of(4, 40), 1):
        job.step(pushes, 50.0 + number)
        if number % 3 == 0:
            since = shard.history.begin(str(number), last)
            assert bool(since) == bool(last)
            frozen = shard.freeze(since, lambda *_: None)
            for piece in pieces_of(shard, since, frozen):
                if "removed" in piece.about:
                    gone = piece.tensors["ids"].tolist()
                    told += len(gone)
                    state = {id: row for id, row in state.items() if id not in gone}
                elif "table" in piece.about:
                    columns = [piece.tensors[name].tolist() for name in piece.about["columns"]]
                    state |= dict(zip(piece.tensors["ids"].tolist(), zip(*columns, strict=True), strict=True))
            last = str(number)
            shard.history.exists(last)
            assert state == job.rows()
    assert told > 10


@pytest.mark.parametrize(("admit", "evict"), RULED)
@pytest.mark.pairs(2)
def test_snapshots_on_top_of_each_other_lead_to_where_the_last_one_began(
    admit: Admission | None, evict: list[Eviction], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that left, came again and change while the snapshot is written are in it."""
    monkeypatch.setattr(frozen_view, "_HELD_BYTES", 1)  # what changes is handed on at once, before all that is read
    spec = replace(SPEC, admit=admit, evict=tuple(evict))
    job, since, told, now = Servers(1, spec, every=2), 0, 0, 50.0
    (shard,) = job.shards
    with closing(StateDirectory(str(tmp_path), Endpoint("server", 1), "os")) as directory:
        for number, pushes in enumerate(steps_of(5, 40), 1):
            now += 1
            job.step(pushes, now)
            if number % 3:
                continue
            epoch = shard.history.next_epoch()
            shard.history.goes_on_from("snapshot", *(each for each in (since, epoch) if each))
            draft = directory.begin({}, [], on_top=since > 0, behind=False)
            frozen = shard.freeze(since, draft.pieces.add)
            rows, counts = job.rows(), admit is not None and isinstance(admit, CountFilter) and job.counts()
            with draft.pieces as pieces:
                now += 1
                job.step(pushes, now)
                for piece in pieces_of(shard, since, frozen):
                    told += "removed" in piece.about and piece.about["rows"]
                    pieces.add(piece.about, piece.tensors)
            directory.adopt(draft, directory.publish(draft))
            again, since = Servers(1, spec), epoch
            fill_own(again.shards[0], directory.pieces())
            assert again.rows() == rows
            assert not counts or again.counts() == counts
    assert told > 10


def many_leave(servers: Servers) -> None:
    """Let more rows leave at once than are left."""
    step = [
        (np.arange(first, last), np.ones((last - first, 2), np.float32), np.ones(last - first))
        for first, last in ((0, 40), (35, 60))
    ]
    servers.step(step, 50.0)
    servers.step(step[1:] * 2, 51.0)
    servers.shrink(52.0)


@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_to_go_on_from_something_older_knows_of_all_rows_that_are_due(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more have left than are remembered, all rows are saved anew."""
    monkeypatch.setattr("fleet.ps.table.tombstones._FEW", 4)
    job = Servers(servers, replace(SPEC, evict=(Unused(1),)))
    for shard in job.shards:
        shard.history.begin("first", "")
        shard.history.exists("first")
    many_leave(job)
    for shard in job.shards:
        (table,) = shard.tables
        assert table.cut is not None, "nothing was taken out yet"
        assert shard.history.begin("second", "first") == 0
        assert not shard.history.knows_removed(1)


def test_a_delta_that_is_read_beside_the_training_has_all_rows_that_have_left_or_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fleet.ps.table.tombstones._FEW", 4)
    job = Servers(1, replace(SPEC, evict=(Unused(1),)))
    (shard,) = job.shards
    shard.history.begin("first", "")
    shard.history.exists("first")
    since = shard.history.begin("second", "first")
    assert since
    many_leave(job)
    with pytest.raises(MissedError, match="does not know which rows have left"):
        list(pieces_of(shard, since))


def test_a_save_that_is_given_up_keeps_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tiers(monkeypatch)
    monkeypatch.setattr("fleet.ps.table.shard.PIECE_BYTES", 2000)
    ids, values = np.arange(100), np.zeros((100, 60), np.float32)
    with closing(TieredStores(tmp_path, "a-server", 1 << 20, 10.0)) as stores:
        shard = Shard(plan_of(1, replace(SPEC, dim=60)), 0, 3, [OPTIONS_TEXT], stores.share())
        (table,) = shard.tables

        def taken() -> int:
            for _ in range(20):
                table.load(ids, {"weight": values})
            return table.figures()["disk_bytes"]

        before = taken()
        for _ in range(5):
            shard.history.next_epoch()
            view = shard.freeze(0, lambda *_: None)
            assert shard.export("table:0:0", frozen=view).next_cursor.startswith("table:0:")
            view.leave()
            assert taken() < 2 * before


def test_what_does_not_fit_is_refused() -> None:
    spec = replace(SPEC, evict=(MaxRows(3),))
    with pytest.raises(ConfigurationError, match="cannot come and go"):
        Shard(plan_of(1, spec, mode="geo"), 0, 0, [OPTIONS_TEXT])
    (shard,) = Servers(1, spec).shards
    with pytest.raises(ProtocolError, match="no cut is awaited"):
        shard.rank(0, "recent", 1, 1)
    rows = {0: (some_ids(1), np.zeros((1, 2), np.float32))}
    for bad in (np.ones(2), np.array([-1.0]), np.array([np.nan]), np.array([1])):
        with pytest.raises(ProtocolError, match="weights of look-ups"):
            shard.check(Contribution(0, (OPTIONS_TEXT,), ((), ()), rows, frozenset([0]), 0, {}, {0: bad}))
