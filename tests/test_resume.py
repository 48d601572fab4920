"""``fleet.resume_from``: a job goes on where it was, whatever is there of it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_processes
import torch
from harness import PATIENT, Job, assert_close, run_job, until
from inside import abort, end_of, flush, leave, listening
from ranks import free_ports
from small_job import Net, same, train
from test_processes import Processes, ended

import fleet.nn
from fleet import Checkpoints, Fleet
from fleet.base import exit_guard
from fleet.base.cluster import Endpoint
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import place_at
from fleet.checkpoint.resume_choice import (
    BEGINNING,
    Choice,
    Held,
    Mark,
    Resumed,
    Seen,
    choose,
    passed_by,
    refuse_apart,
    step_of_server,
    step_of_worker,
)
from fleet.checkpoint.series import marks
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    NotInitializedError,
    ProtocolError,
    ServerLostError,
    StateError,
)
from fleet.ps import backend, resume_query
from fleet.ps.server import checkpoint_reader, runtime
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker import connection
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import StrategyFactory

STEPS, EVERY = 8, 3

#: Those of this process, also while they are about to join.
WORKERS: list[WorkerRuntime] = []


class Worker(WorkerRuntime):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        WORKERS.append(self)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_query, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(resume_query, "LINGER_S", 0.0)
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(runtime, "GRACE_S", 0.0)
    monkeypatch.setattr(backend, "WorkerRuntime", Worker)
    WORKERS.clear()


#: Workers are threads and share torch's generator.
DRAWING = threading.Lock()


def join(made: Fleet) -> tuple[Net, Any]:
    with DRAWING:
        torch.manual_seed(3)
        model = Net()
    optimizer = made.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
    made.init_worker()
    return model, optimizer


class Killed(BaseException):
    """Nothing in a worker may hold this up."""


def root_of(roots: object, index: int) -> object:
    return roots[index] if isinstance(roots, list) else roots


class Resuming(Job):
    """A job in which every role resumes, and which can be killed as a whole. ``root`` may be a list: each server's."""

    def __init__(self, root: object, body: Callable[[Fleet, int], Any], *given: Any, **options: Any) -> None:
        self.root = root
        self.strict = options.pop("strict", True)
        #: what every role was told
        self.told: dict[str, int] = {}
        self.runtimes: dict[int, runtime.ServerRuntime] = {}
        self.is_killed = threading.Event()
        super().__init__(body, *given, **options)

    def serve(self, index: int) -> None:
        try:
            fleet = self.fleet(Role.SERVER, index)
            self.told[f"server {index}"] = fleet.resume_from(root_of(self.root, index), strict=self.strict)
            self.runtimes[index] = listening(fleet)
            fleet.init_server()
            fleet.run_server()
        except BaseException as error:
            self.errors[f"server {index}"] = error

    def work(self, index: int) -> None:
        fleet = self.fleet(Role.WORKER, index)
        try:
            self.told[f"worker {index}"] = fleet.resume_from(root_of(self.root, 0), strict=self.strict)
            self.results[index] = self.body(fleet, index)
            fleet.stop_worker()
        except Killed:
            self.is_killed.set()
        except BaseException as error:
            self.errors[f"worker {index}"] = error
            if not self.is_killed.is_set():
                abort(fleet, str(error))

    def run_until_killed(self) -> None:
        """Until somebody raises ``Killed``: then all are, as the machine's end would, and nobody hears a word."""
        threads = self.start()
        until(self.is_killed.is_set)
        for server in self.runtimes.values():
            end_of(server._service).suspend()
        for worker in WORKERS:
            exit_guard.release(worker)
            worker.close()
        self.join(threads)


