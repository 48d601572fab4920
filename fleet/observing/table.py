"""Rows of a picture as a table: of plain text anywhere, of rich's on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleet.observing.picture import Row, total_speed

HEADS = ("process", "step", "steps/s", "examples/s", "loss", "stale", "queue", "sent/s", "received/s", "memory", "")
_NOTHING = "·"
#: What a narrow terminal does without, one after the other.
_SPARED = ("received/s", "sent/s", "memory", "queue", "stale", "examples/s")
_ROOM_FOR_NOTE = 24
_BETWEEN = 2
#: Lines of a table that are no rows: its title, the heads, a rule.
_FRAME = 3


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.process,
        _NOTHING if row.step is None else str(row.step),
        _number(row.steps_a_second),
        _number(row.examples_a_second),
        _loss(row.loss),
        _number(row.staleness),
        _NOTHING if row.queue is None else str(row.queue),
        _bytes(row.sent_a_second),
        _bytes(row.received_a_second),
        _bytes(row.memory),
        row.note,
    )


def title(shown: Sequence[Row]) -> str:
    steps, examples = total_speed(shown)
    speed = f"{_number(steps)} steps/s"
    return f"{speed}, {_number(examples)} examples/s" if examples else speed


def plain(shown: Sequence[Row]) -> str:
    """Columns side by side; numbers to the right."""
    widths, last = _widths(shown), len(HEADS) - 1

    def laid_out(line: tuple[str, ...]) -> str:
        padded = [
            text.ljust(width) if column in (0, last) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(laid_out, [HEADS, *map(cells, shown)]))


def rich_table(of: Sequence[Row], width: int, height: int) -> Any:
    """What rich prints, no wider than ``width`` and no higher than ``height``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = most_telling(of, height - _FRAME)
    left_out = "" if len(shown) == len(of) else f"; {len(shown)} of {len(of)} processes"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title(of) + left_out,
        title_justify="left",
        title_style="bold",
        padding=(0, _BETWEEN - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    widths = _widths(shown)
    columns = fitting(widths, width)
    for column in columns:
        is_note = column == len(HEADS) - 1
        justify: Any = "left" if column == 0 or is_note else "right"
        least = None if is_note else widths[column]
        table.add_column(HEADS[column], justify=justify, min_width=least, no_wrap=True, overflow="ellipsis")
    for row in shown:
        texts = [Text(text) for text in cells(row)]
        texts[0].stylize("bold cyan" if row.process.startswith("worker") else "bold magenta")
        texts[-1].stylize("yellow")
        if row.loss is not None and not math.isfinite(row.loss):
            texts[HEADS.index("loss")].stylize("bold red")
        table.add_row(*(texts[column] for column in columns), style=None if row.is_well else "red")
    return table


def most_telling(of: Sequence[Row], room: int) -> list[Row]:
    """As many as there is room for, and one at least: first what is not well, then what others wait for."""
    places = sorted(range(len(of)), key=lambda place: (of[place].is_well, -of[place].weight, place))
    return [of[place] for place in sorted(places[: max(1, room)])]


def fitting(widths: Sequence[int], room: int) -> list[int]:
    """The columns that there is room for, and some for the note."""
    needed = [*widths[:-1], min(widths[-1], _ROOM_FOR_NOTE)]
    columns = list(range(len(widths)))
    for head in _SPARED:
        if sum(needed[column] + _BETWEEN for column in columns) > room:
            columns.remove(HEADS.index(head))
    return columns


def _widths(shown: Sequence[Row]) -> list[int]:
    lines = [HEADS, *map(cells, shown)]
    return [max(len(line[column]) for line in lines) for column in range(len(HEADS))]


def _number(value: float | None) -> str:
    """Three digits that count; large ones in full."""
    if value is None:
        return _NOTHING
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or value == 0 else f"{value:.1e}"


def _loss(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4g}"


def _bytes(value: float | None) -> str:
    if value is None:
        return _NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
