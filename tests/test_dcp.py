"""Checkpoints that ``torch.distributed.checkpoint`` (DCP) loads, and those it wrote: the same numbers both ways."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint_cli
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from harness import assert_same, run_job
from test_checkpoint_cli import Run
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import fleet.nn
from fleet import Fleet
from fleet.checkpoint.comparison import compare
from fleet.checkpoint.dcp import FleetStorageReader, export_to_dcp
from fleet.checkpoint.manifest import Checkpoint
from fleet.errors import FleetError

run = test_checkpoint_cli.run  # the fixture


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.open = fleet.nn.Embedding(None, 4, initializer="uniform(0, 1)")
        self.closed = fleet.nn.Embedding(10, 4, initializer="normal(0, 1)")

    def loss(self, ids: list[int]) -> torch.Tensor:
        looked_up = torch.tensor(ids)
        return self.dense(self.open(looked_up) + self.closed(looked_up.abs() % 10)).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``full`` after two steps, ``delta`` after a third; beside them what the job said of its model then."""
    root = tmp_path_factory.mktemp("checkpoints")

    def body(job: Fleet, worker: int) -> None:
        torch.manual_seed(1)
        model = Net()
        optimizer = job.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model.loss([5, -7]))
        optimizer.minimize(model.loss([5, 2**40]))
        job.save_persistables(root / "full")
        optimizer.minimize(model.loss([5, 3]))
        job.save_persistables(root / "delta", mode="delta")
        torch.save(job.state_dict(model), root / "told")

    run_job(body, 1, 2)
    return root


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def told(saved: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(saved / "told", weights_only=True)
    return found


def same_checkpoint(left: Path, right: Path) -> bool:
    return all(finding.same for _, finding in compare(Checkpoint.open(left), Checkpoint.open(right)))


# ---------------------------------------------------------------------------------------------- reading


def test_dcp_loads_a_checkpoint_as_the_job_s_state_dict(saved: Path, told: dict[str, torch.Tensor]) -> None:
    state = {name: torch.full_like(value, 7) for name, value in told.items()}
    dcp.load(state, storage_reader=FleetStorageReader(saved / "delta"), no_dist=True)
    assert_same(state, told)


def test_shapes_and_types_are_known_before_anything_is_loaded(saved: Path) -> None:
    known = FleetStorageReader(saved / "delta").read_metadata().state_dict_metadata
    assert {name: (tuple(each.size), each.properties.dtype) for name, each in known.items() if "state" not in name} == {
        "dense.weight": ((3, 4), torch.float32),
        "dense.bias": ((3,), torch.float32),
        "open.ids": ((4,), torch.int64),
        "open.weight": ((4, 4), torch.float32),
        "closed.weight": ((10, 4), torch.float32),
    }
    assert known["closed.weight.state.exp_avg"].size == (10, 4)
    assert known["dense.weight.state.step"].size == ()


def test_only_what_is_asked_for_is_read(saved: Path, tmp_path: Path, told: dict[str, torch.Tensor]) -> None:
    shutil.copytree(saved / "full", tmp_path / "ckpt")
    for piece in Checkpoint.open(tmp_path / "ckpt").manifest.pieces:
        if piece.about.get("table") == "closed.weight" and piece.about["rows"]:
            path = tmp_path / "ckpt" / piece.file
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    state = {"dense.bias": torch.zeros(3), "open.weight": torch.zeros(3, 4)}
    dcp.load(state, storage_reader=FleetStorageReader(tmp_path / "ckpt"), no_dist=True)
    with pytest.raises(CheckpointException, match="damaged"):
        dcp.load(
            {"closed.weight": torch.zeros(10, 4)},
            storage_reader=FleetStorageReader(tmp_path / "ckpt"),
            no_dist=True,
        )


def test_values_are_converted_to_the_type_that_is_asked_for(saved: Path, told: dict[str, torch.Tensor]) -> None:
    state = {"closed.weight": torch.zeros(10, 4, dtype=torch.float64)}
    dcp.load(state, storage_reader=FleetStorageReader(saved / "delta"), no_dist=True)
    assert torch.equal(state["closed.weight"], told["closed.weight"].double())


def load_a_shard(rank: int, meeting: str, where: str, out: str) -> None:
    """What each of two ranks does: it loads its shards, by rows and by columns, and keeps the whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, zeros

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        "dense.weight": zeros((3, 4), device_mesh=mesh, placements=[Shard(0)]),
        "closed.weight": zeros((10, 4), device_mesh=mesh, placements=[Shard(0)]),
        "open.weight": zeros((4, 4), device_mesh=mesh, placements=[Shard(1)]),
        "open.ids": torch.zeros(4, dtype=torch.int64),
        "dense.bias": torch.zeros(3),
    }
    dcp.load(state, storage_reader=FleetStorageReader(where))
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    torch.save(whole, f"{out}-{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_load_their_shards(saved: Path, tmp_path: Path, told: dict[str, torch.Tensor]) -> None:
    out = str(tmp_path / "whole")
    torch.multiprocessing.spawn(
        load_a_shard, (str(tmp_path / "meeting"), str(saved / "delta"), out), nprocs=2, daemon=True
    )
    for rank in range(2):
        assert_same(torch.load(f"{out}-{rank}", weights_only=True), told)


# ---------------------------------------------------------------------------------------------- export and back


def test_an_export_is_what_dcp_itself_loads(
    run: Run, saved: Path, tmp_path: Path, told: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.checkpoint.dcp.PIECE_BYTES", 3 * 16)  # several chunks of each table
    code, out, _ = run("export", saved / "delta", tmp_path / "dcp", "--format", "dcp")
    assert (code, out.split("  ")[0]) == (0, str(tmp_path / "dcp"))
    state = {name: torch.full_like(value, 7) for name, value in told.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_same(state, told)
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    assert metadata.state_dict_metadata.keys() == told.keys(), "the state only where it is asked for"
    assert len(metadata.state_dict_metadata["closed.weight"].chunks) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_there_and_back_is_the_same_checkpoint(run: Run, saved: Path, tmp_path: Path, kind: str) -> None:
    assert run("export", saved / kind, tmp_path / "dcp", "--format", "dcp", "--state")[0] == 0
    code, _, err = run("import", tmp_path / "dcp", tmp_path / "ckpt", "--format", "dcp")
    assert code == 0, err
    assert same_checkpoint(saved / kind, tmp_path / "ckpt")
    assert run("verify", tmp_path / "ckpt")[0] == 0
    left, right = (Checkpoint.open(where).manifest for where in (saved / kind, tmp_path / "ckpt"))
    assert (left.spec, left.version, left.seed) == (right.spec, right.version, right.seed)


def test_an_import_of_others_is_what_a_job_begins_with(run: Run, tmp_path: Path, told: dict[str, torch.Tensor]) -> None:
    """What another program saved: a model under a name, a number, and a step."""
    dcp.save({"model": told, "epoch": 3, "count": torch.tensor(5)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    options = ("--format", "dcp", "--prefix", "model.", "--table", "closed", "--optimizer", "SGD")
    code, out, err = run("import", tmp_path / "dcp", tmp_path / "ckpt", *options)
    assert code == 0, err
    assert "left out: count, epoch" in out

    def body(job: Fleet, worker: int) -> dict[str, torch.Tensor]:
        model = Net()
        job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        return job.state_dict(model)

    (found,) = run_job(body, 1, 2, model_dir=str(tmp_path / "ckpt"))
    assert_same(found, told)


# ---------------------------------------------------------------------------------------------- what is refused


def test_what_is_there_is_not_overwritten(run: Run, saved: Path, tmp_path: Path) -> None:
    export = ("export", saved / "full", tmp_path / "dcp", "--format", "dcp")
    assert run(*export)[0] == 0
    assert run(*export)[0] == 2
    assert run(*export, "--force")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    code, _, err = run("export", saved / "full", tmp_path / "mine", "--format", "dcp", "--force")
    assert (code, "will not overwrite what is there" in err) == (2, True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_failed_export_leaves_what_was(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_to_dcp(Checkpoint.open(saved / "full"), str(tmp_path / "dcp"), state=False, force=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()}

    def fail(*args: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", fail)
    with pytest.raises(FleetError, match="no room"):
        export_to_dcp(Checkpoint.open(saved / "full"), str(tmp_path / "dcp"), state=False, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "does not say which optimizer the job has"),
        (("--optimizer", "SGD", "--table", "user"), "there is no table user.weight"),
        (("--optimizer", "SGD", "--table", "bias"), "bias cannot be a table"),
        (("--optimizer", "SGD", "--prefix", "ema."), "nothing in this checkpoint can be a parameter"),
    ],
)
def test_an_import_that_is_refused(run: Run, tmp_path: Path, options: tuple[str, ...], what: str) -> None:
    dcp.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    code, _, err = run("import", tmp_path / "dcp", tmp_path / "ckpt", "--format", "dcp", *options)
    assert (code, what in err) == (2, True), err
    assert not (tmp_path / "ckpt").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['EVIL_MARK']}",)


def test_metadata_that_name_anything_else_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "mark"))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=Evil())))
    code, _, err = run("import", tmp_path / "dcp", tmp_path / "ckpt", "--format", "dcp", "--optimizer", "SGD")
    assert (code, "which metadata have no use for" in err) == (2, True), err
    assert not (tmp_path / "mark").exists()


def larger(metadata: Metadata) -> None:
    told: Any = metadata.state_dict_metadata["weight"]
    told.size = told.chunks[0].sizes = torch.Size([1 << 40])


def elsewhere(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def lacking(metadata: Metadata) -> None:
    told: Any = metadata.state_dict_metadata["weight"]
    told.size = torch.Size([4])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (larger, "is larger than what was written"),
        (elsewhere, "no file of this directory"),
        (lacking, "lacks elements"),
    ],
)
def test_metadata_that_cannot_be_are_refused_before_memory_is_taken(
    run: Run, tmp_path: Path, change: Callable[[Metadata], None], what: str
) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    code, _, err = run("import", tmp_path / "dcp", tmp_path / "ckpt", "--format", "dcp", "--optimizer", "SGD")
    assert (code, what in err) == (2, True), err
