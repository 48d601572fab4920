"""Builds a view of a job from outside, from what its processes report: one row for each of them.

Pure. A ``View`` is what was known at one moment; rates come from two of them. Workers are known through the servers,
which hear from them with every heartbeat, and where their own records can be read, through these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from fleet.telemetry.figures import (
    TABLE,
    Figures,
    has_parts,
    hit_rate,
    in_all,
    in_words,
    mean_parts,
    rate,
    reported,
    spent,
)

#: Rates are over so many seconds.
WINDOW_S = 5.0
#: A wait shorter than this is part of any step.
LONG_WAIT_S = 1.0
#: So small a part of the time is part of any job.
_NOTABLE = 0.05
_NOTABLY_LATE = 0.01
#: So many of the ids that are asked for most are named.
MOST_HOT = 5
#: Heartbeats come more often than this.
SILENT_S = 5.0


@dataclass(frozen=True)
class Wait:
    """Describes a request that a server holds back: what it is, for how long, and for which workers it waits."""

    what: str
    seconds: float
    workers: tuple[int, ...]


@dataclass(frozen=True)
class WorkerView:
    """Shows one worker. ``waited`` is how long it has waited for each other worker so far; ``staleness`` says of how
    many updates it was counted, and the sum; ``late`` is how many of its gradients came too late to be used."""

    standing: str = "live"
    label: str = ""
    heard_seconds: float | None = None
    figures: Figures = field(default_factory=dict)
    steps: int = 0
    staleness: tuple[float, float] = (0, 0)
    late: int = 0
    wait: Wait | None = None
    waited: Mapping[int, float] = field(default_factory=dict)


class HotId(NamedTuple):
    """Says which part of the requests for rows of a table names this id."""

    table: str
    id: int
    share: float

    def __str__(self) -> str:
        return f"{self.table} {self.id} ({self.share:.0%})"


@dataclass(frozen=True)
class ServerView:
    """Shows one server. ``errand`` is what it does beside the training, such as a checkpoint; ``hot`` are the ids that
    it is asked for most."""

    phase: str
    figures: Figures = field(default_factory=dict)
    tables: Mapping[str, Figures] = field(default_factory=dict)
    mode: str = ""
    errand: str = ""
    #: who waits for whom now, where that changes, and since when and why
    pace: str = ""
    hot: Sequence[HotId] = ()


@dataclass(frozen=True)
class View:
    """Shows a job at one moment; ``servers`` has them by their names in rows."""

    at: float
    servers: Mapping[str, ServerView] = field(default_factory=dict)
    workers: Mapping[int, WorkerView] = field(default_factory=dict)

    @property
    def is_heard(self) -> bool:
        """Say whether any process has reported anything."""
        return bool(self.workers) or any(server.figures for server in self.servers.values())

    @property
    def is_over(self) -> bool:
        """Say whether the servers say that the job is over; where there are none, whether all its workers have left."""
        heard = [server.phase for server in self.servers.values() if server.figures]
        if not self.servers:
            return bool(self.workers) and all(worker.standing == "left" for worker in self.workers.values())
        return bool(heard) and all(phase == "over" or phase.startswith("failed") for phase in heard)


def seen(
    at: float,
    statuses: Mapping[str, Mapping[str, Any] | str],
    own: Mapping[int, tuple[Figures, float]],
    gone: Container[int] = (),
) -> View:
    """Return a view of the servers' answers, by their names, or of why they did not answer; and of workers' own
    figures, where known, with their age. ``gone`` workers have said so themselves."""
    servers: dict[str, ServerView] = {}
    workers: dict[int, WorkerView] = {}
    for name, status in statuses.items():
        if isinstance(status, str):
            servers[name] = ServerView(status)
            continue
        servers[name] = ServerView(
            status["phase"],
            status["figures"],
            {table: figures for table, figures in status.get("tables", {}).items() if isinstance(figures, Mapping)},
            status.get("mode", ""),
            status.get("errand", ""),
            status.get("pace", ""),
            [HotId(*each) for each in status.get("hot", ())],
        )
        for index, told in workers_in(status):
            worker = _worker(told)
            workers[index] = worker if index not in workers else _both(workers[index], worker)
    for index, (figures, age_s) in own.items():
        known = workers.get(index, WorkerView("left" if index in gone else "live", heard_seconds=age_s))
        workers[index] = replace(known, figures=figures)
    return View(at, servers, dict(sorted(workers.items())))


def workers_in(status: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the workers that a server tells of, by their indices, which may have gaps. A record of an earlier version
    has none."""
    for place, told in enumerate(status.get("workers", ())):
        yield told.get("worker", place), told


