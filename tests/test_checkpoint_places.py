"""A checkpoint lies in any place that has a name, and servers write there themselves where they can."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem
from harness import PATIENT, run_job
from prepared import Prepared
from small_job import Net, join, same, train

from fleet import Checkpoints, Fleet
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import Claimed, Directory, Remote, place_at, proven
from fleet.errors import ArgumentTypeError, CheckpointError
from fleet.launch import cli
from fleet.ps.server import checkpoint_share
from fleet.ps.worker import checkpoint_save
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.serving import follow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a store that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import fsspec

        fsspec.filesystem("s3").mkdir("fleet-tests")
        yield "s3://fleet-tests"
    server.stop()


@pytest.fixture
def stores(s3: str, tmp_path: Path) -> dict[str, str]:
    return {"local": str(tmp_path), "memory": f"memory://{tmp_path.name}", "s3": f"{s3}/{tmp_path.name}"}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The servers whose shares went through the worker."""
    servers: list[int] = []
    fetch = checkpoint_save._fetch

    def watched(worker: Any, version: int, server: int, *rest: Any) -> None:
        servers.append(server)
        fetch(worker, version, server, *rest)

    monkeypatch.setattr(checkpoint_save, "_fetch", watched)
    return servers


def save_twice(fleet_: Fleet, dirname: str, strategy: str = "sync") -> list[torch.Tensor]:
    """Train, save, train, save a delta; what there was to save at the end."""
    model, optimizer = join(fleet_, strategy)
    train(model, optimizer, range(3))
    fleet_.save_persistables(dirname)
    train(model, optimizer, range(3, 5))
    fleet_.save_persistables(dirname, mode="delta")
    return model.seen()


def loaded(dirname: str, servers: int = 3) -> list[torch.Tensor]:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, _ = join(fleet_)
        assert fleet_.resume_step() == 5
        return model.seen()

    return run_job(body, 1, servers, model_dir=dirname)[0]


@pytest.mark.parametrize("store", ["local", "memory", "s3"])
@pytest.mark.pairs(1)
def test_base_and_delta_in_every_kind_of_place(store: str, stores: dict[str, str], streamed: list[int]) -> None:
    dirname = f"{stores[store]}/rün 1/ckpt"
    (expected,) = run_job(lambda fleet_, worker: save_twice(fleet_, dirname), 1, 2)
    assert same(loaded(dirname), expected)
    assert streamed == []
    names = sorted(name[:13] for name in place_at(dirname).names())
    assert names == ["fleet-pieces-", "fleet-pieces-", "manifest.json"]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_chain_of_directories_may_be_copied_to_a_store(store: str, stores: dict[str, str], tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(3))
        fleet_.save_persistables(str(tmp_path / "run" / "base"))
        train(model, optimizer, range(3, 5))
        fleet_.save_persistables(str(tmp_path / "run" / "delta"), mode="delta")
        return model.seen()

    (expected,) = run_job(body, 1, 2)
    for file in [each for each in (tmp_path / "run").rglob("*") if each.is_file()]:
        folder = f"{stores[store]}/elsewhere/{file.parent.relative_to(tmp_path / 'run').as_posix()}"
        place_at(folder).create(file.name, [file.read_bytes()])
    shutil.rmtree(tmp_path / "run")
    assert same(loaded(f"{stores[store]}/elsewhere/delta"), expected)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_place_without_directories_has_the_same_rules(store: str, stores: dict[str, str]) -> None:
    place = place_at(stores[store])
    place.create("mine", [b"mine"])

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(2))
        with pytest.raises(CheckpointError, match="over something else"):
            fleet_.save_persistables(place.url)
        target = place.within("ckpt")
        for version in (2, 3):
            fleet_.save_persistables(target.url)
            assert len(target.names()) == 2, "what was superseded is gone"
            assert Checkpoint.open(target.url).manifest.version == version
            train(model, optimizer, [version])
        with pytest.raises(CheckpointError, match="no checkpoint here"):
            fleet_.load_persistables(place.within("nowhere").url)
        gone = next(name for name in target.names() if name.startswith("fleet"))
        piece = target.within(gone).names()[0]
        Checkpoint.open(target.url).check_present()
        target.remove(f"{gone}/{piece}")
        with pytest.raises(CheckpointError, match="missing"):
            Checkpoint.open(target.url).check_present()
        before = model.seen()
        with pytest.raises(CheckpointError, match=r"missing.*checkpoint verify") as caught:
            fleet_.load_persistables(target.url)
        assert piece in str(caught.value)
        assert same(model.seen(), before)

    run_job(body, 1, 2)
    assert place.read("mine", 9) == b"mine"


