"""``fleet.prefetch`` and ``EmbeddingGroup``: fewer and earlier requests, and the same results."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import fractions
import functools
import gc
import itertools
import math
import socket
import statistics
import threading
import types
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import run_job, until, values
from inside import under_way
from test_geo import Watched

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.errors import ArgumentTypeError, ConfigurationError, IdOutOfRangeError, NotInitializedError
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_client import GrpcCall
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Handler, Respond
from fleet.ps.worker.prefetch import Depth
from fleet.strategy.parameter_server import Strategy

Batch = torch.Tensor
Batches = Callable[[Fleet, "Net", list[Batch]], Iterable[Batch]]


class Net(torch.nn.Module):
    """Two tables of their own and a group of two, and a dense layer on all their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fleet.nn.Embedding(None, 2)
        self.bag = fleet.nn.EmbeddingBag(40, 3, mode="sum")
        self.group = fleet.nn.EmbeddingGroup({"user": (None, 2), "item": (50, 1)})
        self.dense = torch.nn.Linear(8, 1)
        with torch.no_grad():  # no random numbers: workers are threads, and would draw from one generator
            self.dense.weight.copy_(torch.linspace(-1, 1, 8))
            self.dense.bias.zero_()

    def forward(self, ids: Batch) -> torch.Tensor:
        both = self.group({"user": ids[:, 0], "item": ids[:, 1]})
        parts = [self.first(ids[:, 0]), self.bag(ids), both["user"], both["item"]]
        return self.dense(torch.cat(parts, 1)).square().mean()


def batches(worker: int, count: int = 6) -> list[Batch]:
    random = torch.Generator().manual_seed(worker)
    return [torch.randint(0, 9, (5, 2), generator=random) for _ in range(count)]


