"""Whatever goes wrong while a checkpoint is written or read: the one before it still loads, the job goes on if it can,
nothing stays behind, and the next one succeeds."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, Job, run_job, until
from inside import connections, lines_of, worker_of
from patience import PATIENCE_S
from prepared import Prepared
from small_job import STRATEGIES, join, same, train

from fleet import Checkpoints, Fleet
from fleet.checkpoint import places, writer
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import Directory, place_at
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import CheckpointError, FleetError
from fleet.plan.specs import JobSpec, PlanSettings
from fleet.ps.server import disk_waits, replacement
from fleet.ps.server.background import Background
from fleet.ps.server.claims import Claims
from fleet.ps.server.meetings import Meetings
from fleet.ps.server.object_states import ObjectStates
from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.table import shard as shard_module
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker import replacement as loading
from fleet.ps.worker import state_reader, upload
from fleet.ps.worker.connection import Connection
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.role_maker import Role, UserDefinedRoleMaker

ROOT = Path(__file__).parent.parent
NOTHING = JobSpec((), (), (), PlanSettings(server_num=1, worker_num=1))


def write(dirname: object, version: int, pieces: int = 3) -> None:
    """A checkpoint without a job, whose every piece says its version."""
    with CheckpointWriter(dirname) as each:
        for number in range(pieces):
            with each.pieces(f"piece-{number}") as files:
                files.add({"dense": []}, {"it": torch.full((50,), float(version))})
            each.add(files.files)
        each.commit(version, 7, NOTHING)


def version_at(dirname: object) -> int:
    """The version of a checkpoint, all of which is there and of that version."""
    checkpoint = Checkpoint.open(dirname)
    found = {tensors[0][0].item() for _, tensors in checkpoint.pieces("dense")}
    assert found == {checkpoint.manifest.version}
    return checkpoint.manifest.version


def everything(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


# ---------------------------------------------------------------------------------------------- killed


class Deadly:
    """Kills its process at one of the things that are done to the disk."""

    def __init__(self, at: int) -> None:
        self._left = at
        places.sync_directory = writer.sync_directory = self._counting(places.sync_directory)
        for name in ("replace", "rename", "mkdir"):
            setattr(os, name, self._counting(getattr(os, name)))
        create, half = Directory.create, self._half
        Directory.create = self._counting(create, half)  # type: ignore[method-assign]

    @staticmethod
    def _half(place: Directory, name: str, pieces: Any) -> None:
        whole = b"".join(bytes(piece) for piece in pieces)
        (place.path / name).write_bytes(whole[: len(whole) // 2])

    def _counting(self, operation: Any, half: Any = None) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                if half is not None:
                    half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **options)

        return counted


def in_a_process_that_dies(at: int, dirname: Path, version: int) -> bool:
    """Whether it did: a writer has only so many operations to die at."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            Deadly(at)
            write(dirname, version)
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.pairs(1)
@pytest.mark.parametrize("existing", ["nothing", "an empty directory", "a checkpoint"])
def test_a_writer_that_is_killed_anywhere_leaves_a_whole_checkpoint_or_none(existing: str, tmp_path: Path) -> None:
    outcomes = []
    for at in range(100):
        target = tmp_path / str(at) / "ckpt"
        target.parent.mkdir()
        if existing == "an empty directory":
            target.mkdir()
        elif existing == "a checkpoint":
            write(target, 1)
        died = in_a_process_that_dies(at, target, 2)
        outcomes.append(version_at(target) if (target / "manifest.json").exists() else 0)
        write(target, 3)
        assert version_at(target) == 3
        assert len(everything(target.parent)) == 6, (
            "what the dead one left is gone: one folder, three pieces, a manifest"
        )
        if not died:
            break
    assert len(outcomes) > 9, "it died at many points, and at last at none"
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert set(outcomes) == {1 if existing == "a checkpoint" else 0, 2}


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_writes(
    prepared: Prepared, tmp_path: Path, free_endpoints: Callable[[int], list[str]]
) -> None:
    """The job ends by its rules, and the checkpoint before it loads."""
    script = tmp_path / "deadly.py"
    script.write_text("""
import os, signal, sys
from fleet.checkpoint.places import Directory
from fleet.launch.cli import main
create, pieces = Directory.create, []
def deadly(place, name, content):
    pieces.append(name)
    if len(pieces) > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    create(place, name, content)
Directory.create = deadly
sys.exit(main(sys.argv[1:]))
""")
    environ = {"FLAGS_rpc_deadline": "4000", "FLEET_STARTUP_DEADLINE_S": "60"}
    (endpoint,) = free_endpoints(1)
    server = prepared.start(
        [str(script), "server", "--endpoint", endpoint],
        {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ},
        bare=True,
    )
    try:
        fleet_ = Fleet(environ=environ)
        fleet_.init(UserDefinedRoleMaker(0, Role.WORKER, 1, [endpoint]))
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        expected, before = model.seen(), everything(tmp_path)
        train(model, optimizer, range(2))
        with pytest.raises(TimeoutError, match="silent"):
            fleet_.save_persistables(tmp_path / "ckpt")
        fleet_.stop_worker()
        assert server.wait(10) == -signal.SIGKILL
    finally:
        server.kill()
        server.communicate()
    assert everything(tmp_path) == before
    assert same(loaded(tmp_path / "ckpt"), expected)


