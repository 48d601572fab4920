"""What else belongs to a job: schedules, positions in data, plain values, of every worker."""

from __future__ import annotations

import json
import logging
import math
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dying import ENVIRON, MOMENTS, DyingJob, at, every
from harness import PATIENT, Job, run_job, until
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import flush, leave
from small_job import STRATEGIES, join, train

from fleet import Checkpoints, Fleet
from fleet.checkpoint.manifest import Checkpoint, Manifest
from fleet.checkpoint.pieces import PieceFile
from fleet.checkpoint.state import decoded, encoded, restore, states_in
from fleet.data import Floats, MultiSlot, write_multislot
from fleet.errors import ArgumentTypeError, CheckpointError, ConfigurationError, UnsupportedError
from fleet.launch import cli
from fleet.plan.specs import JobSpec, PlanSettings
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.object_states import ObjectState, ObjectStates
from fleet.ps.worker import connection
from fleet.role_maker import Role, UserDefinedRoleMaker

# ---------------------------------------------------------------------------------------------- as bytes


def back(value: Any) -> Any:
    state = {"it": None}
    restore(state, encoded({"it": value}), "here")
    return state["it"]


def alike(one: Any, other: Any) -> bool:
    """Equal, and of one type all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and alike(one.tolist(), other.tolist())
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or one != one


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(nested)
@settings(max_examples=60, deadline=None)
def test_whatever_is_plain_comes_back_as_it_was(value: Any) -> None:
    assert alike(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.arange(6.0).reshape(2, 3)[:, ::2],
        {1: "int", "1": "text", (2, None): [math.nan, -math.inf]},
        OrderedDict([("b", 1), ("a", (2,))]),
        Counter({3: 2}),
        {1, 2},
        10**400,
        -(10**5000),
        "\ud800",
    ],
    ids=lambda value: type(value).__name__,
)
def test_types_are_kept(value: Any) -> None:
    assert alike(back([value]), [value])


class Odd:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Named(tuple[int, ...]):
    pass


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"s": Odd({"lambdas": [math.sin]})}, r"state\['s'\]\['lambdas'\]\[0\] is a builtin_function_or_method, which"),
        ({"s": Odd({"anneal": Odd({}).state_dict})}, r"state\['s'\]\['anneal'\] is a method, which cannot be kept"),
        ({"best": object()}, r"state\['best'\] is an object, which"),
        ({"best": [1, {"x": Named([1])}]}, r"state\['best'\]\[1\]\['x'\] is a Named, which"),
        ({"kind": torch.optim.lr_scheduler.StepLR}, r"state\['kind'\] is a class, which"),
        ({"t": torch.ones(2).to_sparse()}, r"state\['t'\] is a Tensor, which cannot be kept; expected a plain tensor"),
        ({"a": np.array([object()])}, r"state\['a'\] is a ndarray, which"),
        ({"a": np.ma.array([1, 2], mask=[0, 1])}, r"state\['a'\] is a MaskedArray, which"),
    ],
)
def test_what_has_no_place_in_it_is_refused_by_its_name(state: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        encoded(state)


def test_what_goes_round_in_circles_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        encoded({"circle": circle})


@pytest.mark.parametrize("state", [[], {1: 2}, "schedule"])
def test_a_state_is_a_dict_of_names(state: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="state must be a dict of objects by name"):
        encoded(state)


def test_all_is_looked_at_before_anything_is_given() -> None:
    data = encoded({"one": Odd(1), "two": 2})
    one = Odd(None)
    for asked, told in (
        ({"one": one, "three": 3}, "'three' is not in it"),
        ({"one": one, "two": Odd(2)}, "'two' is a value there, and an object here"),
        ({"one": 1}, "'one' is an object there, and a value here"),
    ):
        with pytest.raises(CheckpointError, match=told):
            restore(asked, data, "here")
    assert one.loaded is None
    some = {"two": None}
    restore(some, data, "here")
    assert some == {"two": 2}, "some of the names are enough"


def test_damaged_bytes_are_read_or_refused() -> None:
    """Whatever stands there, it ends in no other error; and most damage is noticed."""
    refused = 0
    whole = encoded({"t": torch.arange(3), "d": Odd({"x": (1.5, b"2")})})
    for at_ in range(len(whole)):
        for value in (0, 0x5B, 0x30):
            damaged = whole.copy()
            damaged[at_] = value
            try:
                decoded(damaged, "here")
            except CheckpointError:
                refused += 1
    assert refused > len(whole)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multi-step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 6]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=8),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=2),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_schedule_goes_on_with_what_it_had_set(name: str, tensor: bool) -> None:
    """The learning rate stands in the optimizer, and nowhere else."""
    if tensor and name in ("cyclic", "one-cycle", "plateau"):
        pytest.skip("torch's own state of these has tensors that are the optimizer's")

    def made() -> tuple[torch.optim.Optimizer, Any]:
        lr: Any = torch.tensor(0.1) if tensor else 0.1
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def go(optimizer: Any, schedule: Any, steps: int) -> list[tuple[float, float]]:
        seen = []
        for _ in range(steps):
            seen.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]))
            optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = made(), made()
        go(*first, 5)
        data = encoded({"schedule": first[1]})
        restore({"schedule": second[1]}, data, "here")
        assert go(*second, 6) == go(*first, 6)


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["lambda", "step", "one-cycle"])
def test_a_schedule_of_other_param_groups_is_refused(name: str, then: int, now: int) -> None:
    """As torch refuses the optimizer's state; the schedule could not set the rates of the groups that are there."""

    def made(groups: int) -> Any:
        parts = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1 + at} for at in range(groups)]
        return SCHEDULES[name](torch.optim.SGD(parts, momentum=0.9))

    schedule = made(now)
    before = schedule.state_dict(), [group["lr"] for group in schedule.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=f"'schedule' is of {then} param groups there, and of {now} here"):
        restore({"schedule": schedule}, encoded({"schedule": made(then)}), "here")
    assert (schedule.state_dict(), [group["lr"] for group in schedule.optimizer.param_groups]) == before


