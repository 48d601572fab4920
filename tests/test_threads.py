"""Other threads of a worker call into the job while one of them trains: no step is lost, and none counts twice."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import Job, run_job, until
from inside import is_in_a_meeting
from patience import PATIENCE_S
from small_job import STRATEGIES

import fleet.nn
from fleet import Checkpoints, Fleet
from fleet.base.cluster import Endpoint
from fleet.errors import PlanMismatchError, StateError
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Handler, Listener, Respond

WORKERS, STEPS = 2, 40


class Net(torch.nn.Module):
    """Two tables, asked one after the other, so that look-ups are foreseen; and a dense weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fleet.nn.Embedding(None, 2, initializer="zeros")
        self.second = torch.nn.Embedding(100, 2, sparse=True)
        torch.nn.init.zeros_(self.second.weight)
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids[:, 0]) + self.second(ids[:, 1]) + self.weight


IDS = torch.tensor([[7, 3], [7, 5]])


def end(strategy: str, steps: int = STEPS) -> float:
    """Where the weight ends. A synchronous step is the mean over the workers; in GEO each of two brings half of what it
    has come away from the servers, every two steps, and is as far away as it brought."""
    return {"sync": 2.0 * steps, "geo": WORKERS * (2.0 * steps - 4.0)}.get(strategy, 2.0 * steps * WORKERS)


def join(fleet_: Fleet, strategy: str = "sync") -> tuple[Net, Any]:
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fleet_.distributed_optimizer(sgd, STRATEGIES[strategy](), model=model)
    fleet_.init_worker()
    return model, optimizer


def step(model: Net, optimizer: Any) -> None:
    """Adds 2 to the weight and to row 7, and 1 to row 3, for each worker."""
    optimizer.minimize(-model(IDS)[:, 0].sum())


def learnt(fleet_: Fleet, model: Net) -> tuple[float, float, float, int]:
    """The weight, row 7 of one table and row 3 of the other, as the servers have them, and the worker's steps."""
    state = fleet_.state_dict(model)
    row = state["first.weight"][state["first.ids"] == 7]
    return state["weight"][0].item(), row[0, 0].item(), state["second.weight"][3, 0].item(), fleet_.resume_step()


class Beside:
    """Another thread, which does something over and over again while the ``with`` lasts; a failure of it is raised."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.times = 0
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.001):  # or a thread that does little takes all turns, and 60 steps took 20 s
                self._act()
                self.times += 1
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the thread beside the training hangs"
        if self._failure is not None:
            raise self._failure


def in_another_thread(act: Callable[[], object]) -> BaseException | None:
    """What it raised there."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="beside", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the other thread hangs"
    return failures[0] if failures else None


def evaluate(fleet_: Fleet, model: Net, _: Path) -> None:
    with torch.no_grad():
        model(torch.stack([torch.arange(50), torch.arange(50)], 1))
        model.first(torch.arange(50))


def look_around(fleet_: Fleet, model: Net, _: Path) -> None:
    assert fleet_.summary()["steps"] >= 0
    assert fleet_.resume_step() >= 0
    fleet_.report(examples=1)


def prefetch(fleet_: Fleet, model: Net, _: Path) -> None:
    batches = [torch.arange(start, start + 20) for start in (0, 20, 40)]
    for batch in fleet_.prefetch(batches, lambda batch: {model.first: batch}):
        with torch.no_grad():
            model.first(batch)


def save(fleet_: Fleet, model: Net, where: Path) -> None:
    fleet_.save_persistables(where / "saved")
    assert fleet_.state_dict(model)["second.weight"].shape == (100, 2)


def keep_state(fleet_: Fleet, model: Net, _: Path) -> None:
    fleet_.keep_state({"seen": 1})
    fleet_.load_state({"seen": 0})


#: What another thread of one worker may do by itself.
DEEDS: dict[str, Callable[[Fleet, Net, Path], None]] = {
    "evaluates": evaluate,
    "looks-around": look_around,
    "fetches-ahead": prefetch,
    "saves": save,
    "keeps-state": keep_state,
}


