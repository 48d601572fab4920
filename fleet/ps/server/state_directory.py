"""What a server keeps on disk so that killing it loses nothing: a journal of what it did, and snapshots that cut it.

Every request that changes anything is in the journal before it is carried out, so before anybody hears of it. A server
does the same things when it is asked the same in the same order; so one that starts again reads its last snapshot,
does over what the journal has since, and is where it was. Workers, whose requests broke, ask again, and no step counts
twice.

A snapshot has the rows that changed since the one before it, and names that one's files as well, until they are more
than a whole one. A new journal begins with it, and the older ones go when it is complete, however long it is written;
until then the older snapshot and all journals since lead to the same state.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet.base.checksum import crc32
from fleet.base.cluster import Endpoint
from fleet.base.file_lock import locked
from fleet.checkpoint.files import sync_directory
from fleet.checkpoint.manifest import TABLE, read
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import Directory
from fleet.errors import CheckpointError, ConfigurationError
from fleet.ps.server.journal import Journal

#: When the journal is synced: before anybody hears of a record, from time to time, or when the system pleases.
ALWAYS, INTERVAL, NEVER = "always", "interval", "os"
SYNC_S = 1.0
#: A snapshot is taken when the journal is this long.
JOURNAL_BYTES = 256 << 20
_STATE = "state.json"
_SNAPSHOT, _JOURNAL = "snapshot-", "journal-"


class Kind(bytes, enum.Enum):
    """What a record holds."""

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


@dataclass(frozen=True)
class Snapshot:
    """What a server knew, apart from its shard, and the files that hold that."""

    state: dict[str, Any]
    files: tuple[PieceFile, ...]


@dataclass(frozen=True)
class Draft:
    """A snapshot that is being written."""

    number: int
    state: dict[str, Any]
    #: those of the snapshot before it, on top of which ``pieces`` come
    before: tuple[PieceFile, ...]
    pieces: PieceWriter
    #: what happens after it, and how long it was when it began
    journal: Journal
    journal_bytes: int


class StateDirectory:
    def __init__(self, root: str, endpoint: Endpoint, sync: str, journal_bytes: int | None = None) -> None:
        self.directory = Path(root).resolve() / endpoint.folder_name
        self._sync = sync
        self._most = self._due_at = JOURNAL_BYTES if journal_bytes is None else journal_bytes
        self._synced_at = 0.0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
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
        self._number = self._newest_snapshot()
        self.snapshot: Snapshot | None = self._read_state(self._number) if self._number else None
        self._journals = [self._journal(number) for number in self._journal_numbers()]
        for number in self._numbers(_SNAPSHOT):
            if number > self._number:  # whoever wrote it was killed
                shutil.rmtree(self._path(_SNAPSHOT, number), ignore_errors=True)

    # ---------------------------------------------------------------- what is there

    def _path(self, kind: str, number: int) -> Path:
        return self.directory / f"{kind}{number:08d}"

    def _journal(self, number: int) -> Journal:
        journal = Journal(self._path(_JOURNAL, number))
        sync_directory(self.directory)
        return journal

    def _numbers(self, kind: str) -> list[int]:
        names = (name.removeprefix(kind) for name in os.listdir(self.directory) if name.startswith(kind))
        return sorted(int(name) for name in names if name.isdigit())

    def _newest_snapshot(self) -> int:
        complete = [n for n in self._numbers(_SNAPSHOT) if (self._path(_SNAPSHOT, n) / _STATE).is_file()]
        return max(complete, default=0)

    def _journal_numbers(self) -> list[int]:
        return [number for number in self._numbers(_JOURNAL) if number >= self._number] or [self._number]

    def _read_state(self, number: int) -> Snapshot:
        path = self._path(_SNAPSHOT, number) / _STATE
        try:
            crc, _, content = path.read_bytes().partition(b"\n")
            if crc != _crc32(content):
                raise ValueError("its checksum is wrong")
            raw = json.loads(content)
            return Snapshot(raw["state"], tuple(PieceFile.told(each) for each in raw["files"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError("a server's snapshot cannot be read", where=str(path), got=repr(error)) from None

    def pieces(self) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """The shard's pieces in the snapshot, in the order in which they are to be taken."""
        for file in self._files():
            yield file.about, read(Directory(self.directory), file)

    def records(self) -> Iterator[tuple[Kind, memoryview]]:
        """What happened after the snapshot."""
        for journal in self._journals:
            for record in journal.read(is_last=journal is self._journals[-1]):
                yield Kind(bytes(record[:1])), memoryview(record)[1:]

    # ---------------------------------------------------------------- what happens

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot."""
        return sum(journal.bytes for journal in self._journals) >= self._due_at

    def record(self, kind: Kind, buffers: Iterable[bytes | memoryview]) -> None:
        self._journals[-1].append([kind.value, *buffers])

    def secure(self) -> None:
        """Have on the disk what has been recorded by now, if anything that somebody hears of is to be there."""
        if self._sync == ALWAYS:
            self.sync()

    def sync_if_due(self, now: float) -> None:
        if self._sync == INTERVAL and now - self._synced_at >= SYNC_S:
            self._synced_at = now
            self.sync()

    def sync(self) -> None:
        """Have on the disk all that has been recorded by now."""
        self._journals[-1].sync()  # the one before it was synced before this one was there

    def begin(
        self,
        state: dict[str, Any],
        carried: Iterable[tuple[Kind, list[bytes | memoryview]]],
        *,
        on_top: bool,
        behind: bool,
    ) -> Draft:
        """A snapshot of this moment, into which its pieces are yet to be written, ``behind`` a training or at once.
        ``state`` is the draft's own from now on. ``carried`` are the records of what is not finished yet, or is
        in no piece. With ``on_top`` the pieces come after those of the snapshot before."""
        number = self._journal_numbers()[-1] + 1
        # Should this one fail, however early, the next is due when as much again has come.
        self._due_at = self._most + sum(journal.bytes for journal in self._journals)
        self.sync()  # what comes into the next one must not outlive what came before it
        self._journals.append(self._journal(number))
        for kind, buffers in carried:
            self.record(kind, buffers)
        self._due_at += self._journals[-1].bytes
        folder = self._path(_SNAPSHOT, number)
        folder.mkdir()
        before = tuple(file for file in self._files() if on_top and TABLE in file.about)
        pieces = PieceWriter(Directory(folder), folder.name, "piece", behind=behind)
        journal = self._journals[-1]
        return Draft(number, state, before, pieces, journal, journal.bytes)

    def publish(self, draft: Draft) -> Snapshot:
        """All pieces are written: from now on this is the snapshot to start from."""
        snapshot = Snapshot(draft.state, (*draft.before, *draft.pieces.files))
        content = json.dumps({"state": snapshot.state, "files": [asdict(file) for file in snapshot.files]}).encode()
        draft.journal.sync()
        sync_directory(self.directory)
        Directory(self._path(_SNAPSHOT, draft.number)).publish(_STATE, _crc32(content) + b"\n" + content)
        return snapshot

    def adopt(self, draft: Draft, snapshot: Snapshot) -> None:
        """The next one may come on top of this one; what came before it is not needed any more."""
        self.snapshot, self._number = snapshot, draft.number
        # What is carried along is written each time: no more of that than of what has happened.
        self._due_at = draft.journal_bytes + max(self._most, draft.journal_bytes)
        first = self._journals.index(draft.journal)
        for journal in self._journals[:first]:
            journal.close()
        del self._journals[:first]

    def discard(self, draft: Draft) -> None:
        """It has come to nothing, and the journals go on."""
        folder = self._path(_SNAPSHOT, draft.number)
        (folder / _STATE).unlink(missing_ok=True)  # first, lest half of it be taken for a whole one
        shutil.rmtree(folder, ignore_errors=True)

    def _files(self) -> tuple[PieceFile, ...]:
        return () if self.snapshot is None else self.snapshot.files

    @property
    def table_bytes(self) -> int:
        """How large the rows in the last snapshot are, those that come in it twice counted twice."""
        return sum(file.bytes for file in self._files() if TABLE in file.about)

    def clean(self) -> None:
        """Remove what the last snapshot has made superfluous."""
        last, used = self._number, {Path(file.file).parts[0] for file in self._files()}
        for number in self._numbers(_JOURNAL):
            if number < last:
                self._path(_JOURNAL, number).unlink(missing_ok=True)
        for number in self._numbers(_SNAPSHOT):
            path = self._path(_SNAPSHOT, number)
            if number < last and path.name not in used:
                shutil.rmtree(path, ignore_errors=True)
            elif number < last:
                (path / _STATE).unlink(missing_ok=True)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """The process ends, and the job does not."""
        for journal in self._journals:
            journal.sync()
            journal.close()
        self._journals.clear()
        os.close(self._lock)

    def forget(self) -> None:
        """The job is over."""
        for journal in self._journals:
            journal.close()
        self._journals.clear()
        # From one moment to the next: half of what was there would be taken for another state.
        gone = self.directory.with_name(f"{self.directory.name}.over")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self.directory, gone)
        shutil.rmtree(gone, ignore_errors=True)
        os.close(self._lock)


def _crc32(content: bytes) -> bytes:
    return b"%08x" % crc32(content)