def server_name(status: Mapping[str, Any]) -> str:
    """Return the name of a server in rows: its number, where it knows that."""
    index = status.get("index")
    return f"server {status['server'] if index is None else index}"


def _worker(told: Mapping[str, Any]) -> WorkerView:
    waits = told["waits"]
    return WorkerView(
        told["standing"],
        told["label"],
        told["heard_seconds"],
        told["figures"],
        told["steps"],
        (told["staleness"][0], told["staleness"][1]),
        told.get("late", 0),
        None if waits is None else Wait(waits["what"], waits["seconds"], tuple(waits["for"])),
        {int(other): seconds for other, seconds in told["waited"].items()},
    )


def _both(one: WorkerView, other: WorkerView) -> WorkerView:
    """Join what two servers know of one worker. It waits at all of them at once, so its waits are not added up."""
    fresher = max(one, other, key=lambda each: each.figures.get("uptime_seconds", 0.0))
    waits = [each.wait for each in (one, other) if each.wait is not None]
    heard = [each.heard_seconds for each in (one, other) if each.heard_seconds is not None]
    return WorkerView(
        fresher.standing,
        fresher.label,
        min(heard, default=None),
        fresher.figures,
        max(one.steps, other.steps),
        (one.staleness[0] + other.staleness[0], one.staleness[1] + other.staleness[1]),
        max(one.late, other.late),
        max(waits, key=lambda wait: wait.seconds, default=None),
        {
            worker: max(view.waited.get(worker, 0.0) for view in (one, other))
            for worker in {**one.waited, **other.waited}
        },
    )


class History:
    """Keeps the views of the last seconds."""

    def __init__(self) -> None:
        self._views: deque[View] = deque()

    def add(self, view: View) -> None:
        if self._views and self._views[-1].at > view.at:  # the clock was set back: the others are of no time any more
            self._views = deque([replace(self._views[-1], at=view.at)])
        self._views.append(view)
        while len(self._views) > 2 and self._views[1].at <= view.at - WINDOW_S:
            self._views.popleft()

    @property
    def ends(self) -> tuple[View, View]:
        """Return the oldest and the newest view."""
        return self._views[0], self._views[-1]


@dataclass(frozen=True)
class Row:
    """Shows one process. ``None`` stands for what is not known, or means nothing for it. ``reported`` are figures of
    its script's own; ``weight`` is the part of the time for which others had to wait for it, or a server was busy."""

    process: str
    step: int | None = None
    steps_a_second: float | None = None
    examples_a_second: float | None = None
    loss: float | None = None
    staleness: float | None = None
    queue: int | None = None
    sent_a_second: float | None = None
    received_a_second: float | None = None
    memory: float | None = None
    note: str = ""
    is_well: bool = True
    weight: float = 0.0
    reported: Mapping[str, float] = field(default_factory=dict)
    lockstep: bool = False
    late: float | None = None  #: which part of its gradients came too late


def rows(before: View, now: View) -> list[Row]:
    """Return the rows of workers first, then of servers."""
    held = held_up(before, now)
    return [
        *(_worker_row(index, before.workers.get(index), worker, held[index]) for index, worker in now.workers.items()),
        *(_server_row(name, before.servers.get(name), server) for name, server in now.servers.items()),
    ]


