"""Files that are on the disk when a call returns, and what to know of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from fleet.checksum import crc32

#: Files are read in parts of this size, however large they are.
_PART_BYTES = 8 << 20


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Have on the disk what somebody else wrote."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(path: Path) -> tuple[int, int]:
    """How many bytes a file has, and their crc32."""
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            size, crc = size + len(part), crc32(part, crc)
    return size, crc


def remove(path: Path) -> None:
    """As far as it can be: what stays is in nobody's way."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
