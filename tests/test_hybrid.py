"""Dense parameters among the workers, rows on the servers: ``dense="all_reduce"``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, SOON, Job, assert_close, run_job, until, values
from inside import leave, tiny_tiers, worker_of
from patience import PATIENCE_S
from test_edits import Interrupts
from test_parity_dense import OPTIMIZERS, TEMPLATE, loss_of, make_model, reference
from torch.distributed import TCPStore

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    FleetError,
    NonFiniteGradientError,
    StateError,
    UnsupportedError,
)
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connection, Together
from fleet.ps.worker.dense_group import DenseGroup
from fleet.ps.worker.dense_training import DenseTraining
from fleet.ps.worker.push import Pusher
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.transpiler import DistributeTranspilerConfig

STEPS = 6

sync = StrategyFactory.create_sync_strategy

Make = Callable[[torch.nn.Module], Any]


class Net(torch.nn.Module):
    """Tables of both kinds below layers with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, 4, initializer="constant(0.3)")
        self.closed = torch.nn.Embedding(30, 4, sparse=True)
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(4, 8, bias=False),  # whose gradient would be rounding and nothing else
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 1),
        )

    def loss(self, step: int, worker: int) -> torch.Tensor:
        ids = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(step * 10 + worker))
        loss: torch.Tensor = (self.dense(self.open(ids * 7) + self.closed(ids)) - worker).square().mean()
        return loss

    def seen(self) -> list[torch.Tensor]:
        """All that a job has learnt, but buffers, which are the first worker's."""
        with torch.no_grad():
            rows = [self.open(torch.arange(30) * 7), self.closed(torch.arange(30))]
        return [*(each.detach().clone() for each in self.dense.parameters()), *rows]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(5)
    return Net()


def hybrid_and_servers(
    net: Net, make: Make, workers: int, servers: int, train: Callable[[Any, Net, int], None], **options: Any
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """What every worker has seen in the end, with each of the two places for dense parameters."""

    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net)
            optimizer = fleet_.distributed_optimizer(make(model), sync(dense=dense, **options), model=model)
            fleet_.init_worker()
            train(optimizer, model, worker)
            fleet_.barrier_worker()
            return model.seen()

        return run

    return run_job(body("all_reduce"), workers, servers), run_job(body("servers"), workers, servers)


def check(hybrid: list[list[torch.Tensor]], servers: list[list[torch.Tensor]]) -> None:
    for one, other in zip(hybrid, servers, strict=True):
        assert_close(one, other)
        assert all(torch.equal(a, b) for a, b in zip(one, hybrid[0], strict=True)), "the same bits everywhere"


@contextlib.contextmanager
def worker_1_again(job: Job) -> Iterator[Fleet]:
    """Another process in the place of worker 1, which takes part in a job until this is over."""
    fleet_ = Fleet(environ=SOON, network=job.network)
    fleet_.init(UserDefinedRoleMaker(1, Role.WORKER, job.workers, job.endpoints))
    yield fleet_
    fleet_.stop_worker()


def each_step(optimizer: Any, model: Net, worker: int) -> None:
    for step in range(STEPS):
        optimizer.minimize(model.loss(step, worker))


def test_a_job_in_one_process_asks_nobody_for_names(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its own network are known there alone, and a name server that is silent keeps who asks for seconds."""
    asked: list[Any] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **_: asked.append(given))
    alone = Fleet(environ={})
    alone.init()
    optimizer = alone.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), sync(dense="all_reduce"), model=net)
    alone.init_worker()
    optimizer.minimize(net.loss(0, 0))
    alone.stop_worker()
    assert asked == []


def test_others_are_told_of_a_store_that_is_there(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes to one that is being made may wait for five seconds."""
    call, tried = Connection.call, list[int]()

    def tries(self: Connection, frame: Frame, what: str) -> Frame:
        if frame.message.HasField("meet") and frame.message.meet.address:
            host, port = json.loads(frame.message.meet.address)
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
            tried.append(port)
        return call(self, frame, what)

    monkeypatch.setattr(Connection, "call", tries)
    found, _ = hybrid_and_servers(net, lambda each: torch.optim.SGD(each.parameters(), lr=0.1), 2, 1, each_step)
    check(found, found)
    assert len(tried) >= 2


# --- Interrupted ------------------------------------------------------------------------------------------------------


class Interrupted(Interrupts):
    FILES = (*Interrupts.FILES, "dense_training", "dense_reducer", "describe", "geo_replica", "gradient_merge")


def taken(mode: str, at: int) -> tuple[set[float], bool]:
    """What all parameters and rows are, which begin with 0 and gain 1 in each of 4 steps, of which Ctrl-C struck the
    second at its n-th line; and whether it did."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3))
    model.table = torch.nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    sgd.register_step_pre_hook(lambda *_: None)
    alone = Fleet(environ={})
    alone.init()
    optimizer = alone.distributed_optimizer(sgd, INTERRUPTED[mode](), model=model)
    alone.init_worker()
    interrupts, before = Interrupted(at), sys.gettrace()
    for step in range(4):
        loss = -(model.weight.sum() + model.table(torch.arange(3)).sum())
        sys.settrace(interrupts if step == 1 else before)
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.minimize(loss)
        sys.settrace(before)
    alone.barrier_worker()
    found = {*model.weight.tolist(), *model.table.weight.detach().flatten().tolist()}
    alone.stop_worker()
    return found, interrupts.left <= 0


INTERRUPTED: dict[str, Callable[[], Any]] = {
    "sync": lambda: sync(dense="all_reduce"),
    "async": lambda: StrategyFactory.create_async_strategy(dense="all_reduce"),
    "half": lambda: StrategyFactory.create_half_async_strategy(dense="all_reduce"),
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
}


@pytest.mark.parametrize("mode", INTERRUPTED)
@pytest.mark.pairs(1)
def test_a_step_that_ctrl_c_strikes_happens_whole_or_not_at_all(mode: str) -> None:
    """Every 37th line is tried."""
    at, is_hit, both = 1, True, set()
    while is_hit:
        found, is_hit = taken(mode, at)
        assert found in ({3.0}, {4.0}), at
        both |= found
        at += 37
    assert both == {3.0, 4.0}


def after_merging(at: int, fails: str = "") -> tuple[list[float], bool]:
    """What a parameter and rows come to in 7 steps whose means of up to 4 are pushed; and whether Ctrl-C struck the
    barrier after the sixth at its n-th line."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2))
    model.table = torch.nn.Embedding(2, 1, sparse=True, _weight=torch.zeros(2, 1))
    alone = Fleet(environ={})
    alone.init()
    strategy = StrategyFactory.create_half_async_strategy(max_merge_var_num=4, is_sgd_optimizer=False)
    optimizer = alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy, model=model)
    alone.init_worker()

    def step() -> None:
        optimizer.minimize(-(model.weight.sum() + model.table(torch.arange(2)).sum()))

    for _ in range(6):
        step()
    interrupts, before = Interrupted(at), sys.gettrace()
    with contextlib.suppress(KeyboardInterrupt, MemoryError), pytest.MonkeyPatch.context() as patched:
        if fails:
            patched.setattr(Pusher, fails, out_of_memory)
        sys.settrace(interrupts)
        alone.barrier_worker()
    sys.settrace(before)
    step()
    alone.barrier_worker()
    found = [*model.weight.tolist(), *model.table.weight.detach().flatten().tolist()]
    assert worker_of(alone).progress.steps == worker_of(alone).progress.taken == 7
    alone.stop_worker()
    return found, interrupts.left <= 0


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.pairs(1)
def test_a_flush_that_ctrl_c_strikes_loses_no_merged_step(first: int) -> None:
    """Every 15th line is tried. The two steps that are left become one push, or wait for the third."""
    at, is_hit, both = first, True, set()
    while is_hit:
        found, is_hit = after_merging(at)
        assert {*found} in ({2.0}, {3.0}), (at, found)
        both |= {*found}
        at += 15
    assert both == {2.0, 3.0}


def test_a_flush_without_memory_for_its_push_loses_no_merged_step() -> None:
    assert after_merging(1 << 30, fails="encode") == ([2.0] * 4, False)


