"""Names the figures of a process: code that shows a figure finds here what it means.

A figure that counts only grows while its process lives. Its speed is the difference of two readings over the difference
of their ``uptime_seconds``, which are the process's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: What is told of one process at one moment.
Figures = Mapping[str, float]

#: So many figures a process tells, with names no longer than this.
MOST_FIGURES, LONGEST_NAME = 128, 64


@dataclass(frozen=True)
class Figure:
    meaning: str
    counts: bool = True


_OF_EVERY_PROCESS = {
    "uptime_seconds": Figure("how long the process has been part of the job"),
    "cpu_seconds": Figure("processor time of all its threads"),
    "memory_bytes": Figure("memory that it occupies", counts=False),
    "sent_bytes": Figure("tensors that it has sent"),
    "received_bytes": Figure("tensors that it has received"),
}

WORKER = {
    "step": Figure("how far it is: its steps, with those of the job that it went on from", counts=False),
    "steps": Figure("steps that this process has taken"),
    "lockstep": Figure("1 where a step is one step of all workers together, 0 where each takes its own", counts=False),
    "examples": Figure("examples trained on, as fleet.report() was told"),
    "loss": Figure("the last loss, of minimize(), of step(closure) or as fleet.report() was told", counts=False),
    "push_seconds": Figure("time of the training thread in exchanging gradients for values, or waiting to queue them"),
    "pull_seconds": Figure("time of the training thread in fetching rows"),
    "meet_seconds": Figure("time of the training thread in barriers and reductions, or until another's save is done"),
    "delay_seconds": Figure("time for which the process's first thread was ready to run and had no processor"),
    "queue": Figure("steps that wait to be sent, in the asynchronous mode", counts=False),
    **_OF_EVERY_PROCESS,
}

SERVER = {
    "version": Figure("updates applied, those of the checkpoint it started from among them", counts=False),
    "updates": Figure("updates that this process has applied"),
    "requests": Figure("requests taken, heartbeats not among them"),
    "busy_seconds": Figure("time in carrying out requests, one after the other"),
    "parked": Figure("requests that wait for something", counts=False),
    **_OF_EVERY_PROCESS,
}


def reported(figures: Figures) -> dict[str, float]:
    """Return those figures of a worker that its script has reported under names of its own."""
    return {name: value for name, value in figures.items() if name not in WORKER}


def rate(name: str, before: Figures | None, now: Figures) -> float | None:
    """Return how much a figure grew a second between two readings; None if they do not say."""
    if before is None or name not in before or name not in now:
        return None
    seconds = now["uptime_seconds"] - before["uptime_seconds"]
    grown = now[name] - before[name]
    return grown / seconds if seconds > 0 and grown >= 0 else None
