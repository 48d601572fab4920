"""A file of records that only grows: what a server has been asked, in the order in which it did it.

A record is its length, its checksum and its bytes. A process that is killed may leave the beginning of a record at the
end of the file; nobody was told that this one is safe, and it is cut off.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HEAD_BYTES = 12
_MOST_BUFFERS = 512


class Journal:
    def __init__(self, path: Path) -> None:
        """Open a journal to append to it; ``read`` what is in it first, which also cuts off a torn end."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.bytes = os.fstat(self._file).st_size
        self._synced = self.bytes

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Add a record. It outlives this process when this returns, and the machine after ``sync``."""
        size, crc = 0, 0
        for buffer in buffers:
            size, crc = size + len(buffer), zlib.crc32(buffer, crc)
        pieces: list[Any] = [size.to_bytes(8, "little") + crc.to_bytes(4, "little"), *buffers]
        before = self.bytes
        try:
            for start in range(0, len(pieces), _MOST_BUFFERS):
                self._write(pieces[start : start + _MOST_BUFFERS])
        except OSError:
            os.ftruncate(self._file, before)  # half a record would hide those after it
            self.bytes = before
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
        """Have everything on the disk."""
        if self._synced < self.bytes:
            size = self.bytes
            os.fsync(self._file)
            self._synced = size

    def read(self) -> Iterator[bytearray]:
        """Every whole record, in order."""
        at, end = 0, self.bytes
        while at + _HEAD_BYTES <= end:
            head = os.pread(self._file, _HEAD_BYTES, at)
            size, crc = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
            if at + _HEAD_BYTES + size > end:
                break
            data = bytearray(size)
            view, got = memoryview(data), 0
            while got < size:
                got += os.preadv(self._file, [view[got:]], at + _HEAD_BYTES + got)
            if zlib.crc32(data) != crc:
                break
            yield data
            at += _HEAD_BYTES + size
        os.ftruncate(self._file, at)
        self.bytes = self._synced = at

    def close(self) -> None:
        os.close(self._file)
