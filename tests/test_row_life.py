"""Whole jobs whose tables forget, against a small model of the rules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dying import MOMENTS, DyingJob, at, every
from harness import run_job
from inside import flush, set_time

from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.nn import CountFilter, Embedding, MaxRows, Probability, SmallNorm, Unused
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker import connection
from fleet.strategy.parameter_server import StrategyFactory
from fleet.telemetry.diagnosis import diagnose
from fleet.telemetry.live_table import plain
from fleet.telemetry.prometheus import _beside
from fleet.telemetry.view import seen as view_of
from fleet.telemetry.view import table_rows

IDS, DIM, EVERY, STEPS, LR = range(-8, 16), 2, 4, 14, 0.125


@dataclass
class Row:
    value: np.ndarray[Any, Any]
    used: int = 0
    seen: int = 0
    weight: float = 0.0


@dataclass
class Model:
    """What the rules say, in plain Python: one table, and rounds of ids, factors of their rows, and weights."""

    admit: Any
    evict: Sequence[Any]
    initial: dict[int, np.ndarray[Any, Any]]
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, list[float]] = field(default_factory=dict)
    step: int = 0
    evicted: int = 0
    dropped: int = 0

    def round(self, batches: Sequence[tuple[list[int], float, list[float]]]) -> None:
        self.step += 1
        for id_ in {id_ for ids, _, _ in batches for id_ in ids}:
            among = [batch for batch in batches if id_ in batch[0]]
            gradient = sum(factor * ids.count(id_) for ids, factor, _ in among) / len(batches)
            weight = sum(w for ids, _, weights in among for each, w in zip(ids, weights, strict=True) if each == id_)
            if id_ not in self.rows:
                count = self.counts.setdefault(id_, [0, 0.0])
                count[0] += len(among)
                count[1] += weight
                if self.admit is not None and count[self.admit.of == "weight"] < self.admit.n:
                    self.dropped += len(among)
                    continue
                seen, weighed = self.counts.pop(id_)
                self.rows[id_] = Row(self.initial[id_].copy(), 0, int(seen) - len(among), weighed - weight)
            row = self.rows[id_]
            row.value -= np.float32(LR * gradient)
            row.used, row.seen, row.weight = self.step, row.seen + len(among), row.weight + weight
        if self.step % EVERY == 0:
            self.shrink()

    def shrink(self) -> None:
        leave = {id_ for rule in self.evict for id_ in self.leaving(rule)}
        self.evicted += len(leave)
        self.rows = {id_: row for id_, row in self.rows.items() if id_ not in leave}

    def leaving(self, rule: Any) -> list[int]:
        if isinstance(rule, Unused):
            return [id_ for id_, row in self.rows.items() if self.step - row.used >= rule.steps]
        if isinstance(rule, SmallNorm):
            return [id_ for id_, row in self.rows.items() if np.linalg.norm(row.value) < rule.below]
        by = {"recent": "used", "often": "seen", "weight": "weight"}[rule.by]
        return sorted(self.rows, key=lambda id_: (-getattr(self.rows[id_], by), id_))[rule.n :]

    def seen(self) -> torch.Tensor:
        """What an evaluation reads."""
        nothing = np.zeros(DIM, np.float32)
        return torch.tensor(np.stack([self.rows[id_].value if id_ in self.rows else nothing for id_ in IDS]))

    def told(self) -> dict[str, int]:
        counted = 0 if self.admit is None else len(self.counts)
        return {
            "rows": len(self.rows),
            "pending": counted,
            "evicted": self.evicted,
            "dropped_gradients": self.dropped,
        }


def batch_of(worker: int, step: int) -> tuple[list[int], float, list[float]]:
    random = np.random.default_rng(100 * worker + step)
    ids = (random.zipf(1.5, 5) % len(IDS) + IDS[0]).tolist()
    return ids, float(random.integers(-4, 5)), (random.integers(0, 9, 5) / 4).tolist()


def train(fleet_: Fleet, worker: int, module: Embedding, optimizer: Any, steps: int = STEPS) -> None:
    by_weight = module.admit == RULES["weights"][0] or RULES["weights"][1][0] in module.evict
    for step in range(steps):
        ids, factor, weights = batch_of(worker, step)
        said = {"weights": torch.tensor(weights)} if by_weight else {}
        optimizer.minimize((module(torch.tensor(ids), **said) * factor).sum())
    flush(fleet_)


def make(fleet_: Fleet, rules: Any, strategy: Any = None) -> tuple[Embedding, Any, dict[int, Any]]:
    torch.manual_seed(5)
    admit, evict = rules
    module = Embedding(None, DIM, initializer="uniform(-1, 1)", admit=admit, evict=evict)
    strategy = (strategy or StrategyFactory.create_sync_strategy()).with_settings(evict_every=EVERY)
    sgd = torch.optim.SGD(module.parameters(), lr=LR)
    optimizer = fleet_.distributed_optimizer(sgd, strategy, model=module)
    fleet_.init_worker()
    with torch.no_grad():
        initial = dict(zip(IDS, module(torch.tensor(list(IDS))).numpy().copy(), strict=True))
    return module, optimizer, initial


TOLD = ("rows", "pending", "evicted", "dropped_gradients")


def look(fleet_: Fleet, module: Embedding) -> tuple[torch.Tensor, dict[str, int]]:
    """What an evaluation reads, and what the job says of its table."""
    module.eval()
    with torch.no_grad():
        seen = module(torch.tensor(list(IDS)))
    table = fleet_.summary()["tables"]["weight"]
    return seen, {name: table[name] for name in TOLD}


RULES: dict[str, tuple[Any, list[Any]]] = {
    "a filter": (CountFilter(3), []),
    "those unused": (None, [Unused(steps=3)]),
    "the most recent": (None, [MaxRows(5)]),
    "a filter and the most often": (CountFilter(2), [MaxRows(4, by="often"), Unused(steps=6)]),
    "weights": (CountFilter(1.5, of="weight"), [MaxRows(4, by="weight")]),
    "small ones": (None, [SmallNorm(0.9), MaxRows(7)]),
}


@pytest.mark.pairs(2)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rows_come_and_leave_as_the_rules_say(rules: str, workers: int, servers: int) -> None:
    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, initial = make(fleet_, RULES[rules])
        train(fleet_, worker, module, optimizer)
        fleet_.barrier_worker()
        before = look(fleet_, module)
        fleet_.barrier_worker()
        fleet_.shrink()
        return initial, before, look(fleet_, module)

    for initial, before, after in run_job(body, workers, servers):
        model = Model(*RULES[rules], initial)
        for step in range(STEPS):
            model.round([batch_of(worker, step) for worker in range(workers)])
        for seen, told in (before, after):
            assert told == model.told()
            torch.testing.assert_close(seen, model.seen())
            model.shrink()


MODES = {
    "async": StrategyFactory.create_async_strategy(max_merge_var_num=1),
    "half-async": StrategyFactory.create_half_async_strategy(max_merge_var_num=1),
    "ssp": StrategyFactory.create_ssp_strategy(2),
    "dc-asgd": StrategyFactory.create_half_async_strategy(dc_asgd_lambda=1e-9),
}


@pytest.mark.pairs(2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_one_worker_has_the_same_rows_in_every_mode(mode: str, servers: int) -> None:
    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, initial = make(fleet_, RULES["weights"], MODES[mode])
        train(fleet_, worker, module, optimizer)
        return initial, look(fleet_, module)

    ((initial, (seen, told)),) = run_job(body, 1, servers)
    model = Model(*RULES["weights"], initial)
    for step in range(STEPS):
        model.round([batch_of(0, step)])
    assert told == model.told()
    torch.testing.assert_close(seen, model.seen())


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["async", "half-async", "ssp"])
def test_workers_without_rounds_keep_a_table_within_its_bound(mode: str) -> None:
    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, _ = make(fleet_, RULES["the most recent"], MODES[mode])
        train(fleet_, worker, module, optimizer)
        fleet_.barrier_worker()
        if worker == 0:
            fleet_.shrink()
        fleet_.barrier_worker()
        return look(fleet_, module)

    for seen, told in run_job(body, 2, 2):
        assert told["rows"] == int(seen.any(1).sum()) == 5
        assert told["evicted"] > 0


def test_chance_is_the_same_on_any_number_of_servers() -> None:
    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, _ = make(fleet_, (Probability(0.25), [Unused(steps=8)]))
        train(fleet_, worker, module, optimizer)
        fleet_.barrier_worker()
        return look(fleet_, module)

    (one, told), _ = run_job(body, 2, 1)
    (two, told_of_two), _ = run_job(body, 2, 2)
    assert torch.equal(one, two)
    assert told == told_of_two
    assert 0 < told["rows"] < len(IDS)
    assert told["dropped_gradients"] > 0


def test_a_process_alone_does_the_same() -> None:
    alone = Fleet()
    alone.init()
    module, optimizer, initial = make(alone, RULES["a filter and the most often"])
    train(alone, 0, module, optimizer)
    seen, told = look(alone, module)
    alone.stop_worker()
    model = Model(*RULES["a filter and the most often"], initial)
    for step in range(STEPS):
        model.round([batch_of(0, step)])
    assert told == model.told()
    torch.testing.assert_close(seen, model.seen())


def saves(fleet_: Fleet, rule: Any, optimizer: Any, where: Path, modes: Sequence[str]) -> None:
    """Rows 0 to 9 are trained once, then 10 to 12 are, each four times as often; a checkpoint follows each part."""
    module = Embedding(None, DIM, initializer="zeros", evict=rule)
    wrapped = fleet_.distributed_optimizer(optimizer(module.parameters(), lr=LR), model=module)
    fleet_.init_worker()
    for ids, steps, mode in zip((torch.arange(10), torch.arange(10, 13)), (1, 4), modes, strict=True):
        for _ in range(steps):
            wrapped.minimize(module(ids).sum())
        if mode:
            fleet_.save_persistables(where, mode=mode)


def sync_every(steps: int) -> Any:
    return StrategyFactory.create_sync_strategy().with_settings(evict_every=steps)


@pytest.mark.parametrize("modes", [("full", "delta"), ("", "full")])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.pairs(1)
def test_rows_that_were_saved_without_a_rule_count_as_used_when_they_are_loaded(
    modes: Sequence[str], servers: int, tmp_path: Path
) -> None:
    """However they were saved: at once, or most of them in a checkpoint from before."""
    run_job(lambda fleet_, _: saves(fleet_, None, torch.optim.SGD, tmp_path, modes), 1, 1)

    def body(fleet_: Fleet, worker: int) -> Any:
        module = Embedding(None, DIM, initializer="zeros", evict=Unused(steps=4))
        sgd = torch.optim.SGD(module.parameters(), lr=LR)
        wrapped = fleet_.distributed_optimizer(sgd, sync_every(EVERY), model=module)
        fleet_.init_worker()
        found = []
        for _ in range(7):  # steps 6 to 12
            wrapped.minimize(module(torch.tensor([20])).sum())
            flush(fleet_)
            found.append(fleet_.summary()["tables"]["weight"]["rows"])
        return found

    (found,) = run_job(body, 1, servers, model_dir=str(tmp_path))
    assert found == [14, 14, 14, 14, 14, 14, 1]


def test_what_was_counted_of_rows_outlives_another_optimizer(tmp_path: Path) -> None:
    rule, where = MaxRows(3, by="often"), tmp_path / "step-00000005"
    run_job(lambda fleet_, _: saves(fleet_, rule, torch.optim.SGD, where, ("full", "delta")), 1, 1)
    alone = Fleet(environ={})
    alone.init()
    alone.resume_from(tmp_path, strict=False)
    module = Embedding(None, DIM, initializer="zeros", evict=rule)
    adam = torch.optim.Adam(module.parameters(), lr=LR)
    alone.distributed_optimizer(adam, sync_every(EVERY), model=module)
    alone.init_worker()
    alone.shrink()
    with torch.no_grad():
        rows = module(torch.arange(13))
    alone.stop_worker()
    assert rows.any(1).nonzero()[:, 0].tolist() == [10, 11, 12]


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("journal_bytes", "nth"), [(1, 7), (2000, 4), (1 << 30, 4)])
@pytest.mark.parametrize("rules", ["weights", "those not seen for long"])
def test_servers_that_are_killed_forget_the_same_rows(
    tmp_path: Path, rules: str, journal_bytes: int, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)  # servers are there again at once
    said = RULES.get(rules, (CountFilter(2), [Unused(seconds=35)]))

    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, _ = make(fleet_, said)
        times = itertools.count(1000, 10)
        set_time(fleet_, lambda: float(next(times)))
        train(fleet_, worker, module, optimizer)
        fleet_.barrier_worker()
        return look(fleet_, module)

    (seen, told), _ = run_job(body, 2, 2)
    job = DyingJob(body, tmp_path, plan=every(nth, 1), journal_bytes=journal_bytes)
    for seen_too, told_too in job.run():
        assert torch.equal(seen_too, seen)
        assert told_too == told
    assert job.kills > 5
    assert told["evicted"] > 0


@pytest.mark.pairs(1)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["cut", "shrink"])
def test_a_server_killed_while_rows_leave_lets_them_leave(
    tmp_path: Path, kind: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)

    def body(fleet_: Fleet, worker: int) -> Any:
        module, optimizer, initial = make(fleet_, RULES["the most recent"])
        train(fleet_, worker, module, optimizer)
        fleet_.shrink()
        return initial, look(fleet_, module)

    job = DyingJob(body, tmp_path, plan=at(kind, moment, server=1))
    for initial, (seen, told) in job.run():
        model = Model(*RULES["the most recent"], initial)
        for step in range(STEPS):
            model.round([batch_of(worker, step) for worker in range(2)])
        model.shrink()
        assert told == model.told()
        torch.testing.assert_close(seen, model.seen())
    assert job.kills == 1


def test_a_server_shows_how_rows_come_and_leave() -> None:
    statuses: list[dict[str, Any]] = []

    def body(fleet_: Fleet, worker: int) -> None:
        module, optimizer, _ = make(fleet_, (CountFilter(100), []))
        train(fleet_, worker, module, optimizer)
        channel = network.connect(Endpoint("server0", 1))
        reply = raise_if_error(channel.start(Frame(pb.Request(status=pb.Status())), 10.0).result())
        channel.close()
        statuses.append(json.loads(reply.message.about))

    network = LoopbackNetwork()
    run_job(body, network=network)
    view = view_of(0.0, {"server 0": statuses[0]}, {})
    (life,) = view.servers["server 0"].tables.values()
    assert (life["rows"], life["evicted"]) == (0, 0)
    assert life["pending"] > 0
    (row,) = table_rows(view, view)
    assert plain([], [row]).splitlines()[-1].split()[-3:] == [f"{life[name]:,}" for name in TOLD[1:]]
    told = [each for each in diagnose(view, view) if "No id has a row in the table 'weight'" in each]
    assert told == []  # it is early
    late = replace(view.servers["server 0"], figures={**view.servers["server 0"].figures, "version": 100.0})
    later = replace(view, servers={"server 0": late})
    assert any("No id has a row in the table 'weight'" in each for each in diagnose(later, later))
    page = {family.name: family.samples for family in _beside(statuses[0], "0")}
    assert page["fleet_server_table_pending"][0].value == life["pending"]
    assert page["fleet_server_table_dropped_gradients"][0].value == life["dropped_gradients"]
