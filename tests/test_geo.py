"""GEO: workers train on their own, add up their changes, and take in those of the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, SOON, Job, assert_close, run_job, values
from inside import leave, move_given, refresh
from test_edits import Interrupts
from test_parity_dense import OPTIMIZERS, loss_of, make_model, reference

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import ArgumentTypeError, ConfigurationError, DeadlineError, FleetError, StateError
from fleet.ps.table import given
from fleet.ps.table.changes import Changes
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Channel, Handler, Listener, Respond
from fleet.ps.worker.geo_replica import Replica
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.transpiler import DistributeTranspilerConfig

STEPS = 7

geo = StrategyFactory.create_geo_strategy


class Turns:
    """Steps of several workers, one after the other: worker 0's first, worker 1's first, worker 0's second …"""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._next = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next % self._workers == worker, 20)
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()


class Watched:
    """A loopback network that keeps what was asked and answered, as (request, reply)."""

    def __init__(self, kind: str) -> None:
        self._network = LoopbackNetwork()
        self._kind = kind
        self.seen: list[tuple[Frame, Frame]] = []

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        def watched(frame: Frame, respond: Respond) -> None:
            def answer(reply: Frame) -> None:
                if frame.message.WhichOneof("kind") == self._kind:
                    self.seen.append((frame, reply))
                respond(reply)

            handler(frame, answer)

        return self._network.listen(endpoint, watched)

    def connect(self, endpoint: Endpoint) -> Channel:
        return self._network.connect(endpoint)


class Both(torch.nn.Module):
    """A table of any id and a dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = fleet.nn.Embedding(None, 3, initializer="constant(0.5)")
        self.dense = torch.nn.Linear(3, 1)

    def loss(self, step: int, worker: int = 0) -> torch.Tensor:
        ids = torch.tensor([step % 3, 7, step % 3, 10 + step % 2 + worker])
        return (self.dense(self.table(ids)) - worker - 1).square().mean()


class Plain(torch.nn.Module):
    """The same without servers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding.from_pretrained(torch.full((16, 3), 0.5), freeze=False, sparse=True)
        self.dense = torch.nn.Linear(3, 1)

    loss = Both.loss


# --- One worker: plain torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adamw", "adagrad", "rmsprop"])
@pytest.mark.pairs
def test_one_worker_is_plain_torch(name: str, every: int, servers: int) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS[name](list(model.parameters())), geo(every), model=model)
        fleet_.init_worker()
        for step in range(6):
            optimizer.minimize(loss_of(model, step, worker))
        return values(model)

    (got,) = run_job(body, 1, servers)
    for ours, theirs in zip(got, reference(OPTIMIZERS[name], 1), strict=True):
        assert torch.equal(ours, theirs), "to the bit"


Make = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]

MAKES: dict[str, Make] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "sparse adam": lambda model: [
        torch.optim.SparseAdam(list(model.table.parameters()), lr=0.05),
        torch.optim.Adam(model.dense.parameters(), lr=0.05),
    ],
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", MAKES)
def test_one_worker_with_a_table_is_plain_torch(name: str, every: int) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Both()
        optimizer = fleet_.distributed_optimizer(MAKES[name](model), geo(every), model=model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(model.loss(step))
            schedule.step()
        return [*values(model), model.table(torch.arange(12)).detach()]

    plain = Plain()
    optimizers = MAKES[name](plain)
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4) for optimizer in optimizers]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    (got,) = run_job(body, 1, 2)
    assert_close(got, [p.detach() for p in plain.dense.parameters()] + [plain.table.weight.detach()[:12]])


