"""``fleet.prefetch(…, device=)``: rows are on the device before their forward, and the numbers are the same.

The device here is simulated: whatever is handed to it is done as late as it may be, and what nobody has waited for has
no number. Where there is CUDA, the same functions run on it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job
from patience import PATIENCE_S
from test_geo import Watched
from test_prefetch import Batch, Batches, Net, batches, plainly, train

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.nn.expand import expand_by_torch
from fleet.nn.handle import Found, TableHandle
from fleet.numeric.jit import Array
from fleet.numeric.recent_ids import NEVER, RecentIds
from fleet.ps.server.recent_changes import MOST_ROUNDS, RecentChanges
from fleet.ps.table.shard import Contribution
from fleet.ps.worker import look_ahead as looking_ahead
from fleet.ps.worker import prefetch as prefetching
from fleet.ps.worker.look_ahead import RowsOnDevice

sync = StrategyFactory.create_sync_strategy


class LateCopies:
    """A device whose copies stand still until somebody waits for them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.handing_over = threading.Lock()

    def host(self, parts: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full([*shape], float("nan") if dtype.is_floating_point else 0, dtype=dtype)

    def run(self, work: Callable[[], None]) -> object:
        with self.handing_over:
            self.work.append(work)
            return len(self.work)

    def wait(self, mark: Any, used: Any) -> None:
        while self.done < mark:
            self.work[self.done]()
            self.done += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "copies_to", lambda device: LateCopies())
    monkeypatch.setattr(looking_ahead, "WIDE", 0)


def ahead(depth: int, staleness: int | None = None, device: str = "cpu") -> Batches:
    def iterate(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
        def lookup(ids: Batch) -> dict[torch.nn.Module, Any]:
            return {net.first: ids[:, 0], net.bag: ids, net.group: {"user": ids[:, 0], "item": ids[:, 1]}}

        return fleet_.prefetch(data, lookup, depth, device=device, embedding_staleness=staleness)

    return iterate


def same(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


# --- Synchronous: the same numbers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
@pytest.mark.pairs(1)
def test_synchronous_training_is_the_same_to_the_bit(dense: Any, depth: int, workers: int, servers: int) -> None:
    """Also as rows are trained by other workers between the request for them and their use."""
    got, expected = (
        train(sync(dense=dense), iterate, workers=workers, servers=servers) for iterate in (ahead(depth), plainly)
    )
    same(got, expected)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2)])
def test_narrow_rows_are_asked_for_once(monkeypatch: pytest.MonkeyPatch, workers: int, servers: int) -> None:
    monkeypatch.setattr(looking_ahead, "WIDE", 256)
    network = Watched("pull")
    got = train(None, ahead(2), workers=workers, servers=servers, network=network)
    same(got, train(None, plainly, workers=workers, servers=servers))
    assert not any(request.message.pull.since for request, _ in network.seen)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("every", [2, 3])
def test_steps_on_several_batches_are_the_same(every: int) -> None:
    """What was asked for is of a version that is not there yet, and nobody waits for it."""
    same(train(None, ahead(2), every=every), train(None, plainly, every=every))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_batch_without_a_backward_leaves_rows_as_they_were(skipped: int) -> None:
    """Rows that were expected to change did not, and nothing was asked for of them."""

    def body(look: bool) -> Callable[[Fleet, int], list[float]]:
        def run(fleet_: Fleet, worker: int) -> list[float]:
            table, other = fleet.nn.Embedding(None, 1, initializer="constant(2)"), fleet.nn.Embedding(None, 1)
            both = torch.nn.ModuleList([table, other])
            optimizer = fleet_.distributed_optimizer(torch.optim.Adagrad(both.parameters(), lr=0.5), model=both)
            fleet_.init_worker()
            data = [torch.tensor([4, 5 + number % 2 + worker]) for number in range(6)]
            stream = fleet_.prefetch(data, lambda ids: {table: ids}, 2, device="cpu") if look else data
            seen = []
            for number, ids in enumerate(stream):
                rows = table(ids)
                seen += rows.flatten().tolist()
                optimizer.minimize(rows.square().sum() if number != skipped else other(ids).sum())
            return seen

        return run

    assert run_job(body(True), 2, 1) == run_job(body(False), 2, 1)


