"""What else belongs to a job: schedules, positions in data, plain values, of every worker."""

from __future__ import annotations

import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job, until
from hypothesis import given, settings
from hypothesis import strategies as st
from small_job import STRATEGIES, join, train

from fleet import Checkpoints, Fleet
from fleet.checkpoint.state import decoded, encoded, restore
from fleet.data import Floats, MultiSlot, write_multislot
from fleet.errors import ArgumentTypeError, CheckpointError, UnsupportedError

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
@settings(max_examples=200, deadline=None)
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


def test_damaged_bytes_are_refused() -> None:
    whole = encoded({"t": torch.arange(3), "d": Odd({"x": (1.5, b"2")})})
    for at_ in range(len(whole)):
        for value in (0, 0x5B, 0x30):
            damaged = whole.copy()
            damaged[at_] = value
            try:
                decoded(damaged, "here")
            except CheckpointError as error:
                assert "cannot be read" in str(error)


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
        assert job.resume_step() == 6
        before = list(me.state["seen"])
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
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are there again at once."""
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.002)


def abandon(job: Fleet) -> None:
    """Fall silent, as a process does that is killed."""
    assert job._chosen is not None
    worker = job._chosen._worker
    assert worker is not None
    worker.close()


def again(job: Fleet, old: Fleet) -> Fleet:
    """Another process under the same index."""
    made = Fleet(environ=old._environ, network=old._network)
    made._assignment, made._knobs = old._assignment, old._knobs
    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_starts_again_has_what_it_kept(strategy: str, servers: int, files: Path) -> None:
    """It belongs to the step it goes on after, with servers that keep nothing on disk too."""
    environ = {**PATIENT, "FLEET_JOB_ID": "kept", "FLEET_BEAT": "0.05"}

    def body(job: Fleet, index: int) -> list[int]:
        me = Worker(job, strategy, files)
        me.went_on()
        for _ in range(4):
            number = next(me._numbers)
            me.state["seen"] = [*me.state["seen"], number]
            job.keep_state(me.state)
            train(me.model, me.optimizer, [number])
        assert job._chosen is not None
        job._chosen._running_worker("flush").flush()
        abandon(job)
        second = again(job, job)
        fresh = Worker(second, strategy, files)
        assert fresh.went_on()
        assert second.resume_step() == 4
        assert fresh.state["seen"] == [0, 1, 2, 3]
        seen = [fresh.step() for _ in range(2)]
        second.stop_worker()
        job._chosen = second._chosen
        return seen

    ((seen),) = run_job(body, 1, servers, environ=environ)
    assert seen == [4, 5]


def test_what_was_kept_last_may_be_ahead_of_where_a_worker_goes_on() -> None:
    """A server has the last step, another one lacks it: the worker takes it once more, and has what came before it."""
    from fleet.ps.server.states import Share, States

    states = States(lockstep=True)
    for step in (1, 2, 3):
        states.keep(0, step, Share(np.full(1, step, np.uint8), step))
    states.keep(0, 1, Share(np.zeros(1, np.uint8), 1))
    found = [states.of(0, step, 0) for step in (1, 2, 3, 9)]
    assert [None if each is None else int(each.data[0]) for each in found] == [None, 2, 3, 3]
