"""A store with files is a dict that has less memory."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from inside import abandon, tiny_tiers

from fleet.base.file_lock import locked
from fleet.errors import CheckpointError, ConfigurationError, TableFileError
from fleet.numeric.ids import gather, scatter
from fleet.numeric.pages import Room
from fleet.ps.table import row_file, tiered_store
from fleet.ps.table import stores as tiers
from fleet.ps.table.frames import FrameColumn
from fleet.ps.table.place_index import PlaceIndex
from fleet.ps.table.store import Between
from fleet.ps.table.stores import NewStore, TieredStores
from fleet.ps.table.tiered_store import TieredStore

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tiers(monkeypatch)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[TieredStores]:
    made = TieredStores(tmp_path, "a-server", MIB, 10.0)
    yield made
    if made._folder.exists():
        made.close()


def new_store(stores: TieredStores, name: str = "a", width: int = 3, share: NewStore | None = None) -> TieredStore:
    store = (share or stores.share())(name, 1, 4 * width)
    assert isinstance(store, TieredStore)
    store.ensure_column("weight", width, 0.5, np.float32)
    return store


def put(store: TieredStore, first: int, count: int) -> None:
    """Rows whose weight is their id."""
    for start in range(first, first + count, 4):
        ids = np.arange(start, min(start + 4, first + count))
        slots = store.insert(ids)
        store.write(slots)
        column = store.column("weight")
        width = column.like.shape[1]
        scatter(column, slots, np.repeat(ids, width).reshape(-1, width).astype(np.float32))


def weights(store: TieredStore, ids: np.ndarray[Any, Any], name: str = "weight", width: int = 3) -> Any:
    slots = store.find(ids)
    out = np.empty((ids.size, width), np.float32)
    gather(store.column(name), slots, out)
    return out[slots >= 0]


def scanned(store: TieredStore, most: int = 3, between: Callable[[], object] = lambda: None) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    start: int | None = 0
    while start is not None:
        (ids, rows), start = store.scan(start, most, ["weight"])
        found |= dict(zip(ids.tolist(), rows["weight"].tolist(), strict=True))
        between()
    return found


# ---------------------------------------------------------------- against a dict

IDS = st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True)


class Model(RuleBasedStateMachine):
    """Two tables on one budget, and for each a dict."""

    folders = itertools.count()
    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.stores = TieredStores(self.root / str(next(self.folders)), "a-server", MIB, 10.0)
        new = self.stores.share()
        self.tables: list[TieredStore] = [new(name, 2, 16) for name in "ab"]  # type: ignore[misc]
        for store in self.tables:
            store.ensure_column("weight", 3, 0.5, np.float32)
        self.expected: list[dict[int, dict[str, float]]] = [{}, {}]
        self.fills: list[dict[str, float]] = [{"weight": 0.5}, {"weight": 0.5}]
        self.values = itertools.count(1)
        self.readings: list[Any] = [None, None]
        self.rewriting: list[Any] = [None, None]

    def teardown(self) -> None:
        self.stores.close()

    @rule(which=st.integers(0, 1), ids=IDS)
    def write(self, which: int, ids: list[int]) -> None:
        store, expected = self.tables[which], self.expected[which]
        slots = store.insert(np.array(ids))
        assert sorted(np.array(ids)[store.created].tolist()) == sorted(set(ids) - set(expected))
        store.write(slots)
        value = next(self.values)
        for name in store.columns:
            width = 3 if name == "weight" else 1
            scatter(store.column(name), slots, np.full((len(ids), width), value, np.float32))
        expected |= {id: dict.fromkeys(store.columns, value) for id in ids}

    @rule(which=st.integers(0, 1), ids=IDS)
    def insert(self, which: int, ids: list[int]) -> None:
        self.tables[which].insert(np.array(ids))
        for id in set(ids) - set(self.expected[which]):
            self.expected[which][id] = dict(self.fills[which])

    @rule(which=st.integers(0, 1), ids=IDS)
    def remove(self, which: int, ids: list[int]) -> None:
        self.tables[which].remove(np.array(ids))
        for id in ids:
            self.expected[which].pop(id, None)

    @rule(which=st.integers(0, 1), ids=IDS)
    def look(self, which: int, ids: list[int]) -> None:
        store, expected, wanted = self.tables[which], self.expected[which], np.array(ids * 2)
        assert store.has(wanted).tolist() == [id in expected for id in wanted.tolist()]
        slots = store.find(wanted)
        assert (slots >= 0).tolist() == [id in expected for id in wanted.tolist()]
        assert store.ids(slots[slots >= 0]).tolist() == [id for id in wanted.tolist() if id in expected]
        for name in store.columns:
            out = np.empty((wanted.size, 3 if name == "weight" else 1), np.float32)
            gather(store.column(name), slots, out)
            assert out[slots >= 0, 0].tolist() == [expected[id][name] for id in wanted.tolist() if id in expected]

    @rule(which=st.integers(0, 1), ids=IDS)
    def begin_reading(self, which: int, ids: list[int]) -> None:
        self.readings[which] = self.tables[which].reading(np.array(ids), expected=True)

    @precondition(lambda self: any(self.readings))
    @rule(which=st.integers(0, 1))
    def finish_reading(self, which: int) -> None:
        reading, self.readings[which] = self.readings[which], None
        if reading is not None:
            reading.run()
            self.tables[which].take(reading)

    @rule(which=st.integers(0, 1))
    def begin_rewriting(self, which: int) -> None:
        self.rewriting[which] = self.tables[which].to_rewrite()

    @precondition(lambda self: any(self.rewriting))
    @rule(which=st.integers(0, 1))
    def finish_rewriting(self, which: int) -> None:
        reading, self.rewriting[which] = self.rewriting[which], None
        if reading is not None:
            reading.run()
            self.tables[which].rewrite(reading)

    @rule(which=st.integers(0, 1))
    def another_column(self, which: int) -> None:
        store = self.tables[which]
        name, fill = f"column{len(store.columns)}", float(next(self.values))
        if len(store.columns) < 4:
            store.ensure_column(name, 1, fill, np.float32)
            self.fills[which][name] = fill
            for row in self.expected[which].values():
                row[name] = fill

    @rule(which=st.integers(0, 1), most=st.integers(1, 100))
    def scan(self, which: int, most: int) -> None:
        store, seen = self.tables[which], []
        start: int | None = 0
        while start is not None:
            (ids, rows), start = store.scan(start, most, store.columns)
            for k, id in enumerate(ids.tolist()):
                seen.append(id)
                assert {name: rows[name][k, 0] for name in rows} == self.expected[which][id]
        assert sorted(seen) == sorted(self.expected[which])

    @invariant()
    def little_is_in_memory(self) -> None:
        for store, expected in zip(self.tables, self.expected, strict=True):
            assert len(store) == len(expected)
            assert store.in_memory <= 24  # what is asked for at once


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="nobody says what memory is taken")
def test_a_column_takes_memory_for_the_frames_that_there_are() -> None:
    """Not for those that it has room for, nor for those that there were."""
    column, frames = FrameColumn(16, 0, np.dtype(np.float32)), np.arange(600_000)
    column.set(frames[:1], 7)  # what this compiles takes memory as well
    before = resident()
    column.resize(600_000)  # more than a segment, which are 36.6 MiB in all
    assert resident() - before < MIB
    column.set(frames, 7)
    assert 36 * MIB < resident() - before < 44 * MIB
    column.resize(1000)
    assert resident() - before < 3 * MIB
    column.resize(30_000)
    column.set(frames[29_000:29_001], 8)  # where there may have been a large page
    assert resident() - before < 1.5 * MIB
    kept = np.empty((1000, 16), np.float32)
    gather(column.rows, frames[:1000], kept)
    assert (kept == 7).all()


def test_a_fork_has_memory_of_its_own() -> None:
    room = Room(MIB)
    room.need(MIB)
    room.bytes[:] = 1
    child = os.fork()
    if not child:
        room.bytes[:] = 2
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (room.bytes == 1).all()


def test_is_a_dict(tmp_path: Path) -> None:
    Model.root = tmp_path
    case = Model.TestCase
    case.settings = settings(
        max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


# ---------------------------------------------------------------- the index


def of_hash(hashed: int) -> int:
    """The id that ``mix`` makes this of."""
    most = (1 << 64) - 1
    hashed ^= (hashed >> 31) ^ (hashed >> 62)
    hashed = hashed * pow(0x94D049BB133111EB, -1, 1 << 64) & most
    hashed ^= (hashed >> 27) ^ (hashed >> 54)
    hashed = hashed * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & most
    hashed ^= (hashed >> 30) ^ (hashed >> 60)
    return hashed - (1 << 64) if hashed >> 63 else hashed


def alike(count: int, high: int = 0x123456789) -> np.ndarray[Any, Any]:
    """Ids that an index takes for one another, unless it looks at their rows: their hashes differ in low bits only."""
    return np.array([of_hash(high << 28 | low) for low in range(count)])


def test_ids_that_look_alike_are_kept_apart(stores: TieredStores) -> None:
    store, ids = new_store(stores), alike(60)
    for k, id in enumerate(ids):
        slots = store.insert(ids[k : k + 1])
        store.write(slots)
        scatter(store.column("weight"), slots, np.full((1, 3), k, np.float32))
        assert store.ids(slots).tolist() == [id]
    assert not store.has(alike(90)[60:]).any()
    assert weights(store, ids)[:, 0].tolist() == list(range(60))
    store.remove(ids[::2])
    assert store.has(ids).tolist() == [False, True] * 30
    assert weights(store, ids)[:, 0].tolist() == list(range(1, 60, 2))
    assert len(store) == 30


def test_an_index_is_a_dict_of_places() -> None:
    draw = np.random.default_rng(5)
    # Some look alike, many share a part, and the others lie anywhere.
    crowded = [of_hash(0x155 << 54 | int(low) << 20) for low in draw.integers(0, 1 << 34, 300)]
    pool = np.unique(np.concatenate([alike(40), np.array(crowded), draw.integers(-(1 << 63), 1 << 63, 3000)]))
    index, expected = PlaceIndex(), dict[int, int]()
    keys = FrameColumn(1, 0, np.dtype(np.int64))
    keys.resize(4000)
    keys.put(np.arange(pool.size), pool)  # the slot of an id is its number
    number_of = {int(id): k for k, id in enumerate(pool)}
    for _ in range(200):
        some = draw.choice(pool, 60, replace=False)
        there = np.array([id for id in some.tolist() if id in expected], np.int64)
        away = np.array([id for id in some.tolist() if id not in expected], np.int64)
        before = np.array([expected[id] for id in there.tolist()], np.int64)
        in_memory = np.array([number_of[id] << 1 | 1 for id in there.tolist()], np.int64)
        match draw.integers(0, 4):
            case 0 | 1:
                places = np.array([number_of[id] << 1 | 1 for id in away.tolist()], np.int64)
                index.enter(away, places)
                expected |= dict(zip(away.tolist(), places.tolist(), strict=True))
            case 2:
                after = np.where(before & 1 == 1, draw.integers(0, 1 << 36, there.size) << 1, in_memory)
                index.move(there, before, after)
                expected |= dict(zip(there.tolist(), after.tolist(), strict=True))
            case 3:
                index.remove(there, before)
                for id in there.tolist():
                    del expected[id]
        assert len(index) == len(expected)
        for id in some.tolist():
            (place,), (number,) = index.find(keys.rows, np.array([id]))
            seen = []
            while place >= 0:  # one in memory is sure; in files all that look alike are told
                seen.append(int(place))
                if place & 1:
                    break
                place, number = index.find_next(keys.rows, id, int(number))
            if id in expected:
                assert expected[id] in seen
            else:
                assert not any(place & 1 for place in seen)


# ---------------------------------------------------------------- scans while rows move


@pytest.mark.parametrize("stirred", [5, 40])
@pytest.mark.parametrize("width", [3, 200])
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_scan_finds_every_row_while_rows_move(
    stores: TieredStores, most: int, width: int, stirred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_store, "_LOOKED_THROUGH", 3)
    store = new_store(stores, width=width)
    put(store, 0, 60)
    draw = np.random.default_rng(3)

    def stir() -> None:
        for start in range(0, stirred, 2):
            slots = store.find(draw.integers(0, 60, min(2, stirred - start)))
            store.write(slots)  # as they are
        put(store, int(1000 + draw.integers(0, 50)), 1)
        store.remove(np.array([1000 + int(draw.integers(0, 50))]))

    found = scanned(store, most, stir)
    assert {id: row for id, row in found.items() if id < 1000} == {id: [id] * width for id in range(60)}


@pytest.mark.parametrize("seed", range(5))
def test_scans_that_begin_together_end_apart(stores: TieredStores, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_store, "_LOOKED_THROUGH", 1)
    store, random = new_store(stores, width=1000), np.random.default_rng(seed)
    put(store, 0, 40)

    def stir() -> None:
        for _ in range(30):
            some = random.permutation(40)[:4]
            store.write(store.insert(some))

    def step(start: int, found: set[int]) -> int | None:
        (ids, _), following = store.scan(start, 1, ["weight"])
        found.update(ids.tolist())
        return following

    first, second = set[int](), set[int]()
    one, other = step(0, first), step(0, second)
    while other is not None and other & 3 != tiered_store._IN_MEMORY:
        other = step(other, second)
    for _ in range(4):  # to the midst of what is in memory
        assert other is not None
        other = step(other, second)
    while one is not None:
        one = step(one, first)
    stir()
    while other is not None:
        other = step(other, second)
    assert first == second == {*range(40)}


def test_each_part_of_a_scan_may_be_asked_for_again(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 300)
    place: int | None = 0
    found: set[int] = set()
    while place is not None:
        (ids, _), following = store.scan(place, 50, ["weight"])
        if place:  # the first begins anew
            assert store.scan(place, 50, ["weight"])[0][0].tolist() == ids.tolist()
        found |= {*ids.tolist()}
        place = following
    assert found == {*range(300)}


def test_the_last_part_of_a_scan_has_the_same_rows_when_its_answer_was_lost(
    stores: TieredStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are written to meanwhile, and others come: they are found for a while, and then whoever asks is told."""
    monkeypatch.setattr(row_file, "_LAST_PATIENCE", 8, raising=False)
    store = new_store(stores)
    put(store, 0, 1500)
    _, place = store.scan(0, 1, ["weight"])
    put(store, 1500, 1500)
    while place is not None and place & 3 != 3:  # up to what has left memory since
        _, place = store.scan(place, 1, ["weight"])
    assert place is not None
    (ids, _), following = store.scan(place, 100_000, ["weight"])
    assert following is None
    expected = {id for id in ids.tolist() if id < 1500}
    assert expected
    store.remove(np.arange(1500, 3000))
    store.write(store.insert(np.array(sorted(expected))))
    (again, _), _ = store.scan(place, 100_000, ["weight"])
    assert {*again.tolist()} >= expected
    put(store, 10_000, 5000)
    with pytest.raises(CheckpointError, match="no longer read"):
        store.scan(place, 100_000, ["weight"])


