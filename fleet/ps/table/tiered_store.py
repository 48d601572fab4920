"""Rows lie in memory as far as it goes, and else in a file: an index says where each is, what is asked for comes into
memory, and other rows leave it.

A row is *in memory* in a frame (frames.py), or in a record of the file (row_file.py), or in both, as long as it was not
changed since it was read. One that leaves memory is written only if it was. New rows are in memory alone.

To be read, rows of a file have to be waited for. Whoever can foresee a request asks ``reading`` for what it will need,
waits without holding the server's lock, and then hands it to ``take``. A request that finds its rows in the file all
the same waits for them itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import packed_ids, unique
from fleet.numeric.jit import Array, Ids, Segments
from fleet.ps.table.frames import CHANGED, FRAME_BYTES, FREE, Frames
from fleet.ps.table.memory_budget import MemoryBudget
from fleet.ps.table.place_index import ELSEWHERE, ONLY_THERE, PlaceIndex
from fleet.ps.table.row_file import Backlog, Layout, Lines, Reading, RowFile, most_bytes, segment_of
from fleet.ps.table.store import Batch, Between, check_shape

#: No table is left fewer frames.
LEAST_FRAMES = 1024
#: Rows leave memory by so many at least.
_LEAVING = 256
#: What is asked for counts half after so many requests.
_HALF_LIFE = 512

#: An id is remembered for so many frames at most.
_FOUND_PART = 4
#: Frames are looked through for changed rows by so many at a time.
_LOOKED_THROUGH = 1 << 20

_NONE = np.empty(0, np.int64)

#: The phases of a scan: what is in the file, then what is in memory alone, then what has left memory meanwhile.
_IN_FILE, _IN_MEMORY, _LEFT = 1, 2, 3
_AGE_BITS = 32
_AGE_MASK = (1 << _AGE_BITS) - 1


@dataclass
class Traffic:
    """Counts what a table's rows were asked for."""

    asked: int = 0
    read: int = 0
    bytes_read: int = 0


class _Found(NamedTuple):
    """Holds ids that were found, their slots, and how often rows had left memory by then."""

    ids: Ids
    slots: Ids
    departures: int