def test_what_the_servers_hold_at_the_end_is_what_the_worker_has(tmp_path: Path) -> None:
    """``stop_worker`` brings the rest of the steps; a second job reads what the first left."""

    def train(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Both()
        optimizer = fleet_.distributed_optimizer(MAKES["sgd"](model), geo(4), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(model.loss(step))
        fleet_.save_persistables(str(tmp_path))
        return [*values(model), model.table(torch.arange(12)).detach()]

    def read(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Both()
        fleet_.distributed_optimizer(MAKES["sgd"](model), model=model)
        fleet_.init_worker()
        return [*values(model), model.table(torch.arange(12)).detach()]

    (trained,) = run_job(train, 1, 2)
    (found,) = run_job(read, 1, 1, model_dir=str(tmp_path))
    assert_close(found, trained)


# --- Several workers: the formula -------------------------------------------------------------------------------------


class Formula:
    """What the servers and the workers hold, by the rule, for one vector of numbers that every worker trains by SGD."""

    def __init__(self, start: np.ndarray, workers: int) -> None:
        self.server = start.copy()
        self.mine = [start.copy() for _ in range(workers)]
        self.old = [start.copy() for _ in range(workers)]

    def agree(self, worker: int) -> None:
        change = (self.mine[worker] - self.old[worker]) / np.float32(len(self.mine))
        self.old[worker] += change
        self.server += change
        self.mine[worker] += self.server - self.old[worker]
        self.old[worker] = self.server.copy()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_take_turns_follow_the_formula(workers: int, every: int, servers: int) -> None:
    """Dense parameters and rows; every worker pulls towards another target."""
    turns, ids, rate, everybody = Turns(workers), torch.arange(4), 0.25, threading.Barrier(workers)

    def body(fleet_: Fleet, worker: int) -> np.ndarray:
        weight = torch.nn.Parameter(torch.arange(4.0))
        table = fleet.nn.Embedding(None, 1, initializer="constant(2.0)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=rate), geo(every))
        fleet_.init_worker()
        table(ids)  # held from here on: all begin with the same rows
        everybody.wait(20)
        for _ in range(STEPS):
            with turns.of(worker):
                both = torch.cat([weight, table(ids)[:, 0]])
                optimizer.minimize(((both - worker) ** 2).sum() / 2)
        return np.concatenate([weight.detach().numpy(), table(ids)[:, 0].detach().numpy()])

    formula = Formula(np.concatenate([np.arange(4), np.full(4, 2)]).astype(np.float32), workers)
    for step in range(STEPS):
        for worker in range(workers):
            formula.mine[worker] -= np.float32(rate) * (formula.mine[worker] - worker)
            if step % every == every - 1:
                formula.agree(worker)
    for got, expected in zip(run_job(body, workers, servers), formula.mine, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_a_late_worker_begins_with_what_the_others_have_reached() -> None:
    done = threading.Event()

    def body(fleet_: Fleet, worker: int) -> tuple[float, float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0), geo(2))
        if worker == 1:
            assert done.wait(20)
        fleet_.init_worker()
        begin = weight[0].item(), table(torch.tensor([3]))[0, 0].item()
        for _ in range(4 if worker == 0 else 2):
            optimizer.minimize(weight.sum() + table(torch.tensor([3])).sum())
        done.set()
        return begin

    # Half of two steps; then half of two more and of the half that was kept back.
    assert run_job(body, 2, 2)[1] == (-2.5, -2.5)


# --- What travels -----------------------------------------------------------------------------------------------------


def test_only_touched_rows_go_out_and_only_rows_that_others_changed_come_back() -> None:
    network, turns = Watched("push"), Turns(2)
    batches = {0: [[1, 2], [2, 3]], 1: [[3, 4], [9, 9]]}

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), geo(1))
        fleet_.init_worker()
        for ids in batches[worker]:
            with turns.of(worker):
                optimizer.minimize(table(torch.tensor(ids)).sum())

    run_job(body, 2, 1, network=network)
    sent, told = [], []
    for request, reply in network.seen:
        sent.append(sorted(request.tensors[0].numpy().tolist()))
        told.append(sorted(reply.tensors[0].numpy().tolist()) if reply.message.changed else [])
    assert sent == [[1, 2], [3, 4], [2, 3], [9]]
    # Worker 0 read row 3 after worker 1 had changed it, and changes it then: worker 1, which holds it, is told.
    assert told == [[], [], [], [3]]


def test_rows_that_are_held_are_not_asked_for_again() -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 2, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), geo(3))
        fleet_.init_worker()
        for last in (3, 3, 4):
            optimizer.minimize(table(torch.tensor([1, 2, last])).sum())
        table.eval()
        for _ in range(2):
            assert table(torch.tensor([1, 50]))[:, 0].tolist() == [-3.0, 0.0]

    run_job(body, 1, 1, network=network)
    asked = [request.tensors[0].numpy().tolist() for request, _ in network.seen if request.message.pull.tables]
    assert asked == [[1, 2, 3], [4], [50], [50]], "what is only evaluated is not held"


