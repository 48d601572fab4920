"""Those who follow a model from outside the job are told what changes: each version exactly as the job had it."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dying import ANSWERED, BEFORE, CARRIED_OUT, ENVIRON, DyingJob, at, every
from fuzz import ENDPOINT, requests
from harness import PATIENT, Job, until
from inside import job_of, tiny_tiers
from patience import PATIENCE_S

import fleet.nn
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    PlanMismatchError,
    ServerLostError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.plan import plan
from fleet.plan.specs import JobSpec
from fleet.ps.server import feed
from fleet.ps.server.service import Service
from fleet.ps.table.change_log import ChangeLog
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.transport import BrokenCall
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.serving.server_source import ServerSource
from fleet.serving.source import Update
from fleet.strategy.parameter_server import StrategyFactory

ROWS, DIM = 60, 4


class Followed:
    """What a follower has, put together from the updates of a source."""

    def __init__(self, source: ServerSource) -> None:
        self.source = source
        self.tables = source.describe().tables
        self.dense: dict[str, torch.Tensor] = {}
        self.rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.tables}
        self.version = -1
        self.wholes = 0
        self.row_count = 0

    def take(self, update: Update) -> None:
        if update.whole:
            self.wholes += 1
            self.dense, self.rows = {}, {name: {} for name in self.tables}
        for piece in update.pieces:
            self.dense.update(piece.dense)
            for name, changes in piece.rows.items():
                self.rows[name].update(zip(changes.ids.tolist(), changes.values.clone(), strict=True))
                self.row_count += changes.ids.size
                for gone in changes.gone.tolist():
                    self.rows[name].pop(gone, None)
        update.taken()
        self.version = update.version

    def reach(self, version: int) -> None:
        def there() -> bool:
            update = self.source.next(0.2)
            if update is not None:
                self.take(update)
            return self.version >= version

        until(there)

    def to_the_end(self, each: Callable[[Followed], None] = lambda _: None) -> Followed:
        deadline = time.monotonic() + 4 * PATIENCE_S
        while not self.source.ended:
            assert time.monotonic() < deadline, "the job did not end"
            update = self.source.next(1.0)
            if update is not None:
                self.take(update)
                each(self)
        return self


def source_of(job: Job, **options: Any) -> ServerSource:
    return ServerSource([Endpoint.parse(each) for each in job.endpoints], job.network, poll_s=0.002, **options)


class Model(torch.nn.Module):
    """Rows and dense values start at 0 and fall by the learning rate in every step that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, DIM, initializer="zeros")
        self.known = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.dense = torch.nn.Parameter(torch.zeros(7))
        torch.nn.init.zeros_(self.known.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -(self.open(ids).sum() + self.known(ids).sum() + self.dense.sum())


@contextmanager
def following(job: Job) -> Iterator[Followed]:
    """Run a job beside somebody who follows it, and raise what has failed in it."""
    threads = job.start()
    source = source_of(job)
    with closing(source):
        yield Followed(source)
        job.join(threads)
    for name, error in job.errors.items():
        raise AssertionError(f"{name} failed: {error}") from error


def trains(
    steps: int = 40,
    strategy: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=1.0),
    make: Callable[[], torch.nn.Module] = lambda: Model(),
    after: Callable[[Fleet, torch.nn.Module, Any, int, int], object] = lambda *_: None,
) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> Any:
        model = make()
        wrapped = made.distributed_optimizer(optimizer(model.parameters()), strategy, model=model)
        made.init_worker()
        draw = torch.Generator().manual_seed(index)
        for step in range(1, steps + 1):
            wrapped.minimize(model(torch.randint(0, ROWS, (8,), generator=draw)))
            after(made, model, wrapped, index, step)
        made.barrier_worker()
        return {key: value.clone() for key, value in made.state_dict(model).items()} if index == 0 else None

    return body


def assert_same(followed: Followed, state: Mapping[str, torch.Tensor]) -> None:
    """What a follower has is what the job has; ids without a row are not there."""
    for name, value in followed.dense.items():
        assert torch.equal(value, state[name]), name
    for name, rows in followed.rows.items():
        ids = state.get(name.replace(".weight", ".ids"))
        ids = torch.arange(len(state[name])) if ids is None else ids
        known = [place for place, id_ in enumerate(ids.tolist()) if id_ in rows]
        assert len(known) == len(rows), name
        if f"{name.removesuffix('.weight')}.ids" in state:
            assert len(known) == len(ids), name
        if rows:
            ours = torch.stack([rows[int(ids[place])] for place in known])
            assert torch.equal(ours, state[name][known]), name


