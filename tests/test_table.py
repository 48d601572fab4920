"""Sparse tables: rows by id, when they begin to exist, and what they are then."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.kernels import RULES
from fleet.numeric import ids as rows
from fleet.numeric.ids import owner
from fleet.numeric.jit import Compiled
from fleet.numeric.merge import merge
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.table import index, slot_cache
from fleet.ps.table import table as table_module
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.slot_cache import SlotCache
from fleet.ps.table.table import Table

INT64 = np.iinfo(np.int64)
SPEC = TableSpec("user", 3, "float32", 0, None, Initializer.parse("uniform(-1, 2)"))


def table(rule: str = "SGD", seed: int = 7, **changes: Any) -> Table:
    kernel = RULES[rule].rows
    assert kernel is not None
    return Table(replace(SPEC, **changes), kernel, seed)


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def ones(count: int, dim: int = 3) -> Any:
    return np.ones((count, dim), "float32")


# ---------------------------------------------------------------------------------------------- the store

few = st.one_of(st.integers(-4, 4), st.sampled_from([INT64.min, INT64.max]), st.integers(INT64.min, INT64.max))

#: Bytes of a segment: a few rows, and more rows than any test here has.
SEGMENTS = [256, 32 << 20]


def column(store: MemoryStore, name: str, width: int = 2, dtype: str = "float32") -> Any:
    out = np.empty((len(store), width), dtype)
    rows.gather(store.column(name), np.arange(len(store)), out)
    return out


@pytest.mark.parametrize("segment_bytes", SEGMENTS)
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(st.tuples(st.booleans(), st.lists(few, max_size=40)), max_size=30))
def test_a_store_is_a_dict(segment_bytes: int, operations: list[tuple[bool, list[int]]]) -> None:
    store, model = MemoryStore(segment_bytes), dict[int, int]()
    store.ensure_column("a", 2, 1.5, "float32")
    for inserting, values in operations:
        if inserting:
            for value in values:
                model.setdefault(value, len(model))
            assert store.insert(ids(*values)).tolist() == [model[value] for value in values]
        else:
            assert store.find(ids(*values)).tolist() == [model.get(value, -1) for value in values]
    assert len(store) == len(model)
    assert store.ids(np.arange(len(store))).tolist() == list(model)
    assert (column(store, "a") == 1.5).all()


@pytest.mark.parametrize("segment_bytes", SEGMENTS)
def test_memory_that_is_touched_holds_what_it_held(segment_bytes: int) -> None:
    store = MemoryStore(segment_bytes)
    store.ensure_column("a", 2, 1.5, "float32")
    store.ensure_column("b", 1, 0.0, "uint8")
    store.insert(np.arange(100))
    rows.scatter(store.column("a"), np.arange(100), np.arange(200, dtype=np.float32).reshape(100, 2))
    store.reserve(20_000)
    touched = store.touch()
    told = [next(touched)]
    store.insert(np.arange(30_000))  # while it goes on, and more than were expected
    told += touched
    assert told == sorted(set(told))
    assert told[-1] == 20_000
    assert store.find(np.arange(30_000)).tolist() == list(range(30_000))
    assert np.array_equal(column(store, "a")[:100].ravel(), np.arange(200))
    assert (column(store, "a")[100:] == 1.5).all()
    assert not column(store, "b", 1, "uint8").any()


def test_a_store_that_was_told_how_many_come_takes_no_more_memory_for_its_index_while_they_do() -> None:
    store, part = MemoryStore(), np.arange(100)
    store.insert(part)  # before it is told
    store.reserve(1_000)
    reserved = store.nbytes
    store.insert(np.arange(1_000))
    assert store.nbytes - reserved <= 900 * 8, "the ids alone"
    assert store.find(np.arange(-1, 2_000)).tolist() == [-1, *range(1_000), *[-1] * 1_000]
    store.insert(np.arange(5_000))  # it was only a guess
    assert store.find(np.arange(5_000)).tolist() == list(range(5_000))


@pytest.mark.parametrize("segment_bytes", SEGMENTS)
@pytest.mark.parametrize("stride", [1, 64, 2**32, -(2**40)])
def test_a_store_keeps_ids_and_columns_while_it_grows(stride: int, segment_bytes: int) -> None:
    store = MemoryStore(segment_bytes)
    store.ensure_column("a", 2, 0.0, "float64")
    everything = np.arange(20_000, dtype=np.int64) * stride
    probes = np.random.default_rng(0)
    sizes = [1] * 85 + [2000] + [50] * 100 + [7000]  # one by one, and in the midst of it more than there is room for
    for part in np.split(everything, np.cumsum(sizes)):
        slots = store.insert(part)
        rows.scatter(store.column("a"), slots, np.repeat(part.astype("float64"), 2).reshape(-1, 2))
        asked = probes.integers(0, 20_000, 20)
        assert store.find(everything[asked]).tolist() == np.where(asked < len(store), asked, -1).tolist()
    assert store.find(everything).tolist() == list(range(20_000))
    assert np.array_equal(column(store, "a", dtype="float64")[:, 1], everything.astype("float64"))
    assert (store.find(everything + 1)[1:] == -1).sum() >= (0 if stride == 1 else 19_999)
    assert np.array_equal(store.ids(ids(12, 10)), everything[[12, 10]])


def unmixed(hashed: int) -> int:
    """The id with this hash: the inverse of ``mix``."""

    def unshifted(x: int, by: int) -> int:
        out = x
        for _ in range(64 // by):
            out = x ^ (out >> by)
        return out

    x = unshifted(hashed, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    x = unshifted(x, 30)
    return x - 2**64 if x >= 2**63 else x


@pytest.mark.parametrize("batch", [1, 3])
def test_ids_whose_hashes_are_alike_are_told_apart_while_the_index_grows(batch: int) -> None:
    # Neighbours at the end of the index, so that they go on at its beginning, and equal in the bits an entry repeats.
    alike = [unmixed((0xFFFF - place) << 48 | middle << 24 | 5) for middle in range(100) for place in (0, 1, 2)]
    store = MemoryStore()
    for start in range(0, len(alike), batch):
        store.insert(ids(*alike[start : start + batch]))
        assert store.find(ids(*alike)).tolist() == [k if k < start + batch else -1 for k in range(len(alike))]


def test_growing_moves_a_few_entries_with_every_id_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[int] = []

    def counted(*args: Any) -> int:
        homes.append(move(*args))
        return homes[-1]

    move = index._move
    monkeypatch.setattr(index, "_move", counted)
    store = MemoryStore(segment_bytes=1 << 20)
    store.ensure_column("a", 16, 0.0, "float32")
    grown, sizes = 0, set()
    for part in np.split(np.arange(200_000) * 7919, 1000):
        before = store.column("a").addresses
        store.insert(part)
        if len(before) > 1:  # a single segment may be short
            assert np.array_equal(store.column("a").addresses[: len(before)], before)
        # A few more than its share, as far as the run of entries goes.
        assert sum(homes) <= index.MOVED_PER_ID * part.size + 200
        grown += sum(homes)
        homes.clear()
        sizes.add(store._index._now.size)
    assert len(store.column("a").addresses) == 13
    assert grown >= sum(sorted(sizes)[:-2]), "all but the last table has been moved whole"
    assert len(sizes) > 8


@pytest.mark.parametrize("rows_at_once", [26_000, 100])
def test_a_table_takes_little_more_than_its_rows(rows_at_once: int) -> None:
    one, options = table("Adagrad", dim=16), {"lr": 0.1}
    one.apply(np.arange(1000), ones(1000, 16), options, 1)
    grads = ones(rows_at_once, 16)
    before, worst = psutil.Process().memory_info().rss, 0.0
    for start in range(1000, 400_000, rows_at_once):
        one.apply(np.arange(start, start + rows_at_once), grads, options, 2)
        worst = max(worst, one.nbytes / (len(one) * (8 + 64 + 64)))
    assert worst <= 1.4
    # Large pages are whole or not at all: a few megabytes are nobody's fault.
    assert psutil.Process().memory_info().rss - before <= 1.4 * len(one) * (8 + 64 + 64) + (8 << 20)


def test_the_ids_of_one_server_of_many_are_found_as_fast() -> None:
    # The server was chosen by the same hash: were the index to use its low bits, these would all collide.
    mine = np.arange(400_000)
    mine = mine[owner(mine, 64) == 5]
    store = MemoryStore()
    store.insert(mine)
    taken = np.flatnonzero(store._index._now)
    runs = np.split(taken, np.flatnonzero(np.diff(taken) > 1) + 1)
    assert max(map(len, runs)) < 200
    assert len(store) == mine.size


@pytest.mark.parametrize("segment_bytes", SEGMENTS)
def test_a_later_column_and_a_later_fill(segment_bytes: int) -> None:
    store = MemoryStore(segment_bytes)
    store.insert(np.arange(40))
    store.ensure_column("a", 1, 3.0, "float32")
    store.ensure_column("a", 1, 4.0, "float32")
    store.insert(np.arange(90))
    store.ensure_column("a", 1, 0.0, "float32")
    store.insert(np.arange(100))
    assert column(store, "a", 1).ravel().tolist() == [3] * 40 + [4] * 50 + [0] * 10
    assert store.columns == ("a",)
    with pytest.raises(ConfigurationError, match=r"a; expected 1 x float32; got 2 x float32"):
        store.ensure_column("a", 2, 0.0, "float32")


# ---------------------------------------------------------------------------------------------- reading


def test_reading_creates_nothing() -> None:
    one = table()
    fresh = one.read(ids(5, 9, 5), training=True)
    assert fresh.dtype == np.float32
    assert np.array_equal(fresh[0], fresh[2])
    assert not np.array_equal(fresh[0], fresh[1])
    assert (one.read(ids(5, 9), training=False) == 0.5).all(), "the mean of uniform(-1, 2)"
    assert one.read(ids(), training=True).shape == (0, 3)
    assert len(one) == 0
    one.apply(ids(5), ones(1), {"lr": 1.0}, 1)
    assert np.array_equal(one.read(ids(9, 5), training=False), [[0.5] * 3, fresh[0] - 1])
    assert np.array_equal(one.read(ids(9, 5), training=True), [fresh[1], fresh[0] - 1])
    assert len(one) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("start", ["zeros", "constant(2)", "uniform(-1, 2)", "normal(0, 0.1)"])
def test_what_a_row_begins_with_depends_on_seed_table_and_id_alone(start: str, dtype: str) -> None:
    changes: dict[str, Any] = {"initializer": Initializer.parse(start), "dtype": dtype}
    everything = np.random.default_rng(0).permutation(1000)
    seen = table(**changes).read(everything, training=True)

    def trained(one: Table, mine: Any) -> Any:
        one.apply(mine, np.zeros((mine.size, 3)), {"lr": 1.0}, 1)
        return one.read(mine, training=False)

    for servers in (1, 3):
        owners = owner(everything, servers)
        for server in range(servers):
            mine = np.sort(everything[owners == server])
            assert np.array_equal(trained(table(**changes), mine), seen[np.argsort(everything)][mine])
    differ = start.startswith(("u", "n"))
    assert (not np.array_equal(table(seed=8, **changes).read(everything, True), seen)) == differ
    assert (not np.array_equal(table(name="item", **changes).read(everything, True), seen)) == differ
    assert np.array_equal(table(seed=7 - 2**64, **changes).read(everything, True), seen)


def test_an_initializer_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="magic"):
        table(initializer=Initializer("magic"))


# ---------------------------------------------------------------------------------------------- looked up before


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["read", "apply", "load"]), st.lists(few, max_size=6, unique=True))))
def test_to_remember_what_was_looked_up_changes_nothing(operations: list[tuple[str, list[int]]]) -> None:
    kernel = RULES["Adagrad"].rows
    assert kernel is not None
    tables = [Table(SPEC, kernel, 7, slot_cache=remembering) for remembering in (None, SlotCache())]
    for step, (operation, given_) in enumerate(operations, 1):
        for each in tables:
            if operation == "read":
                each.read(ids(*given_), training=True)
            elif operation == "apply":
                each.apply(ids(*given_), ones(len(given_)), {"lr": 0.1}, step)
            else:
                each.load(ids(*given_), {"weight": ones(len(given_))})
    (plain, columns), (other, others) = (each.export() for each in tables)
    assert np.array_equal(plain, other)
    assert columns.keys() == others.keys()
    assert all(np.array_equal(columns[name], others[name]) for name in columns)


def test_gradients_of_what_was_looked_up_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = RULES["SGD"].rows
    assert kernel is not None
    remembering = Table(SPEC, kernel, 7, slot_cache=SlotCache())
    inserted: list[list[int]] = []
    insert = MemoryStore.insert

    def counted(store: MemoryStore, these: Any) -> Any:
        inserted.append(these.tolist())
        return insert(store, these)

    monkeypatch.setattr(MemoryStore, "insert", counted)
    for wanted, left in ([5, 6], [5, 6]), ([6, 7, 5], [7]), ([7, 5], None):
        remembering.read(ids(*wanted), training=True)
        remembering.apply(ids(*wanted), ones(len(wanted)), {"lr": 0.1}, 1)
        assert (inserted.pop() if inserted else None) == left
    remembering.apply(ids(7, 5), ones(2), {"lr": 0.1}, 1)  # it was told once
    assert inserted.pop() == [7, 5]
    remembering.read(ids(5, 6), training=False)
    remembering.apply(ids(5, 6), ones(2), {"lr": 0.1}, 1)
    assert inserted.pop() == [5, 6]


def test_ids_are_remembered_as_they_were_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "MOST_IDS", 6)
    known, asked = SlotCache(), ids(1, 2, 3)
    known.remember("a", asked, ids(0, 1, 2))
    asked[1] = 9
    assert known.take("a", asked) is None
    known.remember("a", ids(1, 2, 3), ids(0, 1, 2))
    known.remember("b", ids(1, 2, 3), ids(4, 5, 6))
    assert known.take("c", ids(1, 2, 3)) is None
    known.remember("a", ids(4), ids(3))  # the first has to go
    known.remember("a", ids(*range(7)), ids(*range(7)))
    assert known.take("a", ids(1, 2, 3)) is None
    assert known.take("a", ids(*range(7))) is None
    assert known.take("a", ids()) is None
    for table_, wanted, slots in ("b", ids(1, 2, 3), [4, 5, 6]), ("a", ids(4), [3]):
        found = known.take(table_, wanted)
        assert found is not None
        assert found.tolist() == slots


# ---------------------------------------------------------------------------------------------- updating


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows])
def test_a_table_trains_the_rows_touched_and_no_other(rule: str) -> None:
    one, random = table(rule), np.random.default_rng(0)
    for step in range(1, 30):
        touched = random.permutation(200)[:50]
        before = one.read(np.arange(200), training=True)
        one.apply(touched, random.normal(size=(50, 3)), {"lr": 0.1}, step)
        moved = (one.read(np.arange(200), training=True) != before).any(axis=1)
        assert set(np.flatnonzero(moved)) == set(touched)
    assert one.step == 29
    assert one.nbytes >= len(one) * (8 + 12)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows])
def test_where_the_segments_end_makes_no_difference(rule: str) -> None:
    kernel = RULES[rule].rows
    assert kernel is not None
    tables = [Table(SPEC, kernel, 7, MemoryStore(segment_bytes)) for segment_bytes in SEGMENTS]
    random = np.random.default_rng(0)
    options = {"lr": 0.1, "momentum": 0.9, "amsgrad": True, "centered": True}
    for step in range(1, 10):
        touched, grads = random.permutation(200)[:90], random.normal(size=(90, 3))
        for each in tables:
            each.apply(touched, grads, options, step)
            each.add(touched[:50], grads[:50])
    few, one = (each.scan(3, 147)[0] for each in tables)
    assert np.array_equal(few[0], one[0])
    assert all(np.array_equal(few[1][name], one[1][name]) for name in one[1])


def test_momentum_that_comes_later_finds_rows_without_it() -> None:
    one = table(initializer=Initializer.parse("zeros"))
    one.apply(ids(1), ones(1), {"lr": 1.0}, 1)
    late = {"lr": 1.0, "momentum": 0.5, "dampening": 0.5}
    one.apply(ids(1, 2), ones(2), late, 2)
    one.apply(ids(1, 2), ones(2), late, 3)
    assert one.read(ids(1, 2), True)[:, 0].tolist() == [-3, -2]


def test_uploaded_rows_begin_with_the_state_of_untouched_ones() -> None:
    options = {"lr": 0.0, "initial_accumulator_value": 0.25}
    one = table("Adagrad")
    one.load(ids(4, 2), {"weight": ones(2)})
    one.apply(ids(2, 3), ones(2), options, 1)
    keys, columns = one.export()
    assert keys.tolist() == [4, 2, 3]
    assert columns["sum"][:, 0].tolist() == [0.25, 1.25, 1.25]
    assert columns["weight"][:2].tolist() == ones(2).tolist()


@pytest.mark.parametrize(
    ("rule", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("Adagrad", {"initial_accumulator_value": 0.1})],
)
def test_an_exported_table_goes_on_where_it_stopped(rule: str, options: dict[str, Any]) -> None:
    options = {"lr": 0.1, **options}
    one, other = table(rule), table(rule)
    everything = np.random.default_rng(0).integers(INT64.min, INT64.max, 500)
    one.apply(everything, np.linspace(-1, 1, 1500).reshape(500, 3), options, 1)
    for start in range(0, len(one), 200):
        keys, columns = one.scan(start, 200)[0]
        other.load(keys[::-1], {name: values[::-1] for name, values in columns.items()})
    for each in (one, other):
        each.apply(everything[100:], np.full((400, 3), 0.3), options, 2)
        each.apply(ids(1, 2), ones(2), options, 3)
    probe = np.append(everything, [1, 2])
    assert np.array_equal(one.read(probe, True), other.read(probe, True))
    assert len(one) == len(other) == 502


def test_an_export_is_a_copy() -> None:
    one = table()
    one.apply(ids(1), ones(1), {"lr": 0.0}, 1)
    keys, columns = one.export()
    keys[:], columns["weight"][:] = 5, 5
    assert np.array_equal(one.read(ids(1), True), table().read(ids(1), True))


@pytest.mark.parametrize("bad", [-1, 10, INT64.min, INT64.max])
def test_an_id_out_of_range_is_named_with_its_table_and_bound(bad: int) -> None:
    one = table(num_embeddings=10)
    for call in (
        lambda: one.read(ids(3, bad), True),
        lambda: one.apply(ids(3, bad), ones(2), {"lr": 1.0}, 1),
        lambda: one.load(ids(3, bad), {"weight": ones(2)}),
    ):
        with pytest.raises(ConfigurationError, match=rf"table 'user'; expected 0 <= id < 10; got {bad}"):
            call()
    assert len(one) == 0
    assert one.read(ids(0, 9), True).shape == (2, 3)


def test_gradients_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    one = table()
    for wrong in (ones(1), ones(2, 4), np.ones(6, "float32")):
        with pytest.raises(ConfigurationError, match="expected"):
            one.apply(ids(1, 2), wrong, {"lr": 1.0}, 1)
        with pytest.raises(ConfigurationError, match="expected"):
            one.load(ids(1, 2), {"weight": wrong})
    assert len(one) == 0


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.rows])
def test_nothing_is_left_to_compile_once_a_table_is_warm(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [each for each in gc.get_objects() if type(each) is Compiled]
    for each in functions:
        monkeypatch.setattr(each, "_dispatcher", None)  # other tests compile as well
    monkeypatch.setattr(table_module, "_warm", set())

    def signatures() -> int:
        return sum(len(each.native().signatures) for each in functions)  # type: ignore[attr-defined]

    if rule == "SGD":  # once is enough, as it takes its time: other kinds are no reason to leave this one cold
        table("Adam").warm()
        table(rule, dtype="float64").warm()
    one = table(rule, num_embeddings=12000)
    one.warm()
    one.warm({"lr": 0.1})
    assert len(one) == one.step == 0

    before = signatures()
    full = {"lr": 0.1, "momentum": 0.9, "amsgrad": True, "centered": True, "weight_decay": 0.1}
    for step, options in enumerate(({"lr": 0.1}, full), start=1):
        touched, grads = merge([(np.arange(5000), np.ones((5000, 3), "float32"))] * 2, 2)
        touched.flags.writeable = False
        one.apply(touched, grads[:, ::-1], options, step)
    for start in range(5000, 12000, 100):  # some of them while the index grows
        one.add(np.arange(start, start + 100), grads[:100])
    keys, columns = one.export()
    table(rule).load(keys, columns)
    one.read(keys, training=True)
    assert signatures() == before


# ---------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_sums_in_order_and_divides(dtype: str) -> None:
    random = np.random.default_rng(0)
    sources = [
        (random.permutation(100)[:60] - 50, (random.normal(size=(60, 4)) * 10.0**scale).astype(dtype))
        for scale in (0, 3, -3, 2, 0)
    ]
    expected: dict[int, Any] = {}
    for keys, grads in sources:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            expected[key] = expected[key] + grad if key in expected else grad
    keys, grads = merge(sources, 5)
    assert keys.tolist() == list(expected)
    assert grads.dtype == dtype
    assert np.array_equal(grads, np.stack(list(expected.values())) / np.dtype(dtype).type(5))
    keys, grads = merge(sources[:1], 1)
    assert np.array_equal(keys, sources[0][0])
    assert np.array_equal(grads, sources[0][1])
    assert sources[0][1] is not grads


def test_merge_of_nothing_and_of_what_does_not_fit() -> None:
    keys, grads = merge([(ids(), ones(0)), (ids(), ones(0))], 2)
    assert keys.shape == (0,)
    assert grads.shape == (0, 3)
    with pytest.raises(ConfigurationError, match=r"expected \(2, 3\); got \(1, 3\)"):
        merge([(ids(1), ones(1)), (ids(1, 2), ones(1))], 2)