@pytest.mark.usefixtures("late")
def test_rows_that_come_and_go_are_the_same() -> None:
    def iterate(look: bool) -> list[Any]:
        def body(fleet_: Fleet, worker: int) -> list[float]:
            table = fleet.nn.Embedding(
                None, 1, initializer="constant(2)", admit=fleet.nn.CountFilter(2), evict=fleet.nn.Unused(steps=2)
            )
            strategy = sync().with_settings(evict_every=2)
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy)
            fleet_.init_worker()
            data = [torch.tensor([4, number // 2 + worker]) for number in range(8)]
            stream = fleet_.prefetch(data, lambda ids: {table: ids}, 2, device="cpu") if look else data
            seen = []
            for ids in stream:
                rows = table(ids)
                seen += rows.flatten().tolist()
                optimizer.minimize(rows.square().sum())
            return seen

        return run_job(body, 2, 2)

    assert iterate(True) == iterate(False)


@pytest.mark.parametrize("wide", [0, looking_ahead.WIDE])
def test_what_nobody_waited_for_holds_no_number(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    """Else these tests would not see a wait that is missing."""
    monkeypatch.setattr(prefetching, "copies_to", lambda device: LateCopies())
    monkeypatch.setattr(looking_ahead, "WIDE", wide)
    patient = LateCopies.wait
    monkeypatch.setattr(LateCopies, "wait", lambda self, mark, used: patient(self, mark - 1, used))
    (got,) = train(None, ahead(2), workers=1)
    assert any(each.isnan().any() for each in got)


@pytest.mark.usefixtures("late")
def test_the_second_answer_has_what_has_changed_and_no_more() -> None:
    """Two workers: what only this one looks up is in its first request, what the other one trains comes once more."""
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
        fleet_.init_worker()
        if worker == 0:
            data = [torch.arange(10 * number, 10 * number + 10) for number in range(4)]
        else:
            data = [torch.tensor([10, 20, 21, 30])] * 4
        for ids in fleet_.prefetch(data, lambda ids: {table: ids}, 2, device="cpu"):
            optimizer.minimize(table(ids).sum())

    run_job(body, 2, 1, network=network)
    answers = [
        [*reply.message.row_counts]
        for request, reply in network.seen
        if request.message.worker == 0 and request.message.pull.since
    ]
    assert sorted(answers) == [[1], [1], [2]], "of 10 rows each"


@pytest.mark.usefixtures("late")
def test_an_evaluation_in_between_and_an_early_end_are_as_ever() -> None:
    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(None, 1, initializer="constant(5)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        looked = []
        for ids in fleet_.prefetch([torch.tensor([4])] * 9, lambda ids: {table: ids}, 3, device="cpu"):
            optimizer.minimize(table(ids).sum())
            table.eval()
            looked += [table(torch.tensor([wanted])).item() for wanted in (4, 6)]
            table.train()
            if len(looked) == 4:
                break
        return [*looked, table(torch.tensor([4])).item()]

    assert run_job(body, 1, 1) == [[4.0, 5.0, 3.0, 5.0, 3.0]]


@pytest.mark.usefixtures("late")
def test_values_that_were_replaced_are_read() -> None:
    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = torch.nn.Embedding(6, 1, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), model=table)
        fleet_.init_worker()
        seen = []
        for number, ids in enumerate(
            fleet_.prefetch([torch.tensor([4, 1])] * 4, lambda ids: {table: ids}, 2, device="cpu")
        ):
            seen += table(ids).flatten().tolist()
            if number == 1:
                with torch.no_grad():
                    table.weight[1] = 9
            optimizer.minimize(table(ids)[0].sum())
        return seen

    assert run_job(body, 1, 1) == [[1, 1, 0, 1, -1, 9, -2, 9]]


def process_of(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )


ENDING = """
import threading, torch
from harness import Job
import fleet.nn

def body(fleet_, worker):
    table = fleet.nn.Embedding(None, 2, initializer="zeros")
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    fleet_.init_worker()
    for number, ids in enumerate(fleet_.prefetch([torch.tensor([1])] * 12, lambda ids: {table: ids}, 2, device="cpu")):
        if number == 2:
            main.join()
        optimizer.minimize(table(ids).sum())
    print("trained", table(torch.tensor([1])).tolist())

main = threading.main_thread()
job = Job(body, 1, 1)
threading.Thread(target=job.serve, args=(0,)).start()
threading.Thread(target=job.work, args=(0,)).start()
"""


@pytest.mark.slow
def test_threads_train_on_when_the_main_thread_has_ended() -> None:
    found = process_of(ENDING)
    assert "trained [[-12.0, -12.0]]" in found.stdout, found.stderr


LEAVING = """
import sys, threading, torch
from harness import Job
import fleet.nn
from fleet.role_maker import Role

job = Job(lambda *_: None, 1, 1)
threading.Thread(target=job.serve, args=(0,), daemon=True).start()
fleet_ = job.fleet(Role.WORKER, 0)
table = fleet.nn.Embedding(None, 2, initializer="zeros")
fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
fleet_.init_worker()
data = [torch.tensor([1])] * 3 + [torch.randint(0, 1 << 40, (6_000_000,))] * 3
stream = fleet_.prefetch(data, lambda ids: {table: ids}, 1, device="cpu")
next(stream), next(stream)
fleet_.stop_worker()
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_ends_in_order_while_a_batch_is_prepared() -> None:
    found = process_of(LEAVING)
    assert found.returncode == 3, found.stderr


# --- Without shared steps ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("staleness", [None, 2, 4])
def test_rows_on_the_device_are_as_old_as_the_script_says(staleness: int | None) -> None:
    """Half-asynchronous, alone, one row: it is asked for two batches ahead, and again when it is too old to be used."""

    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        strategy = StrategyFactory.create_half_async_strategy()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        looked = []
        data = [torch.tensor([4])] * 9
        for ids in fleet_.prefetch(data, lambda ids: {table: ids}, 2, device="cpu", embedding_staleness=staleness):
            rows = table(ids)
            looked.append(rows.item())
            optimizer.minimize(rows.sum())
        return looked

    def expected() -> list[float]:
        asked_at, ages = 0, []
        for batch in range(9):
            now = max(0, batch - 2)
            if staleness is None or batch - asked_at > staleness:
                asked_at = now
            ages.append(float(-asked_at))
        return ages

    assert run_job(body, 1, 1) == [expected()]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("make", [StrategyFactory.create_async_strategy, StrategyFactory.create_half_async_strategy])
def test_rows_that_stay_are_not_asked_for_again(make: Any) -> None:
    network = Watched("pull")
    train(make(), ahead(1, staleness=9), workers=1, servers=1, network=network)
    counts = [sum(request.message.pull.counts) for request, _ in network.seen]
    data = torch.stack(batches(0))
    once = 2 * len(data[:, :, 0].unique()) + len(data.unique()) + len(data[:, :, 1].unique())
    assert sum(counts) == once + 9 + 9, "every row once, and what the test looks up in the end"


@pytest.mark.usefixtures("late")
def test_bounded_staleness_of_none_is_the_same() -> None:
    strategy = StrategyFactory.create_ssp_strategy(0)
    same(*(train(strategy, iterate, workers=1) for iterate in (ahead(2), plainly)))


def test_rows_are_read_as_long_as_they_are_not_too_old() -> None:
    copies = LateCopies()
    rows = RowsOnDevice(copies, 1, torch.float32, 2)
    for batch in range(50):
        ids = np.array([batch, 1000 + batch // 10])
        held, slots, oldest = rows.foresee(ids, batch, batch)
        fresh = torch.from_numpy(slots[~held])
        copies.run(lambda fresh=fresh, ids=ids[~held]: rows.enter(fresh, torch.from_numpy(ids).float()[:, None]))
        into = torch.empty(2, 1)
        mark = copies.run(lambda slots=slots, into=into: rows.read(torch.from_numpy(slots), into))
        if batch % 7 == 6:
            copies.wait(mark, [])
            assert into.flatten().tolist() == ids.tolist()
        assert oldest is None or batch - oldest <= 2
        assert len(rows) <= 1 << 10, "the fewest that there is memory for"


def test_ids_are_remembered_for_as_long_as_they_are_told() -> None:
    """Compared with a dict: ids of all sizes, some of which come again, in memory that fills up many times."""
    draw = np.random.default_rng(5)
    recent, came, places = RecentIds(), dict[int, int](), dict[int, int]()
    most = 0
    for now in range(400):
        ids = np.unique(np.concatenate([draw.zipf(1.3, 300), draw.integers(-(2**63), 2**63 - 1, 100)]))
        draw.shuffle(ids)
        since = now - 5
        held, slots, oldest = recent.meet(ids, now, since)
        expected = [came.get(each, -9) >= since for each in ids.tolist()]
        assert held.tolist() == expected
        assert oldest == min((came[each] for each in ids[held].tolist()), default=NEVER)
        assert len(set(slots.tolist())) == len(ids), "each has a place of its own"
        assert all(places[each] == slot for each, slot in zip(ids[held].tolist(), slots[held].tolist(), strict=True))
        came |= dict.fromkeys(ids[~held].tolist(), now)
        places |= dict(zip(ids.tolist(), slots.tolist(), strict=True))
        live = [places[each] for each, time in came.items() if time >= since]
        assert len(set(live)) == len(live), "nor does another one that is remembered have it"
        most = max(most, len(live))
    assert recent.places <= 2 * most + 2 * 400


# --- What servers remember --------------------------------------------------------------------------------------------


def contribution(ids: list[int]) -> Contribution:
    return Contribution(0, (), ([], []), {0: (np.array(ids), np.empty(0))}, frozenset(), 0, {})


def test_a_server_names_what_rounds_have_changed_since() -> None:
    recent, ids = RecentChanges(), np.array([7, 8, 9])
    assert recent.changed(0, ids, 0).tolist() == [0, 1, 2], "nothing is remembered yet"
    recent.begin(4)
    recent.note(5, [contribution([9]), contribution([2, 7])])
    recent.note(6, [contribution([8])])
    assert recent.changed(0, ids, 3).tolist() == [0, 1, 2]
    assert recent.changed(0, ids, 4).tolist() == [0, 1, 2]
    assert recent.changed(0, ids, 5).tolist() == [1]
    assert recent.changed(0, ids, 6).tolist() == []
    assert recent.changed(1, ids, 5).tolist() == []
    for version in range(7, 7 + MOST_ROUNDS):
        recent.note(version, [contribution([7])])
    assert recent.changed(0, ids, 5).tolist() == [0, 1, 2], "too long ago"
    assert recent.changed(0, ids, 6).tolist() == [0]
    recent.forget()
    assert recent.changed(0, ids, 7 + MOST_ROUNDS).tolist() == [0, 1, 2]


# --- One gather for all tables ----------------------------------------------------------------------------------------


def gathered_together(device: str) -> None:
    """Rows and gradients as torch's own functions have them, one table after the other; outputs may be written into."""
    generator = torch.Generator().manual_seed(3)
    found, plain = [], []
    for count, dim, shape in [(5, 2, (3, 4)), (3, 2, (6,)), (4, 3, (2, 2)), (2, 2, (0,))]:
        rows = torch.randn(count, dim, generator=generator).to(device)
        inverse = torch.randint(0, count, shape, generator=generator).to(device)
        weight = torch.nn.Parameter(torch.zeros(9, dim, device=device))
        TableHandle(weight, 9, dim, fleet.plan.specs.Initializer("zeros"))
        found.append(Found(rows, inverse, None, torch.arange(count) + 2, weight))
        plain.append(rows.clone().requires_grad_())
    expanded = expand_by_torch(found)
    expected = [torch.nn.functional.embedding(each.inverse, rows) for each, rows in zip(found, plain, strict=True)]
    for ours, theirs in zip(expanded, expected, strict=True):
        assert torch.equal(ours, theirs)
    sum((each.mul_(2) * torch.arange(each.shape[-1], device=device)).sum() for each in expanded[:3]).backward()  # type: ignore[union-attr]
    sum((each * 2 * torch.arange(each.shape[-1], device=device)).sum() for each in expected[:3]).backward()  # type: ignore[union-attr]
    for each, rows in zip(found[:3], plain, strict=False):
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(each.weight.grad._values().to(device), rows.grad)  # type: ignore[union-attr, arg-type]
            assert each.weight.grad._indices()[0].tolist() == each.ids.tolist()  # type: ignore[union-attr]


def test_tables_of_one_kind_are_gathered_together() -> None:
    gathered_together("cpu")


# --- On CUDA ----------------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize("depth", [pytest.param(depth, marks=gpu) for depth in (1, 2, 9)])
def test_on_cuda_rows_come_to_the_device(depth: int) -> None:
    def learnt(look: bool) -> list[list[torch.Tensor]]:
        def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
            net = Net()
            net.cuda()
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
            fleet_.init_worker()
            data = batches(worker)
            for ids in ahead(depth, device="cuda")(fleet_, net, data) if look else data:
                optimizer.minimize(net(ids.cuda()))
            ids = torch.arange(9, device="cuda")
            return [net.first(ids).detach().cpu(), net.group["item"](ids).detach().cpu()]

        return run_job(body, 2, 2)

    for one, other in zip(learnt(True), learnt(False), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_on_cuda_tables_of_one_kind_are_gathered_together(device: str) -> None:
    gathered_together(device)


# --- Wrong arguments --------------------------------------------------------------------------------------------------

DATA = [torch.tensor([1])]
asynchronous, half, geo, ssp = (
    StrategyFactory.create_async_strategy,
    StrategyFactory.create_half_async_strategy,
    StrategyFactory.create_geo_strategy,
    StrategyFactory.create_ssp_strategy,
)


def compensated() -> Any:
    return asynchronous(dc_asgd_lambda=0.1)


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (sync, {"device": "cpu", "embedding_staleness": 3}, UnsupportedError, "in the mode 'sync'"),
        (ssp, {"device": "cpu", "embedding_staleness": 3}, UnsupportedError, "in the mode 'ssp'"),
        (
            lambda: asynchronous(dc_asgd_lambda=0.1),
            {"device": "cpu", "embedding_staleness": 3},
            UnsupportedError,
            "job without delay compensation",
        ),
        (geo, {"device": "cpu"}, UnsupportedError, "in the mode 'geo'"),
        (asynchronous, {"embedding_staleness": 3}, ConfigurationError, "none is given"),
        (half, {"device": "cpu", "embedding_staleness": 1, "depth": 2}, ConfigurationError, "at least depth=2"),
        (asynchronous, {"device": "cpu", "embedding_staleness": 0}, ConfigurationError, "out of range"),
        (asynchronous, {"device": "cpu", "embedding_staleness": 1.5}, ArgumentTypeError, "must be an int"),
        (sync, {"device": "toaster"}, ConfigurationError, "is none"),
        (sync, {"device": 3.5}, ConfigurationError, "is none"),
        (sync, {"device": "meta"}, UnsupportedError, "brought ahead to meta"),
        (sync, {"device": "cuda:99"}, ConfigurationError, "there is no device cuda:99"),
    ],
)
def test_wrong_arguments_are_named(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(9, 1)
        fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), make())
        fleet_.init_worker()
        with pytest.raises(error, match=words):
            list(fleet_.prefetch(DATA, lambda b: {table: b}, **options))

    run_job(body, 1, 1)
