"""Servers of durable jobs are run again from what they have kept: every state is, to the bit, what it was."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dying
import pytest
import torch
from dying import DyingJob, every
from harness import PATIENT, SOON, Job, until
from inside import flush, leave
from patience import PATIENCE_S, PROCESSES_S
from prepared import Prepared
from test_durable import FREE, OPTIMIZERS, REMEMBERING, ROWS, Model, counts, in_turns, state
from test_resize import Resized

import fleet.nn
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.comparison import compare
from fleet.checkpoint.inspection import Rows, parameters
from fleet.checkpoint.manifest import Checkpoint
from fleet.errors import CheckpointError, ConfigurationError
from fleet.launch.cli import main
from fleet.ps.server.blame import blame
from fleet.ps.server.durability import state_directory
from fleet.ps.server.durability.durability import Durability
from fleet.ps.server.durability.kept_state import RemovedError, Segment, _removed, kept_servers
from fleet.ps.server.durability.state_directory import Kind, StateDirectory
from fleet.ps.server.replay import Replay

STEPS = 5
#: A snapshot every other step or so.
SHORT = 6_000


@pytest.fixture(autouse=True)
def _short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_directory, "JOURNAL_BYTES", SHORT)


def kept(folder: Path, **more: str) -> dict[str, str]:
    return {**PATIENT, "FLEET_DURABLE_DIR": str(folder), "FLEET_DURABLE_KEEP": "all", **more}


def replayed(folder: Path, *options: str) -> Path:
    """The checkpoint that a replay has written."""
    out = folder.with_name("-".join(["out", *options]).replace("--", ""))
    assert main(["replay", str(folder), *options, "--out", str(out)]) == 0
    return out


def differing(left: Path, right: Path) -> list[str]:
    return [name for name, found in compare(Checkpoint.open(left), Checkpoint.open(right)) if not found.same]


def contents(*folders: Path) -> dict[str, torch.Tensor]:
    """What checkpoints hold, in the form of a state dict; rows of one table in several are put together."""
    found: dict[str, torch.Tensor] = {}
    for checkpoint in map(Checkpoint.open, folders):
        found |= {each.spec.name: each.value for each in parameters(checkpoint)}
        for spec in checkpoint.manifest.spec.tables:
            name = spec.name.removesuffix(".weight")
            rows = Rows(checkpoint, spec)
            for places, columns in rows.parts():
                for key, values in {"ids": rows.ids[places], "weight": columns["weight"]}.items():
                    more = [found[f"{name}.{key}"]] if f"{name}.{key}" in found else []
                    found[f"{name}.{key}"] = torch.cat([*more, torch.from_numpy(values.copy())])
    for name in {key.removesuffix(".ids") for key in found if key.endswith(".ids")}:
        order = found[f"{name}.ids"].argsort()
        found[f"{name}.ids"], found[f"{name}.weight"] = found[f"{name}.ids"][order], found[f"{name}.weight"][order]
    return found


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare a checkpoint with a state dict, which has a table of known size in the shape of torch's embedding."""
    assert {key for key in got if key in expected or not key.endswith(".ids")} == expected.keys()
    for key in expected:
        of_ids = f"{key.removesuffix('weight')}ids"
        ids = None if of_ids in expected else got.get(of_ids)
        assert torch.equal(got[key], expected[key] if ids is None else expected[key][ids]), key


def fingerprint(folder: Path) -> str:
    """All that there is to see of a directory, its times included."""
    told = hashlib.sha256()
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.stat()
        told.update(f"{path} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_size}".encode())
        told.update(path.read_bytes() if path.is_file() else b"")
    return told.hexdigest()