def test_a_block_that_did_not_change_stays_at_home() -> None:
    network = Watched("push")

    def body(fleet_: Fleet, worker: int) -> None:
        used, idle = (torch.nn.Parameter(torch.zeros(5)) for _ in range(2))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([used, idle], lr=1.0), geo(2))
        fleet_.init_worker()
        for _ in range(4):
            optimizer.minimize(used.sum() + 0 * idle.sum())

    run_job(body, 1, 1, network=network)
    assert [bytes(request.message.push.present) for request, _ in network.seen] == [b"\1\0"] * 2


def test_traffic_falls_with_the_update_frequency() -> None:
    def traffic(every: int) -> int:
        network = Watched("push")

        def body(fleet_: Fleet, worker: int) -> None:
            model = Both()
            optimizer = fleet_.distributed_optimizer(MAKES["sgd"](model), geo(every), model=model)
            fleet_.init_worker()
            for step in range(24):
                optimizer.minimize(model.loss(step))

        run_job(body, 1, 1, network=network)
        return sum(len(piece) for both in network.seen for frame in both for piece in frame.pieces())

    by_frequency = [traffic(every) for every in (1, 2, 4, 8, 24)]
    assert by_frequency == sorted(by_frequency, reverse=True)
    assert by_frequency[0] > 6 * by_frequency[3]


@pytest.mark.parametrize("action", [Action.DROP_REPLY, Action.DROP_REQUEST, Action.DUPLICATE])
def test_a_push_that_is_repeated_is_added_once_and_tells_the_same_rows(action: Action) -> None:
    """Row 3 is changed by worker 0; worker 1, whose answer that tells it so is lost, has to learn it nevertheless."""
    network, turns = FaultyNetwork(LoopbackNetwork(), Fault(action, kind="push", worker=1, step=2)), Turns(2)
    everybody = threading.Barrier(2)

    def body(fleet_: Fleet, worker: int) -> tuple[float, float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=2.0), geo(1))
        fleet_.init_worker()
        table(torch.tensor([3]))
        everybody.wait(20)
        for _ in range(2):
            with turns.of(worker):
                optimizer.minimize(weight.sum() + table(torch.tensor([3])).sum())
        return weight[0].item(), table(torch.tensor([3]))[0, 0].item()

    formula = Formula(np.zeros(1, np.float32), 2)
    for worker in (0, 1, 0, 1):
        formula.mine[worker] -= 2
        formula.agree(worker)
    assert run_job(body, 2, 1, network=network)[1] == (formula.mine[1][0], formula.mine[1][0])
    assert [kind for _, kind, _ in network.struck] == ["push"]


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize(("every", "short"), [(1, None), (2, None), (3, 3)])
def test_a_worker_killed_between_two_servers_takes_its_steps_once(server: int, every: int, short: int | None) -> None:
    """The process after it takes them again. One server has them and counts no others, and so does the worker."""
    environ = {**PATIENT, "FLEET_HEARTBEAT_S": "0.1", "FLEET_JOB_ID": "one"}
    steps = 6 if short is None else 7

    def trains(made: Fleet, short: int | None = None) -> Any:
        model = torch.nn.ModuleDict(
            {"line": torch.nn.Linear(100, 100), "rows": fleet.nn.Embedding(9, 2, initializer="zeros")}
        )
        with torch.no_grad():
            for parameter in model["line"].parameters():
                parameter.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped = made.distributed_optimizer(optimizer, geo(every), model=model)
        made.init_worker()
        for step in range(made.resume_step(), steps):
            of_rows = model["rows"](torch.arange(9)).sum()
            wrapped.minimize(sum(each.sum() for each in model["line"].parameters()) + of_rows)
            if step == short:
                made.barrier_worker()  # sends what there is
        return model

    def body(made: Fleet, index: int) -> Any:
        lost = Fault(
            Action.DROP_REQUEST, endpoint=Endpoint.parse(job.endpoints[server]), kind="push", step=2, times=None
        )
        first = Fleet(environ={**environ, "FLAGS_rpc_retry_times": "0"}, network=FaultyNetwork(job.network, lost))
        first.init(UserDefinedRoleMaker(0, Role.WORKER, 1, job.endpoints))
        with pytest.raises(DeadlineError, match="push of step 2"):
            trains(first, short)
        leave(first)
        model = trains(made)
        here = [*values(model["line"]), model["rows"](torch.arange(9)).detach()]
        refresh(made)
        return here, [*values(model["line"]), model.state_dict()["rows.weight"]]

    job = Job(body, 1, 2, environ=environ)
    ((here, there),) = job.run()
    for value, agreed in zip(here, there, strict=True):
        assert torch.equal(value, torch.full_like(value, -float(steps)))
        assert torch.equal(value, agreed)


