"""Checkpoints from time to time, and which of them stay."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from harness import Job, run_job, until
from test_deltas import STRATEGIES, join, same, train

import fleet
from fleet import Checkpoints, Fleet
from fleet.base.settings import ProcessSettings
from fleet.checkpoint import writer
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoints import Schedule
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    JobAbortedError,
    MissedError,
    NotInitializedError,
    StateError,
)
from fleet.ps.server import checkpoint_share
from fleet.ps.table import frozen_view, shard
from fleet.ps.wire.real_network import real_network
from fleet.ps.worker import checkpoint_save


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def stepped(job: Fleet, strategy: str, steps: int, root: object, **options: Any) -> Any:
    """Train with checkpoints; each is there before the next step, whoever writes it."""
    model, optimizer = join(job, strategy)
    with Checkpoints(root, fleet=job, **options) as checkpoints:
        for step in range(steps):
            train(model, optimizer, [step])
            checkpoints.after_step()
            until(lambda: not checkpoints._is_writing())
    return model


# ---------------------------------------------------------------------------------------------- when


def test_a_schedule() -> None:
    by_steps = Schedule(10, None, 1, step=0, at=0.0)
    assert [step for step in range(25) if by_steps.is_due(step, 0.0)] == [*range(10, 25)], "it stays due"
    by_steps.begin(13, 0.0)
    assert not by_steps.is_due(19, 1e9)
    assert by_steps.is_due(20, 0.0), "multiples, though the last one was late"
    by_steps.begin(20, 0.0)
    assert not by_steps.is_due(20, 0.0)
    assert not by_steps.is_due(12, 0.0), "gone back"
    assert by_steps.is_due(20, 0.0)
    by_time = Schedule(None, 5.0, 1, step=3, at=100.0)
    assert [by_time.is_due(*when) for when in ((4, 104.9), (3, 105.0), (4, 105.0))] == [False, False, True]
    either = Schedule(10, 5.0, 1, step=0, at=0.0)
    assert [either.is_due(*when) for when in ((9, 4.0), (10, 4.0), (1, 5.0))] == [False, True, True]


def test_every_so_many_are_full() -> None:
    schedule, modes = Schedule(1, None, 3, step=0, at=0.0), []
    for fails in (True, False, False, True, False, False):
        modes.append(schedule.mode)
        if not fails:
            schedule.end(schedule.mode)
    assert modes == ["full", "full", "delta", "delta", "delta", "full"], "what failed is due again"


# ---------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_a_job_goes_on_from_the_latest(strategy: str, tmp_path: Path) -> None:
    """What was saved behind the training, base and deltas, is what the only worker had at that step."""

    def body(job: Fleet, worker: int) -> list[torch.Tensor]:
        model = stepped(job, strategy, 8, tmp_path, every_steps=2, full_every=2, keep_last=2)
        job.save_persistables(tmp_path / "end")
        return model.seen()

    def again(job: Fleet, worker: int) -> tuple[int, list[torch.Tensor]]:
        model, _ = join(job, strategy)
        return job.resume_step(), model.seen()

    run_job(body, 1, 2)
    assert names(tmp_path) == ["end", "step-00000006", "step-00000008"]
    kinds = {step: Checkpoint.open(tmp_path / f"step-0000000{step}").before is None for step in (6, 8)}
    assert kinds == {6: True, 8: False}
    latest = Checkpoints.latest(tmp_path)
    assert latest == str(tmp_path / "step-00000008")
    ((step, found),) = run_job(again, 1, 3, model_dir=latest)
    ((_, expected),) = run_job(again, 1, 3, model_dir=str(tmp_path / "end"))
    assert step == 8
    assert same(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_the_first_worker_saves_and_all_go_on(strategy: str, tmp_path: Path) -> None:
    def body(job: Fleet, worker: int) -> None:
        stepped(job, strategy, 6, tmp_path, every_steps=3)
        job.barrier_worker()

    run_job(body, 3, 2)
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    assert [Checkpoint.open(tmp_path / name).manifest.version for name in names(tmp_path)] == [3, 6]


def test_by_time(tmp_path: Path) -> None:
    def body(job: Fleet, worker: int) -> None:
        clock = FakeClock()
        model, optimizer = join(job)
        checkpoints = Checkpoints(tmp_path, every_s=60, background=False, fleet=job, clock=clock)
        for step in range(6):
            train(model, optimizer, [step])
            clock.time += 25 * (1 + worker)  # the first worker's counts, whatever the others' say
            checkpoints.after_step()
        checkpoints.close()

    run_job(body, 2, 1)
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Whoever is about to commit a checkpoint waits for this."""
    go, commit = threading.Event(), writer.CheckpointWriter.commit

    def waiting(*arguments: Any) -> Any:
        assert go.wait(30)
        return commit(*arguments)

    monkeypatch.setattr(writer.CheckpointWriter, "commit", waiting)
    return go


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_while_a_checkpoint_is_written(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hold(monkeypatch)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, strategy)
        with Checkpoints(tmp_path, every_steps=2, fleet=job) as checkpoints:
            for step in range(7):
                train(model, optimizer, [step])
                checkpoints.after_step()
            assert Checkpoints.latest(tmp_path) is None
            with pytest.raises(
                DeadlineError, match=r"still being written; at .*step-00000002; expected its end within"
            ):
                checkpoints.close(within_s=0.01)
            with pytest.raises(ConfigurationError, match="within_s is out of range; expected above 0 and below"):
                checkpoints.close(within_s=1e10)  # no clock of the system waits so long
            go.set()
            until(lambda: not checkpoints._is_writing())
            train(model, optimizer, [7, 8])
            checkpoints.after_step()

    run_job(body, 1, 2)
    assert names(tmp_path) == ["step-00000002", "step-00000009"], "one at a time; what was missed is made up for"
    assert Checkpoint.open(tmp_path / "step-00000002").manifest.version == 2