def test_a_part_of_a_scan_has_not_all_rows_that_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part becomes a piece of a checkpoint, or a message to another server."""
    monkeypatch.undo()  # there is room
    with closing(TieredStores(tmp_path, "a-server", 64 * MIB, 10.0)) as stores:
        store = new_store(stores)
        put(store, 0, 5000)
        assert store.in_memory == 5000
        sizes, found, place = list[int](), list[int](), 0
        while place is not None:
            (ids, rows), place = store.scan(place, 100, ["weight"])
            assert rows["weight"].tolist() == [[id] * 3 for id in ids.tolist()]
            sizes.append(ids.size)
            found += ids.tolist()
        assert max(sizes) == 100
        assert sorted(found) == [*range(5000)]


def test_a_scan_that_was_given_up_does_not_go_on(stores: TieredStores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_PATIENCE", 5)
    store = new_store(stores)
    put(store, 0, 1000)
    _, place = store.scan(0, 1, ["weight"])
    assert place is not None
    put(store, 1000, 2000)
    assert scanned(store).keys() == {*range(3000)}
    with pytest.raises(CheckpointError, match="no longer read"):
        store.scan(place, 1, ["weight"])


def test_a_scan_may_choose(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 100)
    (ids, _), following = store.scan(0, 1000, ["weight"], Between("weight", 20, 30))
    assert (sorted(ids.tolist()), following) == (list(range(20, 30)), None)


def test_a_sample_lies_evenly_among_all_rows(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 400)
    store.remove(np.arange(0, 400, 7))
    ids, rows = store.sample(40, ["weight"])
    assert rows["weight"].tolist() == [[id] * 3 for id in ids.tolist()]
    assert np.unique(ids).size == ids.size
    assert np.all(ids % 7)
    assert all(np.count_nonzero(ids // 100 == part) >= 4 for part in range(4))
    assert set(store.sample(10_000, [])[0].tolist()) == {id for id in range(400) if id % 7}


def test_what_is_asked_for_again_and_again_stays(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 200)
    hot = np.arange(3)
    store.find(hot)
    read = 0
    for start in range(100, 180, 2):
        store.find(np.arange(start, start + 2))
        before = store.traffic.read
        assert weights(store, hot)[:, 0].tolist() == [0, 1, 2]
        read += store.traffic.read - before
    assert read < 12


# ---------------------------------------------------------------- what is read while other things happen


def test_rows_that_changed_since_they_were_read_are_left_alone(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 200)
    cold = np.array([1, 2, 3, 5])
    reading = store.reading(cold, expected=True)
    assert reading is not None
    reading.run()
    slots = store.find(cold)
    store.write(slots)
    scatter(store.column("weight"), slots, np.full((4, 3), 7, np.float32))
    store.remove(np.array([5]))
    store.take(reading)
    assert weights(store, cold)[:, 0].tolist() == [7, 7, 7]
    store.find(np.arange(100, 140))
    store.take(reading)  # they are in later records by now
    assert weights(store, cold)[:, 0].tolist() == [7, 7, 7]


def test_a_segment_that_is_used_again_meanwhile_is_not_taken(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 1000)
    reading = store.reading(np.arange(8), expected=True)
    assert reading is not None
    store.remove(np.arange(1000))
    put(store, 5000, 1000)
    reading.run()
    store.take(reading)
    assert not store.has(np.arange(8)).any()
    assert scanned(store, 100) == {id: [id] * 3 for id in range(5000, 6000)}


def test_space_is_used_again(stores: TieredStores) -> None:
    store = new_store(stores)
    put(store, 0, 2000)
    size = store.bytes_on_disk
    for _ in range(3):
        put(store, 0, 2000)
        while (reading := store.to_rewrite()) is not None:
            reading.run()
            store.rewrite(reading)
    assert store.bytes_on_disk <= 3 * size
    assert scanned(store, 500) == {id: [id] * 3 for id in range(2000)}


def test_however_many_rows_go_no_more_are_read_than_memory_is_for(
    stores: TieredStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta of a checkpoint names two million ids of rows that have left at once."""
    store, read, sizes = new_store(stores), TieredStore._read, list[int]()
    put(store, 0, 2000)

    def noted(store: TieredStore, records: Any) -> Any:
        sizes.append(records.size)
        return read(store, records)

    monkeypatch.setattr(TieredStore, "_read", noted)
    assert store.has(np.arange(2000)).all()
    store.remove(np.arange(-50, 1990))
    assert 0 < max(sizes) <= store.most
    assert scanned(store, 500) == {id: [id] * 3 for id in range(1990, 2000)}


