"""The rules by which rows come to a table and leave it: how a user says them, and what travels for them."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, SOON, Job, run_job, until
from hypothesis import given
from hypothesis import strategies as st
from inside import connections, cuts_of, flush, leave, set_time, worker_of

import fleet
import fleet.nn
from fleet import Fleet
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    PlanMismatchError,
    ProtocolError,
    UnsupportedError,
)
from fleet.nn import CountFilter, Embedding, EmbeddingBag, EmbeddingGroup, MaxRows, Probability, SmallNorm, Unused
from fleet.nn import expand as expanding
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import Initializer, JobSpec, PlanSettings, TableSpec
from fleet.ps.table.shard import Contribution, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.row_cuts import Span, search
from fleet.role_maker import Role
from fleet.strategy.parameter_server import StrategyFactory

BY_WEIGHT = CountFilter(2.5, of="weight")

# ---------------------------------------------------------------- what a user says


def test_rules_are_told_to_the_servers_and_shown() -> None:
    module = Embedding(None, 4, admit=CountFilter(3, sketch_mb=2), evict=[Unused(steps=5), MaxRows(10, by="often")])
    assert repr(module) == (
        "Embedding(any id, 4, admit=CountFilter(3, sketch_mb=2), evict=[Unused(steps=5), MaxRows(10, by='often')])"
    )
    bag = EmbeddingBag(9, 4, admit=Probability(0.5), evict=SmallNorm(0.1))
    assert repr(bag) == "EmbeddingBag(9, 4, admit=Probability(0.5), evict=SmallNorm(0.1), mode='mean')"
    assert repr(Embedding(7, 2)) == "Embedding(7, 2)"


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"admit": Unused(steps=1)}, ConfigurationError, "Give it as evict="),
        ({"evict": CountFilter(2)}, ConfigurationError, "Give it as admit="),
        ({"evict": [Unused(steps=1), Probability(0.1)]}, ConfigurationError, "Give it as admit="),
        ({"evict": [MaxRows(3), MaxRows(4, by="often")]}, ConfigurationError, "two rules of the kind MaxRows"),
        ({"admit": 3}, ArgumentTypeError, "admit= is of the wrong type"),
        ({"admit": [CountFilter(3)]}, ArgumentTypeError, "admit= is of the wrong type"),
        ({"evict": "recent"}, ArgumentTypeError, "evict= is of the wrong type"),
        ({"evict": MaxRows}, ArgumentTypeError, "evict= is of the wrong type"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(rules: dict[str, Any], error: Any, words: str) -> None:
    for make in (lambda: Embedding(None, 4, **rules), lambda: EmbeddingGroup({"user": (None, 4, rules)})):
        with pytest.raises(error, match=words):
            make()
    with pytest.raises(error, match=words):
        EmbeddingBag(None, 4, **rules)


def test_a_count_beyond_what_a_sketch_reaches_is_refused() -> None:
    for admit in (
        CountFilter(2**32 - 1, sketch_mb=1),
        CountFilter(2**32),
        CountFilter(2**32, of="weight", sketch_mb=1),
    ):
        assert Embedding(None, 4, admit=admit).admit == admit
    with pytest.raises(ConfigurationError, match=r"unusable n.*at most 4294967295.*a sketch.*got 4294967296"):
        CountFilter(2**32, sketch_mb=1)


@pytest.mark.parametrize("sketch_mb", [None, 0.01])
def test_weights_let_an_id_in_however_they_are_counted(sketch_mb: float | None) -> None:
    def body(fleet_: Fleet, _: int) -> list[tuple[int, int]]:
        module = Embedding(None, 2, admit=CountFilter(2.5, of="weight", sketch_mb=sketch_mb))
        wrapped = fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=1.0), model=module)
        fleet_.init_worker()
        seen = []
        for weight in (1.0, 0.0, 1.0, 0.25, 0.25, 1.0):
            wrapped.minimize(module(torch.tensor([7, 8]), weights=torch.tensor([weight, 0.1])).sum())
            table = fleet_.summary()["tables"]["weight"]
            seen.append((table["rows"], table["pending"]))
        return seen

    assert run_job(body) == [[(0, 2), (0, 2), (0, 2), (0, 2), (1, 1), (1, 1)]]


def test_a_group_takes_the_rules_of_each_table() -> None:
    group = EmbeddingGroup({"user": (None, 4, {"admit": CountFilter(2)}), "item": (9, 2, {}), "shop": (None, 3)})
    assert [module.admit for module in group.values()] == [CountFilter(2), None, None]
    with pytest.raises(ConfigurationError, match="unknown options"):
        EmbeddingGroup({"user": (None, 4, {"admits": CountFilter(2)})})
    with pytest.raises(ArgumentTypeError, match="is not described"):
        EmbeddingGroup({"user": (None, 4, CountFilter(2))})


def test_a_copy_made_before_the_job_keeps_the_rules() -> None:
    module = Embedding(None, 4, admit=BY_WEIGHT, evict=Unused(steps=3))
    made = copy.deepcopy(module)
    described: list[Any] = []

    def body(fleet_: Fleet, _: int) -> None:
        fleet_.distributed_optimizer(torch.optim.SGD(made.parameters(), lr=1.0), model=made)
        fleet_.init_worker()
        made(torch.tensor([1]), weights=torch.tensor([1.0]))
        described.append(worker_of(fleet_).trained.plan.spec.tables[0])

    run_job(body)
    assert (described[0].admit, described[0].evict) == (BY_WEIGHT, (Unused(steps=3),))


def test_rules_are_pickled_and_compared_as_values() -> None:
    for rule in (CountFilter(3), BY_WEIGHT, Probability(0.5), Unused(seconds=2.5), MaxRows(3, by="weight")):
        assert pickle.loads(pickle.dumps(rule)) == rule
        assert eval(repr(rule), vars(fleet.nn)) == rule


def test_a_peer_cannot_say_what_a_user_cannot() -> None:
    def table(**rules: Any) -> TableSpec:
        return TableSpec("user", 4, "float32", 0, None, Initializer("zeros"), **rules)

    def spec(each: TableSpec, **settings: Any) -> JobSpec:
        from fleet.plan.specs import GroupSpec

        return JobSpec((), (each,), (GroupSpec("SGD", 0, ()),), PlanSettings(1, 1, **settings))

    good = spec(table(admit=BY_WEIGHT, evict=(Unused(seconds=3), MaxRows(2))))
    assert JobSpec.from_json(good.to_json()) == good
    for bad in (
        spec(table(evict=(MaxRows(2), MaxRows(3)))),
        spec(table(admit=CountFilter(2), uploaded=True)),
        spec(table(), evict_every=0),
    ):
        with pytest.raises(ProtocolError, match="impossible"):
            JobSpec.from_json(bad.to_json())


def test_a_copy_that_holds_its_rows_cannot_be_trained_by_rules() -> None:
    copies = []

    def body(fleet_: Fleet, _: int) -> None:
        module = Embedding(5, 4, admit=CountFilter(2))
        fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=1.0), model=module)
        fleet_.init_worker()
        copies.append(copy.deepcopy(module))

    run_job(body)
    again = Fleet()
    again.init()
    with pytest.raises(UnsupportedError, match="is a copy that holds all its rows"):
        again.distributed_optimizer(torch.optim.SGD(copies[0].parameters(), lr=1.0), model=copies[0])


def test_modules_that_share_a_weight_have_the_same_rules() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Embedding(None, 4, admit=CountFilter(2))
            self.other = Embedding(None, 4)
            self.other.weight = self.one.weight

    def body(fleet_: Fleet, _: int) -> None:
        model = Two()
        fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        fleet_.init_worker()
        model.one(torch.tensor([1]))
        with pytest.raises(ConfigurationError, match="has other rules"):
            model.other(torch.tensor([1]))

    run_job(body)


def test_where_workers_hold_rows_themselves_rules_are_refused_by_name() -> None:
    module = Embedding(None, 4, evict=Unused(steps=3))
    alone = Fleet()
    alone.init()
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(UnsupportedError, match=r"'weight' has rules .* GEO"):
        alone.distributed_optimizer(sgd, StrategyFactory.create_geo_strategy(2), model=module)


# ---------------------------------------------------------------- weights of look-ups


class Pushed:
    """Records what the servers were pushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contributions: list[Contribution] = []
        apply = Shard.apply

        def recorded(shard: Shard, contributions: Sequence[Contribution], *rest: Any, **options: Any) -> Any:
            self.contributions += contributions
            return apply(shard, contributions, *rest, **options)

        monkeypatch.setattr(Shard, "apply", recorded)

    def weights(self, worker: int = 0, table: int = 0) -> list[dict[int, float]]:
        """What the worker's pushes said, one after the other, of all servers together."""
        return [
            dict(zip(each.rows[table][0].tolist(), each.weights[table].tolist(), strict=True))
            for each in self.contributions
            if each.worker == worker and each.weights
        ]

    def total(self, worker: int = 0, table: int = 0) -> dict[int, float]:
        total: Counter[int] = Counter()
        for each in self.weights(worker, table):
            total.update(each)  # type: ignore[arg-type]
        return dict(total)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Pushed:
    return Pushed(monkeypatch)