@pytest.mark.parametrize("is_over", [False, True], ids=["still written", "written by then"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_becomes_due_while_the_last_one_is_written_is_saved_at_the_end(
    strategy: str, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hold(monkeypatch)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, strategy)
        with Checkpoints(tmp_path, every_steps=2, fleet=job) as checkpoints:
            for step in range(4):
                train(model, optimizer, [step])
                checkpoints.after_step()
            go.set()
            until(lambda: not (is_over and checkpoints._is_writing()))

    run_job(body, 1, 2)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_synchronous_job_is_saved_as_it_was_while_it_trains_on(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers go on after their first piece of rows when the worker has trained on, and changed most rows."""
    monkeypatch.setattr(shard, "PIECE_BYTES", 500)  # a few rows
    monkeypatch.setattr(frozen_view, "_HELD_BYTES", 300)
    begun, go = threading.Event(), threading.Event()

    def held_up(cursor: str) -> bool:
        assert not begun.is_set() or not shard.is_of_rows(cursor) or go.wait(30)
        return shard.is_of_rows(cursor)

    monkeypatch.setattr(checkpoint_share, "is_of_rows", held_up)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        with Checkpoints(tmp_path / "run", every_steps=10, full_every=2, fleet=job) as checkpoints:
            train(model, optimizer, range(10))
            if mode == "delta":
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())
            train(model, optimizer, range(10, 20))
            begun.set()
            checkpoints.after_step()
            train(model, optimizer, range(20, 24))
            assert checkpoints._is_writing()
            go.set()

    def undisturbed(job: Fleet, worker: int) -> None:
        train(*join(job), range(20))
        job.save_persistables(tmp_path / "undisturbed")

    def again(job: Fleet, worker: int) -> list[torch.Tensor]:
        model, optimizer = join(job)
        train(model, optimizer, range(30, 32))  # with the optimizer's state
        return model.seen()

    run_job(body, 1, 2)
    run_job(undisturbed, 1, 2)
    latest = str(tmp_path / "run" / "step-00000020")
    assert (Checkpoint.open(latest).before is None) == (mode == "full")
    (found,) = run_job(again, 1, 2, model_dir=latest)
    (expected,) = run_job(again, 1, 2, model_dir=str(tmp_path / "undisturbed"))
    assert same(found, expected)


def test_training_goes_on_over_real_connections(tmp_path: Path, free_endpoints: Callable[[int], list[str]]) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "async")
        with Checkpoints(tmp_path, every_steps=5, full_every=3, keep_last=1, fleet=job) as checkpoints:
            for step in range(40):
                train(model, optimizer, [step])
                checkpoints.after_step()
            checkpoints.save()

    Job(body, 2, 2, network=real_network(ProcessSettings.read({})), endpoints=free_endpoints(2)).run()
    latest = Checkpoints.latest(tmp_path)
    assert latest == str(tmp_path / "step-00000040")
    assert names(tmp_path) == sorted(Path(each.where).name for each in Checkpoint.open(latest).lineage())


def test_not_behind_where_that_is_not_wanted(tmp_path: Path) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "async")
        checkpoints = Checkpoints(tmp_path, every_steps=1, background=False, fleet=job)
        train(model, optimizer, [0])
        checkpoints.after_step()
        assert names(tmp_path) == ["step-00000001"]

    run_job(body, 1, 1)


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failure_is_raised_and_training_may_go_on(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, strategy)
        with Checkpoints(tmp_path, every_steps=2, fleet=job) as checkpoints:
            with monkeypatch.context() as patched:
                patched.setattr(writer.CheckpointWriter, "commit", no_space)
                train(model, optimizer, [0, 1])
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())
                with pytest.raises((CheckpointError, OSError), match="No space left on device"):
                    checkpoints.after_step()
            assert names(tmp_path) == []
            train(model, optimizer, [2])
            checkpoints.after_step()
            assert names(tmp_path) == []
            train(model, optimizer, [3])
            checkpoints.after_step()

    with caplog.at_level(logging.WARNING, "fleet.checkpoint"):
        run_job(body, 1, 2)
    assert names(tmp_path) == ["step-00000004"]
    assert "the checkpoint of step 2 was not written" in caplog.text


@pytest.mark.parametrize("background", [None, False])
@pytest.mark.parametrize("fate", ["last", "first", "all", "replaced"])
def test_what_a_delta_would_go_on_from_is_gone(
    fate: str, background: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full one takes its place, deltas go on from that, and no later checkpoint fails."""
    gone = {"first": [1], "all": [1, 2]}.get(fate, [2])

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        with Checkpoints(tmp_path, every_steps=1, full_every=100, background=background, fleet=job) as checkpoints:
            for step in range(4):
                if step == 2:
                    for each in gone:
                        shutil.rmtree(tmp_path / f"step-0000000{each}")
                    if fate == "replaced":
                        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
                train(model, optimizer, [step])
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())

    with caplog.at_level(logging.WARNING, "fleet.checkpoint"):
        run_job(body, 1, 2)
    third, fourth = (Checkpoint.open(tmp_path / f"step-0000000{step}") for step in (3, 4))
    assert third.manifest.parent is None
    assert [each.manifest.id for each in fourth.lineage()] == [third.manifest.id, fourth.manifest.id]
    (told,) = (record.message for record in caplog.records if record.name == "fleet.checkpoint")
    assert told.endswith("step-00000002, or what it goes on from, is not there any more: a full checkpoint is saved")


@pytest.mark.parametrize(("steps", "every", "there"), [(5, 2, [3, 4]), (4, 4, [4])], ids=["later", "at the end"])
def test_what_a_killed_server_missed_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, every: int, there: list[int]
) -> None:
    ask, missed = checkpoint_save._ask, [MissedError("a server was killed while it wrote its share")]

    def fail_once(*arguments: Any, begin: bool) -> None:
        if missed and not begin:
            raise missed.pop()
        ask(*arguments, begin=begin)

    monkeypatch.setattr(checkpoint_save, "_ask", fail_once)
    run_job(lambda job, worker: stepped(job, "sync", steps, tmp_path, every_steps=every), 1, 1)
    # What a server still writes into the folder of the one that was given up is in nobody's way.
    assert [name for name in names(tmp_path) if name[0] != "."] == [f"step-{step:08d}" for step in there]


def test_a_job_may_stop_before_what_nothing_is_owed_to_ends(tmp_path: Path) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "async")
        with Checkpoints(tmp_path, every_steps=2, fleet=job, background=False) as checkpoints:
            for step in range(3):
                train(model, optimizer, [step])
                checkpoints.after_step()
            job.stop_worker()

    run_job(body, 1, 1)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("ends", ["open", "closed by an error"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_that_stops_finishes_what_is_being_written(
    ends: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, finish = hold(monkeypatch), Checkpoints._finish

    def let_go(checkpoints: Checkpoints, within_s: float) -> None:
        go.set()
        finish(checkpoints, within_s)

    monkeypatch.setattr(Checkpoints, "_finish", let_go)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, strategy)
        checkpoints = Checkpoints(tmp_path, every_steps=2, fleet=job, state={"worker": worker})
        with contextlib.suppress(StopIteration), contextlib.ExitStack() as stack:
            if ends != "open":
                stack.enter_context(checkpoints)
            for step in range(4):
                train(model, optimizer, [step])
                checkpoints.after_step()
            raise StopIteration
        job.stop_worker()
        for call in (checkpoints.close, job.stop_worker):
            call()  # do nothing any more

    run_job(body, 2, 2)
    put_off = [] if ends != "open" else ["step-00000004"]
    assert names(tmp_path) == ["step-00000002", *put_off]


@pytest.mark.parametrize("on", ["this thread", "another thread"])
def test_a_second_goodbye_amid_the_first_waits_for_what_is_being_written_too(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a handler of a signal."""
    go, finish, jobs, failed = hold(monkeypatch), Checkpoints._finish, list[Fleet](), list[BaseException]()

    def say_goodbye(job: Fleet) -> None:
        try:
            job.stop_worker()
        except BaseException as error:
            failed.append(error)

    def interrupted(checkpoints: Checkpoints, within_s: float) -> None:
        if jobs:
            job = jobs.pop()
            if on == "this thread":
                say_goodbye(job)
            else:
                thread = threading.Thread(target=say_goodbye, args=(job,))
                thread.start()
                thread.join()
        go.set()
        finish(checkpoints, within_s)

    monkeypatch.setattr(Checkpoints, "_finish", interrupted)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        checkpoints = Checkpoints(tmp_path, every_steps=1, fleet=job)
        train(model, optimizer, [0])
        checkpoints.after_step()
        jobs.append(job)
        job.stop_worker()

    run_job(body)
    assert not failed
    assert names(tmp_path) == ["step-00000001"]


def test_a_job_that_stops_tells_of_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says goodbye: to the others it has trained to its end."""
    monkeypatch.setattr(writer.CheckpointWriter, "commit", no_space)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        checkpoints = Checkpoints(tmp_path, every_steps=1, fleet=job)
        train(model, optimizer, [0])
        checkpoints.after_step()
        if worker == 0:
            with pytest.raises(CheckpointError, match=r"a checkpoint could not be written.*No space left"):
                job.stop_worker()
        else:
            job.stop_worker()

    run_job(body, 2, 1)


@pytest.mark.parametrize("how", ["close", "save"])
def test_a_failure_behind_the_last_step_is_raised_at_the_end(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.CheckpointWriter, "commit", no_space)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "async")
        checkpoints = Checkpoints(tmp_path, every_steps=1, fleet=job)
        train(model, optimizer, [0])
        checkpoints.after_step()
        with pytest.raises(CheckpointError, match=r"a checkpoint could not be written.*No space left"):
            getattr(checkpoints, how)()

    run_job(body, 1, 1)


def test_an_error_in_the_loop_waits_for_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = hold(monkeypatch)

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "async")
        with Checkpoints(tmp_path, every_steps=1, fleet=job) as checkpoints:
            train(model, optimizer, [0])
            checkpoints.after_step()
            raise ZeroDivisionError("a bad batch")

    job = Job(body, 1, 1)
    threads = job.start()
    until(lambda: "worker 0" in job.errors)
    go.set()
    job.join(threads)
    assert isinstance(job.errors["worker 0"], ZeroDivisionError)
    assert isinstance(job.errors["server 0"], JobAbortedError)


# ---------------------------------------------------------------------------------------------- which ones stay


def test_what_a_kept_delta_goes_on_from_stays(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
        (tmp_path / "step-2").mkdir()
        checkpoints = Checkpoints(tmp_path, every_steps=2, full_every=3, keep_last=2, background=False, fleet=job)
        for step in range(14):
            train(model, optimizer, [step])
            checkpoints.after_step()
            if step % 2:
                seen.append([name.removeprefix("step-000000") for name in names(tmp_path)][1:-1])

    run_job(body, 1, 2)
    assert seen == [
        *(["02"], ["02", "04"], ["02", "04", "06"]),
        ["02", "04", "06", "08"],  # 06 is a delta on 04, which is one on 02
        *(["08", "10"], ["08", "10", "12"], ["08", "10", "12", "14"]),
    ]
    assert (tmp_path / "step-00000001" / "notes.txt").exists(), "somebody else's"


def test_what_an_interrupted_removal_left_goes_with_the_next(tmp_path: Path) -> None:
    """And nothing that is somebody else's, or later."""
    places = [
        "step-00000001/fleet-pieces-0123abcd",
        "step-00000002/fleet-pieces-0123abcd",
        "step-00000009/fleet-pieces-0",
    ]
    for name in [*places, "step-00000002/notes"]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "server-0-00000.safetensors").write_bytes(b"half")

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        checkpoints = Checkpoints(tmp_path, every_steps=2, keep_last=1, background=False, fleet=job)
        for step in range(6):
            train(model, optimizer, [step])
            if step > 1:
                checkpoints.after_step()

    run_job(body)
    assert names(tmp_path) == ["step-00000002", "step-00000006", "step-00000009"]


def test_later_ones_of_an_earlier_run_are_let_be(tmp_path: Path) -> None:
    """They are no reason to remove what this run has just saved."""

    def body(steps: int) -> Callable[[Fleet, int], None]:
        return lambda job, worker: stepped(job, "sync", steps, tmp_path, every_steps=2, keep_last=1) and None

    run_job(body(6), 1, 1)
    assert names(tmp_path) == ["step-00000006"]
    run_job(body(4), 1, 1)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize(("change", "told"), [("another", "is another one now"), ("none", "is gone"), ("ours", "")])
@pytest.mark.parametrize("background", [False, True])
def test_another_job_that_saves_to_the_same_root_is_told_of(
    background: bool, change: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would remove or replace what the other has saved. A job that saves one step again is alone."""

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "sync")
        with Checkpoints(tmp_path, every_steps=1, keep_last=2, background=background, fleet=job) as checkpoints:
            for step in range(4):
                train(model, optimizer, [step])
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())
                ours = tmp_path / f"step-{step + 1:08d}"
                if change == "ours":
                    checkpoints.save()
                elif step in (0, 1):
                    shutil.rmtree(ours)
                    if change == "another":
                        job.save_persistables(ours)

    with caplog.at_level(logging.WARNING, "fleet.checkpoint"):
        Job(body).run()
    warned = [record.getMessage() for record in caplog.records if "give each its own" in record.getMessage()]
    assert len(warned) == bool(told), "once"
    assert all(told in each and "the checkpoint of step 1 in" in each for each in warned)


@pytest.mark.parametrize(("every", "calls", "warns"), [(2, False, True), (9, False, False), (2, True, False)])
def test_a_loop_that_never_says_that_a_step_is_over_is_told_of(
    every: int, calls: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "sync")
        with Checkpoints(tmp_path, every_steps=every, fleet=job) as checkpoints:
            for step in range(4):
                train(model, optimizer, [step])
                if calls:
                    checkpoints.after_step()

    with caplog.at_level(logging.WARNING, "fleet.checkpoint"):
        run_job(body, 2, 1)
    warned = [each for each in caplog.messages if "at step 4: after_step() was never called" in each]
    assert len(warned) == warns, "by the first worker"


def test_a_job_that_has_loaded_its_last_step_is_not_told_of_steps_that_it_did_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job, "sync")
        with Checkpoints(tmp_path, every_steps=2, fleet=job) as checkpoints:
            latest = Checkpoints.latest(tmp_path)
            if latest is not None:
                job.load_persistables(latest)
            for step in range(0 if latest is None else 4, 4):
                train(model, optimizer, [step])
                checkpoints.after_step()

    with caplog.at_level(logging.WARNING, "fleet.checkpoint"):
        for _ in range(2):
            run_job(body, 1, 1)
    assert "after_step() was never called" not in caplog.text


def test_the_latest_is_one_that_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Checkpoints.latest(tmp_path / "none") is None
    run_job(lambda job, worker: stepped(job, "sync", 3, tmp_path, every_steps=1, full_every=2) and None, 1, 1)
    (tmp_path / "step-00000009" / "fleet-pieces-0a0a0a0a").mkdir(parents=True)
    (tmp_path / ".step-00000010.0a0a0a0a").mkdir()
    (tmp_path / "step-000000012").mkdir()
    assert Checkpoints.latest(tmp_path) == str(tmp_path / "step-00000003")
    assert "passing by" not in caplog.text
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    assert Checkpoints.latest(tmp_path) == str(tmp_path / "step-00000002")
    assert "passing by what is no complete checkpoint" in caplog.text
    shutil.rmtree(tmp_path / "step-00000001")
    assert Checkpoints.latest(tmp_path) is None, "step 2 is a delta on it"


def test_in_a_store() -> None:
    root = "memory://periodic/run"
    try:
        run_job(
            lambda job, worker: stepped(job, "async", 5, root, every_steps=1, full_every=2, keep_last=2) and None, 1, 2
        )
        assert Checkpoints.latest(root) == f"{root}/step-00000005"
        fs = fsspec.filesystem("memory")
        assert sorted(Path(each).name for each in fs.ls("/periodic/run", detail=False)) == [
            *("step-00000003", "step-00000004", "step-00000005")
        ]
    finally:
        fsspec.filesystem("memory").rm("/periodic", recursive=True)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ConfigurationError, "it is not said when checkpoints are due"),
        ({"every_steps": 0}, ConfigurationError, "every_steps is out of range; expected at least 1; got 0"),
        ({"every_steps": 1.5}, ArgumentTypeError, "every_steps must be an int"),
        ({"every_s": -1}, ConfigurationError, "every_s is out of range"),
        ({"every_s": 1e10}, ConfigurationError, "every_s is out of range; expected above 0 and below 1e\\+09"),
        ({"every_s": "1"}, ArgumentTypeError, "every_s must be a number of seconds"),
        ({"every_steps": 1, "keep_last": 0}, ConfigurationError, "keep_last is out of range"),
        ({"every_steps": 1, "full_every": True}, ArgumentTypeError, "full_every must be an int"),
        ({"every_steps": 1, "full_every": None}, ArgumentTypeError, "full_every must be an int"),
        ({"every_s": 10**400}, ConfigurationError, "every_s is out of range; expected what a float can hold"),
        ({"every_steps": 1, "background": "yes"}, ArgumentTypeError, "background must be True, False or None"),
        ({"every_steps": 1, "root": 3}, ArgumentTypeError, "dirname must be a path or a URL"),
        ({"every_steps": 1, "fleet": 3}, ArgumentTypeError, "fleet must be a fleet.Fleet or None"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], error: type[FleetError], words: str, one_job: Fleet, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        Checkpoints(**{"root": tmp_path, "fleet": one_job, **options})


@pytest.fixture(scope="module")
def one_job() -> Iterator[Fleet]:
    job = Fleet(environ={})
    job.init()
    join(job)
    yield job
    job.stop_worker()


def test_a_time_that_is_refused_leaves_the_call_to_be_made(tmp_path: Path) -> None:
    """On all workers, whoever writes: they make it together, and bring their states."""

    def body(job: Fleet, worker: int) -> None:
        model, optimizer = join(job)
        checkpoints = Checkpoints(tmp_path, every_steps=100, fleet=job, state={"worker": worker})
        train(model, optimizer, [worker])
        for call in (checkpoints.save, checkpoints.close):
            with pytest.raises(ConfigurationError, match="within_s is out of range"):
                call(within_s=0)
            call()

    run_job(body, workers=2)
    assert Checkpoints.latest(tmp_path) is not None


def test_calls_at_the_wrong_moment(one_job: Fleet, tmp_path: Path) -> None:
    with pytest.raises(NotInitializedError, match=r"Checkpoints\(\) came before fleet.init\(\)"):
        Checkpoints(tmp_path, every_steps=1, fleet=Fleet(environ={}))
    fresh = Fleet(environ={})
    fresh.init()
    with pytest.raises(NotInitializedError, match=r"Checkpoints\(\) came before fleet.init_worker\(\)"):
        Checkpoints(tmp_path, every_steps=1, fleet=fresh)
    checkpoints = Checkpoints(tmp_path, every_steps=1, fleet=one_job)
    checkpoints.close()
    checkpoints.close()
    for call in (checkpoints.after_step, checkpoints.save):
        with pytest.raises(StateError, match=r"came after close\(\)"):
            call()
    assert Checkpoints.default is fleet.init.__self__, "the job of `import fleet`"