def test_segments_that_scans_have_closed_early_become_no_more_and_no_more(stores: TieredStores) -> None:
    """A checkpoint, an eviction and a snapshot each begin with a scan: there are thousands in a week."""
    store = new_store(stores)
    put(store, 0, 2000)
    size = store.bytes_on_disk
    for start in range(2000, 2600, 4):
        put(store, start, 4)
        store.find(np.arange(16))
        scanned(store, 10_000)
        while (reading := store.to_rewrite()) is not None:
            reading.run()
            store.rewrite(reading)
    assert store.bytes_on_disk <= 6 * size
    assert scanned(store, 500) == {id: [id] * 3 for id in range(2600)}


# ---------------------------------------------------------------- a disk that fails


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.rows"))


def written(store: TieredStore) -> None:
    """Let everything that is on its way arrive."""
    while store._file._waiting:
        store._file._await_one()


@pytest.mark.parametrize("harm", ["damage", "cut"])
def test_a_file_that_is_not_what_was_written_is_named(stores: TieredStores, tmp_path: Path, harm: str) -> None:
    store = new_store(stores)
    put(store, 0, 2000)
    written(store)
    (file,) = files(tmp_path)
    with file.open("r+b") as opened:
        if harm == "cut":
            opened.truncate(100)
        else:
            opened.seek(33)
            byte = opened.read(1)[0]
            opened.seek(33)
            opened.write(bytes([byte ^ 4]))
    with pytest.raises(TableFileError, match=r"damaged|shorter") as caught:
        scanned(store, 100)
    assert str(file) in str(caught.value)
    assert "FLEET_TABLE_DIR" in str(caught.value)
    assert stores.failure() is caught.value
    assert weights(store, np.arange(1900, 1904))[:, 0].tolist() == [1900, 1901, 1902, 1903]  # other rows are there


