"""``fleet checkpoint``: what operators see of checkpoints that jobs have written."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from harness import run_job
from prepared import Prepared
from test_processes import ended

import fleet.nn
from fleet import Fleet
from fleet.checkpoint import inspection, plain_files
from fleet.checkpoint.inspection import Rows, scratch
from fleet.checkpoint.manifest import DENSE, Checkpoint
from fleet.checkpoint.plain_files import _SafetensorsFile
from fleet.checkpoint.writer import CheckpointWriter
from fleet.launch import cli
from fleet.plan.specs import GroupSpec, Initializer, JobSpec, ParamSpec, PlanSettings, TableSpec

Run = Callable[..., tuple[int, str, str]]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.open = fleet.nn.Embedding(None, 4, initializer="uniform(0, 1)")
        self.closed = torch.nn.Embedding(10, 4, sparse=True)

    def loss(self, ids: list[int]) -> torch.Tensor:
        looked_up = torch.tensor(ids)
        return self.dense(self.open(looked_up) + self.closed(looked_up.abs() % 10)).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``full`` after two steps, and ``delta`` after a third; ``whole`` is the same as that; ``grown`` in one directory.
    Beside them, what a job saw that started from each."""
    root = tmp_path_factory.mktemp("checkpoints")

    def body(job: Fleet, worker: int) -> None:
        torch.manual_seed(1)
        model = Net()
        optimizer = job.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model.loss([5, -7]))
        job.save_persistables(root / "grown")
        optimizer.minimize(model.loss([5, 2**40]))
        job.save_persistables(root / "full")
        optimizer.minimize(model.loss([5, 3]))
        job.save_persistables(root / "delta", mode="delta")
        job.save_persistables(root / "whole")
        job.save_persistables(root / "grown", mode="full")
        optimizer.minimize(model.loss([6]))
        job.save_persistables(root / "grown", mode="delta")
        torch.save(
            {"dense": model.dense.state_dict(), "open": model.open(torch.tensor([-7, 3, 5, 6, 2**40])).detach()},
            root / "told",
        )

    run_job(body, 1, 2)
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def of(*argv: object) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *map(str, argv)])
        return code, *capsys.readouterr()

    return of


def listed(run: Run, where: Path) -> dict[str, Any]:
    code, out, _ = run("ls", "--json", where)
    assert code == 0
    told: dict[str, Any] = json.loads(out)
    return told


# ---------------------------------------------------------------------------------------------- ls