@pytest.mark.parametrize("server", [0, 1])
def test_a_worker_killed_with_an_edit_between_two_servers_loses_no_step(server: int) -> None:
    """The process after it does not make the edit again, which one server has."""
    environ = {**PATIENT, "FLEET_HEARTBEAT_S": "0.1", "FLEET_JOB_ID": "one"}

    def trains(made: Fleet, *, edits: bool) -> Any:
        model = torch.nn.Linear(100, 100)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), geo(2), model=model)
        made.init_worker()
        for step in range(made.resume_step(), 6):
            wrapped.minimize(sum(each.sum() for each in model.parameters()))
            if step == 1 and edits:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(100.0)
                made.barrier_worker()
        return model

    def body(made: Fleet, index: int) -> Any:
        lost = Fault(
            Action.DROP_REQUEST, endpoint=Endpoint.parse(job.endpoints[server]), kind="push", step=2, times=None
        )
        first = Fleet(environ={**environ, "FLAGS_rpc_retry_times": "0"}, network=FaultyNetwork(job.network, lost))
        first.init(UserDefinedRoleMaker(0, Role.WORKER, 1, job.endpoints))
        with pytest.raises(DeadlineError, match="push of step 2"):
            trains(first, edits=True)
        leave(first)
        model = trains(made, edits=False)
        here = values(model)
        refresh(made)
        return here, values(model)

    job = Job(body, 1, 2, environ=environ)
    ((here, there),) = job.run()
    for value, agreed in zip(here, there, strict=True):
        assert torch.equal(value, agreed)
    assert torch.cat([value.flatten() for value in here]).unique().tolist() == [-106.0, -6.0]


def test_changed_rows_are_told_until_the_next_push() -> None:
    changes = Changes()
    changes.hold(0, 0, np.array([1, 2, 3]))
    changes.hold(1, 0, np.array([3, 4]))
    changes.hold(1, 2, np.array([3]))
    changes.mark(0, 0, np.array([1, 3, 9]))
    changes.mark(0, 0, np.array([3]))
    assert changes.take(0, 1) == {}
    told = changes.take(1, 1)
    assert {table: ids.tolist() for table, ids in told.items()} == {0: [3]}
    changes.mark(0, 0, np.array([4]))
    assert sorted(changes.take(1, 1)[0].tolist()) == [3, 4], "the answer to push 1 was lost"
    assert changes.take(1, 2)[0].tolist() == [4], "or it was read, and this one is not"
    assert changes.take(1, 3) == {}
    changes.mark(1, 0, np.array([3]))
    changes.forget(0)
    assert changes.take(0, 2) == {}


def test_a_late_copy_of_an_older_push_takes_no_notice_away() -> None:
    changes = Changes()
    changes.hold(0, 0, np.array([1]))
    assert changes.take(0, 1) == changes.take(0, 2) == {}
    changes.mark(1, 0, np.array([1]))
    assert changes.take(0, 1) == {}, "its sender has long been answered"
    assert changes.take(0, 3)[0].tolist() == [1]


