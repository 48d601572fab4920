"""Rows of a picture as a table: of plain text anywhere, of rich's on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleet.observing.picture import Row, total_speed

HEADS = ("process", "step", "steps/s", "examples/s", "loss", "stale", "queue", "sent/s", "received/s", "memory", "")
_NOTHING = "·"


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
    lines = [HEADS, *map(cells, shown)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    last = len(HEADS) - 1

    def laid_out(line: tuple[str, ...]) -> str:
        padded = [
            text.ljust(width) if column in (0, last) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(laid_out, lines))


def rich_table(shown: Sequence[Row], heading: str) -> Any:
    """What rich prints."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, title=heading, title_justify="left", title_style="bold", expand=False, pad_edge=False
    )
    last = len(HEADS) - 1
    for column, head in enumerate(HEADS):
        justify: Any = "left" if column in (0, last) else "right"
        table.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", ratio=1 if column == last else None)
    for row in shown:
        texts = [Text(text, overflow="ellipsis") for text in cells(row)]
        texts[0].stylize("bold cyan" if row.process.startswith("worker") else "bold magenta")
        texts[last].stylize("yellow")
        if row.loss is not None and not math.isfinite(row.loss):
            texts[4].stylize("bold red")
        table.add_row(*texts, style=None if row.is_well else "red")
    return table


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
