"""Names the figures of a process: code that shows a figure finds here what it means.

A figure that counts only grows while its process lives. Its speed is the difference of two readings over the difference
of their ``uptime_seconds``, which are the process's own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

#: What is told of one process at one moment.
Figures = Mapping[str, float]

#: So many figures a process tells, with names no longer than this.
MOST_FIGURES, LONGEST_NAME = 128, 64
#: No figure of ours is as large, so sums and differences of them are finite.
_BEYOND = 1e300


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
    "reduce_seconds": Figure("time of the training thread in waiting for dense gradients that workers average"),
    "copy_seconds": Figure("time of the training thread in copies between the host and a device that Fleet makes"),
    "delay_seconds": Figure("time for which the process's first thread was ready to run and had no processor"),
    "round_trip_seconds": Figure(
        "the shortest round trip of the last heartbeats to its server that is furthest away", counts=False
    ),
    "queue": Figure("steps that wait to be sent, in the asynchronous mode", counts=False),
    **_OF_EVERY_PROCESS,
}

SERVER = {
    "version": Figure("updates applied, those of the checkpoint it started from among them", counts=False),
    "updates": Figure("updates that this process has applied"),
    "requests": Figure("requests taken, heartbeats not among them"),
    "busy_seconds": Figure("time in carrying out requests, one after the other"),
    "asked_rows": Figure("rows that it was asked for, or given gradients of"),
    "parked": Figure("requests that wait for something", counts=False),
    "followers": Figure("those who follow the model from outside the job", counts=False),
    "followers_behind": Figure("updates that the one furthest behind does not have", counts=False),
    **_OF_EVERY_PROCESS,
}

REPLICA = {
    "version": Figure("the version that it answers from", counts=False),
    "age_seconds": Figure("how long ago this version was last known to be the newest", counts=False),
    "lookups": Figure("look-ups that were answered, each of one table or several"),
    "asked_rows": Figure("rows that these asked for"),
    "misses": Figure("those of them that are not there, and read the mean of their table's initializer"),
    "rows": Figure("rows of all tables", counts=False),
    **_OF_EVERY_PROCESS,
}

#: The figures of a process, by its kind.
OF_KIND = {"worker": WORKER, "server": SERVER, "replica": REPLICA}

#: Of the part of a table that one server holds; over several servers they add up.
TABLE = {
    "rows": Figure("rows of a table here", counts=False),
    "in_memory": Figure("those of its rows that are in memory", counts=False),
    "on_disk": Figure("those that lie in files alone", counts=False),
    "bytes": Figure("memory of a table here", counts=False),
    "disk_bytes": Figure("what its files take on the disk", counts=False),
    "pending": Figure("ids that were looked up here and have no row yet", counts=False),
    "evicted": Figure("rows of a table that have left here"),
    "dropped_gradients": Figure("gradients for ids without a row here"),
    "asked_rows": Figure("rows that it was asked for, of a table that may have files"),
    "read_rows": Figure("rows that had to be read from its files for that"),
    "read_bytes": Figure("what was read from its files"),
    "written_bytes": Figure("what was written to its files"),
}


def are_figures(told: object, needed: Iterable[object] = (), finite: Container[object] | None = None) -> bool:
    """Say whether what was read somewhere are figures, with those that are ``needed``. Those of the names in ``finite``
    are numbers that can be reckoned with; without it, all are."""
    return (
        isinstance(told, Mapping)
        and all(name in told for name in needed)
        and all(
            isinstance(value, int | float)
            and (abs(value) < _BEYOND or (isinstance(value, float) and finite is not None and name not in finite))
            for name, value in told.items()
        )
    )


def reported(figures: Figures) -> dict[str, float]:
    """Return those figures of a worker that its script has reported under names of its own."""
    return {name: value for name, value in figures.items() if name not in WORKER}


#: What a worker's time goes into, as far as Fleet sees it; the rest is the script's own computing.
SPENT = {
    "rows": "pull_seconds",
    "gradients": "push_seconds",
    "all-reduce": "reduce_seconds",
    "meeting": "meet_seconds",
    "copies": "copy_seconds",
}
OWN = "computing"


def spent(before: Figures | None, now: Figures) -> dict[str, float]:
    """Return the parts of its time that a worker spent on each of these, and on its own; nothing if that is not known.
    Records of earlier releases lack some."""
    if before is None:
        return {}
    parts = {what: rate(name, before, now) for what, name in SPENT.items() if name in before and name in now}
    known = {what: part for what, part in parts.items() if part is not None}
    return {**known, OWN: max(0.0, 1.0 - sum(known.values()))} if "rows" in known else {}


def mean_parts(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the parts of the time of several workers, in the mean."""
    names = dict.fromkeys(what for parts in each for what in parts)
    return {what: sum(parts.get(what, 0.0) for parts in each) / len(each) for what in names}


def has_parts(parts: Mapping[str, float]) -> bool:
    """Say whether more goes into a step than rows and gradients: averaging among workers, or copies to a device."""
    return bool(parts.get("all-reduce") or parts.get("copies"))


def time_in_words(told: Sequence[Figures]) -> str:
    """Return what all the time of some workers went into, where more goes into a step than rows and gradients."""
    parts = mean_parts([spent(dict.fromkeys(each, 0.0), each) for each in told])
    return in_words(parts) if has_parts(parts) else ""


def in_words(parts: Mapping[str, float]) -> str:
    """Name the parts of a step's time, the largest first: ``computing 62%, rows 21%``."""
    named = sorted(((part, what) for what, part in parts.items() if part >= 0.01), reverse=True)
    return ", ".join(f"{what} {part:.0%}" for part, what in named)


def rate(name: str, before: Figures | None, now: Figures) -> float | None:
    """Return how much a figure grew a second between two readings; None if they do not say."""
    if before is None or any(each not in figures for figures in (before, now) for each in (name, "uptime_seconds")):
        return None
    seconds = now["uptime_seconds"] - before["uptime_seconds"]
    grown = now[name] - before[name]
    return grown / seconds if seconds > 0 and grown >= 0 else None


def in_all(shares: Iterable[Figures]) -> dict[str, float]:
    """Return the figures of a table of which several servers hold parts."""
    known = list(shares)
    return {name: sum(share.get(name, 0) for share in known) for name in TABLE}


def hit_rate(table: Figures) -> float:
    """Return for which part of the rows that a table was asked for no file had to be read."""
    asked = table["asked_rows"]
    return max(0.0, 1.0 - table["read_rows"] / asked) if asked else 1.0