@pytest.mark.parametrize("mode", ["sync", "async", "half"])
@pytest.mark.parametrize("wrong", ["a row", "an option"])
def test_a_step_that_is_refused_has_changed_nothing(mode: str, wrong: str) -> None:
    def body(fleet_: Fleet, _: int) -> None:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(3))
        model.table = torch.nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
        own = [torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([model.table.weight], lr=1.0)]
        strategy = INTERRUPTED[mode]()
        optimizer = fleet_.distributed_optimizer(own, dataclasses.replace(strategy, check_finite=True), model=model)
        fleet_.init_worker()
        loss = -(model.weight.sum() + model.table(torch.arange(3)).sum())
        if wrong == "a row":
            with pytest.raises(NonFiniteGradientError, match="the gradient of a row of 'table"):
                optimizer.minimize(loss + model.table(torch.tensor([1])).sum() * float("inf"))
        else:
            own[1].param_groups[0]["lr"] = [1.0, object()]
            with pytest.raises(ArgumentTypeError, match="the option lr of an optimizer cannot travel"):
                optimizer.minimize(loss)
            own[1].param_groups[0]["lr"] = 1.0
        assert model.weight.tolist() == [0.0] * 3
        optimizer.minimize(-(model.weight.sum() + model.table(torch.arange(3)).sum()))
        fleet_.barrier_worker()
        assert {*model.weight.tolist(), *model.table.weight.detach().flatten().tolist()} == {1.0}

    run_job(body)


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("step", "collective"), [(0, 0), (0, 1), (2, 0)], ids=["plain", "plain, later", "buckets"])
def test_a_round_that_ctrl_c_strikes_is_done_over(
    net: Net, monkeypatch: pytest.MonkeyPatch, step: int, collective: int
) -> None:
    """A worker is interrupted in its backward, when it has sent so much of it; it goes backward once more."""
    finish, left = DenseGroup.finish, [collective]

    def interrupted(self: DenseGroup, *given: Any) -> None:
        if threading.current_thread().name == "job-work-1" and self.rounds == step and left:
            if left[0] == 0:
                left.clear()
                raise KeyboardInterrupt
            left[0] -= 1
        finish(self, *given)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net.dense[::2])
        optimizer = fleet_.distributed_optimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), sync(dense="all_reduce"), model=model
        )
        fleet_.init_worker()
        monkeypatch.setattr(DenseGroup, "finish", interrupted)
        for _ in range(STEPS):
            try:
                optimizer.minimize(model(torch.ones(2, 4)).square().mean() * (worker + 1))
            except KeyboardInterrupt:
                with pytest.raises(StateError, match="a backward ended in an exception"):
                    optimizer.step()
                optimizer.minimize(model(torch.ones(2, 4)).square().mean() * (worker + 1))
        return values(model)

    one, other = run_job(body, 2, environ=SOON)
    assert not left
    monkeypatch.undo()
    undisturbed = run_job(body, 2)
    assert_close(one, other, 0)
    assert_close(one, undisturbed[0])


# --- Synchronous: the same as on servers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [(name, 1 + place % 3, 1 + place // 3 % 2) for place, name in enumerate(OPTIMIZERS)],
)
@pytest.mark.parametrize("mode", ["sync", "async", "half_async", "ssp"])
@pytest.mark.pairs(9)
def test_every_optimizer_ends_where_one_process_does(mode: str, name: str, workers: int, servers: int) -> None:
    """In every mode, as it is rows alone that go their own way."""
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense="all_reduce")

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        if worker:  # worker 0's values win
            torch.nn.init.constant_(model[0].weight, worker)  # type: ignore[index, arg-type]
        plain = OPTIMIZERS[name](list(model.parameters()))
        optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    results = run_job(body, workers, servers)
    for got in results:
        assert_close(got, reference(OPTIMIZERS[name], workers))
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


@pytest.mark.pairs(2)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_rows_and_layers_end_where_servers_alone_end(net: Net, workers: int, servers: int) -> None:
    check(*hybrid_and_servers(net, lambda m: torch.optim.Adam(m.parameters(), 0.05), workers, servers, each_step))


class Tables(torch.nn.Module):
    """A layer over tables of which two are asked together, and rows of one come and leave."""

    def __init__(self, **life: Any) -> None:
        super().__init__()
        self.group = fleet.nn.EmbeddingGroup({"user": (None, 4, life), "item": (None, 4)})
        self.bag = fleet.nn.EmbeddingBag(None, 4)
        self.dense = torch.nn.Linear(4, 1)

    @staticmethod
    def batch(step: int, worker: int) -> torch.Tensor:
        return torch.randint(0, 40, (8, 2), generator=torch.Generator().manual_seed(step * 10 + worker))

    def lookup(self, ids: torch.Tensor) -> dict[torch.nn.Module, Any]:
        return {self.group: {"user": ids[:, 0], "item": ids[:, 1]}, self.bag: ids}

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.group({"user": ids[:, 0], "item": ids[:, 1]})
        loss: torch.Tensor = (self.dense(found["user"] + found["item"] + self.bag(ids)) - 1).square().mean()
        return loss


LIVES: dict[str, dict[str, Any]] = {
    "stay": {},
    "are admitted": {"admit": fleet.nn.CountFilter(2)},
    "leave": {"evict": [fleet.nn.Unused(steps=2), fleet.nn.MaxRows(9)]},
}