@pytest.mark.parametrize("every", [1, 3])
def test_rows_may_be_trained_in_evaluation_mode(every: int) -> None:
    """As when batch norm and dropout are frozen. An unknown row reads the mean there, and exists after its step."""

    def body(strategy: Any) -> Callable[[Fleet, int], list[float]]:
        def run(fleet_: Fleet, worker: int) -> list[float]:
            table = fleet.nn.Embedding(None, 1, initializer="uniform(1, 2)")
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
            fleet_.init_worker()
            table.eval()
            for ids in ([3, 4], [4, 5]):
                optimizer.minimize((table(torch.tensor(ids)) ** 2).sum() / 2)
            table.train()
            return table(torch.tensor([3, 4, 5]))[:, 0].tolist()

        return run

    (expected,) = run_job(body(None), 1, 1)
    assert run_job(body(StrategyFactory.create_half_async_strategy()), 1, 2) == [expected]
    assert run_job(body(geo(every)), 1, 2) == [expected]


def quietly(table: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        table(ids)


#: Ways to look rows up in training that lead to no step on them.
LEFT: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "no_grad": quietly,
    "no backward": lambda table, ids: table(ids),
    "no step": lambda table, ids: table(ids).sum().backward(),
    "all rows": lambda table, ids: table.weight.detach().clone(),
}


@pytest.mark.parametrize("way", LEFT)
@pytest.mark.parametrize("every", [1, 3])
def test_a_row_that_was_looked_up_and_not_trained_does_not_exist(way: str, every: int) -> None:
    """In evaluation its id reads the mean, until it is trained."""

    def body(strategy: Any) -> Callable[[Fleet, int], list[list[float]]]:
        def run(fleet_: Fleet, worker: int) -> list[list[float]]:
            table = fleet.nn.Embedding(8, 1, initializer="uniform(1, 2)")
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
            fleet_.init_worker()
            seen = []

            def look() -> None:
                table.eval()
                seen.append(table(torch.arange(8))[:, 0].tolist())
                table.train()

            for ids in ([3, 4], [4, 5]):
                LEFT[way](table, torch.arange(2, 7))
                look()
                optimizer.minimize(table(torch.tensor(ids)).sum() / 2)
                look()
            with torch.no_grad():
                table.weight[6] = 0.5
            look()
            return seen

        return run

    (expected,) = run_job(body(None), 1, 1)
    assert expected[0] == [1.5] * 8
    assert run_job(body(geo(every)), 1, 2) == [expected]