def weighed_job(
    train: Callable[[Fleet, int, Embedding, Any], Any], strategy: Any = None, workers: int = 1, servers: int = 1
) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        module = Embedding(None, 4, admit=BY_WEIGHT)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(sgd, strategy, model=module)
        fleet_.init_worker()
        train(fleet_, index, module, optimizer)

    run_job(body, workers, servers)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_weights_are_summed_by_id_and_step(pushed: Pushed) -> None:
    def train(_: Fleet, __: int, module: Embedding, optimizer: Any) -> None:
        optimizer.minimize(module(ids(3, 5, 3), weights=weights(0.5, 2, 0.25)).sum())
        optimizer.minimize((module(ids(3)) + module(ids(3, 4), weights=weights(2, 8)).sum(0)).sum())
        optimizer.minimize(module(ids(7, 7)).sum())

    weighed_job(train)
    assert pushed.weights() == [{3: 0.75, 5: 2}, {3: 3, 4: 8}, {7: 2}]


def test_only_look_ups_whose_gradients_travel_count(pushed: Pushed) -> None:
    def train(_: Fleet, __: int, module: Embedding, optimizer: Any) -> None:
        with torch.no_grad():
            module(ids(1), weights=weights(9))
        module(ids(1), weights=weights(9))  # abandoned
        module(ids(1), weights=weights(9)).sum().backward()
        optimizer.zero_grad()
        module(ids(1, 2), weights=weights(1, 2)).sum().backward()
        module(ids(2), weights=weights(4)).sum().backward()  # accumulated
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        module(ids(2), weights=weights(3)).sum().backward()
        optimizer.step()

    weighed_job(train)
    assert pushed.weights()[0] == {1: 1, 2: 6}
    assert pushed.weights()[1][2] == 3