def draws(made: Fleet, index: int, optimizer: str, first: int, last: int, after: Callable[[int, Any], None]) -> None:
    """Train from one step to another, with ids that belong to the step."""
    model = Model()
    wrapped = made.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()), model=model)
    made.init_worker()
    for step in range(first, last):
        draw = torch.Generator().manual_seed(2 * step + index)
        wrapped.minimize((model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean())
        after(step + 1, model)
    made.barrier_worker()


class Run:
    """A job of two workers and two servers that has told what it was after each step."""

    def __init__(self, root: Path, optimizer: str) -> None:
        self.root, self.durable, self.optimizer = root, root / "durable", optimizer
        self.said: dict[int, dict[str, torch.Tensor]] = {}
        self.saved = root / "saved"
        self.job = Job(self._body, 2, 2, environ=kept(self.durable))
        self.job.run()

    def _body(self, made: Fleet, index: int) -> None:
        def after(step: int, model: Model) -> None:
            if index == 0:
                self.said[step] = state(made, model)
                made.save_persistables(str(self.saved / str(step)))

        draws(made, index, self.optimizer, 0, STEPS, after)


@pytest.fixture(scope="module", params=["adagrad", "adam"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_directory, "JOURNAL_BYTES", SHORT)
        return Run(tmp_path_factory.mktemp(request.param), request.param)


# ---------------------------------------------------------------- synchronous jobs


def test_after_every_step_it_is_what_the_job_said_it_was(run: Run) -> None:
    before = fingerprint(run.durable)
    for step in range(1, STEPS + 1):
        out = replayed(run.durable, "--to", str(step))
        same(contents(out), run.said[step])
        assert differing(out, run.saved / str(step)) == [], "also in its optimizer's state"
    assert Checkpoint.open(replayed(run.durable)).manifest.version == STEPS, "the last there is"
    assert fingerprint(run.durable) == before
    assert any(run.durable.rglob("snapshot-*")), "or nothing was tried but a journal alone"


def test_trained_on_from_a_replayed_step_it_ends_where_it_ended(run: Run) -> None:
    ends: dict[int, dict[str, torch.Tensor]] = {}

    def body(made: Fleet, index: int) -> None:
        draws(made, index, run.optimizer, 2, STEPS, lambda step, model: ends.update({step: state(made, model)}))

    Job(body, 2, 2, model_dir=str(replayed(run.durable, "--to", "2"))).run()
    same(ends[STEPS], run.said[STEPS])


def test_a_step_that_is_not_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.root / "nothing"
    assert main(["replay", str(run.durable), "--to", str(STEPS + 1), "--out", str(out)]) == 2
    assert f"expected from 0 to {STEPS}; got {STEPS + 1}" in capsys.readouterr().err
    assert not out.exists()


def test_one_server_has_its_share(run: Run) -> None:
    shares = [replayed(run.durable, "--to", "3", "--server", str(server)) for server in range(2)]
    same(contents(*shares), run.said[3])


def test_what_stands_where_it_is_to_be_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.root / "taken"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert main(["replay", str(run.durable), "--out", str(out)]) == 2
    assert "over something else" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    shutil.rmtree(out)
    for step in ("1", "2"):
        assert main(["replay", str(run.durable), "--to", step, "--out", str(out)]) == 0
    same(contents(out), run.said[2])


def test_interrupted_it_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fleet.ps.server.replayed_checkpoint.write_states", interrupted)
    before = sorted(run.root.iterdir())
    assert main(["replay", str(run.durable), "--to", "2", "--out", str(run.root / "new")]) == 130
    assert sorted(run.root.iterdir()) == before


def test_without_anything_asked_it_says_what_is_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.durable)]) == 0
    told = capsys.readouterr().out
    assert f"from step 0 on; after step {STEPS}" in told
    assert main(["replay", str(run.durable), "--digests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 3 * (STEPS + 1)
    assert all(digest in told for digest in (line.split()[2] for line in lines if line.startswith(f"{STEPS} ")))


def test_a_damaged_record_is_named_and_what_is_before_it_can_be_had(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    durable = tmp_path / "durable"
    shutil.copytree(run.durable, durable)
    journal = max((durable / "server1_1.ended-00000001").glob("journal-*"))
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    before = fingerprint(durable)
    assert main(["replay", str(durable), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"{journal}, byte " in told
    assert fingerprint(durable) == before
    same(contents(replayed(durable, "--to", "1")), run.said[1])


def test_a_torn_end_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    shutil.copytree(run.durable, durable)
    journal = max((durable / "server0_1.ended-00000001").glob("journal-*"))
    os.truncate(journal, journal.stat().st_size - 3)
    before = fingerprint(durable)
    same(contents(replayed(durable)), run.said[STEPS])
    assert fingerprint(durable) == before


def test_a_server_that_is_not_there(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    durable = tmp_path / "durable"
    shutil.copytree(run.durable, durable)
    shutil.rmtree(durable / "server1_1.ended-00000001")
    assert main(["replay", str(durable)]) == 2
    assert "none of server 1" in capsys.readouterr().err
    assert main(["replay", str(durable), "--server", "1"]) == 2
    assert "expected --server 0; got 1" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err


# ---------------------------------------------------------------- what is kept


def test_by_default_there_is_what_recovery_needs_while_the_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[int, dict[str, torch.Tensor]] = {}
    durable = tmp_path / "durable"

    def body(made: Fleet, index: int) -> None:
        def after(step: int, model: Model) -> None:
            if index == 0:
                said[step] = state(made, model)
            made.barrier_worker()
            if index == 0 and step == STEPS:
                until(lambda: all(snapshots(folder) and not journals(folder) & {0} for folder in durable.iterdir()))
                same(contents(replayed(durable)), said[step])
                assert main(["replay", str(durable), "--to", "0"]) == 2

        draws(made, index, "adam", 0, STEPS, after)

    def snapshots(folder: Path) -> set[int]:
        return set(state_directory.snapshots_in(folder))

    def journals(folder: Path) -> set[int]:
        return set(state_directory.numbers_in(folder, state_directory.JOURNAL))

    Job(body, 2, 2, environ=kept(durable, FLEET_DURABLE_KEEP="needed")).run()
    told = capsys.readouterr().err
    assert "the journals do not have this step" in told
    assert "or more; got 0. With FLEET_DURABLE_KEEP=all" in told
    assert list(durable.iterdir()) == [], "nothing is left of a job that has ended"


def test_jobs_one_after_the_other_in_one_directory(tmp_path: Path) -> None:
    durable, said = tmp_path / "durable", list[dict[str, torch.Tensor]]()

    def body(made: Fleet, index: int) -> None:
        draws(made, index, "momentum", len(said), len(said) + 1, lambda _, model: said.append(state(made, model)))

    for name in ("first", "second"):
        Job(body, environ=kept(durable, FLEET_JOB_ID=name)).run()
    same(contents(replayed(durable)), said[1])
    same(contents(replayed(durable, "--job", "first")), said[0])
    with pytest.raises(ConfigurationError, match="expected 'first', 'second'; got 'third'"):
        kept_servers(durable, "third")


@pytest.mark.parametrize("ends_soon", [False, True])
@pytest.mark.parametrize("then", [[0, 1, 2], [1, 2], [2]], ids=["one more", "one for another", "one for two"])
@pytest.mark.pairs(1)
def test_a_job_that_has_moved_is_replayed_from_there_on(
    tmp_path: Path,
    then: list[int],
    ends_soon: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that is over before a snapshot could be taken after it has moved."""
    if ends_soon:
        monkeypatch.setattr(Durability, "begin_if_due", lambda *_: None)
    durable, said = tmp_path / "durable", dict[int, dict[str, torch.Tensor]]()
    servers = [f"server{number}:1" for number in then]

    def body(made: Fleet, index: int) -> None:
        def after(step: int, model: Model) -> None:
            if index == 0:
                said[step] = state(made, model)
            if step == 2 and index == 0:
                made.resize_servers(servers)

        draws(made, index, "adagrad", 0, STEPS, after)

    job = Resized(body, [0, 1], then, environ=kept(durable))
    job.run()
    first = max(each.first for each in kept_servers(durable))
    assert 2 <= first <= STEPS
    for step in range(first, STEPS + 1):
        same(contents(replayed(durable, "--to", str(step))), said[step])
    assert {each.spec.settings.server_num for each in kept_servers(durable)} == {len(then)}
    assert main(["replay", str(durable), "--to", "1", "--out", str(tmp_path / "one")]) == 2
    assert "the journals do not have this step" in capsys.readouterr().err


# ---------------------------------------------------------------- what happens to jobs


def replays_as_it_ended(
    body: Callable[[Fleet, int], Any], root: Path, *options: str, updates: bool = False, **job: Any
) -> None:
    """Say that a job's last state, as a checkpoint has it, is what a replay has."""
    durable = root / "durable"
    ended = threading.Barrier(job.get("workers", 2))

    def saving(made: Fleet, index: int) -> None:
        body(made, index)
        ended.wait(PATIENCE_S)
        if index == 0:
            made.save_persistables(str(root / "saved"))

    environ = kept(durable, **job.pop("more", {}))
    Job(saving, **{"workers": 2, **job}, environ=environ).run()
    apart = set(differing(replayed(durable, *options), root / "saved"))
    others = {"step"} if options or updates else set()
    assert apart <= others, "a server counts its updates, and a checkpoint the steps of a worker"


@pytest.mark.pairs(2)
@pytest.mark.parametrize("mode", FREE)
def test_modes_without_rounds(tmp_path: Path, mode: str) -> None:
    replays_as_it_ended(counts(FREE[mode], torch.optim.Adagrad, 6), tmp_path, "--server", "0")


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", REMEMBERING)
def test_modes_that_remember_what_workers_were_given(tmp_path: Path, mode: str) -> None:
    replays_as_it_ended(in_turns(REMEMBERING[mode], 4), tmp_path, "--server", "0")


def test_a_server_of_an_asynchronous_job_after_each_of_its_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[int, dict[str, torch.Tensor]] = {}
    durable = tmp_path / "durable"

    def body(made: Fleet, index: int) -> None:
        def between(made: Fleet, _: int, step: int) -> None:
            flush(made)

        model = Model()
        wrapped = made.distributed_optimizer(OPTIMIZERS["adam"](model.parameters()), FREE["ssp"], model=model)
        made.init_worker()
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            wrapped.minimize((model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean())
            between(made, index, step)
            said[step + 1] = state(made, model)

    Job(body, 1, 2, environ=kept(durable)).run()
    for step in (1, 3, STEPS):
        shares = [replayed(durable, "--to", str(step), "--server", str(server)) for server in range(2)]
        same(contents(*shares), said[step])
        assert [Checkpoint.open(share).manifest.version for share in shares] == [step, step]
    assert main(["replay", str(durable), "--to", "1"]) == 2
    assert "Choose one of them: --server 0 or 1" in capsys.readouterr().err


BUFFERED = {
    "gba": fleet.StrategyFactory.create_gba_strategy(2, 99),
    "auto": fleet.StrategyFactory.create_auto_strategy(),
}


@pytest.mark.parametrize("mode", BUFFERED)
def test_updates_that_all_servers_make_together(tmp_path: Path, mode: str) -> None:
    body = counts(BUFFERED[mode], torch.optim.Adagrad, 6)
    replays_as_it_ended(body, tmp_path, servers=2, updates=True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_alone_where_dense_parameters_are_on_the_workers(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = {
        "sync": fleet.StrategyFactory.create_sync_strategy(dense="all_reduce"),
        "async": fleet.StrategyFactory.create_async_strategy(dense="all_reduce"),
    }[mode]
    durable, said = tmp_path / "durable", dict[str, torch.Tensor]()

    def body(made: Fleet, index: int) -> None:
        said.update(counts(strategy, torch.optim.Adagrad, 3)(made, index))

    Job(body, 1, 1, environ=kept(durable)).run()
    out = replayed(durable, "--server", "0")
    assert "It has the rows alone" in capsys.readouterr().out
    found = contents(out)
    assert found.keys() == {"rows.ids", "rows.weight"}
    assert torch.equal(found["rows.weight"], said["rows.weight"])


def test_a_job_whose_servers_were_killed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeping(StateDirectory):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, keeps_all=True)

    monkeypatch.setattr(dying, "StateDirectory", Keeping)

    def body(made: Fleet, index: int) -> None:
        draws(made, index, run.optimizer, 0, STEPS, lambda *_: None)

    durable = tmp_path / "durable"
    job = DyingJob(body, durable, plan=every(3, 1), journal_bytes=SHORT)
    job.run()
    assert job.kills > 5
    for step in range(1, STEPS + 1):
        same(contents(replayed(durable, "--to", str(step))), run.said[step])
    assert main(["replay", str(durable), "--diff", str(run.durable), "--to", str(STEPS)]) == 0


def test_rows_that_come_and_go_and_clipping_on_two_servers(tmp_path: Path) -> None:
    strategy = fleet.StrategyFactory.create_sync_strategy(max_grad_norm=0.5)

    def body(made: Fleet, index: int) -> None:
        model = torch.nn.ModuleDict(
            {
                "some": fleet.nn.Embedding(
                    None, 3, admit=fleet.nn.CountFilter(2), evict=[fleet.nn.MaxRows(6), fleet.nn.Unused(steps=3)]
                ),
                "line": torch.nn.Linear(3, 1),
            }
        )
        wrapped = made.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), strategy, model=model)
        made.init_worker()
        for step in range(8):
            ids = torch.randint(0, 30, (12,), generator=torch.Generator().manual_seed(step + 50 * index))
            wrapped.minimize(model["line"](model["some"](ids)).square().mean())
        made.barrier_worker()

    replays_as_it_ended(body, tmp_path, servers=2, more={"FLEET_EVICT_EVERY": "2"})


def test_rows_that_memory_had_no_room_for(tmp_path: Path) -> None:
    def body(made: Fleet, index: int) -> None:
        draws(made, index, "adam", 0, 4, lambda *_: None)

    more = {"FLEET_TABLE_MEMORY_MB": "1", "FLEET_TABLE_DIR": str(tmp_path)}
    replays_as_it_ended(body, tmp_path, more=more)


def test_parameters_that_join(tmp_path: Path) -> None:
    def body(made: Fleet, index: int) -> None:
        model = Model()
        first = [*model.open.parameters(), *model.head.parameters()]
        wrapped = made.distributed_optimizer(torch.optim.Adagrad(first, lr=0.1), model=model)
        made.init_worker()
        for step in range(4):
            if step == 2:
                wrapped.add_param_group({"params": list(model.known.parameters()), "lr": 0.01})
            draw = torch.Generator().manual_seed(2 * step + index)
            wrapped.minimize((model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean())
        made.barrier_worker()

    replays_as_it_ended(body, tmp_path, servers=2)
    before = Checkpoint.open(replayed(tmp_path / "durable", "--to", "1")).manifest.spec
    assert [table.name for table in before.tables] == ["open.weight"]


def test_other_values_that_are_loaded_into_a_running_job(tmp_path: Path) -> None:
    first, said = str(tmp_path / "first"), dict[int, dict[str, torch.Tensor]]()

    def body(made: Fleet, index: int) -> None:
        def after(step: int, model: Model) -> None:
            if step == 1:
                made.save_persistables(first)
            if step == 3:
                made.load_persistables(first)
            made.barrier_worker()
            if index == 0:
                said[step] = state(made, model)
            made.barrier_worker()

        draws(made, index, "adam", 0, 5, after)

    replays_as_it_ended(body, tmp_path, servers=2)
    durable = tmp_path / "durable"
    for step in (1, 2, 3, 4):
        same(contents(replayed(durable, "--to", str(step))), said[step])
    assert main(["replay", str(durable), "--digests"]) == 0


def test_a_job_that_began_with_a_checkpoint_counts_on_from_there(run: Run, tmp_path: Path) -> None:
    durable, said = tmp_path / "durable", dict[int, dict[str, torch.Tensor]]()

    def body(made: Fleet, index: int) -> None:
        draws(made, index, run.optimizer, 2, 4, lambda step, model: said.update({step: state(made, model)}))

    Job(body, 2, 2, environ=kept(durable), model_dir=str(run.saved / "2")).run()
    for step in (2, 3, 4):
        out = replayed(durable, "--to", str(step))
        same(contents(out), run.said[step])
        assert Checkpoint.open(out).manifest.version == step


def test_a_worker_that_was_given_up_on(tmp_path: Path) -> None:
    durable, said = tmp_path / "durable", dict[str, torch.Tensor]()

    def body(made: Fleet, index: int) -> None:
        def after(step: int, model: Model) -> None:
            if index == 1 and step == 2:
                leave(made)
                raise Gone
            if step == 4:
                said.update(state(made, model))

        draws(made, index, "adam", 0, 4, after)

    job = Job(body, 2, environ={**SOON, **kept(durable), **SOON})
    job.join(job.start())
    assert isinstance(job.errors.pop("worker 1"), Gone)
    assert not job.errors
    same(contents(replayed(durable)), said)


class Gone(Exception):
    """Ends a worker."""


def test_a_state_that_a_worker_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    durable, found = tmp_path / "durable", list[Any]()

    def body(made: Fleet, index: int) -> None:
        model = Model()
        wrapped = made.distributed_optimizer(OPTIMIZERS["adam"](model.parameters()), model=model)
        made.init_worker()
        own = {"place": 0}
        if made.load_state(own):
            found.append(own)
            return
        for step in range(3):
            made.keep_state({"place": step})
            wrapped.minimize((model(torch.tensor([[1, 2, 3]])) - 1).square().mean())

    Job(body, environ=kept(durable)).run()
    Job(body, model_dir=str(replayed(durable, "--to", "2"))).run()
    assert found == [{"place": 1}]


# ---------------------------------------------------------------- two runs, and whose gradients


def parting(durable: Path, at: int | None, id: int = 7) -> None:
    """A job in which a gradient of worker 1 may be another in one of its steps."""

    def body(made: Fleet, index: int) -> None:
        model = Model()
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        made.init_worker()
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(2 * step + index)
            loss = (model(torch.randint(0, ROWS, (8, 3), generator=draw)) - 1).square().mean()
            if index == 1 and step + 1 == at:
                loss = loss + model.known(torch.tensor([id])).sum()
            wrapped.minimize(loss)
        made.barrier_worker()

    Job(body, 2, 2, environ=kept(durable)).run()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    durable = tmp_path_factory.mktemp("runs") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_directory, "JOURNAL_BYTES", SHORT)
        parting(durable, None)
    return durable


def test_two_runs_part_at_the_first_step_and_row_that_differ(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    parting(other, at=3)
    assert main(["replay", str(undisturbed), "--diff", str(other)]) == 1
    told = capsys.readouterr().out
    assert "differs first after step 3 (they are the same before it)" in told
    assert "known.weight: 1 ids: 7" in told
    assert "head" not in told
    assert "open.weight" not in told
    assert main(["replay", str(undisturbed), "--diff", str(other), "--to", "2"]) == 0
    assert "the same, bit by bit, after every step from 0 to 2" in capsys.readouterr().out
    assert main(["replay", str(undisturbed), "--diff", str(undisturbed), "--to", str(STEPS + 1)]) == 2
    assert f"expected from 0 to {STEPS}" in capsys.readouterr().err


def test_runs_of_another_model_are_not_compared(
    undisturbed: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(undisturbed), "--diff", str(run.durable)]) == 2
    assert "two runs cannot be compared" in capsys.readouterr().err


def test_a_row_is_the_sum_of_what_it_is_blamed_on(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blamed = 0
    for server in kept_servers(undisturbed):
        replay = Replay(server, ProcessSettings(), SystemClock())
        for id in range(10):
            found = blame(replay, "known.weight", id)
            row = torch.from_numpy(found.before.copy())
            for change in found.changes:
                total = sum(torch.from_numpy(part.gradient) for part in change.parts)
                row = row - 0.5 * total / change.divisor
                torch.testing.assert_close(row, torch.from_numpy(change.after.copy()))
                blamed += len({part.worker for part in change.parts})
    assert blamed > 10
    assert main(["replay", str(undisturbed), "--blame", "known.weight:3"]) == 0
    told = capsys.readouterr().out
    assert "norm of the gradient of worker" in told
    assert main(["replay", str(undisturbed), "--blame", "known.weight:40"]) == 2
    assert "expected an id from 0 to 39; got 40" in capsys.readouterr().err
    assert main(["replay", str(undisturbed), "--blame", "none:4"]) == 2
    assert "the job has no such table" in capsys.readouterr().err


def test_a_row_of_any_id_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where ids are hashes half of them are negative."""
    ids = [-5, -1 << 63, (1 << 63) - 1]

    def body(made: Fleet, index: int) -> None:
        model = fleet.nn.Embedding(None, 2)
        wrapped = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        made.init_worker()
        for _ in range(2):
            wrapped.minimize(model(torch.tensor(ids)).sum())

    Job(body, 1, 2, environ=kept(tmp_path)).run()
    for id in ids:
        assert main(["replay", str(tmp_path), "--blame", f"weight:{id}"]) == 0
        assert capsys.readouterr().out.endswith("\n2 changes\n")
    for beyond in ((-1 << 63) - 1, 1 << 63):
        assert main(["replay", str(tmp_path), "--blame", f"weight:{beyond}"]) == 2
        assert f"expected an id from {-1 << 63} to {(1 << 63) - 1}; got {beyond}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "x", "--digests"], "--out and --digests do not go together"),
        (["--to", "-1"], "--to is not usable"),
        (["--blame", "weight:" + "9" * 5000], "--blame is not usable; expected TABLE:ID"),
        (["--blame", "17"], "--blame is not usable; expected TABLE:ID; got '17'"),
    ],
)
def test_mistakes_in_the_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "durable", *options]) == 2
    assert said in capsys.readouterr().err


def test_the_command_in_a_process_of_its_own(undisturbed: Path, tmp_path: Path, prepared: Prepared) -> None:
    command = ["-m", "fleet", "replay", str(undisturbed), "--to", "2", "--out", str(tmp_path / "out")]
    code, out, err = ended(prepared, command)
    assert (code, err) == (0, "")
    assert "the job after step 2" in out
    assert Checkpoint.open(tmp_path / "out").manifest.version == 2


def ended(prepared: Prepared, command: list[str]) -> tuple[int, str, str]:
    process = prepared.start(command, os.environ)
    out, err = process.communicate(timeout=PROCESSES_S)
    return process.returncode, out, err


def test_what_is_removed_meanwhile_is_missed_by_name(run: Run, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    shutil.copytree(run.durable, durable)
    (server, _) = kept_servers(durable)
    shutil.rmtree(server.directory / "snapshot-00000001")
    with pytest.raises(CheckpointError, match="not there any more"):
        Replay(server, ProcessSettings(), SystemClock()).to(server.segments[1].first, lambda *_: None)


def test_a_journal_that_is_removed_before_it_is_opened_is_no_gap(run: Run, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    shutil.copytree(run.durable, durable)
    (server, _) = kept_servers(durable)
    # How many there are is the writer's affair, which works beside the training: one of them has two steps.
    ends = [*(each.first for each in server.segments[1:]), STEPS]
    segment = next(each for each, end in zip(server.segments, ends, strict=True) if end > each.first + 1)
    (durable / server.directory.name / f"journal-{segment._number:08d}").unlink()
    with pytest.raises(RemovedError, match="not there any more"):
        Replay(server, ProcessSettings(), SystemClock()).to(segment.first + 1, lambda *_: None)


def test_a_state_that_gives_way_to_a_newer_one_is_read_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    durable, opened = tmp_path / "durable", list[Path]()
    shutil.copytree(run.durable, durable)
    records = Segment.records

    def with_a_snapshot_meanwhile(segment: Segment) -> Iterator[tuple[Kind, memoryview]]:
        opened.append(segment.directory)
        if len(opened) == 2:
            raise _removed(segment.directory)
        return records(segment)

    monkeypatch.setattr(Segment, "records", with_a_snapshot_meanwhile)
    assert main(["replay", str(durable)]) == 0
    assert len(opened) > 3
    assert logging.getLogger("fleet").isEnabledFor(logging.WARNING), "what others log is theirs"
    assert capsys.readouterr().out.count("after step") == 2