def test_a_row_that_only_another_worker_trained_exists() -> None:
    trained, looked_up = threading.Event(), threading.Event()

    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(None, 1, initializer="uniform(1, 2)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), geo(1))
        fleet_.init_worker()
        if worker == 1:
            assert looked_up.wait(20)
            optimizer.minimize(table(torch.tensor([3])).sum())
            trained.set()
            return []
        quietly(table, torch.tensor([3, 4]))
        looked_up.set()
        assert trained.wait(20)
        optimizer.minimize(table(torch.tensor([9])).sum())
        table.train()
        held = table(torch.tensor([3]))[:, 0].tolist()
        table.eval()
        assert table(torch.tensor([3, 4]))[:, 0].tolist() == [*held, 1.5]
        return held

    run_job(body, 2, 2)


def test_a_batch_of_nothing_but_padding_is_a_step_of_the_table() -> None:
    def body(strategy: Any) -> Callable[[Fleet, int], float]:
        def run(fleet_: Fleet, worker: int) -> float:
            table = fleet.nn.Embedding(9, 1, padding_idx=0, initializer="zeros")
            optimizer = fleet_.distributed_optimizer(torch.optim.SparseAdam(list(table.parameters()), lr=0.1), strategy)
            fleet_.init_worker()
            for ids, scale in ((1, 1.0), (0, 1.0), (1, 5.0)):
                optimizer.minimize(table(torch.tensor([ids])).sum() * scale)
            return table(torch.tensor([1])).item()

        return run

    (expected,) = run_job(body(None), 1, 1)
    assert run_job(body(geo(2)), 1, 1) == [expected]


# --- As any other optimizer -------------------------------------------------------------------------------------------


def test_hooks_run_once_and_the_wrapped_optimizer_stays_closed() -> None:
    def body(fleet_: Fleet, worker: int) -> list[str]:
        weight, ran = torch.nn.Parameter(torch.ones(2)), []
        plain = torch.optim.SGD([weight], lr=0.5)
        plain.register_step_pre_hook(lambda *_: ran.append("before"))
        plain.register_step_post_hook(lambda *_: ran.append("after"))
        optimizer = fleet_.distributed_optimizer(plain, geo(2))
        fleet_.init_worker()
        loss = optimizer.step(lambda: closure(optimizer, weight))
        assert loss.item() == 2
        with pytest.raises(StateError, match="would train this worker alone"):
            plain.step()
        return ran

    def closure(optimizer: Any, weight: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    # The refused call ran the user's hook as well: it was registered before ours.
    assert run_job(body, 1, 1) == [["before", "after", "before"]]


def test_clipping_and_accumulation_with_rows() -> None:
    """Two backwards without zero_grad in between, then a clipped step: as torch."""

    def train(model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):
                model.loss(step + part).backward()
            torch.nn.utils.clip_grad_norm_(model.dense.parameters(), 0.1)
            optimizer.step()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = Both()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.2), geo(3), model=model)
        fleet_.init_worker()
        train(model, optimizer)
        return [*values(model), model.table(torch.arange(12)).detach()]

    plain = Plain()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.2))
    (got,) = run_job(body, 1, 2)
    assert_close(got, [p.detach() for p in plain.dense.parameters()] + [plain.table.weight.detach()[:12]])


def test_a_gradient_that_is_not_finite_is_found_before_it_is_applied() -> None:
    def body(fleet_: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        strategy = geo(2, check_finite=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), strategy)
        fleet_.init_worker()
        with pytest.raises(FleetError, match="NaN or infinity"):
            optimizer.minimize(weight.sum() * float("nan"))
        return weight[0].item()

    assert run_job(body, 1, 1) == [1.0]


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(
    where: Path,
    steps: range,
    *,
    mode: Any,
    by: Callable[[int], bool] = lambda worker: True,
    workers: int = 1,
    **options: Any,
) -> list[list[torch.Tensor]]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS["adam"](list(model.parameters())), mode, model=model)
        fleet_.init_worker()
        assert fleet_.resume_step() == steps.start
        for step in steps:
            optimizer.minimize(loss_of(model, step, worker))
        if by(worker):
            fleet_.save_persistables(str(where))
        return values(model)

    return run_job(body, workers, 2, **options)


@pytest.mark.pairs(2)
@pytest.mark.parametrize("modes", [(geo(4), geo(4)), (geo(4), geo(100)), (geo(3), None), (None, geo(2))])
def test_going_on_equals_never_stopping(modes: tuple[Any, Any], tmp_path: Path) -> None:
    """Adam's state comes along, into and out of GEO; the step to go on from is the user's, not that of the pushes."""
    before, after = modes
    checkpointed(tmp_path / "a", range(5), mode=before)
    (got,) = checkpointed(tmp_path / "b", range(5, 9), mode=after, model_dir=str(tmp_path / "a"))

    model = make_model()
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert_close(got, values(model))


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adagrad"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_that_is_loaded_replaces_what_the_optimizer_keeps(name: str, steps: int, tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> list[list[torch.Tensor]]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(OPTIMIZERS[name](list(model.parameters())), geo(2), model=model)
        fleet_.init_worker()
        for step in range(steps):
            optimizer.minimize(loss_of(model, step, worker))
        fleet_.save_persistables(str(tmp_path / "at"))
        ends = []
        for _ in range(3):
            fleet_.load_persistables(str(tmp_path / "at"))
            for step in range(3):
                optimizer.minimize(loss_of(model, step, worker))
            ends.append(values(model))
        return ends

    (ends,) = run_job(body, 1, 2)
    for end in ends[1:]:
        assert_close(end, ends[0])


