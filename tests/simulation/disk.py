"""A disk for each machine, which may lose power, fill up, lie about what it has written, or turn a bit.

Files are the system's, in a folder of the machine's own. What a killed process has written stays, as it does in a real
system's memory. When power fails, only what was synced is sure to stay: of the rest a part may be there.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.ps.server.durability import state_directory
from fleet.ps.table import stores as tiers
from fleet.ps.table import tiered_store
from fleet.ps.table.memory_budget import Account

#: What a disk writes as a whole.
_PAGE_BYTES = 4096


class Disk:
    def __init__(self, folder: Path, seed: str, on_moment: Callable[[], object], sync_s: float = 0.0) -> None:
        """``on_moment`` is called before anything is written; a sync takes at most ``sync_s``."""
        self.folder = folder
        self.on_moment = on_moment
        folder.mkdir(parents=True)
        self.is_full = False
        #: it says that it has written what it has not
        self.lies = False
        self._draw = random.Random(f"disk {seed}")
        self._draw_time = random.Random(f"time of disk {seed}")
        self._sync_s = sync_s
        #: of each file, by its number: how much of it is on the disk
        self._synced: dict[int, int] = {}
        #: names that are on the disk, by the number of their folder
        self._names: set[tuple[int, str]] = set()
        self._open: set[int] = set()

    # ---------------------------------------------------------------- for the process

    def opened(self, descriptor: int) -> int:
        self._open.add(descriptor)
        return descriptor

    def closed(self, descriptor: int) -> None:
        self._open.discard(descriptor)

    def check_room(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def take_time(self, sleep: Callable[[float], object]) -> None:
        """Let it take its time until something is on the disk."""
        if self._sync_s:
            sleep(self._draw_time.uniform(0.0, self._sync_s))

    def sync(self, descriptor: int, sleep: Callable[[float], object]) -> None:
        """Put on the disk what is there by now; what comes meanwhile may be lost."""
        status = os.fstat(descriptor)
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        names = os.listdir(descriptor) if is_folder else []
        self.take_time(sleep)
        if self.lies:
            return
        if is_folder:
            self._names.update((status.st_ino, name) for name in names)
        else:
            self._synced[status.st_ino] = status.st_size

    # ---------------------------------------------------------------- for whoever kills it

    def killed(self, unwind: Callable[[], None], *, loses_power: bool, turns_a_bit: bool) -> None:
        """Let the process on this disk unwind, and leave what was on the disk before that."""
        kept = self.folder.with_name(f"{self.folder.name}.kept")
        shutil.copytree(self.folder, kept)
        numbers = {} if loses_power else self._numbers()
        if loses_power:
            self._lose_power(kept)
        if turns_a_bit:
            turn_a_bit(kept, self._draw)
        unwind()
        self.close()
        shutil.rmtree(self.folder)
        kept.rename(self.folder)
        if loses_power:
            self._remember_all()
        else:
            self._renumber(numbers)

    def close(self) -> None:
        """Close what a dead process has left open."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _numbers(self) -> dict[Path, int]:
        """The numbers of all files and folders, by their names."""
        return {path.relative_to(self.folder): path.stat().st_ino for path in [self.folder, *self.folder.rglob("*")]}

    def _renumber(self, before: dict[Path, int]) -> None:
        """What was on the disk is there under other numbers, as all files are copies."""
        now = self._numbers()
        renumbered = {number: now[path] for path, number in before.items() if path in now}
        self._synced = {renumbered[number]: size for number, size in self._synced.items() if number in renumbered}
        self._names = {(renumbered[number], name) for number, name in self._names if number in renumbered}

    def _remember_all(self) -> None:
        """After power has failed everything that is there is on the disk."""
        self._synced.clear()
        self._names.clear()
        for folder, _, files in os.walk(self.folder):
            number = os.stat(folder).st_ino
            for name in os.listdir(folder):
                self._names.add((number, name))
            for name in files:
                status = os.stat(os.path.join(folder, name))
                self._synced[status.st_ino] = status.st_size

    def _lose_power(self, kept: Path) -> None:
        for folder, folders, files in os.walk(self.folder):
            number = os.stat(folder).st_ino
            there = kept / Path(folder).relative_to(self.folder)
            folders.sort()  # the order in which they are visited, and what is drawn
            for name in sorted(files):
                status = os.stat(os.path.join(folder, name))
                synced = min(self._synced.get(status.st_ino, 0), status.st_size)
                if (number, name) not in self._names and self._draw.random() < 0.5:
                    (there / name).unlink()
                elif synced < status.st_size:
                    self._tear(there / name, synced)
            for name in sorted(folders):
                if (number, name) not in self._names and self._draw.random() < 0.5:
                    shutil.rmtree(there / name)
                    folders.remove(name)

    def _tear(self, path: Path, synced: int) -> None:
        """Leave some part of what was not synced, with some of its pages empty."""
        data = path.read_bytes()
        rest = bytearray(data[synced : synced + self._draw.randint(0, len(data) - synced)])
        if self._draw.random() < 0.5:
            for start in range(-synced % _PAGE_BYTES, len(rest), _PAGE_BYTES):
                if self._draw.random() < 0.3:
                    rest[start : start + _PAGE_BYTES] = bytes(len(rest[start : start + _PAGE_BYTES]))
        path.write_bytes(data[:synced] + rest)