def trains(root: Path, *, steps: int = STEPS, die_at: int | None = None) -> Callable[[Fleet, int], Any]:
    """Worker 0 dies before its step ``die_at``, which the other one has pushed by then."""

    def body(fleet: Fleet, index: int) -> tuple[int, list[torch.Tensor]]:
        model, optimizer = join(fleet)
        first = fleet.resume_step()
        with Checkpoints(root, every_steps=EVERY, background=False, fleet=fleet) as checkpoints:
            for step in range(first, steps):
                if step == die_at and index == 0:
                    raise Killed
                train(model, optimizer, [step])
                checkpoints.after_step()
        fleet.barrier_worker()
        return first, model.seen()

    return body


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Where a job ends that nobody disturbs."""
    return run_job(trains(tmp_path_factory.mktemp("whole")), 2, 2)[0][1]


def alone(root: Path, steps: int = STEPS, die_at: int | None = None) -> tuple[int, int, list[torch.Tensor]]:
    fleet = Fleet(environ=PATIENT)
    fleet.init()
    told = fleet.resume_from(root)
    try:
        first, seen = trains(root, steps=steps, die_at=die_at)(fleet, 0)
    except Killed:
        abort(fleet, "killed")
        return told, told, []
    fleet.stop_worker()
    return told, first, seen


# ---------------------------------------------------------------- whatever is there

#: When the job is killed: at which step worker 0 dies, and the newest checkpoint that is whole then.
MOMENTS = {"before the first checkpoint": (2, 0), "between two": (5, 3), "in the midst of one": (None, 3)}


@pytest.mark.pairs(1)
@pytest.mark.parametrize("durable", [False, True], ids=["not durable", "durable"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("numbers", [(2, 2), (1, 3)], ids=["the same numbers", "others"])
def test_killed_as_a_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: list[torch.Tensor],
    moment: str,
    durable: bool,
    numbers: tuple[int, int],
) -> None:
    """Killed, and started again, with the same end: to the bit, where the numbers are the same."""
    die_at, newest = MOMENTS[moment]
    root = tmp_path / "ckpt"
    environ = {**PATIENT, "FLEET_JOB_ID": "j", "FLEET_HEARTBEAT_S": "0.1"}
    if durable:
        environ["FLEET_DURABLE_DIR"] = str(tmp_path / "durable")
    with monkeypatch.context() as patch:
        if die_at is None:
            patch.setattr(CheckpointWriter, "commit", dies_the_second_time())
        job = Resuming(root, trains(root, die_at=die_at), 2, 2, environ=environ)
        job.run_until_killed()
    assert set(job.told.values()) == {0}
    goes_on = durable and numbers == (2, 2)
    expected = newest if not goes_on else 6 if die_at is None else die_at
    if durable and not goes_on:
        environ["FLEET_DURABLE_DIR"] = str(tmp_path / "elsewhere")
    job = Resuming(root, trains(root), *numbers, environ=environ)
    results = job.run()
    assert job.told == dict.fromkeys(job.told, expected)
    assert len(job.told) == sum(numbers)
    assert {first for first, _ in results} == {expected}
    if numbers == (2, 2):
        assert same(results[0][1], whole)
    else:
        assert_close(results[0][1], whole)


def dies_the_second_time() -> Callable[..., Any]:
    committed, commits = CheckpointWriter.commit, []

    def commit(*given: Any) -> Any:
        commits.append(given)
        if len(commits) == 2:
            raise Killed
        return committed(*given)

    return commit


@pytest.mark.parametrize("moment", MOMENTS)
def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[torch.Tensor], moment: str) -> None:
    die_at, newest = MOMENTS[moment]
    with monkeypatch.context() as patch:
        if die_at is None:
            patch.setattr(CheckpointWriter, "commit", dies_the_second_time())
        assert alone(tmp_path, die_at=die_at)[0] == 0
    told, first, seen = alone(tmp_path)
    assert (told, first) == (newest, newest)
    assert_close(seen, whole)


def test_alone_then_a_cluster_then_alone(tmp_path: Path, whole: list[torch.Tensor]) -> None:
    assert alone(tmp_path, steps=3)[0] == 0
    job = Resuming(tmp_path, trains(tmp_path, steps=6), 2, 2)
    assert {first for first, _ in job.run()} == {3}
    told, first, seen = alone(tmp_path)
    assert (told, first) == (6, 6)
    assert_close(seen, whole)


def test_killed_while_it_reads_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[torch.Tensor]
) -> None:
    """A durable server that has heard of the job and has no values yet begins with what all of them begin with."""
    root = tmp_path / "ckpt"
    environ = {
        **PATIENT,
        "FLEET_JOB_ID": "j",
        "FLEET_HEARTBEAT_S": "0.1",
        "FLEET_DURABLE_DIR": str(tmp_path / "durable"),
    }
    Resuming(root, trains(root, steps=4), 2, 2).run()
    with monkeypatch.context() as patch:
        restored, job = checkpoint_reader._restore_dense, Resuming(root, trains(root), 2, 2, environ=environ)

        def dying(checkpoint: Any, shard: Any, *given: Any) -> None:
            if shard.server == 1:
                until(lambda: len(list((tmp_path / "durable").glob("*/snapshot-*/state.json"))) == 1)
                job.is_killed.set()
                until(lambda: end_of(job.runtimes[1]._service).begun)
            restored(checkpoint, shard, *given)

        patch.setattr(checkpoint_reader, "_restore_dense", dying)
        job.run_until_killed()
    assert set(job.told.values()) == {3}
    job = Resuming(root, trains(root), 2, 2, environ=environ)
    results = job.run()
    assert job.told == dict.fromkeys(job.told, 3)
    assert same(results[0][1], whole)


def test_what_not_all_servers_see_is_passed_by(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run_job(trains(here), 1, 1)
    shutil.copytree(here, there)
    shutil.rmtree(there / "step-00000006")
    job = Resuming([here, there], trains(tmp_path / "other", steps=4), 2, 2)
    job.run()
    assert job.told == dict.fromkeys(job.told, 3)
    assert "step 6 (checkpoint" in caplog.text
    assert "is not seen by server1:1" in caplog.text
    (other_root,) = (told for told in caplog.messages if told.startswith("server1:1: this server looks for"))
    assert re.search(rf"in {there}, and (another one|worker \d) in {here}$", other_root)


def misnamed(root: Path) -> None:
    shutil.copytree(root / "step-00000003", root / "step-00000099")


def copied(root: Path) -> Path:
    """A checkpoint of a later step, with one piece at least."""
    shutil.copytree(root / "step-00000003", root / "step-00000099")
    manifest = Checkpoint.open(root / "step-00000099").manifest
    (root / "step-00000099" / "manifest.json").write_text(replace(manifest, version=99).to_json())
    return root / "step-00000099" / manifest.pieces[0].file


def without_a_piece(root: Path) -> None:
    copied(root).unlink()


def without_its_pieces(root: Path) -> None:
    shutil.rmtree(copied(root).parent)


def with_a_short_piece(root: Path) -> None:
    piece = copied(root)
    piece.write_bytes(piece.read_bytes()[:-1])


def a_file(root: Path) -> None:
    (root / "step-00000099").write_text("")


def a_directory_for_a_manifest(root: Path) -> None:
    (root / "step-00000099" / "manifest.json").mkdir(parents=True)


@pytest.mark.parametrize(
    "spoil",
    [misnamed, without_a_piece, without_its_pieces, with_a_short_piece, a_file, a_directory_for_a_manifest],
)
def test_what_is_no_checkpoint_of_its_step_is_passed_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    """By the same rule alone, under servers, in collective jobs and for who asks for the latest; and never silently."""
    run_job(trains(tmp_path, steps=4), 1, 1)
    spoil(tmp_path)
    job = Resuming(tmp_path, trains(tmp_path / "other", steps=4), 1, 1)
    told = {
        "latest": lambda: Checkpoints.latest(tmp_path) == str(tmp_path / "step-00000003"),
        "alone": lambda: alone(tmp_path, steps=3)[0] == 3,
        "under servers": lambda: job.run() and set(job.told.values()) == {3},
        "collective": lambda: [each.step for each in marks(place_at(tmp_path))] == [3],
    }
    for way, goes_on in told.items():
        caplog.clear()
        assert goes_on(), way
        (passed,) = {told for told in map(logging.LogRecord.getMessage, caplog.records) if "passing by" in told}
        assert str(tmp_path / "step-00000099") in passed, way


def test_servers_without_a_script(tmp_path: Path, whole: list[torch.Tensor]) -> None:
    """They look where the workers look."""

    class Scriptless(Resuming):
        serve = Job.serve

    first = Scriptless(tmp_path, trains(tmp_path, steps=5), 2, 2)
    first.run()
    assert first.told == {"worker 0": 0, "worker 1": 0}
    second = Scriptless(tmp_path, trains(tmp_path), 2, 2)
    results = second.run()
    assert second.told == {"worker 0": 3, "worker 1": 3}
    assert same(results[0][1], whole)


class Blind:
    """The network of servers that would not know each other, as without an authority for their certificates."""

    def __init__(self, inner: LoopbackNetwork) -> None:
        self.listen = inner.listen

    def connect(self, endpoint: Endpoint) -> Any:
        raise ConfigurationError("cannot tell servers from strangers")


@pytest.mark.pairs(1)
@pytest.mark.parametrize("durable", [False, True])
def test_servers_that_do_not_know_each_other(tmp_path: Path, whole: list[torch.Tensor], durable: bool) -> None:
    """Workers tell them, or they go on from what they have themselves."""

    class Strangers(Resuming):
        def fleet(self, role: Role, index: int) -> Fleet:
            made = Fleet(environ=self.environ, network=Blind(self.network) if role is Role.SERVER else self.network)
            made.init(UserDefinedRoleMaker(index, role, self.workers, self.endpoints))
            return made

    root = tmp_path / "ckpt"
    environ = {**PATIENT, "FLEET_JOB_ID": "j", "FLEET_HEARTBEAT_S": "0.1"}
    if durable:
        environ["FLEET_DURABLE_DIR"] = str(tmp_path / "durable")
    Strangers(root, trains(root, die_at=5), 2, 2, environ=environ).run_until_killed()
    job = Strangers(root, trains(root), 2, 2, environ=environ)
    results = job.run()
    assert job.told == dict.fromkeys(job.told, 5 if durable else 3)
    assert same(results[0][1], whole)


# ---------------------------------------------------------------- into a running job


def again(job: Resuming, role: Role, index: int, root: Path) -> tuple[Fleet, int]:
    """A process that starts again, and what it is told."""
    fleet = job.fleet(role, index)
    return fleet, fleet.resume_from(root)


def test_a_worker_that_starts_again(tmp_path: Path, whole: list[torch.Tensor]) -> None:
    """The others are past it."""
    environ = {**PATIENT, "FLEET_JOB_ID": "j", "FLEET_HEARTBEAT_S": "0.05"}

    def body(fleet: Fleet, index: int) -> Any:
        if index == 1:
            model, optimizer = join(fleet)
            train(model, optimizer, range(fleet.resume_step(), 5))
            leave(fleet)
            fleet, told = again(job, Role.WORKER, 1, tmp_path)
            assert told == 5
            result = trains(tmp_path)(fleet, 1)
            fleet.stop_worker()
            job.results[1] = result
            raise Left
        return trains(tmp_path)(fleet, index)

    job = Resuming(tmp_path, body, 2, 2, environ=environ)
    job.join(job.start())
    assert [type(error) for error in job.errors.values()] == [Left], job.errors
    assert job.results[1][0] == 5
    assert same(job.results[0][1], whole)


class Left(BaseException):
    """The first process of a worker is gone."""


def test_a_durable_server_that_starts_again(tmp_path: Path, whole: list[torch.Tensor]) -> None:
    environ = {
        **PATIENT,
        "FLEET_JOB_ID": "j",
        "FLEET_HEARTBEAT_S": "0.1",
        "FLEET_DURABLE_DIR": str(tmp_path / "durable"),
    }
    root = tmp_path / "ckpt"

    class Restarting(Resuming):
        def serve(self, index: int) -> None:
            super().serve(index)
            if index == 1:
                super().serve(index)

    def body(fleet: Fleet, index: int) -> Any:
        model, optimizer = join(fleet)
        train(model, optimizer, range(5))
        fleet.barrier_worker()
        if index == 0:
            del job.told["server 1"]
            end_of(job.runtimes[1]._service).suspend()
            until(lambda: "server 1" in job.told)
        train(model, optimizer, range(5, STEPS))
        fleet.barrier_worker()
        return 0, model.seen()

    job = Restarting(root, body, 2, 2, environ=environ)
    results = job.run()
    assert job.told == {"worker 0": 0, "worker 1": 0, "server 0": 0, "server 1": 5}
    assert same(results[0][1], whole)


def test_a_server_that_comes_back_empty(tmp_path: Path) -> None:
    def body(fleet: Fleet, index: int) -> None:
        model, optimizer = join(fleet)
        train(model, optimizer, range(2))
        fleet.barrier_worker()
        if index == 0:
            end_of(job.runtimes[1]._service).suspend()
            until(lambda: "server 1" in job.errors)
            with pytest.raises(ServerLostError, match="server1:1 without state, server0:1 at step 2"):
                again(job, Role.SERVER, 1, tmp_path)
            raise Left

    job = Resuming(tmp_path, body, 1, 2)
    job.join(job.start())
    assert isinstance(job.errors["worker 0"], Left), job.errors


def test_servers_that_kept_different_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has an older copy of what it had; every role is told, before anything begins."""
    monkeypatch.setattr(resume_query, "LINGER_S", 0.5)
    root, durable = tmp_path / "ckpt", tmp_path / "durable"
    environ = {**PATIENT, "FLEET_JOB_ID": "j", "FLEET_HEARTBEAT_S": "0.1", "FLEET_DURABLE_DIR": str(durable)}

    def body(fleet: Fleet, index: int) -> None:
        model, optimizer = join(fleet)
        train(model, optimizer, range(2))
        shutil.copytree(durable / "server1_1", tmp_path / "older")
        train(model, optimizer, range(2, 6))
        raise Killed

    Resuming(root, body, 1, 2, environ=environ).run_until_killed()
    shutil.rmtree(durable / "server1_1")
    shutil.copytree(tmp_path / "older", durable / "server1_1")
    job = Resuming(root, trains(root), 1, 2, environ=environ)
    job.join(job.start())
    assert sorted(job.errors) == ["server 0", "server 1", "worker 0"]
    for error in job.errors.values():
        assert isinstance(error, ServerLostError)
        assert "the servers are not at the same step; got server0:1 at 6, server1:1 at 2" in str(error)
        assert "FLEET_DURABLE_SYNC" in str(error)