def test_all_workers_may_save_and_the_first_ones_state_is_kept(tmp_path: Path) -> None:
    everybody = threading.Barrier(2)

    def train(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3))
        plain = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        optimizer = fleet_.distributed_optimizer(plain, geo(2))
        fleet_.init_worker()
        for _ in range(3):
            optimizer.minimize((weight * (worker + 1)).sum())
        everybody.wait(20)
        fleet_.save_persistables(str(tmp_path))
        return plain.state[weight]["momentum_buffer"]

    def read(fleet_: Fleet, worker: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3))
        plain = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        fleet_.distributed_optimizer(plain, geo(2))
        fleet_.init_worker()
        return plain.state[weight]["momentum_buffer"]

    first, second = run_job(train, 2, 2)
    assert not torch.equal(first, second)
    for found in run_job(read, 3, 1, model_dir=str(tmp_path)):
        assert torch.equal(found, first)


def test_without_the_first_worker_there_is_no_checkpoint(tmp_path: Path) -> None:
    """It may have left, or never ask: the others are told, and nothing is written."""
    left, refused = threading.Event(), []

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=0.1), geo(2))
        fleet_.init_worker()
        if worker == 0:
            assert tried.wait(20)
            fleet_.stop_worker()
            left.set()
            return
        for _ in range(2):
            with pytest.raises(DeadlineError, match="worker 0 did not write the checkpoint") as told:
                fleet_.save_persistables(str(tmp_path / "ckpt"))
            refused.append(str(told.value))
            tried.set()
            assert left.wait(20)

    tried = threading.Event()
    Job(body, 2, 1, environ=SOON).run()
    assert "none in" in refused[0]
    assert "it has left" in refused[1]
    assert not (tmp_path / "ckpt").exists()


def test_saving_alone_before_saving_together(tmp_path: Path) -> None:
    """The first worker saves more often than the others, and runs ahead of them."""
    ahead = threading.Event()

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=0.1), geo(2))
        fleet_.init_worker()
        optimizer.minimize(weight.sum())
        if worker == 0:
            fleet_.save_persistables(str(tmp_path / "best"))
        else:
            assert ahead.wait(20)
        fleet_.save_persistables(str(tmp_path / "a"))
        if worker == 0:
            fleet_.save_persistables(str(tmp_path / "b"))
            ahead.set()
        else:
            fleet_.save_persistables(str(tmp_path / "b"))

    Job(body, 2, 1, environ={**PATIENT, "FLAGS_rpc_deadline": "3000"}).run()


# --- Choosing it ------------------------------------------------------------------------------------------------------


def test_the_config_chooses_it() -> None:
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    config.geo_sgd_mode = True
    config.geo_sgd_need_push_nums = 3
    network = Watched("push")

    def body(fleet_: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), config)
        fleet_.init_worker()
        for _ in range(7):
            optimizer.minimize(weight.sum())

    run_job(body, 1, 1, network=network)
    assert [request.message.push.steps for request, _ in network.seen] == [3, 3, 1]


@pytest.mark.parametrize("given", [0, -1])
def test_an_impossible_frequency_is_refused(given: int) -> None:
    with pytest.raises(ConfigurationError, match="update_frequency is out of range"):
        geo(given)


@pytest.mark.parametrize("given", [None, 2.5, True, "10"])
def test_a_frequency_of_the_wrong_type_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="update_frequency must be an int"):
        geo(given)


