"""Tells a run from its beginning to its end from its records: figures over time, waits, and events.

Pure. The curves are rows of pictures taken at equal distances, so they mean what ``fleet top`` shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fleet.telemetry.cause import Cause
from fleet.telemetry.diagnosis import diagnose
from fleet.telemetry.figures import OWN, SPENT, Figures, has_parts, rate
from fleet.telemetry.record import EVENT, Line, training_of, view_of
from fleet.telemetry.view import Row, TableRow, View, rows, table_rows, usual_parts, waited_seconds, waited_shares

#: So many pictures at most, and no closer than heartbeats.
MOST_MOMENTS, LEAST_S = 240, 1.0
#: Rates are over so many moments: figures come once a second, and not at the same instant from all.
_OVER = 2

Curve = list[float | None]

#: A part of the time that never was as large has no curve.
_SEEN = 0.005


@dataclass(frozen=True)
class Chart:
    """Shows curves of several processes, in one unit, over the same moments."""

    title: str
    unit: str
    about: str
    curves: dict[str, Curve]


@dataclass(frozen=True)
class Happening:
    at: float
    process: str
    what: str


@dataclass(frozen=True)
class Story:
    """Tells a run. ``moments`` and ``Happening.at`` are seconds since the beginning, ``began`` since 1970; ``waited``
    says for whom each worker waited, in seconds."""

    began: float
    moments: list[float]
    charts: list[Chart]
    waited: dict[int, dict[int, float]]
    happenings: list[Happening]
    sentences: list[str]
    last: View


def story_of(lines: Sequence[Line], ending: Cause | None = None) -> Story:
    """Tell the story of ``lines``, which are in the order of time; there is at least one. ``ending`` is who has ended
    the job, if known."""
    began, ended = lines[0].at, lines[-1].at
    distance = max(LEAST_S, (ended - began) / MOST_MOMENTS)
    moments = [began + distance * count for count in range(int((ended - began) / distance) + 1)]
    if moments[-1] < ended:
        moments.append(ended)
    views = _views(lines, moments)
    pictures = [(views[max(0, place - _OVER)], view) for place, view in enumerate(views)]
    told = [Happening(line.at - began, line.told["process"], line.told["what"]) for line in lines if line.kind == EVENT]
    return Story(
        began,
        [moment - began for moment in moments],
        _charts(pictures),
        {index: waited_seconds(worker) for index, worker in views[-1].workers.items()},
        sorted([*told, *_losses(views, began)], key=lambda happening: happening.at),
        diagnose(*training_of(lines), ending),
        views[-1],
    )


def _views(lines: Sequence[Line], moments: Sequence[float]) -> list[View]:
    latest: dict[str, Line] = {}
    views, place = [], 0
    for moment in moments:
        while place < len(lines) and lines[place].at <= moment:
            latest[lines[place].process] = lines[place]
            place += 1
        views.append(view_of(moment, latest.values()))
    return views


def _losses(views: Sequence[View], began: float) -> list[Happening]:
    """Return what only servers have noticed."""
    return [
        Happening(now.at - began, f"worker {index}", "was given up on by the servers")
        for before, now in itertools.pairwise(views)
        for index, worker in now.workers.items()
        if worker.standing == "lost" and (index not in before.workers or before.workers[index].standing != "lost")
    ]


def _charts(pictures: Sequence[tuple[View, View]]) -> list[Chart]:
    rowed = [{row.process: row for row in rows(*picture)} for picture in pictures]
    names = list(dict.fromkeys(name for shown in rowed for name in shown))
    workers = [name for name in names if name.startswith("worker")]

    def curves(of: Callable[[Row], float | None], whose: Sequence[str]) -> dict[str, Curve]:
        return {name: [None if name not in shown else of(shown[name]) for shown in rowed] for name in whose}

    def shares(of: Callable[[View, View, int], float | None]) -> dict[str, Curve]:
        return {name: [of(before, now, int(name.rpartition(" ")[2])) for before, now in pictures] for name in workers}

    def while_training(of: Callable[[Row], float | None]) -> dict[str, Curve]:
        return curves(lambda row: None if row.steps_a_second is None else of(row), workers)

    tabled = [{table.name: table for table in table_rows(*picture)} for picture in pictures]
    beyond = dict.fromkeys(name for shown in tabled for name, table in shown.items() if table.figures["on_disk"])

    def of_tables(of: Callable[[TableRow], float | None]) -> dict[str, Curve]:
        return {name: [of(shown[name]) if name in shown else None for shown in tabled] for name in beyond}

    examples = curves(lambda row: row.examples_a_second, workers)
    own = dict.fromkeys(name for shown in rowed for row in shown.values() for name in row.reported)
    has_examples = any(value for curve in examples.values() for value in curve)
    charts = [
        Chart(
            "Throughput",
            "examples a second" if has_examples else "steps a second",
            "How much each worker trained on.",
            examples if has_examples else curves(lambda row: row.steps_a_second, workers),
        ),
        Chart("Loss", "", "The last loss that each worker told of.", while_training(lambda row: row.loss)),
        *(
            Chart(name, "", "As scripts told fleet.report().", while_training(partial(_reported, name=name)))
            for name in own
        ),
        Chart(
            "Staleness",
            "updates",
            "How many updates the values had had, in the mean, since a worker read what its gradient was computed on.",
            while_training(lambda row: row.staleness),
        ),
        Chart(
            "Gradients too late",
            "% of the worker's",
            "On values so old that they were dropped, as the strategy's staleness says.",
            while_training(lambda row: None if row.late is None else 100 * row.late),
        ),
        Chart(
            "Time in exchanges",
            "% of the time",
            "Pushing, pulling, averaging, meeting and copies, waits included; the rest is the worker's own computing.",
            shares(_exchange),
        ),
        Chart("What a step waits for", "% of the time", "Of all workers, in the mean.", _parts(pictures)),
        Chart("Time waiting for other workers", "% of the time", "As the servers saw it.", shares(_waiting)),
        Chart(
            "Bytes",
            "MB a second",
            "Tensors sent and received.",
            curves(_moved, names),
        ),
        Chart(
            "Memory",
            "MB",
            "Of each process.",
            curves(lambda row: None if row.memory is None else row.memory / 1e6, names),
        ),
        Chart(
            "Rows found in memory",
            "% of those asked for",
            "Of tables that lie partly in files; for the others a file was read.",
            of_tables(lambda table: 100 * table.hit_rate if table.recent["asked_rows"] else None),
        ),
        Chart(
            "Files of rows",
            "MB a step",
            "Read and written by servers.",
            of_tables(_moved_by_files),
        ),
    ]
    return [chart for chart in charts if any(value is not None for curve in chart.curves.values() for value in curve)]


def _reported(row: Row, name: str) -> float | None:
    return row.reported.get(name)


def _moved(row: Row) -> float | None:
    if row.sent_a_second is None and row.received_a_second is None:
        return None
    return ((row.sent_a_second or 0.0) + (row.received_a_second or 0.0)) / 1e6


def _moved_by_files(table: TableRow) -> float | None:
    read, written = table.a_step("read_bytes"), table.a_step("written_bytes")
    return None if read is None or written is None else (read + written) / 1e6


def _figures(before: View, now: View, worker: int) -> tuple[Figures, Figures] | None:
    if worker not in before.workers or worker not in now.workers:
        return None
    return before.workers[worker].figures, now.workers[worker].figures


def _exchange(before: View, now: View, worker: int) -> float | None:
    both = _figures(before, now, worker)
    parts = [rate(name, *both) for name in SPENT.values() if name in both[0] and name in both[1]] if both else [None]
    known = [part for part in parts if part is not None]
    return 100 * min(1.0, sum(known)) if known else None


def _parts(pictures: Sequence[tuple[View, View]]) -> dict[str, Curve]:
    """Return for each part of the workers' time how large it was, where more goes into a step than rows and
    gradients."""
    found = [usual_parts(*picture) for picture in pictures]
    if not any(map(has_parts, found)):
        return {}
    names = [what for what in (OWN, *SPENT) if any(parts.get(what, 0.0) >= _SEEN for parts in found)]
    return {what: [100 * parts[what] if what in parts else None for parts in found] for what in names}


def _waiting(before: View, now: View, worker: int) -> float | None:
    both = _figures(before, now, worker)
    if both is None or rate("steps", *both) is None or not now.servers:
        return None
    return 100 * min(1.0, sum(waited_shares(before.workers[worker], now.workers[worker]).values()))