def test_a_worker_that_joins_late_is_told_the_jobs_step(tmp_path: Path) -> None:
    told = {}

    def body(fleet: Fleet, index: int) -> None:
        model = torch.nn.Linear(2, 1)
        strategy = StrategyFactory.create_async_strategy(elastic=True)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()
        for _ in range(3):
            optimizer.minimize(model(torch.ones(1, 2)).sum())
        fleet.barrier_worker()
        late = Fleet(environ=job.environ, network=job.network)
        late.init(UserDefinedRoleMaker(1, Role.WORKER, 2, job.endpoints))
        told["late"] = late.resume_from(tmp_path)

    job = Resuming(tmp_path, body, 1, 2)
    job.run()
    assert told == {"late": 3}


def test_all_are_told_the_jobs_step_where_each_goes_on_after_its_own(tmp_path: Path) -> None:
    """Until it has taken steps from there, of which nobody else knows."""

    def joined(fleet: Fleet) -> Callable[[int], None]:
        model = torch.nn.Linear(2, 1)
        strategy = StrategyFactory.create_async_strategy()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        fleet.init_worker()

        def take(steps: int) -> None:
            for _ in range(steps):
                optimizer.minimize(model(torch.ones(1, 2)).sum())

        return take

    def first(fleet: Fleet, index: int) -> None:
        take = joined(fleet)
        with Checkpoints(tmp_path, every_steps=2, background=False, state={"at": index}, fleet=fleet) as checkpoints:
            if index == 1:
                take(5)
                checkpoints.after_step()
            fleet.barrier_worker()
            if index == 0:
                take(2)
                checkpoints.after_step()
            fleet.barrier_worker()

    def then(fleet: Fleet, index: int) -> None:
        take = joined(fleet)
        assert fleet.resume_step() == (2, 5)[index]
        for told, steps in ((2, 1), (6, 0)) if index == 1 else ():
            flush(fleet)
            leave(fleet)
            fleet, step = again(job, Role.WORKER, 1, tmp_path)
            assert step == told
            take = joined(fleet)
            assert fleet.resume_step() == max(5, told)
            take(steps)
        if index == 1:
            fleet.stop_worker()
            raise Left

    run_job(first, 2, 2)
    job = Resuming(tmp_path, then, 2, 2, environ={**PATIENT, "FLEET_JOB_ID": "j", "FLEET_HEARTBEAT_S": "0.1"})
    job.join(job.start())
    assert job.told == {"worker 0": 2, "worker 1": 2, "server 0": 2, "server 1": 2}
    assert isinstance(job.errors.pop("worker 1"), Left), job.errors
    assert not job.errors


