"""Formats rows of a view as a table: of plain text anywhere, of rich's on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleet.telemetry.view import HotId, Row, TableRow, total_speed

HEADS = ("process", "step", "steps/s", "examples/s", "loss", "stale", "queue", "sent/s", "received/s", "memory", "")
#: The columns of a table of tables.
TABLE_HEADS = (
    *("table", "rows", "in memory", "on disk", "memory", "disk", "hits", "read/step", "written/step"),
    *("pending", "evicted", "dropped"),
)
_NOTHING = "·"
#: What a script reports under names of its own stands behind its loss.
_OWN = HEADS.index("loss") + 1
#: The columns that a narrow terminal drops, one after the other: these, then the script's own, then its examples.
_SPARED_FIRST, _SPARED_LAST = ("received/s", "sent/s", "memory", "queue", "stale"), "examples/s"
_ROOM_FOR_NOTE = 24
_BETWEEN = 2
#: Lines of a table that are no rows: its title, the heads, a rule.
_FRAME = 3


def cells(row: Row, names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the cells of a row; ``names`` are figures of scripts' own that have a column."""
    return (
        row.process,
        _NOTHING if row.step is None else str(row.step),
        shown_number(row.steps_a_second),
        shown_number(row.examples_a_second),
        _value(row.loss),
        *(_value(row.reported.get(name)) for name in names),
        shown_number(row.staleness),
        _NOTHING if row.queue is None else str(row.queue),
        shown_bytes(row.sent_a_second),
        shown_bytes(row.received_a_second),
        shown_bytes(row.memory),
        row.note,
    )


def with_heads(shown: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the lines of a table: its heads, with what these scripts report, then a line for each row."""
    names = list(dict.fromkeys(name for row in shown for name in row.reported))
    return [(*HEADS[:_OWN], *names, *HEADS[_OWN:]), *(cells(row, names) for row in shown)]


def title(shown: Sequence[Row]) -> str:
    speed = total_speed(shown)
    steps = f"{shown_number(speed.steps)} {speed.unit}/s"
    return f"{steps}, {shown_number(speed.examples)} examples/s" if speed.examples else steps


def with_table_heads(shown: Sequence[TableRow]) -> list[tuple[str, ...]]:
    """Return the lines of a table of tables."""
    return [TABLE_HEADS, *map(_table_cells, shown)]


def _table_cells(row: TableRow) -> tuple[str, ...]:
    def count(name: str) -> str:
        return f"{row.figures[name]:,.0f}"

    return (
        row.name,
        *map(count, ("rows", "in_memory", "on_disk")),
        shown_bytes(row.figures["bytes"]),
        shown_bytes(row.figures["disk_bytes"]),
        f"{row.hit_rate:.1%}",
        shown_bytes(row.a_step("read_bytes")),
        shown_bytes(row.a_step("written_bytes")),
        *map(count, ("pending", "evicted", "dropped_gradients")),
    )


def plain(shown: Sequence[Row], tables: Sequence[TableRow] = (), hot: Sequence[HotId] = ()) -> str:
    """Return the tables as text: columns side by side, numbers to the right; and below which ids are hot."""
    lines = with_heads(shown)
    text = aligned(lines, (0, len(lines[0]) - 1))
    below = [aligned(with_table_heads(tables), (0,))] if tables else []
    return "\n\n".join([text, *below, *([asked_for_most(hot)] if hot else [])])


def asked_for_most(hot: Sequence[HotId]) -> str:
    """Return a line that names ids of tables, each with the part of the requests that ask for it."""
    return f"asked for most: {', '.join(map(str, hot))}"


def aligned(lines: Sequence[tuple[str, ...]], to_the_left: Sequence[int]) -> str:
    widths = _widths(lines)

    def laid_out(line: tuple[str, ...]) -> str:
        padded = [
            text.ljust(width) if column in to_the_left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(laid_out, lines))


def rich_tables(
    of: Sequence[Row], tables: Sequence[TableRow], width: int, height: int, hot: Sequence[HotId] = ()
) -> Any:
    """Return what rich prints of processes, and below that of tables and of hot ids, as far as there is room."""
    from rich.console import Group
    from rich.text import Text

    above = rich_table(of, width, height)
    room = height - _FRAME - len(of)
    below: list[str] = []
    if hot and room >= 2:  # a line between, and this one
        below = ["", asked_for_most(hot)]
        room -= 2
    if tables and room >= 3:  # and the heads
        least_hits = sorted(tables, key=lambda row: row.hit_rate)
        below = ["", aligned(with_table_heads(least_hits[: room - 2]), (0,)), *below]
    return Group(above, *(Text(text, no_wrap=True, overflow="ellipsis") for text in below)) if below else above


def rich_table(of: Sequence[Row], width: int, height: int) -> Any:
    """Return what rich prints, no wider than ``width`` and no higher than ``height``."""
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
    heading, *lines = with_heads(shown)
    widths = _widths([heading, *lines])
    columns = fitting(widths, width)
    for column in columns:
        is_note = column == len(heading) - 1
        justify: Any = "left" if column == 0 or is_note else "right"
        least = None if is_note else widths[column]
        table.add_column(heading[column], justify=justify, min_width=least, no_wrap=True, overflow="ellipsis")
    for row, line in zip(shown, lines, strict=True):
        texts = [Text(text) for text in line]
        texts[0].stylize("bold cyan" if row.process.startswith("worker") else "bold magenta")
        texts[-1].stylize("yellow")
        if row.loss is not None and not math.isfinite(row.loss):
            texts[HEADS.index("loss")].stylize("bold red")
        table.add_row(*(texts[column] for column in columns), style=None if row.is_well else "red")
    return table


def most_telling(of: Sequence[Row], room: int) -> list[Row]:
    """Return as many rows as there is room for, and one at least: first those that are not well, then those that others
    wait for."""
    places = sorted(range(len(of)), key=lambda place: (of[place].is_well, -of[place].weight, place))
    return [of[place] for place in sorted(places[: max(1, room)])]


def fitting(widths: Sequence[int], room: int) -> list[int]:
    """Return the columns that there is room for, beside some room for the note."""
    needed = [*widths[:-1], min(widths[-1], _ROOM_FOR_NOTE)]
    columns = list(range(len(widths)))
    own = len(widths) - len(HEADS)

    def place(head: str) -> int:
        column = HEADS.index(head)
        return column if column < _OWN else column + own

    for column in (*map(place, _SPARED_FIRST), *reversed(range(_OWN, _OWN + own)), place(_SPARED_LAST)):
        if sum(needed[each] + _BETWEEN for each in columns) > room:
            columns.remove(column)
    return columns


def _widths(lines: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def shown_number(value: float | None) -> str:
    """Return a number with three digits that count; large ones in full."""
    if value is None:
        return _NOTHING
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or value == 0 else f"{value:.1e}"


def _value(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4g}"


def shown_bytes(value: float | None) -> str:
    if value is None:
        return _NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
