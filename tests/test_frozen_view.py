"""Frozen views: tables as they were at one moment, or at several, while they change."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job

import fleet.nn
from fleet import Fleet
from fleet.checkpoint.places import Directory
from fleet.errors import CheckpointError
from fleet.kernels import RULES
from fleet.nn import CountFilter
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.sketch import SketchView
from fleet.ps.table.table import WEIGHT, Table

Rows = dict[int, float]


def table_of(rows: int) -> Table:
    kernel = RULES["SGD"].rows
    assert kernel is not None
    spec = TableSpec("items", 2, "float32", 0, None, Initializer("zeros"))
    table = Table(spec, kernel, seed=1)
    table.begin_epoch(1)
    table.load(np.arange(rows), {WEIGHT: np.zeros((rows, 2), np.float32)})
    return table


def change(table: Table, ids: list[int], value: float) -> None:
    table.load(np.array(ids), {WEIGHT: np.full((len(ids), 2), value, np.float32)})


class Moment:
    def __init__(self, table: Table, epoch: int) -> None:
        self.table, self.rows = table, Rows()
        table.begin_epoch(epoch)
        self.view = FrozenView([table], 0, epoch, self._take)

    def _take(self, about: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        self._add(tensors["ids"], tensors[WEIGHT])

    def _add(self, ids: Any, weights: Any) -> None:
        self.rows.update(zip(ids.tolist(), weights[:, 0].tolist(), strict=True))

    def end(self) -> Rows:
        ids, columns = self.table.rows_of(np.arange(len(self.table)), 0, self.view.until)
        self._add(ids, columns[WEIGHT])
        self.view.end()
        return self.rows


def test_two_moments_at_once() -> None:
    table = table_of(6)
    first = Moment(table, 2)
    change(table, [0, 1], 1.0)
    second = Moment(table, 3)
    change(table, [1, 2, 9], 2.0)
    assert first.end() == dict.fromkeys(range(6), 0.0)
    change(table, [3], 3.0)
    assert second.end() == {**dict.fromkeys(range(6), 0.0), 0: 1.0, 1: 1.0}


def test_a_failure_of_the_last_piece_is_told() -> None:
    table = table_of(2)

    def fails(*_: object) -> None:
        raise OSError("no room")

    table.begin_epoch(2)
    view = FrozenView([table], 0, 2, fails)
    change(table, [0], 1.0)
    with pytest.raises(OSError, match="no room"):
        view.end()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_a_checkpoint_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A view has a copy of what a sketch has counted, which may be as large as memory allows, and the ids of rows that
    have left."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    def body(made: Fleet, index: int) -> list[int]:
        table = fleet.nn.Embedding(None, 2, admit=CountFilter(2, sketch_mb=1))
        optimizer = made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        made.init_worker()
        left = []
        for step in range(3):
            optimizer.minimize(table(torch.arange(step, step + 4)).sum())
            with monkeypatch.context() as patch, contextlib.suppress(CheckpointError):
                if fails:
                    patch.setattr(Directory, "create", refused)
                made.save_persistables(tmp_path / "saved")
            gc.collect()
            left.append(sum(isinstance(each, FrozenView | SketchView) for each in gc.get_objects()))
        return left

    assert run_job(body) == [[0, 0, 0]]
