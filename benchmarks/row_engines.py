"""Ways for the rows of a table to lie in files, as ``row_files.py`` compares them.

An ``Engine`` holds rows of ``WORDS`` words of 32 bits under ids of 64. ``HotSet`` is an engine in front of another,
``Fleet`` the package's own. A new one is a class here and a line in ``ENGINES``.
"""

from __future__ import annotations

import functools
import mmap
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from fleet.numeric.ids import gather, scatter
from fleet.ps.table.memory_budget import MemoryBudget, SharedMemory
from fleet.ps.table.row_file import Losses, RowFile
from fleet.ps.table.tiered_store import TieredStore

#: 16 weights, 16 numbers of Adagrad's state, and a version.
WORDS = 33
ROW = np.dtype(("<u4", (WORDS,)))
RECORD = np.dtype([("id", "<i8"), ("row", ROW)])
Array = np.ndarray[Any, Any]


class Engine(ABC):
    """Holds rows in ``folder``, in about ``memory`` bytes of memory, caches of the system included.

    A folder that was closed is opened again with the same arguments. Ids of one call are distinct."""

    @abstractmethod
    def load(self, ids: Array, rows: Array) -> None:
        """Take rows that are new, in the order of their ids."""

    @abstractmethod
    def read(self, ids: Array) -> Array:
        """Return the rows, all of which are there."""

    @abstractmethod
    def write(self, ids: Array, rows: Array) -> None:
        """Replace rows that are there."""

    @abstractmethod
    def close(self) -> None: ...

    def filled(self) -> float:
        """Return how much of its memory for rows is in use. What is not full yet has written too little."""
        return 1.0


# ---------------------------------------------------------------- an index in memory, and reads announced

# Symbols of the process itself, so that what is compiled can be kept in a cache.
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", 3)


@numba.njit("void(int32, int64[::1], int64)", nogil=True, cache=True)
def _announce(fd: int, offsets: Array, size: int) -> None:
    """Have all of them on their way before the first is waited for."""
    for number in range(offsets.size):
        _fadvise(fd, offsets[number], size, _WILLNEED)


@numba.njit("uint64(int64)", nogil=True, cache=True)
def _spread(number: int) -> int:
    mixed = np.uint64(number) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