def test_what_others_make_has_a_state() -> None:
    """A scaler, and a loader that other libraries have, shuffled."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> dict[str, Any]:
        numbers = list(range(100))
        loader = loaders.StatefulDataLoader(numbers, batch_size=2, shuffle=True, generator=torch.Generator())
        return {"loader": loader, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}

    first, second = made(), made()
    batches = iter(first["loader"])
    for _ in range(7):
        next(batches)
    first["scaler"].scale(torch.ones(1))
    first["scaler"].update(2.0)
    restore(second, encoded(first), "here")
    assert [batch.tolist() for batch in second["loader"]] == [batch.tolist() for batch in batches]
    assert second["scaler"].get_scale() == 2.0


# ---------------------------------------------------------------------------------------------- in jobs


class Worker:
    """A worker with a schedule, data of its own and a plain value."""

    def __init__(self, job: Fleet, strategy: str, files: Path) -> None:
        self.job = job
        self.model, self.optimizer = join(job, strategy)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.data = MultiSlot([str(files)], {"number": Floats(1)}, batch_size=1)
        self.state: dict[str, Any] = {"schedule": self.schedule, "data": self.data, "seen": []}

    def went_on(self) -> bool:
        found = self.job.load_state(self.state)
        self._numbers = (int(batch["number"].item()) for batch in self.data)
        return found

    def step(self) -> int:
        """Returns what was read."""
        number = next(self._numbers)
        self.state["seen"] = [*self.state["seen"], number]
        train(self.model, self.optimizer, [number])
        self.schedule.step()
        return number

    @property
    def lr(self) -> float:
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr


@pytest.fixture
def files(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    with path.open("w") as file:
        write_multislot(file, [{"number": float(number)} for number in range(40)], {"number": Floats(1)})
    return path


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_goes_on_where_it_was(strategy: str, workers: int, tmp_path: Path, files: Path) -> None:
    """Schedule, data and values of each worker, from what was saved behind the training, by other servers."""
    root = tmp_path / "ckpt"

    def first(job: Fleet, index: int) -> None:
        me = Worker(job, strategy, files)
        assert not me.went_on()
        with Checkpoints(root, every_steps=3, full_every=2, state=me.state, fleet=job) as checkpoints:
            for _ in range(6):
                me.step()
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())
            job.barrier_worker()

    def then(job: Fleet, index: int) -> tuple[list[int], list[int], float]:
        me = Worker(job, strategy, files)
        assert me.went_on()
        before = list(me.state["seen"])
        assert job.resume_step() == len(before)
        read = [me.step(), me.step()]
        return before, read, me.lr

    run_job(first, workers, 2)
    latest = Checkpoints.latest(root)
    assert latest is not None
    assert latest.endswith("step-00000006")
    for before, read, lr in run_job(then, workers, 1, model_dir=latest):
        taken = len(before)
        assert before == list(range(taken)), "each sample once"
        assert read == [taken, taken + 1]
        if strategy == "sync" or workers == 1:
            assert taken == 6
        assert lr == 0.1 * 0.5 ** ((taken + 2) // 2)


# ---------------------------------------------------------------------------------------------- kept with steps


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are there again at once."""
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)