def plainly(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
    return data


def ahead(depth: int) -> Batches:
    def iterate(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
        def lookup(ids: Batch) -> dict[torch.nn.Module, Any]:
            return {net.first: ids[:, 0], net.bag: ids, net.group: {"user": ids[:, 0], "item": ids[:, 1]}}

        return fleet_.prefetch(data, lookup, depth)

    return iterate


def some_ahead(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
    """More ids than the forward asks for, for some tables only, and once other ones."""
    return fleet_.prefetch(data, lambda ids: {net.first: ids + (ids is data[2]), net.bag: ids[::2]})


def train(
    strategy: Strategy | None,
    iterate: Batches,
    *,
    every: int = 1,
    workers: int = 2,
    servers: int = 2,
    network: Watched | None = None,
) -> list[list[torch.Tensor]]:
    """What every worker has at the end, after a step for ``every`` batches."""
    ends = threading.Barrier(workers)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.1), strategy, model=net)
        fleet_.init_worker()
        for number, ids in enumerate(iterate(fleet_, net, batches(worker))):
            if number % every == 0:
                optimizer.zero_grad()
            net(ids).backward()
            if number % every == every - 1:
                optimizer.step()
        ends.wait(20)
        return [*values(net.dense), net.first(torch.arange(9)).detach(), net.group["item"](torch.arange(9)).detach()]

    return run_job(body, workers, servers, network=network)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("iterate", [ahead(1), ahead(2), ahead(9), some_ahead], ids=["1", "2", "9", "some"])
@pytest.mark.pairs(2)
def test_synchronous_training_is_the_same_to_the_bit(iterate: Batches, every: int) -> None:
    """Also where gradients of several batches are accumulated, so that what was asked for ahead can never come."""
    for got, expected in zip(train(None, iterate, every=every), train(None, plainly, every=every), strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "strategy",
    [StrategyFactory.create_ssp_strategy(0), StrategyFactory.create_geo_strategy(2)],
    ids=["bounded staleness of none", "geo"],
)
def test_where_rows_cannot_be_old_one_worker_is_the_same(strategy: Strategy) -> None:
    (got,), (expected,) = (train(strategy, iterate, workers=1) for iterate in (ahead(2), plainly))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def pulls(network: Watched) -> list[int]:
    """How many tables each request for rows named."""
    return [len(request.message.pull.tables) for request, _ in network.seen if request.message.pull.tables]


def test_a_batch_takes_one_request_a_server_however_many_tables() -> None:
    network = Watched("pull")
    train(None, ahead(1), workers=1, servers=1, network=network)
    assert pulls(network) == [4] * 6 + [1] * 2, "six batches, and at the end the look-ups of the test"


def test_a_group_takes_one_request_a_server_by_itself() -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        group = fleet.nn.EmbeddingGroup(dict.fromkeys("abcde", (None, 2)), initializer="constant(3)")
        fleet_.distributed_optimizer(torch.optim.SGD(group.parameters(), lr=1.0), model=group)
        fleet_.init_worker()
        found = group({name: torch.tensor([[1, 2]]) for name in "aec"})
        assert {name: rows.shape for name, rows in found.items()} == dict.fromkeys("aec", (1, 2, 2))
        assert all((rows == 3).all() for rows in found.values())
        assert group({}) == {}

    run_job(body, 1, 1, network=network)
    assert pulls(network) == [3]


def test_rows_fetched_ahead_are_from_before_the_steps_meanwhile() -> None:
    """Half-asynchronous, alone: the second batch's rows are asked for before the first step."""

    def seen(depth: int) -> list[float]:
        def body(fleet_: Fleet, worker: int) -> list[float]:
            table = fleet.nn.Embedding(None, 1, initializer="zeros")
            strategy = StrategyFactory.create_half_async_strategy()
            optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
            fleet_.init_worker()
            looked = []
            for ids in fleet_.prefetch([torch.tensor([4])] * 5, lambda ids: {table: ids}, depth):
                rows = table(ids)
                looked.append(rows.item())
                optimizer.minimize(rows.sum())
            assert table(torch.tensor([4])).item() == -5, "what was left of it is not used afterwards"
            return looked

        return run_job(body, 1, 1)[0]

    assert seen(1) == [0, 0, -1, -2, -3]
    assert seen(2) == [0, 0, 0, -1, -2]


def test_a_worker_that_waits_in_a_barrier_with_requests_ahead_is_no_standstill() -> None:
    """Worker 1 has asked for its next rows and computes: it waits for nobody, though a request of it is held back."""
    waiting = threading.Event()

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        for number, ids in enumerate(fleet_.prefetch([torch.tensor([4])] * 3, lambda ids: {table: ids})):
            optimizer.minimize(table(ids).sum())
            if number == 1:
                if worker == 0:
                    threading.Timer(0.2, waiting.set).start()
                else:
                    assert waiting.wait(20)
                fleet_.barrier_worker()

    run_job(body, 2, 1)


def test_leaving_the_loop_early_leaves_nothing_behind() -> None:
    def body(fleet_: Fleet, worker: int) -> float:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        for _ in range(2):
            for ids in fleet_.prefetch([torch.tensor([4])] * 9, lambda ids: {table: ids}, 3):
                optimizer.minimize(table(ids).sum())
                break
            assert not any(under_way(fleet_))
        return table(torch.tensor([4])).item()

    assert run_job(body, 2, 2) == [-2.0, -2.0]


class Meanwhile(LoopbackNetwork):
    """Does something once, amid a call that asks servers for rows."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def listen(self, endpoint: Endpoint, handler: Handler) -> Any:
        def handle(frame: Frame, respond: Respond) -> None:
            if frame.message.WhichOneof("kind") == "pull" and self.work:
                self.work.pop()()
            handler(frame, respond)

        return super().listen(endpoint, handle)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("by", ["another thread", "the same thread"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_that_is_left_to_the_collector_of_garbage_waits_for_no_call(mode: str, by: str, device: str | None) -> None:
    """That works on any thread and in the middle of any call, of whose end the thread may be a condition."""
    network = Meanwhile()
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(9, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        data = [torch.tensor([number]) for number in range(4)]
        left = [fleet_.prefetch(data, lambda ids: {table: ids}, device=device)]
        optimizer.minimize(table(next(left[0])).sum())
        assert any(under_way(fleet_))

        def collect() -> None:
            thread = threading.Thread(target=left.clear)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "it waits for a call that may wait for it"

        network.work.append(collect if by == "another thread" else left.clear)
        for ids in fleet_.prefetch(data[1:], lambda ids: {table: ids}, device=device):
            optimizer.minimize(table(ids).sum())
        assert table.weight.sum().item() == -4
        assert not left
        assert not any(under_way(fleet_))

    run_job(body, 1, 2, network=network)
    until(lambda: not any(each.name == "fleet-look-ahead" for each in threading.enumerate()))


def test_an_evaluation_in_between_reads_what_it_would() -> None:
    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(None, 1, initializer="constant(5)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        looked = []
        for ids in fleet_.prefetch([torch.tensor([4]), torch.tensor([6])], lambda ids: {table: ids}):
            optimizer.minimize(table(ids).sum())
            table.eval()
            looked += [table(torch.tensor([wanted])).item() for wanted in (4, 6)]
            table.train()
        return looked

    assert run_job(body, 1, 1) == [[4.0, 5.0, 4.0, 4.0]]


def several_steps_a_batch(strategy: Strategy, data: Batches, workers: int) -> list[tuple[Any, list[torch.Tensor]]]:
    """Which gradients came too late, and what every worker has at the end."""

    def body(fleet_: Fleet, worker: int) -> tuple[Any, list[torch.Tensor]]:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.1), strategy, model=net)
        fleet_.init_worker()
        for ids in data(fleet_, net, batches(worker)):
            for _ in range(6):
                optimizer.minimize(net(ids))
        late = fleet_.summary()["late_gradients"]
        fleet_.barrier_worker()
        return late, [
            *values(net.dense),
            net.first(torch.arange(9)).detach(),
            net.group["user"](torch.arange(9)).detach(),
        ]

    return run_job(body, workers, 2)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.pairs(1)
def test_steps_after_the_first_on_a_batch_have_the_rows_of_the_step_before(device: str | None) -> None:
    """In a job that is synchronous as yet: rows came for the first step."""

    def fetched(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
        return fleet_.prefetch(data, lambda ids: {net.first: ids[:, 0], net.bag: ids}, device=device)

    found = [
        several_steps_a_batch(StrategyFactory.create_auto_strategy(changes=[]), data, 2) for data in (fetched, plainly)
    ]
    for (_, got), (_, expected) in zip(*found, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("mode", ["sync", "ssp", "half_async", "gba", "auto"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_was_fetched_is_for_one_step_of_a_batch(mode: str, device: str | None) -> None:
    """However old rows may be: those of further steps, and of an evaluation behind a step, are asked for again."""
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 1, initializer="constant(1)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy)
        fleet_.init_worker()
        there = 1.0
        for ids in fleet_.prefetch([torch.tensor([0])] * 4, lambda ids: {table: ids}, device=device):
            for step in range(6):
                seen = table(ids)
                if step:
                    assert seen.item() == pytest.approx(there, abs=1e-6)
                optimizer.minimize(seen.square().sum())
                there -= 0.2 * seen.item()
            assert table(ids).item() == pytest.approx(there, abs=1e-6)

    run_job(body, 1, 2)


@pytest.mark.parametrize("mode", ["sync", "ssp", "half_async", "gba", "auto"])
@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"device": "cpu"}], ids=["", "depth", "device"])
@pytest.mark.parametrize("loops", [1, 30])
@pytest.mark.pairs(1)
def test_any_number_of_batches_may_pass_without_a_step(
    mode: str, options: dict[str, Any], loops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as they are after a step that does not come are asked for so often and no more: they wait at the servers."""
    monkeypatch.setattr("fleet.ps.server.job.MAX_WAITING", 40)
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()
    options = {**options, "depth": 1} if mode == "ssp" and "depth" in options else options

    def body(fleet_: Fleet, worker: int) -> float:
        table = fleet.nn.Embedding(None, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        for number in range(2):
            for _ in range(loops):
                for ids in fleet_.prefetch([torch.tensor([1])] * (90 // loops), lambda ids: {table: ids}, **options):
                    table(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert number or mode == "half_async" or table(torch.tensor([1])).item() == -90.0
        fleet_.barrier_worker()
        return table(torch.tensor([1])).item()

    assert run_job(body, 1, 2) == [-180.0]


@pytest.mark.parametrize("mode", ["sync", "ssp", "half_async", "gba", "auto"])
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("first", ["the whole table", "in evaluation mode", "other ids"])
@pytest.mark.pairs
def test_what_was_fetched_lacks_no_step_that_looked_its_table_up_otherwise(
    mode: str, device: str | None, first: str
) -> None:
    """A step with a batch need not use what was fetched for it, and changes these rows all the same."""
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(3, 1, initializer="constant(1)")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy)
        fleet_.init_worker()
        for ids in fleet_.prefetch([torch.tensor([0])] * 3, lambda ids: {table: ids}, device=device):
            if first == "the whole table":
                seen = table.weight[:1] * 1
            else:
                table.train(first != "in evaluation mode")
                seen = table(torch.tensor([0, 2]) if first == "other ids" else ids)[:1]
                table.train()
            optimizer.minimize(seen.square().sum())
            assert table(ids).item() == pytest.approx(0.8 * seen.item(), abs=1e-6)

    run_job(body, 1, 2)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.pairs(1)
def test_no_rows_are_so_old_that_gba_drops_what_was_computed_on_them(device: str | None, staleness: int) -> None:
    """However many steps a script takes with one batch."""

    def fetched(fleet_: Fleet, net: Net, data: list[Batch]) -> Iterable[Batch]:
        return fleet_.prefetch(data, lambda ids: {net.first: ids[:, 0], net.bag: ids}, device=device)

    ((late, _),) = several_steps_a_batch(StrategyFactory.create_gba_strategy(staleness=staleness), fetched, 1)
    assert not any(each for server in late for each in server.values()), late


class Epochs:
    """Begins anew behind its end, as the iterators of some loaders do."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> int:
        self.read += 1
        if self.read % 4 == 0:
            raise StopIteration
        return self.read


def unreadable() -> Iterator[int]:
    yield from (1, 2, 3)
    raise OSError("the disk is gone")


def ids_of(batch: int) -> Batch:
    if batch == 9:
        raise KeyError("no ids")
    return torch.tensor([batch])


STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(1),
}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (Epochs, None),
        (unreadable, OSError),
        (lambda: [1, 2, 3, 9, 4], KeyError),
        (lambda: [1, 2, 3, 50, 4], IdOutOfRangeError),
    ],
    ids=["an iterator that begins anew", "a batch that cannot be read", "no ids", "ids out of range"],
)
@pytest.mark.parametrize("options", [{}, {"depth": 3}, {"device": "cpu"}, {"device": "cpu", "depth": 4}], ids=str)
@pytest.mark.parametrize("mode", STRATEGIES)
@pytest.mark.pairs
def test_what_cannot_be_had_is_an_error_in_its_turn_as_in_any_loop(
    mode: str, options: dict[str, Any], data: Callable[[], Iterable[int]], error: type[Exception] | None
) -> None:
    """What was read before it is trained, and an end is an end."""

    def body(fleet_: Fleet, worker: int) -> tuple[list[int], list[float]]:
        table = fleet.nn.Embedding(40, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), STRATEGIES[mode]())
        fleet_.init_worker()
        allowed = options if mode != "geo" else {name: each for name, each in options.items() if name != "device"}
        trained = []
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            for batch in fleet_.prefetch(data(), lambda batch: {table: ids_of(batch)}, **allowed):
                optimizer.minimize(table(torch.tensor([batch])).sum())
                trained.append(batch)
                assert len(trained) < 9
        assert not any(under_way(fleet_))
        return trained, table(torch.arange(5)).flatten().tolist()

    assert run_job(body, 1, 2) == [([1, 2, 3], [0.0, -1.0, -1.0, -1.0, 0.0])]


def one_buffer() -> Iterator[Batch]:
    buffer = torch.empty(2, dtype=torch.int64)
    for number in range(1, 5):
        yield buffer.copy_(torch.tensor([number, 0]))


def two_buffers() -> Iterator[Batch]:
    buffers = torch.empty(2, 2, dtype=torch.int64)
    for number in range(1, 5):
        buffers[number % 2] = torch.tensor([number, 0])
        yield buffers[number % 2]


def memory_of_numpy() -> Iterator[Batch]:
    memory = np.zeros(2, np.int64)
    for number in range(1, 5):
        memory[0] = number
        yield torch.from_numpy(memory)


def one_dict() -> Iterator[dict[str, Batch]]:
    batch = {}
    for number in range(1, 5):
        batch["ids"] = torch.tensor([number, 0])
        yield batch


def parts_of_one_buffer() -> Iterator[Batch]:
    """Each is written when it is its turn, and stays as it is."""
    buffer = torch.zeros(4, 2, dtype=torch.int64)
    for number in range(4):
        buffer[number, 0] = number + 1
        yield buffer[number]


def one_batch_again_and_again() -> list[Batch]:
    """The loop below changes it."""
    return [torch.tensor([0, 1])] * 4


def one_dict_again_and_again() -> list[dict[str, Batch]]:
    return [{"ids": torch.tensor([0, 1])}] * 4


def ids_in(batch: Any) -> Batch:
    ids: Batch = batch["ids"] if isinstance(batch, dict) else batch
    return ids


def trained_on(mode: str, data: Callable[[], Iterable[Any]], options: dict[str, Any] | None) -> list[float]:
    """How often each id was trained, in a loop that changes the batches that it has had."""

    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(9, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), STRATEGIES[mode]())
        fleet_.init_worker()
        loop = data() if options is None else fleet_.prefetch(data(), lambda batch: {table: ids_in(batch)}, **options)
        try:
            for batch in loop:
                optimizer.minimize(table(ids_in(batch)).sum())
                if isinstance(batch, dict):
                    batch["ids"] = batch["ids"] + 1
                else:
                    batch += 1
        except ConfigurationError:
            assert not table(torch.arange(9)).any(), "it was trained on what is no batch of its iterator's"
            raise
        finally:
            assert not any(under_way(fleet_))
        return table(torch.arange(9)).flatten().tolist()

    (found,) = run_job(body, 1, 2)
    return found


OPTIONS: list[dict[str, Any]] = [{}, {"depth": 2}, {"device": "cpu"}, {"device": "cpu", "depth": 2}]


@pytest.mark.parametrize("data", [one_buffer, two_buffers, memory_of_numpy, one_dict])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", STRATEGIES)
@pytest.mark.pairs
def test_batches_that_are_written_over_each_other_are_refused(
    mode: str, options: dict[str, Any], data: Callable[[], Iterable[Any]]
) -> None:
    """One was trained in the place of another. Where no batch is read ahead, nothing is lost."""
    if mode == "geo":
        options = {name: each for name, each in options.items() if name != "device"}
    reads_ahead = (0 if mode == "auto" else options.get("depth", 2 if "device" in options else 1)) + (
        "device" in options
    )
    if reads_ahead < (2 if data is two_buffers else 1):
        assert trained_on(mode, data, options) == trained_on(mode, data, None)
    else:
        with pytest.raises(AssertionError, match="was overwritten before its turn"):
            trained_on(mode, data, options)


@pytest.mark.parametrize("data", [parts_of_one_buffer, one_batch_again_and_again, one_dict_again_and_again])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", STRATEGIES)
@pytest.mark.pairs
def test_batches_that_only_the_loop_changes_are_trained_as_in_any_loop(
    mode: str, options: dict[str, Any], data: Callable[[], Iterable[Any]]
) -> None:
    if mode == "geo":
        options = {name: each for name, each in options.items() if name != "device"}
    assert trained_on(mode, data, options) == trained_on(mode, data, None)


@dataclasses.dataclass
class Kept:
    """A batch as scripts make them, which its iterator gives again and again."""

    ids: Any = None


class Slotted:
    __slots__ = ("ids",)
    ids: Any


def in_one(batch: Any, *, copies: bool = False, end: Any = None, first: Sequence[int] = (1, 1)) -> Iterator[Any]:
    """One object with other ids each time, but for the first two, which are alike."""
    for number in [*first, 2, 3]:
        ids = torch.tensor([number, 0])
        if isinstance(batch, Kept | Slotted):
            batch.ids = ids
        else:
            batch["ids"] = ids
        yield copy.copy(batch) if copies else batch
    if end is not None:
        batch["ids"] = end


def in_memory(memory: Any, give: Callable[[Any], Any], first: Sequence[int] = (1, 1)) -> Iterator[Any]:
    for number in [*first, 2, 3]:
        memory[0] = number
        yield give(memory)


def as_ids(batch: Any) -> Batch:
    """What ``lookup`` may do: look for them, and copy them."""
    if hasattr(batch, "ids"):
        batch = batch.ids
    if isinstance(batch, collections.abc.Mapping):
        batch = batch["ids"]
    return torch.as_tensor(batch[0] if isinstance(batch, tuple) else batch).long()


WRITTEN_OVER: dict[str, Callable[[], Iterable[Any]]] = {
    "a dict, two alike": lambda: in_one({}),
    "a UserDict": lambda: in_one(collections.UserDict()),
    "a dataclass": lambda: in_one(Kept()),
    "an object with slots": lambda: in_one(Slotted()),
    "numpy's memory, two alike": lambda: in_memory(np.zeros(2, np.int64), torch.from_numpy),
    "numpy's memory itself": lambda: in_memory(np.zeros(2, np.int64), lambda memory: (memory, 1.0)),
    "memory that lookup copies": lambda: in_memory(torch.zeros(2, dtype=torch.int32), lambda memory: memory),
    "the same in new objects": lambda: in_memory(torch.zeros(2, dtype=torch.int32), lambda memory: Kept(memory)),
    "numpy's in new objects": lambda: in_memory(np.zeros(2, np.int32), lambda memory: {"a": [1], "ids": memory}),
    "a dict, at its end": lambda: in_one({}, first=(2, 3, 2, 3, 2), end=torch.tensor([4, 0])),
    "a list": lambda: in_memory([0, 0], lambda memory: memory),
}


class Counted:
    """Batches that know where they are from."""

    def __init__(self) -> None:
        self.counts, self.memory = [0], torch.zeros(3)

    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            self.counts[0] += 1
            self.memory += 1
            batch = Kept(torch.tensor([number, 0]))
            batch.source = self  # type: ignore[attr-defined]
            yield batch


class Summed:
    """Computes something when it is asked for, and keeps it."""

    def __init__(self, ids: Batch) -> None:
        self.ids = ids

    @functools.cached_property
    def total(self) -> Batch:
        return self.ids.sum()


@dataclasses.dataclass
class SummedRecord:
    ids: Batch

    @functools.cached_property
    def total(self) -> int:
        return int(self.ids.sum())


def asked_for_later(kind: Callable[[Batch], Any]) -> Iterator[Any]:
    """Batches of which the iterator asks something once it has given the next."""
    given = [kind(torch.tensor([number, 0])) for number in range(4)]
    for each, before in zip(given, [given[0], *given], strict=False):
        assert before.total >= 0
        yield each


def holding(make: Callable[[], Any]) -> list[tuple[Any, Any]]:
    """Batches that hold something beside their ids."""
    return [(torch.tensor([number, 0]), make()) for number in range(4)]


def in_itself() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["whole"] = made
    return made


def lists_in_lists() -> list[Any]:
    made: list[Any] = [1] * 64
    for _ in range(8):
        made = [made] * 64
    return made


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(9), torch.ones(9).bool())


ONLY_THE_LOOPS: dict[str, Callable[[], Iterable[Any]]] = {
    "a dict in itself": lambda: holding(in_itself),
    "lists in lists": lambda: holding(lists_in_lists),
    "a mask that is broadcast": lambda: holding(lambda: torch.ones(3)[None].expand(10**15, 3)),
    "a tensor that is masked": lambda: holding(masked),
    "any element types": lambda: holding(
        lambda: [
            torch.ones(2, 3, dtype=torch.complex64).t().conj(),
            torch.ones(2, 3).bfloat16()[:, ::2],
            torch.ones(3).to(torch.float8_e4m3fn),
            np.array([None, {}], object),
            torch.eye(2).to_sparse(),
        ]
    ),
    "objects of their own": lambda: in_one(Kept(), copies=True),
    "dicts of their own": lambda: in_one({"all": torch.ones(3)}, copies=True),
    "one object": lambda: [Kept(torch.tensor([1, 0]))] * 4,
    "a mask of all": lambda: (lambda mask: [(torch.tensor([i, 0]), mask, math.nan) for i in range(4)])(torch.ones(2)),
    "an iterator's own memory": lambda: Counted(),
    "what an object computes later": lambda: asked_for_later(Summed),
    "what a dataclass computes later": lambda: asked_for_later(SummedRecord),
    "objects in a list": lambda: holding(lambda: [object(), np.float32(1), np.datetime64("2026-01-01"), {1}, b"1", 1j]),
    "one array": lambda: [np.array([1, 0])] * 4,
    "two objects by turns": lambda: [Kept(torch.tensor([1, 0])), Kept(torch.tensor([2, 0]))] * 3,
    "new objects of one memory": lambda: (lambda memory: [Kept(memory) for _ in range(4)])(torch.tensor([1, 0])),
}


def trained_by(data: Callable[[], Iterable[Any]], options: dict[str, Any] | None, changes: bool) -> list[float]:
    """How often each id was trained, in a loop that may change the batches that it has had."""

    def body(fleet_: Fleet, worker: int) -> list[float]:
        table = fleet.nn.Embedding(9, 1, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        loop = data() if options is None else fleet_.prefetch(data(), lambda batch: {table: as_ids(batch)}, **options)
        for batch in loop:
            optimizer.minimize(table(as_ids(batch)).sum())
            if changes and isinstance(batch, Kept):
                batch.ids += 1
            elif changes and isinstance(batch, np.ndarray):
                batch += 1
        return table(torch.arange(9)).flatten().tolist()

    (found,) = run_job(body, 1, 2)
    return found


@pytest.mark.parametrize("kind", WRITTEN_OVER)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.pairs
def test_whatever_is_written_over_is_refused(kind: str, options: dict[str, Any]) -> None:
    """Whatever kind of object it is, whatever lookup makes of it, and alike as the first ones may be."""
    with pytest.raises(AssertionError, match="was overwritten before its turn"):
        trained_by(WRITTEN_OVER[kind], options, changes=False)


def beside(memory: Any, give: Callable[[Any, Any], Any], kind: Callable[[int], Any] = int) -> Iterator[Any]:
    """Batches with ids of their own, whose labels lie in one memory."""
    for number in [1, 1, 2, 3]:
        memory[0] = kind(number)
        yield give(torch.tensor([number, 0]), memory)


@dataclasses.dataclass
class Labelled:
    ids: Any
    labels: Any


class SlotOfBase:
    __slots__ = "labels"
    labels: Any


class SlotsOfBoth(SlotOfBase):
    __slots__ = ("__kept", "ids", "unset")

    def __init__(self, ids: Any, labels: Any) -> None:
        self.ids, self.labels, self.__kept = ids, labels, labels


@dataclasses.dataclass(slots=True)
class RecordOfBoth(SlotOfBase):
    ids: Any
    labels: Any


LABELS_WRITTEN_OVER: dict[str, tuple[Callable[[], Iterable[Any]], str]] = {
    "a tensor": (lambda: beside(torch.zeros(2), lambda ids, labels: (ids, labels)), r"batch\[1\]"),
    "numpy's": (lambda: beside(np.zeros(2), lambda ids, labels: {"ids": ids, "y": labels}), r"batch\['y'\]"),
    "numpy's as a tensor": (
        lambda: beside(np.zeros(2), lambda ids, labels: (ids, {"y": torch.from_numpy(labels)[::1]})),
        r"batch\[1\]\['y'\]",
    ),
    "a list": (lambda: beside([0, 0], lambda ids, labels: Labelled(ids, labels)), r"batch.labels\[0\]"),
    "an object's": (lambda: beside(torch.zeros(2).half(), Labelled), r"batch.labels"),
    "a column": (lambda: beside(torch.zeros(2, 2), lambda ids, labels: (ids, labels[:, 1])), r"batch\[1\]"),
    "a dict": (lambda: beside({}, lambda ids, labels: (ids, labels)), r"batch\[1\]\[0\]"),
    "the end of much": (
        lambda: beside(np.zeros(99_999)[::-1], lambda ids, labels: (ids, labels[::-1])),
        r"batch\[1\]",
    ),
    "the end of a column": (
        lambda: (lambda all_: beside(all_[-1:], lambda ids, _: (ids, all_[:, 1])))(torch.zeros(99_999, 2)),
        r"batch\[1\]",
    ),
    "lists in dicts in lists": (
        lambda: beside([0], lambda ids, labels: (ids, [{"y": [labels]}])),
        r"\['y'\]\[0\]\[0\]",
    ),
    "slots of a base": (lambda: beside(torch.zeros(2), SlotsOfBoth), r"batch\._SlotsOfBoth__kept|batch\.labels"),
    "a dataclass's slots of a base": (lambda: beside([0, 0], RecordOfBoth), r"batch\.labels\[0\]"),
    "a list in an object": (
        lambda: beside([0, 0], lambda ids, labels: types.SimpleNamespace(ids=ids, labels=labels)),
        r"batch\.labels\[0\]",
    ),
    "a UserDict's": (
        lambda: beside(torch.zeros(2), lambda ids, labels: collections.UserDict(ids=ids, y=labels)),
        r"batch\['y'\]",
    ),
    "a UserList in a dict": (
        lambda: beside(collections.UserList([0, 0]), lambda ids, labels: {"ids": ids, "y": labels}),
        r"batch\['y'\]\[0\]",
    ),
    "a deque": (lambda: beside(collections.deque([0]), lambda ids, labels: (ids, labels)), r"batch\[1\]\[0\]"),
    "numbers of numpy's in a list": (
        lambda: beside([0, 0], lambda ids, labels: (ids, labels), np.float32),
        r"batch\[1\]\[0\]",
    ),
    "any objects in a list": (
        lambda: beside([0, 0], lambda ids, labels: (ids, labels), fractions.Fraction),
        r"batch\[1\]\[0\]",
    ),
    "an array of Python's": (lambda: beside(array("d", [0]), lambda ids, labels: (ids, labels)), r"batch\[1\]"),
    "bytes": (lambda: beside(bytearray(2), lambda ids, labels: (ids, labels)), r"batch\[1\]"),
}


@pytest.mark.parametrize("kind", LABELS_WRITTEN_OVER)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.pairs
def test_what_a_batch_has_beside_its_ids_may_not_be_written_over_either(kind: str, options: dict[str, Any]) -> None:
    data, part = LABELS_WRITTEN_OVER[kind]
    with pytest.raises(AssertionError, match=f"(?s)was overwritten before its turn.*{part}"):
        trained_by(data, options, changes=False)


@pytest.mark.parametrize("kind", ONLY_THE_LOOPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.pairs
def test_what_nobody_writes_over_is_trained(kind: str, options: dict[str, Any], changes: bool) -> None:
    data = ONLY_THE_LOOPS[kind]
    assert trained_by(data, options, changes) == trained_by(data, None, changes)


class Later(Depth):
    """Asks further ahead once many batches have come."""

    def saw(self, waited_s: float, whole_s: float) -> None:
        self._batches += 1
        self.now = 1 if self._batches < 40 else 4


def test_memory_that_is_used_again_is_found_when_more_batches_wait_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones were not far enough ahead for it to show, and nobody looked at labels later."""
    monkeypatch.setattr("fleet.ps.worker.prefetch.Depth", Later)

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 1)
        strategy = StrategyFactory.create_async_strategy()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        labels = torch.zeros(3)

        def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number in range(100):
                labels[number % 3] = number
                yield torch.tensor([number]), labels[number % 3]

        for ids, label in fleet_.prefetch(data(), lambda batch: {table: batch[0]}):
            assert label == ids
            optimizer.minimize(table(ids).sum())

    with pytest.raises(AssertionError, match=r"(?s)was overwritten before its turn.*batch\[1\]"):
        run_job(body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("how", ["break", "return", "raise", "close", "end", "an error of its own"])
@pytest.mark.pairs
def test_an_iterator_is_let_go_when_its_loop_ends(how: str, options: dict[str, Any]) -> None:
    """As in a loop of Python's own: worker processes and open files stayed until garbage was collected."""

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(9, 1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        ended = []

        def data() -> Iterator[torch.Tensor]:
            try:
                for number in range(1 if how == "end" else 8):
                    yield torch.tensor([number])
                    if how == "an error of its own" and number == 2:
                        raise KeyError(number)
            finally:
                ended.append(True)

        def loop() -> None:
            batches = fleet_.prefetch(data(), lambda ids: {table: ids}, **options)
            for ids in batches:
                optimizer.minimize(table(ids).sum())
                if how == "break":
                    break
                if how == "return":
                    return
                if how == "raise":
                    raise KeyError
                if how == "close":
                    cast(Any, batches).close()

        is_collecting = gc.isenabled()
        gc.disable()
        try:
            with contextlib.suppress(KeyError):
                loop()
            assert ended
        finally:
            if is_collecting:
                gc.enable()

    run_job(body)


# --- Wrong arguments --------------------------------------------------------------------------------------------------


def refused(use: Callable[[Fleet, torch.nn.Module], Any], error: type[Exception], words: str) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(9, 1)
        fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        with pytest.raises(error, match=words):
            list(use(fleet_, table))

    run_job(body, 1, 1)


BATCH = [torch.tensor([1])]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda f, t: f.prefetch(BATCH, lambda b: {t: b}, 0), ConfigurationError, "depth is out of range"),
        (lambda f, t: f.prefetch(BATCH, lambda b: {t: b}, True), ArgumentTypeError, "depth must be an int"),
        (lambda f, t: f.prefetch(BATCH, {t: BATCH}), ArgumentTypeError, "lookup must be a function"),
        (lambda f, t: f.prefetch(BATCH, lambda b: b), ArgumentTypeError, "must return a dict"),
        (lambda f, t: f.prefetch(BATCH, lambda b: {torch.nn.Linear(1, 1): b}), ArgumentTypeError, "no remote"),
        (lambda f, t: f.prefetch(BATCH, lambda b: {t: b + 8}), IdOutOfRangeError, "0 <= id < 9; got 9"),
        (
            lambda f, t: f.prefetch(BATCH, lambda b: {t: [1]}),
            ArgumentTypeError,
            r"got list. Give it torch.as_tensor\(ids\)",
        ),
        (
            lambda f, t: f.prefetch(BATCH, lambda b: {t: b.numpy()}),
            ArgumentTypeError,
            "int64 or int32 ids; got ndarray",
        ),
        (
            lambda f, t: f.prefetch(BATCH, lambda b: {t: b / 2}),
            ArgumentTypeError,
            r"got torch.float32. Give it ids.long\(\)",
        ),
    ],
)
def test_wrong_arguments_are_named(use: Any, error: type[Exception], words: str) -> None:
    refused(use, error, words)


def test_a_module_of_no_running_job_cannot_be_looked_up() -> None:
    refused(
        lambda f, t: f.prefetch(BATCH, lambda b: {fleet.nn.Embedding(9, 1): b}), NotInitializedError, "before its job"
    )


def test_it_needs_a_running_job() -> None:
    alone = Fleet(environ={})
    with pytest.raises(NotInitializedError, match=r"fleet.init\(\)"):
        alone.prefetch(BATCH, lambda b: {})
    alone.init()
    with pytest.raises(NotInitializedError, match="init_worker"):
        alone.prefetch(BATCH, lambda b: {})


@pytest.mark.parametrize(
    ("tables", "error", "words"),
    [
        ([(None, 2)], ArgumentTypeError, "tables must be a dict"),
        ({"a": 3}, ArgumentTypeError, "table 'a' is not described"),
        ({"a": (0, 3)}, ConfigurationError, "num_embeddings must be positive"),
    ],
)
def test_a_group_says_what_is_wrong_with_its_tables(tables: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fleet.nn.EmbeddingGroup(tables)


def test_a_group_says_what_is_wrong_with_its_ids() -> None:
    group = fleet.nn.EmbeddingGroup({"a": (None, 2)})
    with pytest.raises(ConfigurationError, match="expected a; got 'b', 'c'"):
        group({"a": BATCH[0], "b": BATCH[0], "c": BATCH[0]})
    with pytest.raises(ArgumentTypeError, match="needs a dict of ids"):
        group(BATCH[0])
    with pytest.raises(NotInitializedError, match="before its job"):
        group({"a": BATCH[0]})


# --- What must not hold anybody up ------------------------------------------------------------------------------------


def over_grpc(body: Callable[[Fleet, int], Any], threads: int, workers: int = 1, servers: int = 1) -> list[Any]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(servers)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        endpoints = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    return run_job(body, workers, servers, network=GrpcNetwork(threads), endpoints=endpoints)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", [None, StrategyFactory.create_half_async_strategy()], ids=["sync", "half-async"])
def test_large_replies_that_nobody_reads_yet_hold_no_thread_of_the_server(strategy: Strategy | None) -> None:
    """Each batch's rows are 8 MiB, which no window of the connection takes in, and the server has two threads."""

    def body(fleet_: Fleet, worker: int) -> int:
        table = fleet.nn.Embedding(None, 256, initializer="zeros")
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), strategy)
        fleet_.init_worker()
        data = [torch.arange(8192) + 8192 * number for number in range(5)]
        for ids in fleet_.prefetch(data, lambda ids: {table: ids}, 2):
            optimizer.minimize(table(ids).square().mean())
        return fleet_.summary()["steps"]

    assert over_grpc(body, threads=2) == [5]


def test_evaluations_use_what_was_fetched_ahead_and_leave_nothing_at_the_server() -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, 1, initializer="constant(5)")
        fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
        fleet_.init_worker()
        table.eval()
        for ids in fleet_.prefetch([torch.tensor([number]) for number in range(9)], lambda ids: {table: ids}):
            assert table(ids).item() == 5

    run_job(body, 1, 1, network=network)
    assert len(pulls(network)) == 9, "one for each batch, and each was answered"