def test_what_is_kept_is_recalled_whole_or_in_part() -> None:
    """A server that goes on is told all of it; one that was killed while it wrote that down, some of what it has."""
    changes = Changes()
    for worker in range(2):
        changes.hold(worker, 4, np.array([3, 1, 5]))
    changes.mark(1, 4, np.array([5, 1]))
    changes.take(0, 1)
    changes.mark(1, 4, np.array([3]))

    def told(by: Changes) -> list[tuple[str, list[list[int]]]]:
        return [(str(about), [each.tolist() for each in ids]) for about, ids in by.dump()]

    expected, parts = told(changes), list(changes.dump())
    assert expected[1][1] == [[1, 3, 5], [3], [5, 1]]
    after = Changes()
    for about, ids in parts:
        after.restore(about, [torch.from_numpy(each) for each in ids])
        changes.restore(about, [torch.from_numpy(each) for each in ids])
        assert told(changes) == expected
    assert told(after) == expected


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_other_servers_know_what_each_worker_is_to_be_told(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it was told last, since the answer may have been lost with the move."""
    monkeypatch.setattr(given, "PIECE_BYTES", piece_bytes)
    changes, others = Changes(), Changes()
    changes.hold(0, 4, np.arange(6))
    changes.hold(1, 4, np.array([9]))
    changes.mark(1, 4, np.array([1, 2]))
    assert sorted(changes.take(0, 1)[4].tolist()) == [1, 2]
    changes.mark(1, 4, np.array([3]))
    move_given(changes, others)
    assert changes.piece((2, 4), 0) == changes.piece((0, 5), 0) == given.NOTHING
    assert sorted(others.take(0, 1)[4].tolist()) == [1, 2, 3]
    others.mark(1, 4, np.array([5, 9]))
    assert others.take(0, 2)[4].tolist() == [5]
    others.mark(0, 4, np.array([5, 9]))
    assert others.take(1, 1)[4].tolist() == [9]


def test_rows_that_a_hook_adds_take_the_step_though_their_fetch_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters have taken it by then, so the next call finishes it; it is counted once."""

    def add_row(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (weight,) = [p for p in optimizer.param_groups[0]["params"] if p.shape == (4, 1)]
        weight.grad = torch.ones(4, 1)

    def script(there: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(4, 1, sparse=there), torch.nn.Linear(1, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.register_step_pre_hook(add_row)
        alone, optimizer = Fleet(environ={}), sgd
        if there:
            alone.init()
            optimizer = alone.distributed_optimizer(sgd, geo(2), model=model)
            alone.init_worker()
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([0])).sum().backward()
            if there and step == 0:
                hold = Replica.hold
                with monkeypatch.context() as patched:
                    patched.setattr(Replica, "hold", failing(hold))
                    with pytest.raises(DeadlineError):
                        optimizer.step()
            else:
                optimizer.step()
        found = [model[1].weight.detach().clone(), model[0].weight.detach().clone()]
        if there:
            alone.stop_worker()
        return found

    def failing(hold: Any) -> Any:
        def fail(self: Replica, rows: Any, fetch: Any) -> None:
            if any(len(ids) > 1 for ids, _ in rows.values()):
                raise DeadlineError("a server is silent")
            hold(self, rows, fetch)

        return fail

    assert_close(script(there=True), script(there=False))


class InALookUp(Interrupts):
    FOLDERS = ("worker", "table")
    FILES = ("geo_replica", "lookups", "table", "memory_store")


@pytest.mark.parametrize("first", [1, 14])
@pytest.mark.pairs(1)
def test_a_look_up_that_ctrl_c_strikes_leaves_no_row_without_its_values(first: int) -> None:
    """Every 29th line is tried of one that fetches rows, to be trained."""
    at, is_hit = first, True
    while is_hit:
        table = torch.nn.Embedding(6, 1, sparse=True, _weight=torch.full((6, 1), 5.0))
        alone = Fleet(environ={})
        alone.init()
        optimizer = alone.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), geo(2), model=table)
        alone.init_worker()
        optimizer.minimize(-table(torch.arange(3)).sum())
        interrupts, before = InALookUp(at), sys.gettrace()
        sys.settrace(interrupts)
        with suppress(KeyboardInterrupt):
            table(torch.arange(6))
        sys.settrace(before)
        assert table(torch.arange(6)).flatten().tolist() == [6.0] * 3 + [5.0] * 3, at
        optimizer.minimize(-table(torch.arange(6)).sum())
        alone.barrier_worker()
        assert table.weight.detach().flatten().tolist() == [7.0] * 3 + [6.0] * 3, at
        alone.stop_worker()
        is_hit = interrupts.left <= 0
        at += 29
    assert at > 300
