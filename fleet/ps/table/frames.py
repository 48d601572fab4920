"""Keeps those rows of a table in memory that are asked for most, where not all fit.

A frame is the place of one row: its id, its columns, the record of the file that is the same, if there is one, and how
often it was used of late. Frames are numbered from 0: these are the slots of a store. There may become more of them or
fewer, and memory that none needs goes back to the system.

A row that comes is on trial, in a queue. When room is needed and the queue has more than a quarter of all rows, those
at its head have their turn: the ones that were used again since they came may stay, the others leave. Of the rows that
may stay, those leave that a hand finds which goes round over the frames; one that was used since it last passed gets
another chance for each use, up to a few. The use that a row came for does not count, and one that a request waits for
gets one more turn until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.numeric.ids import gather
from fleet.numeric.jit import AHEAD, Array, Ids, Rows, Segments, compiled, prefetch, row
from fleet.numeric.pages import Room

#: One of so many frames is for a row on trial, when there is no more room.
_TRIAL_PART = 4

#: A column reserves addresses by so much; it takes memory there for the frames that there are.
_SEGMENT_BYTES = 32 << 20
#: Beside its columns a frame has an id, a record's number, its uses, and a place in the queue; and there is a quarter
#: of what it takes to remember an id's frame.
FRAME_BYTES = 8 + 8 + 1 + 4 + 4

#: A frame without a row, and a row that is not in the file as it is in memory.
FREE, CHANGED = -2, -1

#: A row that was used so often has as many chances as one can have.
_MOST_USES = 7
#: This bit beside its uses says that it is on trial.
_ON_TRIAL = 32
#: This bit beside its uses says that a request will use it, for which the row came or which was counted already.
_AWAITED = 64
#: This bit beside its uses keeps a row where it is.
_HELD = 128


Ring = npt.NDArray[np.int32]


class FrameColumn:
    """Holds one number, or several, for each frame."""

    def __init__(self, width: int, fill: float, dtype: np.dtype[Any]) -> None:
        self.width = width
        self.fill = fill
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize
        self._bits = max(1, _SEGMENT_BYTES // self.row_bytes).bit_length() - 1
        self._rooms: list[Room] = []
        self.resize(1)

    def resize(self, count: int) -> None:
        """Have room for so many frames, and keep little more."""
        wanted = max(1, (count + (1 << self._bits) - 1) >> self._bits)
        room_bytes, rest_bytes = self.row_bytes << self._bits, count * self.row_bytes
        del self._rooms[wanted:]
        while len(self._rooms) < wanted:
            self._rooms.append(Room(room_bytes))
        for room in self._rooms:
            room.need(min(rest_bytes, room_bytes))
            rest_bytes = max(0, rest_bytes - room_bytes)
        addresses = np.array([room.bytes.ctypes.data for room in self._rooms], np.uint64)
        first = self._rooms[0].bytes.view(self.dtype).reshape(-1, self.width)
        self.rows = Segments(addresses, first, self._bits)
        #: the same, as bytes
        self.raw = Segments(addresses, first.view(np.uint8), self._bits)

    def fill_rows(self, frames: Ids) -> None:
        """Set rows to what the column is filled with."""
        _fill(self.rows, frames, float(self.fill))

    def set(self, frames: Ids, value: int) -> None:
        """Set rows to a number."""
        _fill(self.rows, frames, float(value))

    def put(self, frames: Ids, values: Ids) -> None:
        """Set rows of one number."""
        _put(self.rows, frames, values)

    def get(self, frames: Ids) -> Ids:
        """Return rows of one number."""
        out: Ids = np.empty((frames.size, 1), self.dtype)
        gather(self.rows, frames, out)
        first: Ids = out[:, 0]
        return first


class Frames:
    def __init__(self) -> None:
        self.count = 0
        #: how often rows have left
        self.departures = 0
        #: what a frame takes
        self.frame_bytes = FRAME_BYTES
        self.columns: dict[str, FrameColumn] = {}
        self._keys = FrameColumn(1, 0, np.dtype(np.int64))
        self._records = FrameColumn(1, FREE, np.dtype(np.int64))
        self._uses = FrameColumn(1, 0, np.dtype(np.uint8))
        self._free = np.empty(0, np.int64)
        self._hand = 0
        #: the rows on trial, in a ring: the first one, and how many there are. Some may be gone.
        self._trials = np.empty(1, np.int32)
        self._first, self._tried = 0, 0

    @property
    def free(self) -> int:
        """Return how many frames have no row."""
        return self._free.size

    @property
    def keys(self) -> Rows:
        """Return the ids by frame."""
        return self._keys.rows

    def ensure_column(self, name: str, width: int, fill: float, dtype: np.dtype[Any]) -> None:
        if name not in self.columns:
            self.frame_bytes += width * dtype.itemsize
            self.columns[name] = made = FrameColumn(width, fill, dtype)
            made.resize(self.count)
            made.fill_rows(np.arange(self.count))
        self.columns[name].fill = fill

    def grow(self, more: int) -> None:
        """Make so many more frames, which are free."""
        before, self.count = self.count, self.count + more
        self._resize()
        fresh = np.arange(before, self.count)
        self._records.set(fresh, FREE)
        self._free = np.concatenate([self._free, fresh])

    def shrink(self, fewer: int) -> tuple[Ids, Ids]:
        """Give up so many frames, of which as many are free. Return which rows have moved for it, and whither."""
        count = self.count - fewer
        taken = np.arange(count, self.count)
        moved = taken[self.records(taken) != FREE]
        free = self._free[self._free < count]
        into, self._free = free[: moved.size], free[moved.size :]
        for column in (self._keys, self._records, self._uses, *self.columns.values()):
            _copy(column.raw, moved, into)
        self.count = count
        self._hand = 0 if self._hand >= count else self._hand
        tried = self._on_trial()
        has_moved = np.isin(tried, moved)
        tried[has_moved] = into[np.searchsorted(moved, tried[has_moved])]
        self._tried = 0
        self._resize()
        self._try(tried[tried < count])
        return moved, into

    def _resize(self) -> None:
        for column in (self._keys, self._records, self._uses, *self.columns.values()):
            column.resize(self.count)
        tried, self._trials = self._on_trial(), np.empty(max(1, self.count), np.int32)
        self._first = self._tried = 0
        self._try(tried)

    def _on_trial(self) -> Ids:
        """Return the frames of rows on trial, in order."""
        return self._trials[(self._first + np.arange(self._tried)) % self._trials.size].astype(np.int64)

    def _try(self, frames: Ids) -> None:
        """Let rows be on trial that are marked so; those that have been longest may stay if there is no room."""
        self._first, self._tried = _queue(self._uses.rows, self._trials, self._first, self._tried, frames)

    def take(self, count: int) -> Ids:
        """Take free frames for rows that come."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def put_back(self, frames: Ids) -> None:
        """Free frames whose rows have left."""
        self.departures += 1
        self._records.set(frames, FREE)
        self._uses.set(frames, 0)
        self._free = np.concatenate([self._free, frames])

    def occupy(self, frames: Ids, ids: Ids, records: Ids, *, awaited: bool = False) -> None:
        """Say which rows are in frames, which records of the file are the same, and if the request that they come for
        is yet to use them."""
        self._keys.put(frames, ids)
        self._records.put(frames, records)
        self._uses.set(frames, _ON_TRIAL | _AWAITED if awaited else _ON_TRIAL)
        self._try(frames)

    def fill(self, frames: Ids) -> None:
        """Give rows that are new what every column is filled with."""
        for column in self.columns.values():
            column.fill_rows(frames)

    def ids(self, frames: Ids) -> Ids:
        return self._keys.get(frames)

    def changed(self, start: int, stop: int) -> Ids:
        """Return the frames from ``start`` to ``stop`` whose rows are not in the file as they are."""
        frames = np.arange(start, min(stop, self.count))
        changed: Ids = frames[self.records(frames) == CHANGED]
        return changed

    def copied(self, name: str, frames: Ids) -> Array:
        """Return copies of a column's rows."""
        column = self.columns[name]
        out = np.empty((frames.size, column.width), column.dtype)
        gather(column.rows, frames, out)
        return out

    @property
    def record_rows(self) -> Rows:
        """Return what ``records`` returns, by frame."""
        return self._records.rows

    def records(self, frames: Ids) -> Ids:
        """Return the records that are the same as the rows in frames, ``CHANGED`` or ``FREE``."""
        return self._records.get(frames)

    def lost(self, frames: Ids, ids: Ids) -> Ids:
        """Return which of the ids have no row in these frames, of which some may be negative."""
        out = np.empty(ids.size, np.int64)
        return out[: _lost(self._keys.rows, self._records.rows, frames, ids, out)]

    def change(self, frames: Ids) -> Ids:
        """Note that rows differ from the file from now on, and return the records that are no longer needed. A frame
        may come twice."""
        records = np.empty(frames.size, np.int64)
        return records[: _change(self._records.rows, frames, records)]

    # ---------------------------------------------------------------- what stays

    def hold(self, frames: Ids) -> None:
        """Keep rows where they are until they are released."""
        _hold(self._uses.rows, frames)

    def release(self, frames: Ids) -> None:
        """Let rows go that were held."""
        _release(self._uses.rows, frames)

    def expect(self, frames: Ids, *, counts: bool) -> None:
        """Note that rows are about to be asked for; ``counts`` says that this is a use."""
        _expect(self._uses.rows, frames, counts)

    def serve(self, frames: Ids) -> None:
        """Note that rows need not be waited for any longer, which is no use of them."""
        _serve(self._uses.rows, frames)

    def use(self, frames: Ids) -> None:
        """Note that rows are used."""
        _use(self._uses.rows, frames)

    def victims(self, count: int) -> Ids:
        """Return the frames of so many rows that were used least, or fewer if the others are held."""
        out, uses, records = np.empty(count, np.int64), self._uses.rows, self._records.rows
        # As many will come, and need room in the queue.
        left = max(0, self.count // _TRIAL_PART - count)
        found, self._first, self._tried = _judge(uses, records, self._trials, self._first, self._tried, left, 0, out)
        found, self._hand = _sweep(uses, records, self.count, self._hand, found, out)
        found, self._first, self._tried = _judge(uses, records, self._trials, self._first, self._tried, 0, found, out)
        return out[:found]

    # ---------------------------------------------------------------- to and from records

    def pack(self, frames: Ids, offsets: Mapping[str, int], raw: Array) -> None:
        """Write columns of rows into ``raw``, which has a line of bytes for each."""
        for name, offset in offsets.items():
            _pack(self.columns[name].raw, frames, raw, offset)

    def unpack(self, frames: Ids, offsets: Mapping[str, int], raw: Array) -> None:
        """Read columns of rows from ``raw``."""
        for name, offset in offsets.items():
            _unpack(self.columns[name].raw, frames, raw, offset)


@compiled
def _fill(rows: Rows, frames: Ids, value: float) -> None:
    for k in range(frames.size):
        if k + AHEAD < frames.size:
            prefetch(rows, frames[k + AHEAD])
        here = row(rows, frames[k])
        for j in range(here.size):
            here[j] = value


@compiled
def _put(rows: Rows, frames: Ids, values: Ids) -> None:
    for k in range(frames.size):
        row(rows, frames[k])[0] = values[k]


@compiled
def _lost(keys: Rows, records: Rows, frames: Ids, ids: Ids, out: Ids) -> int:
    count = 0
    for k in range(frames.size):
        if k + AHEAD < frames.size:
            prefetch(keys, frames[k + AHEAD])
            prefetch(records, frames[k + AHEAD])
        frame = frames[k]
        if frame < 0 or row(keys, frame)[0] != ids[k] or row(records, frame)[0] == FREE:
            out[count] = k
            count += 1
    return count


@compiled
def _change(rows: Rows, frames: Ids, records: Ids) -> int:
    count = 0
    for k in range(frames.size):
        if k + AHEAD < frames.size:
            prefetch(rows, frames[k + AHEAD])
        here = row(rows, frames[k])
        if here[0] >= 0:
            records[count] = here[0]
            count += 1
        here[0] = CHANGED
    return count


@compiled
def _copy(raw: Rows, start: Ids, into: Ids) -> None:
    for k in range(start.size):
        source, target = row(raw, start[k]), row(raw, into[k])
        for j in range(source.size):
            target[j] = source[j]


@compiled
def _expect(uses: Rows, frames: Ids, counts: bool) -> None:
    for k in range(frames.size):
        here = row(uses, frames[k])
        if here[0] < _AWAITED:
            here[0] += _AWAITED + (counts and here[0] & _MOST_USES < _MOST_USES)


@compiled
def _serve(uses: Rows, frames: Ids) -> None:
    for k in range(frames.size):
        row(uses, frames[k])[0] &= ~_AWAITED


@compiled
def _use(uses: Rows, frames: Ids) -> None:
    for k in range(frames.size):
        here = row(uses, frames[k])
        if here[0] & _AWAITED:
            here[0] -= _AWAITED
        elif here[0] & _MOST_USES < _MOST_USES:
            here[0] += 1


@compiled
def _hold(uses: Rows, frames: Ids) -> None:
    for k in range(frames.size):
        row(uses, frames[k])[0] |= _HELD


@compiled
def _release(uses: Rows, frames: Ids) -> None:
    for k in range(frames.size):
        row(uses, frames[k])[0] &= _HELD - 1


@compiled
def _queue(uses: Rows, ring: Ring, first: int, tried: int, frames: Ids) -> tuple[int, int]:
    """Append to a ring what is marked, and return where it begins then and how long it is."""
    for k in range(frames.size):
        if not row(uses, frames[k])[0] & _ON_TRIAL:
            continue
        if tried == ring.size:
            row(uses, ring[first])[0] &= ~_ON_TRIAL
            first = (first + 1) % ring.size
            tried -= 1
        ring[(first + tried) % ring.size] = frames[k]
        tried += 1
    return first, tried


@compiled
def _judge(
    uses: Rows, records: Rows, ring: Ring, first: int, tried: int, left: int, found: int, out: Ids
) -> tuple[int, int, int]:
    """Take rows from the head of a ring until there are ``left``, or enough of them leave: return how many do then,
    where the ring begins, and how long it is."""
    turns = 2 * tried
    while found < out.size and tried > left and turns > 0:
        turns -= 1
        frame = ring[first]
        first = (first + 1) % ring.size
        tried -= 1
        here = row(uses, frame)
        if not here[0] & _ON_TRIAL or row(records, frame)[0] == FREE:
            continue  # it is gone
        if here[0] >= _AWAITED:
            here[0] &= ~_AWAITED
            ring[(first + tried) % ring.size] = frame
            tried += 1
        elif here[0] == _ON_TRIAL:
            out[found] = frame
            found += 1
            here[0] = _HELD  # it is not found again
        else:
            here[0] -= _ON_TRIAL + 1
    return found, first, tried


@compiled
def _sweep(uses: Rows, records: Rows, count: int, hand: int, found: int, out: Ids) -> tuple[int, int]:
    passed = 0
    while found < out.size and passed <= (_MOST_USES + 2) * count:
        here = row(uses, hand)
        if here[0] < _HELD and not here[0] & _ON_TRIAL and row(records, hand)[0] != FREE:
            if here[0] == 0:
                out[found] = hand
                found += 1
                here[0] = _HELD  # it is not found again
            elif here[0] & _AWAITED:
                here[0] -= _AWAITED
            else:
                here[0] -= 1
        hand += 1
        if hand == count:
            hand = 0
        passed += 1
    return found, hand


@compiled
def _pack(raw: Rows, frames: Ids, lines: Array, offset: int) -> None:
    for k in range(frames.size):
        if k + AHEAD < frames.size:
            prefetch(raw, frames[k + AHEAD])
        here, line = row(raw, frames[k]), lines[k]
        for j in range(here.size):
            line[offset + j] = here[j]


@compiled
def _unpack(raw: Rows, frames: Ids, lines: Array, offset: int) -> None:
    for k in range(frames.size):
        if k + AHEAD < frames.size:
            prefetch(raw, frames[k + AHEAD])
        here, line = row(raw, frames[k]), lines[k]
        for j in range(here.size):
            here[j] = line[offset + j]