def test_what_is_fetched_ahead_counts_when_it_is_looked_up(pushed: Pushed) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Embedding(None, 4, admit=BY_WEIGHT), Embedding(None, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            how = batch.double() / 4
            return (self.one(batch, weights=how) + self.other(batch)).sum()  # foreseen from the second one on

    def body(fleet_: Fleet, _: int) -> None:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        batches = [ids(step, step, step + 1) for step in range(6)]
        for batch in fleet_.prefetch(batches[:3], lambda batch: {net.one: batch, net.other: batch}):
            optimizer.minimize(net(batch))
        for batch in batches[3:]:
            optimizer.minimize(net(batch))

    run_job(body)
    assert pushed.weights() == [{s: s / 2, s + 1: (s + 1) / 4} for s in range(6)]


def test_what_is_weighed_counts_beside_tables_that_are_expanded_together(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weighed = Embedding(None, 4, admit=BY_WEIGHT)
            self.plain = torch.nn.ModuleList(Embedding(None, 4, initializer="zeros") for _ in range(2))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            one, other = (table(batch).sum() for table in self.plain)
            return one + self.weighed(batch, weights=batch.double() / 4).sum() + other

    counts: list[int] = []
    expanded = expanding._expanded

    def counted(found: Any) -> Any:
        counts.append(len(found))
        return expanded(found)

    monkeypatch.setattr(expanding, "_expanded", counted)

    def body(fleet_: Fleet, _: int) -> list[torch.Tensor]:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.5), model=net)
        fleet_.init_worker()
        for step in range(3):
            optimizer.minimize(net(ids(step, step, step + 1)))
        with torch.no_grad():
            return [table(ids(0, 1, 2, 3))[:, 0] for table in net.plain]

    (rows,) = run_job(body)
    assert counts == [1, 1, 1, 2, 1, 2, 1]  # foreseen from the second forward on
    assert pushed.weights() == [{s: s / 2, s + 1: (s + 1) / 4} for s in range(3)]
    assert [each.tolist() for each in rows] == [[-1, -1.5, -1.5, -0.5]] * 2


