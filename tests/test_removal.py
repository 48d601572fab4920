"""Rows that are removed from a store: what is left, and what comes into their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.numeric import ids as rows
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.store import Between

INT64 = np.iinfo(np.int64)
few = st.one_of(st.integers(-30, 30), st.sampled_from([INT64.min, INT64.max]))
SEGMENTS = [256, 32 << 20]


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def scanned(store: MemoryStore, only: Between | None = None, most: int = 7) -> dict[int, float]:
    found: dict[int, float] = {}
    place: int | None = 0
    while place is not None:
        (some, columns), place = store.scan(place, most, ["a"], only)
        assert len(some) <= most
        assert not found.keys() & set(some.tolist())
        found |= dict(zip(some.tolist(), columns["a"][:, 0].tolist(), strict=True))
    return found


@pytest.mark.pairs(1)
@pytest.mark.parametrize("segment_bytes", SEGMENTS)
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(st.tuples(st.sampled_from("iirfs"), st.lists(few, max_size=40)), max_size=40))
def test_a_store_with_removal_is_a_dict(segment_bytes: int, operations: list[tuple[str, list[int]]]) -> None:
    store, model, number = MemoryStore(segment_bytes), dict[int, float](), 0
    store.ensure_column("a", 1, 1.5, "float64")
    for kind, values in operations:
        if kind == "i":
            new = [at for at, value in enumerate(values) if value not in model]
            slots = store.insert(ids(*values))
            assert store.created.tolist() == new
            assert slots.tolist() == store.find(ids(*values)).tolist()
            fresh = np.zeros((slots.size, 1))
            rows.gather(store.column("a"), slots, fresh)
            assert fresh[:, 0].tolist() == [model.get(value, 1.5) for value in values]
            for value in values:
                number += 1
                model[value] = number
            distinct = list(dict.fromkeys(values))
            numbers = np.array([[model[value]] for value in distinct]).reshape(-1, 1)
            rows.scatter(store.column("a"), store.find(ids(*distinct)), numbers)
        elif kind == "r":
            store.remove(ids(*dict.fromkeys(values)))
            for value in values:
                model.pop(value, None)
        elif kind == "f":
            assert store.has(ids(*values)).tolist() == [value in model for value in values]
        else:
            assert scanned(store) == model
            middle = number // 2
            assert scanned(store, Between("a", middle)) == {k: v for k, v in model.items() if v >= middle}
        assert len(store) == len(model)
    assert scanned(store) == model


@pytest.mark.parametrize("seed", range(3))
def test_a_store_is_a_dict_while_its_index_grows_and_rows_leave(seed: int) -> None:
    store, random, there = MemoryStore(), np.random.default_rng(seed), set[int]()
    store.ensure_column("a", 1, 0.0, "float64")
    for step in range(400):
        some = np.unique(random.integers(0, 20_000, 97))
        if step % 4 == 3:
            gone = random.permutation(np.array(sorted(there)))[: random.integers(1, 250)]
            store.remove(gone)
            there -= set(gone.tolist())
        else:
            store.insert(some)
            there |= set(some.tolist())
        asked = random.integers(0, 20_000, 50)
        assert store.has(asked).tolist() == [value in there for value in asked.tolist()]
    assert set(scanned(store, most=1000)) == there


def test_the_memory_of_removed_rows_is_for_those_that_come() -> None:
    store = MemoryStore()
    store.ensure_column("a", 4, 0.0, "float32")
    store.insert(np.arange(10_000))
    store.remove(np.arange(10_000))  # room for what is free is made once
    store.insert(np.arange(10_000, 20_000))
    taken = store.nbytes
    for start in range(20_000, 400_000, 10_000):
        store.remove(np.arange(start - 10_000, start))
        store.insert(np.arange(start, start + 10_000))
        assert store.nbytes <= 1.5 * taken
    assert len(store) == 10_000
