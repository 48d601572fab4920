"""Writes a run as one HTML page that needs nothing but a browser: no network, no library.

The curves are drawn here, so the page shows them without its script as well; the script only tells the value under the
pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from fleet.telemetry.live_table import with_heads, with_table_heads
from fleet.telemetry.story import Chart, Curve, Happening, Story
from fleet.telemetry.view import View, rows, table_rows

_WIDTH, _HEIGHT = 900, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
#: Larger numbers are off the chart: it has to be possible to reckon with them.
_MOST = 1e300
_COLOURS = 8
_DASHES = ("", "7 3", "2 3")
#: More names than this a legend does not list one by one; all are in the table below it.
_MOST_IN_LEGEND = 16


def page(story: Story, name: str) -> str:
    """Return the whole page; ``name`` says which run it is."""
    title = f"Fleet: {name}"
    body = "\n".join(_body(story, title))
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", escape(title)).replace("{{body}}", body)


def _body(story: Story, title: str) -> Iterator[str]:
    began = datetime.fromtimestamp(story.began, timezone.utc)
    yield f"<header><h1>{escape(title)}</h1>"
    yield f'<p class="about">Began {began:%Y-%m-%d %H:%M:%S} UTC, {_duration(story.moments[-1])}.</p></header>'
    yield "<main>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in story.sentences)
    for chart in story.charts:
        yield _section(chart, story.moments, story.happenings)
    if any(story.waited.values()):
        yield _matrix(story.waited)
    if story.happenings:
        yield _table_of("Events", ("after", "process", "what happened"), [_told(each) for each in story.happenings])
    heads, *last = with_heads(rows(View(0.0), story.last))
    yield _table_of("At the end", heads, last)
    if tables := table_rows(View(0.0), story.last):
        heads, *lines = with_table_heads(tables)
        yield _table_of("Tables, over the whole run", heads, lines)
    yield "</main>"


# ---------------------------------------------------------------- a chart


def _section(chart: Chart, moments: Sequence[float], happenings: Sequence[Happening]) -> str:
    values = [value for curve in chart.curves.values() for value in curve if value is not None and abs(value) < _MOST]
    ticks = _ticks(min(0.0, *values) if values else 0.0, max(values, default=1.0))
    span = moments[-1] - moments[0] or 1.0

    def x(moment: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (moment - moments[0]) / span

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    key = chart.title.lower().replace(" ", "-")
    unit = f", {chart.unit}" if chart.unit else ""
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-labelledby="{key}-title {key}-about">',
        f'<title id="{key}-title">{escape(chart.title + unit)}</title>',
        f'<desc id="{key}-about">{escape(chart.about)}</desc>',
    ]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for moment in _ticks(moments[0], moments[-1]):
        if moment <= moments[-1]:
            parts.append(f'<text x="{x(moment):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{_duration(moment)}</text>')
    for happening in happenings:
        if moments[0] <= happening.at <= moments[-1]:
            at = f"{x(happening.at):.1f}"
            parts.append(
                f'<line class="event" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>{escape(f'{happening.process}: {happening.what}')}</title></line>"
            )
    for place, (name, curve) in enumerate(chart.curves.items()):
        points = _path([None if value is None else (x(at), y(value)) for at, value in zip(moments, curve, strict=True)])
        style = f"stroke:var(--c{place % _COLOURS})"
        dash = _DASHES[place // _COLOURS % len(_DASHES)]
        parts.append(
            f'<path class="curve" style="{style}" stroke-dasharray="{dash}" d="{points}">'
            f"<title>{escape(name)}</title></path>"
        )
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>')
    data = {
        "moments": [round(moment, 2) for moment in moments],
        "curves": {name: [_plain(value) for value in curve] for name, curve in chart.curves.items()},
        "left": _LEFT,
        "width": _WIDTH - _LEFT - _RIGHT,
        "from": moments[0],
        "to": moments[-1],
    }
    return (
        f"<section><h2>{escape(chart.title)}</h2><p class='about'>{escape(chart.about)}"
        f"{escape(f' In {chart.unit}.' if chart.unit else '')}</p>"
        f'<figure data-chart="{escape(json.dumps(data))}">{"".join(parts)}<div class="readout"></div>'
        f"{_legend(list(chart.curves))}</figure>{_numbers(chart)}</section>"
    )


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return a line with gaps where nothing is known; a value without neighbours is a dot."""
    drawn, pen = [], "M"
    for place, point in enumerate(points):
        if point is None or not all(map(math.isfinite, point)):
            pen = "M"
            continue
        drawn.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        following = points[place + 1] if place + 1 < len(points) else None
        if pen == "M" and following is None:
            drawn.append("h0.1")
        pen = "L"
    return "".join(drawn)


def _legend(names: Sequence[str]) -> str:
    entries = [
        f'<span><i style="border-color:var(--c{place % _COLOURS})"></i>{escape(name)}</span>'
        for place, name in enumerate(names[:_MOST_IN_LEGEND])
    ]
    if len(names) > _MOST_IN_LEGEND:
        entries.append(f"<span>and {len(names) - _MOST_IN_LEGEND} more</span>")
    return f'<figcaption class="legend">{"".join(entries)}</figcaption>'


def _numbers(chart: Chart) -> str:
    """Write the chart as a table, for readers who cannot see it or want numbers."""
    lines = [
        (name, *(map(_short, (min(known), sum(known) / len(known), max(known), known[-1]))))
        for name, curve in chart.curves.items()
        if (known := _known(curve))
    ]
    heads = ("process", "least", "mean", "most", "last")
    return f'<details><summary>As a table</summary><div class="wide">{_table(heads, lines)}</div></details>'


def _known(curve: Curve) -> list[float]:
    return [value for value in curve if value is not None and math.isfinite(value)]


# ---------------------------------------------------------------- tables


def _matrix(waited: dict[int, dict[int, float]]) -> str:
    workers = sorted({*waited, *(other for by in waited.values() for other in by)})
    most = max((seconds for by in waited.values() for seconds in by.values()), default=0.0) or 1.0
    head = "".join(f'<th scope="col" class="number">for worker {other}</th>' for other in workers)
    lines = []
    for worker in workers:
        row = [
            f'<td class="number" style="background:rgba(var(--heat),{0.6 * seconds / most:.2f})">{_short(seconds)}</td>'
            for seconds in (waited.get(worker, {}).get(other, 0.0) for other in workers)
        ]
        lines.append(f'<tr><th scope="row">worker {worker}</th>{"".join(row)}</tr>')
    return (
        '<section><h2>Who waited for whom</h2><p class="about">Seconds that requests of a worker (a line) were held '
        "back until another one (a column) had come.</p>"
        f'<div class="wide"><table><tr><td></td>{head}</tr>{"".join(lines)}</table></div></section>'
    )


def _table_of(heading: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return f'<section><h2>{escape(heading)}</h2><div class="wide">{_table(heads, lines)}</div></section>'


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _told(happening: Happening) -> tuple[str, str, str]:
    return _duration(happening.at), happening.process, happening.what


# ---------------------------------------------------------------- numbers


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose both."""
    span = high - low or abs(high)
    span = span if span > 1 / _MOST else 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * 5 >= span)
    first = math.floor(low / step)
    return [step * count for count in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _plain(value: float | None) -> float | None:
    """Return the value if JSON has a number for it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
