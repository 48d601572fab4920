"""Frozen views: tables as they were at one moment, or at several, while they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fleet.kernels import RULES
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.table.frozen_view import FrozenView
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
