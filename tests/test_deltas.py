"""Checkpoints of what has changed, and states that come into a running job."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENT, assert_same, run_job, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import completed, connections, flush
from small_job import STRATEGIES, Net, join, same, train

import fleet.nn
from fleet import Fleet
from fleet.checkpoint.manifest import Checkpoint, Manifest
from fleet.checkpoint.pieces import PieceWriter
from fleet.checkpoint.places import Directory
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import CheckpointError, ConfigurationError
from fleet.nn import CountFilter, Unused
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec, PlanSettings
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.table.shard import FIRST, Piece, Shard
from fleet.ps.worker.state_reader import exported


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("into", ["the same directory", "directories of their own"])
def test_base_and_deltas_are_what_a_full_one_is(strategy: str, into: str, tmp_path: Path) -> None:
    def place(number: int) -> Path:
        return tmp_path / ("ckpt" if into == "the same directory" else f"ckpt-{number}")

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(4))
        fleet_.save_persistables(place(0))
        for number in (1, 2, 3):
            train(model, optimizer, range(4 + number, 5 + number))
            fleet_.save_persistables(place(number), mode="delta")
        fleet_.save_persistables(tmp_path / "full")
        return model.seen()

    def again(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        assert fleet_.resume_step() == 7
        seen = model.seen()
        if strategy == "sync":
            train(model, optimizer, range(20, 22))
        return [*seen, *model.seen()]

    (there,) = run_job(body, 1, 2)
    (expected,) = run_job(again, 1, 2, model_dir=str(tmp_path / "full"))
    if strategy == "sync":
        assert same(expected[: len(there)], there)
    for servers in (2, 3):
        (found,) = run_job(again, 1, servers, model_dir=str(place(3)))
        assert same(found, expected), servers


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", ["one", "all"])
def test_a_running_job_goes_on_from_a_checkpoint(strategy: str, who: str, tmp_path: Path) -> None:
    """As a job does that starts from it; whoever did not call it takes part from the next barrier on."""

    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(5))
        fleet_.save_persistables(tmp_path / "ckpt")

    def restarted(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        return join(fleet_, strategy)[0].seen()

    def running(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(30, 33))
        fleet_.barrier_worker()
        if who == "all" or fleet_.is_first_worker():
            fleet_.load_persistables(tmp_path / "ckpt")
        fleet_.barrier_worker()
        assert fleet_.resume_step() == 5
        return model.seen()

    run_job(source, 1, 2)
    (expected,) = run_job(restarted, 1, 2, model_dir=str(tmp_path / "ckpt"))
    for found in run_job(running, 2, 3):
        assert same(found, expected)


def test_a_synchronous_job_that_loads_ends_where_a_restarted_one_ends(tmp_path: Path) -> None:
    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(5))
        fleet_.save_persistables(tmp_path / "ckpt")

    def restarted(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(5, 9))
        return model.seen()

    def running(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        for _ in range(2):
            train(model, optimizer, range(30, 33))
            fleet_.load_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(5, 9))
        return model.seen()

    run_job(source, 1, 2)
    expected = run_job(restarted, 2, 2, model_dir=str(tmp_path / "ckpt"))
    assert all(same(found, expected[0]) for found in (*run_job(running, 2, 2), *expected))


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_tensors_start_a_job(strategy: str) -> None:
    torch.manual_seed(9)
    dense, closed, ids = torch.nn.Linear(4, 3), torch.randn(30, 4), torch.arange(-20, 60, 2)
    opened = torch.randn(len(ids), 4)
    state = {
        **{f"dense.{name}": value for name, value in dense.state_dict().items()},
        "closed.weight": closed,
        "open.ids": ids,
        "open.weight": opened,
    }

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        fleet_.barrier_worker()
        fleet_.load_state_dict(model, state)
        fleet_.barrier_worker()
        with torch.no_grad():
            assert torch.equal(model.dense.weight, dense.weight)
            assert torch.equal(model.dense.bias, dense.bias)
            assert torch.equal(model.closed(torch.arange(30)), closed)
            assert torch.equal(model.open(ids), opened)
        fleet_.barrier_worker()
        train(model, optimizer, range(3))

    run_job(body, 2, 3)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    state = {
        "dense.weight": torch.zeros(3, 5),
        "closed.weight": torch.zeros(30, 4),
        "open.weight": torch.zeros(2, 4),
        "open.ids": torch.tensor([1, 1]),
        "more": torch.zeros(1),
    }

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        before = model.seen()
        with pytest.raises(CheckpointError) as caught:
            fleet_.load_state_dict(model, state)
        for problem in (
            "'dense.weight': (3, 5) in the state, (3, 4) in the model",
            "'dense.bias': in the model, absent in the state",
            "'open.ids': not one int64 id of its own for each of the 2 rows",
            "'more': in the state, absent in the model",
        ):
            assert problem in str(caught.value)
        assert same(model.seen(), before)
        train(model, optimizer, range(2))

    run_job(body, 1, 2)


def test_a_mode_that_is_none(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        join(fleet_)
        with pytest.raises(ConfigurationError, match="'full' or 'delta'; got 'partial'"):
            fleet_.save_persistables(tmp_path / "ckpt", mode="partial")
        assert not (tmp_path / "ckpt").exists()

    run_job(body, 1, 1)


# ---------------------------------------------------------------------------------------------- where deltas go on from


def state_of(fleet_: Fleet) -> dict[str, Any]:
    """All that the servers hold now, by name."""
    return named(piece for client in connections(fleet_) for piece in exported(client, completed(fleet_)))


def state_in(dirname: Path) -> dict[str, Any]:
    """All that a server of a job of one server has when it starts from a checkpoint."""
    raw = json.loads(Checkpoint.open(dirname).manifest.spec.to_json())
    raw["settings"]["server_num"] = 1
    spec = JobSpec.from_json(json.dumps(raw))
    options = json.dumps(torch.optim.Adagrad([torch.zeros(1)], lr=0.1).defaults)
    shard = Shard(make_plan(spec), 0, 0, [options] * len(spec.groups))
    restore_from(dirname).fill(shard, 0)
    pieces, cursor = [], FIRST
    while cursor:
        pieces.append(shard.export(cursor))
        cursor = pieces[-1].next_cursor
    return named(pieces)


def named(pieces: Iterable[Piece]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for piece in pieces:
        tensors = {name: torch.as_tensor(each) for name, each in piece.tensors.items()}
        if "dense" in piece.about:
            found.update(tensors)
            continue
        table, ids = piece.about["table"], tensors.pop("ids").tolist()
        found[f"{table} step"] = torch.tensor(piece.about["step"])
        for column, rows in tensors.items():
            found.update({f"{table} {key} {column}": row for key, row in zip(ids, rows, strict=True)})
    return found


#: What two directories may do to each other: a full checkpoint replaces what a delta needs.
REFUSALS = "would replace a checkpoint that it needs|is not there any more"
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(0, 40)),
        st.tuples(st.sampled_from(["full", "delta", "failed full", "failed delta"]), st.sampled_from("ab")),
        st.tuples(st.just("load"), st.sampled_from("ab")),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_whatever_is_done_before_a_checkpoint_has_the_state_of_its_moment(
    operations: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Deltas into two directories, some of which fail, between trainings and loads: to the bit what servers held."""
    tmp_path = tmp_path_factory.mktemp("operations")

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        saved: dict[str, dict[str, Any]] = {}
        for what, argument in operations:
            place = tmp_path / str(argument)
            if what == "train":
                train(model, optimizer, [argument])
            elif what.startswith("failed"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(CheckpointWriter, "commit", _fail)
                    with pytest.raises((OSError, CheckpointError), match=f"the disk|{REFUSALS}"):
                        fleet_.save_persistables(place, mode=what.split()[1])
            elif what == "load":
                if argument in saved and not refused(lambda at=place: fleet_.load_persistables(at)):
                    assert_same(state_of(fleet_), saved[argument])
            elif not refused(lambda at=place, mode=what: fleet_.save_persistables(at, mode=mode)):
                saved[argument] = state_of(fleet_)
                assert_same(state_in(place), saved[argument])

    run_job(body, 1, 2)


def refused(call: Callable[[], None]) -> bool:
    """Whether it was, because of what has become of a checkpoint that it needs."""
    try:
        call()
    except CheckpointError as error:
        if not re.search(REFUSALS, str(error)):
            raise
        return True
    return False


def _fail(*_: Any) -> None:
    raise OSError("the disk fails")


@pytest.mark.slow
def test_a_chain_of_fifty(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        for number in range(50):
            train(model, optimizer, [number])
            fleet_.save_persistables(tmp_path / str(number), mode="delta")
        assert_same(state_in(tmp_path / "49"), state_of(fleet_))

    run_job(body, 1, 2)
    assert len(Checkpoint.open(tmp_path / "49").lineage()) == 50


def test_a_chain_longer_than_the_interpreters_stack() -> None:
    found: Checkpoint | None = None
    for number in range(3000):
        manifest = Manifest(str(number), 0, 0, JobSpec((), (), (), PlanSettings(server_num=1, worker_num=1)), ())
        found = Checkpoint(Directory(Path("/nowhere")), manifest, found)
    assert found is not None
    assert [each.manifest.id for each in found.lineage()] == [str(number) for number in range(3000)]


@pytest.mark.parametrize("fate", ["replaced", "deleted"])
def test_a_delta_without_its_base(fate: str, tmp_path: Path) -> None:
    """Neither is one written, nor is one that was written loaded; a full one helps."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "base")
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "delta", mode="delta")
        shutil.rmtree(tmp_path / "base")
        if fate == "replaced":
            shutil.copytree(tmp_path / "delta", tmp_path / "base")
        before = state_of(fleet_)
        expected = {
            "replaced": r"goes on from a checkpoint that is not there any more; at .*delta; expected checkpoint \w+ at "
            r".*base; got checkpoint",
            "deleted": "no checkpoint here; at .*base",
        }[fate]
        for call in (
            lambda: fleet_.load_persistables(tmp_path / "delta"),
            lambda: fleet_.save_persistables(tmp_path / "more", mode="delta"),
        ):
            with pytest.raises(CheckpointError, match=expected):
                call()
        assert_same(state_of(fleet_), before)
        assert not (tmp_path / "more").exists()
        fleet_.save_persistables(tmp_path / "more")
        fleet_.save_persistables(tmp_path / "most", mode="delta")
        assert_same(state_in(tmp_path / "most"), before)

    run_job(body, 1, 2)


@pytest.mark.parametrize("how", ["init_server", "load_persistables"])
def test_a_delta_goes_on_from_what_was_loaded(how: str, tmp_path: Path) -> None:
    """By other servers than those that wrote it, and with no more than what changed since."""

    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(6))
        fleet_.save_persistables(tmp_path / "base")

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        if how == "load_persistables":
            train(model, optimizer, range(9))
            fleet_.save_persistables(tmp_path / "forgotten")
            fleet_.load_persistables(tmp_path / "base")
        model.open(torch.arange(100, 103))  # rows are not there for having been read
        train(model, optimizer, [6])
        fleet_.save_persistables(tmp_path / "delta", mode="delta")
        assert_same(state_in(tmp_path / "delta"), state_of(fleet_))

    run_job(source, 1, 3)
    run_job(body, 1, 2, model_dir=str(tmp_path / "base") if how == "init_server" else None)
    delta = Checkpoint.open(tmp_path / "delta")
    assert delta.before is not None
    rows, before = (sum(len(ids) for _, (ids, *_) in each.pieces("table")) for each in (delta, delta.before))
    assert rows - before == 2 * len(torch.unique(Net.ids(6))), "the rows of one step, in two tables"


def test_parameters_and_tables_that_joined_since_are_in_a_delta(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(3))
        fleet_.save_persistables(tmp_path / "base")
        late = fleet.nn.Embedding(None, 2)
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [weight]})
        optimizer.add_param_group({"params": list(late.parameters())})
        optimizer.minimize(late(torch.arange(4)).square().sum() + weight.sum())
        fleet_.save_persistables(tmp_path / "delta", mode="delta")
        assert_same(state_in(tmp_path / "delta"), state_of(fleet_))

    run_job(body, 1, 2)
    added = Checkpoint.open(tmp_path / "delta").manifest.spec.tables[-1].name
    assert {f"{added} {key} weight" for key in range(4)} <= state_in(tmp_path / "delta").keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_deltas_of_several_workers(strategy: str, tmp_path: Path) -> None:
    """One writes for all; who comes when it is written returns at once."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        for number in range(3):
            train(model, optimizer, range(worker * 10 + number, worker * 10 + number + 2))
            fleet_.barrier_worker()
            if fleet_.is_first_worker():
                fleet_.save_persistables(tmp_path / "ckpt", mode="delta")
            fleet_.barrier_worker()
            if not fleet_.is_first_worker():
                fleet_.save_persistables(tmp_path / "ckpt", mode="delta")
            fleet_.barrier_worker()
        if fleet_.is_first_worker():
            fleet_.save_persistables(tmp_path / "full")

    run_job(body, 2, 2)
    assert_same(state_in(tmp_path / "ckpt"), state_in(tmp_path / "full"))


# ---------------------------------------------------------------------------------------------- into a running job


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_rows_that_are_on_their_way_do_not_outlive_a_load(strategy: str, tmp_path: Path) -> None:
    """What was prefetched before it is asked for again."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(4))
        fleet_.save_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(4, 8))
        batches = [torch.arange(5)] * 6
        for number, ids in enumerate(
            fleet_.prefetch(batches, lambda ids: {model.closed: ids, model.open: ids}, depth=2)
        ):
            if number == 2:
                fleet_.load_persistables(tmp_path / "ckpt")
                rows.append((model.closed(ids).detach(), model.open(ids).detach()))
                continue
            optimizer.minimize(model.closed(ids).sum() + model.open(ids).sum())

    def restarted(fleet_: Fleet, worker: int) -> None:
        model, _ = join(fleet_, strategy)
        rows.append((model.closed(torch.arange(5)).detach(), model.open(torch.arange(5)).detach()))

    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    run_job(body, 1, 2)
    run_job(restarted, 1, 2, model_dir=str(tmp_path / "ckpt"))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])


def test_all_workers_are_at_the_same_step_after_one_has_loaded(tmp_path: Path) -> None:
    """Also whose gradient was in the round that was open."""
    pushed = threading.Event()

    def body(fleet_: Fleet, worker: int) -> tuple[int, list[torch.Tensor]]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(5))
        if fleet_.is_first_worker():
            until(lambda: pushed.is_set())
            fleet_.load_persistables(tmp_path / "ckpt")
            assert fleet_.resume_step() == 2
        else:
            client = connections(fleet_)[1]
            start = client.start

            def watched(*args: Any, **options: Any) -> Any:
                pending = start(*args, **options)
                pushed.set()
                return pending

            client.start = watched  # type: ignore[method-assign]
        train(model, optimizer, [5])
        fleet_.barrier_worker()
        return fleet_.resume_step(), model.seen()

    (first, ours), (second, theirs) = run_job(body, 2, 2)
    assert first == second == 3
    assert same(ours, theirs)


def test_an_asynchronous_worker_learns_of_a_load_from_its_next_push(tmp_path: Path) -> None:
    """Not only when it fetches values, which it does after many steps."""
    trained, loaded = threading.Event(), threading.Event()

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, "async")
        train(model, optimizer, range(2))
        fleet_.barrier_worker()
        if fleet_.is_first_worker():
            fleet_.save_persistables(tmp_path / "ckpt")
            assert trained.wait(30)
            fleet_.load_persistables(tmp_path / "ckpt")
            loaded.set()
            return
        train(model, optimizer, range(9))
        flush(fleet_)
        trained.set()
        assert loaded.wait(30)
        for _ in range(2):
            optimizer.minimize(model.dense(torch.zeros(1, 4)).sum() * 0)
            flush(fleet_)
        assert fleet_.resume_step() == 4

    seldom = {**PATIENT, "FLAGS_communicator_min_send_grad_num_before_recv": "1000"}
    run_job(body, 2, 2, environ=seldom)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_two_workers_load_different_checkpoints(strategy: str, tmp_path: Path) -> None:
    """One after the other; in the end all have one of the two."""

    def source(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        for name in "01":
            train(model, optimizer, range(3))
            fleet_.save_persistables(tmp_path / name)
            seen.append(model.seen())
        return seen

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        fleet_.barrier_worker()
        fleet_.load_persistables(tmp_path / str(worker))
        fleet_.barrier_worker()
        return model.seen()

    seen: list[list[torch.Tensor]] = []
    run_job(source, 1, 2)
    ours, theirs = run_job(body, 2, 2)
    assert same(ours, theirs)
    assert any(same(ours, each) for each in seen)


def test_geo_workers_keep_their_optimizers_when_plain_tensors_come(tmp_path: Path) -> None:
    """Their state is nowhere else: servers have the one of the checkpoint that the job began with, if it did."""

    def job(load: bool, **options: Any) -> torch.Tensor:
        def body(fleet_: Fleet, worker: int) -> torch.Tensor:
            model = torch.nn.Linear(2, 1)
            torch.nn.init.ones_(model.weight)
            torch.nn.init.ones_(model.bias)
            adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
            optimizer = fleet_.distributed_optimizer(adagrad, STRATEGIES["geo"](), model=model)
            fleet_.init_worker()
            for _ in range(4):
                optimizer.minimize(model(torch.ones(1, 2)).sum())
            if not options:
                fleet_.save_persistables(tmp_path / "ckpt")
            if load:
                fleet_.load_state_dict(model, {name: value.clone() for name, value in model.state_dict().items()})
            for _ in range(2):
                optimizer.minimize(model(torch.ones(1, 2)).sum())
            return model.weight.detach().clone()

        return run_job(body, 1, 2, **options)[0]

    assert torch.equal(job(False), job(True))
    from_there = {"model_dir": str(tmp_path / "ckpt")}
    assert torch.equal(job(False, **from_there), job(True, **from_there))


def test_others_go_on_training_while_one_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mode without rounds: the disk waits until five further steps have been taken."""
    create, saving, trained = Directory.create, threading.Event(), threading.Event()

    def waiting(place: Directory, name: str, pieces: Any) -> None:
        saving.set()
        assert trained.wait(30)
        create(place, name, pieces)

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, "half-async")
        train(model, optimizer, range(2))
        fleet_.barrier_worker()
        if fleet_.is_first_worker():
            monkeypatch.setattr(Directory, "create", waiting)
            fleet_.save_persistables(tmp_path / "ckpt")
        else:
            assert saving.wait(30)
            train(model, optimizer, range(25))
            trained.set()

    run_job(body, 2, 2)
    assert Checkpoint.open(tmp_path / "ckpt").manifest.version == 2


def test_a_checkpoint_of_geo_has_no_state_of_rows(tmp_path: Path) -> None:
    """Nor do its servers make room for any: workers have it."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, "geo")
        train(model, optimizer, range(4))
        fleet_.save_persistables(tmp_path / "ckpt")

    run_job(body, 1, 2)
    assert {tuple(about["columns"]) for about, _ in Checkpoint.open(tmp_path / "ckpt").pieces("table")} == {("weight",)}


def test_a_worker_saves_while_another_one_brings_a_table(tmp_path: Path) -> None:
    """The checkpoint is of the model that the one who saves knows."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        late = fleet.nn.Embedding(None, 2)
        if fleet_.is_first_worker():
            until(lambda: len(fleet_.summary()["tables"]) == 3)
            fleet_.save_persistables(tmp_path / "base")
        optimizer.add_param_group({"params": list(late.parameters())})
        train(model, optimizer, range(2, 4))
        optimizer.minimize(late(torch.arange(4)).sum())
        fleet_.save_persistables(tmp_path / "delta", mode="delta")
        if fleet_.is_first_worker():
            assert_same(state_in(tmp_path / "delta"), state_of(fleet_))
        fleet_.barrier_worker()

    run_job(body, 2, 2)
    run_job(lambda fleet_, worker: train(*join(fleet_), range(2)), 1, 3, model_dir=str(tmp_path / "base"))


@pytest.mark.parametrize("strategy", ["async", "half-async", "ssp", "dc-asgd"])
@pytest.mark.parametrize("after", ["dense", "counts", "removed", "columns"])
@pytest.mark.pairs(1)
def test_rows_that_leave_while_a_delta_is_written_do_not_come_back_as_they_were(
    strategy: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gone when the delta is loaded, or as they were when it was written."""
    add, is_delta, shards = PieceWriter.add, [False], list[Shard]()

    def leave(self: PieceWriter, about: dict[str, Any], tensors: Any) -> None:
        add(self, about, tensors)
        if is_delta[0] and after in about:
            while shards:
                shard = shards.pop()
                shard.shrink(None)
                shard.apply_pending()

    def body(made: Fleet, index: int) -> list[float]:
        table = fleet.nn.Embedding(None, 2, admit=CountFilter(2), evict=Unused(1))
        optimizer = made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), STRATEGIES[strategy]())
        made.init_worker()

        def step(*ids: int) -> None:
            optimizer.minimize(table(torch.tensor(ids)).sum())
            flush(made)

        step(1, 2, 3)
        step(1, 2, 3)
        made.save_persistables(tmp_path / "saved")
        step(1, 2, 3)
        step(3)
        step(3)
        found = table(torch.arange(1, 4)).detach()[:, 0]
        is_delta[0] = True
        made.save_persistables(tmp_path / "saved", mode="delta")
        return found.tolist()

    def again(made: Fleet, index: int) -> list[float]:
        table = fleet.nn.Embedding(None, 2, admit=CountFilter(2), evict=Unused(1))
        made.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), STRATEGIES[strategy]())
        made.init_worker()
        with torch.no_grad():
            return table.eval()(torch.arange(1, 4))[:, 0].tolist()

    export = Shard.export

    def known(self: Shard, *args: Any, **options: Any) -> Piece:
        if is_delta[0] and not was[0]:
            was[0] = True
            shards.append(self)
        return export(self, *args, **options)

    was = [False]
    monkeypatch.setattr(Shard, "export", known)
    monkeypatch.setattr(PieceWriter, "add", leave)
    (there,) = run_job(body)
    (found,) = run_job(again, model_dir=str(tmp_path / "saved"))
    assert not shards
    assert was[0]
    assert found[2] == there[2]
    for was_there, is_there in zip(there[:2], found[:2], strict=True):
        assert is_there in (0.0, was_there)
