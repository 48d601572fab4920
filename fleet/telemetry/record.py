"""Keeps a record of a process's figures on disk: one line of JSON a second, in a file of its own.

Nobody needs a whole file: its last line is what ``fleet top LOGDIR`` and the view of ``fleetrun`` show, all of them
what ``fleet report`` draws. A file that has grown too large is thinned out: lines that are about equally far apart
stay, so a job may run for weeks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.base.clock import SystemClock, wall_time
from fleet.base.system_errors import reason
from fleet.errors import ConfigurationError
from fleet.telemetry.cause import LAUNCHER, forget
from fleet.telemetry.figures import WORKER, Figures, are_figures
from fleet.telemetry.view import SILENT_S, View, seen

#: A file is thinned out when it is larger than this; half of that stays.
MOST_BYTES = 8 << 20
SUFFIX = ".record.jsonl"
#: The kind of line that tells what happened to whom; launchers write them.
EVENT = "event"
#: When a file was changed last whose writer could go on no more.
_GIVEN_UP = 0
_WORKER = re.compile(r"worker [0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,9}")
#: What no server's line lacks.
_OF_SERVERS = ("version", "parked", "uptime_seconds")
#: What is a number in any line of a worker, unlike its loss, and what its script has reported.
_OF_WORKERS = WORKER.keys() - {"loss"}
#: A process's clock and its own time may differ by so much from line to line.
_JITTER_S = 1.0
#: The first second that no date is written for.
_NEVER = 253402300800.0
#: A last line that is longer than this is not looked for.
_LONGEST_LINE = 16 << 20


@dataclass(frozen=True)
class Line:
    """Holds one line. ``kind`` is ``worker`` (its figures), ``server`` (its status) or ``EVENT``; ``is_last`` marks the
    line that a process writes as it leaves."""

    at: float
    process: str
    kind: str
    told: Mapping[str, Any]
    is_last: bool = False


class Record:
    """Writes the file of one process, which nobody else writes. A process that has started again goes on with it."""

    def __init__(self, directory: str | os.PathLike[str], process: str, most_bytes: int = MOST_BYTES) -> None:
        self._process = process
        self._most_bytes = most_bytes
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = path_of(folder, process)
        self._file = self._path.open("ab", buffering=0)
        self._bytes = self._path.stat().st_size
        self._is_ended = False
        if self._bytes:  # an earlier process may have died in the middle of a line
            self._append(b"\n")

    def write(self, at: float, kind: str, told: object, is_last: bool = False) -> None:
        line = {"at": round(at, 3), "process": self._process, "kind": kind, "told": told}
        if is_last:
            line["last"] = True
        self._append(json.dumps(line, separators=(",", ":"), default=float).encode() + b"\n")
        self._is_ended = is_last
        if self._bytes > self._most_bytes:
            self._thin_out()

    def close(self) -> None:
        self._file.close()
        if not self._is_ended:  # nothing can be written any more, but its process goes on
            with contextlib.suppress(OSError):
                os.utime(self._path, (_GIVEN_UP, _GIVEN_UP))  # which takes no room on a disk

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a disk that is nearly full takes a part
            rest = rest[self._file.write(rest) :]
        self._bytes += len(data)

    def _thin_out(self) -> None:
        lines = [line for line in self._path.read_bytes().splitlines() if _parsed(line) is not None]
        instants = [line.at for line in _in_order(_known(lines))]
        beside = self._path.with_suffix(".thinner")
        beside.write_bytes(b"".join(lines[index] + b"\n" for index in evenly_spread(instants)))
        os.replace(beside, self._path)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._bytes = self._path.stat().st_size


class Chronicle:
    """Records what happens to the processes of a job, beside their own records. It first removes what an earlier job
    has left there: of these processes, or of all where these are the whole job."""

    def __init__(self, directory: Path, processes: Sequence[str], is_whole: bool) -> None:
        self._clock = SystemClock()
        self._began = self._clock.now()
        stale = directory.glob(f"*{SUFFIX}") if is_whole else (path_of(directory, process) for process in processes)
        name = f"{LAUNCHER} of {processes[0]}"
        try:
            for path in (*stale, path_of(directory, name)):
                path.unlink(missing_ok=True)
            forget(directory)
            self._record = Record(directory, name)
        except OSError as error:
            raise ConfigurationError(
                "what an earlier job has left cannot be removed",
                where=str(error.filename or directory),
                got=reason(error),
                todo="Remove it, or give --log_dir, or FLEET_RECORD_DIR, another folder.",
            ) from None

    def write(self, process: str, what: str, is_last: bool = False) -> None:
        # The job is worth more than its story: a full disk ends the one and not the other.
        told = {"process": process, "what": what, "uptime_seconds": round(self._clock.now() - self._began, 3)}
        with contextlib.suppress(OSError):
            self._record.write(wall_time(), EVENT, told, is_last)

    def __enter__(self) -> Chronicle:
        return self

    def __exit__(self, *_: object) -> None:
        self.write(LAUNCHER, "ended", is_last=True)
        self._record.close()


def path_of(directory: Path, process: str) -> Path:
    return directory / f"{process.replace(' ', '.')}{SUFFIX}"


def read_records(directory: Path) -> list[Line]:
    """Return all that is recorded there, in the order of time, whoever has set a clock back meanwhile."""
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    lines = (line for path in paths for line in _in_order(_known(path.read_bytes().splitlines())))
    return sorted(lines, key=lambda line: line.at)


def newest(directory: Path, processes: Iterable[str] | None = None) -> list[Line]:
    """Return the last line of every process, or of ``processes``."""
    paths = (
        sorted(directory.glob(f"*{SUFFIX}"))
        if processes is None
        else [path_of(directory, process) for process in processes]
    )
    found = (_last(path) for path in paths)
    return [line for line in found if line is not None]


def has_broken_off(directory: Path, process: str, at: float) -> bool:
    """Say whether a process ended as part of a job without having left it. Old lines prove nothing, nor does a record
    that was given up: it ends before its process if the disk is full."""
    path = path_of(directory, process)
    last = _last(path)
    try:
        changed = path.stat().st_mtime
    except OSError:  # it has never joined
        return False
    written = changed if last is None else last.at
    return not (last is not None and last.is_last) and changed != _GIVEN_UP and at - written < SILENT_S


def view_of(at: float, lines: Iterable[Line]) -> View:
    """Return the view that the records' newest lines give."""
    statuses: dict[str, Mapping[str, Any] | str] = {}
    own: dict[int, tuple[Figures, float]] = {}
    gone: set[int] = set()
    for line in lines:
        if line.kind == "server":
            statuses[line.process] = line.told
        elif line.kind == "worker":
            index = int(line.process.rpartition(" ")[2])
            own[index] = line.told, at - line.at
            gone |= {index} if line.is_last else set()
    return seen(at, statuses, own, gone)


