"""Workers that average dense gradients and wait for different things are told so, and nobody waits without end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SOON, Job, run_job
from inside import worker_of
from test_hybrid import Net
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fleet import Fleet, StrategyFactory
from fleet.averaging.communicators import done_within
from fleet.base.clock import SystemClock
from fleet.errors import FleetError
from fleet.ps.server.standstill import Wait, is_standstill
from fleet.ps.worker.connection import Whereabouts
from fleet.ps.worker.dense_group import DenseGroup, GroupBrokenError, _own_store

QUICK = {**SOON, "FLAGS_rpc_deadline": "60000"}

Act = Callable[[Fleet, Any, Net], object]


def begin(fleet_: Fleet, mode: str = "sync") -> tuple[Net, Any]:
    torch.manual_seed(5)
    model = Net()
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")(dense="all_reduce")
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy, model=model)
    fleet_.init_worker()
    return model, optimizer


def step(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    optimizer.minimize(model.loss(0, 0))


def barrier(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    fleet_.barrier_worker()


def reduction(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    fleet_.all_reduce_worker(1)


def two_backwards(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    model.loss(0, 0).backward()  # type: ignore[no-untyped-call]
    step(fleet_, optimizer, model)


def clipping(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    model.loss(0, 0).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def joining(fleet_: Fleet, optimizer: Any, model: Net) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


AVERAGE, NORM, JOIN = "an average of gradients", "the norm of gradients of rows", "the values of parameters that join"


@pytest.mark.parametrize(
    ("mode", "one", "other", "named"),
    [
        ("sync", barrier, step, f"workers [0] in barrier 1, workers [1] in {AVERAGE}"),
        ("sync", step, barrier, f"workers [1] in barrier 1, workers [0] in {AVERAGE}"),
        ("async", reduction, step, f"workers [0] in all_reduce 1 (sum), workers [1] in {AVERAGE}"),
        ("ssp", barrier, clipping, f"workers [0] in barrier 1, workers [1] in {AVERAGE}"),
        ("sync", two_backwards, step, f"workers [1] in step 2, workers [0] in {AVERAGE}"),
        ("sync", clipping, step, f"workers [1] in step 2, workers [0] in {NORM}"),
        ("async", clipping, step, f"workers [0] in {NORM}, workers [1] in {AVERAGE}"),
        ("half_async", step, clipping, f"workers [0] in {AVERAGE}, workers [1] in {NORM}"),
        ("sync", joining, step, f"workers [0] in {JOIN}, workers [1] in {AVERAGE}"),
        ("sync", step, joining, f"workers [1] in step 2, workers [0] in {AVERAGE}"),
        ("sync", barrier, joining, "workers [0] in barrier 1, workers [1] in step 2"),
    ],
)
def test_workers_that_wait_for_different_things_hear_of_both(mode: str, one: Act, other: Act, named: str) -> None:
    """After one step that all take, each does something else, and goes on."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = begin(fleet_, mode)
        step(fleet_, optimizer, model)
        (one, other)[worker](fleet_, optimizer, model)
        for _ in range(3):
            step(fleet_, optimizer, model)

    job = Job(body, 2, environ=QUICK)
    job.join(job.start())
    assert sorted(job.errors) == ["server 0", "worker 0", "worker 1"]
    for error in job.errors.values():
        assert isinstance(error, FleetError)
        assert "the workers wait for each other" in str(error)
        assert named in str(error)


def test_three_of_which_one_is_elsewhere() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = begin(fleet_)
        for _ in range(2 if worker == 1 else 4):
            step(fleet_, optimizer, model)
        if worker == 1:
            fleet_.barrier_worker()

    job = Job(body, 3, 2, environ=QUICK)
    job.join(job.start())
    for worker in range(3):
        told = str(job.errors[f"worker {worker}"])
        assert f"workers [1] in barrier 1, workers [0, 2] in {AVERAGE}" in told
        assert "stop_worker()" in told


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_does_nothing_for_a_while_is_waited_for(mode: str) -> None:
    """One that evaluates, has no data at all, or stops between a backward and its step."""

    def body(fleet_: Fleet, worker: int) -> int:
        model, optimizer = begin(fleet_, mode)
        if worker == 0:  # evaluates, and has no data
            with torch.no_grad():
                model.loss(0, 0)
            return 0
        for _ in range(2):
            step(fleet_, optimizer, model)
        if worker == 1:
            model.loss(0, 1).backward()  # type: ignore[no-untyped-call]
            return 0
        for _ in range(3):
            step(fleet_, optimizer, model)
        fleet_.barrier_worker()
        size: int = worker_of(fleet_).dense.group.size
        return size

    assert run_job(body, 3, environ=QUICK) == [0, 0, 1]


def test_a_forward_that_raises_ends_the_job_for_all() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = begin(fleet_)
        for place in range(3):
            if (place, worker) == (1, 0):
                raise ValueError("no such batch")
            step(fleet_, optimizer, model)

    job = Job(body, 2, environ=QUICK)
    job.join(job.start())
    assert isinstance(job.errors["worker 0"], ValueError)
    assert "no such batch" in str(job.errors["worker 1"])


GATHERS = Wait("barrier 1", (1, 4), gathers=True)
STEPS = Wait("step 3", (1, 4))
MEETS = Wait("step 3", (1, 4), meets=True)


def among(place: int, what: str = AVERAGE, group: int = 1) -> Wait:
    return Wait(what, (group, place), among=True)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([], False),
        ([GATHERS], False),  # another one is not there yet
        ([GATHERS, STEPS], True),
        ([STEPS, STEPS], False),
        ([GATHERS, among(4)], True),
        ([STEPS, among(4)], True),
        ([GATHERS, among(3)], False),  # that was before: it has gone on since
        ([GATHERS, among(4, group=2)], False),
        ([among(4), among(4)], False),
        ([among(4), among(5)], False),
        ([among(4), among(4, NORM)], True),
        ([MEETS, among(4)], False),
        ([MEETS, GATHERS], True),
        ([MEETS, STEPS], False),
    ],
)
def test_what_is_a_standstill(waits: list[Wait], expected: bool) -> None:
    assert is_standstill(dict(enumerate(waits)), range(2)) is expected
    if expected:
        assert not is_standstill(dict(enumerate(waits)), range(3)), "one who does not wait may go on"


class Ended:
    """A collective that ends just after the time to wait for it is over."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure
        self._has_ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self._has_ended = True
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        return self._has_ended


def test_a_collective_that_ends_when_the_time_to_wait_is_over_has_ended() -> None:
    assert done_within(Ended(), 0.1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        done_within(Ended("Connection closed by peer"), 0.1)  # type: ignore[arg-type]


def test_a_store_that_has_gone_is_not_asked_again() -> None:
    """Its connection is not made again, and torch writes a trace of each attempt: who finds it so meets the others."""
    port, own = _own_store("127.0.0.1")
    come = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    first: Any = SimpleNamespace(failure=None, broken_group=0, clock=SystemClock(), deadline_s=1.0)
    connections: Any = SimpleNamespace(by_server=[first])
    group = DenseGroup(connections, Whereabouts(), 1, nullcontext(), lambda call: call(), str)
    group.size = 2
    store = PrefixStore("1", come)
    store.set("here 1", "")
    del own
    with pytest.raises(GroupBrokenError):
        group._repeated(lambda: group._await_all(store))
    assert group.is_broken