def keep_and_step(me: Worker) -> None:
    """What is kept describes the step it goes with; the schedule has its turn at the head of the next."""
    if me.job.resume_step() or me.state["seen"]:
        me.schedule.step()
    number = next(me._numbers)
    me.state["seen"] = [*me.state["seen"], number]
    me.job.keep_state(me.state)
    train(me.model, me.optimizer, [number])


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        *((strategy, "in memory") for strategy in STRATEGIES),
        *(("sync", kept) for kept in ("in a journal", "in snapshots")),
        *(("geo", "in a journal"), ("half-async", "in snapshots")),
    ],
)
@pytest.mark.usefixtures("impatient")
@pytest.mark.pairs(2)
def test_a_worker_that_starts_again_has_what_it_kept(strategy: str, kept: str, tmp_path: Path, files: Path) -> None:
    """It belongs to the step that it goes on after, however often servers are killed."""
    environ = {**ENVIRON, "FLEET_JOB_ID": "one", "FLEET_HEARTBEAT_S": "0.1"}

    def body(job: Fleet, index: int) -> tuple[list[int], float]:
        if index == 1:
            first = Fleet(environ=environ, network=running.network)
            first.init(UserDefinedRoleMaker(1, Role.WORKER, 2, running.endpoints))
            me = Worker(first, strategy, files)
            assert not me.went_on()
            for _ in range(4):
                keep_and_step(me)
            flush(first)
            leave(first)
            if isinstance(running, DyingJob):
                running.hosts[0].kill()
        me = Worker(job, strategy, files)
        assert me.went_on() == (index == 1)
        assert me.state["seen"] == [*range(job.resume_step())]
        while len(me.state["seen"]) < 6:
            keep_and_step(me)
        return me.state["seen"], me.lr

    running: Job = Job(body, 2, 2, environ=environ)
    if kept != "in memory":
        die = every(3, 1)
        plan = lambda server, kind, number: die(server, kind, number) if kind == "push" else None  # noqa: E731
        size = 1 if kept == "in snapshots" else 1 << 30
        running = DyingJob(body, tmp_path / "durable", environ=environ, plan=plan, journal_bytes=size)
    for seen, lr in running.run():
        assert seen == [0, 1, 2, 3, 4, 5]
        assert lr == 0.1 / 4


def test_what_was_kept_last_may_be_ahead_of_where_a_worker_goes_on() -> None:
    """A server has the last step, another one lacks it: the worker takes it once more, and has what came before it."""
    states = ObjectStates(lockstep=True)
    for step in (1, 2, 3):
        states.keep(0, step, ObjectState(np.full(1, step, np.uint8), step))
    states.keep(0, 1, ObjectState(np.zeros(1, np.uint8), 1))
    found = [states.of(0, step) for step in (1, 2, 3, 9)]
    assert [None if each is None else int(each.data[0]) for each in found] == [None, 2, 3, 3]