def _worker_row(index: int, before: WorkerView | None, now: WorkerView, held: float) -> Row:
    figures, earlier = now.figures, None if before is None else before.figures
    is_here = now.standing == "live"
    examples = rate("examples", earlier, figures) if is_here else None
    return Row(
        f"worker {index}",
        int(max(figures.get("step", 0), now.steps)),
        rate("steps", earlier, figures) if is_here else None,
        examples if figures.get("examples") else None,
        figures.get("loss"),
        mean_staleness(before, now),
        int(figures["queue"]) if "queue" in figures else None,
        rate("sent_bytes", earlier, figures) if is_here else None,
        rate("received_bytes", earlier, figures) if is_here else None,
        figures.get("memory_bytes") if is_here else None,
        _note(before, now, held),
        now.standing in ("live", "left"),
        held,
        reported(figures),
        bool(figures.get("lockstep")),
        late_share(before, now),
    )


def late_share(before: WorkerView | None, now: WorkerView) -> float | None:
    """Return which part of a worker's gradients came too late between two views, or at all if none came; None where
    none ever has."""
    earlier = before if before is not None and before.steps < now.steps else WorkerView()
    return (now.late - earlier.late) / (now.steps - earlier.steps) if now.late and now.steps else None


def usual_parts(before: View, now: View) -> dict[str, float]:
    """Return what the time of the workers that are there went into between two views, in the mean."""
    each = [
        parts
        for index, worker in now.workers.items()
        if index in before.workers and (parts := spent(before.workers[index].figures, worker.figures))
    ]
    return mean_parts(each)


def mean_staleness(before: WorkerView | None, now: WorkerView) -> float | None:
    """Return the mean over the updates between two views, or over all if there were none."""
    total, updates = now.staleness
    if before is not None and before.staleness[1] < updates:
        total, updates = total - before.staleness[0], updates - before.staleness[1]
    return total / updates if updates else None


def _note(before: WorkerView | None, now: WorkerView, held: float) -> str:
    if now.standing != "live":
        return {"expected": "not there yet", "lost": "given up on", "left": "done"}.get(now.standing, now.standing)
    if now.heard_seconds is not None and now.heard_seconds >= SILENT_S:
        return f"silent for {now.heard_seconds:.0f} s"
    if now.wait is not None and now.wait.seconds >= LONG_WAIT_S:
        return f"waits {now.wait.seconds:.1f} s for {_named(now.wait.workers) or 'the server'}: {now.wait.what}"
    late = late_share(before, now) or 0.0
    if late >= _NOTABLY_LATE:
        return f"{late:.0%} of its gradients come too late"
    parts = spent(None if before is None else before.figures, now.figures)
    told = [in_words(parts)] if has_parts(parts) else []
    return "; ".join([*_waits(waited_shares(before, now), held), *told])


def _waits(shares: Mapping[int, float], held: float) -> list[str]:
    """Say for whom a worker waits, or that others wait for it."""
    most = max(shares, key=shares.__getitem__, default=None)
    if most is not None and shares[most] >= max(_NOTABLE, held):
        in_all = f" ({sum(shares.values()):.0%} in all)" if sum(shares.values()) >= shares[most] + 0.01 else ""
        return [f"waits {shares[most]:.0%} for worker {most}{in_all}"]
    return [f"others wait {held:.0%} for it"] if held >= _NOTABLE else []


def waited_shares(before: WorkerView | None, now: WorkerView) -> dict[int, float]:
    """Return the part of its time that a worker waited for each of the others between two views."""
    if before is None:
        return {}
    earlier = waited_seconds(before)
    seconds = now.figures.get("uptime_seconds", 0.0) - before.figures.get("uptime_seconds", 0.0)
    if seconds <= 0:
        return {}
    return {
        other: min(1.0, (waited - earlier.get(other, 0.0)) / seconds)
        for other, waited in waited_seconds(now).items()
        if waited > earlier.get(other, 0.0)
    }


def waited_seconds(worker: WorkerView) -> dict[int, float]:
    """Return how long a worker has waited for each of the others. A wait that goes on counts too, in equal parts for
    all it may be for: which of them comes last is not known yet."""
    waited = dict(worker.waited)
    if worker.wait is not None:
        for other in worker.wait.workers:
            waited[other] = waited.get(other, 0.0) + worker.wait.seconds / len(worker.wait.workers)
    return waited


