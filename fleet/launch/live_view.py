"""Shows the live view of ``fleetrun``: a table that stays below the lines of the processes, on a terminal.

It is made of the records that the processes keep in the log directory. The thread that writes their lines draws it, as
nothing else may write to the terminal in between.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet.base.clock import wall_time
from fleet.telemetry.live_table import rich_tables
from fleet.telemetry.record import newest, view_of
from fleet.telemetry.view import History, Row, TableRow, View, rows, table_rows

#: How often it is made anew.
PERIOD_S = 1.0
_ORDINARY = 80, 24
#: So many lines of the terminal stay for what processes print.
_KEPT = 6


def is_possible(environ: Mapping[str, str]) -> bool:
    """Say whether this process writes to a terminal that can move its cursor."""
    return sys.stdout.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown")


class LiveView:
    def __init__(self, fd: int, directory: Path, processes: Sequence[str]) -> None:
        """``fd`` is the terminal. ``processes`` are those of this machine; servers report the others."""
        self.fd = fd
        self._directory = directory
        self._processes = processes
        #: how each process that has ended did so
        self._ended: dict[str, str] = {}
        self._history = History()
        self._text: list[str] = []
        self._made_at = float("-inf")
        self._drawn = 0

    def ended(self, process: str, how: str) -> None:
        self._ended[process] = how
        self._made_at = float("-inf")

    def started(self, process: str) -> None:
        self._ended.pop(process, None)

    def clear(self) -> bytes:
        """Return the bytes that take the view off the terminal, so that a line can be written."""
        drawn, self._drawn = self._drawn, 0
        return f"\x1b[{drawn}A\r\x1b[J".encode() if drawn else b""

    def draw(self, now: float) -> bytes:
        """Return the bytes that draw the view below what was written, with new figures if the old ones are due."""
        if self._drawn and now - self._made_at < PERIOD_S:
            return b""
        columns, lines = _size(self.fd)
        if now - self._made_at >= PERIOD_S:
            self._made_at = now
            self._history.add(view_of(wall_time(), newest(self._directory, self._processes)))
            before, known = self._history.ends
            tables = [row for row in table_rows(before, known) if row.moves]
            self._text = _rendered(self._rows(before, known), tables, columns, lines - _KEPT)
        cleared = self.clear()
        shown = self._text[: max(0, lines - 1)]
        self._drawn = len(shown)
        return cleared + "".join(f"{line}\n" for line in shown).encode()

    def _rows(self, before: View, now: View) -> list[Row]:
        known = {row.process: row for row in rows(before, now)}
        for process in self._processes:
            known.setdefault(process, Row(process, note="starting"))
        return [
            row
            if process not in self._ended
            else Row(process, row.step, loss=row.loss, note=self._ended[process], reported=row.reported)
            for process, row in sorted(known.items(), key=_place)
        ]


def _size(fd: int) -> tuple[int, int]:
    """Return the size of a terminal; one that does not know its size is taken for an ordinary one."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return _ORDINARY
    return size.columns or _ORDINARY[0], size.lines or _ORDINARY[1]


def _place(item: tuple[str, Row]) -> tuple[bool, int, str]:
    """Return a sorting key: workers first, in the order of their numbers."""
    role, _, index = item[0].partition(" ")
    return role == "server", int(index) if index.isdigit() else 0, item[0]


def _rendered(shown: Sequence[Row], tables: Sequence[TableRow], columns: int, lines: int) -> list[str]:
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=True, width=columns, legacy_windows=False)
    console.print(rich_tables(shown, tables, columns, lines))
    return buffer.getvalue().splitlines()