# ---------------------------------------------------------------- what does not fit


class Other(torch.nn.Module):
    """Shares a table and the weight of a line with the small job's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.dense.bias = torch.nn.Parameter(torch.full((1,), 7.0))
        self.open = fleet.nn.Embedding(None, 4)
        self.closed = torch.nn.Embedding(30, 5, sparse=True)
        self.further = torch.nn.Parameter(torch.full((2,), 5.0))


@pytest.mark.parametrize("durable", [False, True])
def test_what_fits_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture, durable: bool) -> None:
    root = tmp_path / "ckpt"
    ((_, expected),) = run_job(trains(root, steps=3), 1, 1)

    def body(made: Fleet, index: int) -> Any:
        with DRAWING:
            torch.manual_seed(3)
            model = Other()
        initial = model.closed.weight.detach().clone()
        made.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        made.init_worker()
        return initial, made.state_dict(model), made.resume_step()

    environ = {**PATIENT, "FLEET_DURABLE_DIR": str(tmp_path / "durable")} if durable else PATIENT
    (first, got, step), (_, others, _) = Resuming(root, body, 2, 2, strict=False, environ=environ).run()
    assert step == 3
    assert all(torch.equal(got[key], others[key]) for key in got)
    assert torch.equal(got["dense.weight"], expected[0])
    assert torch.equal(got["open.weight"], expected[2][got["open.ids"] + 20])
    assert got["dense.bias"].tolist() == [7.0]
    assert got["further"].tolist() == [5.0, 5.0]
    assert torch.equal(got["closed.weight"], first)
    assert (
        "is loaded as far as it fits: 'closed.weight': table of float32 x 4, Adagrad in the checkpoint" in caplog.text
    )
    with pytest.raises(AssertionError, match="does not fit the model"):
        Resuming(root, body, 1, 2).run()


def test_another_optimizer_begins_anew_on_the_values(tmp_path: Path) -> None:
    ((_, expected),) = run_job(trains(tmp_path, steps=3), 1, 1)

    def body(made: Fleet, index: int) -> Any:
        model = Net()
        optimizer = made.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
        made.init_worker()
        loaded = model.seen()
        train(model, optimizer, [3])
        return loaded

    (loaded,) = Resuming(tmp_path, body, 1, 2, strict=False).run()
    assert same(loaded, expected)


# ---------------------------------------------------------------- errors by name


def server(endpoints: list[str], index: int = 0, environ: Any = PATIENT, network: Any = None) -> Fleet:
    made = Fleet(environ=environ, network=network or LoopbackNetwork())
    made.init(UserDefinedRoleMaker(index, Role.SERVER, 1, endpoints))
    return made


@pytest.fixture
def lonely() -> Iterator[Fleet]:
    made = Fleet(environ=PATIENT)
    made.init()
    yield made
    abort(made, "the test is over")


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (7, {}, "root must be a path or a URL; got 7"),
        (b"x", {}, "root must be"),
        ("x", {"strict": 1}, "strict must be"),
    ],
)
def test_wrong_types(lonely: Fleet, given: Any, options: Any, words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        lonely.resume_from(given, **options)


def test_wrong_order(lonely: Fleet, tmp_path: Path) -> None:
    with pytest.raises(NotInitializedError, match=re.escape("fleet.resume_from() came before fleet.init()")):
        Fleet().resume_from(tmp_path)
    assert lonely.resume_from(tmp_path / "none yet") == 0
    with pytest.raises(StateError, match="called twice"):
        lonely.resume_from(tmp_path)
    with pytest.raises(StateError, match="both say what the job goes on from"):
        lonely.init_server(tmp_path)
    lonely.init_server()
    lonely.init()
    lonely.init_server()
    with pytest.raises(StateError, match="came after init_server"):
        lonely.resume_from(tmp_path)
    lonely.init()
    join(lonely)
    with pytest.raises(StateError, match="came after init_worker"):
        lonely.resume_from(tmp_path)


def test_what_is_no_root(lonely: Fleet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_job(trains(tmp_path / "run", steps=3), 1, 1)
    with pytest.raises(CheckpointError, match=r"no directory of checkpoints.*got a file"):
        lonely.resume_from(tmp_path / "file")
    for below in ("file/x", "file/x/y"):
        with pytest.raises(CheckpointError, match=r"no directory of checkpoints.*got a path below a file, .*/file\."):
            lonely.resume_from(tmp_path / below)
    with pytest.raises(CheckpointError, match=r"no directory of checkpoints.*got a checkpoint"):
        lonely.resume_from(tmp_path / "run" / "step-00000003")


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    network, environ = LoopbackNetwork(), {**PATIENT, "FLEET_STARTUP_DEADLINE_S": "0.2"}
    endpoints = ["here:1", "there:1", "nowhere:1"]
    with pytest.raises(DeadlineError, match=r"server 1 \(there:1\), server 2 \(nowhere:1\) did not come; at server 0"):
        server(endpoints, 0, environ, network).resume_from(tmp_path)
    assert network.listener(Endpoint("here", 1)) is None, "it listens no more"
    worker = Fleet(environ=environ, network=network)
    worker.init(UserDefinedRoleMaker(0, Role.WORKER, 1, endpoints))
    with pytest.raises(DeadlineError, match=r"server 0 \(here:1\), server 1 .* did not come; at worker 0, resume_from"):
        worker.resume_from(tmp_path)


def test_what_another_job_has_left(tmp_path: Path) -> None:
    environ = {**PATIENT, "FLEET_JOB_ID": "first", "FLEET_DURABLE_DIR": str(tmp_path / "durable")}
    job = Resuming(tmp_path / "ckpt", trains(tmp_path / "ckpt", die_at=2), 1, 1, environ=environ)
    job.run_until_killed()
    other = server(["server0:1"], 0, {**environ, "FLEET_JOB_ID": "second"})
    with pytest.raises(ConfigurationError, match=r"FLEET_JOB_ID=first.*go on with it.*remove the directory"):
        other.resume_from(tmp_path / "ckpt")


def test_two_sources(tmp_path: Path) -> None:
    run_job(trains(tmp_path, steps=3), 1, 1)
    job = Resuming(tmp_path, trains(tmp_path), 1, 1, model_dir=str(tmp_path / "step-00000003"))
    job.serve = lambda index: Job.serve(job, index)  # type: ignore[method-assign]
    threads = job.start()
    until(lambda: job.errors)
    assert "both say what the job goes on from" in str(job.errors["worker 0"])
    job.network.listener(Endpoint.parse(job.endpoints[0])).handler.__self__.stop("the test is over")
    job.join(threads)


def test_two_minds_about_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = LoopbackNetwork()
    first = server(["server0:1"], 0, PATIENT, network)
    assert first.resume_from(tmp_path) == 0
    worker = Fleet(environ=PATIENT, network=network)
    worker.init(UserDefinedRoleMaker(1, Role.WORKER, 2, ["server0:1"]))
    with pytest.raises(ConfigurationError, match=r"different values of strict.*same arguments on every role"):
        worker.resume_from(tmp_path, strict=False)
    assert "goes on with strict=True, and resume_from was called with strict=False by worker 1" in caplog.text
    first.init()
    assert network.listener(Endpoint("server0", 1)) is None, "who begins anew listens no more"


def test_a_hello_waits_for_the_choice(tmp_path: Path) -> None:
    """Also that of a worker that does not resume itself."""
    job = Resuming(tmp_path, trains(tmp_path, steps=3), 1, 2)
    job.work = lambda index: Job.work(job, index)  # type: ignore[method-assign]
    job.run()
    assert job.told == {"server 0": 0, "server 1": 0}


# ---------------------------------------------------------------- the choice, as a pure function

A, B, C = Mark(3, "a"), Mark(6, "b"), Mark(6, "c")


def held(step: int = 9, base: Mark | None = None, kept_at: int | None = None, **own: Any) -> Held:
    return Held(
        **{"step": step, "base": base, "kept_at": kept_at, "lockstep": True, "steps": None, "met": False, **own}
    )


#: All that a server can tell.
TOLD = {
    "nothing": Seen(),
    "an older one": Seen(checkpoints=(A,)),
    "both": Seen(checkpoints=(B, A)),
    "others": Seen(checkpoints=(C, A)),
    "began": Seen(chosen=Choice(BEGINNING)),
    "chose": Seen(chosen=Choice(A)),
    "holds a beginning": Seen(held(0, BEGINNING)),
    "holds": Seen(held(3, A)),
    "holds what it was told": Seen(held(3, A), Choice(A)),
    "has trained": Seen(held(9)),
}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_choice(number: int) -> None:
    for names in product(TOLD, repeat=number):
        seen = [TOLD[name] for name in names]
        has_none = [each.held is None for each in seen]
        origins = {each.held.base for each in seen if each.held and each.held.base}
        origins |= {each.chosen.mark for each in seen if each.chosen}
        if any(has_none) and "has trained" in names:
            with pytest.raises(ServerLostError, match="without state"):
                choose(range(number), seen)
        elif not any(has_none):
            assert choose(range(number), seen) is None, "state wins"
        elif len(origins) > 1:
            with pytest.raises(CheckpointError, match="do not start from the same"):
                choose(range(number), seen)
        else:
            choice = choose(range(number), seen)
            assert choice is not None
            if origins:
                assert {choice.mark} == origins
            else:
                everywhere = [mark for mark in (A, B, C) if all(mark in each.checkpoints for each in seen)]
                assert choice.mark == max(everywhere, default=BEGINNING)
                newer = {mark for each in seen for mark in each.checkpoints if mark.step > choice.mark.step}
                assert len(passed_by(range(number), seen, choice)) == len(newer)


@pytest.mark.parametrize(
    ("earlier", "now", "is_proof"),
    [
        ([9, 9], [9, 10], False),
        ([16, 5], [16, 5], True),
        ([16, None], [16, None], False),  # has lost its part, which is another error
        ([5, 8], [20, 23], False),  # a job that runs, whose servers were asked one after the other
        ([5, 8], [8, 8], False),
    ],
)
def test_what_proves_that_servers_are_not_at_the_same_step(
    earlier: list[int | None], now: list[int | None], is_proof: bool
) -> None:
    def told(steps: list[int | None], **own: Any) -> list[Seen]:
        return [Seen() if step is None else Seen(held(step, **own)) for step in steps]

    refuse_apart("ab", told(earlier, lockstep=False), told(now, lockstep=False))
    if not is_proof:
        refuse_apart("ab", told(earlier), told(now))
    else:
        with pytest.raises(ServerLostError, match="got a at 16, b at 5"):
            refuse_apart("ab", told(earlier), told(now))


@pytest.mark.parametrize(
    ("seen", "worker", "server"),
    [
        # chosen, and nothing trained yet
        ([Seen(), Seen()], Resumed(3), 3),
        ([Seen(held(3, A), Choice(A)), Seen(chosen=Choice(A))], Resumed(3), 3),
        # a running job: a worker that is new to it, and one that starts again, a step ahead of its round or not
        ([Seen(held(9), Choice(A)), Seen(held(10), Choice(A))], Resumed(9), 3),
        ([Seen(held(9, steps=9, met=True), Choice(A))] * 2, Resumed(9), 3),
        ([Seen(held(9, steps=10, met=True), Choice(A))] * 2, Resumed(9, 1), 3),
        # a server that starts again while the others run
        ([Seen(held(10, steps=10, kept_at=9)), Seen(held(10, steps=10), Choice(A))], Resumed(10), 10),
        # all start again, and others train already when this one asks
        ([Seen(held(9, steps=10, kept_at=9)), Seen(held(10, steps=10, kept_at=9))], Resumed(9, 1), 9),
        ([Seen(held(10, steps=10, kept_at=9)), Seen(held(10, steps=10, kept_at=10))], Resumed(9, 1), 9),
        # they started again long ago, and a worker does now
        ([Seen(held(20, steps=20, kept_at=9)), Seen(held(20, steps=20, kept_at=9))], Resumed(20), 9),
        ([Seen(held(10, steps=10, kept_at=9, met=True)), Seen(held(10, steps=10, kept_at=9))], Resumed(10), 9),
        # it was given up on
        ([Seen(held(20, steps=5)), Seen(held(20, steps=5))], Resumed(20), 3),
        # without rounds each has its own
        ([Seen(held(9, steps=5, lockstep=False)), Seen(held(8, steps=6, lockstep=False))], Resumed(5), 3),
        ([Seen(held(9, lockstep=False)), Seen(held(8, lockstep=False))], Resumed(8), 3),
    ],
)
def test_every_step(seen: list[Seen], worker: Resumed, server: int) -> None:
    choice = Choice(A)
    assert step_of_worker(seen, choice) == worker
    assert step_of_server(seen, choice, 0) == Resumed(server)


def test_what_is_told_can_be_read_again() -> None:
    for seen in TOLD.values():
        assert Seen.from_json(seen.to_json()) == seen
    assert Choice.from_json(Choice(A, strict=False).to_json()) == Choice(A, strict=False)
    for text in ("", "{}", "[1]", '{"held": 1, "chosen": null, "checkpoints": []}', "[" * 100_000):
        with pytest.raises(ProtocolError):
            Seen.from_json(text)
        with pytest.raises(ProtocolError):
            Choice.from_json(text)


# ---------------------------------------------------------------- as processes

processes = test_processes.processes  # the fixture
SCRIPT = Path(__file__).parent / "scripts" / "resumes.py"


def output(processes: Processes, *command: str, **variables: str) -> str:
    _, out, err = ended(processes.start(*command, **variables))
    return out + err


@pytest.mark.slow
def test_the_same_command_again(processes: Processes, tmp_path: Path) -> None:
    """Killed and started again, with other numbers of servers and workers, and alone."""
    root = str(tmp_path / "ckpt")

    def run(numbers: str, *arguments: str) -> str:
        command = ("-m", "fleet.launch", "--server_num", numbers, "--worker_num", numbers)
        return output(processes, *command, "--log_dir", str(tmp_path / "logs"), str(SCRIPT), root, *arguments)

    (expected,) = re.findall(r"ends with (.*)", output(processes, str(SCRIPT), str(tmp_path / "whole"), "11"))
    assert run("2", "11", "5").count("told 0") == 4
    assert run("1", "8").count("told 3") == 2
    assert output(processes, str(SCRIPT), root, "10").count("told 6") == 1
    last = run("2", "11")
    assert last.count("told 9") == 4
    for got in re.findall(r"ends with (.*)", last):
        assert json.loads(got) == pytest.approx(json.loads(expected), abs=1e-6)


@pytest.mark.slow
def test_a_server_that_ends_before_it_serves(processes: Processes, tmp_path: Path) -> None:
    """It listens already, and nothing of that holds its process."""
    environ = {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{free_ports(1)[0]}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_PSERVER_ID": "0",
    }
    said = output(processes, str(SCRIPT), str(tmp_path), "8", "0", **environ)
    assert said.splitlines() == ["told 0", "ends before it serves"]