@pytest.mark.parametrize("memory", ["all rows in memory", "some rows in files"])
@pytest.mark.parametrize("ahead", ["asked for in forwards", "asked for ahead"])
@pytest.mark.parametrize("rows", LIVES)
@pytest.mark.pairs(3)
def test_all_that_rows_have_goes_with_it(
    rows: str, ahead: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**PATIENT, "FLEET_EVICT_EVERY": "2"}
    if memory == "some rows in files":
        tiny_tiers(monkeypatch)
        environ |= {"FLEET_TABLE_MEMORY_MB": "1", "FLEET_TABLE_DIR": str(tmp_path)}
    in_files = list[Path]()

    def made() -> Tables:  # here, as threads would draw from one seed by turns
        torch.manual_seed(5)
        return Tables(**LIVES[rows])

    models = {dense: [made(), made()] for dense in ("all_reduce", "servers")}

    def body(dense: str) -> Callable[[Fleet, int], dict[str, torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> dict[str, torch.Tensor]:
            model = models[dense][worker]
            plain = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            batches: Any = [model.batch(step, worker) for step in range(STEPS)]
            for ids in fleet_.prefetch(batches, model.lookup) if ahead == "asked for ahead" else batches:
                optimizer.minimize(model.loss(ids))
            fleet_.barrier_worker()
            in_files.extend(tmp_path.rglob("*.rows"))
            return fleet_.state_dict(model)

        return run

    hybrid, servers = (run_job(body(each), 2, 2, environ=environ) for each in models)
    assert bool(in_files) is (memory == "some rows in files")
    assert len(servers[0]["group.user.ids"]) < 30 or rows == "stay"
    for name, value in servers[0].items():
        torch.testing.assert_close(hybrid[0][name], value, rtol=0, atol=1e-6)
        assert torch.equal(hybrid[0][name], hybrid[1][name]), name


def test_two_runs_are_alike(net: Net) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adagrad(model.parameters(), 0.1)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        each_step(optimizer, model, worker)
        fleet_.barrier_worker()
        return model.seen()

    for one, other in zip(run_job(body, 3, 2), run_job(body, 3, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Sign(torch.optim.Optimizer):
    """A user's own, which no server knows."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "how": torch.sign})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["seen"] = state.get("seen", torch.zeros_like(param)) + param.grad
                    param.sub_(group["lr"] * group["how"](state["seen"]))


def test_a_class_of_the_user_s_own_trains_layers(net: Net) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        rows = torch.optim.SGD([model.open.weight, model.closed.weight], lr=0.1)
        own = Sign(model.dense.parameters(), 0.01)
        optimizer = fleet_.distributed_optimizer([rows, own], sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        each_step(optimizer, model, worker)
        assert own.state[model.dense[0].weight]["seen"].any()
        fleet_.barrier_worker()
        return model.seen()

    one, other = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], net.dense[0].weight)


# --- What scripts do around a step ------------------------------------------------------------------------------------


def with_schedule(optimizer: Any, model: Net, worker: int) -> None:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    for step in range(STEPS):
        optimizer.minimize(model.loss(step, worker))
        schedule.step()


def accumulating(optimizer: Any, model: Net, worker: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.loss(2 * step, worker).backward()  # type: ignore[no-untyped-call]
        model.loss(2 * step + 1, worker).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def accumulating_in_rounds(optimizer: Any, model: Net, worker: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            model.loss(2 * step + half, worker).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def by_hand(optimizer: Any, model: Net, worker: int) -> None:
    """Gradients that came in no backward which averaged anything."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.loss(step, worker).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def with_gaps(optimizer: Any, model: Net, worker: int) -> None:
    """Some workers use some layers or tables only."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(step, worker)
        if (step + worker) % 3 == 0:
            loss = model.dense[0].weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def with_zeros(optimizer: Any, model: Net, worker: int) -> None:
    """Gradients are set to zero instead of taken away, so that momentum goes on where there was none."""
    for step in range(STEPS):
        loss = model.loss(step, worker)
        if step % 2:
            loss = model.dense[2].weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def with_closures(optimizer: Any, model: Net, worker: int) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model.loss(step, worker)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        assert float(optimizer.step(closure)) > 0


@pytest.mark.parametrize(
    "train",
    [with_schedule, accumulating, accumulating_in_rounds, by_hand, with_gaps, with_zeros, with_closures],
)
@pytest.mark.pairs(1)
def test_as_on_servers(net: Net, train: Callable[[Any, Net, int], None]) -> None:
    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        own = [each for each in model.parameters() if each.dim() == 1]
        rest = [each for each in model.parameters() if each.dim() != 1]
        # From 0, the first step of Adagrad would make a whole step of what is left of a gradient of almost nothing.
        return [torch.optim.Adagrad(rest, 0.1, initial_accumulator_value=0.1), torch.optim.SGD(own, 0.1, momentum=0.9)]

    def one(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.0)

    check(*hybrid_and_servers(net, one if train in (with_schedule, with_closures) else make, 3, 2, train))


def test_a_worker_that_stops_leaves_and_the_others_go_on(net: Net) -> None:
    groups: list[int] = []

    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net)
            plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            for step in range(2 + 3 * worker):
                optimizer.minimize(model.loss(step, worker))
                if worker == 2 and dense == "all_reduce":
                    groups.append(worker_of(fleet_).dense.group.size)
            return model.seen() if worker == 2 else []

        return run

    *_, hybrid = run_job(body("all_reduce"), 3, 2)
    *_, servers = run_job(body("servers"), 3, 2)
    assert_close(hybrid, servers)
    assert (groups[1], groups[-1]) == (3, 1)
    assert sorted(groups, reverse=True) == groups


@pytest.mark.parametrize(("backwards", "dies"), [(3, False), (2, True)])
def test_the_others_meet_once_amid_a_step_of_several_backwards(backwards: int, dies: bool) -> None:
    """What they had said in the group before is not true of the next one: its first step has no buckets. Where they
    meet in a backward, that needs the buffers which its forward has had."""

    def body(fleet_: Fleet, worker: int) -> tuple[int, list[torch.Tensor]] | None:
        norm, linear = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        torch.nn.init.ones_(linear.weight)
        model = torch.nn.Sequential(norm, linear)
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for _ in range(3 if worker == 2 else 6):
            optimizer.zero_grad()
            for number in range(backwards):
                examples = torch.arange(12.0).reshape(3, 4) * (1 + number + worker)
                (model(examples) - 1).square().mean().backward()
            optimizer.step()
        if worker == 2:
            if dies:
                leave(fleet_)
            return None
        number = worker_of(fleet_).dense.group.number
        return number, [each.clone() for each in model.state_dict().values()]

    (one, first), (other, second), _ = run_job(body, 3, 1, environ=SOON if dies else PATIENT)
    assert one == other == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_clipping_is_by_the_norm_of_what_all_push(net: Net) -> None:
    """As one process clips that averages the workers' gradients, of layers and of rows."""
    norms: dict[int, list[float]] = {}

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), 0.5), sync(dense="all_reduce"), model=model
        )
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(step, worker)
            if (step, worker) == (2, 1):  # without a row
                loss = model.dense[0].weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            norms.setdefault(worker, []).append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
        fleet_.barrier_worker()
        return model.seen()

    got = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.05
    plain = copy.deepcopy(net)
    plain.open = torch.nn.Embedding.from_pretrained(torch.full((210, 4), 0.3), freeze=False)  # type: ignore[assignment]
    plain.closed = torch.nn.Embedding.from_pretrained(net.closed.weight.detach().clone(), freeze=False)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for step in range(STEPS):
        total: list[torch.Tensor] = [torch.zeros_like(each) for each in plain.parameters()]
        for worker in range(2):
            plain.zero_grad()
            loss = plain.loss(step, worker)
            if (step, worker) == (2, 1):
                loss = plain.dense[0].weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            for each, param in zip(total, plain.parameters(), strict=True):
                each += 0 if param.grad is None else param.grad / 2
        for each, param in zip(total, plain.parameters(), strict=True):
            param.grad = each
        assert float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)) == pytest.approx(
            norms[0][step], rel=1e-4
        )
        optimizer.step()


@pytest.mark.pairs(1)
@pytest.mark.parametrize("where", ["rows", "layers", "by hand"])
def test_a_grad_scaler_skips_a_step_for_all(net: Net, where: str) -> None:
    """Gradients stay as they are, as in torch, and nothing of them reaches a server."""

    def body(fleet_: Fleet, worker: int) -> tuple[float, list[torch.Tensor]]:
        model = copy.deepcopy(net)
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), sync(dense="all_reduce", check_finite=True), model=model
        )
        fleet_.init_worker()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(step, worker)
            if (step, worker) == (3, 1):
                culprit = model.dense[2].weight if where == "layers" else model.open(torch.tensor([7]))
                loss = (culprit * torch.inf).sum() + 0 * loss
            with optimizer.no_sync() if where == "by hand" else contextlib.nullcontext():
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            before = model.seen()
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                assert all(torch.equal(a, b) for a, b in zip(before, model.seen(), strict=True))
                assert all(each.grad is not None for each in model.parameters())
        fleet_.barrier_worker()
        return scaler.get_scale(), model.seen()

    (scale, one), (other_scale, other) = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(each.isfinite().all() for each in one)
    assert other_scale == 8.0
    assert scale == (16.0 if where == "by hand" else 8.0), "each scaler sees its own gradients before they are averaged"


def _more_without_sync(optimizer: Any, model: Net, step: int, worker: int) -> None:
    model.loss(step, worker).backward()
    with optimizer.no_sync():
        model.loss(step + 10, worker).backward()


def _all_without_sync(optimizer: Any, model: Net, step: int, worker: int) -> None:
    model.loss(step + 10, worker).backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model.loss(step, worker).backward()


def _assigned(optimizer: Any, model: Net, step: int, worker: int) -> None:
    model.loss(step + 10, worker).backward()
    params = [*model.dense.parameters()]
    for param, grad in zip(params, torch.autograd.grad(model.loss(step, worker), params), strict=True):
        param.grad = grad


@pytest.mark.parametrize("backward", [_more_without_sync, _all_without_sync, _assigned])
def test_what_comes_after_an_averaged_backward_is_averaged_too(net: Net, backward: Any) -> None:
    def body(dense: str) -> Any:
        def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net)
            plain = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            for step in range(3):
                optimizer.zero_grad()
                backward(optimizer, model, step, worker)
                optimizer.step()
            return model.seen()

        return train

    whole, _ = run_job(body("servers"), 2)
    for got in run_job(body("all_reduce"), 2):
        assert_close(got, whole)