def test_a_record_of_another_row_is_damage_too(stores: TieredStores, tmp_path: Path) -> None:
    store = new_store(stores)
    put(store, 0, 2000)
    written(store)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    size = store._layout.size
    data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
    file.write_bytes(data)
    with pytest.raises(TableFileError, match="damaged"):
        scanned(store, 100)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing(
    stores: TieredStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = new_store(stores)

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(row_file.os, "pwrite", failing)
    with pytest.raises(TableFileError) as caught:
        put(store, 0, 5000)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "more bytes" in text
    assert ("Make room" in text) == (number == errno.ENOSPC)
    # Nothing that was there is gone, nor does anything hang.
    kept = len(store)
    assert all(store.has(np.arange(kept - 8)))
    with pytest.raises(TableFileError):
        put(store, 10_000, 5000)


def test_a_disk_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = TieredStores(tmp_path, "a-server", MIB, 0.05)
    store, may_write, write = new_store(stores), threading.Event(), os.pwrite

    def slow(*given: Any) -> int:
        may_write.wait(30)
        return write(*given)

    monkeypatch.setattr(row_file.os, "pwrite", slow)
    try:
        with pytest.raises(TableFileError, match=r"takes no rows.*within 0\.05 s"):
            put(store, 0, 5000)
    finally:
        may_write.set()
        stores.close()
    assert not list(tmp_path.iterdir())


def test_who_is_about_to_write_may_wait_for_the_disk_before(stores: TieredStores) -> None:
    store, blocked = new_store(stores), threading.Event()
    stores._writer.submit(blocked.wait)
    first = 0
    while store.backlog() is None:
        put(store, first, 4)
        first += 4
    backlog = store.backlog()
    assert backlog is not None
    put(store, first, 128)  # a segment more waits for nobody
    blocked.set()
    backlog.wait()
    assert backlog.writing.done()
    assert sorted(scanned(store)) == [*range(first + 128)]


def test_a_disk_that_writes_a_little_at_a_time(stores: TieredStores, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(row_file.os, "pwrite", lambda file, data, start: write(file, data[:1000], start))
    store = new_store(stores)
    put(store, 0, 1000)
    assert scanned(store, 100) == {id: [id] * 3 for id in range(1000)}


# ---------------------------------------------------------------- files come and go


def test_files_are_removed_with_their_tables(stores: TieredStores, tmp_path: Path) -> None:
    share = stores.share()
    store, other = new_store(stores, share=share), new_store(stores, "b", share=share)
    put(store, 0, 500)
    put(other, 0, 500)
    assert len(files(tmp_path)) == 2
    del store
    gc.collect()
    stores.remove_unused()
    stores._writer.submit(lambda: None).result(10)
    assert len(files(tmp_path)) == 1
    stores.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_has_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    killed, living = TieredStores(tmp_path, "one", MIB, 10.0), TieredStores(tmp_path, "two", MIB, 10.0)
    for each in (killed, living):
        new_store(each)
    (tmp_path / "mine").write_text("somebody else's")
    abandon(killed)
    after = TieredStores(tmp_path, "one", MIB, 10.0)
    assert len(files(tmp_path)) == 1  # the other server's is in use
    living.close()
    after.close()
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("rest", [".fleet-rows-one-abc", "fleet-rows-one-abc"])
def test_a_server_that_is_killed_as_it_starts_leaves_nothing_for_long(tmp_path: Path, rest: str) -> None:
    (tmp_path / rest).mkdir()
    TieredStores(tmp_path, "one", MIB, 10.0).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["before it is locked", "as it is named"])
def test_servers_that_start_together_leave_each_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """One takes the folder that the other has just made for what a killed one has left."""
    made, taken = tempfile.mkdtemp, list[Path]()

    def meanwhile() -> None:
        if not taken:
            (folder,) = tmp_path.glob(".fleet-rows-one-*")
            folder.rmdir()
            taken.append(folder)

    def makes(**options: Any) -> str:
        folder = made(**options)
        if moment == "before it is locked":
            meanwhile()
        return folder

    def locks(descriptor: int) -> bool | None:
        if moment == "as it is named":
            meanwhile()
        return locked(descriptor)

    monkeypatch.setattr(tiers, "locked", locks)
    monkeypatch.setattr(tempfile, "mkdtemp", makes)
    stores = TieredStores(tmp_path, "one", MIB, 10.0)
    put(new_store(stores), 0, 1000)
    assert taken
    stores.close()
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_interrupted_as_it_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: TieredStores) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiers, "_warm", [])
    monkeypatch.setattr(TieredStores, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TieredStores(tmp_path, "a-server", MIB, 10.0)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match=r"FLEET_TABLE_DIR cannot be used.*a file"):
        TieredStores(file / "below", "a-server", MIB, 10.0)


def test_a_budget_that_is_too_small_is_refused(tmp_path: Path) -> None:
    stores = TieredStores(tmp_path, "a-server", MIB // 4, 10.0)
    new = stores.share()
    new("small", 1, 100)
    with pytest.raises(ConfigurationError, match=r"do not fit.*table 'large'.*FLEET_TABLE_MEMORY_MB=1 at least"):
        new("large", 1, 50_000)
    stores.close()