def is_over(lines: Sequence[Line], at: float) -> bool:
    """Say whether every launcher has seen the end of its processes, or every process has left or written nothing for so
    long that it must have ended; ``lines`` are their newest."""
    launchers = [line for line in lines if line.kind == EVENT]
    if launchers and all(line.is_last for line in launchers):
        return True
    return all(line.is_last or line.at <= at - SILENT_S for line in lines)


def training_of(lines: Sequence[Line]) -> tuple[View, View, View]:
    """Return how a job stood when the last of its workers had begun to train, while all of them still trained, and in
    the end."""
    trained: dict[str, list[float]] = {}
    for line in lines:
        if line.kind == "worker" and line.told.get("steps", 0) > 0:
            trained.setdefault(line.process, []).append(line.at)
    start = max((instants[0] for instants in trained.values()), default=0.0)
    # A worker's last line is written as it leaves.
    ends = (instants[-2] if len(instants) > 2 else instants[-1] for instants in trained.values())
    end = min(ends, default=lines[-1].at)
    return view_at(lines, start), view_at(lines, max(start, end)), view_at(lines, lines[-1].at)


def view_at(lines: Iterable[Line], at: float) -> View:
    """Return how a job stood at one moment; ``lines`` are in the order of time."""
    latest = {line.process: line for line in lines if line.at <= at}
    return view_of(at, latest.values())