def test_gradients_that_a_script_drops_after_a_step_are_gone(net: Net) -> None:
    """Until they lie in buckets, which stay."""

    def body(fleet_: Fleet, worker: int) -> list[int]:
        model = copy.deepcopy(net)
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        model.loss(0, worker).backward()
        gradients = [weakref.ref(param.grad) for param in model.dense.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [index for index, gradient in enumerate(gradients) if gradient() is not None]

    assert run_job(body, 2) == [[], []]


def test_buffers_are_the_first_worker_s(net: Net) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), sync(dense="all_reduce"), model=model
        )
        fleet_.init_worker()
        each_step(optimizer, model, worker)
        return [each.clone() for each in model.buffers()]

    one, other = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_half_precision_on_the_way(net: Net) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce", wire_dtype="bf16"), model=model)
        fleet_.init_worker()
        each_step(optimizer, model, worker)
        return [each.detach().clone() for each in model.dense.parameters()]

    whole, _ = hybrid_and_servers(net, lambda m: torch.optim.SGD(m.parameters(), 0.1), 2, 1, each_step)
    one, other = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert_close(one, whole[0][: len(one)], 0.05)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("when", ["from the first step on", "in a schedule", "between backward and step", "once"])
def test_the_first_worker_has_the_say_of_options(
    net: Net, mode: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As on servers, where workers have others. The others' scripts find theirs as they were."""

    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net.dense)
            other = worker == 1
            plain = torch.optim.Adam(model.parameters(), 0.2 if other and when.startswith("from") else 0.05)
            strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense=dense)
            optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
            fleet_.init_worker()
            schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5 if other and when == "in a schedule" else 0.9)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step * 10 + worker)
                model(torch.rand(8, 4, generator=generator)).square().mean().backward()
                if (other and when.startswith("between") and step > 2) or (when == "once" and step == 3):
                    plain.param_groups[0]["betas"] = (0.1, 0.2) if other else (0.9, 0.999)
                before = [dict(group, params=[]) for group in plain.param_groups]
                optimizer.step()
                assert [dict(group, params=[]) for group in plain.param_groups] == before
                if when == "once":
                    plain.param_groups[0]["betas"] = (0.9, 0.999)
                optimizer.zero_grad()
                schedule.step()
            model(torch.ones(8, 4)).mean().backward()
            optimizer.step()  # what this brings together is so from here on
            fleet_.barrier_worker()
            return [each.detach().clone() for each in model.parameters()]

        return run

    one, other = run_job(body("all_reduce"), 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "the same bits on both"
    assert caplog.text.count("the options of the first worker's optimizers count") == (when != "once")
    if mode == "sync" and when in ("from the first step on", "in a schedule"):
        assert_close(one, run_job(body("servers"), 2)[0])


def test_two_backwards_through_one_graph(net: Net) -> None:
    """The statistics of a batch norm, which the first one brings from another worker, are in that graph."""

    def train(optimizer: Any, model: Net, worker: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(step, worker)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            (loss * 2).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    check(*hybrid_and_servers(net, lambda each: torch.optim.SGD(each.parameters(), 0.05), 2, 1, train))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_autograd_may_be_off_around_calls(net: Net, off: Callable[[], Any]) -> None:
    """An evaluation at the end of a script turns it off for good; the others still train."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net.dense).eval()
        plain = torch.optim.SGD(model.parameters(), 0.05)
        with off():
            optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
            fleet_.init_worker()
        for step in range(STEPS + worker):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(torch.rand(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            with off():
                optimizer.step()
        with off():
            fleet_.stop_worker()
        return values(model)

    run_job(body, 2)


@pytest.mark.parametrize("what", ["a buffer", "a layout"])
def test_models_that_differ_between_workers(what: str) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Flatten(), torch.nn.Linear(16, 1))
        if what == "a buffer":
            model.register_buffer("seen", torch.zeros(3 + worker))
        elif worker:
            model = model.to(memory_format=torch.channels_last)
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            images = torch.rand(2, 3, 3, 3, generator=torch.Generator().manual_seed(10 * step + worker))
            optimizer.minimize(model(images).square().mean())
        fleet_.barrier_worker()
        return values(model)

    if what == "a buffer":
        with pytest.raises(AssertionError, match="other buffers than that of another worker"):
            run_job(body, 2)
    else:  # gradients travel by their numbers, not by their places
        assert_close(*run_job(body, 2))


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["all", "one"])
def test_a_buffer_that_changes_its_shape(on: list[int]) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = torch.nn.Linear(4, 1)
        model.register_buffer("seen", torch.zeros(3))
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            if step == 3 and worker in on:
                model.seen = torch.full((1,), float(worker))
            optimizer.minimize(model(torch.ones(2, 4)).square().mean())
        fleet_.barrier_worker()
        return values(model)

    if on == [1]:
        with pytest.raises(AssertionError, match="other buffers than that of another worker"):
            run_job(body, 2)
    else:
        assert_close(*run_job(body, 2), 0)


def test_a_gradient_with_a_graph_is_refused(net: Net) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model = copy.deepcopy(net.dense).eval()
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), 0.05), sync(dense="all_reduce"), model=model
        )
        fleet_.init_worker()
        loss = model(torch.rand(8, 4)).square().mean()
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            loss.backward(create_graph=True)
        optimizer.minimize(model(torch.rand(8, 4)).square().mean())

    run_job(body, 2)


def test_what_a_module_keeps_beside_tensors_is_loaded() -> None:
    class Counting(torch.nn.Linear):
        seen: Any = 0

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    def body(fleet_: Fleet, worker: int) -> None:
        model = Counting(4, 1)
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.05), model=model)
        fleet_.init_worker()
        for kept in ({"seen": 3}, torch.ones(2)):
            fleet_.load_state_dict(model, {**fleet_.state_dict(model), "_extra_state": kept})
            assert model.seen is kept

    run_job(body, 2)


def test_values_are_brought_together_when_no_backward_needs_them_any_more(net: Net) -> None:
    """The next of two backwards through one graph would find them changed."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(torch.nn.Sequential(net.dense[0], torch.nn.Tanh(), net.dense[2]))
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.zero_grad()
            found = model(torch.rand(8, 4, generator=torch.Generator().manual_seed(step * 10 + worker)))
            found.square().mean().backward(retain_graph=True)
            found.abs().mean().backward()
            plain.param_groups[0]["lr"] = 0.5 if (worker, step) == (1, 2) else 0.05
            optimizer.step()
        fleet_.barrier_worker()
        return [each.detach().clone() for each in model.parameters()]

    one, other = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def two_tensors(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.tensor, values))


@pytest.mark.pairs(2)
@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        pytest.param(torch.optim.SGD, {"lr": np.float32(0.05)}, {"lr": np.float32(0.5)}, id="numpy's number"),
        pytest.param(torch.optim.Adam, {"lr": torch.tensor(0.05)}, {"lr": 0.5}, id="a tensor, and a number"),
        pytest.param(torch.optim.Adam, {"lr": 0.05}, {"lr": torch.tensor(0.5)}, id="a number, and a tensor"),
        pytest.param(
            torch.optim.Adam,
            {"betas": two_tensors(0.9, 0.99), "foreach": False},
            {"betas": two_tensors(0.5, 0.6), "foreach": False},
            id="tensors in a pair",
        ),
        pytest.param(torch.optim.Adafactor, {"eps": (None, 0.001)}, {"eps": (0.1, 0.1)}, id="none in a pair"),
        pytest.param(torch.optim.Adam, {"foreach": None}, {"foreach": True}, id="none"),
    ],
)
def test_options_of_every_kind_are_the_first_worker_s(
    net: Net, kind: Any, first: dict[str, Any], other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each finds its own, the same objects, after the step."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net.dense)
        plain = kind(model.parameters(), **(other if worker else first))
        group = plain.param_groups[0]
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        before, said = dict(group), repr({**group, "params": []})
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step * 10 + worker)
            optimizer.minimize(model(torch.rand(8, 4, generator=generator)).square().mean())
        assert all(group[name] is value for name, value in before.items())
        assert repr({**group, "params": []}) == said
        fleet_.barrier_worker()
        return [each.detach().clone() for each in model.parameters()]

    one, two = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), "the same bits on both"
    assert caplog.text.count("the options of the first worker's optimizers count") == 1


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as classes that need no schedule do, and steps by that."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param -= param.grad * group["lr"] * group["taken"]