def loaded(dirname: Path, strategy: str = "sync", servers: int = 2) -> list[torch.Tensor]:
    return run_job(lambda fleet_, worker: join(fleet_, strategy)[0].seen(), 1, servers, model_dir=str(dirname))[0]


# ---------------------------------------------------------------------------------------------- a disk that fails


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of one mebibyte."""
    path = tmp_path / "tiny"
    path.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no disk can be made here: there is no mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small disk can be made here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def large_job(fleet_: Fleet) -> tuple[torch.nn.Parameter, Any]:
    """Its checkpoint has some 600 KiB."""
    weight = torch.nn.Parameter(torch.zeros(150_000))
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
    fleet_.init_worker()
    return weight, optimizer


def test_a_full_disk(tiny: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = large_job(fleet_)
        fleet_.save_persistables(tiny / "ckpt")
        before = everything(tiny)
        optimizer.minimize(weight.sum())
        for dirname in ("ckpt", "another"):
            with pytest.raises(CheckpointError, match=r"writing the share of server .*No space left on device"):
                fleet_.save_persistables(tiny / dirname)
            assert everything(tiny) == before
        fleet_.load_persistables(tiny / "ckpt")
        assert (weight == 0).all()
        shutil.rmtree(tiny / "ckpt")
        fleet_.save_persistables(tiny / "ckpt")

    run_job(body, 1, 2)


def test_a_disk_that_may_only_be_read(tiny: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        weight, optimizer = large_job(fleet_)
        fleet_.save_persistables(tiny / "ckpt")
        subprocess.run(["mount", "-o", "remount,ro", tiny], check=True)
        before = everything(tiny)
        for dirname in ("ckpt", "another"):
            optimizer.minimize(weight.sum())
            with pytest.raises(CheckpointError, match=r"could not be written; .*Read-only file system"):
                fleet_.save_persistables(tiny / dirname)
        assert everything(tiny) == before
        fleet_.load_persistables(tiny / "ckpt")
        assert (weight == 0).all()
        subprocess.run(["mount", "-o", "remount,rw", tiny], check=True)
        shutil.rmtree(tiny / "ckpt")
        fleet_.save_persistables(tiny / "ckpt")

    run_job(body, 1, 2)


def write_by(call: str, fleet_: Fleet, model: torch.nn.Module, where: Path) -> None:
    """All that a script can write."""
    if call == "Checkpoints":
        Checkpoints(where, every_steps=1, background=False, fleet=fleet_).save()
    elif call == "Checkpoints behind the training":
        with Checkpoints(where, every_steps=1, fleet=fleet_) as checkpoints:
            checkpoints.save()
    elif call == "save_inference_model":
        fleet_.save_inference_model(str(where), model)
    else:
        fleet_.save_persistables(where)


@pytest.mark.parametrize("place", ["below a file", "a system's", "no right"])
@pytest.mark.parametrize(
    "call", ["save_persistables", "Checkpoints", "Checkpoints behind the training", "save_inference_model"]
)
def test_where_nobody_may_write(call: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    where = {"below a file": tmp_path / "file" / "ckpt", "a system's": Path("/proc/fleet"), "no right": tmp_path / "a"}
    if place == "no right":  # whoever is root has every right
        refuse = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))
        monkeypatch.setattr(Path, "mkdir", Mock(side_effect=refuse))

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(1))
        with pytest.raises(CheckpointError, match="could not be written") as caught:
            write_by(call, fleet_, model, where[place])
        assert str(where[place]) in str(caught.value.where)
        assert "[Errno" in str(caught.value.got)
        assert "may make files" in str(caught.value.todo)
        train(model, optimizer, range(1, 3))  # and the job goes on

    run_job(body)
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_one_server_that_cannot_write(
    strategy: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named; the delta after the one that failed has all that is due since the last one that did not."""
    create, broken = Directory.create, []

    def failing(place: Directory, name: str, pieces: Any) -> None:
        if broken and name.startswith("server-1"):
            raise OSError(code, os.strerror(code))
        create(place, name, pieces)

    monkeypatch.setattr(Directory, "create", failing)

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        fleet_.save_persistables(tmp_path / "ckpt")
        before = everything(tmp_path)
        train(model, optimizer, range(3, 6))
        for mode in ("delta", "full"):
            broken.append(True)
            with pytest.raises(CheckpointError, match=f"share of server server1:1 .*{os.strerror(code)}"):
                fleet_.save_persistables(tmp_path / "ckpt", mode=mode)
            assert everything(tmp_path) == before
            train(model, optimizer, [6])
        broken.clear()
        fleet_.save_persistables(tmp_path / "ckpt", mode="delta")
        fleet_.save_persistables(tmp_path / "full")

    run_job(body, 1, 2)
    assert same(loaded(tmp_path / "ckpt", strategy), loaded(tmp_path / "full", strategy))