@pytest.mark.parametrize(
    "about",
    [
        {"states": [0], "steps": [-1]},
        {"states": [0], "steps": [1.5]},
        {"states": [0], "steps": [1 << 70]},
        {"states": [0], "steps": [[]]},
        {"states": [-1], "steps": [1]},
        {"states": ["0"], "steps": [1]},
        {"states": [0, 1], "steps": [1]},
        {"states": [0, 1], "steps": [1, 1]},
        {"states": {}, "steps": [1]},
        {"states": [0], "steps": 1},
        {"states": [0]},
    ],
)
def test_a_manifest_says_of_each_state_whose_it_is_and_after_how_many_steps(
    about: dict[str, Any], tmp_path: Path
) -> None:
    """In a job with rounds all are at its step, however late they have joined."""

    def written(about: dict[str, Any], mode: str = "sync") -> Path:
        piece = PieceFile("workers.safetensors", 1, 1, ("worker-0",), about)
        manifest = Manifest("it", 7, 0, JobSpec((), (), (), PlanSettings(1, 1, mode=mode)), (piece,))
        (tmp_path / "manifest.json").write_text(manifest.to_json())
        return tmp_path

    good = {"states": [0], "steps": [1]}
    assert restore_from(written(good, "ssp")).steps == {0: 1}
    assert restore_from(written(good)).steps == {0: 7}
    with pytest.raises(CheckpointError, match="the manifest"):
        restore_from(written(about))


# ---------------------------------------------------------------- who gives, and who waits


class Plain:
    """A worker with nothing but plain values."""

    def __init__(self, job: Fleet, strategy: str) -> None:
        self.job = job
        self.model, self.optimizer = join(job, strategy)
        self.state: dict[str, Any] = {"worker": job.worker_index(), "steps": 0}

    def step(self) -> None:
        train(self.model, self.optimizer, [self.state["steps"]])
        self.state["steps"] += 1


def held(where: object) -> dict[int, dict[str, Any]]:
    """What a checkpoint has of each worker."""
    found = {}
    for worker, steps, data in states_in(Checkpoint.open(where)):
        found[worker] = {name: entry["value"] for name, entry in decoded(data, "here").items()}
        assert found[worker]["steps"] == steps
    return found