def halving(params: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer whose schedule is a hook of its steps."""
    plain = torch.optim.SGD(params, lr)

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    plain.register_step_post_hook(halve)
    return plain


@pytest.mark.pairs(1)
@pytest.mark.parametrize("make", [Counting, halving])
@pytest.mark.parametrize("apart", ["other options", "the first worker starts again", "the second worker starts again"])
def test_what_steps_change_of_options_stays_changed(net: Net, make: Any, apart: str) -> None:
    """Whether workers have others or not, and for one that starts again."""
    again = {"the first worker starts again": 0, "the second worker starts again": 1}.get(apart)

    def job_of(dies: int | None, rates: tuple[float, float]) -> tuple[list[list[torch.Tensor]], list[Any]]:
        lives = [0, 0]

        def train(fleet_: Fleet, worker: int) -> tuple[list[torch.Tensor], Any]:
            model = copy.deepcopy(net.dense)
            plain = make(model.parameters(), rates[worker])
            optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
            fleet_.init_worker()
            lives[worker] += 1
            for step in range(fleet_.resume_step(), STEPS):
                if (worker, step, lives[worker]) == (dies, 3, 1):
                    leave(fleet_)
                    return come(worker)
                generator = torch.Generator().manual_seed(step * 10 + worker)
                optimizer.minimize(model(torch.rand(8, 4, generator=generator)).square().mean())
            fleet_.barrier_worker()
            options = {name: plain.param_groups[0].get(name) for name in ("lr", "taken")}
            return [each.detach().clone() for each in model.parameters()], options

        def come(worker: int) -> tuple[list[torch.Tensor], Any]:
            fleet_ = Fleet(environ=SOON, network=job.network)
            fleet_.init(UserDefinedRoleMaker(worker, Role.WORKER, 2, job.endpoints))
            result = train(fleet_, worker)
            fleet_.stop_worker()
            return result

        job = Job(train, 2, 1, environ=SOON)
        job.join(job.start())
        assert not [(name, error) for name, error in job.errors.items() if name != f"worker {dies}"]
        return [job.results[worker][0] for worker in range(2)], [job.results[worker][1] for worker in range(2)]

    expected, options = job_of(None, (0.05, 0.05))
    got, found = job_of(again, (0.05, 0.05 if again is not None else 0.5))
    assert all(torch.equal(a, b) for one in got for a, b in zip(one, expected[0], strict=True))
    assert found[0] == options[0]
    assert {**found[1], "lr": 0} == {**options[1], "lr": 0}


# --- Which parameters are trained -------------------------------------------------------------------------------------


def freeze(optimizer: Any, model: Net, step: int, worker: int, how: str) -> None:
    """Train other layers from this step on."""
    first, last = model.dense[0], model.dense[2]
    if how.startswith("unfrozen"):
        first.requires_grad_(step >= 3)
    elif how == "in turns":
        first.requires_grad_(step % 2 == 0)
        last.requires_grad_(step % 2 == 1)
    elif how == "all of them now and then":
        model.dense.requires_grad_(step not in (2, 4))
    elif how == "others on each worker":
        (first if worker else last).requires_grad_(False)
    elif how == "others on each worker from a step on" and step >= 2:
        (last if worker else first).requires_grad_(step == 4)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.pairs(2)
@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("unfrozen", {}, id="unfrozen"),
        pytest.param("unfrozen, in two backwards", {}, id="unfrozen, in two backwards"),
        pytest.param("unfrozen", {"max_grad_norm": 0.05}, id="unfrozen, clipped"),
        pytest.param("in turns", {}, id="in turns"),
        pytest.param("all of them now and then", {}, id="all of them now and then"),
        pytest.param("others on each worker", {}, id="others on each worker"),
        pytest.param("others on each worker from a step on", {}, id="others on each worker from a step on"),
    ],
)
def test_layers_may_be_frozen_and_trained_again(net: Net, workers: int, how: str, options: dict[str, float]) -> None:
    """As on servers, whoever freezes which; what is unfrozen takes part from the same backward on."""

    def make(model: torch.nn.Module) -> Any:
        model.dense[1].requires_grad_(False)
        if how.startswith("unfrozen"):
            model.dense[0].requires_grad_(False)
        return torch.optim.SGD(model.parameters(), 0.1)

    def train(optimizer: Any, model: Net, worker: int) -> None:
        for step in range(STEPS):
            freeze(optimizer, model, step, worker, how)
            optimizer.zero_grad()
            for again in range(2 if "two" in how else 1):
                model.loss(step, worker + again).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    check(*hybrid_and_servers(net, make, workers, 1, train, **options))


@pytest.mark.parametrize("unfreezes", ["once", "from then on"])
def test_one_that_starts_again_has_other_layers_frozen(net: Net, unfreezes: str) -> None:
    """A script unfreezes layers in the midst of its training, and freezes them again where it begins."""
    began = list[int]()

    def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        model.dense[0].requires_grad_(False)
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        dies = worker == 1 and not began
        if worker == 1:
            began.append(fleet_.resume_step())
        for step in range(fleet_.resume_step(), STEPS):
            if step == 2 or (unfreezes != "once" and step > 2):
                model.dense[0].requires_grad_(True)
            if dies and step == 4:
                leave(fleet_)
                return again()
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        return model.seen()

    def again() -> list[torch.Tensor]:
        with worker_1_again(job) as fleet_:
            return train(fleet_, 1)

    job = Job(train, 2, 2, environ=SOON)
    job.join(job.start())
    assert not [(name, error) for name, error in job.errors.items() if name != "worker 1"]  # which never said goodbye
    assert began == [0, 4]
    assert all(torch.equal(a, b) for a, b in zip(job.results[0], job.results[1], strict=True)), (
        "the same bits everywhere"
    )


@pytest.mark.parametrize("where", ["the wrapped optimizer", "the other one, between backward and step"])
def test_those_that_join_after_a_backward_are_averaged_too(net: Net, where: str) -> None:
    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model, late = copy.deepcopy(net), torch.nn.Linear(4, 1)
            torch.nn.init.constant_(late.weight, 0.5)
            torch.nn.init.zeros_(late.bias)
            plain = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            group = {"params": list(late.parameters())}
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = model.loss(step, worker)
                if step >= 2:
                    loss = loss + (late(model.dense[0].weight).square().mean() * (worker + 1))
                if step == 2 and where.startswith("the wrapped"):
                    plain.add_param_group(group)
                loss.backward()  # type: ignore[no-untyped-call]
                if step == 2 and not where.startswith("the wrapped"):
                    optimizer.add_param_group(group)
                optimizer.step()
            fleet_.barrier_worker()
            return [*model.seen(), *(each.detach().clone() for each in late.parameters())]

        return run

    check(run_job(body("all_reduce"), 2), run_job(body("servers"), 2))


def test_parameters_that_join(net: Net) -> None:
    def train(optimizer: Any, model: Net, worker: int) -> None:
        for step in range(STEPS):
            if step == 2:
                late = torch.nn.Linear(4, 1)
                torch.nn.init.constant_(late.weight, 0.5 + worker)
                torch.nn.init.zeros_(late.bias)
                model.dense.append(torch.nn.Identity())
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.1})
            loss = model.loss(step, worker)
            if step >= 2:
                loss = loss + late(model.dense[0].weight).square().mean()
            optimizer.minimize(loss)

    check(*hybrid_and_servers(net, lambda m: torch.optim.SGD(m.parameters(), 0.1), 2, 1, train))


@pytest.mark.pairs(1)
@pytest.mark.parametrize("kind", ["layer", "table"])
@pytest.mark.parametrize("name", ["momentum", "adagrad"])
def test_they_join_an_optimizer_that_has_state_here(net: Net, name: str, kind: str) -> None:
    """That of layers, which stays here; rows have theirs on the servers."""

    def make(model: Net) -> torch.optim.Optimizer:
        if name == "adagrad":
            return torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
        layers = {"params": model.dense.parameters(), "momentum": 0.9}
        return torch.optim.SGD([{"params": [model.open.weight, model.closed.weight]}, layers], lr=0.05)

    def train(optimizer: Any, model: Net, worker: int) -> None:
        late: Any = None
        for step in range(STEPS):
            if step == 2:
                late = (
                    torch.nn.Linear(4, 1) if kind == "layer" else fleet.nn.Embedding(9, 4, initializer="constant(0.2)")
                )
                if kind == "layer":
                    torch.nn.init.constant_(late.weight, 0.5 + worker)
                    torch.nn.init.zeros_(late.bias)
                optimizer.add_param_group({"params": list(late.parameters())})
            loss = model.loss(step, worker)
            if late is not None:
                loss = loss + late(model.dense[0].weight if kind == "layer" else torch.arange(step)).square().mean()
            optimizer.minimize(loss)

    check(*hybrid_and_servers(net, make, 2, 2, train))


@pytest.mark.parametrize("workers", [1, 2])
def test_state_of_layers_from_before_the_job_is_taken_along(workers: int) -> None:
    torch.manual_seed(5)
    start = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))

    def begun(model: Any) -> torch.optim.Optimizer:
        layers = {"params": model[1].parameters(), "momentum": 0.9}
        optimizer = torch.optim.SGD([{"params": model[0].parameters()}, layers], lr=0.1)
        steps(model, optimizer)
        return optimizer

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(3)).square().sum().backward()
            optimizer.step()

    def body(fleet_: Fleet, _: int) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer = fleet_.distributed_optimizer(begun(model), sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        steps(model, optimizer)
        with torch.no_grad():
            return [model[0](torch.arange(9)), *values(model[1])]

    alone = copy.deepcopy(start)
    steps(alone, begun(alone))
    for got in run_job(body, workers):
        assert_close(got, values(alone))


def test_state_of_rows_from_before_the_job_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))
    inner = torch.optim.SGD(
        [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1].parameters()}], 0.1
    )
    model(torch.arange(3)).sum().backward()
    inner.step()
    alone = Fleet(environ={})
    alone.init()
    with pytest.raises(UnsupportedError, match="SGD already has state, which would be lost"):
        alone.distributed_optimizer(inner, sync(dense="all_reduce"), model=model, remote="all")


# --- Other modes ------------------------------------------------------------------------------------------------------


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["async", "half_async", "ssp"])
def test_layers_are_exact_whatever_rows_do(net: Net, mode: str) -> None:
    """Without tables the workers are in step, to the bit where one process is within rounding; and so they are with
    tables, though what these have differs from run to run."""
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense="all_reduce")

    def layers(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        plain = torch.optim.Adam(model.parameters(), 0.01)
        optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    def both(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adagrad(model.parameters(), 0.1)
        optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
        fleet_.init_worker()
        for step in range(STEPS + worker):
            optimizer.minimize(model.loss(step, worker))
            if step == STEPS - 1:
                kept = [each.detach().clone() for each in model.dense.parameters()]
        with torch.no_grad():
            assert not torch.equal(model.closed(torch.arange(30)), net.closed.weight)
        return kept

    for got in run_job(layers, 2, 2):
        assert_close(got, reference(lambda p: torch.optim.Adam(p, 0.01), 2))
    one, other = run_job(both, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_with", ["all_reduce", "servers"])
@pytest.mark.parametrize("loaded_with", ["all_reduce", "servers"])
@pytest.mark.pairs(1)
def test_a_checkpoint_goes_from_either_place_to_either(
    net: Net, tmp_path: Path, saved_with: str, loaded_with: str
) -> None:
    def begin(fleet_: Fleet, dense: str) -> tuple[Net, Any]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
        fleet_.init_worker()
        return model, optimizer

    def straight(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = begin(fleet_, saved_with)
        for step in range(STEPS):
            optimizer.minimize(model.loss(step, worker))
            if step == 2:
                fleet_.save_persistables(str(tmp_path / "saved"))
        fleet_.barrier_worker()
        return model.seen()

    def going_on(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = begin(fleet_, loaded_with)
        assert fleet_.resume_step() == 3
        for step in range(3, STEPS):
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        return model.seen()

    def loading(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        """Worker 1 loads, for both."""
        model, optimizer = begin(fleet_, loaded_with)
        optimizer.minimize(model.loss(9, worker))
        if worker == 1:
            fleet_.load_persistables(str(tmp_path / "saved"))
        fleet_.barrier_worker()
        for step in range(3, STEPS):
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        return model.seen()

    expected = run_job(straight, 2, 2)[0]
    went_on = run_job(going_on, 2, 1, model_dir=str(tmp_path / "saved"))
    for got in (*went_on, *run_job(loading, 2, 2)[1:]):
        assert_close(got, expected)


def test_plain_values_and_models_to_serve(net: Net, tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(2):
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        before = fleet_.state_dict(model)
        optimizer.minimize(model.loss(3, worker))
        assert not torch.equal(before["dense.0.weight"], model.dense[0].weight)
        fleet_.load_state_dict(model, before)
        assert torch.equal(before["dense.0.weight"], model.dense[0].weight)
        fleet_.barrier_worker()
        optimizer.minimize(model.loss(4, worker))
        fleet_.save_inference_model(str(tmp_path / "served"), model)
        served = fleet_.load_inference_model(str(tmp_path / "served"))
        assert torch.equal(served["dense.0.weight"], model.dense[0].weight)
        return fleet_.state_dict(model)

    one, other = run_job(body, 2, 2)
    assert all(torch.equal(one[key], other[key]) for key in one)


# --- Faults -----------------------------------------------------------------------------------------------------------


def threads_of_gloo() -> set[str]:
    """What waits for connections, of groups that there are."""
    found = set()
    for each in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (each / "comm").read_text().startswith("gloo_tcp_loop"):
                found.add(each.name)
    return found


def test_the_others_go_on_without_a_worker_that_dies(net: Net) -> None:
    """It is in nobody's way, wherever the others are, and they are where they would be with their layers on servers.
    The group that it was in goes away, which would look for what nobody reads, and take a core for it."""
    before, during = threads_of_gloo(), set[str]()

    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net)
            plain = torch.optim.Adam(model.parameters(), 0.05)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            for step in range(STEPS):
                if (step, worker) == (3, 1):
                    leave(fleet_)
                    return []
                optimizer.minimize(model.loss(step, worker))
                during.update(threads_of_gloo())
            fleet_.barrier_worker()
            if dense == "all_reduce":
                assert worker_of(fleet_).dense.group.size == 2
            return model.seen()

        return run

    def job(dense: str) -> list[list[torch.Tensor]]:
        first, _, last = run_job(body(dense), 3, 2, environ=SOON)
        return [first, last]

    check(job("all_reduce"), job("servers"))
    until(lambda: threads_of_gloo() <= before)
    assert during - before or not Path("/proc").exists()


@pytest.mark.parametrize("failing", [(3, 3), (3, 0), (0, 3), (1, 0)], ids=["all", "one", "other", "buffers"])
@pytest.mark.pairs(1)
def test_a_round_that_breaks_is_done_over(net: Net, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, int]) -> None:
    """A collective fails on one worker, or on all; it may be over for some of them, which then give the others what has
    come of it. Nothing is lost of any gradient. After the third round two are for buffers, and then comes one for
    gradients."""
    finish, calls = DenseGroup.finish, dict[int, int]()

    def breaking(self: Any, work: Any, device: torch.device) -> None:
        finish(self, work, device)
        if self.number != 1 or self.rounds != 3:
            return
        calls[self._worker] = calls.get(self._worker, 0) + 1
        if calls[self._worker] == failing[self._worker]:
            raise self.broken_by(RuntimeError("a connection broke"))

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        assert worker_of(fleet_).dense.group.number > 1
        return model.seen()

    expected, _ = hybrid_and_servers(net, lambda m: torch.optim.Adam(m.parameters(), 0.05), 2, 1, each_step)
    monkeypatch.setattr(DenseGroup, "finish", breaking)
    got = run_job(body, 2, 1, environ=SOON)
    check(got, expected)


@pytest.mark.parametrize("converts_at", [None, 0, 3], ids=["before", "in the job", "after steps"])
@pytest.mark.pairs(1)
def test_a_round_that_breaks_averages_by_numbers(monkeypatch: pytest.MonkeyPatch, converts_at: int | None) -> None:
    """Gradients lie in buckets as their parameters do, of which none are by places alone."""
    finish, broken = DenseGroup.finish, set[int]()
    torch.manual_seed(5)
    begins = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Flatten(), torch.nn.Linear(16, 1))
    begins[2].weight = torch.nn.Parameter(torch.randn(4, 64)[:1, ::4])  # with gaps
    if converts_at is None:
        begins = begins.to(memory_format=torch.channels_last)
    at: int | None = None

    def breaking(self: Any, work: Any, device: torch.device) -> None:
        finish(self, work, device)
        if self.number == 1 and self.rounds == 3 and self._worker not in broken:
            broken.add(self._worker)
            raise self.broken_by(RuntimeError("a connection broke"))

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(begins)
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            if step == at:
                model.to(memory_format=torch.channels_last)
            images = torch.rand(2, 3, 3, 3, generator=torch.Generator().manual_seed(10 * step + worker))
            optimizer.minimize(model(images).square().mean())
        fleet_.barrier_worker()
        return values(model)

    expected = run_job(body, 2)
    at = converts_at
    check(run_job(body, 2), expected)
    monkeypatch.setattr(DenseGroup, "finish", breaking)
    got = run_job(body, 2, environ=SOON)
    assert broken == {0, 1}
    check(got, expected)


def test_a_worker_that_dies_before_it_clips(net: Net) -> None:
    """The others clip by what they push without it."""

    def body(dense: str) -> Callable[[Fleet, int], list[torch.Tensor]]:
        def run(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            model = copy.deepcopy(net)
            plain = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = fleet_.distributed_optimizer(plain, sync(dense=dense), model=model)
            fleet_.init_worker()
            for step in range(STEPS):
                optimizer.zero_grad()
                model.loss(step, worker).backward()  # type: ignore[no-untyped-call]
                if (step, worker) == (3, 1):
                    leave(fleet_)
                    return []
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            fleet_.barrier_worker()
            return model.seen()

        return run

    first, _, last = run_job(body("all_reduce"), 3, 2, environ=SOON)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not torch.equal(first[0], net.dense[0].weight)


def steps_slowly_while(alone: bool) -> None:
    """Leave a core to who is to come."""
    time.sleep(0.005 * alone)


class Coming:
    """A job of two workers, to which another one comes: one that was killed and starts again, or a third one."""

    def __init__(self, net: Net, mode: str, *, elastic: bool, backwards: int) -> None:
        self.net, self.mode, self.elastic, self.backwards = net, mode, elastic, backwards
        self.job = Job(self.body, 2, 2, environ=SOON)

    def begin(self, fleet_: Fleet) -> tuple[Net, Any]:
        model = copy.deepcopy(self.net)
        more = {"elastic": True} if self.elastic else {}
        strategy = getattr(StrategyFactory, f"create_{self.mode}_strategy")(dense="all_reduce", **more)
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.05), strategy, model=model)
        fleet_.init_worker()
        return model, optimizer

    def body(self, fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = self.begin(fleet_)
        for step in range(3):
            self.step(model, optimizer, step, worker)
        if worker == 0:
            return self.train(fleet_, model, optimizer)
        if self.elastic:
            self.third = threading.Thread(target=self.come, args=(2, 3), name="job-work-2", daemon=True)
            self.third.start()
            return self.train(fleet_, model, optimizer)
        leave(fleet_)
        self.come(1, 2)
        return []

    def step(self, model: Net, optimizer: Any, step: int, worker: int) -> None:
        optimizer.zero_grad()
        for _ in range(self.backwards):
            model.loss(step, worker).backward()
        optimizer.step()

    def come(self, worker: int, of: int) -> None:
        fleet_ = Fleet(environ=SOON, network=self.job.network)
        fleet_.init(UserDefinedRoleMaker(worker, Role.WORKER, of, self.job.endpoints))
        torch.nn.init.constant_(self.net.dense[0].weight, 7.0)  # which nobody else has
        model, optimizer = self.begin(fleet_)
        self.came = self.train(fleet_, model, optimizer)
        fleet_.stop_worker()

    def train(self, fleet_: Fleet, model: Net, optimizer: Any) -> list[torch.Tensor]:
        """Until all have taken five steps together in a group that is complete."""
        group = worker_of(fleet_).dense.group
        while group.number == 1 or group.size < 2 + self.elastic or group.rounds_here < 5 * self.backwards:
            steps_slowly_while(group.size < 2 + self.elastic)
            self.step(model, optimizer, group.rounds, 0)
        state = optimizer.state[model.dense[0].weight]
        return [*(each.detach().clone() for each in model.dense.parameters()), state["exp_avg"], state["step"].clone()]


@pytest.mark.parametrize(
    ("mode", "elastic", "backwards"),
    [
        pytest.param("sync", False, 1, id="sync again"),
        pytest.param("ssp", False, 1, id="ssp again"),
        pytest.param("async", False, 1, id="async again"),
        pytest.param("async", True, 1, id="async elastic"),
        pytest.param("half_async", False, 1, id="half_async again"),
        pytest.param("half_async", True, 1, id="half_async elastic"),
        pytest.param("half_async", False, 2, id="half_async again, two backwards"),
    ],
)
@pytest.mark.pairs(2)
def test_a_worker_that_comes_gets_everything_from_another_one(
    net: Net, mode: str, elastic: bool, backwards: int
) -> None:
    """One that starts again may be there before the others have noticed that it was gone, amid their step."""
    coming = Coming(net, mode, elastic=elastic, backwards=backwards)
    job = coming.job
    if not elastic:  # worker 1's first process never says goodbye, and its second one does
        job.join(job.start())
        assert {name: error for name, error in job.errors.items() if name != "worker 1"} == {}
        results = [job.results[0]]
    else:
        results = job.run()
        job.join([coming.third])
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, coming.came, strict=True))
    assert float(coming.came[-1]) > 7
    assert not (coming.came[0] > 5).any()


@pytest.mark.parametrize(
    ("amid", "late"),
    [
        pytest.param(False, False, id="between steps"),
        pytest.param(True, False, id="amid a step"),
        pytest.param(True, True, id="amid a step, and heard of in the next backward"),
    ],
)
@pytest.mark.pairs(1)
def test_a_synchronous_job_ends_where_it_would_with_a_worker_that_starts_again(
    net: Net, amid: bool, late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rows that it had not pushed in a step that the others have taken with it. One of these may hear late that
    it was gone: in a backward, which needs the parameters as they are."""
    began, end_step = list[int](), DenseTraining.end_step

    def end_late(self: DenseTraining) -> None:
        """As with a heartbeat that comes a moment later."""
        if (self.group._worker, self._steps) == (2, 4):
            until(lambda: self.group.must_meet)
            self._be_between_steps()
            self._is_ending = False
        else:
            end_step(self)

    def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        plain = torch.optim.Adam(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        dies = worker == 1 and not began
        if worker == 1:
            began.append(fleet_.resume_step())
        for step in range(fleet_.resume_step(), STEPS):
            if dies and step == 3:
                if amid:
                    model.loss(step, worker).backward()
                leave(fleet_)
                return again()
            optimizer.minimize(model.loss(step, worker))
        fleet_.barrier_worker()
        return model.seen()

    def again() -> list[torch.Tensor]:
        with torch.no_grad():
            net.dense[0].weight.zero_()  # which nobody else has
        with worker_1_again(job) as fleet_:
            return train(fleet_, 1)

    expected, _ = hybrid_and_servers(net, lambda m: torch.optim.Adam(m.parameters(), 0.05), 3, 2, each_step)
    if late:
        monkeypatch.setattr(DenseTraining, "end_step", end_late)
    job = Job(train, 3, 2, environ=SOON)
    job.join(job.start())
    assert not [(name, error) for name, error in job.errors.items() if name != "worker 1"]  # which never said goodbye
    assert began == [0, 3 + amid]
    first, last = job.results[0], job.results[2]
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True)), "the same bits everywhere"
    if amid:
        assert any(not torch.allclose(a, b) for a, b in zip(first, expected[0], strict=True))
    else:
        assert_close(first, expected[0])
    assert ("worker 1 goes on after step 4: the others have taken 1 without this process" in caplog.text) is amid


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["sync", "half_async"])
@pytest.mark.parametrize("amid", ["before it clips", "between two backwards"])
def test_one_that_starts_again_does_not_come_amid_a_step(net: Net, mode: str, amid: str) -> None:
    """It knows nothing of what the others have done of that. They take it without this worker, and meet it then."""
    lives: list[int] = []

    def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net)
        strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense="all_reduce")
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
        fleet_.init_worker()
        group = worker_of(fleet_).dense.group
        dies = worker == 1 and not lives
        lives.extend([1] * (worker == 1))
        step = fleet_.resume_step()
        while not (group.number > 1 and group.size == 3 and group.rounds_here >= 8):
            steps_slowly_while(group.size < 3)
            optimizer.zero_grad()
            model.loss(step, worker).backward()
            if dies and step == 3:
                leave(fleet_)
                return again()
            if amid == "before it clips":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                model.loss(step, worker).backward()
            optimizer.step()
            step += 1
        return [each.detach().clone() for each in model.dense.parameters()]

    def again() -> list[torch.Tensor]:
        with worker_1_again(job) as fleet_:
            return train(fleet_, 1)

    job = Job(train, 3, 2, environ=SOON)
    job.join(job.start())
    assert not [(name, error) for name, error in job.errors.items() if name != "worker 1"]  # which never said goodbye
    assert all(torch.equal(a, b) for a, b in zip(job.results[0], job.results[2], strict=True))


