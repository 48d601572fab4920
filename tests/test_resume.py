"""``fleet.resume_from``: a job goes on where it was, whatever is there of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENT, Job, assert_close, run_job, until
from small_job import join, same, train

from fleet import Checkpoints, Fleet, exit_guard
from fleet.checkpoint.writer import CheckpointWriter
from fleet.ps import resuming
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.worker import client
from fleet.role_maker import Role

STEPS, EVERY = 8, 3


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.005)


class Killed(BaseException):
    """Nothing in a worker may hold this up."""


class Resuming(Job):
    """A job in which every role resumes, and which can be killed as a whole."""

    def __init__(self, root: object, body: Callable[[Fleet, int], Any], *given: Any, **options: Any) -> None:
        self.root = root
        self.strict = options.pop("strict", True)
        #: what every role was told
        self.told: dict[str, int] = {}
        self.made: dict[int, Fleet] = {}
        self.runtimes: dict[int, ServerRuntime] = {}
        self.is_killed = threading.Event()
        super().__init__(body, *given, **options)

    def serve(self, index: int) -> None:
        try:
            fleet = self.fleet(Role.SERVER, index)
            self.told[f"server {index}"] = fleet.resume_from(self.root, strict=self.strict)
            self.runtimes[index] = fleet._chosen._listening
            fleet.init_server()
            fleet.run_server()
        except BaseException as error:
            self.errors[f"server {index}"] = error

    def work(self, index: int) -> None:
        fleet = self.made[index] = self.fleet(Role.WORKER, index)
        try:
            self.told[f"worker {index}"] = fleet.resume_from(self.root, strict=self.strict)
            self.results[index] = self.body(fleet, index)
            fleet.stop_worker()
        except Killed:
            self.is_killed.set()
        except BaseException as error:
            self.errors[f"worker {index}"] = error
            if not self.is_killed.is_set():
                fleet._chosen.abort(str(error))

    def run_until_killed(self) -> None:
        """Until somebody raises ``Killed``: then all are, as the machine's end would, and nobody hears a word."""
        threads = self.start()
        until(self.is_killed.is_set)
        for runtime in self.runtimes.values():
            runtime._service.floor.ending.suspend()
        for fleet in self.made.values():
            worker = fleet._chosen._worker
            if worker is not None:
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
        fleet._chosen.abort("killed")
        return told, told, []
    fleet.stop_worker()
    return told, first, seen


# ---------------------------------------------------------------- whatever is there

#: When the job is killed: at which step worker 0 dies, and the newest checkpoint that is whole then.
MOMENTS = {"before the first checkpoint": (2, 0), "between two": (5, 3), "in the midst of one": (None, 3)}


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
    environ = {**PATIENT, "FLEET_JOB_ID": "j", "FLEET_BEAT": "0.1"}
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
