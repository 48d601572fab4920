"""A file of records that only grows: what a server has been asked, in the order in which it did it.

A record is its length, its checksum, a checksum of these two, and its bytes. A process that is killed may leave the
beginning of a record at the end of the file, and a machine that stops zeros in the place of its last pages; nobody was
told that this one is safe, and it is cut off. Whatever else does not fit is damage, a byte that has turned in the last
record as well: going on without it would lose what was acknowledged, and silently.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.base.checksum import crc32
from fleet.errors import CheckpointError

#: The length and the checksum of what follows, and the checksum of these twelve bytes.
_HEAD = struct.Struct("<QII")
_MOST_BUFFERS = 512
_PART_BYTES = 1 << 20
#: What a system writes to a disk at once; where it has not, there are zeros.
_PAGE_BYTES = 4096


class Journal:
    def __init__(self, path: Path) -> None:
        """Open a journal to append to it; ``read`` what is in it first, which also cuts off a torn end."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.bytes = os.fstat(self._file).st_size
        self._synced = self.bytes
        self._syncing = threading.Lock()

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Add a record. It outlives this process when this returns, and the machine after ``sync``."""
        size, crc = 0, 0
        for buffer in buffers:
            size, crc = size + len(buffer), crc32(buffer, crc)
        pieces: list[Any] = [_head(size, crc), *buffers]
        before = self.bytes
        try:
            for start in range(0, len(pieces), _MOST_BUFFERS):
                self._write(pieces[start : start + _MOST_BUFFERS])
        except OSError:
            with self._syncing:
                os.ftruncate(self._file, before)  # half a record would hide those after it
                self.bytes, self._synced = before, min(self._synced, before)
            raise

    def _write(self, pieces: list[Any]) -> None:
        while pieces:
            written = os.writev(self._file, pieces)
            self.bytes += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces[0])
                pieces = pieces[1:]
            if written:
                pieces = [memoryview(pieces[0])[written:], *pieces[1:]]

    def sync(self) -> None:
        """Have everything on the disk that has been added by now. Others may add more meanwhile; those who want that on
        the disk wait until this is done, and then one of them does it for all. Of one that is closed nothing is."""
        wanted = self.bytes
        with self._syncing:
            if self._synced < wanted:
                size = self.bytes
                os.fsync(self._file)
                self._synced = size

    def read(self, *, is_last: bool) -> Iterator[bytearray]:
        """Every whole record, in order. Only the last of several journals can have a torn end."""
        at = 0
        while at < self.bytes:
            record = self._record(at)
            if record is None:
                if not is_last:
                    raise self._damaged(at)
                os.ftruncate(self._file, at)
                self.bytes = at
                break
            yield record
            at += _HEAD.size + len(record)
        self._synced = min(self._synced, at)

    def _record(self, at: int) -> bytearray | None:
        """The record at a place; None if it is the torn end."""
        head = os.pread(self._file, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        size, crc, _ = _HEAD.unpack(head)
        if head != _head(size, crc):
            if self._is_zero(at):
                return None
            raise self._damaged(at)
        end = at + _HEAD.size + size
        if end > self.bytes:
            return None
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            got += os.preadv(self._file, [view[got:]], at + _HEAD.size + got)
        if crc32(data) != crc:
            if end == self.bytes and _lacks_a_page(view, at + _HEAD.size):
                return None
            raise self._damaged(at)
        return data

    def _is_zero(self, at: int) -> bool:
        """Whether there is nothing from a place on, as in a file that was made longer and never written."""
        while part := os.pread(self._file, _PART_BYTES, at):
            if any(part):
                return False
            at += len(part)
        return True

    def _damaged(self, at: int) -> CheckpointError:
        return CheckpointError(
            "a server's journal is damaged",
            where=f"{self.path}, byte {at}",
            todo="Start the job again, from its last checkpoint if there is one, with this directory removed.",
        )

    def close(self) -> None:
        with self._syncing:
            self._synced = self.bytes
            os.close(self._file)


def _lacks_a_page(data: memoryview, at: int) -> bool:
    """Whether some page of a file has nothing of these bytes, which begin at a place in it."""
    starts = [0, *range(-at % _PAGE_BYTES or _PAGE_BYTES, len(data), _PAGE_BYTES)]
    return any(not any(data[start:stop]) for start, stop in zip(starts, [*starts[1:], len(data)], strict=True))


def _head(size: int, crc: int) -> bytes:
    begin = _HEAD.pack(size, crc, 0)[:-4]
    return begin + crc32(begin).to_bytes(4, "little")