def test_steps_that_are_interrupted_leave_no_reply_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the first server's answer is waited for; the second one's is large."""
    result, interrupts = GrpcCall.result, []

    def interrupted(call: GrpcCall) -> Any:
        if threading.current_thread().name == "job-work-0" and interrupts:
            raise interrupts.pop()
        return result(call)

    monkeypatch.setattr(GrpcCall, "result", interrupted)

    def body(fleet_: Fleet, worker: int) -> list[int]:
        weights = [torch.nn.Parameter(torch.zeros(2048, 1024)) for _ in range(2)]
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(weights, lr=0.1))
        fleet_.init_worker()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for _ in range(4):
            interrupts.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()  # finishes the interrupted step, which is still the first, and takes the second
        assert all(weight[0, 0].item() == pytest.approx(-0.2) for weight in weights)
        return under_way(fleet_)

    assert over_grpc(body, threads=3, servers=2) == [[0, 0]]


def test_two_modules_of_one_table_are_fetched_together() -> None:
    network = Watched("pull")

    def body(fleet_: Fleet, worker: int) -> None:
        one, other = fleet.nn.Embedding(None, 1), fleet.nn.Embedding(None, 1)
        other.weight = one.weight
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(one.parameters(), lr=0.1))
        fleet_.init_worker()
        for ids in fleet_.prefetch([torch.tensor([1, 2])] * 3, lambda ids: {one: ids, other: ids + 1}):
            optimizer.minimize((one(ids) + other(ids + 1)).sum())

    run_job(body, 1, 1, network=network)
    assert pulls(network) == [1] * 3


def test_a_table_of_another_job_is_refused() -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        stranger = Fleet(environ={})
        stranger.init()
        theirs = fleet.nn.Embedding(9, 1)
        stranger.distributed_optimizer(torch.optim.SGD(theirs.parameters(), lr=1.0))
        stranger.init_worker()
        table = fleet.nn.Embedding(9, 1)
        fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        with pytest.raises(ConfigurationError, match="a table of another job"):
            list(fleet_.prefetch(BATCH, lambda ids: {theirs: ids}))
        stranger.stop_worker()

    run_job(body, 1, 1)


@pytest.mark.parametrize("name", ["items", "type", "training", "_modules", "a.b", ""])
def test_names_that_torch_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot have this name"):
        fleet.nn.EmbeddingGroup({name: (None, 2)})


# ---------------------------------------------------------------- how far ahead


def chosen(batch_s: float, trip_s: float, *, batches: int = 4000, narrow: bool = False) -> list[int]:
    """The depths of a training whose batches take so long, and whose rows so much longer: each request for itself, or
    one after the other where the way is ``narrow``."""
    depth, now, free_at, found = Depth(), 0.0, 0.0, list[int]()
    arrives = deque[float]()
    for _ in range(batches):
        while len(arrives) <= depth.now:
            free_at = max(now, free_at) + trip_s if narrow else now + trip_s
            arrives.append(free_at)
        began, due = now, arrives.popleft()
        now = max(now, due)
        waited_s, now = now - began, now + batch_s
        depth.saw(waited_s, now - began)
        found.append(depth.now)
    return found


@pytest.mark.parametrize(("trip_s", "least"), [(0.0, 1), (0.9, 1), (1.5, 2), (4.5, 5), (10.5, 11)])
def test_rows_are_asked_for_as_far_ahead_as_keeps_training_from_waiting(trip_s: float, least: int) -> None:
    found = chosen(1.0, trip_s)
    assert max(found) < 2 * least or least == 1
    assert statistics.mode(found[1000:]) == least


def test_rows_are_not_asked_for_earlier_where_that_does_not_help() -> None:
    found = chosen(1.0, 3.0, narrow=True)
    assert max(found) <= 2
    assert found.count(2) < len(found) / 20
    assert max(chosen(1.0, 100.0)) == 16


def test_the_depth_goes_back_when_rows_are_nearer() -> None:
    depth, found = Depth(), []
    for waits in [4.0] * 32 + [1.0] * 20 + [0.0] * 200:
        depth.saw(waits, waits + 1.0)
        found.append(depth.now)
    assert [each for each, _ in itertools.groupby(found)] == [1, 2, 4, 3, 2, 1]


@pytest.mark.pairs(1)
@pytest.mark.parametrize(
    ("strategy", "far"), [(StrategyFactory.create_async_strategy(), True), (None, False)], ids=["async", "sync"]
)
def test_a_job_chooses_how_far_ahead_it_asks(strategy: Strategy | None, far: bool) -> None:
    """Where rows are allowed to be older. Rows take longer than a batch here."""
    network = FaultyNetwork(LoopbackNetwork(), Fault(Action.DELAY, kind="pull", times=None, delay_s=0.02))

    def body(fleet_: Fleet, worker: int) -> int:
        table = fleet.nn.Embedding(None, 1)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), strategy)
        fleet_.init_worker()
        asked = taken = most = 0

        def data() -> Iterator[torch.Tensor]:
            nonlocal asked
            for asked in range(1, 101):
                yield torch.tensor([asked])

        for ids in fleet_.prefetch(data(), lambda ids: {table: ids}):
            taken += 1
            most = max(most, asked - taken)
            optimizer.minimize(table(ids).sum())
        assert taken == 100
        return most

    (most,) = run_job(body, 1, 1, network=network)
    assert most > 1 if far else most == 1