@pytest.fixture
def servers(s3: str, prepared: Prepared, free_endpoints: Callable[[int], list[str]]) -> Iterator[list[str]]:
    """Two server processes that stand somewhere else."""
    endpoints = free_endpoints(2)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **PATIENT}
    processes = [
        prepared.start(["-m", "fleet", "server", "--endpoint", endpoint], environ, Path("/"), bare=True)
        for endpoint in endpoints
    ]
    yield endpoints
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_servers_of_their_own_write_where_they_can(
    servers: list[str],
    stores: dict[str, str],
    streamed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To a relative path and to S3, but not into the memory of the worker's process: that goes through the worker."""
    monkeypatch.chdir(tmp_path)
    fleet_ = Fleet(environ={**PATIENT})
    fleet_.init(UserDefinedRoleMaker(0, Role.WORKER, 1, servers))
    model, optimizer = join(fleet_)
    train(model, optimizer, range(5))
    by_themselves = ["here/ein Ort", stores["s3"]]
    for dirname in by_themselves:
        fleet_.save_persistables(dirname)
    assert streamed == []
    fleet_.save_persistables(stores["memory"])
    assert streamed == [0, 1]
    expected = model.seen()
    train(model, optimizer, range(2))
    fleet_.load_persistables(stores["s3"])
    assert same(model.seen(), expected)
    fleet_.stop_worker()
    for dirname in (*by_themselves, stores["memory"]):
        assert same(loaded(dirname), expected), dirname


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
@pytest.mark.parametrize("seeing", [(False, False), (True, False)], ids=["none", "one of two"])
def test_servers_that_do_not_see_the_place_send_their_shares(
    seeing: tuple[bool, bool], strategy: str, tmp_path: Path, streamed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sees, find = itertools.cycle(seeing), checkpoint_share.proven
    monkeypatch.setattr(checkpoint_share, "proven", lambda url, proof: find(url, proof) if next(sees) else None)

    def body(fleet_: Fleet, worker: int) -> None:
        save_twice(fleet_, str(tmp_path / "ckpt"), strategy)
        assert len(streamed) == 2 * seeing.count(False)
        monkeypatch.setattr(checkpoint_share, "proven", find)
        fleet_.save_persistables(tmp_path / "full")

    run_job(body, 1, 2)
    assert same(loaded(str(tmp_path / "ckpt")), loaded(str(tmp_path / "full")))
    assert len(list((tmp_path / "ckpt").iterdir())) == 3


def test_only_who_finds_the_proof_and_may_write_takes_a_place_for_the_one_that_is_meant(tmp_path: Path) -> None:
    claimed = Claimed(Directory(tmp_path / "claimed"))
    Claimed(Directory(tmp_path / "another's")).close()
    try:
        found = proven(str(tmp_path / "claimed"), claimed.proof)
        assert found is not None
        assert found.url == str(tmp_path / "claimed")
        assert proven(str(tmp_path / "another's"), claimed.proof) is None
        assert proven(str(tmp_path / "nowhere"), claimed.proof) is None
        assert proven(str(tmp_path), claimed.proof) is None
        assert proven("nobody-knows://this", claimed.proof) is None
        assert proven(str(tmp_path / "claimed"), "") is None
    finally:
        claimed.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_a_server_of_another_user_does_not_write_where_it_may_only_read(tmp_path: Path) -> None:
    claimed = Claimed(Directory(tmp_path / "claimed"))
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        readable = (tmp_path / "claimed" / "in-progress").read_text() == claimed.proof
        os._exit(10 * readable + (proven(claimed.folder.url, claimed.proof) is None))
    claimed.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11


@pytest.mark.parametrize("what", ["step-00000002", "step-00000002/manifest.json", "step-00000002/fleet-pieces-*"])
def test_what_may_not_be_read_is_passed_by(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As anything else that is no complete checkpoint: the one before it is there. Whoever is root may read all."""

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        for step in range(2):
            train(model, optimizer, [step])
            job.save_persistables(tmp_path / f"step-{step + 1:08d}")

    run_job(body)
    (forbidden,) = tmp_path.glob(what)

    def refusing(look: Callable[..., Any], itself: bool) -> Callable[..., Any]:
        def refused(path: Any, *args: Any, **options: Any) -> Any:
            if forbidden in Path(path).parents or (itself and forbidden == Path(path)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return look(path, *args, **options)

        return refused

    is_file = forbidden.is_file()
    monkeypatch.setattr(Path, "stat", refusing(Path.stat, itself=False))
    monkeypatch.setattr(Path, "open", refusing(Path.open, itself=is_file))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir, itself=True))
    assert Checkpoints.latest(tmp_path) == str(tmp_path / "step-00000001")
    assert "passing by what is no complete checkpoint: the system does not let this process read" in caplog.text
    with follow(Net().eval(), tmp_path) as follower:
        assert follower.version == 1
    assert cli.main(["checkpoint", "ls", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "step-00000001" in told.out
    assert "step-00000002: the system does not let this process read here" in told.err
    with pytest.raises(CheckpointError, match="the system does not let this process read here"):
        Checkpoint.open(tmp_path / "step-00000002").check_present()


def test_a_chain_of_directories_may_be_moved_and_reached_by_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(4))
        fleet_.save_persistables(tmp_path / "link" / "base")
        train(model, optimizer, range(4, 5))
        fleet_.save_persistables(tmp_path / "real" / "delta", mode="delta")
        with pytest.raises(CheckpointError, match="would replace a checkpoint that it needs"):
            fleet_.save_persistables(tmp_path / "link" / "base", mode="delta")
        return model.seen()

    (expected,) = run_job(body, 1, 2)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "real", tmp_path / "elsewhere" / "real")
    assert same(loaded(str(tmp_path / "elsewhere" / "real" / "delta")), expected)


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000])
def test_a_file_that_is_read_once_is_whole(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    place = Directory(tmp_path)
    place.create("file", [content])  # which leaves nothing of it in the cache
    assert bytes(place.read("file", size + 1, once=True)) == content
    assert bytes(place.read("file", size // 2, once=True)) == content[: size // 2]
    assert bytes(place.read("file", size + 1)) == content
    assert bytes(place.read("file", size + 1, once=True)) == content  # from the cache
    with pytest.raises(FileNotFoundError):
        place.read("no file", 1, once=True)


class NoCredentialsError(Exception):
    """No OSError, as a store's own errors are not."""


class Refusing(AbstractFileSystem):
    protocol = "refusing"

    def _refuse(self, *given: Any, **options: Any) -> Any:
        raise NoCredentialsError("unable to locate credentials")

    info = ls = cat_file = pipe_file = open = exists = isfile = size = _refuse


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(_registry, "refusing", Refusing)
    return "refusing://bucket/run"


@pytest.mark.parametrize("way", ["resume_from", "latest", "save", "load", "Checkpoints", "each operation"])
def test_a_store_that_refuses(refusing: str, way: str) -> None:
    def told(call: Callable[..., Any], *given: Any) -> None:
        with pytest.raises(
            CheckpointError, match=r"store refuses.*refusing://bucket.*unable to loc.* credentials are"
        ) as e:
            call(*given)
        assert "CheckpointError" not in str(e.value), "it is told once"

    if way == "latest":
        told(Checkpoints.latest, refusing)
    elif way == "each operation":
        place = place_at(refusing)
        for name, *given in (["names"], ["exists"], ["is_file"], ["has", "x"], ["size", "x"], ["read", "x", 1]):
            told(getattr(place, name), *given)
        told(place.create, "x", [b""])
        told(place.publish, "x", b"")
    else:
        alone = Fleet(environ={**PATIENT})
        alone.init()
        if way == "resume_from":
            told(alone.resume_from, refusing)
        join(alone)
        if way == "Checkpoints":
            told(Checkpoints(refusing, every_steps=1, background=False, fleet=alone).save)
        elif way != "resume_from":
            told(alone.save_persistables if way == "save" else alone.load_persistables, refusing)
        alone.stop_worker()


def test_a_place_whose_paths_are_urls_has_one_protocol() -> None:
    """Paths of fsspec's http:// are."""
    assert Remote(None, "http://host/run", "http").within("step-00000001").url == "http://host/run/step-00000001"


def test_a_path_behind_file_is_a_path_whatever_it_is_called(tmp_path: Path) -> None:
    assert place_at(f"file://{tmp_path}/a://b").url == str(tmp_path / "a:" / "b")


def test_names_that_are_no_place(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    long, latin = tmp_path / ("x" * 300), tmp_path / "caf\udce9"  # the last byte of the second is no UTF-8
    for name in ("a\0b", "nobody-knows://this", tmp_path / "circle", "/proc/none" * (1 << 20), long, latin):
        with pytest.raises(CheckpointError, match="cannot be reached") as caught:
            place_at(name)
        assert ("protocol may need a package" in str(caught.value)) == ("://" in str(name))
        assert str(caught.value).isprintable() or "\0" in str(name)
    with pytest.raises(CheckpointError, match="dirname is empty; expected a path or a URL"):
        place_at("")
    for wrong in (3, None, b"bytes"):
        with pytest.raises(ArgumentTypeError, match="dirname must be a path or a URL"):
            place_at(wrong)