IN_ROUNDS: dict[str, Any] = {
    "sync": lambda: StrategyFactory.create_sync_strategy(),
    "clipped": lambda: StrategyFactory.create_sync_strategy(max_grad_norm=1e9),
    "gba": lambda: StrategyFactory.create_gba_strategy(),
    "auto": lambda: StrategyFactory.create_auto_strategy(),
}


class Counting(torch.nn.Module):
    """Everything in it, dense or a row, is as much as the job has had steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, DIM, initializer="zeros")
        self.dense = torch.nn.Parameter(torch.zeros(7))
        self.more = torch.nn.Parameter(torch.zeros(3, 5))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return -(self.rows(torch.arange(ROWS)).sum() + self.dense.sum() + self.more.sum())


@pytest.mark.parametrize("servers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", IN_ROUNDS)
@pytest.mark.pairs(1)
def test_a_version_is_never_a_mixture(mode: str, servers: int) -> None:
    versions = []

    def check(followed: Followed) -> None:
        values = {float(each) for dense in followed.dense.values() for each in dense.flatten()}
        rows = followed.rows["rows.weight"]
        values |= {float(each) for row in rows.values() for each in row}
        assert len(rows) == ROWS * (followed.version > 0)
        assert len(values) == 1
        if mode not in ("gba", "auto"):  # where a gradient that comes too late is left out of its mean
            assert values == {float(followed.version)}
        versions.append(followed.version)

    with following(Job(trains(60, IN_ROUNDS[mode](), make=Counting), 2, servers)) as followed:
        followed.to_the_end(check)
    assert versions == sorted(versions)
    assert followed.wholes == 1
    assert len(versions) > 3


class Net(torch.nn.Module):
    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, DIM, initializer="normal(0, 1)", **rules)
        self.known = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.head = torch.nn.Linear(DIM, 3)
        for value in (self.known.weight, self.head.weight, self.head.bias):
            torch.nn.init.constant_(value, 0.25)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.head(torch.tanh(self.open(ids) + self.known(ids))) - 1).square().mean()


class Checked:
    """Lets workers stop at some steps until a follower is there, and compares what it has with the job's state."""

    def __init__(self, at: set[int]) -> None:
        self.at = at
        self.states: dict[int, Any] = {}
        self.reached = 0

    def after(self, made: Fleet, model: torch.nn.Module, _: Any, index: int, step: int) -> None:
        if step in self.at:
            made.barrier_worker()
            if index == 0:
                self.states[step] = {key: value.clone() for key, value in made.state_dict(model).items()}
            made.barrier_worker()
            until(lambda: self.reached >= step)

    def check(self, followed: Followed) -> None:
        if followed.version in self.at:
            until(lambda: followed.version in self.states)
            assert_same(followed, self.states.pop(followed.version))
        self.reached = followed.version


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


