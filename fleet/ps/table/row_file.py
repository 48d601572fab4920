"""Keeps those rows of a table in a file that memory has no room for.

The file is written in segments, one after the other, each in one piece: rows are collected in memory until a segment is
full, and a thread writes it. A row that is read in between is read from there. A record is a row's id, its columns, and
a checksum, which its number goes into as well, so that what is read is what was written last at this place.

A record is *live* as long as its row is not in memory in another form, or in a later record. A segment of which no
record is live is used again. When half of what written segments have room for is not live, the live records of the
segment with the fewest are written anew: those among dead ones, and those of segments that a scan has closed
before they were full.

Rows lie here for the life of their table only; what a server has to keep is in its journal and its snapshots.

Not thread-safe, but for ``Reading.run``: the caller holds the server's lock.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as TooLateError
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fleet.base.system_errors import is_full, reason
from fleet.errors import CheckpointError, TableFileError
from fleet.numeric.ids import GAMMA
from fleet.numeric.jit import Ids, Rows, Segments, announce_read, compiled, read_cached, read_file, row
from fleet.ps.table.place_index import MOST_RECORDS

#: A record's number is its segment's, and its place there in these bits.
_PLACE_BITS = 20
_PLACES = 1 << _PLACE_BITS
#: So many full segments at most wait for the disk in memory.
_WAITING = 2
#: When a smaller part of what written segments have room for is live, segments are written anew.
_LIVE_PART = 0.5

#: After so many segments a scan is given up that nobody goes on with.
_PATIENCE = 4096
#: For so many segments the last part of a scan may be asked for again, as the answer was lost.
_LAST_PATIENCE = 32

Lines = npt.NDArray[np.uint8]


class Losses:
    """Remembers the first error for which rows cannot be had: it concerns all of a job, whoever meets it."""

    def __init__(self) -> None:
        self.first: TableFileError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, TableFileError) and self.first is None:
            self.first = error


@dataclass(frozen=True)
class Layout:
    """Says where the columns of a row lie in a record: their names, and what each is filled with in rows of before."""

    offsets: dict[str, int]
    #: where the columns end
    end: int
    size: int

    @classmethod
    def of(cls, widths: dict[str, int]) -> Layout:
        """Lay out columns of so many bytes: the id comes first, the checksum last."""
        offsets, at = {}, 8
        for name, width in widths.items():
            offsets[name] = at
            at += width
        return cls(offsets, at, -(-(at + 4) // 8) * 8)


@dataclass
class _Segment:
    layout: Layout
    #: the order in which segments were begun
    age: int
    count: int = 0
    #: the records, until they are in the file
    memory: Lines | None = None

    @property
    def is_full(self) -> bool:
        return self.memory is None or self.count >= len(self.memory)


class Part(NamedTuple):
    """Says where some of the records that are read lie, which have one layout."""

    layout: Layout
    #: which of all records
    chosen: Ids
    #: where they begin in the file, or -1 if they are in memory yet
    starts: Ids
    #: where they are there, and what keeps them there
    addresses: npt.NDArray[np.uint64]
    kept: Sequence[Lines | None]


class Reading:
    """Reads records, which may be done without the server's lock: what has become of them meanwhile shows when their
    rows are taken."""

    def __init__(self, file: RowFile, records: Ids) -> None:
        self.records = records
        self._path, self._file, self._losses = file.path, file.number, file.losses
        self.segments = _distinct(records >> _PLACE_BITS)
        self.ages = file.ages(self.segments)
        self._parts = file.parts(records)
        #: for each layout: it, which of the records, and their bytes
        self.lines: list[tuple[Layout, Ids, Lines]] = []

    @property
    def nbytes(self) -> int:
        """Return how many bytes are read."""
        return sum(part.layout.size * part.chosen.size for part in self._parts)

    def run(self) -> None:
        with self._losses:
            self._run()

    def _run(self) -> None:
        for layout, chosen, starts, addresses, _ in self._parts:
            lines = np.empty((chosen.size, layout.size), np.uint8)
            failed = _read(Segments(addresses, lines, 0), starts, self._file, lines)
            if failed < chosen.size:
                self._fail(int(self.records[chosen[failed]]), int(starts[failed]), layout.size)
            self.lines.append((layout, chosen, lines))

    def _fail(self, record: int, start: int, size: int) -> None:
        """Find out why a record could not be read."""
        try:
            got = len(os.pread(self._file, size, start))
        except OSError as error:
            raise _failed("read", self._path, error) from error
        if got < size:
            raise TableFileError(
                "a file of rows is shorter than what was written to it",
                where=f"{self._path}, record {record} at byte {start}",
                expected=f"{size} bytes",
                got=f"{got} bytes",
                todo=_GONE,
            )


class Backlog(NamedTuple):
    """Follows what is on its way to the disk."""

    writing: Future[None]
    deadline_s: float

    def wait(self) -> None:
        """Wait until it is there, which may be done without the server's lock. Should it fail, or take too long, who
        writes next hears of it."""
        wait([self.writing], self.deadline_s)


class RowFile:
    """Holds the records of one table."""

    def __init__(
        self, path: Path, segment_bytes: int, writer: ThreadPoolExecutor, deadline_s: float, losses: Losses
    ) -> None:
        """``writer`` has one thread, which may write for others too; ``deadline_s`` is the longest that the disk may
        take for a segment."""
        self.path = path
        self.losses = losses
        self._segment_bytes = segment_bytes
        self._writer = writer
        self._deadline_s = deadline_s
        self._segments: dict[int, _Segment] = {}
        self._unused: list[int] = []
        self._ages = 0
        self._open = -1
        #: scans under way: the newest segment when each began, and the one at which it is given up
        self._scans: dict[int, int] = {}
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        #: By segment: where it is in memory, or 0; its age, -1 if it is used no more; how many records it has room for,
        #: its records, and the live ones.
        self._addresses = np.zeros(1, np.uint64)
        self._ages_of, self._places = np.full(1, -1), np.ones(1, np.int64)
        self._counts, self._lives = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.live = 0
        self.bytes_written = 0
        try:
            self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _failed("make", path, error) from error
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Remove the file, when what is on its way has been written. Nothing waits for it."""
        for _, writing in self._waiting:
            writing.cancel()
        with contextlib.suppress(RuntimeError):  # the writer has ended
            self._writer.submit(_remove, self.number, self.path)
            return
        _remove(self.number, self.path)

    @property
    def nbytes(self) -> int:
        """Return the memory that segments take on their way to the disk."""
        return sum(segment.memory.nbytes for segment in self._segments.values() if segment.memory is not None)

    @property
    def most_bytes(self) -> int:
        """Return the memory that segments may take."""
        return most_bytes(self._segment_bytes)

    @property
    def bytes_on_disk(self) -> int:
        return (len(self._segments) + len(self._unused)) * self._segment_bytes

    def ages(self, segments: Ids) -> Ids:
        """Return when segments were begun; -1 for those that are used no more."""
        return self._ages_of[segments]

    # ---------------------------------------------------------------- writing

    def append(self, layout: Layout, lines: Lines) -> Ids:
        """Write rows, of which ``lines`` has all but the checksums, and return their records."""
        with self.losses:
            return self._append(layout, lines)

    def _append(self, layout: Layout, lines: Lines) -> Ids:
        records = np.empty(len(lines), np.int64)
        start = 0
        while start < len(lines):
            segment = self._writable(layout)
            memory = segment.memory
            assert memory is not None
            count = min(len(lines) - start, len(memory) - segment.count)
            first = (self._open << _PLACE_BITS) + segment.count
            part = slice(start, start + count)
            records[part] = np.arange(first, first + count)
            into = memory[segment.count : segment.count + count]
            into[:] = lines[part]
            _sign(into.view(np.uint64), records[part])
            segment.count += count
            self._counts[self._open] += count
            self._lives[self._open] += count
            start += count
        self.live += len(lines)
        return records

    def _writable(self, layout: Layout) -> _Segment:
        """Return the segment that is being filled; the one before is written."""
        current = self._segments.get(self._open)
        if current is not None and current.layout == layout and not current.is_full:
            return current
        if current is not None:
            self._write(self._open, current)
        number = self._unused.pop() if self._unused else len(self._segments)
        places = min(self._segment_bytes // layout.size, _PLACES)
        if number << _PLACE_BITS >= MOST_RECORDS:
            raise TableFileError(
                "a table has more rows than a file of rows can name",
                where=str(self.path),
                todo="Give the job more servers, or these more memory (FLEET_TABLE_MEMORY_MB).",
            )
        memory = np.zeros((places, layout.size), np.uint8)
        for begun in [begun for begun, until in self._scans.items() if until <= self._ages]:
            self.give_up(begun)
        made = self._segments[number] = _Segment(layout, self._ages, memory=memory)
        self._ages += 1
        self._open = number
        if number >= self._addresses.size:
            self._lengthen(number + 16)
        self._addresses[number], self._ages_of[number] = memory.ctypes.data, made.age
        self._places[number] = places
        self._counts[number] = self._lives[number] = 0
        return made

    def backlog(self) -> Backlog | None:
        """Return what has to be written before somebody who fills a few segments need not wait for it, if anything
        does."""
        if len(self._waiting) < _WAITING:
            return None
        _, writing = self._waiting[-_WAITING]
        return None if writing.done() else Backlog(writing, self._deadline_s)

    def begin_scan(self) -> int:
        """Return an age that is this scan's alone: rows that are written from now on are in segments begun later."""
        current = self._segments.get(self._open)
        if current is not None and current.count:
            with self.losses:
                self._write(self._open, current)
            self._open = -1
        begun, self._ages = self._ages, self._ages + 1
        self._scans[begun] = self._ages + _PATIENCE
        return begun

    def _lengthen(self, more: int) -> None:
        self._addresses = np.concatenate([self._addresses, np.zeros(more, np.uint64)])
        self._ages_of = np.concatenate([self._ages_of, np.full(more, -1)])
        self._places = np.concatenate([self._places, np.ones(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._lives = np.concatenate([self._lives, np.zeros(more, np.int64)])

    def _write(self, number: int, segment: _Segment) -> None:
        """Let a segment be written as soon as the disk has time."""
        while len(self._waiting) > _WAITING:
            self._await_one()
        memory = segment.memory
        assert memory is not None
        data = memory[: segment.count].reshape(-1)
        self.bytes_written += data.nbytes
        writing = self._writer.submit(
            _write, self.number, number * self._segment_bytes, data.data, self.path, self.losses
        )
        self._waiting.append((number, writing))
        while self._waiting and self._waiting[0][1].done():
            self._await_one()

    def _await_one(self) -> None:
        number, writing = self._waiting[0]
        try:
            writing.result(self._deadline_s)
        except TooLateError:
            raise TableFileError(
                "the disk takes no rows",
                where=str(self.path),
                expected=f"a segment of {self._segment_bytes >> 10} KiB written within {self._deadline_s:g} s",
                todo="Look at the disk under FLEET_TABLE_DIR.",
            ) from None
        self._waiting.popleft()
        segment = self._segments.get(number)
        if segment is not None:
            segment.memory, self._addresses[number] = None, 0
            self._drop_if_dead(number, segment)

    # ---------------------------------------------------------------- reading

    def parts(self, records: Ids) -> list[Part]:
        """Return what is to be read for records."""
        numbers = records >> _PLACE_BITS
        segments = _distinct(numbers).tolist()
        layouts: list[Layout] = []
        of_segment = np.zeros(max(segments, default=0) + 1, np.int64)
        last = None
        for number in segments:
            layout = self._segments[number].layout
            if layout is not last:
                last = layout
                if layout not in layouts:
                    layouts.append(layout)
                index = layouts.index(layout)
            of_segment[number] = index
        parts = []
        for index, layout in enumerate(layouts):
            chosen = np.flatnonzero(of_segment[numbers] == index)
            mine = records[chosen] >> _PLACE_BITS
            within = (records[chosen] & (_PLACES - 1)) * layout.size
            addresses = self._addresses[mine]
            in_memory = np.flatnonzero(addresses)
            starts = mine * self._segment_bytes + within
            starts[in_memory] = -1
            addresses[in_memory] += within[in_memory].astype(np.uint64)
            kept = [self._segments[number].memory for number in _distinct(mine[in_memory]).tolist()]
            parts.append(Part(layout, chosen, starts, addresses, kept))
        return parts

    def check(self, records: Ids, lines: Lines) -> None:
        """Raise an error unless these are the bytes that were written."""
        with self.losses:
            self._check(records, lines)

    def _check(self, records: Ids, lines: Lines) -> None:
        bad = _verify(lines.view(np.uint64), records)
        if bad >= 0:
            number, place = int(records[bad]) >> _PLACE_BITS, int(records[bad]) & (_PLACES - 1)
            start = number * self._segment_bytes + place * lines.shape[1]
            raise TableFileError(
                "a file of rows is damaged",
                where=f"{self.path}, {lines.shape[1]} bytes at byte {start}",
                expected="the bytes that were written, by their checksum",
                got="others",
                todo=_GONE,
            )

    # ---------------------------------------------------------------- what is live

    def release(self, records: Ids) -> None:
        """Note that records are not live any more."""
        fewer = np.bincount(records >> _PLACE_BITS)
        lives = self._lives[: fewer.size]
        lives -= fewer
        for number in np.flatnonzero((fewer > 0) & (lives == 0)).tolist():
            self._drop_if_dead(number, self._segments[number])
        self.live -= records.size

    def _drop_if_dead(self, number: int, segment: _Segment) -> None:
        is_scanned = any(begun < segment.age for begun in self._scans)
        if not (self._lives[number] or number == self._open or segment.memory is not None or is_scanned):
            del self._segments[number]
            self._ages_of[number], self._counts[number] = -1, 0
            self._unused.append(number)

    def keep_after(self, age: int) -> None:
        """Keep segments that were begun after a scan, dead or not, as it goes through them. One that does not ask again
        for long has been given up."""
        if age not in self._scans:
            raise CheckpointError(
                "rows are no longer read from where they were read before",
                where=str(self.path),
                expected=f"a reader that comes again within {_PATIENCE} segments of {self._segment_bytes >> 10} KiB, "
                "and a server that has not been started again",
                todo="Save, or read, once more.",
            )
        self._scans[age] = self._ages + _PATIENCE

    def let_go(self, age: int) -> None:
        """Note that this scan is over, but for its last part, which may be asked for again."""
        self._scans[age] = self._ages + _LAST_PATIENCE

    def give_up(self, age: int) -> None:
        """Note that nobody goes on with this scan."""
        self._scans.pop(age, None)
        for number, segment in list(self._segments.items()):
            self._drop_if_dead(number, segment)

    def sparsest(self) -> int | None:
        """Return the segment whose live records should be written anew, if there is so much room that is not taken."""
        written = np.flatnonzero((self._addresses == 0) & (self._lives > 0))
        lives, places = self._lives[written], self._places[written]
        if written.size < 4 or lives.sum() >= places.sum() * _LIVE_PART:
            return None
        return int(written[np.argmin(lives / places)])

    def before(self, age: int) -> tuple[tuple[int, int], int]:
        """Return age and number of the newest segment of no greater age, and the number of the one before it; -1 where
        there is none."""
        ages = np.where(self._ages_of <= age, self._ages_of, -1)
        number = int(ages.argmax())
        found = int(ages[number])
        ages[number] = -1
        following = int(ages.argmax())
        return (found, number if found >= 0 else -1), following if ages[following] >= 0 else -1

    @property
    def newest(self) -> int:
        """Return the age of the segment begun last, -1 if there is none."""
        return self._ages - 1

    def foresee(self, segment: int) -> None:
        """Let the system read a segment that is read next."""
        with contextlib.suppress(AttributeError, OSError):  # a system that does not take advice
            start = max(0, segment) * self._segment_bytes
            os.posix_fadvise(self.number, start, self._segment_bytes, os.POSIX_FADV_WILLNEED)

    def spread(self, count: int) -> Ids:
        """Return about so many records, live or not, that lie evenly among all of them, in order."""
        ends = np.cumsum(self._counts)
        chosen = np.linspace(0, ends[-1], min(count, int(ends[-1])), endpoint=False, dtype=np.int64)
        segments = np.searchsorted(ends, chosen, side="right")
        return (segments << _PLACE_BITS) + chosen - (ends - self._counts)[segments]

    def records_of(self, segment: int) -> Ids:
        """Return all records of a segment, live or not."""
        return (segment << _PLACE_BITS) + np.arange(self._segments[segment].count)


def most_bytes(segment_bytes: int) -> int:
    """Return the memory that segments of a file take at most on their way to the disk."""
    return (_WAITING + 2) * segment_bytes


_GONE = (
    "The disk under FLEET_TABLE_DIR has lost rows. A durable server that is started again makes them anew; "
    "else start the job again from its last checkpoint."
)


def _remove(file: int, path: Path) -> None:
    os.close(file)
    path.unlink(missing_ok=True)


def _write(file: int, start: int, data: memoryview, path: Path, losses: Losses) -> None:
    with losses:
        try:
            while data:
                done = os.pwrite(file, data, start)
                data, start = data[done:], start + done
        except OSError as error:
            raise _failed("write", path, error, len(data)) from error


def _failed(what: str, path: Path, error: OSError, need: int = 0) -> TableFileError:
    more = f"{need} more bytes" if need else None
    return TableFileError(
        f"cannot {what} the rows that memory has no room for",
        where=str(path),
        expected=more,
        got=reason(error),
        todo="Make room on that disk, name another one (FLEET_TABLE_DIR), or give tables more memory "
        "(FLEET_TABLE_MEMORY_MB)."
        if is_full(error)
        else "Look at the disk under FLEET_TABLE_DIR.",
    )


def _distinct(numbers: Ids) -> Ids:
    """Return which numbers there are, which are small, in order."""
    return np.flatnonzero(np.bincount(numbers))


def segment_of(records: Ids) -> Ids:
    """Return the segments that records are in."""
    segments: Ids = records >> _PLACE_BITS
    return segments


@compiled
def _read(memory: Rows, starts: Ids, file: int, lines: Lines) -> int:
    """Read records from where they are, and return which one cannot be read, or how many there are. Those that follow
    one another in the file are read at once."""
    size, waiting, k = lines.shape[1], 0, 0
    waits, lengths = np.empty(starts.size, np.int64), np.ones(starts.size, np.int64)
    while k < starts.size:
        if starts[k] < 0:
            line, here = lines[k], row(memory, k)
            for j in range(size):
                line[j] = here[j]
        else:
            while k + lengths[k] < starts.size and starts[k + lengths[k]] == starts[k] + lengths[k] * size:
                lengths[k] += 1
            if read_cached(lines, k, file, starts[k], lengths[k] * size) != lengths[k] * size:
                announce_read(file, starts[k], lengths[k] * size)
                waits[waiting] = k
                waiting += 1
        k += lengths[k]
    for first in waits[:waiting]:
        if read_file(lines, first, file, starts[first], lengths[first] * size) != lengths[first] * size:
            for each in range(first, first + lengths[first]):
                if read_file(lines, each, file, starts[each], size) != size:
                    return int(each)
    return starts.size


@compiled
def _checksum(words: npt.NDArray[np.uint64], record: np.int64) -> np.uint64:
    """Return 32 bits of everything in a record but its last 32 bits."""
    hashed = np.uint64(record) * GAMMA
    last = words.size - 1
    for j in range(last):
        hashed = (hashed ^ words[j]) * GAMMA
        hashed ^= hashed >> np.uint64(32)
    hashed = (hashed ^ (words[last] & np.uint64(0xFFFFFFFF))) * GAMMA
    high: np.uint64 = (hashed >> np.uint64(32)) << np.uint64(32)
    return high


@compiled
def _sign(lines: npt.NDArray[np.uint64], records: Ids) -> None:
    for k in range(records.size):
        line = lines[k]
        last = line.size - 1
        line[last] = (line[last] & np.uint64(0xFFFFFFFF)) | _checksum(line, records[k])


@compiled
def _verify(lines: npt.NDArray[np.uint64], records: Ids) -> int:
    """Return the first line that is not what was written, or -1."""
    for k in range(records.size):
        line = lines[k]
        if (line[line.size - 1] >> np.uint64(32)) << np.uint64(32) != _checksum(line, records[k]):
            return k
    return -1
