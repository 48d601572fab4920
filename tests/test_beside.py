"""Values that are read beside the training have a part of the memory for rows, and not what the training needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, run_job
from inside import tiny_tiers

import fleet.nn
from fleet import Fleet
from fleet.errors import CheckpointError
from fleet.numeric.ids import gather, scatter
from fleet.ps.table.stores import TieredStores
from fleet.ps.table.tiered_store import TieredStore

KIB = 1 << 10
#: So many rows are put in place, or read, at a time.
TOGETHER = 40


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredStores]:
    tiny_tiers(monkeypatch, full=False)
    made = TieredStores(tmp_path, "a-server", 320 * KIB, 10.0)
    yield made
    made.close()


class Table:
    """A table of rows whose values are their ids."""

    def __init__(self, stores: TieredStores) -> None:
        self.share = stores.share()
        self.rows = 0

    def give_way(self) -> None:
        while not self.share.give_way():
            pass

    def open(self) -> Table:
        store = self.share("rows", 1, 12)
        assert isinstance(store, TieredStore)
        store.ensure_column("weight", 3, 0.5, np.float32)
        self.store, self.budget = store, store._budget
        return self

    def put(self, count: int) -> Table:
        for start in range(self.rows, self.rows + count, TOGETHER):
            ids = np.arange(start, start + TOGETHER)
            slots = self.store.insert(ids)
            self.store.write(slots)
            scatter(self.store.column("weight"), slots, np.repeat(ids, 3).reshape(-1, 3).astype(np.float32))
            self.rows += TOGETHER
        return self

    def check(self) -> None:
        for start in range(0, self.rows, TOGETHER):
            ids, out = np.arange(start, start + TOGETHER), np.empty((TOGETHER, 3), np.float32)
            gather(self.store.column("weight"), self.store.find(ids), out)
            assert out[:, 0].tolist() == ids.tolist()


def test_both_have_a_part_until_one_takes_over(stores: TieredStores) -> None:
    host = Table(stores).open().put(8000)
    assert host.budget.taken > 300 * KIB
    guest = Table(stores)
    host.give_way()
    assert host.budget.taken <= 160 * KIB
    guest.open()
    for _ in range(10):
        guest.put(480)
        host.put(TOGETHER)
        assert host.budget.taken + guest.budget.taken <= 330 * KIB  # an index is paid for at the next request
    for table in (host, guest):
        table.check()
    guest.share.take_over()
    del table, host
    assert guest.budget.nbytes == 320 * KIB
    guest.put(8000).check()


def test_what_the_training_needs_is_not_taken(stores: TieredStores) -> None:
    host = Table(stores).open().put(12_000)
    guest = Table(stores)
    host.give_way()
    assert host.budget.taken > 160 * KIB  # the index alone
    guest.open()
    with pytest.raises(CheckpointError, match=r"take the place of others do not fit.*'rows'.*FLEET_TABLE_MEMORY_MB"):
        guest.put(16_000)
    del guest
    host.put(1000).check()
    assert host.budget.nbytes == 320 * KIB
    assert stores.failure() is None


def test_the_training_takes_what_it_comes_to_need(stores: TieredStores) -> None:
    host = Table(stores).open().put(4000)
    guest = Table(stores)
    host.give_way()
    guest.open().put(2000)
    host.put(14_000).check()
    with pytest.raises(CheckpointError, match="do not fit"):
        guest.put(TOGETHER)
    assert stores.failure() is None


def test_the_next_values_are_read_in_the_place_of_others(stores: TieredStores) -> None:
    host = Table(stores).open().put(4000)
    first = Table(stores)
    host.give_way()
    first.open().put(800)
    second = Table(stores)
    with pytest.raises(CheckpointError, match="do not fit"):
        first.put(TOGETHER)
    del first
    host.give_way()
    second.open().put(2000).check()


def test_a_job_goes_on_without_values_for_which_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tiers(monkeypatch, rows=256, full=False)

    def trains(loads: bool) -> Any:
        def body(made: Fleet, index: int) -> torch.Tensor:
            table = fleet.nn.Embedding(500, 200)
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
            wrapped = made.distributed_optimizer(optimizer, model=table)
            made.init_worker()
            for step in range(6):
                if loads and step == 2:
                    made.save_persistables(tmp_path / "saved")
                if loads and step == 4:
                    with pytest.raises(CheckpointError, match="take the place of others do not fit"):
                        made.load_persistables(tmp_path / "saved")
                wrapped.minimize((table(torch.arange(step * 80, step * 80 + 100)) - 1).square().sum())
            return table.weight.sum(1).detach()

        return body

    environ = {**PATIENT, "FLEET_TABLE_MEMORY_MB": "1", "FLEET_TABLE_DIR": str(tmp_path / "rows")}
    (got,) = run_job(trains(loads=True), environ=environ)
    (expected,) = run_job(trains(loads=False))
    assert torch.equal(got, expected)