def test_a_manifest_that_cannot_be_read_back_does_not_cost_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, read, broken = Directory.publish, Directory.read, []

    def and_then_nothing_is_read(place: Directory, name: str, data: bytes) -> None:
        publish(place, name, data)
        broken.append(True)

    def failing(place: Directory, name: str, most: int, *, once: bool = False) -> bytes:
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(place, name, most, once=once)

    monkeypatch.setattr(Directory, "publish", and_then_nothing_is_read)
    monkeypatch.setattr(Directory, "read", failing)
    (tmp_path / "ckpt").mkdir()
    write(tmp_path / "ckpt", 1)
    broken.clear()
    assert version_at(tmp_path / "ckpt") == 1


# ---------------------------------------------------------------------------------------------- several at once


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("store", ["local", "memory"])
@pytest.mark.pairs(2)
def test_two_jobs_save_to_one_place_and_a_third_one_reads(existing: bool, store: str, tmp_path: Path) -> None:
    """At every moment there is a whole checkpoint, or none yet; who reads one that is replaced is told so."""
    told = ("no checkpoint here", "was replaced while it was read", "something else has come to where")
    if existing and store == "local":
        (tmp_path / "ckpt").mkdir()
    for repetition in range(8):
        where = str(tmp_path / "ckpt") if existing else str(tmp_path / f"ckpt-{repetition}")
        dirname = where if store == "local" else f"memory:/{where}"
        problems: list[BaseException] = []
        writing = threading.Barrier(3)

        def carefully(
            act: Callable[..., object], *args: object, together: threading.Barrier = writing, bad: list[Any] = problems
        ) -> None:
            together.wait(30)
            for _ in range(3):
                try:
                    act(*args)
                except CheckpointError as error:
                    if not any(each in str(error) for each in told):
                        bad.append(error)
                except BaseException as error:
                    bad.append(error)

        threads = [
            threading.Thread(target=carefully, args=args)
            for args in ((write, dirname, 1), (write, dirname, 2), (version_at, dirname))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert problems == []
        assert version_at(dirname) in (1, 2)
        if store == "local":
            found = everything(Path(where))
            assert len(found) == 5, found
        assert len(place_at(dirname).names()) == 2
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_delta_whose_base_is_replaced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and what replaced the base stays whole."""
    commit = CheckpointWriter.commit

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(2))

        def too_late(each: CheckpointWriter, *args: Any) -> Any:
            monkeypatch.setattr(CheckpointWriter, "commit", commit)
            write(tmp_path / "ckpt", 9)
            return commit(each, *args)

        for dirname in ("ckpt", "another"):
            monkeypatch.setattr(CheckpointWriter, "commit", too_late)
            with pytest.raises(CheckpointError, match="would go on from has been replaced"):
                fleet_.save_persistables(tmp_path / dirname, mode="delta")
            assert version_at(tmp_path / "ckpt") == 9
            assert os.listdir(tmp_path) == ["ckpt"]
        fleet_.save_persistables(tmp_path / "ckpt")
        fleet_.save_persistables(tmp_path / "ckpt", mode="delta")

    run_job(body, 1, 2)


def test_servers_that_start_from_different_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them read the manifest before it was replaced, the other one after; both are of the same step."""

    def source(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        for name in ("a", "b"):
            fleet_.save_persistables(tmp_path / name)

    run_job(source, 1, 2)
    init = Fleet.init_server
    monkeypatch.setattr(
        Fleet, "init_server", lambda fleet_, _: init(fleet_, str(tmp_path / "ab"[fleet_.server_index()]))
    )
    job = Job(lambda fleet_, worker: join(fleet_), 1, 2)
    job.join(job.start())
    assert "the servers do not start from the same checkpoint" in str(job.errors["worker 0"])


# ---------------------------------------------------------------------------------------------- loading that fails


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many shards the servers keep in memory."""
    made: weakref.WeakSet[Shard] = weakref.WeakSet()

    class Watched(Shard):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.add(self)

    def count() -> int:
        gc.collect()
        return len(made)

    for module in (shard_module, disk_waits):
        monkeypatch.setattr(module, "Shard", Watched)
    gc.freeze()  # or each count would look through all of torch's objects, for half a second
    yield count
    gc.unfreeze()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_a_load_that_fails_on_one_server_changes_nothing(
    strategy: str, shards: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, on all of them; nor does what the others have read stay in their memory."""
    restore_from, broken = replacement.restore_from, []

    def failing(url: object) -> Any:
        if broken and threading.current_thread().name.startswith("fleet-load"):
            broken.pop()
            raise CheckpointError("this one does not get it")
        return restore_from(url)

    monkeypatch.setattr(replacement, "restore_from", failing)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(2, 5))
        fleet_.save_persistables(tmp_path / "before")
        step = fleet_.resume_step()
        assert shards() == 2
        broken.append(True)
        with pytest.raises(CheckpointError, match="this one does not get it"):
            fleet_.load_persistables(tmp_path / "ckpt")
        assert shards() == 2
        assert fleet_.resume_step() == step
        fleet_.save_persistables(tmp_path / "after")
        train(model, optimizer, range(5, 7))
        fleet_.load_persistables(tmp_path / "ckpt")
        fleet_.load_persistables(tmp_path / "ckpt")
        assert fleet_.resume_step() == 2
        assert shards() == 2
        return model.seen()

    (found,) = run_job(body, 1, 2)
    assert same(loaded(tmp_path / "before", strategy), loaded(tmp_path / "after", strategy))
    assert same(loaded(tmp_path / "ckpt", strategy), found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_plain_tensors_that_do_not_all_arrive_change_nothing(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, broken = Connection.start, []

    def failing(client: Connection, frame: Frame, what: str, **options: bool) -> Any:
        if broken and str(client.endpoint) == "server1:1" and frame.message.WhichOneof("kind") == "upload":
            broken.clear()
            raise FleetError("this one does not get it")
        return start(client, frame, what, **options)

    monkeypatch.setattr(Connection, "start", failing)

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        fleet_.save_persistables(tmp_path / "before")
        ids = torch.arange(5)
        state = {
            **{f"dense.{name}": torch.ones_like(value) for name, value in model.dense.state_dict().items()},
            "closed.weight": torch.ones(30, 4),
            "open.ids": ids,
            "open.weight": torch.ones(5, 4),
        }
        broken.append(True)
        with pytest.raises(FleetError, match="does not get it"):
            fleet_.load_state_dict(model, state)
        with pytest.raises(CheckpointError, match=r"'closed\.ids': ids beyond the 30 rows"):
            fleet_.load_state_dict(model, {**state, "closed.ids": ids + 28, "closed.weight": torch.ones(5, 4)})
        fleet_.save_persistables(tmp_path / "after")
        train(model, optimizer, range(2))
        fleet_.load_state_dict(model, state)
        assert all((value == 1).all() for value in (*model.dense.parameters(), model.closed(ids), model.open(ids)))

    run_job(body, 1, 2)
    assert same(loaded(tmp_path / "before", strategy), loaded(tmp_path / "after", strategy))


def test_a_server_that_cannot_take_over_ends_the_job() -> None:
    """By its worker, which knows that others may have the new values already. The server alone refuses and goes on."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        client = connections(fleet_)[0]
        with pytest.raises(FleetError, match="to be taken over are not here"):
            client.call(Frame(client.request(0, ready=pb.Ready(anew=True, attempt="none such"))), "other values")
        train(model, optimizer, range(2))
        with pytest.raises(FleetError, match="to be taken over are not here"):
            loading._take_over(worker_of(fleet_), "none such")
        assert worker_of(fleet_).stopped

    job = Job(body, 1, 1)
    job.join(job.start())
    assert "could not go on from other values" in str(job.errors["server 0"])


# ---------------------------------------------------------------------------------------------- lines that break


@pytest.mark.parametrize(
    "action", [pytest.param(Action.DROP_REQUEST, marks=pytest.mark.slow), Action.DROP_REPLY, Action.DUPLICATE]
)
@pytest.mark.parametrize("strategy", ["sync", pytest.param("geo", marks=pytest.mark.slow)])
def test_requests_that_get_lost_or_come_twice(strategy: str, action: Action, tmp_path: Path) -> None:
    """Of every kind once, on every line: the outcome is the same."""
    kinds = ("claim", "save", "export", "settle", "load", "upload", "ready", "release")

    def body(fleet_: Fleet, worker: int) -> list[list[torch.Tensor]]:
        model, optimizer = join(fleet_, strategy)
        train(model, optimizer, range(3))
        network.add(*(Fault(action, kind=kind, worker=0, times=2) for kind in kinds))
        fleet_.save_persistables(tmp_path / "ckpt")
        train(model, optimizer, range(3, 5))
        fleet_.save_persistables(tmp_path / "ckpt", mode="delta")
        train(model, optimizer, range(5, 6))
        fleet_.load_persistables(tmp_path / "ckpt")
        first, step = model.seen(), fleet_.resume_step()
        state = {f"dense.{name}": value + 1 for name, value in model.dense.state_dict().items()}
        tables = {"closed.weight": torch.ones(30, 4), "open.ids": torch.arange(2), "open.weight": torch.ones(2, 4)}
        fleet_.load_state_dict(model, {**state, **tables})
        assert fleet_.resume_step() == step == 5
        struck = {kind for _, kind, _ in network.struck}
        assert struck == set(kinds) - ({"export"} if strategy == "sync" else set()), "a GEO worker reads its state"
        network.clear()
        second = model.seen()
        train(model, optimizer, range(2))
        return [first, second]

    network = FaultyNetwork(LoopbackNetwork())
    ((first, second),) = run_job(body, 1, 2, network=network)
    assert same(loaded(tmp_path / "ckpt", strategy), first)
    assert torch.equal(second[0], first[0] + 1)
    assert torch.equal(second[3], torch.ones(30, 4))


def test_a_claim_that_arrives_after_its_end_keeps_nobody_out() -> None:
    """Both the writer's own and that of one who waited: nobody would ever give it back."""
    answers: list[str] = []
    claims = Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False)

    def claim(name: str, worker: int) -> None:
        waiting = Waiting(worker, "a claim", 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
        outbox: list[Any] = []
        claims.claim(name, False, waiting, 0.0, False, outbox)
        for _, frame in outbox:
            what = "granted" if frame.message.granted else frame.message.error.what or "done"
            answers.append(f"{name} {worker} {what}")

    for failure in ("", "full disk"):
        name = failure or "good"
        claim(name, 0)
        claim(name, 1)
        claims.release(name, 0, failure, [])
        claim(name, 0)
        claim(name, 1)
    claim("next", 2)
    assert answers == [
        "good 0 granted",
        "good 0 done",
        "good 1 done",
        "full disk 0 granted",
        "full disk 0 worker 0 failed in full disk",
        "full disk 1 worker 0 failed in full disk",
        "next 2 granted",
    ]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("call", ["save_persistables", "load_persistables", "shrink"])
def test_who_is_interrupted_while_it_claims_something_lets_others_in(
    call: str, twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as the grant arrives; and, ``twice``, before this worker could say that it gives it up."""
    asked, struck = Connection.call, list[str]()

    def interrupted(line: Connection, frame: Frame, what: str) -> Frame:
        kind = what.split()[0]
        strikes = kind in ("claim", "release")[: 1 + twice] and kind not in struck and monkeypatched.is_set()
        if strikes:
            struck.append(kind)
        if not (strikes and kind == "release"):
            reply = asked(line, frame, what)
        if strikes:
            raise KeyboardInterrupt
        return reply

    monkeypatched = threading.Event()
    monkeypatch.setattr(Connection, "call", interrupted)
    model = torch.nn.Embedding(4, 2, sparse=True)
    alone = Fleet(environ={})
    alone.init()
    optimizer = alone.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    alone.init_worker()
    optimizer.minimize(model(torch.arange(4)).sum())
    alone.save_persistables(str(tmp_path))
    given = () if call == "shrink" else (str(tmp_path),)
    monkeypatched.set()
    with pytest.raises(KeyboardInterrupt):
        getattr(alone, call)(*given)
    assert struck == ["claim", "release"][: 1 + twice]
    getattr(alone, call)(*given)
    optimizer.minimize(model(torch.arange(4)).sum())
    alone.save_persistables(str(tmp_path))
    alone.stop_worker()


def test_who_is_interrupted_as_it_says_that_a_thing_is_done_says_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others must not take it for failed."""
    call, told = Connection.call, list[str]()

    def interrupted(line: Connection, frame: Frame, what: str) -> Frame:
        if what.startswith("release"):
            told.append(frame.message.release.failure)
            if len(told) == 1:
                raise KeyboardInterrupt
        return call(line, frame, what)

    monkeypatch.setattr(Connection, "call", interrupted)
    alone = Fleet(environ={})
    alone.init()
    alone.distributed_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    alone.init_worker()
    with pytest.raises(KeyboardInterrupt):
        alone.save_persistables(str(tmp_path))
    alone.save_persistables(str(tmp_path))
    alone.stop_worker()
    assert told == ["", "", ""]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("goes_on", ["another thing", "a step"])
def test_the_end_of_a_claim_that_was_lost_keeps_nobody_out(goes_on: str, moves: bool) -> None:
    """A server that is started again may have kept that a worker began something, and not that it was done; and so may
    those to which its job moves then."""
    answers: list[str] = []
    outbox: list[Any] = []
    before, claims, elsewhere = (
        Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False) for _ in range(3)
    )

    def claim(of: Claims, name: str, worker: int) -> None:
        waiting = Waiting(worker, "a claim", 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
        of.claim(name, False, waiting, 0.0, False, outbox)
        answer(name, worker)

    def answer(name: str, worker: int) -> None:
        answers.extend(f"{name} {worker} {'granted' if each.message.granted else 'done'}" for _, each in outbox)
        outbox.clear()

    claim(before, "first", 0)
    claims.restore(before.dump(), 0.0)
    claims.restarted()
    if moves:
        elsewhere.restore(claims.dump(), 0.0)
        claims = elsewhere
    claim(claims, "first", 1)
    claim(claims, "first", 0)  # it may not have heard that it may begin
    claims.went_on(2, outbox)
    claim(claims, "second", 2)
    assert answers == ["first 0 granted", "first 0 granted"]
    if goes_on == "a step":
        claims.went_on(0, outbox)
        answer("first 1, then second", 2)
    else:
        claim(claims, "second", 0)
    assert len(answers) == 4, answers
    assert [each.split()[-1] for each in answers[2:]] == ["done", "granted"]


def asks_for_a_claim(asked: Sequence[Waiting], outbox: Outbox) -> None:
    claims = Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False)
    first = Waiting(0, "a claim", 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
    claims.claim("before", False, first, 0.0, False, [])
    for waiting in asked:
        claims.claim("now", False, waiting, 0.0, False, outbox)
    claims.release("before", 0, "", outbox)


def meets_others(asked: Sequence[Waiting], outbox: Outbox) -> None:
    meetings = Meetings()
    for waiting in asked:
        meetings.come(pb.Request(worker=0, incarnation=7, meet=pb.Meet(address="there")), waiting, outbox)
    meetings.answer_ready({0}, outbox, is_trained=False)


def collects_states(asked: Sequence[Waiting], outbox: Outbox) -> None:
    states = ObjectStates(lockstep=True)
    for waiting in asked:
        states.collect("all", True, 0, waiting, {})
    states.answer_ready((), {}, set, outbox, too_late=lambda since: False)


@pytest.mark.parametrize("requests", [asks_for_a_claim, meets_others, collects_states])
def test_of_a_request_that_comes_twice_and_waits_each_is_answered(requests: Callable[..., None]) -> None:
    """The repetition may have come first, and which of them is still waited for is not known here."""
    answered: list[int] = []
    asked = [Waiting(0, "it", 0.0, lambda _, n=n: answered.append(n), lambda: Frame(pb.Reply())) for n in range(20)]
    outbox: Outbox = []
    requests(asked, outbox)
    for respond, frame in outbox:
        respond(frame)
    assert answered == [*range(4, 20)], "the last ones, as there is no end to what may be repeated"


def test_who_comes_anew_does_each_call_once() -> None:
    """Its calls are none of those that were done before it came; those that it has made since are done."""
    answers: list[bool] = []
    claims = Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False)

    def claim(worker: int) -> None:
        waiting = Waiting(worker, "a claim", 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
        outbox: list[Any] = []
        claims.claim("save", False, waiting, 0.0, False, outbox)
        answers.extend(frame.message.granted for _, frame in outbox)

    claim(0)
    claims.release("save", 0, "", [])
    claims.joined(1)
    claims.joined(2)
    for worker in (1, 2):
        claim(worker)
        claims.release("save", worker, "", [])
        claim(worker)
    assert answers == [True, True, False, True, False]


def test_who_comes_while_one_that_joined_does_it_anew_waits_for_that_one() -> None:
    """What was done before the other one joined is not what both of them do now."""
    answers: list[str] = []
    outbox: list[Any] = []
    claims = Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False)

    def claim(worker: int) -> None:
        def respond(frame: Frame) -> None:
            answers.append(f"{worker} {'granted' if frame.message.granted else 'done'}")

        claims.claim("load", True, Waiting(worker, "it", 0.0, respond, lambda: Frame(pb.Reply())), 0.0, False, outbox)
        answer()

    def release(worker: int) -> None:
        claims.release("load", worker, "", outbox)
        answer()

    def answer() -> None:
        while outbox:
            respond, frame = outbox.pop(0)
            respond(frame)

    claim(0)
    release(0)
    claims.joined(2)
    claim(2)
    claim(1)
    assert answers == ["0 granted", "2 granted"]
    release(2)
    assert answers[2:] == ["1 done"]


@pytest.mark.parametrize("starts_again", [False, True], ids=["", "the server is started again"])
def test_who_comes_anew_while_another_does_a_call_does_its_own(starts_again: bool) -> None:
    """It counts its calls from one, and has not made the one that is under way."""
    claims, again = (Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False) for _ in range(2))
    outbox: Outbox = []

    def claim(worker: int) -> list[bool]:
        waiting = Waiting(worker, "it", 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
        claims.claim("save, call 1", False, waiting, 0.0, False, outbox)
        answers = [frame.message.granted for _, frame in outbox]
        outbox.clear()
        return answers

    assert claim(0) == [True]
    claims.joined(1)
    if starts_again:
        again.restore(json.loads(json.dumps(claims.dump())), 0.0)
        claims = again
    claims.release("save, call 1", 0, "", outbox)
    assert claim(2) == [False]
    assert claim(1) == [True]


def test_who_was_interrupted_while_it_waited_is_not_let_in() -> None:
    """It went on to something else, and would keep all others waiting."""
    claims, outbox = Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False), []
    granted: list[int] = []

    def claim(worker: int) -> None:
        waiting = Waiting(worker, "it", 0.0, lambda _: granted.append(worker), lambda: Frame(pb.Reply()))
        claims.claim("it", True, waiting, 0.0, False, outbox)

    for worker in range(3):
        claim(worker)
    claims.release("it", 1, "it was interrupted", outbox)
    claims.left(0, FleetError("gone"), outbox)
    for respond, _ in outbox:
        respond(Frame(pb.Reply()))
    assert granted == [0, 2]


def test_a_server_that_starts_again_knows_what_was_begun_and_done() -> None:
    claims, again = (Claims("here", 60.0, lambda: Frame(pb.Reply(granted=True)), only_first=False) for _ in range(2))

    def answers(claims: Claims, name: str, worker: int) -> list[bool]:
        outbox: list[Any] = []
        waiting = Waiting(worker, name, 0.0, lambda frame: None, lambda: Frame(pb.Reply()))
        claims.claim(name, True, waiting, 0.0, False, outbox)
        return [frame.message.granted for _, frame in outbox]

    assert answers(claims, "done", 0) == [True]
    claims.release("done", 0, "", [])
    claims.joined(2)
    assert answers(claims, "begun", 0) == [True]
    again.restore(json.loads(json.dumps(claims.dump())), 0.0)
    assert answers(again, "done", 1) == [False], "it need not do that once more"
    assert answers(again, "begun", 1) == [], "it waits for worker 0"
    again.release("begun", 0, "", [])
    assert answers(again, "done", 2) == [True], "it had joined since"


def test_what_only_worker_0_may_do_waits_for_its_next_process() -> None:
    claims, gone = Claims("a server", 5.0, lambda: Frame(pb.Reply(granted=True)), only_first=True), FleetError("gone")
    answers: list[tuple[int, Frame]] = []
    outbox: Outbox = []

    def asks(worker: int) -> None:
        waiting = Waiting(worker, "it", 0.0, lambda frame: answers.append((worker, frame)), lambda: Frame(pb.Reply()))
        claims.claim("it", False, waiting, 1.0, False, outbox)

    def heard() -> list[tuple[int, str]]:
        for respond, frame in outbox:
            respond(frame)
        told = [(worker, frame.message.error.what or str(frame.message.granted)) for worker, frame in answers]
        outbox.clear()
        answers.clear()
        return told

    asks(1)
    asks(0)
    assert heard() == [(0, "True")]
    claims.left(0, gone, outbox)
    claims.tick(100.0, outbox)
    claims.tick(104.0, outbox)
    assert heard() == [], "it is waited for from then on"
    asks(0)
    assert heard() == [(0, "True")]
    claims.left(0, gone, outbox)
    claims.tick(200.0, outbox)
    claims.tick(206.0, outbox)
    ((worker, error),) = heard()
    assert worker == 1
    assert "worker 0 did not write the checkpoint" in error


def test_who_comes_late_that_was_lost_amid_it_takes_nothing_from_the_next() -> None:
    """One server has given up on it, and another has not."""
    background = Background()
    background.upload(0, pb.Upload(table=1), ())
    background.upload(1, pb.Upload(table=2), ())
    background.upload(0, pb.Upload(table=3), ())
    background.withdraw(0, "load_state_dict(), by worker 0")
    background.upload(1, pb.Upload(table=4), ())
    assert [[upload.table for upload, _ in each] for each in background.uploads.values()] == [[2, 4]]
    background.left(0)
    assert [*background.uploads] == [1]


@pytest.mark.parametrize("saves", [False, True], ids=["", "after a checkpoint"])
def test_of_a_state_that_was_given_in_part_nothing_is_kept(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was interrupted, and another state has other rows."""

    def replace(*values: Any) -> None:
        upload.replace(*values)
        raise KeyboardInterrupt

    def body(fleet_: Fleet, worker: int) -> Any:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        if saves:
            fleet_.save_persistables(tmp_path / "ckpt")
        state, seen = fleet_.state_dict(model), model.seen()
        other = {name: torch.ones_like(value) if "weight" in name else value for name, value in state.items()}
        with monkeypatch.context() as patch:
            patch.setattr("fleet.ps.worker.replacement.replace", replace)
            with pytest.raises(KeyboardInterrupt):
                fleet_.load_state_dict(model, other)
        assert same(model.seen(), seen)
        fewer = {**state, "open.weight": state["open.weight"][:3], "open.ids": state["open.ids"][:3]}
        fleet_.load_state_dict(model, fewer)
        assert same(model.seen(), seen)

    run_job(body, 1, 2)


@pytest.mark.pairs(2)
@pytest.mark.parametrize("call", ["save", "load", "load_state", "export"])
@pytest.mark.parametrize("waits", [True, False], ids=["who waits", "who asks later"])
def test_what_a_worker_was_lost_amid_another_does_anew(
    call: str, waits: bool, shards: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its claim and its release: the others hear of it within the deadline, and one does it itself."""
    patience = {**PATIENT, "FLAGS_rpc_deadline": "3000"}
    claimed, gone = (threading.Event(), threading.Event()), threading.Event()
    dying: list[WorkerRuntime] = []

    class Told(Claims):
        def claim(self, name: str, by_anyone: bool, waiting: Waiting, *rest: Any) -> None:
            super().claim(name, by_anyone, waiting, *rest)
            if dying:
                claimed[waiting.worker].set()

        def left(self, worker: int, *rest: Any) -> None:
            super().left(worker, *rest)
            gone.set()

    def end(worker: WorkerRuntime) -> None:
        assert not waits or claimed[1].wait(PATIENCE_S)
        lines_of(worker).close()
        worker.stopped = True
        raise SystemExit("killed")

    def let_die(worker: WorkerRuntime) -> None:
        """Have a worker die when it has asked servers for its part, or has sent them everything."""
        dying.append(worker)
        ask_all = lines_of(worker).ask_all

        def asking(make: Any, what: str, *rest: Any) -> Any:
            replies = ask_all(make, what, *rest)
            if "a checkpoint at" in what or what.startswith("loading"):
                end(worker)
            return replies

        monkeypatch.setattr(lines_of(worker), "ask_all", asking)

    def replace(connections: Any, *values: Any) -> None:
        upload.replace(connections, *values)
        if any(connections is worker.connections for worker in dying):
            end(dying[0])

    def exported(connection: Any, *rest: Any) -> Any:
        if any(connection in worker.connections.by_server for worker in dying):
            end(dying[0])
        return state_reader.exported(connection, *rest)

    monkeypatch.setattr("fleet.ps.server.job.Claims", Told)
    monkeypatch.setattr("fleet.ps.worker.replacement.replace", replace)
    monkeypatch.setattr("fleet.ps.worker.model_export.exported", exported)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        before = fleet_.state_dict(model)
        seen = model.seen()
        train(model, optimizer, range(2))
        acts = {
            "save": lambda: fleet_.save_persistables(tmp_path / "ckpt"),
            "load": lambda: fleet_.load_persistables(tmp_path / "ckpt"),
            "load_state": lambda: fleet_.load_state_dict(model, before),
            "export": lambda: fleet_.save_inference_model(str(tmp_path / "model"), model),
        }
        fleet_.barrier_worker()
        if worker == 0:
            let_die(worker_of(fleet_))
        else:
            assert (claimed[0] if waits else gone).wait(PATIENCE_S)
        acts[call]()
        if call.startswith("load"):
            assert same(model.seen(), seen)
        until(lambda: shards() == 2)
        train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        return model.seen()

    job = Job(body, 2, 2, environ=patience)
    job.join(job.start())
    assert {name: type(error) for name, error in job.errors.items()} == {"worker 0": SystemExit}
    assert Checkpoint.open(tmp_path / "ckpt").manifest.version == (4 if call == "load" else 6)
    assert (tmp_path / "model").exists() == (call == "export")