class TieredStore:
    """Implements ``Store`` for a table that may have more rows than memory has room for."""

    def __init__(self, name: str, budget: MemoryBudget, file: RowFile, unused: deque[RowFile]) -> None:
        """``unused`` gets the file when nobody refers to this any more."""
        self.name = name
        self.demand = 0.0
        self.account = budget.open(self)
        self._budget = budget
        self._file = file
        weakref.finalize(self, unused.append, file)  # anywhere: it must not wait for anything
        self._index = PlaceIndex()
        self._frames = Frames()
        self._layout = Layout.of({})
        #: what columns that came later hold in records from before
        self._fills: dict[str, Array] = {}
        self._indexed = self._index.nbytes
        self.created = _NONE
        #: what was found lately, the last first
        self._found: list[_Found] = []
        self.traffic = Traffic()
        self.account.take(self._indexed + file.most_bytes)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def in_memory(self) -> int:
        """Return how many rows are in memory."""
        return self._frames.count - self._frames.free

    @property
    def nbytes(self) -> int:
        return self.account.taken

    @property
    def spare_bytes(self) -> int:
        return max(0, self._frames.count - LEAST_FRAMES) * self._frames.frame_bytes

    @property
    def bytes_on_disk(self) -> int:
        return self._file.bytes_on_disk

    @property
    def bytes_written(self) -> int:
        return self._file.bytes_written

    def figures(self) -> dict[str, int]:
        return {
            "in_memory": self.in_memory,
            "on_disk": len(self) - self.in_memory,
            "disk_bytes": self.bytes_on_disk,
            "asked_rows": self.traffic.asked,
            "read_rows": self.traffic.read,
            "read_bytes": self.traffic.bytes_read,
            "written_bytes": self.bytes_written,
        }

    @property
    def row_bytes(self) -> int:
        return 8 + sum(column.row_bytes for column in self._frames.columns.values())

    @property
    def most(self) -> int:
        """Return a quarter of the rows that may be in memory, so that the others need not leave at once."""
        room = self._frames.count + max(0, self.account.left) // self._frames.frame_bytes
        return max(LEAST_FRAMES, room) // 4

    # ---------------------------------------------------------------- columns

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._frames.columns)

    def ensure_column(self, name: str, width: int, fill: float, dtype: npt.DTypeLike) -> None:
        columns = self._frames.columns
        if name not in columns:
            before = self._frames.frame_bytes
            self._frames.ensure_column(name, width, fill, np.dtype(dtype))
            self.account.take(self._frames.count * (self._frames.frame_bytes - before))
            self._layout = Layout.of({each: column.row_bytes for each, column in columns.items()})
            self._fills[name] = np.full(width, fill, dtype).view(np.uint8)
        column = columns[name]
        check_shape(name, (column.width, column.dtype), (width, np.dtype(dtype)))
        column.fill = fill

    def column(self, name: str) -> Segments:
        return self._frames.columns[name].rows

    @property
    def layout(self) -> None:
        """Return nothing: rows may be in files."""

    def ids(self, slots: Ids) -> Ids:
        return self._frames.ids(slots)

    def reserve(self, count: int) -> None:
        """Do nothing: memory is taken for rows as they come."""

    def touch(self) -> Iterator[int]:
        return iter(())

    # ---------------------------------------------------------------- rows by id

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        ids, most = packed_ids(ids), self.most  # records that are looked at take memory too
        found = [self._located(ids[start : start + most])[0] >= 0 for start in range(0, ids.size, most)]
        return np.concatenate(found) if found else np.empty(0, np.bool_)

    def find(self, ids: Ids) -> Ids:
        self.traffic.asked += ids.size
        slots = self._bring(packed_ids(ids))
        self._frames.use(slots[slots >= 0])
        return slots

    def insert(self, ids: Ids) -> Ids:
        ids = packed_ids(ids)
        self.traffic.asked += ids.size
        slots = self._bring(ids)
        self._frames.serve(slots[slots >= 0])
        self.created = np.flatnonzero(slots < 0)
        if self.created.size:
            new, places = unique(ids[self.created])
            fresh = self._room_for(new.size, slots[slots >= 0])
            self._frames.fill(fresh)
            self._frames.occupy(fresh, new, np.full(fresh.size, CHANGED))
            self._index.enter(new, fresh << 1 | 1)
            slots[self.created] = fresh[places]
        return slots

    def write(self, slots: Ids) -> None:
        self._file.release(self._frames.change(slots))

    def remove(self, ids: Ids) -> None:
        ids, most = packed_ids(ids), self.most  # as in ``has``
        for start in range(0, ids.size, most):
            self._remove(ids[start : start + most])

    def _remove(self, ids: Ids) -> None:
        places, _, _ = self._located(ids)
        there = np.flatnonzero(places >= 0)
        ids, places = ids[there], places[there]
        is_in_memory = places & 1 == 1
        frames = places[is_in_memory] >> 1
        self._file.release(places[~is_in_memory] >> 1)
        self._file.release(self._frames.change(frames))
        self._index.remove(ids, places)
        self._frames.put_back(frames)

    def _located(self, ids: Ids) -> tuple[Ids, Ids, Lines]:
        """Return the places of ids, those records that are among them, in order, and these records' lines."""
        places, numbers = self._find(ids)
        while True:
            cold = np.flatnonzero(places & 1 == 0)
            if not cold.size:
                return places, _NONE, self._no_lines
            records = _sorted_once(places[cold] >> 1)
            line_of = np.searchsorted(records, places[cold] >> 1)
            lines = self._read(records)
            others = cold[_ids_of(lines)[line_of] != ids[cold]]
            if not others.size:
                return places, records, lines
            for k in others.tolist():
                places[k], numbers[k] = self._index.find_next(self._frames.keys, int(ids[k]), int(numbers[k]))

    def _find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return what ``PlaceIndex.find`` does. Ids that were found lately may still be where they were."""
        for before, slots, departures in self._found:
            if np.array_equal(before, ids):
                places, numbers = slots << 1 | 1, np.full(ids.size, -1)
                has_lost = departures != self._frames.departures
                lost = self._frames.lost(slots, ids) if has_lost else np.flatnonzero(slots < 0)
                places[lost], numbers[lost] = self._index.find(self._frames.keys, ids[lost])
                return places, numbers
        return self._index.find(self._frames.keys, ids)

    def _remember(self, ids: Ids, slots: Ids) -> None:
        """Remember where ids were found: what is looked up is updated soon."""
        kept = [each for each in self._found if not np.array_equal(each.ids, ids)]
        room = self._frames.count // _FOUND_PART - ids.size
        while kept and sum(each.ids.size for each in kept) > room:
            kept.pop()
        self._found = [_Found(ids.copy(), slots, self._frames.departures), *kept] if room >= 0 else kept

    def _bring(self, ids: Ids) -> Ids:
        """Return the slots of ids, -1 where there is no row; the others are in memory then."""
        self._pay()
        self.demand += ids.size - self.demand / _HALF_LIFE
        places, records, lines = self._located(ids)
        slots = np.where(places & 1 == 1, places >> 1, -1)
        here = slots[slots >= 0]
        if records.size:
            into = self._admit(records, lines, here)
            cold = np.flatnonzero(places & 1 == 0)
            slots[cold] = into[np.searchsorted(records, places[cold] >> 1)]
            self.traffic.read += records.size
        self._remember(ids, slots)
        return slots

    def _admit(self, records: Ids, lines: Lines, held: Ids) -> Ids:
        """Bring rows into memory, of which these are the lines, and return their frames. The rows ``held`` stay."""
        ids, into = _ids_of(lines), self._room_for(records.size, held)
        self._frames.unpack(into, self._layout.offsets, lines)
        self._frames.occupy(into, ids, records, awaited=True)
        self._index.move(ids, records << 1, into << 1 | 1)
        return into

    # ---------------------------------------------------------------- room in memory

    def _room_for(self, count: int, held: Ids) -> Ids:
        """Return frames for so many rows that come. The rows ``held`` stay."""
        frames = self._frames
        frames.hold(held)
        try:
            while frames.free < count:
                lacking = count - frames.free
                more = min(max(lacking, _LEAVING, frames.count // 8), self.account.left // frames.frame_bytes)
                more = max(more, min(lacking, LEAST_FRAMES - frames.count))
                if more > 0:
                    self._grow(more)
                    continue
                donor = self._budget.donor(self, lacking * frames.frame_bytes)
                if donor is not self:
                    donor.give_back(lacking * frames.frame_bytes)
                elif not self._evict(max(lacking, _LEAVING)):
                    self._grow(lacking)  # all rows are held
        finally:
            frames.release(held)
        return frames.take(count)

    def _grow(self, more: int) -> None:
        self._frames.grow(more)
        self.account.take(more * self._frames.frame_bytes)

    def _evict(self, count: int) -> int:
        """Let about so many rows leave memory, and return how many do."""
        frames = self._frames
        leaving = frames.victims(count)
        ids, records = frames.ids(leaving), frames.records(leaving)
        changed = np.flatnonzero(records == CHANGED)
        try:
            if changed.size:
                records[changed] = self._file.append(self._layout, self._packed(leaving[changed], ids[changed]))
        except BaseException:
            frames.release(leaving)
            raise
        self._index.move(ids, leaving << 1 | 1, records << 1)
        frames.put_back(leaving)
        return leaving.size

    def _packed(self, frames: Ids, ids: Ids) -> Lines:
        lines = np.empty((ids.size, self._layout.size), np.uint8)
        lines[:, :8], lines[:, self._layout.end :] = ids.view(np.uint8).reshape(-1, 8), 0
        self._frames.pack(frames, self._layout.offsets, lines)
        return lines

    def give_back(self, nbytes: int) -> None:
        frames = self._frames
        fewer = min(-(-nbytes // frames.frame_bytes), frames.count - LEAST_FRAMES)
        if frames.free < fewer:
            self._evict(fewer - frames.free)
        fewer = min(fewer, frames.free)
        self._found.clear()
        moved, into = frames.shrink(fewer)
        self._index.move(frames.ids(into), moved << 1 | 1, into << 1 | 1)
        self.account.take(-fewer * frames.frame_bytes)

    def _pay(self) -> None:
        """Account for the index, which has grown perhaps, and make room for that."""
        indexed = self._index.nbytes
        if indexed != self._indexed:
            self.account.take(indexed - self._indexed)
            self._indexed = indexed
        if self.account.left < 0:
            self._budget.reclaim()

    # ---------------------------------------------------------------- the file

    def _read(self, records: Ids) -> Lines:
        """Read records, and wait for them."""
        reading = Reading(self._file, records)
        reading.run()
        self.traffic.bytes_read += reading.nbytes
        return self._lines(reading)[1]

    def _lines(self, reading: Reading) -> tuple[Ids, Lines]:
        """Return what was read, as records are laid out now, without segments that are used otherwise meanwhile."""
        still = reading.segments[self._file.ages(reading.segments) == reading.ages]
        records, lines = [_NONE], [self._no_lines]
        for layout, chosen, given in reading.lines:
            mine = reading.records[chosen]
            if still.size < reading.segments.size:
                kept = np.isin(segment_of(mine), still)
                mine, given = mine[kept], given[kept]
            self._file.check(mine, given)
            records.append(mine)
            lines.append(given if layout == self._layout else self._laid_out(layout, given))
        if len(records) == 2:
            return records[1], lines[1]
        joined = np.concatenate(records)
        order = np.argsort(joined)
        return joined[order], np.concatenate(lines)[order]

    @property
    def _no_lines(self) -> Lines:
        return np.empty((0, self._layout.size), np.uint8)

    def _laid_out(self, layout: Layout, given: Lines) -> Lines:
        """Return lines that were laid out before some column came."""
        lines = np.zeros((len(given), self._layout.size), np.uint8)
        lines[:, :8] = given[:, :8]
        for name, start in self._layout.offsets.items():
            width = self._fills[name].size
            before = layout.offsets.get(name)
            lines[:, start : start + width] = self._fills[name] if before is None else given[:, before : before + width]
        return lines

    def backlog(self) -> Backlog | None:
        return self._file.backlog()

    def reading(self, ids: Ids, *, expected: bool) -> Reading | None:
        """Return what has to be read before ids are found, if anything. They count as used if a look-up is ``expected``
        to follow."""
        if not expected and self.in_memory == len(self):
            return None
        ids = packed_ids(ids)
        places, _ = self._find(ids)
        slots = np.where(places & 1 == 1, places >> 1, -1)
        self._frames.expect(slots[slots >= 0], counts=expected)
        if expected:
            self._remember(ids, slots)
        cold = places[places & 1 == 0]
        return Reading(self._file, _sorted_once(cold >> 1)[: self.most]) if cold.size else None

    def take(self, reading: Reading) -> None:
        """Bring rows into memory that were read, but for those that have moved meanwhile."""
        self._pay()
        records, lines = self._lines(reading)
        self.traffic.read += records.size
        self.traffic.bytes_read += reading.nbytes
        kept = np.flatnonzero(self._trace(records, lines) == ONLY_THERE)
        if kept.size:
            self._admit(records[kept], lines[kept], _NONE)

    def _trace(self, records: Ids, lines: Lines) -> Ids:
        return self._index.trace(self._frames.keys, self._frames.record_rows, _ids_of(lines), records)

    def to_rewrite(self) -> Reading | None:
        """Return the segment whose live rows should be written anew, if there is so much that is not live."""
        number = self._file.sparsest()
        return None if number is None else Reading(self._file, self._file.records_of(number))

    def rewrite(self, reading: Reading) -> None:
        """Write the live rows of a segment anew."""
        self.traffic.bytes_read += reading.nbytes
        records, lines = self._lines(reading)
        slots = self._trace(records, lines)
        self.write(slots[slots >= 0])  # these are written when they leave memory
        cold = np.flatnonzero(slots == ONLY_THERE)
        records, lines = records[cold], lines[cold]
        self._index.move(_ids_of(lines), records << 1, self._file.append(self._layout, lines) << 1)
        self._file.release(records)

    # ---------------------------------------------------------------- all rows

    def scan(
        self, start: int, most: int, names: Sequence[str], only: Between | None = None, *, briefly: bool = False
    ) -> tuple[Batch, int | None]:
        del briefly  # they are copies in any case
        # First what is in the file: segments, the newest first, and of them the records that are live. Then what is in
        # memory alone. A row that has left for the file in between is in a segment begun since then: of all records
        # there their rows are taken, wherever those are by now.
        if start:
            first = _Place.of(start)
        else:
            begun = self._file.begin_scan()
            first = _Place(_IN_FILE, begun, begun)
        place: _Place | None = first
        self._file.keep_after(first.begun)
        found = [self._rows_of(self._no_lines, names, only)]
        while place is not None and (left := most - sum(ids.size for ids, _ in found)) > 0:
            batches, place = self._next(place, left, names, only)
            found += batches
        ids, rows = _joined(found, names)
        if place is None:
            self._file.let_go(first.begun)
        if place is None or place.phase == _LEFT:  # what has left memory may have been met there as well
            ids, chosen = np.unique(ids, return_index=True)
            rows = {name: values[chosen] for name, values in rows.items()}
        return (ids, rows), None if place is None else place.number

    def leave(self, place: int) -> None:
        self._file.give_up(_Place.of(place).begun)

    def sample(self, count: int, names: Sequence[str]) -> Batch:
        warm = round(count * self.in_memory / max(1, len(self)))
        records = self._file.spread(count - warm)
        lines = self._read(records)
        frames = np.linspace(0, self._frames.count, min(warm, self._frames.count), endpoint=False, dtype=np.int64)
        there = frames[self._frames.records(frames) != FREE]
        cold = self._rows_of(lines[self._trace(records, lines) == ONLY_THERE], names, None)
        return _joined([cold, self._rows_at(there, names, None)], names)

    def _next(
        self, place: _Place, most: int, names: Sequence[str], only: Between | None
    ) -> tuple[list[Batch], _Place | None]:
        """Return the rows at a place of a scan, about ``most`` at once, and the place after it."""
        frames, file = self._frames, self._file
        if place.phase == _IN_MEMORY:
            # From the last frame to the first, as rows may move to a frame before theirs.
            least = max(0, place.at - _LOOKED_THROUGH)
            changed = frames.changed(least, place.at)
            if changed.size > most:
                changed = changed[-most:]
                least = int(changed[0])
            batch = self._rows_at(changed, names, only)
            return [batch], place._replace(at=least) if least else _Place(_LEFT, place.begun, file.newest)
        (age, segment), following = file.before(place.at)
        if age <= (place.begun if place.phase == _LEFT else -1):
            return [], None if place.phase == _LEFT else _Place(_IN_MEMORY, place.begun, frames.count)
        file.foresee(following)
        records = file.records_of(segment)
        lines = self._read(records)
        if place.phase == _IN_FILE:
            here = self._trace(records, lines) != ELSEWHERE
            return [self._rows_of(lines[here], names, only)], place._replace(at=age - 1)
        ids, batches = np.unique(_ids_of(lines)), []
        for start in range(0, ids.size, self.most):
            slots = self._bring(ids[start : start + self.most])
            batches.append(self._rows_at(slots[slots >= 0], names, only))
        return batches, place._replace(at=age - 1)

    def _rows_at(self, slots: Ids, names: Sequence[str], only: Between | None) -> Batch:
        """Return copies of rows in memory."""
        if only is not None:
            slots = slots[only(self._frames.copied(only.column, slots))]
        return self._frames.ids(slots), {name: self._frames.copied(name, slots) for name in names}

    def _rows_of(self, lines: Lines, names: Sequence[str], only: Between | None) -> Batch:
        """Return copies of rows of the file."""
        if only is not None and len(lines):
            lines = lines[only(self._values(lines, only.column))]
        return _ids_of(lines), {name: self._values(lines, name) for name in names}

    def _values(self, lines: Lines, name: str) -> Array:
        column, start = self._frames.columns[name], self._layout.offsets[name]
        values = np.ascontiguousarray(lines[:, start : start + column.row_bytes])
        return values.view(column.dtype).reshape(-1, column.width)


class _Place(NamedTuple):
    """Says where a scan is: its phase, an age that tells segments of before it from those of since, and the age of the
    next segment, or the frame before which the next ones are."""

    phase: int
    begun: int
    at: int

    @classmethod
    def of(cls, number: int) -> _Place:
        return cls(number & 3, (number >> 2 & _AGE_MASK) - 1, (number >> 2 + _AGE_BITS) - 1)

    @property
    def number(self) -> int:
        return self.phase | self.begun + 1 << 2 | self.at + 1 << 2 + _AGE_BITS


def least_bytes(row_bytes: int, segment_bytes: int) -> int:
    """Return the memory that a table takes at least, whose rows have so many bytes."""
    return PlaceIndex.LEAST_BYTES + most_bytes(segment_bytes) + LEAST_FRAMES * (FRAME_BYTES + row_bytes)


def _joined(batches: Sequence[Batch], names: Sequence[str]) -> Batch:
    ids = np.concatenate([ids for ids, _ in batches])
    return ids, {name: np.concatenate([rows[name] for _, rows in batches]) for name in names}


def _ids_of(lines: Lines) -> Ids:
    return np.ascontiguousarray(lines[:, :8]).view(np.int64)[:, 0]


def _sorted_once(numbers: Ids) -> Ids:
    """Return distinct numbers in order. That takes half as long as ``np.unique`` does."""
    ordered = np.sort(numbers)
    once: Ids = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    return once
