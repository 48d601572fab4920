"""Jobs on a simulated clock: who pushes when in each mode, how long that takes, and what comes too late to count.

A step takes each worker a time drawn anew, and the package's own gates say who goes on when, and which pushes become
one update. So the same seed is the same course of a job in every run, however busy the machine is. ``train`` computes
in plain PyTorch what a job computes on its course; ``follow`` is a real job that takes it, push for push, and a test
compares the two.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from in_process import run_job

from fleet import Fleet
from fleet.optimizer import DistributedOptimizer
from fleet.ps.consistency import MODES
from fleet.ps.consistency.gate import ApplyBuffer, Changed, Rules
from fleet.ps.wire.transport import Network

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)

#: No push waits longer for its turn; only a job that failed makes it.
PATIENCE_S = 60.0
SLOWER = 4.0


@dataclass(frozen=True)
class Course:
    """``order`` is who pushes, one after the other. In the first ``rounds`` all workers push once, in any order, and
    wait for each other. ``updates`` has for each update, by the version of the values that they were computed on, the
    places of its pushes in that order. ``late`` pushes were dropped; ``seconds`` are of the simulated clock."""

    order: Sequence[int]
    rounds: int = 0
    updates: Sequence[Mapping[int, Sequence[int]]] = ()
    late: int = 0
    seconds: float = 0.0

    @property
    def workers(self) -> int:
        return max(self.order) + 1

    @property
    def rate(self) -> float:
        return len(self.order) / self.seconds

    @property
    def behind(self) -> list[int]:
        """By how many updates each gradient that counted was late."""
        return [
            version - token
            for version, parts in enumerate(self.updates)
            for token, places in parts.items()
            for _ in places
        ]


def step_times(seed: int, worker: int, *, is_slow: bool = False) -> Iterator[float]:
    """How long a worker's steps take, the same in every mode: of mean 1 and standard deviation 1/2, or four times
    that."""
    draw = random.Random(1000 * seed + worker)
    while True:
        yield draw.gammavariate(4, 1 / 4) * (SLOWER if is_slow else 1)


@cache
def simulate(mode: str, workers: int, pushes: int, seed: int, *, one_slow: bool, staleness: int = 4) -> Course:
    """Let the last worker be four times slower, if ``one_slow``. Nothing takes time but computing."""
    gate = MODES[mode].gate(range(workers), 0, Rules(staleness=staleness))
    policy = MODES[mode].policy(staleness)
    times = [step_times(seed, worker, is_slow=one_slow and worker == workers - 1) for worker in range(workers)]
    steps, waits_for = [0] * workers, dict.fromkeys(range(workers), 0)
    due: list[tuple[float, int, float, int]] = []
    order: list[int] = []
    updates: list[dict[int, list[int]]] = []
    changes: list[Changed] = []
    came: dict[tuple[int, int], tuple[int, int]] = {}
    now, late = 0.0, 0

    def begin() -> None:
        for worker in [each for each, version in waits_for.items() if version <= gate.version]:
            del waits_for[worker]
            took = next(times[worker])
            heapq.heappush(due, (now + took, worker, took, gate.version))

    begin()
    while len(order) < pushes:
        now, worker, took, token = heapq.heappop(due)
        step = steps[worker] = steps[worker] + 1
        came[worker, step] = token, len(order)
        order.append(worker)
        gate.note(worker, step, took, now)
        for effect in gate.push(worker, step, token):
            if isinstance(effect, Changed):
                changes.append(effect)
            elif isinstance(effect, ApplyBuffer):
                late += len(effect.dropped)
                updates.append(defaultdict(list))
                for each in effect.pushes:
                    read, place = came[each]
                    updates[-1][read].append(place)
        waits_for[worker] = max(policy.version_needed(step), gate.holds(worker, step))
        begin()
    assert len(changes) < 2, "a course of several changes cannot be followed"
    rounds = changes[0].version if changes else pushes // workers if policy.waits_for_others or mode == "auto" else 0
    return Course(order, rounds, updates, late, now)


def train(
    course: Course,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Sequence[int]], torch.Tensor],
) -> None:
    """Compute in plain PyTorch what a job of GBA or auto computes. ``loss_of(places)`` is the mean of the losses of
    these pushes. Those that began on the same values and end in the same update are computed together."""
    read_by = defaultdict(list)  # version -> what is computed on it: for which update, and the places
    for version, parts in enumerate(course.updates):
        for token, places in parts.items():
            read_by[token].append((version, places))
    parameters = [*model.parameters()]
    due: dict[int, list[list[torch.Tensor]]] = defaultdict(list)
    for version in range(len(course.updates)):
        for applied_at, places in read_by[version]:
            optimizer.zero_grad()
            (loss_of(places) * (len(places) / course.workers)).backward()
            due[applied_at].append([parameter.grad for parameter in parameters])
        if gradients := due.pop(version, None):
            for parameter, each in zip(parameters, zip(*gradients, strict=True), strict=True):
                parameter.grad = sum(each[1:], start=each[0])
            optimizer.step()


def follow(
    course: Course,
    begin: Callable[[Fleet], tuple[Model, DistributedOptimizer]],
    loss_of: Callable[[Model, int], torch.Tensor],
    end: Callable[[Fleet, Model], T],
    network: Network | None = None,
) -> T:
    """Run a job whose pushes come as a course has them. ``loss_of(model, place)`` is what push ``place`` is the
    gradient of; it is computed as soon as its worker has the values, which is long before its turn. What is returned is
    what ``end`` makes of the model of whoever pushed last: that one was answered with what the servers hold."""
    workers, together = course.workers, course.rounds * course.workers
    turns = [threading.Event() for _ in range(len(course.order) + 1)]
    ready = threading.Barrier(workers)

    def work(fleet: Fleet, worker: int) -> Any:
        model, optimizer = begin(fleet)
        ready.wait(PATIENCE_S)  # everybody has the initial values before the first push changes them
        for place in range(worker, together, workers):
            optimizer.minimize(loss_of(model, place))
        mine = [place for place, who in enumerate(course.order) if who == worker and place >= together]

        def compute(place: int) -> None:
            optimizer.zero_grad()
            loss_of(model, place).backward()

        ready.wait(PATIENCE_S * max(1, course.rounds))
        if mine:
            compute(mine[0])
        ready.wait(PATIENCE_S)
        turns[together].set()
        for place, following in zip(mine, [*mine[1:], None], strict=True):
            if not turns[place].wait(PATIENCE_S * len(course.order)):
                raise TimeoutError(f"push {place} never had its turn")
            optimizer.step()
            if following is not None:
                compute(following)
            turns[place + 1].set()
        return end(fleet, model) if worker == course.order[-1] else None

    return run_job(work, workers, network=network)[course.order[-1]]