def test_what_workers_do_together_has_a_place_of_its_own(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server hears late how far each is. Where one still seems to be in what another one is through with,
    that is no other thing at the same place, of which nobody would ever come to the end."""
    done: dict[tuple[int, int], set[str]] = {}

    def noted(group: int, place: int = 0, awaits: str = "") -> Together:
        if awaits:
            done.setdefault((group, place), set()).add(awaits)
        return Together(group, place, awaits)

    monkeypatch.setattr("fleet.ps.worker.dense_group.Together", noted)

    def body(fleet_: Fleet, worker: int) -> None:
        model, late = copy.deepcopy(net), torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), 0.2 if worker == 1 else 0.05)
        strategy = sync(dense="all_reduce", max_grad_norm=0.05)
        optimizer = fleet_.distributed_optimizer(plain, strategy, model=model)
        fleet_.init_worker()
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(late.parameters())})
                if worker == 1:
                    fleet_.load_state_dict(model, fleet_.state_dict(model))
            if worker == 1 and step == 3:
                break
            loss = model.loss(step, worker) + (late(torch.ones(4)).sum() if step > 1 else 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run_job(body, 2)
    assert all(len(things) == 1 for things in done.values()), done
    assert {thing for things in done.values() for thing in things} == {
        "an average of gradients",
        "the norm of gradients of rows",
        "the options of a step",
        "the values of parameters that join",
        "the values to go on from",
        "values that have been replaced",
    }


@pytest.mark.parametrize("dies", [False, True])
def test_one_leaves_the_others_whose_options_differ(net: Net, dies: bool) -> None:
    """It says goodbye, or is gone between its backward and its step."""

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(net.dense)
        plain = torch.optim.SGD(model.parameters(), 0.2 if worker == 1 else 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            if worker == 2 and step == 3 and not dies:
                break
            model(torch.full((8, 4), 0.1 * step)).square().mean().backward()
            if worker == 2 and step == 3:
                leave(fleet_)
                break
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().clone() for each in model.parameters()]

    one, other, _ = run_job(body, 3, environ=SOON)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_one_that_starts_again_where_layers_have_joined_is_refused(net: Net) -> None:
    """It does not know of them, and could get them from the others only when it did. These go on without it."""
    refused: list[FleetError] = []

    def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, late = copy.deepcopy(net), torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = fleet_.distributed_optimizer(plain, sync(dense="all_reduce"), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": list(late.parameters())})
            if worker == 1 and step == 3:
                leave(fleet_)
                return again()
            optimizer.minimize(model.loss(step, worker) + late(model.dense[0].weight).square().mean())
        fleet_.barrier_worker()
        return model.seen()

    def again() -> list[torch.Tensor]:
        fleet_ = Fleet(environ=SOON, network=job.network)
        fleet_.init(UserDefinedRoleMaker(1, Role.WORKER, 2, job.endpoints))
        with pytest.raises(
            UnsupportedError, match="worker 1 cannot start again where parameters have joined"
        ) as caught:
            train(fleet_, 1)
        refused.append(caught.value)
        return []

    job = Job(train, 2, 2, environ=SOON)
    job.join(job.start())
    assert {name: error for name, error in job.errors.items() if name != "worker 1"} == {}
    assert refused
    assert job.results[0]


# --- What is refused --------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused() -> None:
    factory = StrategyFactory
    for make in (sync, factory.create_async_strategy, factory.create_half_async_strategy, factory.create_ssp_strategy):
        assert make(dense="all_reduce").dense == "all_reduce"
        with pytest.raises(ConfigurationError, match="dense is unknown"):
            make(dense="elsewhere")
    with pytest.raises(ArgumentTypeError, match="dense must be a str"):
        sync(dense=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="delay compensation"):
        factory.create_async_strategy(dense="all_reduce", dc_asgd_lambda=0.5)
    with pytest.raises(TypeError, match="dense"):
        factory.create_geo_strategy(dense="all_reduce")  # type: ignore[call-arg]


def test_sparse_gradients_of_a_modules_own_parameters_are_refused_by_name() -> None:
    """Nobody can average them; one worker alone averages nothing."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.ones(4, 2))

    def body(fleet_: Fleet, worker: int) -> None:
        model = Own()
        optimizer = fleet_.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), sync(dense="all_reduce"), model=model
        )
        fleet_.init_worker()
        found = torch.nn.functional.embedding(torch.tensor([worker]), model.rows, sparse=True)
        optimizer.minimize(found.sum())

    run_job(body, 1, 1)
    job = Job(body, 2, 1)
    job.join(job.start())
    assert any("the gradient of 'rows' is sparse" in str(job.errors[f"worker {each}"]) for each in range(2))
    assert any(isinstance(job.errors[f"worker {each}"], UnsupportedError) for each in range(2))