def turn_a_bit(folder: Path, draw: random.Random) -> None:
    """Let one bit be another in one of the files, if there is any."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if files:
        with draw.choice(files).open("r+b") as file:
            at = draw.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def tiny_journals(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let durable servers take a snapshot when a journal has so many bytes."""
    patch.setattr(state_directory, "JOURNAL_BYTES", nbytes)


def tiny_tiers(patch: pytest.MonkeyPatch, rows: int = 8, segment_bytes: int = 4096, *, full: bool = True) -> None:
    """Let servers that have a memory budget keep so few rows of a table in memory, more only while the budget is not
    ``full``, and write small segments."""
    patch.setattr(tiered_store, "LEAST_FRAMES", rows)
    patch.setattr(tiered_store, "_LEAVING", 2)
    for name in ("_SMALLEST", "_LARGEST", "_PAGE"):
        patch.setattr(tiers, name, segment_bytes)
    if full:
        patch.setattr(Account, "left", property(lambda _: 0))


def stands_for_os(
    disk_of: Callable[[], Disk | None], check: Callable[[], Any], sleep: Callable[[float], object]
) -> dict[str, Any]:
    """Return what ``os`` does otherwise in a simulated process."""

    def checked(act: Callable[..., Any], *, takes_room: bool) -> Callable[..., Any]:
        def do(*args: Any, **kwargs: Any) -> Any:
            check()
            disk = disk_of()
            if disk is not None:
                disk.on_moment()
                check()
                if takes_room:
                    disk.check_room()
            return act(*args, **kwargs)

        return do

    def open_(*args: Any, **kwargs: Any) -> int:
        check()
        disk = disk_of()
        descriptor = os.open(*args, **kwargs)
        return descriptor if disk is None else disk.opened(descriptor)

    def close(descriptor: int) -> None:
        disk = disk_of()
        if disk is not None:
            disk.closed(descriptor)
        os.close(descriptor)

    def fsync(descriptor: int) -> None:
        check()
        disk = disk_of()
        if disk is not None:
            disk.sync(descriptor, sleep)

    def pwrite(*args: Any) -> int:
        disk = disk_of()
        if disk is not None:
            disk.take_time(sleep)
        return write_rows(*args)

    write_rows = checked(os.pwrite, takes_room=True)
    writes = ("write", "writev", "pwritev")
    changes = ("rename", "replace", "unlink", "remove", "rmdir", "ftruncate", "truncate", "mkdir", "makedirs", "link")
    return {
        "open": open_,
        "close": close,
        "fsync": fsync,
        "fdatasync": fsync,
        "pwrite": pwrite,
        "setpriority": lambda *_: None,  # all would wait for a thread that gives way to others outside
        **{name: checked(getattr(os, name), takes_room=True) for name in writes},
        **{name: checked(getattr(os, name), takes_room=False) for name in changes},
    }
