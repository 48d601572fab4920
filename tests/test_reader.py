"""Whoever goes through rows part by part, and stops before the end, keeps no room on a disk for the rest."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import ENDPOINT, MOVE, requests
from harness import PATIENT, run_job
from inside import job_of, scans_under_way, tiny_tiers

import fleet.nn
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.pieces import PieceWriter
from fleet.errors import CheckpointError
from fleet.ps.server import feed
from fleet.ps.server.service import Service
from fleet.ps.table import row_file
from fleet.ps.table.shard import FIRST
from fleet.ps.table.stores import stores_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.strategy.parameter_server import StrategyFactory

ROWS = 200


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    tiny_tiers(monkeypatch)
    monkeypatch.setattr("fleet.ps.table.shard.PIECE_BYTES", 400)
    monkeypatch.setattr(feed, "_PIECE_BYTES", 400)
    monkeypatch.setattr(row_file, "_LAST_PATIENCE", 0)
    (tmp_path / "rows").mkdir()
    return {**PATIENT, "FLEET_TABLE_MEMORY_MB": "64", "FLEET_TABLE_DIR": str(tmp_path / "rows")}


class Served:
    """A server of a job without rounds, with more rows than memory has room for."""

    def __init__(self, environ: dict[str, str]) -> None:
        settings = ProcessSettings.read(environ)
        self.stores = stores_of(ENDPOINT, settings)
        self.service = Service(ENDPOINT, settings, SystemClock(), stores=self.stores)
        for worker in (0, 1):
            self.ask("hello", worker)
        for kind in ("upload", "ready"):
            self.ask(kind)
        ids = np.arange(ROWS)
        (table,) = [each for each in self.job.shard.tables if each.spec.name == "item"]
        table.load(ids, {"weight": np.zeros((ROWS, 3))})

    @property
    def job(self) -> Any:
        return job_of(self.service)

    def ask(self, kind: str, worker: int = 0, **given: Any) -> Any:
        told, tensors = (given, []) if given else requests("async", 1)[kind]
        replies: list[Frame] = []
        message = pb.Request(worker=worker, incarnation=worker + 1, **told)
        self.service.handle(Frame(message, tensors), replies.append)
        return raise_if_error(replies[0]).message if replies else None

    def follower(self, **given: Any) -> Any:
        replies: list[Frame] = []
        self.service.handle(Frame(pb.Request(incarnation=7, **given), []), replies.append)
        return raise_if_error(replies[0]).message

    def close(self) -> None:
        self.service.close()
        self.stores.close()


@pytest.fixture
def served(environ: dict[str, str]) -> Iterator[Served]:
    made = Served(environ)
    yield made
    made.close()


# ---------------------------------------------------------------- who reads a part


def a_worker(served: Served) -> None:
    assert served.ask("export", export=pb.Export(cursor="table:1:0")).cursor


def a_move(served: Served, attempt: str = MOVE) -> None:
    cursor = served.ask("halt", halt=pb.Halt(attempt=attempt, round=1)).cursor
    while cursor == "table:1:0" or not cursor.startswith("table:1:"):
        cursor = served.ask("export", export=pb.Export(cursor=cursor, checkpoint=attempt)).cursor


def a_follower(served: Served) -> None:
    served.follower(follow=pb.Follow(server=0, servers=1))
    told = served.follower(changes=pb.Changes(fingerprint=served.job.plans.current.fingerprint))
    number = told.news.number
    while told.cursor == "rows:1:0" or not told.cursor.startswith("rows:1:"):
        told = served.follower(fetch=pb.Fetch(number=number, cursor=told.cursor))


# ---------------------------------------------------------------- and what comes then


def says_goodbye(served: Served) -> None:
    served.ask("bye", bye=pb.Bye())


def begins_anew_elsewhere(served: Served) -> None:
    served.ask("export", export=pb.Export(cursor=FIRST))


def gives_up(served: Served) -> None:
    served.ask("switch", switch=pb.Switch(attempt=MOVE, given_up=True))


def tries_once_more(served: Served) -> None:
    served.ask("halt", halt=pb.Halt(attempt=f"{MOVE} anew", round=1))


def goes_on_with_what_has_changed(served: Served) -> None:
    served.ask("halt", halt=pb.Halt(attempt=MOVE, round=2))


def unfollows(served: Served) -> None:
    served.follower(unfollow=pb.Unfollow())


def follows_anew(served: Served) -> None:
    served.follower(follow=pb.Follow(server=0, servers=1))


def vanishes(served: Served) -> None:
    served.job.feed.tick(served.job.feed.followers[7].heard + feed.LAPSE_S + 1)


@pytest.mark.parametrize(
    ("reads", "ends"),
    [
        (a_worker, says_goodbye),
        (a_worker, begins_anew_elsewhere),
        (a_move, gives_up),
        (a_move, tries_once_more),
        (a_move, goes_on_with_what_has_changed),
        (a_follower, unfollows),
        (a_follower, follows_anew),
        (a_follower, vanishes),
    ],
)
@pytest.mark.pairs(1)
def test_what_is_read_no_further_keeps_nothing(
    served: Served, reads: Callable[[Served], None], ends: Callable[[Served], None]
) -> None:
    reads(served)
    assert scans_under_way() == 1
    ends(served)
    assert not scans_under_way()


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.pairs(1)
def test_a_save_that_fails_keeps_nothing(
    strategy: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, under_way = PieceWriter.add, list[int]()

    def full(self: PieceWriter, about: dict[str, Any], tensors: Any) -> None:
        if about.get("table"):
            under_way.append(scans_under_way())
            raise OSError(errno.ENOSPC, "no room")
        add(self, about, tensors)

    def body(made: Fleet, index: int) -> int:
        table = fleet.nn.Embedding(None, 3)
        optimizer = made.distributed_optimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), strategy=strategies[strategy]
        )
        made.init_worker()
        optimizer.minimize(table(torch.arange(ROWS)).sum())
        with pytest.raises(CheckpointError, match="no room"):
            made.save_persistables(tmp_path / "saved")
        return scans_under_way()

    monkeypatch.setattr(PieceWriter, "add", full)
    strategies = {"sync": StrategyFactory.create_sync_strategy(), "async": StrategyFactory.create_async_strategy()}
    assert run_job(body, environ=environ) == [0]
    assert under_way == [1]


def test_a_follower_that_asks_for_all_rows_once_more_has_one_of_them_read(served: Served) -> None:
    for _ in range(3):
        a_follower(served)
        assert scans_under_way() == 1