def evenly_spread(instants: Sequence[float]) -> list[int]:
    """Return which half of some lines to keep: the first of each of many spans of equal length, and the last of all."""
    if not instants:
        return []
    spans = max(1, len(instants) // 2)
    length = (instants[-1] - instants[0]) / spans or 1.0
    first: dict[int, int] = {}
    for index, at in enumerate(instants):
        first.setdefault(int((at - instants[0]) / length), index)
    return sorted({*list(first.values())[:spans], len(instants) - 1})


def _known(lines: Iterable[bytes]) -> Iterator[Line]:
    return (line for line in map(_parsed, lines) if line is not None)


def _in_order(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines of one process at the times that its clock would have shown if nobody had set it back. What it
    tells of its own time says how long after the line before such a line was written."""
    back, before = 0.0, None
    for line in lines:
        at = line.at + back
        if before is not None:
            passed = max(0.0, _own_time(line) - _own_time(before))  # it may have started again
            if at < before.at + max(0.0, passed - _JITTER_S):
                back += before.at + passed - at
                at = line.at + back
        before = replace(line, at=at)
        yield before


def _own_time(line: Line) -> float:
    figures: Figures = line.told.get("figures", {}) if line.kind == "server" else line.told
    return figures.get("uptime_seconds", 0.0) if line.kind in (EVENT, "worker", "server") else 0.0


def _last(path: Path) -> Line | None:
    """Return the newest whole line, wherever its writer is in the next one."""
    size = 1 << 14
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while True:
                size = min(size, end)
                file.seek(end - size)
                lines = file.read(size).split(b"\n")
                for line in reversed(lines if size == end else lines[1:]):  # else the first may lack its beginning
                    if line and (parsed := _parsed(line)) is not None:
                        return parsed
                if size == end or size > _LONGEST_LINE:
                    return None
                size *= 4
    except OSError:
        return None


def _parsed(line: bytes) -> Line | None:
    """Return a line of ours; None for anything else, and for half a line."""
    try:
        told = json.loads(line)
        made = Line(float(told["at"]), str(told["process"]), str(told["kind"]), told["told"], told.get("last") is True)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return made if isinstance(made.told, Mapping) and 0 <= made.at < _NEVER and _is_ours(made) else None


def _is_ours(line: Line) -> bool:
    """Say whether a line tells of a process what those who read it expect."""
    if line.kind == EVENT:
        said = all(isinstance(line.told.get(key), str) for key in ("process", "what"))
        return said and are_figures({"uptime_seconds": line.told.get("uptime_seconds", 0.0)})
    if line.kind == "worker":
        return _WORKER.fullmatch(line.process) is not None and are_figures(line.told, finite=_OF_WORKERS)
    return line.kind != "server" or _is_status(line.told)


def _is_status(told: Mapping[str, Any]) -> bool:
    tables, workers, hot = told.get("tables", {}), told.get("workers", ()), told.get("hot", ())
    return (
        all(isinstance(told.get(key, ""), str) for key in ("mode", "errand", "pace"))
        and isinstance(told.get("phase"), str)
        and are_figures(told.get("figures"), _OF_SERVERS)
        and isinstance(tables, Mapping)
        and all(not isinstance(table, Mapping) or are_figures(table) for table in tables.values())
        and isinstance(workers, list | tuple)
        and all(map(_is_worker, workers))
        and isinstance(hot, list | tuple)
        and all(map(_is_hot, hot))
    )


def _is_worker(told: object) -> bool:
    """Say whether this is what a server tells of a worker."""
    if not isinstance(told, Mapping):
        return False
    heard, waits, waited, staleness = (told.get(key) for key in ("heard_seconds", "waits", "waited", "staleness"))
    return (
        all(isinstance(told.get(key), str) for key in ("standing", "label"))
        and type(told.get("worker", 0)) is int
        and "heard_seconds" in told
        and are_figures({"heard": 0.0 if heard is None else heard, "late": told.get("late", 0)})
        and are_figures({"steps": told.get("steps")})
        and are_figures(told.get("figures"), finite=_OF_WORKERS)
        and isinstance(staleness, list)
        and are_figures(dict(enumerate(staleness)), (0, 1))
        and isinstance(waited, Mapping)
        and all(map(_NUMBER.fullmatch, waited))
        and are_figures(waited)
        and "waits" in told
        and (waits is None or _is_wait(waits))
    )


def _is_wait(told: object) -> bool:
    if not isinstance(told, Mapping) or not isinstance(told.get("for"), list):
        return False
    return (
        isinstance(told.get("what"), str)
        and are_figures({"seconds": told.get("seconds")})
        and all(type(worker) is int for worker in told["for"])
    )


def _is_hot(told: object) -> bool:
    if not isinstance(told, list) or len(told) != 3:
        return False
    table, number, share = told
    return isinstance(table, str) and type(number) is int and are_figures({"share": share})
