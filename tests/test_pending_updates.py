"""Pending updates: an answer does not wait for the rows of its round, which nobody may see as they were before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fuzz
import numpy as np
import pytest
import torch
from harness import run_job, values
from inside import shard_of

import fleet
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.settings import ProcessSettings
from fleet.errors import FleetError, JobAbortedError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.deferring_lock import DeferringLock
from fleet.ps.server.service import Service
from fleet.ps.table.shard import Shard
from fleet.ps.table.table import Table
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import raise_if_error

#: Of one row of every table, and beyond them one that nobody pushes.
IDS = [WireTensor.of(np.array([1, 50, -7, 51]))]


class Server:
    """A server in the midst of a job of two workers. ``left``: what it has not done yet of what it was asked."""

    def __init__(self, mode: str = "sync") -> None:
        self.service = Service(fuzz.ENDPOINT, ProcessSettings(), SystemClock())
        self.mode = mode
        self.left: list[Callable[[], None]] = []
        for worker in (0, 1):
            self.ask(worker, 0, "hello")
        self.ask(0, 0, "upload")
        self.ask(0, 0, "ready")

    def ask(self, worker: int, step: int, name: str, **kind: Any) -> list[Frame]:
        """What this worker is answered at once, to a good request or to ``kind``."""
        good, tensors = fuzz.requests(self.mode, max(step, 1))[name]
        replies: list[Frame] = []
        request = pb.Request(worker=worker, incarnation=worker + 1, step=step, **(kind or good))
        left = self.service.handle(Frame(request, IDS if kind else tensors), replies.append)
        if left is not None:
            self.left.append(left)
        return [raise_if_error(reply) for reply in replies]

    def rows(self, version: int) -> list[Any]:
        """Of every table the row that is pushed, and one that is not."""
        pull = pb.Pull(version=version, tables=[0, 1], training=[True, True], counts=[2, 2])
        (reply,) = self.ask(0, version, "pull", pull=pull)
        return [tensor.numpy().copy() for tensor in reply.tensors]

    @property
    def shard(self) -> Shard:
        return shard_of(self.service)

    def do_the_rest(self) -> None:
        for left in self.left:
            left()
        self.left.clear()


def close_round(server: Server, step: int) -> None:
    server.ask(0, step, "push")
    server.ask(1, step, "push")


def test_a_round_is_answered_before_its_rows_are_updated_and_nobody_sees_it() -> None:
    behind, prompt = Server(), Server()
    for server in (behind, prompt):
        before = server.rows(0)
        server.ask(0, 1, "push")
        assert not server.shard.has_pending
        (reply,) = server.ask(1, 1, "push")
        assert reply.message.version == 1
        assert server.shard.has_pending
        if server is prompt:
            server.do_the_rest()
            assert not server.shard.has_pending
        after = server.rows(1)
        assert not server.shard.has_pending
        for old, new in zip(before, after, strict=True):
            assert not np.array_equal(old[0], new[0])
            assert np.array_equal(old[1], new[1])
    assert all(map(np.array_equal, behind.rows(1), prompt.rows(1)))


def test_rounds_on_rounds_without_anybody_looking() -> None:
    behind, prompt = Server(), Server()
    for step in range(1, 6):
        close_round(behind, step)
        close_round(prompt, step)
        prompt.do_the_rest()
    assert behind.shard.has_pending
    assert all(map(np.array_equal, behind.rows(5), prompt.rows(5)))
    assert [table.step for table in behind.shard.tables] == [5, 5]


@pytest.mark.parametrize("kind", ["export", "status", "survey", "claim", "gather"])
def test_whatever_is_asked_next_finds_the_rows_updated(kind: str) -> None:
    server = Server()
    close_round(server, 1)
    server.ask(0, 2, kind)
    assert not server.shard.has_pending


def test_nobody_waits_for_the_answer_to_an_asynchronous_push() -> None:
    server = Server("async")
    server.ask(0, 1, "push")
    assert not server.shard.has_pending


@pytest.mark.parametrize(
    "next_", [Server.do_the_rest, lambda server: server.rows(1), lambda server: server.service.tick()]
)
def test_a_request_that_waited_for_the_version_gets_its_rows_behind_the_answers(next_: Callable[[Server], Any]) -> None:
    """Whoever goes on without them does not wait for them; they leave with whatever is done next."""
    server, got = Server(), []
    pull = pb.Pull(version=1, tables=[0, 1], training=[True, True], counts=[2, 2])
    waiting = Frame(pb.Request(worker=0, incarnation=1, step=0, pull=pull), IDS)
    server.service.handle(waiting, got.append)
    server.ask(0, 1, "push")
    (pushed,) = server.ask(1, 1, "push")
    assert pushed.message.version == 1
    assert server.shard.has_pending
    assert not got
    next_(server)
    assert not server.shard.has_pending
    (reply,) = map(raise_if_error, got)
    assert reply.message.version == 1
    assert all(map(np.array_equal, [tensor.numpy() for tensor in reply.tensors], server.rows(1)))


def test_rows_that_cannot_be_updated_end_the_job_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    server = Server()
    monkeypatch.setattr(Table, "apply", refused)
    close_round(server, 1)
    for worker in (0, 1):
        with pytest.raises(JobAbortedError, match=r"none left.*Give the job more servers"):
            server.ask(worker, 1, "pull")
    assert isinstance(server.service.failure, JobAbortedError)


@pytest.mark.parametrize("version", [1, 2], ids=["for the rows themselves", "for later ones"])
def test_whoever_waits_is_told_when_rows_cannot_be_updated(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    server, told = Server(), []
    pull = pb.Pull(version=version, dense=True, tables=[0, 1], training=[True, True], counts=[2, 2], ahead=True)
    server.service.handle(Frame(pb.Request(worker=0, incarnation=1, step=1, pull=pull), IDS), told.append)
    monkeypatch.setattr(Table, "apply", refused)
    close_round(server, 1)
    assert not told
    server.do_the_rest()
    assert [reply.message.error.kind for reply in told] == ["JobAbortedError"]


def test_a_lock_that_cannot_catch_up_is_free_again() -> None:
    def refused() -> None:
        raise ZeroDivisionError

    lock = DeferringLock(refused)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock:
            raise AssertionError("it was not caught up with")


@pytest.mark.parametrize("servers", [1, 2])
def test_jobs_end_alike_whether_rows_are_updated_before_the_answer_or_after_it(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        table = fleet.nn.Embedding(None, 4)
        model = torch.nn.Sequential(table, torch.nn.Linear(4, 2))
        torch.nn.init.constant_(model[1].weight, 0.1)
        torch.nn.init.zeros_(model[1].bias)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        wrapped = fleet_.distributed_optimizer(optimizer, model=model)
        fleet_.init_worker()
        draw = torch.Generator().manual_seed(worker)
        for _ in range(8):
            wrapped.minimize(model(torch.randint(0, 40, (16,), generator=draw)).square().mean())
        return [*values(torch.nn.ModuleList([model[1]])), table(torch.arange(40)).detach()]

    after = run_job(body, 2, servers)
    apply = Shard.apply

    def at_once(shard: Shard, *args: Any, **kwargs: Any) -> Any:
        before = apply(shard, *args, **kwargs)
        shard.apply_pending()
        return before

    monkeypatch.setattr(Shard, "apply", at_once)
    before = run_job(body, 2, servers)
    pairs = [pair for both in zip(before, after, strict=True) for pair in zip(*both, strict=True)]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_errors_of_a_request_leave_nothing_undone() -> None:
    server = Server()
    close_round(server, 1)
    with pytest.raises(FleetError):
        server.ask(0, 7, "push")
    assert not server.shard.has_pending