def test_a_gradient_of_another_table_of_a_group_counts_nothing(pushed: Pushed) -> None:
    def body(fleet_: Fleet, _: int) -> None:
        group = EmbeddingGroup({"user": (None, 2, {"admit": BY_WEIGHT}), "item": (None, 2)})
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(group.parameters(), lr=0.1), model=group)
        fleet_.init_worker()

        def loss(weight: float) -> torch.Tensor:
            found = group({"user": ids(5), "item": ids(5)}, weights={"user": weights(weight)})
            return found["user"].sum() + found["item"].sum()

        loss(3).backward()
        torch.autograd.grad(loss(4), [group["item"].weight])
        optimizer.step()

    run_job(body)
    assert pushed.weights() == [{5: 3}]


MODES = {
    "sync": None,
    "async": StrategyFactory.create_async_strategy(max_merge_var_num=3, send_queue_size=4),
    "half-async": StrategyFactory.create_half_async_strategy(max_merge_var_num=2),
    "ssp": StrategyFactory.create_ssp_strategy(1),
    "int8": StrategyFactory.create_sync_strategy(wire_dtype="int8"),
}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_weights_travel_in_every_mode(mode: str, servers: int, pushed: Pushed) -> None:
    def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * worker + step)
        return torch.randint(0, 12, (9,), generator=generator), torch.randint(1, 9, (9,), generator=generator) / 8

    def train(fleet_: Fleet, worker: int, module: Embedding, optimizer: Any) -> None:
        for step in range(6):
            of, how = batch(worker, step)
            optimizer.minimize(module(of, weights=how).square().sum())
        flush(fleet_)

    weighed_job(train, MODES[mode], 2, servers)
    for worker in range(2):
        expected: Counter[int] = Counter()
        for step in range(6):
            for each, weight in zip(*batch(worker, step), strict=True):
                expected[int(each)] += float(weight)  # type: ignore[assignment]
        assert pushed.total(worker) == dict(expected)


def test_bags_and_groups_take_weights(pushed: Pushed) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = EmbeddingBag(None, 2, mode="sum", evict=MaxRows(5, by="weight"))
            self.group = EmbeddingGroup({"user": (None, 2, {"admit": BY_WEIGHT}), "item": (None, 2)})

    def body(fleet_: Fleet, _: int) -> None:
        net = Net()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
        fleet_.init_worker()
        scaled = net.bag(ids(1, 2, 1), ids(0, 1), weights(1, 0, 3), weights=weights(1, 2, 4))
        found = net.group({"user": ids(5, 6), "item": ids(5)}, weights={"user": weights(7, 8)})
        optimizer.minimize(scaled.sum() + found["user"].sum() + found["item"].sum())
        with pytest.raises(ConfigurationError, match="weights for tables that are not looked up"):
            net.group({"item": ids(5)}, weights={"user": weights(1)})
        with pytest.raises(ConfigurationError, match="do not go by weights"):
            net.group({"item": ids(5)}, weights={"item": weights(1)})

    run_job(body)
    assert pushed.weights(table=0) == [{1: 5, 2: 2}]
    assert pushed.weights(table=1) == [{5: 7, 6: 8}]


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    def train(_: Fleet, __: int, module: Embedding, optimizer: Any) -> None:
        with pytest.raises(ConfigurationError, match="does not fit the ids"):
            module(ids(1, 2), weights=weights(1))
        for wrong in (float("nan"), float("inf"), -1):
            with pytest.raises(ConfigurationError, match="a weight of a look-up is impossible"):
                module(ids(1), weights=weights(wrong))
        with pytest.raises(ArgumentTypeError, match="a tensor of numbers"):
            module(ids(1), weights=[1.0])
        with pytest.raises(ArgumentTypeError, match="a tensor of numbers"):
            module(ids(1), weights=torch.tensor([True]))

    weighed_job(train)
    with pytest.raises(ConfigurationError, match="do not go by weights"):
        Embedding(None, 4, admit=CountFilter(3))(ids(1), weights=weights(1))


