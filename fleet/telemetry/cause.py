"""Records who has ended a job, before anybody else hears of it.

One process fails, the others learn of it and fail in turn, and whose exit a launcher sees first is chance. So a process
that fails by itself writes that down in the directory of the records, and only then tells the others. The first word
stands.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

#: What a job is ended by that is interrupted.
LAUNCHER = "fleetrun"
_NAME = "cause.json"
_LONGEST = 300


@dataclass(frozen=True)
class Cause:
    """Names who has ended a job: ``process`` is called "worker 1"; ``why`` is one line."""

    process: str
    why: str


def claim(directory: str, job: str, process: str, reason: str) -> None:
    """Note that ``process`` ends the job of this id, for a reason whose last line says it best. Nothing is noted where
    no records are kept, or when another process was first."""
    if not directory:
        return
    why = (reason.strip().splitlines() or [""])[-1][:_LONGEST]
    with contextlib.suppress(OSError), (Path(directory) / _NAME).open("x") as file:  # the job fails with or without it
        json.dump({"job": job, "process": process, "why": why}, file)


def claimed(directory: Path, job: str | None = None) -> Cause | None:
    """Return what ended the job of this id, or of any that has noted its cause there."""
    try:
        told = json.loads((directory / _NAME).read_text())
        cause = Cause(str(told["process"]), str(told["why"]))
        return cause if job in (None, told["job"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(directory: Path) -> None:
    """Remove what an earlier job has left."""
    (directory / _NAME).unlink(missing_ok=True)