@pytest.mark.parametrize("servers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_follower_has_the_state_of_the_job_at_that_step(servers: int) -> None:
    checked = Checked({3, 4, 20, 30})
    with following(Job(trains(30, optimizer=adam, make=Net, after=checked.after), 2, servers)) as followed:
        followed.to_the_end(checked.check)
    assert not checked.states


RELAXED: dict[str, Any] = {
    "async": lambda: StrategyFactory.create_async_strategy(),
    "half_async": lambda: StrategyFactory.create_half_async_strategy(),
    "ssp": lambda: StrategyFactory.create_ssp_strategy(2),
    "geo": lambda: StrategyFactory.create_geo_strategy(update_frequency=2),
    "dc_asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.02),
    "elastic async": lambda: StrategyFactory.create_async_strategy(elastic=True),
    "elastic gba": lambda: StrategyFactory.create_gba_strategy(elastic=True),
}


@pytest.mark.parametrize("mode", RELAXED)
@pytest.mark.pairs(1)
def test_other_modes_end_with_what_the_job_has(mode: str) -> None:
    job = Job(trains(20, RELAXED[mode](), make=Net), 2, 2)
    with following(job) as followed:
        followed.to_the_end()
    assert_same(followed, job.results[0])
    assert followed.version > 0


@pytest.mark.parametrize(
    "evict", [fleet.nn.Unused(steps=4), fleet.nn.MaxRows(20)], ids=["unused", "at most so many on all servers"]
)
@pytest.mark.pairs(1)
def test_rows_that_have_left_go(evict: Any) -> None:
    checked = Checked({6, 7, 8, 24, 30})
    strategy = StrategyFactory.create_sync_strategy().with_settings(evict_every=3)
    with following(Job(trains(30, strategy, adam, lambda: Net(evict=evict), checked.after), 2, 2)) as followed:
        followed.to_the_end(checked.check)
    assert not checked.states
    assert followed.wholes == 1


def test_rows_that_lie_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_tiers(monkeypatch)
    environ = {**PATIENT, "FLEET_TABLE_MEMORY_MB": "64", "FLEET_TABLE_DIR": str(tmp_path)}
    checked = Checked({5, 20})
    with following(Job(trains(20, None, adam, Net, checked.after), 2, 2, environ=environ)) as followed:
        followed.to_the_end(checked.check)
    assert not checked.states


def test_very_many_changes_come_ahead_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_COPIED_BYTES", 64)
    monkeypatch.setattr(feed, "_PIECE_BYTES", 128)
    checked = Checked({5, 6, 20})
    with following(Job(trains(20, None, adam, Net, checked.after), 2, 2)) as followed:
        followed.to_the_end(checked.check)
    assert not checked.states
    assert followed.wholes == 1


def test_other_values_are_begun_with_anew(tmp_path: Path) -> None:
    checked = Checked({4, 8})

    def after(made: Fleet, model: torch.nn.Module, wrapped: Any, index: int, step: int) -> None:
        checked.after(made, model, wrapped, index, step)
        if step == 4:
            made.save_persistables(str(tmp_path / "kept"))
        if step == 6:
            made.load_persistables(str(tmp_path / "kept"))

    with following(Job(trains(8, None, adam, Net, after), 2, 2)) as followed:
        followed.to_the_end(checked.check)
    assert not checked.states
    assert followed.wholes == 2


def test_what_a_script_changes_by_itself_is_followed() -> None:
    there = threading.Event()

    def after(made: Fleet, model: Any, wrapped: Any, index: int, step: int) -> None:
        if step == 3:
            made.barrier_worker()
            if index == 0:
                with torch.no_grad():
                    model.head.bias.fill_(7.0)
                made.state_dict(model)  # which the servers have by now
            assert there.wait(30)

    job = Job(trains(4, None, adam, Net, after), 2, 2)
    with following(job) as followed:
        followed.reach(3)

        def changed() -> bool:
            if (update := followed.source.next(0.2)) is not None:
                followed.take(update)
            return bool((followed.dense["head.bias"] == 7.0).all())

        until(changed)
        assert followed.version == 3
        there.set()
        followed.to_the_end()
    assert_same(followed, job.results[0])


class Other(Model):
    """Lacks a table, or has it otherwise."""

    def __init__(self, change: str) -> None:
        super().__init__()
        if change == "fewer":
            del self.open
        elif change == "mean":
            self.open = fleet.nn.Embedding(None, DIM, initializer="constant(5.0)")
        else:
            self.dense = torch.nn.Parameter(torch.zeros(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.open(ids).sum()] if hasattr(self, "open") else []
        return -sum([self.known(ids).sum(), self.dense.sum(), *rows], torch.zeros(()))


@pytest.mark.pairs(1)
@pytest.mark.parametrize(
    ("change", "told"),
    [("fewer", "'open.weight' is not there"), ("mean", "'open.weight' is .*5.0"), ("shape", "'dense' is .*8,")],
)
def test_another_job_at_the_same_servers_is_refused_by_name(change: str, told: str) -> None:
    """Its rows and dense values would come into a model of the former one's."""
    job = Job(trains(), 1, 2)
    threads = job.start()
    with closing(source_of(job)) as source:
        Followed(source).to_the_end()
        job.join(threads)
        is_refused = threading.Event()
        waits = trains(steps=3, make=lambda: Other(change), after=lambda *_: is_refused.wait(PATIENCE_S))
        other = Job(waits, 1, 2, network=job.network)
        threads = other.start()
        source._over = {}  # as after kill -9, of which nobody is told
        with pytest.raises(PlanMismatchError, match=f"a job with another model.*{told}"):
            until(lambda: source.next(0.2) is not None and False)
        is_refused.set()
    other.join(threads)
    assert other.errors == {}


def counts_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "PROTOCOL", plan.PROTOCOL + 1)


def describes_otherwise(patch: pytest.MonkeyPatch) -> None:
    told = JobSpec.to_json
    patch.setattr(JobSpec, "to_json", lambda spec: json.dumps({**json.loads(told(spec)), "what is new": 1}))


@pytest.mark.parametrize("otherwise", [counts_otherwise, describes_otherwise])
def test_a_follower_of_another_release_is_refused_by_name(
    otherwise: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be told to begin anew would lead it to the same end again, and nobody would hear why nothing comes."""
    is_refused = threading.Event()
    job = Job(trains(steps=3, after=lambda *_: is_refused.wait(PATIENCE_S)), 1, 2)
    threads = job.start()
    with closing(source_of(job)) as source:
        until(lambda: source.next(0.2) is not None)
        otherwise(monkeypatch)
        with closing(source_of(job)) as other, pytest.raises(PlanMismatchError, match=r"follower .* the same version"):
            until(lambda: other.next(0.2) is not None)
        is_refused.set()
        monkeypatch.undo()
    job.join(threads)
    assert job.errors == {}


def test_parameters_that_come_later_come_to_a_follower() -> None:
    def body(made: Fleet, index: int) -> Any:
        model = Net()
        first = [*model.open.parameters(), *model.head.parameters()]
        wrapped = made.distributed_optimizer(torch.optim.Adagrad(first, lr=0.1), model=model)
        made.init_worker()
        for step in range(6):
            if step == 3:
                until(lambda: followed_versions[-1] >= 3)
                wrapped.add_param_group({"params": list(model.known.parameters()), "lr": 0.01})
            wrapped.minimize(model(torch.arange(10) + index))
        made.barrier_worker()
        return made.state_dict(model)

    followed_versions = [0]
    job = Job(body, 2, 2)
    with following(job) as followed:
        followed.rows["known.weight"] = {}
        followed.reach(3)
        followed_versions.append(followed.version)
        while not followed.source.ended:
            followed.tables = followed.source.describe().tables
            update = followed.source.next(0.2)
            if update is not None:
                followed.tables = followed.source.describe().tables
                followed.take(update)
    assert {*followed.tables} == {"open.weight", "known.weight"}
    assert_same(followed, job.results[0])
    assert followed.wholes == 2


# ---------------------------------------------------------------- who may follow


@pytest.mark.parametrize("chosen", [[0], [1, 0], [0, 1, 1]], ids=["too few", "in another order", "one twice"])
def test_other_servers_are_refused_by_name(chosen: list[int]) -> None:
    done = threading.Event()
    job = Job(trains(1, after=lambda *_: done.wait(30)), 1, 2)
    threads = job.start()
    others = [Endpoint.parse(job.endpoints[each]) for each in chosen]
    refused = pytest.raises((PlanMismatchError, ConfigurationError), match="server")
    with refused, closing(ServerSource(others, job.network)) as source:
        source.describe()
    done.set()
    job.join(threads)
    assert not job.errors


def test_dense_parameters_on_the_workers_are_refused_by_name() -> None:
    done = threading.Event()
    strategy = StrategyFactory.create_sync_strategy(dense="all_reduce")
    job = Job(trains(1, strategy, make=Net, after=lambda *_: done.wait(30)), 1, 1)
    threads = job.start()
    with closing(source_of(job)) as source, pytest.raises(UnsupportedError, match="directory of its checkpoints"):
        source.describe()
    done.set()
    job.join(threads)
    assert not job.errors


@pytest.fixture
def endpoint(free_endpoints: Callable[[int], list[str]]) -> Endpoint:
    return Endpoint.parse(free_endpoints(1)[0])


def test_a_follower_needs_the_token(endpoint: Endpoint) -> None:
    of_server, of_stranger = (
        ProcessSettings.read({**PATIENT, "FLEET_AUTH_TOKEN": token}) for token in ("the right one", "another one")
    )
    listener = real_network(of_server).listen(endpoint, Service(endpoint, of_server, SystemClock()).handle)
    with closing(ServerSource([endpoint], real_network(of_stranger))) as source, pytest.raises(AuthenticationError):
        source.describe()
    listener.close()


# ---------------------------------------------------------------- what it costs the job


class Hand:
    """A clock that goes on when it is told to."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Served:
    """One server of a job that has begun, and somebody who follows it, message by message."""

    def __init__(self) -> None:
        self.clock = Hand()
        self.service = Service(ENDPOINT, ProcessSettings.read(PATIENT), self.clock)
        for kind in ("hello", "upload", "rows", "ready"):
            self.member(kind)
        self.member("hello", worker=1)
        self.step = 0

    def ask(self, request: pb.Request, tensors: list[WireTensor] | None = None) -> list[Frame]:
        replies: list[Frame] = []
        after = self.service.handle(Frame(request, tensors or []), replies.append)
        if after is not None:
            after()
        return replies

    def member(self, kind: str, worker: int = 0) -> list[Frame]:
        given, tensors = requests("sync", 1)[kind]
        return self.ask(pb.Request(worker=worker, incarnation=worker + 1, step=0, **given), tensors)  # type: ignore[arg-type]

    def round(self) -> None:
        self.step += 1
        for worker in (0, 1):
            given, tensors = requests("sync", self.step)["push"]
            message = pb.Request(worker=worker, incarnation=worker + 1, step=self.step, **given)  # type: ignore[arg-type]
            self.ask(message, [WireTensor.of(each.array.copy()) for each in tensors])

    def follower(self, number: int, **kind: Any) -> Any:
        (reply,) = self.ask(pb.Request(incarnation=number, **kind))
        return raise_if_error(reply).message

    def changes(self, number: int, since: int, version: int = 0) -> Any:
        told = pb.Changes(since=since, version=version, fingerprint=self.feed_job.plans.current.fingerprint)
        return self.follower(number, changes=told)

    @property
    def feed_job(self) -> Any:
        return job_of(self.service)

    @property
    def watchers(self) -> int:
        return sum(len(table._watchers) for table in self.feed_job.shard.tables)


def joined(served: Served, number: int) -> int:
    """Follow, and return the number of what all rows came under."""
    assert served.follower(number, follow=pb.Follow(server=0, servers=1)).initialized
    told = served.changes(number, 0)
    assert told.granted
    assert not told.news.exact
    return int(told.news.number)


@pytest.mark.parametrize("messages", range(5))
def test_a_follower_that_is_killed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    monkeypatch.setattr(feed, "LAPSE_S", 10.0)  # workers may be silent for longer
    served = Served()
    served.round()
    since = 0
    for message in range(messages):
        if message == 0:
            served.follower(7, follow=pb.Follow(server=0, servers=1))
        elif message == 1:
            since = served.changes(7, 0).news.number
        elif message == 2:
            served.follower(7, fetch=pb.Fetch(number=since))
        elif message == 3:
            served.round()
            assert served.changes(7, since).granted
        else:
            assert not served.ask(
                pb.Request(
                    incarnation=7,
                    changes=pb.Changes(
                        since=since,
                        version=9,
                        wait_s=5,
                        fingerprint=served.feed_job.plans.current.fingerprint,
                    ),
                )
            )
    served.clock.time += feed.LAPSE_S - 1
    served.service.tick()
    assert len(served.feed_job.feed.followers) == (messages > 0)
    served.clock.time += 2
    served.service.tick()
    served.round()
    assert not served.feed_job.feed.followers
    assert served.watchers == 0


def test_who_comes_back_later_is_told_to_begin_anew() -> None:
    served = Served()
    since = joined(served, 7)
    served.clock.time += feed.LAPSE_S + 1
    served.service.tick()
    assert served.changes(7, since).news.lapsed


def test_who_follows_alike_shares_what_is_kept() -> None:
    served = Served()
    numbers = {follower: joined(served, follower) for follower in (7, 8, 9)}
    served.round()
    for follower, since in numbers.items():
        numbers[follower] = served.changes(follower, since, version=1).news.number
    # The first was told of what had changed since its own beginning, at which all had the same rows.
    assert len({*numbers.values()}) == 1
    served.round()
    again = {served.changes(follower, since, version=2).news.number for follower, since in numbers.items()}
    assert len(again) == 1


def test_a_slow_follower_costs_the_ids_that_have_changed_once_each() -> None:
    served = Served()
    since = joined(served, 7)
    for _ in range(50):
        served.round()
    served.service.tick()
    told = served.changes(7, since)
    (follower,) = served.feed_job.feed.followers.values()
    assert told.news.exact
    assert [len(ids) for ids, _, _ in follower.given.rows] == [2, 2]


def test_values_that_a_follower_has_are_kept_no_longer() -> None:
    served = Served()
    numbers = {follower: joined(served, follower) for follower in (7, 8)}
    served.round()
    for follower, since in numbers.items():
        numbers[follower] = served.changes(follower, since).news.number
    loads = [weakref.ref(each.given) for each in served.feed_job.feed.followers.values()]
    for follower, since in numbers.items():
        assert not served.changes(follower, since).granted, "it has everything"
    assert [load() for load in loads] == [None, None]
    served.round()
    for follower, since in numbers.items():
        told = served.changes(follower, since)
        assert (told.granted, told.news.exact, told.version) == (True, True, 2)


def test_how_many_follow_and_how_far_is_among_the_figures() -> None:
    served = Served()
    served.round()
    joined(served, 7)
    joined(served, 8)
    figures = served.service.status()["figures"]
    assert (figures["followers"], figures["followers_behind"]) == (2, 1)


def test_a_version_that_is_past_is_not_given() -> None:
    served = Served()
    since = joined(served, 7)
    for _ in range(3):
        served.round()
    told = served.changes(7, since, version=2)
    assert not told.granted
    assert told.version == 3
    assert told.news.newer


def test_what_is_asked_for_ahead_is_given_when_it_is_there_and_no_later() -> None:
    served = Served()
    since = joined(served, 7)
    replies: list[Frame] = []
    asks = pb.Changes(since=since, version=2, wait_s=5, fingerprint=served.feed_job.plans.current.fingerprint)
    served.service.handle(Frame(pb.Request(incarnation=7, changes=asks)), replies.append)
    served.round()
    assert not replies
    served.round()
    (reply,) = replies
    assert reply.message.granted
    assert reply.message.version == 2
    served.round()
    piece = served.follower(7, fetch=pb.Fetch(number=reply.message.news.number))
    assert piece.version == 2


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_memory_for_a_follower_is_nobody_else_s_concern(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for is copied by whoever closes the round after it, or comes next."""

    def refused(*_: object) -> None:
        raise MemoryError("none left")

    served = Served()
    since = joined(served, 7)
    replies: list[Frame] = []
    asks = pb.Changes(since=since, version=1, wait_s=5, fingerprint=served.feed_job.plans.current.fingerprint)
    served.service.handle(Frame(pb.Request(incarnation=7, changes=asks)), replies.append)
    monkeypatch.setattr(feed, "_read", refused)
    for _ in range(rounds):
        served.round()
    assert served.service.failure is None
    assert served.feed_job.version == rounds
    with pytest.raises(FleetError, match="none left"):
        raise_if_error(*replies)
    monkeypatch.undo()
    assert served.changes(7, since).granted


def test_ids_that_change_again_and_again_are_kept_once() -> None:
    table = Served().feed_job.shard.tables[1]
    log = ChangeLog([table], 1)
    mark = log.mark()
    ids = np.arange(100)
    for _ in range(1000):
        table.load(ids, {"weight": np.ones((100, 3))})
    (changed,) = log.since(mark) or []
    assert sorted(changed) == [*ids]
    log.keep([mark])
    assert log.has_changed(mark)
    assert not log.has_changed(log.mark())
    log.keep([log.mark()])
    assert log.since(mark) is None
    log.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [(1,), (0,), (0, 1)], ids=str)
def test_a_durable_server_that_was_killed_is_followed_on(killed: tuple[int, ...], tmp_path: Path) -> None:
    reached = [0]

    def after(made: Fleet, model: torch.nn.Module, wrapped: Any, index: int, step: int) -> None:
        if step in (4, 8, 10):
            made.barrier_worker()
            until(lambda: reached[0] >= step)
            if step == 4 and index == 0:
                for server in killed:
                    job.hosts[server].kill()
            made.barrier_worker()

    job = DyingJob(trains(10, None, adam, Net, after), tmp_path, environ=ENVIRON)
    with following(job) as followed:
        while followed.version < 10:
            followed.reach(followed.version + 1)
            reached[0] = followed.version
    assert_same(followed, job.results[0])
    assert followed.version == 10
    assert followed.wholes == 2


class Unplugged:
    """A network that carries nothing of a follower's while it ``is_out``."""

    is_out = False

    def __init__(self, network: Any) -> None:
        self._network = network

    def connect(self, endpoint: Endpoint) -> Any:
        channel = self._network.connect(endpoint)
        start = channel.start
        channel.start = lambda *given, **options: BrokenCall("out") if self.is_out else start(*given, **options)
        return channel


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_that_servers_do_not_answer_is_told_once_and_so_is_their_return(
    mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HEARD_S", 0.2)  # for who goes away without a word
    caplog.set_level(logging.INFO, "fleet.serving")
    done = threading.Event()
    strategy = StrategyFactory.create_async_strategy() if mode == "async" else None
    job = Job(trains(3, strategy, after=lambda *told: told[4] < 3 or done.wait(PATIENCE_S)), 1, 2)
    threads, network = job.start(), Unplugged(job.network)
    endpoints = [Endpoint.parse(each) for each in job.endpoints]
    try:
        network.is_out = True
        source = ServerSource(endpoints, network, startup_s=0.3, poll_s=0.002)
        with closing(source), pytest.raises(DeadlineError, match=f"got {job.endpoints[0]}: out"):
            source.describe()
        network.is_out = False
        with closing(ServerSource(endpoints, network, poll_s=0.002)) as source:
            followed = Followed(source)
            followed.reach(3)
            assert caplog.text.count("nothing new comes") == 0
            network.is_out = True
            for _ in range(4):
                assert source.next(0.12) is None
            network.is_out = False
            until(lambda: source.next(0.1) is None and "answers again" in caplog.text)
            network.is_out = True
    finally:
        done.set()
        job.join(threads)
    assert not job.errors
    assert caplog.text.count("nothing new comes") == 1
    assert f"it is asked again: {job.endpoints[0]}: out" in caplog.text
    assert caplog.text.count("answers again") == 1


class Lossy:
    """A network that loses one message of a follower's, by its number: the request, or the answer to it."""

    def __init__(self, network: Any, number: int, lost: str) -> None:
        self.network, self.left, self.lost = network, number, lost

    def connect(self, endpoint: Endpoint) -> Any:
        return LossyChannel(self, self.network.connect(endpoint))


class LossyChannel:
    def __init__(self, of: Lossy, channel: Any) -> None:
        self._of, self._channel = of, channel

    def start(self, *given: Any, **options: Any) -> Any:
        self._of.left -= 1
        if self._of.left:
            return self._channel.start(*given, **options)
        if self._of.lost == "answer":
            self._channel.start(*given, **options).result()
        return BrokenCall("it was lost")

    def close(self) -> None:
        self._channel.close()


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.pairs
def test_whichever_message_is_lost_a_follower_has_the_model_in_the_end(
    mode: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all messages that two followers of two servers send until they have it, one by one."""
    monkeypatch.setattr(feed, "HEARD_S", 0.2)  # for whose goodbye gets lost
    is_still, goes_on = threading.Event(), threading.Event()

    def after(made: Fleet, model: torch.nn.Module, wrapped: Any, index: int, step: int) -> None:
        if step == 3:
            made.barrier_worker()
            is_still.set()
            assert goes_on.wait(4 * PATIENCE_S)

    strategy = StrategyFactory.create_async_strategy() if mode == "async" else None
    job = Job(trains(3, strategy, after=after), 2, 2)
    threads = job.start()
    endpoints = [Endpoint.parse(each) for each in job.endpoints]
    try:
        assert is_still.wait(PATIENCE_S)
        whole = Followed(ServerSource(endpoints, job.network, poll_s=0.002))
        whole.reach(3)
        whole.source.close()
        number = 0
        while True:
            number += 1
            network = Lossy(job.network, number, lost)
            with closing(ServerSource(endpoints, network, poll_s=0.002)) as source:
                followed = Followed(source)
                while followed.version < whole.version:
                    update = source.next(0.2)
                    if update is not None:
                        with suppress(ServerLostError):  # it went away amid an update: the next one is asked for
                            followed.take(update)
                assert all(torch.equal(followed.dense[name], value) for name, value in whole.dense.items()), number
                assert all(
                    followed.rows[name].keys() == rows.keys()
                    and all(torch.equal(followed.rows[name][id], row) for id, row in rows.items())
                    for name, rows in whole.rows.items()
                ), number
                if network.left > 0:
                    break
    finally:
        goes_on.set()
        job.join(threads)
    assert not job.errors
    assert number > 5


class BreakingOnce:
    """A network that loses a follower's first request for the rest of a load, once something has happened."""

    def __init__(self, network: Any, meanwhile: Callable[[], object]) -> None:
        self.network, self.meanwhile = network, meanwhile
        self.is_due = True

    def connect(self, endpoint: Endpoint) -> Any:
        return BreakingChannel(self, self.network.connect(endpoint))


class BreakingChannel:
    def __init__(self, of: BreakingOnce, channel: Any) -> None:
        self._of, self._channel = of, channel

    def start(self, request: Frame, *given: Any, **options: Any) -> Any:
        if self._of.is_due and request.message.WhichOneof("kind") == "fetch":
            self._of.is_due = False
            self._of.meanwhile()
            return BrokenCall("it was lost")
        return self._channel.start(request, *given, **options)

    def close(self) -> None:
        self._channel.close()


def test_rows_that_leave_while_a_first_load_breaks_off_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come of it is not kept: the load that is asked for instead does not tell of rows that have left."""
    monkeypatch.setattr(feed, "_PIECE_BYTES", 128)
    is_still, goes_on, have_left, ends = (threading.Event() for _ in range(4))

    def body(made: Fleet, _: int) -> Any:
        model = Net(evict=fleet.nn.Unused(steps=2))
        strategy = StrategyFactory.create_sync_strategy().with_settings(evict_every=1)
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        made.init_worker()
        for first, reached, left in ((0, is_still, goes_on), (20, have_left, ends)):
            for _ in range(4):
                wrapped.minimize(model(torch.arange(first, first + 20)))
            reached.set()
            assert left.wait(4 * PATIENCE_S)
        return {key: value.clone() for key, value in made.state_dict(model).items()}

    def meanwhile() -> None:
        goes_on.set()
        assert have_left.wait(4 * PATIENCE_S)

    job = Job(body)
    threads = job.start()
    try:
        assert is_still.wait(PATIENCE_S)
        network = BreakingOnce(job.network, meanwhile)
        with closing(ServerSource([Endpoint.parse(job.endpoints[0])], network, poll_s=0.002)) as source:
            followed = Followed(source)
            followed.reach(8)
    finally:
        goes_on.set()
        ends.set()
        job.join(threads)
    assert not job.errors
    assert not network.is_due
    assert_same(followed, job.results[0])


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_was_read_and_not_taken_is_given_again(mode: str) -> None:
    """Whoever reads every second update only, and cannot put the others in place, has the model in the end."""
    strategy = StrategyFactory.create_async_strategy() if mode == "async" else None
    job = Job(trains(30, strategy), 2, 2)
    dropped = 0
    with following(job) as followed:
        while not followed.source.ended:
            if (update := followed.source.next(1.0)) is not None:
                if dropped % 2 == 0:
                    list(update.pieces)
                else:
                    followed.take(update)
                dropped += 1
    assert dropped >= 2  # however few there were, the first was given again
    assert_same(followed, job.results[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", [BEFORE, CARRIED_OUT, ANSWERED])
@pytest.mark.parametrize("kind", ["follow", "changes", "fetch"])
@pytest.mark.parametrize("server", [0, 1])
def test_a_server_that_dies_of_a_follower_s_message_is_followed_on(
    server: int, kind: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_PIECE_BYTES", 200)  # so that there is something to fetch
    followed_to_death(tmp_path, at(kind, moment, server, times=2))


@pytest.mark.slow
@pytest.mark.parametrize(("nth", "offset"), [(7, 3), (11, 4)])
def test_servers_that_die_of_whatever_message_are_followed_on(nth: int, offset: int, tmp_path: Path) -> None:
    followed_to_death(tmp_path, every(nth, offset))


def followed_to_death(folder: Path, plan: Any) -> None:
    """Kill servers by a plan, by messages of workers and of a follower, which has each version whole in the end."""
    is_there = threading.Event()

    def after(made: Fleet, model: torch.nn.Module, wrapped: Any, index: int, step: int) -> None:
        if step == 6:
            made.barrier_worker()
            assert is_there.wait(4 * PATIENCE_S)

    job = DyingJob(trains(6, None, adam, Net, after), folder, plan=plan, environ=ENVIRON)
    job.counted |= {"follow", "changes", "fetch"}
    with following(job) as followed:
        while followed.version < 6:
            update = followed.source.next(0.5)
            if update is not None:
                with suppress(ServerLostError):
                    followed.take(update)
        is_there.set()
    assert sum(host.kills for host in job.hosts) > 0
    assert_same(followed, job.results[0])
