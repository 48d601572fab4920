"""A checkpoint exists whole or not at all, and training goes on from it as if it had never stopped."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small_job
import torch
from harness import PATIENT, Job, assert_close, config, run_job, until, values

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.base.cluster import Endpoint
from fleet.checkpoint import entries, places, writer
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import Directory
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import CheckpointError, FleetError, JobAbortedError
from fleet.kernels import RULES
from fleet.numeric.ids import owner
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.table.shard import Shard
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker import checkpoint_save
from fleet.ps.worker.connection import Connection
from fleet.transpiler import DistributeTranspilerConfig, HashName, RoundRobin

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

ROWS, DIM = 30, 4
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, (name, shape) in enumerate(
        {"matrix": (6, DIM), "bias": (6,), "scale": (), "nothing": (0, 3), "idle": (2,), "own": (ROWS, DIM)}.items()
    )
}


class Net(torch.nn.Module):
    """Dense parameters of every shape, one never used; a table of torch's, whose last rows stay untouched, and ours."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name in ("matrix", "bias", "scale", "nothing", "idle"):
            value = torch.zeros(shapes[name]) if name in shapes else WEIGHTS[name].clone()
            setattr(self, name, torch.nn.Parameter(value))
        self.own = torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=WEIGHTS["own"].clone())
        self.open = fleet.nn.Embedding(None, DIM)

    def dense(self) -> list[torch.nn.Parameter]:
        return [self.matrix, self.bias, self.scale, self.nothing, self.idle]

    def loss(self, step: int) -> torch.Tensor:
        """The same on every worker, so that their mean is too whatever their number; ids keep appearing."""
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ROWS - 10, (8,), generator=draw)
        rows = self.own(ids) + self.open(ids * 1000 + step - 5)
        out = torch.tanh(rows @ self.matrix.t() + self.bias) * self.scale + self.nothing.sum()
        return (out - torch.randn(out.shape, generator=draw)).pow(2).mean()

    def state(self) -> list[torch.Tensor]:
        """All a job has learnt: dense values, and rows of both tables, known and unknown."""
        ids = torch.arange(ROWS)
        grid = (ids[:, None] * 1000 + torch.arange(-5, 5)).flatten()
        return [*values(self), self.nothing.detach(), self.own(ids).detach(), self.open(grid).detach()]


def join(fleet_: Fleet, make: Make, config: DistributeTranspilerConfig | None = None) -> tuple[Net, Any]:
    model = Net()
    optimizer = fleet_.distributed_optimizer(make(model.parameters()), config, model=model)
    fleet_.init_worker()
    return model, optimizer


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


MAKES: dict[str, Make] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def made(dirname: Path, make: Make = sgd, steps: int = 2, servers: int = 2) -> Path:
    """A checkpoint of a short training."""

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, make)
        for step in range(steps):
            optimizer.minimize(model.loss(step))
        fleet_.save_persistables(str(dirname))

    run_job(body, 1, servers)
    return dirname


def content(dirname: Path) -> dict[str, Any]:
    """What stands in a checkpoint, read with nothing of ours: JSON and safetensors."""
    manifest = json.loads((dirname / "manifest.json").read_text())
    assert manifest["format"] == "fleet-checkpoint"
    found: dict[str, Any] = {"version": manifest["version"], "seed": manifest["seed"]}
    for piece in manifest["pieces"]:
        path = dirname / piece["file"]
        data = path.read_bytes()
        assert (len(data), zlib.crc32(data)) == (piece["bytes"], piece["crc32"])
        tensors = safetensors.torch.load_file(path)
        ordered = iter([tensors[name] for name in piece["tensors"]])
        about = piece["about"]
        for entry in about.get("dense", []):
            value = entry["plain"] if "plain" in entry else next(ordered)
            found[f"{entry['param']}[{entry['offset']}]/{entry['key']}"] = value
        if "table" in about:
            ids = next(ordered)
            for column, rows in zip(about["columns"], ordered, strict=True):
                for key, row in zip(ids.tolist(), rows, strict=True):
                    found[f"{about['table']}[{key}]/{column}"] = row
            found[f"{about['table']}/step"] = about["step"]
    return found


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        same = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        assert same, key