# ---------------------------------------------------------------- time and steps


def test_the_time_travels_where_rows_leave_by_it(pushed: Pushed) -> None:
    def train(fleet_: Fleet, evict: Any) -> None:
        module = Embedding(None, 4, evict=evict)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
        fleet_.init_worker()
        times = itertools.count(5, 10)
        set_time(fleet_, lambda: float(next(times)))
        for _ in range(2):
            optimizer.minimize(module(ids(1)).sum())

    run_job(lambda fleet_, _: train(fleet_, [Unused(seconds=30)]))
    run_job(lambda fleet_, _: train(fleet_, [Unused(steps=30)]))
    assert [each.now for each in pushed.contributions] == [5, 15, None, None]


def test_workers_agree_on_the_steps_after_which_rows_leave() -> None:
    def start(fleet_: Fleet, every: int) -> None:
        module = Embedding(None, 4, evict=Unused(steps=3))
        strategy = StrategyFactory.create_sync_strategy().with_settings(evict_every=every)
        fleet_.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1), strategy, model=module)
        fleet_.init_worker()

    def body(fleet_: Fleet, index: int) -> None:
        if index == 1:
            until(lambda: first)  # whoever comes first says what the job is
            with pytest.raises(PlanMismatchError, match="evict_every 5 in the job, 6 in the newcomer's"):
                start(job.fleet(Role.WORKER, 1), 6)
        start(fleet_, 5)
        first.append(index)

    first: list[int] = []
    job = Job(body, workers=2)
    job.run()


# ---------------------------------------------------------------- rows that all servers agree on


def kept(scores: dict[int, int], most: int) -> dict[int, int]:
    """What is left of a whole table."""
    order = sorted(scores, key=lambda id_: (-scores[id_], id_))
    return {id_: scores[id_] for id_ in order[:most]}