def held_up(before: View, now: View) -> dict[int, float]:
    """Return for each worker the part of their time that the others wait for it, in the mean."""
    shares = {
        index: waited_shares(before.workers.get(index), worker)
        for index, worker in now.workers.items()
        if worker.standing == "live"
    }
    return {
        index: sum(waited.get(index, 0.0) for waited in shares.values()) / max(1, len(shares) - (index in shares))
        for index in now.workers
    }


def _named(workers: Sequence[int]) -> str:
    names = [f"worker {worker}" for worker in workers[:3]]
    return ", ".join([*names, f"{len(workers) - 3} more"] if len(workers) > 3 else names)


def _server_row(name: str, before: ServerView | None, now: ServerView) -> Row:
    figures, earlier = now.figures, None if before is None else before.figures
    if not figures:
        return Row(name, note=now.phase, is_well=False)
    busy = rate("busy_seconds", earlier, figures)
    is_well = not now.phase.startswith("failed")
    doing = now.errand if now.phase == "training" else now.phase
    return Row(
        name,
        int(figures["version"]),
        rate("updates", earlier, figures),
        queue=int(figures["parked"]),
        sent_a_second=rate("sent_bytes", earlier, figures),
        received_a_second=rate("received_bytes", earlier, figures),
        memory=figures.get("memory_bytes"),
        note="; ".join(
            part for part in (doing or ("" if busy is None else f"busy {min(busy, 1.0):.0%}"), now.pace) if part
        ),
        is_well=is_well,
        weight=busy or 0.0,
    )


@dataclass(frozen=True)
class TableRow:
    """Shows one table, all servers together. ``recent`` is how much the figures that count have grown between two
    views, or in all where there is no earlier one, and ``steps`` in how many updates."""

    name: str
    figures: Figures
    recent: Figures
    steps: float

    @property
    def hit_rate(self) -> float:
        return hit_rate(self.recent)

    @property
    def moves(self) -> bool:
        """Say whether rows lie in files, or come and leave by rules."""
        return any(self.figures[name] for name in ("on_disk", "pending", "evicted", "dropped_gradients"))

    def a_step(self, name: str) -> float | None:
        return self.recent[name] / self.steps if self.steps else None


def table_rows(before: View, now: View) -> list[TableRow]:
    """Return a row for each table."""
    names = dict.fromkeys(name for server in now.servers.values() for name in server.tables)
    return [_table_row(name, before, now) for name in names]


def _table_row(name: str, before: View, now: View) -> TableRow:
    holders = {each: server for each, server in now.servers.items() if name in server.tables}
    recent, steps = [], [0.0]
    for each, server in holders.items():
        earlier = before.servers.get(each, ServerView(""))
        if earlier.figures.get("uptime_seconds", 0.0) > server.figures["uptime_seconds"]:  # it has started again
            earlier = ServerView("")
        figures, then = server.tables[name], earlier.tables.get(name, {})
        recent.append({key: figures.get(key, 0) - then.get(key, 0) for key, of in TABLE.items() if of.counts})
        steps.append(server.figures.get("updates", 0.0) - earlier.figures.get("updates", 0.0))
    figures = in_all(server.tables[name] for server in holders.values())
    return TableRow(name, figures, in_all(recent), max(steps))


def hot_ids(now: View) -> list[HotId]:
    """Return the ids that are asked for most, these first."""
    told = [each for server in now.servers.values() for each in server.hot]
    return sorted(told, key=lambda each: -each.share)[:MOST_HOT]


@dataclass(frozen=True)
class Speed:
    """Says how fast a job is: ``steps`` and ``examples`` a second; steps are None until somebody has reported some.

    In lockstep a step is one of all workers together, and counts once. Elsewhere each takes its own, and they add up.
    """

    steps: float | None
    examples: float
    lockstep: bool

    @property
    def unit(self) -> str:
        return "steps" if self.lockstep else "workers' steps"


def total_speed(shown: Iterable[Row]) -> Speed:
    """Return the speed of all workers together."""
    workers = [row for row in shown if row.process.startswith("worker")]
    steps = [row.steps_a_second for row in workers if row.steps_a_second is not None]
    lockstep = any(row.lockstep for row in workers)
    in_all = None if not steps else median(steps) if lockstep else sum(steps)
    return Speed(in_all, sum(row.examples_a_second or 0.0 for row in workers), lockstep)