def files(dirname: Path) -> dict[str, bytes]:
    return {str(path.relative_to(dirname)): path.read_bytes() for path in dirname.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------- saving


def when_claimed(monkeypatch: pytest.MonkeyPatch, workers: int) -> threading.Event:
    """Set when so many workers have asked for the right to write."""
    claims, event, start = [], threading.Event(), Connection.start

    def counting(client: Connection, frame: Any, what: str, **options: bool) -> Any:
        pending = start(client, frame, what, **options)
        if what.startswith("claim"):
            claims.append(what)
            if len(claims) == workers:
                event.set()
        return pending

    monkeypatch.setattr(Connection, "start", counting)
    return event


def test_one_worker_saves_or_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checkpoint; where all ask at once, one writes and the others return when it is there."""
    workers, written, write = 3, [], checkpoint_save._write
    all_claimed = when_claimed(monkeypatch, workers)

    def patient(worker: Any, dirname: str, *rest: Any) -> None:
        if dirname.endswith("all"):
            assert all_claimed.wait(30)
        write(worker, dirname, *rest)
        written.append(dirname)

    monkeypatch.setattr(checkpoint_save, "_write", patient)

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, MAKES["adam"])
        for step in range(3):
            optimizer.minimize(model.loss(step))
        fleet_.save_persistables(str(tmp_path / "all"))
        assert (tmp_path / "all" / "manifest.json").is_file()
        if fleet_.is_first_worker():
            fleet_.save_persistables(str(tmp_path / "first"))
        optimizer.minimize(model.loss(4))

    run_job(body, workers, 2)
    assert sorted(written) == [str(tmp_path / "all"), str(tmp_path / "first")]
    found = content(tmp_path / "all")
    assert_same(found, content(tmp_path / "first"))
    assert found["version"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all", "first"], "nothing temporary is left"


def test_what_is_saved_is_what_torch_has(tmp_path: Path) -> None:
    """Values, moments and step counts, of dense parameters and of rows, against a training by torch itself."""
    parts = {"matrix": (3, 2), "row": (4, 2)}
    start = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in parts.items()}
    ids = torch.tensor([1, 3, 1])

    def body(fleet_: Fleet, worker: int) -> None:
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 2, sparse=True, _weight=start["row"].clone())})
        model.register_parameter("matrix", torch.nn.Parameter(start["matrix"].clone()))
        optimizer = fleet_.distributed_optimizer(torch.optim.Adam(model.parameters()), model=model)
        fleet_.init_worker()
        for _ in range(2):
            optimizer.minimize(model["table"](ids).pow(2).sum() + model.matrix.pow(2).sum())
        fleet_.save_persistables(str(tmp_path / "ckpt"))

    run_job(body, 1, 1)
    matrix, rows = (torch.nn.Parameter(start[name].clone()) for name in ("matrix", "row"))
    dense, sparse = torch.optim.Adam([matrix]), torch.optim.SparseAdam([rows])
    for _ in range(2):
        dense.zero_grad()
        sparse.zero_grad()
        (torch.nn.functional.embedding(ids, rows, sparse=True).pow(2).sum() + matrix.pow(2).sum()).backward()
        dense.step()
        sparse.step()
    found = content(tmp_path / "ckpt")
    assert (found["version"], found["table.weight/step"]) == (2, 2)
    state = dense.state[matrix]
    assert_close([found["matrix[0]/value"].view(3, 2)], [matrix.detach()])
    assert_close([found[f"matrix[0]/state.{k}"] for k in state], list(state.values()))
    for row in range(4):
        assert_close([found[f"table.weight[{row}]/weight"]], [rows[row].detach()])
        for key in ("exp_avg", "exp_avg_sq"):
            assert_close([found[f"table.weight[{row}]/{key}"]], [sparse.state[rows][key][row]])


@pytest.mark.parametrize("place", ["new", "new/and/deep", "empty", "left over", "link"])
def test_places_to_save_to(place: str, tmp_path: Path) -> None:
    target = tmp_path / place
    if place in ("empty", "left over"):
        target.mkdir()
    if place == "left over":  # by a writer that was killed
        (target / "fleet-pieces-0123abcd").mkdir()
        (target / "fleet-pieces-0123abcd" / "piece-00000.safetensors").write_bytes(b"half")
        (target / ".manifest.json-0123abcd").write_bytes(b"{")
    if place == "link":
        (tmp_path / "real").mkdir()
        target.symlink_to(tmp_path / "real")
    inode = target.stat().st_ino if target.exists() else None
    made(target)
    assert content(target)["version"] == 2
    assert inode in (None, target.stat().st_ino), "a directory may be where a volume is mounted, and has to stay"
    assert sorted(name[:13] for name in os.listdir(target)) == ["fleet-pieces-", "manifest.json"]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_here_is_a_place_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("."))
    assert content(tmp_path)["version"] == 2


def test_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, sgd)
        for step in range(4):
            optimizer.minimize(model.loss(step))
            fleet_.save_persistables(str(tmp_path / "ckpt"))
            assert content(tmp_path / "ckpt")["version"] == step + 1
            fleet_.save_persistables(str(tmp_path / f"step-{step}"))

    (tmp_path / "step-100").mkdir()
    run_job(body, 2, 2)
    assert_same(content(tmp_path / "ckpt"), content(tmp_path / "step-3"))
    assert content(tmp_path / "step-0")["version"] == 1
    assert len(list((tmp_path / "ckpt").iterdir())) == 2, "a manifest and one folder of pieces"


def test_users_files_beside_the_pieces_are_theirs(tmp_path: Path) -> None:
    target = made(tmp_path / "ckpt")
    (target / "notes.txt").write_text("mine")
    made(target / "step-00000001")
    made(target, steps=3)
    assert (target / "notes.txt").read_text() == "mine"
    assert content(target)["version"] == 3
    assert content(target / "step-00000001")["version"] == 2


def _file(path: Path) -> None:
    path.write_text("mine")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


def _manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "a web page"}')


def _checkpoints(path: Path) -> None:
    path.mkdir()
    made(path / "step-00000001")


@pytest.mark.parametrize("occupy", [_file, _folder, _manifest, _checkpoints])
def test_other_peoples_things_are_not_written_over(occupy: Callable[[Path], None], tmp_path: Path) -> None:
    target = tmp_path / "taken"
    occupy(target)
    before = files(tmp_path)

    def body(fleet_: Fleet, worker: int) -> None:
        model, optimizer = join(fleet_, sgd)
        optimizer.minimize(model.loss(0))
        with pytest.raises(CheckpointError, match="over something else") as caught:
            fleet_.save_persistables(str(target))
        assert str(target) in str(caught.value)
        optimizer.minimize(model.loss(1))  # the job goes on

    run_job(body, 1, 2)
    assert files(tmp_path) == before


# ---------------------------------------------------------------------------------------------- failures while writing


class Disk:
    """Counts what is done to the disk and fails at one of these operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.fails_at: int | None = None
        for module in (places, writer):
            monkeypatch.setattr(module, "sync_directory", self._failing(places.sync_directory))
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr(Directory, "create", self._failing(Directory.create, half=self._half_of))

    def _half_of(self, place: Directory, name: str, pieces: Any) -> None:
        whole = b"".join(bytes(piece) for piece in pieces)
        (place.path / name).write_bytes(whole[: len(whole) // 2])

    def _failing(self, operation: Any, half: Any = None) -> Any:
        def wrapped(*args: Any) -> Any:
            self.done += 1
            if self.done - 1 == self.fails_at:
                if half is not None:
                    half(*args)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
            return operation(*args)

        return wrapped


SETTINGS = {
    "server_num": 1,
    "worker_num": 1,
    "mode": "sync",
    "slice_var_up": True,
    "split_method": "RoundRobin",
    "min_block_size": 8192,
    "staleness": 0,
    "dc_lambda": 0.0,
    "dc_adaptive": False,
    "elastic": False,
}


def write_small(dirname: Path, version: int) -> None:
    """A checkpoint of three pieces, without a job."""
    raw = {"params": [], "tables": [], "groups": [], "settings": SETTINGS}
    with CheckpointWriter(str(dirname)) as each:
        for number in range(3):  # each is written when the one before it is
            with each.pieces(f"piece-{number}") as pieces:
                pieces.add({"dense": [], "number": number}, {"it": torch.full((50,), float(version))})
            each.add(pieces.files)
        each.commit(version, 7, JobSpec.from_json(json.dumps(raw)))


def small_version(dirname: Path) -> int:
    """The version of a checkpoint, every piece of which is there and of that version."""
    checkpoint = Checkpoint.open(str(dirname))
    found = [tensors[0][0].item() for _, tensors in checkpoint.pieces("dense")]
    assert found == [checkpoint.manifest.version] * 3
    return checkpoint.manifest.version


@pytest.mark.pairs(1)
@pytest.mark.parametrize("existing", ["nothing", "an empty directory", "a checkpoint"])
def test_a_failure_at_any_point_leaves_a_whole_checkpoint_or_none(
    existing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(place: Path) -> Path:
        place.mkdir()
        target = place / "ckpt"
        if existing == "an empty directory":
            target.mkdir()
        elif existing == "a checkpoint":
            write_small(target, 1)
        return target

    disk = Disk(monkeypatch)
    target = prepare(tmp_path / "good")
    disk.done = 0
    write_small(target, 2)
    assert small_version(target) == 2
    operations, outcomes = disk.done, []
    assert operations >= 7, "three pieces, a manifest, a rename, two directories"
    for fails_at in range(operations):
        target = prepare(tmp_path / f"fails-at-{fails_at}")
        disk.done, disk.fails_at = 0, fails_at
        with pytest.raises(CheckpointError, match=f"could not be written; .*{os.strerror(errno.ENOSPC)}"):
            write_small(target, 2)
        disk.fails_at = None
        assert os.listdir(target.parent) == (["ckpt"] if target.exists() else [])
        is_there = (target / "manifest.json").exists()
        outcomes.append(small_version(target) if is_there else 0)
        if outcomes[-1] != 2:
            left = len(os.listdir(target)) if target.exists() else 0
            assert left == (2 if existing == "a checkpoint" else 0), "what was written is gone again"
        write_small(target, 3)
        assert small_version(target) == 3
        assert len(os.listdir(target)) == 2
    before = 1 if existing == "a checkpoint" else 0
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert set(outcomes) == {before, 2}, "it failed before the new one was there, and after"


def test_what_killed_writers_left_of_other_steps_is_removed(tmp_path: Path) -> None:
    """Those of a series only, and not of a writer that lives."""
    for dead in (".step-00000008.f949cd5e", ".step-123456789.01234567", ".notes.f949cd5e"):
        (tmp_path / dead / "fleet-pieces-f949cd5e").mkdir(parents=True)
        (tmp_path / dead / "fleet-pieces-f949cd5e" / places.MARK).touch()
    with CheckpointWriter(str(tmp_path / "step-00000009")):
        write_small(tmp_path / "step-00000010", 10)
        names = sorted(os.listdir(tmp_path))
        assert [name.rpartition(".")[0] for name in names] == [".notes", ".step-00000009", ""]
        write_small(tmp_path / "other", 1)
        assert sorted(os.listdir(tmp_path)) == [*names[:2], "other", names[2]]


def test_waiting_workers_hear_of_the_writers_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, fails, create = 3, [True], Directory.create
    all_claimed = when_claimed(monkeypatch, workers)

    def full(place: Directory, name: str, pieces: Any) -> None:
        if fails and name.endswith(".safetensors"):
            assert all_claimed.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        create(place, name, pieces)

    monkeypatch.setattr(Directory, "create", full)

    def body(fleet_: Fleet, worker: int) -> BaseException:
        model, optimizer = join(fleet_, sgd)
        optimizer.minimize(model.loss(0))
        with pytest.raises((OSError, FleetError)) as caught:
            fleet_.save_persistables(str(tmp_path / "ckpt"))
        optimizer.minimize(model.loss(1))  # so that everybody has failed before anybody tries again
        fails.clear()
        fleet_.save_persistables(str(tmp_path / "ckpt"))
        return caught.value

    told = run_job(body, workers, 2)
    writers = [worker for worker in range(workers) if isinstance(told[worker], CheckpointError)]
    assert len(writers) == 1
    for worker in set(range(workers)) - set(writers):
        assert f"worker {writers[0]} failed in save_persistables" in str(told[worker])
        assert os.strerror(errno.ENOSPC) in str(told[worker])
    assert content(tmp_path / "ckpt")["version"] == 2
    assert os.listdir(tmp_path) == ["ckpt"]


# ---------------------------------------------------------------------------------------------- resuming


#: (workers, servers, settings) before and after.
MOVES: dict[str, tuple[tuple[int, int, dict[str, Any]], tuple[int, int, dict[str, Any]]]] = {
    "the same": ((2, 2, {}), (2, 2, {})),
    "2x2 to 1x3": ((2, 2, {"min_block_size": 8}), (1, 3, {"min_block_size": 8})),
    "1x3 to 2x1": ((1, 3, {"min_block_size": 4}), (2, 1, {"slice_var_up": False})),
    "slices to none": ((1, 2, {"min_block_size": 4}), (2, 3, {"slice_var_up": False})),
    "none to slices": ((1, 2, {"slice_var_up": False}), (2, 3, {"min_block_size": 1})),
    "another dispatcher": (
        (1, 3, {"min_block_size": 8, "split_method": RoundRobin}),
        (1, 3, {"min_block_size": 8, "split_method": HashName}),
    ),
}


def train(
    make: Make, workers: int, servers: int, settings: dict[str, Any], steps: range, **options: Any
) -> list[list[torch.Tensor]]:
    """Every worker's view at the end; the checkpoint asked for is written in the middle of the job's last step."""
    save_to: Path | None = options.pop("save_to", None)

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(fleet_, make, config(**settings))
        assert fleet_.resume_step() == steps.start
        for step in steps:
            optimizer.minimize(model.loss(step))
        if save_to is not None:
            fleet_.save_persistables(str(save_to))
        return model.state()

    return run_job(body, workers, servers, **options)


@pytest.fixture(scope="module")
def straight() -> Callable[[str], list[torch.Tensor]]:
    """What a job that never stops has learnt after ten steps, once for each optimizer."""
    known: dict[str, list[torch.Tensor]] = {}

    def look(name: str) -> list[torch.Tensor]:
        if name not in known:
            torch.manual_seed(4)
            known[name] = train(MAKES[name], 1, 1, {}, range(10))[0]
        return known[name]

    return look


@pytest.mark.pairs(2)
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("move", MOVES)
def test_going_on_equals_never_stopping(
    move: str, name: str, tmp_path: Path, straight: Callable[[str], list[torch.Tensor]]
) -> None:
    """Another seed is set before going on: the checkpoint's has to count, for rows that appear only then."""
    expected = straight(name)
    before, after = MOVES[move]
    torch.manual_seed(4)
    train(MAKES[name], *before, range(5), save_to=tmp_path / "ckpt")
    torch.manual_seed(5)
    for got in train(MAKES[name], *after, range(5, 10), model_dir=str(tmp_path / "ckpt")):
        assert_close(got, expected)


def test_going_on_twice_and_alone(tmp_path: Path, straight: Callable[[str], list[torch.Tensor]]) -> None:
    """From a cluster to a laptop and back, and the table's step goes on counting."""
    expected = straight("adam")
    torch.manual_seed(4)
    train(MAKES["adam"], 2, 2, {"min_block_size": 4}, range(3), save_to=tmp_path / "a")
    alone = Fleet(environ={})
    alone.init()
    model = Net()
    optimizer = alone.distributed_optimizer(MAKES["adam"](model.parameters()), model=model)
    alone.init_server(str(tmp_path / "a"))
    alone.init_worker()
    assert alone.resume_step() == 3
    for step in range(3, 6):
        optimizer.minimize(model.loss(step))
    alone.save_persistables(str(tmp_path / "b"))
    alone.stop_worker()
    (got,) = train(MAKES["adam"], 1, 3, {}, range(6, 10), model_dir=str(tmp_path / "b"), save_to=tmp_path / "c")
    assert_close(got, expected)
    found = content(tmp_path / "c")
    assert (found["version"], found["own.weight/step"], found["open.weight/step"]) == (10, 10, 10)


class Telling(LoopbackNetwork):
    """Says when worker 1's first hello has been received."""

    def __init__(self) -> None:
        super().__init__()
        self.worker_1_came = threading.Event()

    def connect(self, endpoint: Endpoint) -> Any:
        channel = super().connect(endpoint)
        start = channel.start

        def telling(request: Any, timeout_s: float | None = None, **how: bool) -> Any:
            call = start(request, timeout_s, **how)
            if request.message.WhichOneof("kind") == "hello" and request.message.worker == 1:
                self.worker_1_came.set()
            return call

        channel.start = telling
        return channel


def test_worker_1_may_come_first(tmp_path: Path) -> None:
    """It must not be told of a fresh job because worker 0 was not there yet."""
    made(tmp_path / "ckpt")
    network = Telling()

    def body(fleet_: Fleet, worker: int) -> int:
        if worker == 0:
            assert network.worker_1_came.wait(30)
        model, optimizer = join(fleet_, sgd)
        start = fleet_.resume_step()
        optimizer.minimize(model.loss(start))
        return start

    assert run_job(body, 2, 2, model_dir=str(tmp_path / "ckpt"), network=network) == [2, 2]


def test_rows_that_no_step_has_touched_start_as_they_would_have(tmp_path: Path) -> None:
    """A server none of whose rows was touched has no optimizer state to save; loading must not invent another."""
    ids = torch.arange(ROWS)
    owners = torch.from_numpy(owner(ids.numpy(), 2))

    def train(steps: list[torch.Tensor], servers: int, **options: Any) -> torch.Tensor:
        def body(fleet_: Fleet, worker: int) -> torch.Tensor:
            table = torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=WEIGHTS["own"].clone())
            adagrad = torch.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.5)
            optimizer = fleet_.distributed_optimizer(adagrad, model=table)
            fleet_.init_worker()
            for touched in steps:
                optimizer.minimize(table(touched).pow(2).sum())
            fleet_.save_persistables(str(tmp_path / f"after-{len(steps)}"))
            return table(ids).detach()

        return run_job(body, 1, servers, **options)[0]

    for first in (0, 1):
        steps = [ids[owners == first], ids]
        expected = train(steps, 1)
        train(steps[:1], 2)
        got = train(steps[1:], 1, model_dir=str(tmp_path / "after-1"))
        assert_close([got], [expected])


def test_a_checkpoint_taken_before_the_first_step_and_one_of_a_job_without_tables(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.full((3,), float(fleet_.worker_num())))
        optimizer = fleet_.distributed_optimizer(torch.optim.Adagrad([weight], initial_accumulator_value=0.5))
        fleet_.init_worker()
        fleet_.save_persistables(str(tmp_path / f"of-{fleet_.worker_num()}"))
        optimizer.minimize(weight.sum())
        return [weight.detach()]

    first = run_job(body, 2, 1)
    assert content(tmp_path / "of-2")["version"] == 0
    assert run_job(body, 1, 2, model_dir=str(tmp_path / "of-2"))[0][0].equal(first[0][0]), "the checkpoint's 2, not 1"


OTHER_OPTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "amsgrad": (torch.optim.Adam, {}, {"amsgrad": True}),
    "no amsgrad any more": (torch.optim.AdamW, {"amsgrad": True}, {}),
    "momentum, centered": (torch.optim.RMSprop, {}, {"momentum": 0.9, "centered": True}),
    "momentum": (torch.optim.SGD, {}, {"momentum": 0.9}),
}


@pytest.mark.parametrize("kind", [None, "all_reduce", "geo", "rows"])
@pytest.mark.parametrize(("make", "before", "after"), OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_going_on_under_other_options(
    make: Any, before: dict[str, Any], after: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    """What they need, and the state that was saved has not, begins as it does in torch."""

    def steps(optimizer: Any, weight: Callable[[], torch.Tensor]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            (weight() * torch.tensor([1.0, -2.0, 0.5]) * (step - 1.2)).sum().backward()
            optimizer.step()

    def body(fleet_: Fleet, worker: int) -> list[torch.Tensor]:
        table = torch.nn.Embedding.from_pretrained(torch.ones(1, 3), freeze=False, sparse=kind == "rows")
        mode = {
            None: None,
            "all_reduce": StrategyFactory.create_sync_strategy(dense="all_reduce"),
            "geo": StrategyFactory.create_geo_strategy(update_frequency=1),
            "rows": None,
        }[kind]
        optimizer = fleet_.distributed_optimizer(make(table.parameters(), lr=0.1, **options), mode, model=table)
        fleet_.init_worker()
        steps(optimizer, lambda: table(torch.tensor([0])))
        fleet_.save_persistables(str(tmp_path / "at"))
        return [table(torch.tensor([0])).detach().clone()[0]]

    options = before
    run_job(body, 1, 1)
    options = after
    (got,) = run_job(body, 1, 1, model_dir=str(tmp_path / "at"))
    weight = torch.nn.Parameter(torch.ones(3))
    plain = make([weight], lr=0.1, **before)
    steps(plain, lambda: weight)
    state, other = plain.state[weight], make([weight], lr=0.1, **after)
    fresh = {name: torch.zeros(3) for name in ("max_exp_avg_sq", "grad_avg", "momentum_buffer") if make in _ADAPTIVE}
    other.state[weight] = {**fresh, **state}
    steps(other, lambda: weight)
    assert_close(got, [weight])


def test_the_same_options_keep_more_for_optimizers_and_for_checkpoints() -> None:
    kept = {(option, state) for rule in RULES.values() for option, state in rule.kept_from_the_first.items()}
    assert {(option, state) for _, option, state in entries._OPTIONAL} == kept


_ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)


# ---------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a good checkpoint."""
    torch.manual_seed(4)
    return files(made(tmp_path_factory.mktemp("sound") / "ckpt", MAKES["adam"]))


@pytest.fixture
def broken(sound: dict[str, bytes], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    for name, data in sound.items():
        path = tmp_path / "ckpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "ckpt"


def shard_for(dirname: Path, change: Callable[[dict[str, Any]], None] = lambda raw: None) -> Shard:
    """An empty server for the job a checkpoint is of, or for one that is a little different."""
    raw = json.loads((dirname / "manifest.json").read_text())["spec"]
    raw["settings"]["server_num"] = 1
    change(raw)
    spec = JobSpec.from_json(json.dumps(raw))
    options = json.dumps(dict(torch.optim.Adam([torch.zeros(1)]).defaults))
    return Shard(make_plan(spec), 0, 0, [options] * len(spec.groups))


def load(dirname: Path, shard: Shard | None = None) -> Shard:
    shard = shard or shard_for(dirname)
    restore = restore_from(str(dirname))
    assert restore.version == 2
    restore.fill(shard, 0)
    return shard


def pieces_of(dirname: Path) -> list[Path]:
    return sorted(dirname.glob("*/*.safetensors"))


def rewrite(dirname: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as somebody would who knows how."""
    raw = json.loads((dirname / "manifest.json").read_text())
    del raw["crc32"]
    change(raw)
    raw["crc32"] = zlib.crc32(json.dumps(raw, sort_keys=True).encode())
    (dirname / "manifest.json").write_text(json.dumps(raw))


def test_values_that_were_replaced_are_let_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be as large as all others together: nobody waits for a collection of garbage."""
    made: list[weakref.ref[Shard]] = []

    def remembered(shard: Shard, *arguments: Any) -> None:
        begin(shard, *arguments)
        made.append(weakref.ref(shard))

    begin = Shard.__init__
    monkeypatch.setattr(Shard, "__init__", remembered)

    def body(fleet_: Fleet, worker: int) -> int:
        model, optimizer = small_job.join(fleet_)
        small_job.train(model, optimizer, range(2))
        fleet_.save_persistables(tmp_path / "ckpt")
        fleet_.load_persistables(tmp_path / "ckpt")
        small_job.train(model, optimizer, range(2, 4))
        until(lambda: len([shard for shard in made if shard() is not None]) == 1)
        return len(made)

    gc.collect()
    gc.disable()
    try:
        assert run_job(body, 1, 1) == [2]
    finally:
        gc.enable()


def test_a_sound_one_is_loaded(broken: Path) -> None:
    """What the tests of damage below start from; a changed manifest with a right checksum is no damage by itself."""
    rewrite(broken, lambda raw: None)
    shard = load(broken)
    assert [(table.spec.name, table.step, len(table) > 0) for table in shard.tables] == [
        ("own.weight", 2, True),
        ("open.weight", 2, True),
    ]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "missing": (lambda data: None, "missing"),
    "empty": (lambda data: b"", "damaged"),
    "truncated": (lambda data: data[:-1], "damaged"),
    "too long": (lambda data: data + b"\0", "damaged"),
    "first byte": (lambda data: bytes([data[0] ^ 1]) + data[1:], "damaged"),
    "last byte": (lambda data: data[:-1] + bytes([data[-1] ^ 128]), "damaged"),
}


@pytest.mark.parametrize("which", [0, -1], ids=["first piece", "last piece"])
@pytest.mark.parametrize(("damage", "word"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_pieces(damage: Callable[[bytes], bytes | None], word: str, which: int, broken: Path) -> None:
    path = pieces_of(broken)[which]
    data = damage(path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=word) as caught:
        load(broken)
    assert str(path) in str(caught.value)


def test_pieces_that_are_no_safetensors(broken: Path) -> None:
    path = pieces_of(broken)[0]
    path.write_bytes(b"\x80\x04N.")  # a pickle, even with the right checksum

    def announce(raw: dict[str, Any]) -> None:
        for piece in raw["pieces"]:
            if path.name == Path(piece["file"]).name:
                piece.update(bytes=4, crc32=zlib.crc32(b"\x80\x04N."))

    rewrite(broken, announce)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load(broken)
    assert str(path) in str(caught.value)


def test_an_altered_byte_anywhere_in_a_manifest_is_noticed(sound: dict[str, bytes], broken: Path) -> None:
    """A digit of an offset or of the seed would otherwise pass for good."""
    good, path = sound["manifest.json"], broken / "manifest.json"
    for at in range(0, len(good), 23):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(str(broken))
        assert str(path) in str(caught.value)


MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"not json",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "an empty object": b"{}",
    "a deep one": b"[" * 100_000,
    "cut off": b'{"format": "fleet-checkpoint", "format_version": 2, "pie',
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_is_garbage(data: bytes, broken: Path) -> None:
    (broken / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="manifest") as caught:
        restore_from(str(broken))
    assert str(broken / "manifest.json") in str(caught.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an older version": ({"format_version": 1}, "expected fleet-checkpoint 2; got fleet-checkpoint 1"),
    "a newer version": ({"format_version": 3}, "expected fleet-checkpoint 2; got fleet-checkpoint 3"),
    "another format": ({"format": "somebody-elses"}, "got somebody-elses 2"),
    "no spec": ({"spec": None}, "cannot be read"),
    "an impossible spec": ({"spec": {"params": 1}}, "cannot be read"),
    "pieces of another kind": ({"pieces": [1]}, "cannot be read"),
    "pieces without their size": ({"pieces": [{"file": "x"}]}, "cannot be read"),
    "pieces that say nothing": ({"pieces": [{"file": "x", "bytes": 1, "crc32": 1, "about": 3}]}, "cannot be read"),
    "a version that is none": ({"version": "many"}, "the manifest says what cannot be"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_manifest_that_is_wrong(change: dict[str, Any], message: str, broken: Path) -> None:
    rewrite(broken, lambda raw: raw.update(change))
    with pytest.raises(CheckpointError) as caught:
        restore_from(str(broken))
    assert message in str(caught.value)
    assert str(broken / "manifest.json") in str(caught.value)


def _piece_of(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    return next(piece for piece in raw["pieces"] if kind in piece["about"])


#: Where a manifest has a number, a text or names, by what it is of.
FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(("version", "seed", "id"), lambda raw: raw),
    **dict.fromkeys(("file", "bytes", "crc32", "tensors"), lambda raw: raw["pieces"][-1]),
    **dict.fromkeys(("step", "rows", "columns", "table"), lambda raw: _piece_of("table", raw)["about"]),
    **dict.fromkeys(("param", "offset", "numel", "key"), lambda raw: _piece_of("dense", raw)["about"]["dense"][0]),
}
IMPOSSIBLE = [-1, -5, 1 << 70, 1.5, float("nan"), True, None, "", [], [1], {}]


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_that_says_what_cannot_be(field: str, broken: Path) -> None:
    """Whoever wrote it knew how: its checksum is right."""
    good = (broken / "manifest.json").read_text()
    present = FIELDS[field](json.loads(good))[field]
    for value in IMPOSSIBLE:
        if type(value) is type(present) and value in ("", []) and field in ("columns", "tensors"):
            continue  # a list without names is one
        rewrite(broken, lambda raw, value=value: FIELDS[field](raw).update({field: value}))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(str(broken))
        assert str(broken / "manifest.json") in str(caught.value), value
        (broken / "manifest.json").write_text(good)
    Checkpoint.open(str(broken))


def without_tables(raw: dict[str, Any]) -> None:
    raw["pieces"] = [piece for piece in raw["pieces"] if "table" not in piece["about"]]


def test_a_checkpoint_without_a_table_is_none(broken: Path) -> None:
    rewrite(broken, without_tables)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks a table; at .*; got none of '"):
        Checkpoint.open(str(broken))


@pytest.mark.parametrize("change", ["version", "table"])
def test_a_running_job_is_left_alone_by_a_checkpoint_that_cannot_be(change: str, tmp_path: Path) -> None:
    def body(made: Fleet, index: int) -> None:
        table, line = fleet.nn.Embedding(None, 2, initializer="zeros"), torch.nn.Linear(2, 1)
        model = torch.nn.ModuleDict({"table": table, "line": line})
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        made.init_worker()
        # A table without rows is one.
        made.save_persistables(dirname=str(tmp_path / "whole"))
        made.load_persistables(dirname=str(tmp_path / "whole"))
        shutil.copytree(tmp_path / "whole", tmp_path / "none")
        rewrite(tmp_path / "none", without_tables if change == "table" else lambda raw: raw.update(version=-5))
        wrapped.minimize(line(table(torch.tensor([1]))).sum())
        before = made.state_dict(model)
        with pytest.raises(CheckpointError):
            made.load_persistables(dirname=str(tmp_path / "none"))
        after = made.state_dict(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert made.resume_step() == 1
        wrapped.minimize(line(table(torch.tensor([1]))).sum())
        assert made.resume_step() == 2

    run_job(body, 1, 2)


@pytest.mark.parametrize("file", ["../secret", "a/../../secret", "{absolute}", "a\0b"])
def test_a_manifest_does_not_reach_out_of_its_directory(file: str, broken: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(pieces_of(broken)[0].read_bytes())
    target = file.replace("{absolute}", str(secret))
    rewrite(broken, lambda raw: raw["pieces"][0].update(file=target))
    with pytest.raises(CheckpointError, match="out of its directory") as caught:
        load(broken, shard_for(broken))
    assert str(broken) in str(caught.value)


@pytest.mark.parametrize("place", ["nowhere", "a file", "empty"])
def test_a_place_without_a_checkpoint(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    if place == "a file":
        path.write_text("mine")
    elif place == "empty":
        path.mkdir()
    fleet_ = Fleet(environ={})
    fleet_.init()
    with pytest.raises(CheckpointError, match="no checkpoint here") as caught:
        fleet_.init_server(str(path))
    assert str(path) in str(caught.value)


def test_a_model_that_no_longer_fits(broken: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        params = {param["name"]: param for param in raw["params"]}
        tables = {table["name"]: table for table in raw["tables"]}
        params["matrix"]["shape"] = [7, DIM]
        params["bias"]["dtype"] = "float64"
        params["scale"]["name"] = "gain"
        tables["own.weight"]["dim"] = 8
        raw["tables"].remove(tables["open.weight"])

    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load(broken, shard_for(broken, change))
    text = str(caught.value)
    assert str(broken) in text
    for problem in (
        "'matrix': float32 (6, 4), Adam in the checkpoint, float32 (7, 4), Adam in the job",
        "'bias': float32 (6,), Adam in the checkpoint, float64 (6,), Adam in the job",
        "'scale': float32 (), Adam in the checkpoint, absent in the job",
        "'gain': absent in the checkpoint, float32 (), Adam in the job",
        "'own.weight': table of float32 x 4, Adam in the checkpoint, table of float32 x 8, Adam in the job",
        "'open.weight': table of float32 x 4, Adam in the checkpoint, absent in the job",
    ):
        assert problem in text
    assert "'idle'" not in text, "what fits is not mentioned"


def test_another_optimizer_does_not_fit(broken: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'matrix': float32 \(6, 4\), Adam in the checkpoint, .* Adagrad in the job"
    ):
        load(broken, shard_for(broken, lambda raw: raw["groups"][0].update(rule="Adagrad")))


def test_a_vocabulary_that_shrank_does_not_fit_and_one_that_grew_does(broken: Path) -> None:
    def resize(rows: int) -> Callable[[dict[str, Any]], None]:
        return lambda raw: next(t for t in raw["tables"] if t["name"] == "own.weight").update(num_embeddings=rows)

    load(broken, shard_for(broken, resize(ROWS + 1)))
    with pytest.raises(CheckpointError, match=r"'own\.weight'.*id < 5") as caught:
        load(broken, shard_for(broken, resize(5)))
    assert str(broken) in str(caught.value)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a block is missing": lambda dense: dense["dense"].pop(0),
    "a block is elsewhere": lambda dense: dense["dense"][0].update(offset=10**6),
    "a block without a name": lambda dense: dense["dense"][0].pop("param"),
    "more blocks than tensors": lambda dense: dense["dense"].append(dense["dense"][0]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_contents_that_contradict_the_manifest(lie: Callable[[dict[str, Any]], Any], broken: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        lie(next(piece["about"] for piece in raw["pieces"] if piece["about"].get("dense")))

    shard = shard_for(broken)
    rewrite(broken, change)
    with pytest.raises(CheckpointError) as caught:
        load(broken, shard)
    assert str(broken) in str(caught.value)


def test_a_server_with_a_bad_checkpoint_ends_the_job_with_that_reason(broken: Path) -> None:
    """At every worker, and at once: the deadlines are far away."""
    path = pieces_of(broken)[0]
    path.write_bytes(path.read_bytes()[:-1])

    def body(fleet_: Fleet, worker: int) -> None:
        join(fleet_, MAKES["adam"])

    patient = {**PATIENT, "FLEET_STARTUP_DEADLINE_S": "600", "FLAGS_rpc_deadline": "600000"}
    job = Job(body, 2, 1, model_dir=str(broken), environ=patient)
    job.join(job.start(), 30)
    assert sorted(job.errors) == ["server 0", "worker 0", "worker 1"]
    for error in job.errors.values():
        assert isinstance(error, JobAbortedError)
        assert "damaged" in str(error)
        assert str(path) in str(error)
