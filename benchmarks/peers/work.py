"""The work every program of this folder does, its data, and how it reports: one for all, so that only systems differ.

A program gets its ``Work`` as JSON in its first argument. Lines of its output that begin with ``REPORT`` are for the
benchmark: a worker says that it is warm, works, and tells what it cost. After each it waits for a line on its input.

Nothing but numpy is used here, and no Python newer than 3.7, which is what the oldest peer runs on.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import numpy as np

REPORT = "REPORT "
SLOTS = 26
FEATURES = 13
#: All start from values of this size: rows uniformly in between, layers as Glorot has it.
ROW_RANGE = 1.0


@dataclass
class Work:
    """``model`` is "ctr": ids of 26 slots and 13 numbers, three layers of ``width`` and a choice of two; "dense": four
    layers of ``width``; or "both": the same four, with rows of 26 ids in front of them. ``servers`` has their
    addresses; ``meeting`` one for each worker and one more, for systems that need any. ``alike``: all workers have the
    same data, so that a table is as large for many as for one. ``crowd``: so many workers share a process, in programs
    made for that. ``device`` is where workers compute; batches lie in the host's memory. ``pause_s``: a step takes so
    much longer, as on an accelerator that leaves the cores alone, and ``slower`` times that on the last worker, which
    takes as many steps fewer where nobody waits for it."""

    role: str
    index: int
    servers: list
    workers: int
    meeting: list
    mode: str
    steps: int
    warmup: int
    width: int
    batch: int
    model: str = "ctr"
    optimizer: str = "sgd"
    tables: int = 1
    vocabulary: int = 1000001
    dim: int = 10
    alike: bool = False
    crowd: int = 1
    device: str = "cpu"
    pause_s: float = 0.0
    slower: int = 1

    @property
    def slowness(self):
        return self.slower if self.index == self.workers - 1 else 1

    def compute(self):
        """What a step takes beside what processors do."""
        if self.pause_s:
            time.sleep(self.pause_s * self.slowness)

    @property
    def measured_steps(self):
        return self.steps if self.mode == "sync" else self.steps // self.slowness

    @property
    def rate(self):
        if self.model in ("dense", "both"):
            return 0.3
        if self.optimizer == "adam":
            return 0.003
        # Gradients of many that do not wait for each other are old, and steps have to be small.
        crowd = max(1, self.workers / 8) if self.mode.startswith("async") else 1
        return (0.1 if self.width < 100 else 0.05) / crowd


def my_work():
    return Work(**json.loads(sys.argv[1]))


def clicks(work, count=20):
    """So many batches of (ids, numbers, choices), as a rule this worker's own. The hundred most frequent ids have a
    weight, the same for all workers; the examples whose weights add up to more than the median are those that were
    clicked."""
    weights = np.zeros(work.vocabulary, "float32")
    weights[:100] = np.random.RandomState(7).standard_normal(100)
    draw = np.random.RandomState(1000 + (0 if work.alike else work.index))
    batches = []
    for _ in range(count):
        ids = np.minimum(draw.zipf(1.2, size=(work.batch, SLOTS)) - 1, work.vocabulary - 1).astype("int64")
        numbers = draw.rand(work.batch, FEATURES).astype("float32")
        scores = weights[ids].sum(1)
        batches.append((ids, numbers, (scores > np.median(scores)).astype("int64")))
    return batches


def vectors(work):
    """Four batches of (vectors, what is to come out of them), this worker's own."""
    draw = np.random.RandomState(1000 + work.index)
    batches = []
    for _ in range(4):
        given = draw.rand(work.batch, work.width).astype("float32")
        batches.append((given, given[:, ::-1].copy()))
    return batches


def vectors_and_ids(work):
    """The same with ids of 26 slots beside them."""
    draw = np.random.RandomState(2000 + work.index)
    return [(draw.randint(0, work.vocabulary, (work.batch, SLOTS)), given, wanted) for given, wanted in vectors(work)]


class Meter:
    """What a worker tells about its own steps. The warm-up is not counted."""

    def __init__(self, work):
        self._work = work
        self._losses = []

    def batches(self, batches):
        """As many as there are steps to take, in turn."""
        for step in range(self._work.warmup + self._work.measured_steps):
            yield batches[step % len(batches)]

    def after_step(self, loss):
        self._losses.append(float(loss))
        if len(self._losses) == self._work.warmup:
            _report(event="warm")
            sys.stdin.readline()
            self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def end(self):
        """To be called when all that was computed has arrived where it belongs. The benchmark looks at the processes
        then, and so this one stays until it is told to go on."""
        seconds, cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        few = max(1, len(self._losses) // 5)
        _report(
            event="done",
            seconds=seconds,
            cpu_s=cpu_s,
            examples=self._work.measured_steps * self._work.batch,
            first_loss=float(np.mean(self._losses[:5])),
            last_loss=float(np.mean(self._losses[-few:])),
        )
        sys.stdin.readline()


def _report(**what):
    sys.stdout.write("\n" + REPORT + json.dumps(what) + "\n")
    sys.stdout.flush()