@pytest.mark.parametrize("mode", ["sync", "async", "half_async", "ssp"])
def test_sparse_gradients_of_a_modules_own_parameters_are_looked_at(mode: str) -> None:
    """For NaN and infinity, where one worker alone has them."""

    def trained(model: torch.nn.Module, optimizer: Any, factors: list[float]) -> tuple[float, torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for factor in factors:
            optimizer.zero_grad()
            found = torch.nn.functional.embedding(torch.tensor([1, 2, 1]), model.get_parameter("rows"), sparse=True)
            scaler.scale(found.sum() * factor).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), model.get_parameter("rows").detach().clone()

    def made() -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Module()
        model.rows = torch.nn.Parameter(torch.ones(4, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(fleet_: Fleet, worker: int) -> tuple[float, torch.Tensor]:
        model, sgd = made()
        strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense="all_reduce", check_finite=True)
        optimizer = fleet_.distributed_optimizer(sgd, strategy, model=model)
        fleet_.init_worker()
        got = trained(model, optimizer, [1.0, torch.inf, 2.0])
        found = torch.nn.functional.embedding(torch.tensor([3]), model.get_parameter("rows"), sparse=True)
        with pytest.raises(NonFiniteGradientError, match="the gradient of 'rows' holds NaN or infinity"):
            optimizer.minimize(found.sum() * torch.nan)
        return got

    ((scale, rows),) = run_job(body)
    expected_scale, expected = trained(*made(), [1.0, torch.inf, 2.0])
    assert scale == expected_scale == 8.0
    torch.testing.assert_close(rows, expected)


def test_the_config_says_it_too() -> None:
    config = DistributeTranspilerConfig()
    with pytest.raises(ConfigurationError, match="dense is unknown"):
        config.dense = "nowhere"
    config.dense = "all_reduce"

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = copy.deepcopy(TEMPLATE)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), config, model=model)
        fleet_.init_worker()
        optimizer.minimize(loss_of(model, 0, worker))
        assert fleet_.summary()["tables"] == {}
        return values(model)

    one, other = run_job(body, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    config.sync_mode, config.geo_sgd_mode = False, True
    alone = Fleet(environ={})
    alone.init()
    with pytest.raises(ConfigurationError, match="exclude each other"):
        alone.distributed_optimizer(torch.optim.SGD(make_model().parameters(), 0.1), config)


def test_an_optimizer_that_needs_its_closure_is_refused(net: Net) -> None:
    alone = Fleet(environ={})
    alone.init()
    with pytest.raises(UnsupportedError, match="LBFGS cannot be honoured"):
        alone.distributed_optimizer(torch.optim.LBFGS(net.dense.parameters()), sync(dense="all_reduce"))