@numba.njit("int64(int64, int64)", nogil=True, cache=True)
def _home(number: int, capacity: int) -> int:
    return np.int64(((_spread(number) >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


# An entry of the index is 32 bits of the id's hash above the place plus one, or 0. Readers compare the id with that of
# the record.
@numba.njit("void(uint64[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def _put(entries: Array, ids: Array, places: Array) -> None:
    for number in range(ids.size):
        tag = _spread(ids[number]) << np.uint64(32)
        at = _home(ids[number], entries.size)
        while entries[at] != 0 and (entries[at] >> np.uint64(32)) << np.uint64(32) != tag:
            at = at + 1 if at + 1 < entries.size else 0
        entries[at] = tag | np.uint64(places[number] + 1)


@numba.njit("void(uint64[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def _find(entries: Array, ids: Array, places: Array) -> None:
    for number in range(ids.size):
        tag = _spread(ids[number]) << np.uint64(32)
        at = _home(ids[number], entries.size)
        while entries[at] != 0 and (entries[at] >> np.uint64(32)) << np.uint64(32) != tag:
            at = at + 1 if at + 1 < entries.size else 0
        places[number] = np.int64(entries[at] & np.uint64(0xFFFFFFFF)) - 1


class Index:
    """Finds the place of an id, with 8 bytes a row at three quarters full."""

    def __init__(self, file: Path, rows: int) -> None:
        self._file = file
        self._entries = np.load(file) if file.exists() else np.zeros(rows * 4 // 3 + 8, np.uint64)

    @staticmethod
    def bytes_of(rows: int) -> int:
        return rows * 4 // 3 * 8

    def put(self, ids: Array, places: Array) -> None:
        _put(self._entries, ids, places)

    def find(self, ids: Array) -> Array:
        places = np.empty(ids.size, np.int64)
        _find(self._entries, ids, places)
        return places

    def save(self) -> None:
        np.save(self._file, self._entries)


# ---------------------------------------------------------------- engines


class Mapped(Engine):
    """A file in which each row has its place for good, mapped into memory."""

    def __init__(self, folder: Path, rows: int, memory: int, *, announced: bool) -> None:  # noqa: ARG002
        self._index, self._used = Index(folder / "index.npy", rows), 0
        file = folder / "rows"
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._fd, rows * RECORD.itemsize)
        self._mapping = mmap.mmap(self._fd, rows * RECORD.itemsize)
        # Else each fault brings what lies around it, up to megabytes.
        self._mapping.madvise(mmap.MADV_RANDOM)
        self._records: Array = np.frombuffer(self._mapping, RECORD)
        self._announced = announced

    def load(self, ids: Array, rows: Array) -> None:
        places = np.arange(self._used, self._used + ids.size)
        self._used += ids.size
        self._index.put(ids, places)
        os.pwrite(self._fd, _packed(ids, rows), int(places[0]) * RECORD.itemsize)

    def read(self, ids: Array) -> Array:
        places = self._places(ids)
        records = self._records[places]
        _compare(records["id"], ids)
        return records["row"]

    def write(self, ids: Array, rows: Array) -> None:
        self._records["row"][self._places(ids)] = rows

    def _places(self, ids: Array) -> Array:
        places = self._index.find(ids)
        if self._announced:
            _announce(self._fd, places * RECORD.itemsize, RECORD.itemsize)
        return places

    def close(self) -> None:
        self._index.save()
        del self._records
        self._mapping.close()
        os.close(self._fd)


class Fleet(Engine):
    """The package's own store. What is closed lies in a file of all rows, as a checkpoint would."""

    #: The rest is for what the system keeps of the file.
    SHARE = 0.85

    def __init__(self, folder: Path, rows: int, memory: int) -> None:  # noqa: ARG002
        self._saved, self._writer = folder / "saved", ThreadPoolExecutor(1)
        budget = int(memory * self.SHARE)
        segment = max(64 << 10, min(8 << 20, budget // 64)) // 4096 * 4096
        losses = Losses()
        file = RowFile(folder / "rows", segment, self._writer, 60.0, losses)
        self._store = TieredStore("rows", MemoryBudget(SharedMemory(budget, losses)), file, deque())
        self._store.ensure_column("row", WORDS, 0, "<u4")
        if self._saved.exists():
            with self._saved.open("rb") as saved:
                while (records := np.fromfile(saved, RECORD, 50_000)).size:
                    self.load(np.ascontiguousarray(records["id"]), np.ascontiguousarray(records["row"]))

    def load(self, ids: Array, rows: Array) -> None:
        for part in self._parts(ids):
            slots = self._store.insert(ids[part])
            scatter(self._store.column("row"), slots, rows[part])

    def read(self, ids: Array) -> Array:
        rows = np.empty((ids.size, WORDS), "<u4")
        for part in self._parts(ids):
            reading = self._store.reading(ids[part], expected=True)
            if reading is not None:
                reading.run()
                self._store.take(reading)
            slots = self._store.find(ids[part])
            gather(self._store.column("row"), slots, rows[part])
        return rows

    def write(self, ids: Array, rows: Array) -> None:
        for part in self._parts(ids):
            slots = self._store.find(ids[part])
            scatter(self._store.column("row"), slots, rows[part])
            self._store.write(slots)
        reading = self._store.to_rewrite()
        if reading is not None:
            reading.run()
            self._store.rewrite(reading)

    def _parts(self, ids: Array) -> Iterator[slice]:
        start = 0
        while start < ids.size:
            most = self._store.most
            yield slice(start, start + most)
            start += most

    def filled(self) -> float:
        return 1.0 if self._store.bytes_written else 0.0

    def close(self) -> None:
        place: int | None = 0
        with self._saved.open("wb") as saved:
            while place is not None:
                (ids, columns), place = self._store.scan(place, 50_000, ["row"])
                _packed(ids, columns["row"]).tofile(saved)
        self._writer.shutdown()


class Rocks(Engine):
    """RocksDB, told all it can use: no log ahead of its writes, no compression, filters, a cache of most of the memory.

    Several threads read parts of a batch, as its ``multi_get`` waits for one block after the other."""

    THREADS = 16

    def __init__(self, folder: Path, rows: int, memory: int, *, direct: bool) -> None:  # noqa: ARG002
        import rocksdict

        buffer = max(1 << 20, min(32 << 20, memory // 16))
        blocks = rocksdict.BlockBasedOptions()
        # What is not in its own cache may be in the system's, unless reads go past that one.
        cached = int(memory * (0.7 if direct else 0.35)) - 2 * buffer
        blocks.set_block_cache(rocksdict.Cache(max(1 << 20, cached)))
        blocks.set_block_size(4096)
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        blocks.set_data_block_hash_ratio(0.75)
        blocks.set_format_version(5)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(buffer)
        options.set_max_background_jobs(2)
        options.set_compaction_readahead_size(256 << 10)  # of each file that is merged
        options.set_bytes_per_sync(1 << 20)
        # All ids that are asked for are there, so the last level needs no filters.
        options.set_optimize_filters_for_hits(True)
        options.set_advise_random_on_open(True)
        options.set_use_direct_reads(direct)
        options.set_use_direct_io_for_flush_and_compaction(direct)
        self._batch = functools.partial(rocksdict.WriteBatch, raw_mode=True)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self._rows = rocksdict.Rdict(str(folder), options)
        self._pool = ThreadPoolExecutor(self.THREADS)

    def load(self, ids: Array, rows: Array) -> None:
        self.write(ids, rows)

    def read(self, ids: Array) -> Array:
        keys = sorted(_keys(ids))
        part = -(-len(keys) // self.THREADS)
        parts = [keys[start : start + part] for start in range(0, len(keys), part)]
        values = b"".join(self._pool.map(lambda each: b"".join(self._rows.get(each)), parts))
        rows = np.empty((ids.size, WORDS), "<u4")
        rows[np.argsort(ids)] = np.frombuffer(values, ROW)
        return rows

    def write(self, ids: Array, rows: Array) -> None:
        batch, size, values = self._batch(), ROW.itemsize, np.ascontiguousarray(rows).tobytes()
        for number, key in enumerate(_keys(ids)):
            batch.put(key, values[number * size : number * size + size])
        self._rows.write(batch, self._unlogged)

    def close(self) -> None:
        self._pool.shutdown()
        self._rows.flush()
        self._rows.close()


class Lmdb(Engine):
    """LMDB: one transaction a batch, a map that is written to, nothing waited for."""

    def __init__(self, folder: Path, rows: int, memory: int) -> None:  # noqa: ARG002
        import lmdb

        self._environment = lmdb.open(
            str(folder),
            map_size=rows * 1024 + (1 << 28),
            max_dbs=1,
            writemap=True,
            map_async=True,
            sync=False,
            metasync=False,
            readahead=False,
            meminit=False,
            lock=False,
        )
        self._table = self._environment.open_db(b"rows", integerkey=True)

    def load(self, ids: Array, rows: Array) -> None:
        self._put(ids, rows, append=True)

    def read(self, ids: Array) -> Array:
        order = np.argsort(ids)
        keys = _keys(ids[order], "=u8")
        with self._environment.begin(db=self._table, buffers=True) as reading, reading.cursor() as cursor:
            values = b"".join([value for _, value in cursor.getmulti(keys)])
        rows = np.empty((ids.size, WORDS), "<u4")
        rows[order] = np.frombuffer(values, ROW)
        return rows

    def write(self, ids: Array, rows: Array) -> None:
        order = np.argsort(ids)
        self._put(ids[order], rows[order], append=False)

    def _put(self, ids: Array, rows: Array, *, append: bool) -> None:
        size, values = ROW.itemsize, np.ascontiguousarray(rows).tobytes()
        pairs = [(key, values[number * size : number * size + size]) for number, key in enumerate(_keys(ids, "=u8"))]
        with self._environment.begin(write=True, db=self._table) as writing, writing.cursor() as cursor:
            cursor.putmulti(pairs, append=append)

    def close(self) -> None:
        self._environment.close()


def _keys(ids: Array, kind: str = ">u8") -> list[bytes]:
    together = ids.astype(kind).tobytes()
    return [together[start : start + 8] for start in range(0, len(together), 8)]


def _packed(ids: Array, rows: Array) -> Array:
    records = np.empty(ids.size, RECORD)
    records["id"], records["row"] = ids, rows
    return records


def _compare(found: Array, ids: Array) -> None:
    if not np.array_equal(found, ids):
        raise LookupError("the index led to another row")


# ---------------------------------------------------------------- rows in memory, in front of an engine

# What a slot's mark consists of: it holds a row, which was asked for again, and changed; its row is about to go.
_HELD, _AGAIN, _DIRTY, _GOING = 1, 2, 4, 8


@numba.njit("void(int32[::1], int64[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def _find_hot(table: Array, held: Array, ids: Array, slots: Array) -> None:
    for number in range(ids.size):
        at = _home(ids[number], table.size)
        while table[at] != 0 and held[table[at] - 1] != ids[number]:
            at = at + 1 if at + 1 < table.size else 0
        slots[number] = table[at] - 1


@numba.njit("void(int32[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def _add_hot(table: Array, held: Array, slots: Array) -> None:
    for slot in slots:
        at = _home(held[slot], table.size)
        while table[at] != 0:
            at = at + 1 if at + 1 < table.size else 0
        table[at] = slot + 1


@numba.njit("void(int32[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def _remove_hot(table: Array, held: Array, slots: Array) -> None:
    """Take slots out, and move what comes after each of them up, as far as it may."""
    for slot in slots:
        at = _home(held[slot], table.size)
        while table[at] != slot + 1:
            at = at + 1 if at + 1 < table.size else 0
        hole = at
        while True:
            at = at + 1 if at + 1 < table.size else 0
            if table[at] == 0:
                break
            home = _home(held[table[at] - 1], table.size)
            if (at - home) % table.size >= (at - hole) % table.size:
                table[hole] = table[at]
                hole = at
        table[hole] = 0


@numba.njit("int64(uint8[::1], int64, int64[::1])", nogil=True, cache=True)
def _choose(marks: Array, hand: int, slots: Array) -> int:
    """Fill ``slots`` with those whose rows may go, none of which is chosen twice, and return where the hand is then."""
    chosen = 0
    while chosen < slots.size:
        if marks[hand] & _AGAIN:
            marks[hand] &= 0xFF - _AGAIN
        elif not marks[hand] & _GOING:
            marks[hand] |= _GOING
            slots[chosen] = hand
            chosen += 1
        hand = hand + 1 if hand + 1 < marks.size else 0
    return hand


class HotSet(Engine):
    """Holds rows that were used lately in memory (CLOCK) and writes those that were changed when they have to go."""

    def __init__(self, behind: Callable[[int], Engine], rows: int, memory: int, index: int, share: float) -> None:
        """``index`` bytes of the memory are the other engine's for certain, of the rest ``share`` is for rows here."""
        each = ROW.itemsize + 8 + 1 + 4 * 4 // 3
        self._size = min(rows, max(1 << 14, int((memory - index) * share) // each))
        self._ids, self._rows = np.zeros(self._size, np.int64), np.zeros((self._size, WORDS), "<u4")
        self._marks, self._hand = np.zeros(self._size, np.uint8), 0
        self._table = np.zeros(self._size * 4 // 3 + 8, np.int32)
        self._behind = behind(memory - self._size * each)

    def load(self, ids: Array, rows: Array) -> None:
        self._behind.load(ids, rows)

    def read(self, ids: Array) -> Array:
        slots = self._find(ids)
        here = slots >= 0
        self._marks[slots[here]] |= _AGAIN
        rows = self._rows[slots]
        if not here.all():
            rows[~here] = self._behind.read(ids[~here])
            self._take(ids[~here], rows[~here], 0)
        return rows

    def write(self, ids: Array, rows: Array) -> None:
        slots = self._find(ids)
        here = slots >= 0
        self._rows[slots[here]] = rows[here]
        self._marks[slots[here]] |= _DIRTY
        if not here.all():
            self._take(ids[~here], rows[~here], _DIRTY)

    def filled(self) -> float:
        return float((self._marks != 0).mean())

    def _find(self, ids: Array) -> Array:
        slots = np.empty(ids.size, np.int64)
        _find_hot(self._table, self._ids, ids, slots)
        return slots

    def _take(self, ids: Array, rows: Array, mark: int) -> Array:
        slots = np.empty(ids.size, np.int64)
        self._hand = _choose(self._marks, self._hand, slots)
        self._let_go(slots)
        self._ids[slots], self._rows[slots] = ids, rows
        # New rows are not marked as used: those that are used once go first.
        self._marks[slots] = _HELD | mark
        _add_hot(self._table, self._ids, slots)
        return slots

    def _let_go(self, slots: Array) -> None:
        slots = slots[self._marks[slots] & _HELD != 0]
        changed = slots[self._marks[slots] & _DIRTY != 0]
        if changed.size:
            self._behind.write(self._ids[changed], self._rows[changed])
        _remove_hot(self._table, self._ids, slots)

    def close(self) -> None:
        (held,) = np.nonzero(self._marks & _DIRTY)
        for start in range(0, held.size, 50_000):
            part = held[start : start + 50_000]
            self._behind.write(self._ids[part], self._rows[part])
        self._behind.close()


# ---------------------------------------------------------------- all of them

#: Makes an engine of a folder, a number of rows and bytes of memory.
Maker = Callable[[Path, int, int], Engine]


def _hot(maker: Maker, *, indexed: bool, share: float) -> Maker:
    def made(folder: Path, rows: int, memory: int) -> Engine:
        index = Index.bytes_of(rows) if indexed else 0
        return HotSet(lambda left: maker(folder, rows, left), rows, memory, index, share)

    return made


_MAPPED = functools.partial(Mapped, announced=False)
_ANNOUNCED = functools.partial(Mapped, announced=True)
_ROCKS = functools.partial(Rocks, direct=False)
_ROCKS_DIRECT = functools.partial(Rocks, direct=True)

#: By name: what it needs to be installed, what it leaves in its folder (engines with the same can take turns on one
#: folder), and how it is made.
ENGINES: dict[str, tuple[str | None, str, Maker]] = {
    "fleet": (None, "fleet", Fleet),
    "mapped": (None, "mapped", _MAPPED),
    "mapped, announced": (None, "mapped", _ANNOUNCED),
    "hot set, mapped, announced": (None, "mapped", _hot(_ANNOUNCED, indexed=True, share=0.6)),
    "rocksdict": ("rocksdict", "rocksdict", _ROCKS),
    "rocksdict, direct": ("rocksdict", "rocksdict", _ROCKS_DIRECT),
    "hot set, rocksdict": ("rocksdict", "rocksdict", _hot(_ROCKS, indexed=False, share=0.5)),
    "lmdb": ("lmdb", "lmdb", Lmdb),
    "hot set, lmdb": ("lmdb", "lmdb", _hot(Lmdb, indexed=False, share=0.6)),
}
