"""A durable server keeps what it must not lose in a directory: a journal of its requests, and snapshots that shorten
it.

Every request that changes anything is in the journal before it is carried out, and so before anybody hears of it. A
server does the same things when it is asked the same in the same order. So a server that starts again reads its last
snapshot, does over what the journal has since, and is where it was. Workers, whose requests broke, ask again, and no
step counts twice.

A snapshot has the rows that changed since the one before it, and names that one's files as well, until they are more
than a whole snapshot. A new journal begins with it. The older journals go when the snapshot is complete, however long
that takes; until then the older snapshot and all journals since lead to the same state.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet.base.checksum import crc32
from fleet.base.cluster import Endpoint
from fleet.base.file_lock import locked
from fleet.checkpoint.files import make_directory, sync_directory
from fleet.checkpoint.manifest import TABLE, read
from fleet.checkpoint.pieces import PieceFile, PieceWriter, rows_in_order
from fleet.checkpoint.places import Directory
from fleet.errors import CheckpointError, ConfigurationError

#: When the journal is synced: before anybody hears of a record, from time to time, or when the system pleases.
ALWAYS, INTERVAL, NEVER = "always", "interval", "os"
SYNC_S = 1.0
#: A snapshot is taken when the journal is this long.
JOURNAL_BYTES = 256 << 20
#: The length and the checksum of what follows, and the checksum of these twelve bytes.
_HEAD = struct.Struct("<QII")
#: A record's kind, its place in the file, and how much of the file is on the disk.
_MARK = struct.Struct("<cQQ")
_MOST_BUFFERS = 512
_PART_BYTES = 1 << 20
#: What a system writes to a disk at once; where it has not, there are zeros.
_PAGE_BYTES = 4096

_STATE = "state.json"
SNAPSHOT, JOURNAL = "snapshot-", "journal-"
_ENDED = ".ended-"
#: What the name of a directory ends with that is being removed.
OVER = ".over"


class Kind(bytes, enum.Enum):
    """Says what a record holds."""

    #: what the job began with: the id and the URL of a checkpoint, or none. Journals from before it was noted lack it
    ORIGIN = b"F"
    REQUEST = b"Q"
    #: a gathering's number, and what came of it, as a reply
    OUTCOME = b"O"
    #: a request whose answer, made now, gives a worker what is remembered of it
    HANDED = b"H"
    #: a part of what is remembered of what workers were given
    GIVEN = b"G"
    #: a worker that was given up on
    LOST = b"L"
    #: what the last round has changed, as it was before
    BEFORE = b"B"
    #: of the states of the workers' own objects
    STATE = b"S"
    #: how much of the journal is on the disk: the journal's own, which reading it does not show
    MARK = b"M"


class Journal:
    """Is a file of records that only grows: what a server has been asked, in the order in which it did it.

    A record is its length, its checksum, a checksum of these two, and its bytes. A process that is killed may leave the
    beginning of a record at the end of the file, and a machine that stops may leave zeros in the place of any page
    that it was not told to write. Nobody was told that such a record is safe, nor one after it, and they are cut off.
    The first record after each sync brings a mark of how much is on the disk since, so that a page of zeros before it
    is known as damage. So is anything else that does not fit, also a byte that has turned in the last record: going on
    without it would silently lose what was acknowledged.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open a journal to append to it; ``read`` what is in it first, which also cuts off a torn end. Of one that is
        ``read_only`` nothing is changed."""
        self.path = path
        self._read_only = read_only
        self._file = os.open(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.bytes = os.fstat(self._file).st_size
        # What a killed process has left is in the system's memory, and not on the disk for that.
        self._synced = self._marked = 0
        self._syncing = threading.Lock()

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Add a record. It outlives this process when this returns, and the machine after ``sync``."""
        size, crc = 0, 0
        for buffer in buffers:
            size, crc = size + len(buffer), crc32(buffer, crc)
        pieces: list[Any] = [_head(size, crc), *buffers]
        before, synced = self.bytes, self._synced
        if synced > self._marked:
            mark = _MARK.pack(Kind.MARK, before, synced)
            pieces = [_head(len(mark), crc32(mark)), mark, *pieces]
        try:
            for start in range(0, len(pieces), _MOST_BUFFERS):
                self._write(pieces[start : start + _MOST_BUFFERS])
            self.bytes = before + sum(map(len, pieces))  # at once, lest half a record be synced and a mark say so
        except OSError:
            with self._syncing:
                os.ftruncate(self._file, before)  # half a record would hide those after it
                self.bytes, self._synced = before, min(self._synced, before)
            raise
        self._marked = synced

    def _write(self, pieces: list[Any]) -> None:
        while pieces:
            written = os.writev(self._file, pieces)
            while pieces and written >= len(pieces[0]):
                written -= len(pieces[0])
                pieces = pieces[1:]
            if written:
                pieces = [memoryview(pieces[0])[written:], *pieces[1:]]

    def sync(self) -> None:
        """Put on the disk everything that has been added by now. Others may add more meanwhile; those who want that on
        the disk wait until this is done, and then one of them does it for all. Nothing of a closed journal is put
        there."""
        wanted = self.bytes
        with self._syncing:
            if self._synced < wanted:
                size = self.bytes
                os.fsync(self._file)
                self._synced = size

    def empty(self) -> None:
        """Drop all records."""
        with self._syncing:
            os.ftruncate(self._file, 0)
            self.bytes = self._synced = self._marked = 0

    def read(self, *, is_last: bool) -> Iterator[bytearray]:
        """Yield every whole record but marks, in order. Only the last of several journals can have a torn end."""
        at = 0
        while at < self.bytes:
            record = self._record(at)
            if record is None:
                if not is_last:
                    raise self._damaged(at)
                if not self._read_only:
                    os.ftruncate(self._file, at)
                self.bytes = at
                break
            if not _is_mark(record):
                yield record
            at += _HEAD.size + len(record)

    def _record(self, at: int) -> bytearray | None:
        """Return the record at a place; None if it is the torn end."""
        head = os.pread(self._file, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        size, crc, _ = _HEAD.unpack(head)
        if head != _head(size, crc):
            pages = -(at + _HEAD.size) % _PAGE_BYTES + _HEAD.size  # up to the end of the last one that it is in
            self._check_torn(at, memoryview(os.pread(self._file, pages, at)), at)
            return None
        if at + _HEAD.size + size > self.bytes:
            return None
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            part = os.preadv(self._file, [view[got:]], at + _HEAD.size + got)
            if not part:  # its server has cut it off since
                return None
            got += part
        if crc32(data) == crc:
            return data
        self._check_torn(at, view, at + _HEAD.size)
        return None

    def _check_torn(self, at: int, data: memoryview, start: int) -> None:
        """Refuse the record at a place unless a machine that stopped can have left it so: by those of its bytes that do
        not fit, which begin at ``start``, and by what comes after it."""
        if not _lacks_a_page(data, start) or self._was_synced(at):
            raise self._damaged(at)

    def _was_synced(self, at: int) -> bool:
        """Say whether a later mark tells that the record at a place was on the disk. Where one record is lost, only a
        search finds the next."""
        begin, start = _HEAD.pack(_MARK.size, 0, 0)[:8], at
        while len(part := os.pread(self._file, _PART_BYTES, start)) >= _HEAD.size + _MARK.size:
            found = part.find(begin)
            while found >= 0:
                if self._mark_at(start + found) > at:
                    return True
                found = part.find(begin, found + 1)
            start += len(part) - len(begin) + 1
        return False

    def _mark_at(self, at: int) -> int:
        """Return how much was on the disk by the mark at a place; 0 if there is none."""
        record = os.pread(self._file, _HEAD.size + _MARK.size, at)
        head, mark = record[: _HEAD.size], record[_HEAD.size :]
        if len(mark) < _MARK.size or head != _head(_MARK.size, crc32(mark)):
            return 0
        kind, place, synced = _MARK.unpack(mark)
        return int(synced) if kind == Kind.MARK and place == at else 0

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


@dataclass(frozen=True)
class Snapshot:
    """Holds what a server knew, apart from its shard, and the names of the files that have the shard."""

    state: dict[str, Any]
    files: tuple[PieceFile, ...]


@dataclass(frozen=True)
class Draft:
    """Holds a snapshot that is being written."""

    number: int
    state: dict[str, Any]
    #: those of the snapshot before it, on top of which ``pieces`` come
    before: tuple[PieceFile, ...]
    pieces: PieceWriter
    #: what happens after it, and how long it was when it began
    journal: Journal
    journal_bytes: int


class StateDirectory:
    def __init__(
        self,
        root: str,
        endpoint: Endpoint,
        sync: str,
        journal_bytes: int | None = None,
        *,
        keeps_all: bool = False,
    ) -> None:
        """Open, or make, the folder of an endpoint. With ``keeps_all`` nothing is removed for a newer snapshot, nor at
        the job's end."""
        self.directory = Path(root).resolve() / endpoint.folder_name
        self.keeps_all = keeps_all
        self._sync = sync
        self._most = self._due_at = JOURNAL_BYTES if journal_bytes is None else journal_bytes
        self._synced_at = 0.0
        try:
            make_directory(self.directory)
            self._lock = os.open(self.directory, os.O_RDONLY)
        except OSError as error:
            raise ConfigurationError(
                "FLEET_DURABLE_DIR cannot be used",
                where=root,
                got=str(error),
                todo="Name a directory on a disk of this machine in which the server may make files.",
            ) from None
        if locked(self._lock) is False:
            os.close(self._lock)
            raise ConfigurationError(
                "another server keeps its state here",
                where=str(self.directory),
                todo="Stop it, or give this one another endpoint or another FLEET_DURABLE_DIR.",
            )
        self._number, self._journals = 0, list[Journal]()
        self.snapshot: Snapshot | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Find what there is, and remove what processes have left that were killed: of a job that was over, or of a
        snapshot."""
        shutil.rmtree(self._over, ignore_errors=True)
        self._number = self._newest_snapshot()
        self.snapshot = self._snapshot_of(self._number) if self._number else None
        for number in self._journal_numbers():
            self._journals.append(self._journal(number))
        for number in self._numbers(SNAPSHOT):
            if number > self._number:
                shutil.rmtree(self._path(SNAPSHOT, number), ignore_errors=True)

    # ---------------------------------------------------------------- what is there

    def _path(self, kind: str, number: int) -> Path:
        return self.directory / f"{kind}{number:08d}"

    def _journal(self, number: int) -> Journal:
        journal = Journal(self._path(JOURNAL, number))
        sync_directory(self.directory)
        return journal

    def _numbers(self, kind: str) -> list[int]:
        return numbers_in(self.directory, kind)

    def _newest_snapshot(self) -> int:
        return max(snapshots_in(self.directory), default=0)

    def _journal_numbers(self) -> list[int]:
        return [number for number in self._numbers(JOURNAL) if number >= self._number] or [self._number]

    def _snapshot_of(self, number: int) -> Snapshot:
        return snapshot_in(self.directory, number)

    def pieces(self) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Yield the shard's pieces in the snapshot, in the order in which they are to be taken."""
        for file in rows_in_order(self._files()):
            yield file.about, read(Directory(self.directory), file)

    def records(self) -> Iterator[tuple[Kind, memoryview]]:
        """Yield what happened after the snapshot."""
        for journal in self._journals:
            for record in journal.read(is_last=journal is self._journals[-1]):
                yield self._told(record)

    def _told(self, record: bytearray) -> tuple[Kind, memoryview]:
        try:
            return Kind(bytes(record[:1])), memoryview(record)[1:]
        except ValueError:  # of a later one
            raise of_another_version(self.directory) from None

    # ---------------------------------------------------------------- what happens

    @property
    def is_due(self) -> bool:
        """Say whether it is time for a snapshot."""
        return sum(journal.bytes for journal in self._journals) >= self._due_at

    def record(self, kind: Kind, buffers: Iterable[bytes | memoryview]) -> None:
        self._journals[-1].append([kind.value, *buffers])

    def secure(self, *, surely: bool = False) -> None:
        """Put on the disk what has been recorded by now, if anything is to be there before somebody hears of it, or if
        this is to be there ``surely``."""
        if self._sync == ALWAYS or (surely and self._sync == INTERVAL):
            self.sync()

    def sync_if_due(self, now: float) -> None:
        if self._sync == INTERVAL and now - self._synced_at >= SYNC_S:
            self._synced_at = now
            self.sync()

    def make_due(self) -> None:
        """Let it be time for a snapshot."""
        self._due_at = 0

    def empty(self) -> None:
        """Drop what has been recorded since the last snapshot."""
        self._journals[-1].empty()

    def sync(self) -> None:
        """Put on the disk everything that has been recorded by now."""
        self._journals[-1].sync()  # the one before it was synced before this one was there

    def begin(
        self,
        state: dict[str, Any],
        carried: Iterable[tuple[Kind, list[bytes | memoryview]]],
        *,
        on_top: bool,
        behind: bool,
    ) -> Draft:
        """Begin a snapshot of this moment, into which its pieces are yet to be written, ``behind`` a training or at
        once. ``state`` is the draft's own from now on. ``carried`` are the records of what is not finished yet, or is
        in no piece. With ``on_top`` the pieces come after those of the snapshot before."""
        number = self._journal_numbers()[-1] + 1
        # Should this one fail, however early, the next is due when as much again has come.
        self._due_at = self._most + sum(journal.bytes for journal in self._journals)
        self.sync()  # what comes into the next one must not outlive what came before it
        self._journals.append(self._journal(number))
        for kind, buffers in carried:
            self.record(kind, buffers)
        self._due_at += self._journals[-1].bytes
        folder = self._path(SNAPSHOT, number)
        folder.mkdir()
        before = tuple(file for file in self._files() if on_top and TABLE in file.about)
        pieces = PieceWriter(Directory(folder), folder.name, "piece", behind=behind)
        journal = self._journals[-1]
        return Draft(number, state, before, pieces, journal, journal.bytes)

    def publish(self, draft: Draft) -> Snapshot:
        """Make this the snapshot to start from, as all its pieces are written."""
        snapshot = Snapshot(draft.state, (*draft.before, *draft.pieces.files))
        content = json.dumps({"state": snapshot.state, "files": [asdict(file) for file in snapshot.files]}).encode()
        draft.journal.sync()
        sync_directory(self.directory)
        Directory(self._path(SNAPSHOT, draft.number)).publish(_STATE, _crc32(content) + b"\n" + content)
        return snapshot

    def adopt(self, draft: Draft, snapshot: Snapshot) -> None:
        """Let the next snapshot come on top of this one; what came before it is not needed any more."""
        self.snapshot, self._number = snapshot, draft.number
        # What is carried over is written each time: no more of it than of what has happened.
        self._due_at = draft.journal_bytes + max(self._most, draft.journal_bytes)
        first = self._journals.index(draft.journal)
        for journal in self._journals[:first]:
            journal.close()
        del self._journals[:first]

    def discard(self, draft: Draft) -> None:
        """Drop a draft that has come to nothing; the journals go on."""
        folder = self._path(SNAPSHOT, draft.number)
        (folder / _STATE).unlink(missing_ok=True)  # first, lest half of it be taken for a whole one
        shutil.rmtree(folder, ignore_errors=True)

    def _files(self) -> tuple[PieceFile, ...]:
        return () if self.snapshot is None else self.snapshot.files

    @property
    def table_bytes(self) -> int:
        """Return how many bytes the rows in the last snapshot have; rows that are in it twice count twice."""
        return sum(file.bytes for file in self._files() if TABLE in file.about)

    def clean(self) -> None:
        """Remove what the last snapshot has made superfluous."""
        if self.keeps_all:
            return
        last, used = self._number, {Path(file.file).parts[0] for file in self._files()}
        for number in self._numbers(JOURNAL):
            if number < last:
                self._path(JOURNAL, number).unlink(missing_ok=True)
        for number in self._numbers(SNAPSHOT):
            path = self._path(SNAPSHOT, number)
            if number < last and path.name not in used:
                shutil.rmtree(path, ignore_errors=True)
            elif number < last:
                (path / _STATE).unlink(missing_ok=True)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Close the files at the end of the process, while the job goes on."""
        for journal in self._journals:
            journal.sync()
            journal.close()
        self._journals.clear()
        os.close(self._lock)

    def forget(self) -> None:
        """Remove the directory, as the job is over, or put it aside, so that the next job begins anew."""
        for journal in self._journals:
            if self.keeps_all:
                journal.sync()
            journal.close()
        self._journals.clear()
        if self.keeps_all:
            os.rename(self.directory, self._put_aside())
            sync_directory(self.directory.parent)
            os.close(self._lock)
            return
        # From one moment to the next: half of what was there would be taken for another state.
        shutil.rmtree(self._over, ignore_errors=True)
        os.rename(self.directory, self._over)
        shutil.rmtree(self._over, ignore_errors=True)
        os.close(self._lock)

    @property
    def _over(self) -> Path:
        """Return what the directory is called while it is removed."""
        return self.directory.with_name(f"{self.directory.name}{OVER}")

    def _put_aside(self) -> Path:
        """Return where the directory goes when its job is over."""
        ended = ended_in(self.directory.parent, self.directory.name)
        return ended_path(self.directory.parent, self.directory.name, max(ended, default=0) + 1)


def numbers_in(directory: Path, kind: str) -> list[int]:
    """Return the numbers of a directory's journals, or of its snapshots, complete or not."""
    names = (name.removeprefix(kind) for name in os.listdir(directory) if name.startswith(kind))
    return sorted(int(name) for name in names if name.isdigit())


def snapshots_in(directory: Path) -> list[int]:
    """Return the numbers of the complete snapshots in a directory."""
    return [n for n in numbers_in(directory, SNAPSHOT) if (directory / f"{SNAPSHOT}{n:08d}" / _STATE).is_file()]


def snapshot_in(directory: Path, number: int) -> Snapshot:
    path = directory / f"{SNAPSHOT}{number:08d}" / _STATE
    try:
        crc, _, content = path.read_bytes().partition(b"\n")
        if crc != _crc32(content):
            raise ValueError("its checksum is wrong")
        raw = json.loads(content)
        return Snapshot(raw["state"], tuple(PieceFile.from_json(each) for each in raw["files"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("a server's snapshot cannot be read", where=str(path), got=repr(error)) from None


def ended_path(root: Path, folder: str, number: int) -> Path:
    """Return where the state of an endpoint's job is that has ended; jobs that end one after another are counted."""
    return root / f"{folder}{_ENDED}{number:08d}"


def ended_in(root: Path, folder: str) -> list[int]:
    """Return the numbers of an endpoint's jobs that have ended and whose state was kept."""
    return numbers_in(root, f"{folder}{_ENDED}")


def ended_number(folder: str) -> int | None:
    """Return the number that a folder has in its name if its job has ended."""
    _, ended, number = folder.rpartition(_ENDED)
    return int(number) if ended and number.isdigit() else None


def of_another_version(directory: Path) -> ConfigurationError:
    return ConfigurationError(
        "the state that is kept here is of a version of this package that spoke with servers otherwise, or "
        "gave servers other parts of the parameters",
        where=str(directory),
        todo="Go on with that version; or remove the directory and start the job from its last checkpoint, which does "
        "not depend on it.",
    )


def _crc32(content: bytes) -> bytes:
    return b"%08x" % crc32(content)


def _lacks_a_page(data: memoryview, at: int) -> bool:
    """Say whether some page of a file has nothing of these bytes, which begin at a place in it."""
    starts = [0, *range(-at % _PAGE_BYTES or _PAGE_BYTES, len(data), _PAGE_BYTES)]
    return any(not any(data[start:stop]) for start, stop in zip(starts, [*starts[1:], len(data)], strict=True))


def _is_mark(record: bytearray) -> bool:
    return len(record) == _MARK.size and record.startswith(Kind.MARK)


def _head(size: int, crc: int) -> bytes:
    begin = _HEAD.pack(size, crc, 0)[:-4]
    return begin + crc32(begin).to_bytes(4, "little")