class Servers:
    """Looks on while servers agree: what each was told, and whether rows were read for training before that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards: dict[int, Shard] = {}
        self.cuts: dict[int, list[Any]] = {}
        self.reads_early = 0
        apply, read, cut = Shard.apply, Shard.read, Shard.cut

        def applied(shard: Shard, contributions: Sequence[Contribution], *rest: Any, **options: Any) -> Any:
            self.shards[shard.server] = shard
            return apply(shard, contributions, *rest, **options)

        def reading(shard: Shard, index: int, ids: Any, training: bool, **options: Any) -> Any:
            self.reads_early += training and bool(shard.awaits_cut)
            return read(shard, index, ids, training, **options)

        def told(shard: Shard, index: int, kind: str, last: Any) -> None:
            cut(shard, index, kind, last)
            self.cuts.setdefault(shard.server, []).append(last)

        monkeypatch.setattr(Shard, "apply", applied)
        monkeypatch.setattr(Shard, "read", reading)
        monkeypatch.setattr(Shard, "cut", told)

    @property
    def await_cuts(self) -> bool:
        return any(shard.awaits_cut for shard in self.shards.values())

    def rows(self) -> set[int]:
        """The ids that have a row on any server."""
        ids = np.arange(-9, 9)
        return {int(id_) for shard in self.shards.values() for id_ in ids[shard.tables[0].known(ids)]}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


EVERY, MOST, STEPS = 4, 5, 12


def batch_of(worker: int, step: int) -> torch.Tensor:
    return torch.randint(-9, 9, (4,), generator=torch.Generator().manual_seed(31 * worker + step))


def expected(workers: int) -> dict[int, int]:
    scores: dict[int, int] = {}
    for step in range(1, STEPS + 1):
        for worker in range(workers):
            scores.update(dict.fromkeys(batch_of(worker, step).tolist(), step))
        if step % EVERY == 0:
            scores = kept(scores, MOST)
    return scores


def limited(fleet_: Fleet, strategy: Any = None) -> tuple[Embedding, Any]:
    module = Embedding(None, 4, evict=MaxRows(MOST))
    strategy = (strategy or StrategyFactory.create_sync_strategy()).with_settings(evict_every=EVERY)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = fleet_.distributed_optimizer(sgd, strategy, model=module)
    fleet_.init_worker()
    return module, optimizer


@pytest.mark.parametrize("workers", [1, 2])
def test_servers_agree_on_the_rows_that_stay(workers: int, servers: Servers) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        module, optimizer = limited(fleet_)
        batches = [batch_of(index, step) for step in range(1, STEPS + 1)]
        for batch in fleet_.prefetch(batches, lambda batch: {module: batch}, depth=2):
            optimizer.minimize(module(batch).sum())

    run_job(body, workers, 2)
    assert servers.rows() == {*expected(workers)}
    assert servers.cuts[0] == servers.cuts[1]
    assert len(servers.cuts[0]) == STEPS // EVERY
    assert servers.reads_early == 0


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["async", "half-async", "ssp"])
def test_where_nobody_waits_a_worker_agrees_when_it_hears_of_it(mode: str, servers: Servers) -> None:
    strategies = {
        "async": StrategyFactory.create_async_strategy(max_merge_var_num=1),
        "half-async": StrategyFactory.create_half_async_strategy(),
        "ssp": StrategyFactory.create_ssp_strategy(1),
    }

    def body(fleet_: Fleet, index: int) -> None:
        module, optimizer = limited(fleet_, strategies[mode])
        for step in range(1, STEPS + 1):
            optimizer.minimize(module(batch_of(index, step)).sum())

    run_job(body, 1, 2)
    assert servers.rows() == {*expected(1)}


@pytest.mark.pairs(1)
@pytest.mark.parametrize("callers", [(0,), (1,), (0, 1)])
def test_shrink_is_done_once_by_whoever_calls_it(callers: tuple[int, ...], servers: Servers) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        module, optimizer = limited(fleet_)
        for step in range(1, STEPS):
            optimizer.minimize(module(batch_of(index, step)).sum())
        fleet_.barrier_worker()
        if index in callers:
            assert fleet_.shrink() is None  # type: ignore[func-returns-value]
        fleet_.barrier_worker()

    run_job(body, 2, 2)
    assert len(servers.rows()) == MOST
    assert servers.cuts[0] == servers.cuts[1]
    assert len(servers.cuts[0]) == 3


class DeadError(Exception):
    """Stands for the end of a process."""


def test_a_worker_that_dies_before_the_cut_leaves_it_to_another(servers: Servers) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        module, optimizer = limited(fleet_)

        def die(_: Any) -> None:
            leave(fleet_)
            raise DeadError

        if index == 1:
            cuts_of(fleet_)._find_and_tell = die
        for step in range(1, STEPS + 1):
            loss = module(batch_of(index, step)).sum()
            if (index, step) == (1, EVERY):
                with pytest.raises(DeadError):
                    optimizer.minimize(loss)
                return
            optimizer.minimize(loss)

    run_job(body, 2, 2, environ=SOON)
    scores: dict[int, int] = {}
    for step in range(1, STEPS + 1):
        for worker in range(2 if step <= EVERY else 1):
            scores.update(dict.fromkeys(batch_of(worker, step).tolist(), step))
        scores = kept(scores, MOST) if step % EVERY == 0 else scores
    assert servers.rows() == {*scores}


def test_a_worker_that_starts_again_makes_the_cut_first(servers: Servers) -> None:
    def body(fleet_: Fleet, _: int) -> None:
        first = job.fleet(Role.WORKER, 0)
        module, optimizer = limited(first)
        for step in range(1, EVERY):
            optimizer.minimize(module(batch_of(0, step)).sum())

        def die(_: Any) -> None:
            raise DeadError

        cuts_of(first)._find_and_tell = die
        with pytest.raises(DeadError):
            optimizer.minimize(module(batch_of(0, EVERY)).sum())
        assert servers.await_cuts
        leave(first)
        module, optimizer = limited(fleet_)
        assert fleet_.resume_step() == EVERY
        for step in range(EVERY + 1, STEPS + 1):
            optimizer.minimize(module(batch_of(0, step)).sum())

    job = Job(body, 1, 2, environ={**PATIENT, "FLEET_JOB_ID": "again"})
    job.run()
    assert servers.rows() == {*expected(1)}
    assert servers.reads_early == 0


def test_an_interrupted_agreement_is_finished_by_the_next_call(servers: Servers) -> None:
    def body(fleet_: Fleet, _: int) -> None:
        module, optimizer = limited(fleet_)
        cuts = cuts_of(fleet_)
        find_and_tell, interrupted = cuts._find_and_tell, []

        def interrupt(tables: Any) -> None:
            if not interrupted:
                interrupted.append(tables)
                raise KeyboardInterrupt
            find_and_tell(tables)

        cuts._find_and_tell = interrupt
        for step in range(1, STEPS + 1):
            try:
                optimizer.minimize(module(batch_of(0, step)).sum())
            except KeyboardInterrupt:
                assert step == EVERY
        assert interrupted

    run_job(body, 1, 2)
    assert servers.rows() == {*expected(1)}
    assert servers.reads_early == 0


def test_requests_that_do_not_fit_are_refused_and_disturb_nobody(servers: Servers) -> None:
    two, empty = np.zeros(2, np.int64), np.zeros(0, np.int64)
    bad: list[tuple[dict[str, Any], list[np.ndarray[Any, Any]]]] = [
        ({"shrink": pb.Shrink(version=EVERY)}, []),
        ({"shrink": pb.Shrink(now=float("nan"), version=EVERY)}, []),
        ({"shrink": pb.Shrink(now=5.0, version=EVERY - 1)}, []),
        ({"rank": pb.Rank(tables=[0])}, []),
        ({"rank": pb.Rank(tables=[7])}, [empty, empty]),
        ({"rank": pb.Rank(tables=[1])}, [empty, empty]),
        ({"rank": pb.Rank(tables=[0])}, [two, empty]),
        ({"rank": pb.Rank(tables=[0])}, [two.astype(float), two]),
        ({"rank": pb.Rank(tables=[0])}, [np.zeros(65, np.int64)] * 2),
        ({"cut": pb.Cut(tables=[0], scores=[1])}, []),
        ({"cut": pb.Cut(tables=[7], scores=[1], ids=[1])}, []),
        ({"cut": pb.Cut(tables=[1], scores=[1], ids=[1])}, []),
    ]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bounded, self.free = Embedding(None, 4, evict=MaxRows(MOST)), Embedding(None, 4)

    def body(fleet_: Fleet, _: int) -> None:
        net = Net()
        strategy = StrategyFactory.create_sync_strategy().with_settings(evict_every=EVERY)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(sgd, strategy, model=net)
        fleet_.init_worker()
        for step in range(1, STEPS + 1):
            optimizer.minimize((net.bounded(batch_of(0, step)) + net.free(batch_of(0, step))).sum())
            if step != EVERY:
                continue
            line = connections(fleet_)[0]
            for kind, tensors in bad:
                frame = Frame(line.request(step, **kind), [WireTensor.of(each) for each in tensors])
                with pytest.raises(ProtocolError):
                    line.call(frame, "what no worker asks")
            late = pb.Cut(tables=[0], scores=[2**40], ids=[0], version=step)  # long agreed on
            line.call(Frame(line.request(step, cut=late)), "a cut")

    run_job(body, 1, 2)
    assert servers.rows() == {*expected(1)}


SCORES = st.one_of(st.integers(0, 3), st.integers(0, 2**62))


@given(
    rows=st.lists(st.dictionaries(st.integers(-(2**63), 2**63 - 1), SCORES, max_size=12), min_size=1, max_size=3),
    most=st.integers(1, 20),
)
def test_a_search_finds_the_last_row_that_stays(rows: list[dict[int, int]], most: int) -> None:
    whole = {id_: score for each in rows for id_, score in each.items()}
    span = Span(len(whole), min(whole.values(), default=0), max(whole.values(), default=0))
    asking, counts, questions, place = search(span, most), None, 0, None
    while place is None:
        try:
            places = asking.send(counts)  # type: ignore[arg-type]
        except StopIteration as end:
            place = end.value
        else:
            counts, questions = [len(staying(whole, each)) for each in places], questions + 1
    assert set(staying(whole, place)) == set(kept(whole, most))
    assert questions <= 66


def staying(scores: dict[int, int], place: tuple[int, int]) -> list[int]:
    score, id_ = place
    return [each for each, its in scores.items() if (-its, each) <= (-score, id_)]
