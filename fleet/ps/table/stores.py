"""Says where tables keep their rows: in memory, or beyond a bound in files as well."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from fleet.base.cluster import Endpoint
from fleet.base.file_lock import locked
from fleet.base.settings import ProcessSettings
from fleet.errors import ConfigurationError, FleetError
from fleet.ps.table.memory_budget import MemoryBudget, SharedMemory
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.row_file import Losses, RowFile
from fleet.ps.table.store import Between, Store
from fleet.ps.table.tiered_store import LEAST_FRAMES, TieredStore, least_bytes

#: Segments of files have no more bytes, no fewer, and a multiple of these.
_LARGEST, _SMALLEST, _PAGE = 8 << 20, 64 << 10, 4096
#: Within that, those on their way to the disk take about this part of the memory.
_PART = 1 / 16

#: What the folder of a server is called, and what a file in it ends with.
_PREFIX, _ENDING = "fleet-rows-", ".rows"

#: Not empty once this process has everything compiled.
_warm: list[bool] = []


class NewStore(Protocol):
    """Makes the stores of one shard."""

    def __call__(self, name: str, tables: int, row_bytes: int, /) -> Store:
        """Make the store of a table, of which there are so many, and whose rows have so many bytes."""

    def give_way(self) -> bool:
        """Give back a little of the memory that another shard is to have, and say whether that is all."""

    def take_over(self) -> None:
        """Note that this is the shard that is trained from now on."""


class Stores(Protocol):
    @property
    def has_files(self) -> bool:
        """Say whether rows may lie in files, which have to be waited for."""

    def share(self) -> NewStore:
        """Return what makes the stores of one shard. While there is another, as when other values are read, it has what
        that one gives back."""

    def remove_unused(self) -> None:
        """Remove the files of tables that are gone."""

    def failure(self) -> FleetError | None:
        """Return why rows in files cannot be had, if they cannot."""

    def close(self) -> None:
        """Remove everything, at the end."""


class _InMemory:
    """Implements ``NewStore``."""

    def __call__(self, name: str, tables: int, row_bytes: int, /) -> Store:
        del name, tables, row_bytes
        return MemoryStore()

    def give_way(self) -> bool:
        return True

    def take_over(self) -> None:
        """Do nothing: there is no bound."""


class MemoryStores:
    """Keeps all rows in memory."""

    has_files = False

    def share(self) -> NewStore:
        return _InMemory()

    def remove_unused(self) -> None:
        """Do nothing: there are no files."""

    def failure(self) -> FleetError | None:
        return None

    def close(self) -> None:
        """Do nothing: there are no files."""


class _Tiered:
    """Implements ``NewStore``."""

    def __init__(self, stores: TieredStores, budget: MemoryBudget) -> None:
        self._stores = stores
        self._budget = budget
        self.give_way, self.take_over = budget.give_way, budget.take_over

    def __call__(self, name: str, tables: int, row_bytes: int, /) -> Store:
        return self._stores.new(self._budget, name, tables, row_bytes)


class TieredStores:
    """Keeps rows in memory up to a bound, and the others in files, in a folder of its own."""

    has_files = True

    def __init__(self, directory: Path, owner: str, memory_bytes: int, deadline_s: float) -> None:
        """``owner`` is a part of the folder's name; ``deadline_s`` is the longest that the disk may take to write a
        segment."""
        self._losses = Losses()
        self._memory = SharedMemory(memory_bytes, self._losses)
        self._deadline_s = deadline_s
        self._numbers = itertools.count()
        self._files: set[RowFile] = set()
        #: those of tables that are gone
        self._unused: deque[RowFile] = deque()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(directory)
            self._folder, self._lock = _own_folder(directory, f"{_PREFIX}{re.sub('[^A-Za-z0-9.]+', '-', owner)}-")
        except OSError as error:
            raise ConfigurationError(
                "FLEET_TABLE_DIR cannot be used",
                where=str(directory),
                expected="a directory in which this process may make files",
                got=error.strerror,
                todo="Make it, or name another one.",
            ) from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fleet-rows")
        if not _warm:
            try:
                self._compile()
            except BaseException:  # Ctrl-C, while a server starts
                self.close()
                raise
            _warm.append(True)

    def _compile(self) -> None:
        """Compile, or load, everything that a store runs, on one of a few rows that is thrown away."""
        store = TieredStore("", MemoryBudget(SharedMemory(1 << 30, Losses())), self._file(_SMALLEST), self._unused)
        for number, dtype in enumerate(("float32", "float64", "uint32")):
            store.ensure_column(str(number), 1, 0.0, dtype)
        ids = np.arange(2 * LEAST_FRAMES)
        store.write(store.insert(ids))
        store.give_back(store.spare_bytes)
        reading = store.reading(ids, expected=True)
        assert reading is not None, "rows have left memory"
        reading.run()
        store.take(reading)
        store.find(ids)
        store.scan(0, ids.size, store.columns, Between("2", 0))
        store.remove(ids)

    def share(self) -> NewStore:
        return _Tiered(self, MemoryBudget(self._memory))

    def new(self, budget: MemoryBudget, name: str, tables: int, row_bytes: int) -> Store:
        """Make a store that takes part in a budget."""
        segment_bytes = int(self._memory.nbytes * _PART / max(1, tables) / 4)
        segment_bytes = min(_LARGEST, max(_SMALLEST, segment_bytes)) // _PAGE * _PAGE
        self.remove_unused()
        budget.reserve(name, least_bytes(row_bytes, segment_bytes))
        return TieredStore(name, budget, self._file(segment_bytes), self._unused)

    def _file(self, segment_bytes: int) -> RowFile:
        path = self._folder / f"table-{next(self._numbers)}{_ENDING}"
        file = RowFile(path, segment_bytes, self._writer, self._deadline_s, self._losses)
        self._files.add(file)
        return file

    def remove_unused(self) -> None:
        while self._unused:
            file = self._unused.popleft()
            if file in self._files:
                self._files.remove(file)
                file.close()

    def failure(self) -> FleetError | None:
        return self._losses.first

    def close(self) -> None:
        """Remove everything, at the end."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._writer.shutdown(wait=True)
        _remove(self._folder)
        os.close(self._lock)


def _own_folder(directory: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder, and return what it is locked by as well."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=directory))
        with contextlib.suppress(FileNotFoundError):  # another server took it for what a killed one has left
            lock = os.open(made, os.O_RDONLY)
            try:
                locked(lock)
                return made.rename(made.with_name(made.name[1:])), lock  # it has its name when it is locked
            except BaseException:
                os.close(lock)
                raise


def _remove_abandoned(directory: Path) -> None:
    """Remove what servers have left that were killed."""
    for folder in [*directory.glob(f"{_PREFIX}*"), *directory.glob(f".{_PREFIX}*")]:
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                if locked(descriptor):
                    _remove(folder)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for file in folder.glob(f"*{_ENDING}"):
            file.unlink(missing_ok=True)
        folder.rmdir()


def stores_of(endpoint: Endpoint, settings: ProcessSettings) -> Stores:
    """Return where a server or a replica keeps its rows."""
    if settings.table_memory_bytes is None:
        return MemoryStores()
    directory = Path(settings.table_dir or tempfile.gettempdir())
    owner = f"{endpoint}-{os.getpid()}"
    return TieredStores(directory, owner, settings.table_memory_bytes, settings.rpc_deadline_s)