def test_ls_tells_what_is_there(run: Run, saved: Path) -> None:
    told = listed(run, saved / "delta")
    assert (told["step"], told["kind"], told["goes_on_from"]) == (3, "delta", [str(saved / "full")])
    assert told["id"] == Checkpoint.open(saved / "delta").manifest.id
    names = [(p["name"], p["shape"], p["dtype"], p["optimizer"], p["state"]) for p in told["parameters"]]
    assert names == [
        ("dense.weight", [3, 4], "float32", "Adagrad", ["step", "sum"]),
        ("dense.bias", [3], "float32", "Adagrad", ["step", "sum"]),
    ]
    tables = {table["name"]: table for table in told["tables"]}
    assert (tables["open.weight"]["rows"], tables["closed.weight"]["rows"]) == (4, 10), "an id counts once"
    assert tables["open.weight"]["bytes"] == 4 * (8 + 2 * 4 * 4)
    assert (tables["open.weight"]["mean"], tables["closed.weight"]["ids"]) == (0.5, "< 10")
    assert tables["open.weight"]["state"] == ["sum"]
    files = [path for name in ("full", "delta") for path in (saved / name).rglob("*.safetensors")]
    assert (told["files"], told["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    whole = listed(run, saved / "whole")
    for kind in ("parameters", "tables"):
        assert [each["norm"] for each in told[kind]] == pytest.approx([each["norm"] for each in whole[kind]], rel=1e-12)


def test_ls_norms_are_those_of_what_was_trained(run: Run, saved: Path) -> None:
    told, expected = listed(run, saved / "grown"), torch.load(saved / "told", weights_only=True)
    assert told["kind"] == "full, with 1 more delta inside"
    assert told["parameters"][0]["norm"] == pytest.approx(float(expected["dense"]["weight"].double().norm()))
    assert told["tables"][0]["norm"] == pytest.approx(float(expected["open"].double().norm()))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``full`` with the rows 1 to 4 and counts of ids without a row; since then 1 and 2 have left, 3 has left and come
    again, and 5 has come and left: in ``delta``, and in ``whole``."""
    root = tmp_path_factory.mktemp("left")

    def body(job: Fleet, worker: int) -> None:
        rules = {"admit": fleet.nn.CountFilter(2), "evict": fleet.nn.Unused(steps=1)}
        model = torch.nn.ModuleDict({"some": fleet.nn.Embedding(None, 4, **rules), "all": fleet.nn.Embedding(None, 4)})
        optimizer = job.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        job.init_worker()

        def trained(*ids: int) -> None:
            for _ in range(2):
                optimizer.minimize(sum(each(torch.tensor(ids)).square().sum() for each in model.values()))
            job.shrink()

        trained(1, 2, 3, 4)
        optimizer.minimize(model["some"](torch.tensor([1, 2, 3, 4, 9])).square().sum())
        job.save_persistables(root / "full")
        trained(4, 5)
        trained(3, 4)
        optimizer.minimize(model["some"](torch.tensor([3, 4, 8])).square().sum())
        job.save_persistables(root / "delta", mode="delta")
        job.save_persistables(root / "whole")

    run_job(body, 1, 2)
    return root


def test_ls_of_a_delta_from_which_rows_have_left(run: Run, left: Path) -> None:
    tables = {
        name: {table["name"]: table for table in listed(run, left / name)["tables"]}
        for name in ("full", "delta", "whole")
    }
    told = {name: tables[name]["some.weight"] for name in tables}
    assert {name: (table["rows"], table["removed"]) for name, table in told.items()} == {
        "full": (4, 0),
        "delta": (2, 2),
        "whole": (2, 0),
    }
    assert told["delta"]["norm"] == pytest.approx(told["whole"]["norm"], rel=1e-12)
    assert tables["delta"]["all.weight"]["removed"] == 0
    lines = run("ls", left / "delta")[1].splitlines()
    (header,) = [line.split() for line in lines if line.startswith("table ")]
    (line,) = [line.split() for line in lines if line.startswith("some.weight ")]
    assert (header[:4], line[:4]) == (["table", "rows", "removed", "dim"], ["some.weight", "2", "2", "4"])
    assert "removed" not in run("ls", left / "whole")[1]


def test_other_commands_with_a_delta_from_which_rows_have_left(run: Run, left: Path, tmp_path: Path) -> None:
    assert run("verify", left / "delta")[0] == 0
    code, out, _ = run("diff", left / "delta", left / "whole")
    assert (code, "the same, bit by bit" in out) == (0, True), out
    code, out, _ = run("diff", left / "full", left / "delta")
    assert (code, "0 rows added, 2 removed, 1 changed" in out) == (1, True), "3 has begun anew, and done the same"
    for name in ("delta", "whole"):
        assert run("export", left / name, tmp_path / f"{name}.safetensors", "--state")[0] == 0
        assert run("export", left / name, tmp_path / f"{name}.dcp", "--format", "dcp", "--state")[0] == 0
    delta, whole = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("delta", "whole"))
    assert delta["some.ids"].tolist() == [3, 4]
    assert delta.keys() == whole.keys()
    assert all(torch.equal(delta[key], whole[key]) for key in whole)
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("export", left / "delta", tmp_path / "some.parquet", "--table", "some.weight")[0] == 0
    assert parquet.read_table(tmp_path / "some.parquet")["id"].to_pylist() == [3, 4]


def test_ls_is_for_people_too(run: Run, saved: Path) -> None:
    code, out, _ = run("ls", saved / "delta")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == str(saved / "delta")
    assert "step 3, delta, saved 2" in lines[1]
    assert f"goes on from {saved / 'full'}" in lines[2]
    (line,) = [line for line in lines if line.startswith("open.weight")]
    assert line.split()[:6] == ["open.weight", "4", "4", "float32", "160", "B"]
    assert line.split()[7:] == ["any", "uniform(0,", "1)", "0.5", "Adagrad", "sum"]


def test_ls_of_a_directory_of_checkpoints(run: Run, saved: Path, tmp_path: Path) -> None:
    code, out, err = run("ls", saved)
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["checkpoint", "step", "kind"],
        *(["delta", "3", "delta"], ["full", "2", "full"], ["grown", "4", "full,"], ["whole", "3", "full"]),
    ]
    shutil.copytree(saved / "delta", tmp_path / "delta")
    shutil.copytree(saved / "whole", tmp_path / "whole")
    code, out, err = run("ls", tmp_path)
    assert code == 2
    assert out.splitlines()[1].startswith("whole")
    assert f"{tmp_path / 'delta'}: there is no checkpoint here; at {tmp_path / 'full'}" in err
    next((tmp_path / "whole").rglob("*.safetensors")).unlink()
    code, out, err = run("ls", tmp_path)
    assert (code, out) == (2, ""), "what lacks a file cannot be gone back to"
    assert f"a piece of the checkpoint is missing; at {tmp_path / 'whole'}" in err


def test_a_checkpoint_of_a_store_is_read_where_it_lies(run: Run, saved: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.put(str(saved / "whole"), "/cli/whole", recursive=True)
    try:
        told = listed(run, "memory://cli/whole")  # type: ignore[arg-type]
        assert (told["saved_at"], told["tables"][0]["rows"]) == (None, 4)
        assert run("verify", "memory://cli/whole")[0] == 0
        assert run("diff", "memory://cli/whole", saved / "delta")[0] == 0
    finally:
        fs.rm("/cli", recursive=True)


# ---------------------------------------------------------------------------------------------- verify


def test_verify_finds_nothing_wrong(run: Run, saved: Path) -> None:
    code, out, _ = run("verify", saved / "delta", saved / "grown")
    assert code == 0
    assert [line.partition(" files whole")[0] for line in out.splitlines()] == [
        f"{saved / name}: ok; {listed(run, saved / name)['files']}" for name in ("delta", "grown")
    ]


def test_verify_tells_everything_that_is_wrong(run: Run, saved: Path, tmp_path: Path) -> None:
    for name in ("full", "delta"):
        shutil.copytree(saved / name, tmp_path / name)
    base = sorted((tmp_path / "full").rglob("*.safetensors"))
    mine = sorted((tmp_path / "delta").rglob("*.safetensors"))
    content = bytearray(base[0].read_bytes())
    content[-1] ^= 1
    base[0].write_bytes(content)
    mine[0].unlink()
    mine[1].write_bytes(mine[1].read_bytes()[:-4])
    code, out, _ = run("verify", tmp_path / "delta", saved / "whole")
    *problems, summary, other = out.splitlines()
    assert code == 1
    assert {line.partition(": ")[0]: line.partition(": ")[2].partition(";")[0] for line in problems} == {
        str(base[0]): "a piece of the checkpoint is damaged",
        str(mine[0]): "a piece of the checkpoint is missing",
        str(mine[1]): "a piece of the checkpoint is damaged",
    }
    assert f": 3 problems; {len(base) + len(mine) - 3} files whole" in summary
    assert other.startswith(f"{saved / 'whole'}: ok")


def test_verify_finds_what_a_delta_goes_on_from_gone(run: Run, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "delta", tmp_path / "delta")
    shutil.copytree(saved / "whole", tmp_path / "full")
    code, out, _ = run("verify", tmp_path / "delta")
    assert code == 1
    assert "a delta goes on from a checkpoint that is not there any more" in out


SPEC = JobSpec(
    (ParamSpec("w", (2, 3), "float32", 0),),
    (TableSpec("t.weight", 2, "float32", 0, 10, Initializer("zeros")),),
    (GroupSpec("SGD", 0, ("lr",)),),
    PlanSettings(1, 1),
)
ENTRY = {"param": "w", "offset": 0, "numel": 6, "key": "value", "elementwise": True}
ROWS = {"table": "t.weight", "step": 1, "rows": 2, "columns": ["weight"]}


def written(where: Path, *pieces: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> Path:
    """A checkpoint of these pieces, whatever they are."""
    with CheckpointWriter(where) as writer:
        with writer.pieces("server-0") as files:
            for about, tensors in pieces:
                files.add(about, tensors)
        writer.add(files.files)
        writer.commit(1, 0, SPEC)
    return where


@pytest.mark.parametrize(
    ("about", "tensors", "words"),
    [
        ({DENSE: []}, {}, "'w' lacks elements of its value, or has them twice"),
        ({DENSE: [{**ENTRY, "numel": 4}]}, {"w": torch.zeros(4)}, "'w' lacks elements of its value, or has them twice"),
        (
            {DENSE: [ENTRY, ENTRY]},
            {"w": torch.zeros(6), "v": torch.zeros(6)},
            "'w' lacks elements of its value, or has them twice",
        ),
        ({DENSE: [ENTRY]}, {"w": torch.zeros(5)}, "value of 'w' from 0 on does not fit"),
        ({DENSE: [ENTRY]}, {"w": torch.zeros(6).double()}, "does not fit a parameter of float32 (2, 3)"),
        ({DENSE: [{**ENTRY, "param": "v"}]}, {"w": torch.zeros(6)}, "'v' is no parameter of the job"),
        ({DENSE: [ENTRY]}, {}, "it names other tensors than it has"),
        (ROWS, {"ids": torch.tensor([1, 1]), "weight": torch.zeros(2, 2)}, "not distinct int64 numbers"),
        (ROWS, {"ids": torch.tensor([1, 10]), "weight": torch.zeros(2, 2)}, "out of range, which ends at 10"),
        (
            ROWS,
            {"ids": torch.tensor([1, 2]), "weight": torch.zeros(2, 3)},
            "weight of 't.weight' is torch.float32 (2, 3)",
        ),
        ({**ROWS, "columns": []}, {"ids": torch.tensor([1])}, "lack their weights, or the step"),
        (
            {**ROWS, "table": "u"},
            {"ids": torch.tensor([1]), "weight": torch.zeros(1, 2)},
            "'u' is no table of the job",
        ),
        ({DENSE: [ENTRY]}, {"w": torch.zeros(6)}, "nothing of the table 't.weight' is there"),
        ({}, {"ids": torch.tensor([1])}, "what it says of itself makes no sense"),
    ],
)
def test_verify_reads_what_pieces_say(
    run: Run, tmp_path: Path, about: dict[str, Any], tensors: dict[str, torch.Tensor], words: str
) -> None:
    """Checksums are right here: whoever wrote it did so on purpose."""
    others = [] if DENSE in about else [({DENSE: [ENTRY]}, {"w": torch.zeros(6)})]
    where = written(tmp_path / "ckpt", (about, tensors), *others)
    code, out, _ = run("verify", where)
    assert (code, words in out) == (1, True), out
    assert run("ls", where)[0] in (0, 2), "no traceback"


# ---------------------------------------------------------------------------------------------- diff


def test_diff_of_the_same(run: Run, saved: Path) -> None:
    """Base and delta against a full one, whose rows come in another order and whose files are others."""
    code, out, _ = run("diff", saved / "delta", saved / "whole")
    assert (code, out.splitlines()[-1]) == (0, "the same, bit by bit")


def test_diff_tells_what_is_different(run: Run, saved: Path, tmp_path: Path) -> None:
    one, other = saved / "full", saved / "delta"
    code, out, _ = run("diff", one, other)
    assert code == 1
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in out.splitlines() if "  " in line}
    left, right = plain(run, one, tmp_path / "a.safetensors"), plain(run, other, tmp_path / "b.safetensors")
    assert lines["step"] == "2 in A, 3 in B"
    apart = (left["dense.weight"] - right["dense.weight"]).double()
    relative = apart.norm() / left["dense.weight"].double().norm()
    assert lines["dense.weight"] == (
        f"largest difference {apart.abs().max():.4g}, norm of the difference {relative:.3g} of A's"
    )
    assert lines["dense.bias step"].startswith("largest difference 1,")
    rows = {key: [dict(zip(s["open.ids"].tolist(), s[key], strict=True)) for s in (left, right)] for key in OPEN}
    most = [float((rows[key][0][5] - rows[key][1][5]).abs().max()) for key in OPEN]
    assert lines["open.weight"] == (
        f"1 rows added, 0 removed, 1 changed; largest differences {most[0]:.4g} (weight), {most[1]:.4g} (sum)"
    )
    assert "0 rows added, 1 removed, 1 changed" in run("diff", other, one)[1]


OPEN = ("open.weight", "open.weight.state.sum")


def plain(run: Run, where: Path, to: Path) -> dict[str, torch.Tensor]:
    assert run("export", where, to, "--state")[0] == 0
    return safetensors.torch.load_file(to)


def test_diff_of_what_cannot_be_compared(run: Run, saved: Path, tmp_path: Path) -> None:
    rows = (ROWS, {"ids": torch.tensor([1]), "weight": torch.zeros(1, 2)})
    here = written(tmp_path / "a", ({DENSE: [ENTRY]}, {"w": torch.zeros(6)}), rows)
    nan = torch.full((6,), torch.nan)
    there = written(tmp_path / "b", ({DENSE: [ENTRY]}, {"w": nan}), rows)
    code, out, _ = run("diff", here, there)
    assert (code, "largest difference nan" in out) == (1, True)
    assert run("diff", there, there)[0] == 0, "the same NaN"
    code, out, _ = run("diff", here, saved / "full")
    assert code == 1
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in out.splitlines() if "  " in line}
    assert lines["w"] == "float32 (2, 3), SGD in A, absent in B"
    assert lines["open.weight"].startswith("absent in A, table of float32 x 4, any id, Adagrad, initializer uniform")


def test_parameters_are_read_some_at_a_time(run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = listed(run, saved / "whole")
    monkeypatch.setattr(inspection, "ELEMENTS_AT_ONCE", 1)
    assert listed(run, saved / "whole") == before
    assert run("diff", saved / "delta", saved / "whole")[0] == 0


# ---------------------------------------------------------------------------------------------- export


def test_an_export_is_what_a_model_is_given(run: Run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    code, told, _ = run("export", saved / "grown", out)
    assert (code, told.split()[0]) == (0, str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    state = safetensors.torch.load_file(out)
    assert sorted(state) == ["closed.ids", "closed.weight", "dense.bias", "dense.weight", "open.ids", "open.weight"]
    expected = torch.load(saved / "told", weights_only=True)
    assert torch.equal(state["open.ids"], torch.tensor([-7, 3, 5, 6, 2**40]))
    assert torch.equal(state["open.weight"], expected["open"])
    assert torch.equal(state["dense.weight"], expected["dense"]["weight"])

    def body(job: Fleet, worker: int) -> None:
        model = Net()
        job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        job.load_state_dict(model, state)
        assert torch.equal(model.open(state["open.ids"]), state["open.weight"])

    run_job(body, 1, 2)


def test_a_table_without_rows_is_one_of_the_others(run: Run, tmp_path: Path) -> None:
    def body(job: Fleet, worker: int) -> None:
        model = torch.nn.ModuleDict({"some": fleet.nn.Embedding(None, 4), "none": fleet.nn.Embedding(None, 4)})
        optimizer = job.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        optimizer.minimize(model["some"](torch.tensor([3])).sum())
        job.save_persistables(tmp_path / "ckpt")

    run_job(body, 1, 2)
    for command in (
        ["ls", tmp_path / "ckpt"],
        ["verify", tmp_path / "ckpt"],
        ["export", tmp_path / "ckpt", tmp_path / "all.safetensors", "--state"],
        ["export", tmp_path / "ckpt", f"{tmp_path / 'folder'}/"],
        ["export", tmp_path / "ckpt", tmp_path / "dcp", "--format", "dcp", "--state"],
        ["import", tmp_path / "dcp", tmp_path / "again", "--format", "dcp"],
        ["diff", tmp_path / "ckpt", tmp_path / "again"],
    ):
        assert run(*command)[0] == 0, command
    found = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert found["none.ids"].shape == (0,)
    assert found["none.weight"].shape == (0, 4)


def test_an_export_may_have_the_state(run: Run, saved: Path, tmp_path: Path) -> None:
    state = plain(run, saved / "delta", tmp_path / "all.safetensors")
    assert state["dense.weight.state.sum"].shape == (3, 4)
    assert float(state["dense.weight.state.step"]) == 3.0
    assert state["open.weight.state.sum"].shape == (4, 4)
    with safetensors.safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert file.metadata() == {"step": "3", "open.weight.state.step": "3", "closed.weight.state.step": "3"}


def test_an_export_of_some_tables(run: Run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.safetensors"
    assert run("export", saved / "delta", out, "--table", "open")[0] == 0
    assert sorted(safetensors.torch.load_file(out)) == ["open.ids", "open.weight"]
    code, _, err = run("export", saved / "delta", out, "--table", "user", "--force")
    assert (code, "there is no table user" in err, "expected one of open, closed" in err) == (2, True, True)


def test_an_export_to_parquet(run: Run, saved: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("export", saved / "delta", tmp_path / "open.parquet", "--table", "open.weight")[0] == 0
    table = parquet.read_table(tmp_path / "open.parquet")
    state = plain(run, saved / "delta", tmp_path / "a.safetensors")
    assert table.schema.names == ["id", "weight"]
    assert table["id"].to_pylist() == state["open.ids"].tolist()
    assert np.array_equal(np.array(table["weight"].to_pylist(), np.float32), state["open.weight"].numpy())
    assert run("export", saved / "delta", f"{tmp_path}/all/", "--state")[0] == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [
        *("closed.parquet", "open.parquet", "parameters.safetensors")
    ]
    assert parquet.read_table(tmp_path / "all" / "open.parquet").schema.names == ["id", "weight", "sum"]


@pytest.mark.parametrize(
    ("out", "more", "words"),
    [
        ("there.safetensors", [], "will not overwrite what is there"),
        ("tables.parquet", [], "a Parquet file has the rows of one table; got 2 tables: open, closed"),
        ("model.bin", [], "the kind of the export is not clear"),
        ("memory://x/model.safetensors", [], "an export goes to this machine"),
    ],
)
def test_an_export_that_is_refused(
    run: Run, saved: Path, tmp_path: Path, out: str, more: list[str], words: str
) -> None:
    (tmp_path / "there.safetensors").write_text("mine")
    code, _, err = run("export", saved / "delta", out if "://" in out else tmp_path / out, *more)
    assert (code, words in err, err.count("\n")) == (2, True, 1), err
    assert (tmp_path / "there.safetensors").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]


def test_force_replaces_and_a_failure_leaves_what_was(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "there.safetensors"
    out.write_text("mine")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "fill", full)
        code, _, err = run("export", saved / "delta", out, "--force")
    assert (code, "No space left" in err, out.read_text()) == (2, True, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]
    assert run("export", saved / "delta", out, "--force")[0] == 0
    assert "open.ids" in safetensors.torch.load_file(out)


@pytest.mark.parametrize("ends", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_all_files_of_a_folder_appear_or_none(
    ends: BaseException, run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    write, calls = plain_files._write_parquet, itertools.count()

    def breaks_off(*given: Any) -> None:
        write(*given)
        if next(calls):
            raise ends

    with monkeypatch.context() as patched:
        patched.setattr(plain_files, "_write_parquet", breaks_off)
        assert run("export", saved / "delta", f"{tmp_path}/all/")[0] == (
            130 if isinstance(ends, KeyboardInterrupt) else 2
        )
    assert not list((tmp_path / "all").iterdir())
    assert run("export", saved / "delta", f"{tmp_path}/all/")[0] == 0
    assert len(list((tmp_path / "all").iterdir())) == 3


def test_without_pyarrow_parquet_is_refused_by_name(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = run("export", saved / "delta", tmp_path / "open.parquet", "--table", "open")
    assert (code, "pip install 'torch-fleet[arrow]'" in err) == (2, True)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "export"])
def test_what_is_no_checkpoint_is_told_as_such(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s"}')
    second = {"diff": [tmp_path], "export": [tmp_path / "x.safetensors"]}.get(command, [])
    for where, words in (
        (tmp_path / "none", "there is no checkpoint here"),
        (tmp_path, "the manifest cannot be read"),
    ):
        code, out, err = run(command, where, *second)
        if command == "verify" and where == tmp_path:
            assert (code, words in out) == (1, True)
        else:
            assert (code, words in err, err.count("\n")) == (2, True, 1)


def test_help_says_what_it_takes(run: Run) -> None:
    assert "fleet checkpoint export ckpt/step-00000120 model.safetensors" in run("--help")[1]
    for command in ("ls", "diff", "export"):
        assert "some 60 bytes a row" in " ".join(run(command, "--help")[1].split())
    code, _, err = run("list")
    assert (code, "invalid choice" in err) == (2, True)


def test_the_command_ends_with_the_exit_code(saved: Path, prepared: Prepared) -> None:
    command = ["-m", "fleet", "checkpoint", "diff", str(saved / "full"), str(saved / "delta")]
    assert ended(prepared.start(command, os.environ))[0] == 1


def test_a_file_that_is_mapped_has_its_place_on_the_disk(tmp_path: Path) -> None:
    """Where there is none for it, the system would end the process."""
    values = scratch(tmp_path / "of rows", (1000, 100), "float32")
    assert not values.any()
    assert (tmp_path / "of rows").stat().st_blocks * 512 >= values.nbytes
    export = _SafetensorsFile(tmp_path / "of an export", ["name"])
    assert not export.room("name", (1000, 100), "float32").any()
    assert (tmp_path / "of an export").stat().st_blocks * 512 >= values.nbytes
