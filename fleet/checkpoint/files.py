"""Writes files that are on the disk when a call returns, and reads their sizes and checksums."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from fleet.base.checksum import crc32

#: Files are read in parts of this size, however large they are.
_PART_BYTES = 8 << 20
#: Where memory and parts of files begin that a disk is to write to and to read from by itself.
_BLOCK_BYTES = 4096


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def allocate(path: Path, size: int) -> None:
    """Give a file so many bytes, new ones zeros, and their place on the disk: where a file that is mapped has none,
    the system ends the process that writes to it."""
    with path.open("ab") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # of a file system that cannot
                    raise


def sync_file(path: Path) -> None:
    """Make sure that what somebody else wrote is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing. Where power fails, they are there afterwards as well."""
    try:
        path.mkdir()
    except FileNotFoundError:
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise
    with contextlib.suppress(PermissionError):  # one who may make something there need not be allowed to read
        sync_directory(path.parent)


def measure(path: Path) -> tuple[int, int]:
    """Return how many bytes a file has, and their crc32."""
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            size, crc = size + len(part), crc32(part, crc)
    return size, crc


def read_past_cache(path: Path, most: int) -> memoryview | None:
    """Read at most ``most`` bytes from the beginning of a file without leaving them in the system's cache, so that what
    is read once takes its memory once. Return None if the file is in the cache, or the system has no such way to read.
    """
    if sys.platform != "linux":
        return None
    try:
        with path.open("rb", buffering=0) as file:
            if _is_cached(file.fileno()):
                return None
            data = _read_directly(path, min(most, os.fstat(file.fileno()).st_size))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the asking has brought a page in
            return data
    except OSError:  # a read in the usual way says what is wrong, if anything is
        return None


def _is_cached(descriptor: int) -> bool:
    """Say whether the system has the beginning of a file in memory."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def _read_directly(path: Path, size: int) -> memoryview | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        whole = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        room = np.empty(whole + _BLOCK_BYTES, np.uint8)
        start = -room.ctypes.data % _BLOCK_BYTES
        data, at = room[start : start + whole].data, 0
        while at < size and (got := os.preadv(descriptor, [data[at:]], at)):
            at += got
        return data[:size] if at >= size else None
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file as far as it can be removed; one that stays is in nobody's way."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