def every_one(steps: int, workers: int) -> dict[int, dict[str, Any]]:
    return {worker: {"worker": worker, "steps": steps} for worker in range(workers)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.pairs(2)
def test_a_save_holds_the_state_of_each_that_makes_it(strategy: str, who: str, tmp_path: Path) -> None:
    def body(job: Fleet, index: int) -> tuple[bool, dict[str, Any]]:
        me = Plain(job, strategy)
        for _ in range(3):
            me.step()
        if who == "all" or index == 0:
            job.save_persistables(tmp_path / "ckpt", state=me.state)
        me.step()
        job.barrier_worker()
        if index == 1:
            job.load_persistables(tmp_path / "ckpt")
        job.barrier_worker()
        return job.load_state(me.state), me.state

    found = run_job(body, 2, 2)
    assert held(tmp_path / "ckpt") == every_one(3, 2 if who == "all" else 1)
    assert found[0] == (True, {"worker": 0, "steps": 3})
    assert found[1] == ((True, {"worker": 1, "steps": 3}) if who == "all" else (False, {"worker": 1, "steps": 4}))


def test_workers_that_were_not_there_have_the_first_ones(tmp_path: Path) -> None:
    def first(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        me.step()
        job.save_persistables(tmp_path / "ckpt", state=me.state)

    def then(job: Fleet, index: int) -> int:
        me = Plain(job, "sync")
        assert job.load_state(me.state)
        number: int = me.state["worker"]
        return number

    run_job(first, 2, 1)
    assert run_job(then, 4, 2, model_dir=str(tmp_path / "ckpt")) == [0, 1, 0, 0]
    assert run_job(then, 1, 2, model_dir=str(tmp_path / "ckpt")) == [0]


OWN_STEPS = [strategy for strategy in STRATEGIES if strategy != "sync"]


def go_different_ways(strategy: str, where: Path) -> Callable[[Fleet, int], None]:
    """Worker 0 takes 2 steps and worker 1 takes 5 before both save."""

    def body(job: Fleet, index: int) -> None:
        me = Plain(job, strategy)
        for _ in range((2, 5)[index]):
            me.step()
        job.barrier_worker()
        job.save_persistables(where, state=me.state)

    return body


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", OWN_STEPS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_where_workers_share_no_step_each_goes_on_after_its_own_last_one(
    strategy: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the one that its state belongs to, on every server, and in the checkpoint that follows."""

    def then(job: Fleet, index: int) -> tuple[int, int]:
        me = Plain(job, strategy)
        assert job.load_state(me.state)
        found = job.resume_step(), me.state["steps"]
        me.step()
        job.barrier_worker()
        job.save_persistables(tmp_path / "next", state=me.state)
        return found

    run_job(go_different_ways(strategy, tmp_path / "ckpt"), 2, 2)
    expected = [(2, 2), (5, 5), (2, 2)][:workers]
    with caplog.at_level(logging.WARNING):
        assert run_job(then, workers, 3, model_dir=str(tmp_path / "ckpt")) == expected
    assert "belongs to step" not in caplog.text
    assert {worker: each["steps"] for worker, each in held(tmp_path / "next").items()} == {
        worker: steps + 1 for worker, (steps, _) in enumerate(expected)
    }


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", OWN_STEPS)
def test_a_running_job_goes_back_to_where_each_workers_state_was(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(job: Fleet, index: int) -> tuple[int, int]:
        me = Plain(job, strategy)
        for _ in range((2, 5)[index]):
            me.step()
        job.barrier_worker()
        job.save_persistables(tmp_path / "ckpt", state=me.state)
        me.step()
        job.barrier_worker()
        if index == 0:
            job.load_persistables(tmp_path / "ckpt")
        job.barrier_worker()
        assert job.load_state(me.state)
        return job.resume_step(), me.state["steps"]

    with caplog.at_level(logging.WARNING):
        assert run_job(body, 2, 2) == [(2, 2), (5, 5)]
    assert "belongs to step" not in caplog.text


@pytest.mark.pairs(1)
@pytest.mark.parametrize("kept", ["in a journal", "in snapshots"])
@pytest.mark.parametrize("strategy", ["async", "geo"])
@pytest.mark.usefixtures("impatient")
def test_durable_servers_know_where_each_workers_state_was(strategy: str, kept: str, tmp_path: Path) -> None:
    environ = {**ENVIRON, "FLEET_JOB_ID": "one", "FLEET_HEARTBEAT_S": "0.1"}

    def then(job: Fleet, index: int) -> tuple[int, int]:
        first = Fleet(environ=environ, network=dying.network)
        first.init(UserDefinedRoleMaker(index, Role.WORKER, 2, dying.endpoints))
        me = Plain(first, strategy)
        assert first.load_state(me.state)
        me.step()
        first.barrier_worker()
        if index == 0:
            for host in dying.hosts:
                host.kill()
        first.barrier_worker()
        leave(first)
        return Plain(job, strategy).job.resume_step(), me.state["steps"]

    run_job(go_different_ways(strategy, tmp_path / "ckpt"), 2, 2)
    size = 1 if kept == "in snapshots" else 1 << 30
    where = str(tmp_path / "ckpt")
    dying = DyingJob(then, tmp_path / "durable", environ=environ, model_dir=where, journal_bytes=size)
    assert dying.run() == [(3, 3), (6, 6)]


def test_a_state_of_a_worker_without_rounds_is_not_of_the_step_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job that goes on is in lockstep, and the one that was saved was not."""

    def then(job: Fleet, index: int) -> int:
        me = Plain(job, "sync")
        assert job.load_state(me.state)
        return job.resume_step()

    run_job(go_different_ways("async", tmp_path / "ckpt"), 2, 2)
    version = Checkpoint.open(tmp_path / "ckpt").manifest.version
    with caplog.at_level(logging.WARNING):
        assert run_job(then, 2, 1, model_dir=str(tmp_path / "ckpt")) == [version] * 2
    told = [f"belongs to step {step}, and this worker goes on after step {version}" in caplog.text for step in (2, 5)]
    assert told == [version == 5, version == 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_whose_state_is_not_in_the_checkpoint_says_so(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of one that had left when that was saved."""

    def first(job: Fleet, index: int) -> None:
        me = Plain(job, strategy)
        assert not job.load_state(me.state)
        me.step()
        job.barrier_worker()
        if index == 0:
            job.save_persistables(tmp_path / "ckpt", state=me.state)
        job.barrier_worker()

    def then(job: Fleet, index: int) -> bool:
        me = Plain(job, strategy)
        return job.load_state(me.state)

    with caplog.at_level(logging.WARNING):
        run_job(first, 2, 1)
        assert "without a state" not in caplog.text
        assert run_job(then, 2, 1, model_dir=str(tmp_path / "ckpt")) == [True, False]
    assert caplog.text.count("without a state") == 1
    assert "worker 1 goes on after step 1 without a state" in caplog.text


@pytest.mark.parametrize("without", [0, 1])
def test_a_worker_without_a_state_holds_nobody_up(without: int, tmp_path: Path) -> None:
    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        state = None if index == without else me.state
        with Checkpoints(tmp_path, every_steps=2, state=state, fleet=job) as checkpoints:
            for _ in range(4):
                me.step()
                checkpoints.after_step()
                until(lambda: not checkpoints._is_writing())

    run_job(body, 2, 1)
    for step in (2, 4):
        found = held(tmp_path / f"step-0000000{step}")
        assert found == {1 - without: {"worker": 1 - without, "steps": step}}


def test_in_lockstep_each_is_saved_as_it_was_after_that_step(tmp_path: Path) -> None:
    """Though a checkpoint is due by the first worker's clock, or is put off, and others are slow."""

    class Time:
        def __init__(self) -> None:
            self.time = 0.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            raise AssertionError

    clock = Time()

    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        with Checkpoints(tmp_path, every_s=10, state=me.state, fleet=job, clock=clock) as checkpoints:
            for step in range(12):
                me.step()
                if index == 0 and step in (2, 5):
                    clock.time += 20
                if index == 1 and step % 3 == 0:
                    threading.Event().wait(0.02)
                checkpoints.after_step()
                if index == 0:
                    until(lambda: not checkpoints._is_writing())
            checkpoints.save()

    run_job(body, 3, 2)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-00000004", "step-00000007", "step-00000012"], "the first step that all could hear of"
    for name in found:
        assert held(tmp_path / name) == every_one(int(name[-2:]), 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_has_left_is_not_waited_for(strategy: str, tmp_path: Path) -> None:
    def body(job: Fleet, index: int) -> None:
        me = Plain(job, strategy)
        with Checkpoints(tmp_path, every_steps=2, state=me.state, fleet=job, background=False) as checkpoints:
            for _ in range(3 if index == 1 else 4):
                me.step()
                checkpoints.after_step()
        if index == 1:
            job.stop_worker()

    errors = Job(body, 2, 1)
    errors.join(errors.start())
    assert not {name for name in errors.errors if name != "worker 1"}, errors.errors
    found = held(tmp_path / "step-00000004")
    assert found[0] == {"worker": 0, "steps": 4}


def test_a_checkpoint_goes_on_without_the_state_of_one_that_waits_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot come to it before the one that saves has gone on."""

    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        with Checkpoints(tmp_path, every_steps=2, state=me.state, fleet=job, background=False) as checkpoints:
            for step in range(2):
                me.step()
                if index == 0 or step == 0:
                    checkpoints.after_step()
            job.barrier_worker()

    with caplog.at_level(logging.WARNING):
        run_job(body, 2, 1)
    assert held(tmp_path / "step-00000002") == every_one(2, 1)
    assert "the state of worker 1 is not in the checkpoint" in caplog.text


def test_a_worker_that_is_busy_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    saved = threading.Event()

    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        me.step()
        if index == 0:
            job.save_persistables(tmp_path / "ckpt", state=me.state)
            saved.set()
        else:
            assert saved.wait(60)

    run_job(body, 2, 1, environ={**PATIENT, "FLAGS_rpc_deadline": "1000", "FLEET_HEARTBEAT_S": "0.05"})
    assert held(tmp_path / "ckpt") == every_one(1, 1)


@pytest.mark.pairs(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_killed_amid_states_has_them_again(moment: str, tmp_path: Path) -> None:
    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        with Checkpoints(tmp_path / "ckpt", every_steps=2, state=me.state, fleet=job, background=False) as checkpoints:
            for _ in range(4):
                me.step()
                checkpoints.after_step()
        job.barrier_worker()

    job = DyingJob(body, tmp_path / "durable", plan=at("give", moment, times=3), journal_bytes=1)
    job.run()
    assert job.kills == 3
    for step in (2, 4):
        assert held(tmp_path / "ckpt" / f"step-0000000{step}") == every_one(step, 2)


def test_a_durable_job_has_the_states_of_its_checkpoint_still(tmp_path: Path) -> None:
    def first(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        me.step()
        job.save_persistables(tmp_path / "ckpt", state=me.state)

    def then(job: Fleet, index: int) -> int:
        me = Plain(job, "sync")
        dying.hosts[0].kill()
        assert job.load_state(me.state)
        number: int = me.state["worker"]
        return number

    run_job(first, 2, 1)
    dying = DyingJob(then, tmp_path / "durable", servers=1, model_dir=str(tmp_path / "ckpt"))
    assert dying.run() == [0, 1]


def test_what_is_not_of_the_step_that_a_worker_goes_on_after_is_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {**PATIENT, "FLEET_JOB_ID": "one", "FLEET_HEARTBEAT_S": "0.05"}

    def body(job: Fleet, index: int) -> None:
        first = Fleet(environ=environ, network=running.network)
        first.init(UserDefinedRoleMaker(0, Role.WORKER, 1, running.endpoints))
        me = Plain(first, "sync")
        me.step()
        first.save_persistables(tmp_path / "ckpt", state=me.state)
        first.load_persistables(tmp_path / "ckpt")
        assert first.load_state(me.state)
        first.keep_state(me.state)
        me.step()
        assert first.load_state(me.state)
        assert "belongs to step" not in caplog.text
        me.step()
        leave(first)
        me = Plain(job, "sync")
        assert job.load_state(me.state)
        assert "belongs to step 2, and this worker goes on after step 3" in caplog.text

    running = Job(body, environ=environ)
    with caplog.at_level(logging.WARNING):
        running.run()


def test_a_state_is_no_larger_than_a_message(tmp_path: Path) -> None:
    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        large = {"large": torch.zeros(1 << 20)}
        for call in (
            lambda: job.keep_state(large),
            lambda: job.save_persistables(tmp_path / "ckpt", state=large),
        ):
            with pytest.raises(ConfigurationError, match=r"state is larger than .*at most 1 MiB .*got 4.0 MiB"):
                call()
        me.step()

    run_job(body, environ={**PATIENT, "FLEET_MAX_MESSAGE_MB": "1"})
    assert not (tmp_path / "ckpt").exists()


# ---------------------------------------------------------------------------------------------- looking at it


def test_the_commands_show_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(job: Fleet, index: int) -> None:
        me = Plain(job, "sync")
        me.state["data"] = Odd({"at": index, "tensor": torch.arange(3)})
        for name, mode in (("one", "full"), ("two", "delta")):
            me.step()
            me.state["data"].state["tensor"] = torch.arange(3) * me.state["steps"]
            job.save_persistables(tmp_path / name, mode, state=me.state)

    run_job(body, 2, 2)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert cli.main(["checkpoint", "ls", two]) == 0
    shown = capsys.readouterr().out
    assert shown.split("worker  step")[1].split("\n")[1].split()[:2] == ["0", "2"]
    assert "worker, steps, data" in shown
    assert cli.main(["checkpoint", "ls", two, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["states"]
    assert [(each["worker"], each["step"]) for each in told] == [(0, 2), (1, 2)]
    assert cli.main(["checkpoint", "verify", two]) == 0
    assert cli.main(["checkpoint", "diff", one, two]) == 1
    shown = capsys.readouterr().out
    assert "worker 1 steps" in shown
    assert "worker 0 data.tensor" in shown
    assert "worker 1 data.at" not in shown
    assert cli.main(["checkpoint", "export", two, str(tmp_path / "all.safetensors"), "--state"]) == 0