@pytest.mark.pairs(1)
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dc-asgd"])
def test_no_step_is_lost_and_none_counts_twice(strategy: str, deed: str, tmp_path: Path) -> None:
    """With a constant gradient it is known where a job ends, whatever the order of arrival."""
    steps = STEPS if strategy == "geo" else STEPS // 2  # there the last differences become smaller with each exchange

    def body(fleet_: Fleet, worker: int) -> tuple[Any, ...]:
        model, optimizer = join(fleet_, strategy)
        with Beside(
            lambda: DEEDS[deed](fleet_, model, tmp_path) if worker == 0 else threading.Event().wait(0.01)
        ) as it:
            for _ in range(steps):
                step(model, optimizer)
            until(lambda: worker or it.times)
        fleet_.barrier_worker()
        return learnt(fleet_, model)

    for weight, row, other, done in run_job(body, WORKERS, 2):
        assert (row, other, done) == (pytest.approx(weight), pytest.approx(weight / 2), steps)
        if (strategy, deed) != ("geo", "saves"):  # there each save is an exchange more
            assert weight == pytest.approx(end(strategy, steps))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dc-asgd"])
@pytest.mark.pairs(1)
def test_metrics_of_a_thread_beside_the_training(strategy: str) -> None:
    """The others' threads do the same; who waits for them keeps nobody from a step they wait for."""

    def body(fleet_: Fleet, worker: int) -> list[float]:
        model, optimizer = join(fleet_, strategy)
        found: list[float] = []

        def measure() -> None:
            for _ in range(20):
                found.append(fleet_.metrics.sum(worker + 1.0))
                fleet_.barrier_worker()

        thread = threading.Thread(target=measure, daemon=True)
        step(model, optimizer)
        thread.start()
        for _ in range(STEPS):
            step(model, optimizer)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return found

    assert run_job(body, WORKERS) == [[3.0] * 20] * WORKERS


def test_calls_of_two_threads_are_not_taken_for_each_other() -> None:
    """The training thread's loss and an evaluation's mean could meet in another order on every worker."""

    def body(fleet_: Fleet, worker: int) -> BaseException | None:
        model, optimizer = join(fleet_)
        step(model, optimizer)

        def meet() -> None:
            fleet_.all_reduce_worker(1.0)

        if worker == 0:
            return in_another_thread(meet)
        with pytest.raises(PlanMismatchError, match="in a thread beside the training"):
            meet()
        return None

    refused, _ = run_job(body, WORKERS)
    assert isinstance(refused, PlanMismatchError)


def test_only_one_thread_waits_for_the_other_workers() -> None:
    def body(fleet_: Fleet, worker: int) -> str:
        model, optimizer = join(fleet_)
        step(model, optimizer)
        if worker == 1:
            late.wait(PATIENCE_S)
            assert in_another_thread(fleet_.barrier_worker) is None
            return ""
        thread = threading.Thread(target=fleet_.barrier_worker, daemon=True)
        thread.start()
        arrived.wait(PATIENCE_S)
        with pytest.raises(StateError) as refused:
            fleet_.barrier_worker()
        late.set()
        thread.join(PATIENCE_S)
        return str(refused.value)

    class Network(LoopbackNetwork):
        def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
            def watched(frame: Frame, respond: Respond) -> None:
                handler(frame, respond)
                if frame.message.WhichOneof("kind") == "gather":
                    arrived.set()

            return super().listen(endpoint, watched)

    arrived, late = threading.Event(), threading.Event()
    told, _ = run_job(body, WORKERS, network=Network())
    assert "barrier_worker() was called while another thread of this worker waits" in told


