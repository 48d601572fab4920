"""Runs one seed after the other, in several processes, and counts what was tried and what was wrong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .invariants import broken
from .job import run
from .scenario import drawn

#: Seeds that one process does before it tells how far it is.
_BATCH = 20


@dataclass
class Tally:
    """Counts what was tried."""

    seeds: int = 0
    messages: int = 0
    simulated_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.messages += other.messages
        self.simulated_s += other.simulated_s
        self.struck += other.struck
        self.wrong |= other.wrong


#: Where files are made and removed in half the time, and nothing is kept. All disks of a job are simulated.
_MEMORY = Path("/dev/shm")


def tried(seeds: range) -> Tally:
    """Run some seeds in this process."""
    tally = Tally()
    where = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fleet-simulation-", dir=where) as folder:
        for seed in seeds:
            scenario = drawn(seed)
            outcome = run(scenario, Path(folder) / "job")
            wrong = broken(outcome)
            tally.add(
                Tally(
                    1,
                    len(outcome.messages),
                    outcome.lasted_s,
                    Counter(fault.kind for _, fault in outcome.struck),
                    {seed: wrong} if wrong else {},
                )
            )
    gc.collect()
    gc.freeze()  # what is left stays, and is not looked at again
    return tally


def begin(cores: multiprocessing.SimpleQueue[int] | None = None) -> None:
    """Make a process fit for simulations. On one core a turn passes from thread to thread in a tenth of the time, and
    in a third of that where whoever hands it over is not interrupted by who gets it. Garbage is collected between
    batches of seeds."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    if cores is not None:
        os.sched_setaffinity(0, {cores.get()})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        gc.disable()
    gc.freeze()


def explore(first: int, minutes: float, jobs: int) -> Tally:
    """Run seeds side by side until the time is up, or a Ctrl-C comes; tell of those that were wrong."""
    total, began, start = Tally(), time.monotonic(), first
    context = multiprocessing.get_context("spawn")
    cores: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    for _, core in zip(range(jobs), itertools.cycle(sorted(os.sched_getaffinity(0))), strict=False):
        cores.put(core)

    def take(result: Any) -> None:
        tally = result.get()
        for seed, wrong in sorted(tally.wrong.items()):
            print(f"seed {seed}: {'; '.join(wrong[:3])}", flush=True)  # now: it may be hours to the end
        total.add(tally)

    with context.Pool(jobs, initializer=begin, initargs=(cores,)) as pool, contextlib.suppress(KeyboardInterrupt):
        waiting: list[Any] = []
        while time.monotonic() < began + 60 * minutes:
            waiting.append(pool.apply_async(tried, (range(start, start + _BATCH),)))
            start += _BATCH
            while len(waiting) > jobs:
                take(waiting.pop(0))
        for each in waiting:
            take(each)
    took = (time.monotonic() - began) / 60
    befell = ", ".join(f"{count} x {kind}" for kind, count in total.struck.most_common())
    print(
        f"{total.seeds} jobs in {took:.1f} min ({total.seeds / took / jobs:.0f} a minute and process), "
        f"{total.messages} messages, {total.simulated_s / 3600:.1f} hours of theirs; {befell}"
    )
    return total