def test_values_loaded_by_another_thread_come_with_the_next_step(tmp_path: Path) -> None:
    """Nothing changes under a step of the thread that trains."""

    def body(fleet_: Fleet, worker: int) -> list[float]:
        model, optimizer = join(fleet_)
        step(model, optimizer)
        fleet_.save_persistables(tmp_path / "saved")
        for _ in range(3):
            step(model, optimizer)
        seen = [model.weight[0].item()]
        fleet_.barrier_worker()
        if worker == 0:
            assert in_another_thread(lambda: fleet_.load_persistables(tmp_path / "saved")) is None
            seen.append(model.weight[0].item())
        fleet_.barrier_worker()
        step(model, optimizer)
        return [*seen, model.weight[0].item()]

    first, second = run_job(body, WORKERS)
    assert first == [8.0, 8.0, 4.0]
    assert second == [8.0, 4.0]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_two_threads_that_both_train(strategy: str) -> None:
    """Each of their steps is one of the worker's, and no gradient of a row is lost between them."""

    def body(fleet_: Fleet, worker: int) -> tuple[float, float, float, int]:
        model, optimizer = join(fleet_, strategy)
        turns = threading.Lock()

        def train() -> None:
            for _ in range(STEPS):
                loss = -model(IDS)[:, 0].sum()
                with turns:  # torch's own optimizers ask for this much
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        train()
        thread.join(PATIENCE_S)
        fleet_.barrier_worker()
        return learnt(fleet_, model)

    assert run_job(body) == [(4.0 * STEPS, 4.0 * STEPS, 2.0 * STEPS, 2 * STEPS)]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_checkpoints_of_a_thread_beside_the_training(strategy: str, tmp_path: Path) -> None:
    """With states, which all workers hand over between two steps of their own."""

    def body(fleet_: Fleet, worker: int) -> tuple[float, float, float, int]:
        model, optimizer = join(fleet_, strategy)
        checkpoints = Checkpoints(tmp_path, every_steps=10, state={"seen": worker}, fleet=fleet_)
        with Beside(checkpoints.after_step):
            for _ in range(STEPS):
                step(model, optimizer)
        checkpoints.close()
        fleet_.barrier_worker()
        return learnt(fleet_, model)

    total = end(strategy)
    assert run_job(body, WORKERS, 2) == [(total, total, total / 2, STEPS)] * WORKERS


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_goodbye_while_another_thread_waits_for_the_other_workers(is_answered: bool) -> None:
    """Whichever comes first, the server's answer or the end of the connection."""

    def body(fleet_: Fleet, worker: int) -> str:
        model, optimizer = join(fleet_)
        step(model, optimizer)
        if worker == 1:
            late.wait(PATIENCE_S)
            return ""
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                fleet_.barrier_worker()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        until(lambda: is_in_a_meeting(fleet_))
        fleet_.stop_worker()
        late.set()
        thread.join(PATIENCE_S)
        return str(failures[0])

    late = threading.Event()
    network = FaultyNetwork(LoopbackNetwork())
    if not is_answered:
        network.add(Fault(Action.SILENCE, worker=0, kind="gather"))
    told, _ = run_job(body, WORKERS, network=network)
    assert "barrier_worker() came after the job ended for this worker" in told


def test_a_thread_beside_that_outlives_the_job() -> None:
    """It is told that the job is over, and keeps nobody from ending it."""

    def body(fleet_: Fleet, worker: int) -> BaseException | None:
        model, optimizer = join(fleet_)
        step(model, optimizer)
        failures: list[BaseException] = []

        def look() -> None:
            try:
                while True:
                    evaluate(fleet_, model, Path())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        step(model, optimizer)
        fleet_.stop_worker()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return failures[0]

    (failure,) = Job(body).run()
    assert isinstance(failure, StateError)
    assert "after the job ended for this worker" in str(failure)


class Alarms:
    """Have a signal's handler raise at the n-th line that this thread runs of a file of Fleet."""

    def __init__(self, file: str, at: int) -> None:
        self.file = file
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.file):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGALRM)
        return self


def run_into(alarms: Alarms, call: Callable[[], object]) -> None:
    def raises(*_: object) -> None:
        raise TimeoutError

    handler, before = signal.signal(signal.SIGALRM, raises), sys.gettrace()
    sys.settrace(alarms)
    try:
        call()
    except TimeoutError:
        pass
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGALRM, handler)


CALLS: dict[str, Callable[[Fleet, Net, Any], object]] = {
    "step": lambda _, model, optimizer: step(model, optimizer),
    "state_dict": lambda fleet_, model, _: fleet_.state_dict(model),
    "barrier": lambda fleet_, _, __: fleet_.barrier_worker(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_a_signal_ended_leaves_its_turn_to_others(call: str) -> None:
    """Wherever its handler raises, also as a turn is taken or given back."""
    alone = Fleet(environ={})
    alone.init()
    model, optimizer = join(alone)
    at, is_hit = 0, True
    try:
        while is_hit:
            at += 1
            alarms = Alarms("turns.py", at)
            run_into(alarms, lambda: CALLS[call](alone, model, optimizer))
            is_hit = alarms.left <= 0
            beside = threading.Thread(target=alone.state_dict, args=(model,), daemon=True)
            beside.start()
            beside.join(PATIENCE_S)
            assert not beside.is_alive(), f"another thread waits for a turn that was interrupted at line {at}"
            CALLS[call](alone, model, optimizer)
    finally:
        alone.stop_worker()
    assert at > 2
