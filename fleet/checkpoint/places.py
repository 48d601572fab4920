"""Names where a checkpoint lies: a directory of this machine, or anything fsspec knows (``s3://bucket/run``).

Both offer the same few operations. What is created is durable when it is closed; what is published replaces what was
there in one step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from fleet.base.clock import SystemClock
from fleet.base.file_lock import locked
from fleet.checkpoint.files import make_directory, read_past_cache, remove, sync_directory
from fleet.errors import ArgumentTypeError, CheckpointError, DeadlineError, FleetError

#: Bytes that can be written: of anything that has a buffer.
Buffer = Any

#: The file that says who writes into a folder; where files can be locked, it is locked for as long as the writer lives.
MARK = "in-progress"
_PROOF_BYTES = 16
#: No system takes a longer one.
_LONGEST_PATH = 1 << 15
#: Publishing takes milliseconds, and removing what it superseded seconds.
_LOCK_DEADLINE_S, _LOCK_PAUSE_S = 60.0, 0.05


@contextlib.contextmanager
def writing(what: str, where: str) -> Iterator[None]:
    """Surround the writing of ``what`` (in words): if the system does not allow it, raise a ``CheckpointError`` that
    says so."""
    try:
        yield
    except OSError as error:
        refuse_unwritable(what, where, error)
        raise


def refuse_unwritable(what: str, where: str, error: BaseException | None) -> None:
    """Raise a ``CheckpointError`` if the system caused this error; some errors of this package are OSErrors too."""
    if isinstance(error, OSError) and not isinstance(error, FleetError):
        raise CheckpointError(
            f"{what} could not be written",
            where=where,
            got=str(error),
            todo="Name a directory in which this process may make files, with room for them.",
        ) from error


class Place(Protocol):
    """Reads and writes files in a directory, or in what stands for one. Names are relative and may have slashes."""

    @property
    def url(self) -> str:
        """Return the place's name for people, for other processes, and for ``place_at``."""
        ...

    def within(self, name: str) -> Place: ...

    def exists(self) -> bool:
        """Say whether anything is here: a directory, even an empty one, or a file."""
        ...

    def is_file(self) -> bool:
        """Say whether what is here is a file."""
        ...

    def names(self) -> list[str]:
        """Return the names directly in this place; none where there is no directory."""
        ...

    def has(self, name: str) -> bool: ...

    def size(self, name: str) -> int: ...

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size of each file directly in a folder of this place, or None where it cannot be told without
        reading."""
        ...

    def read(self, name: str, most: int, *, once: bool = False) -> memoryview:
        """Read a file from its beginning, at most ``most`` bytes of it, into memory that can be written, as tensors
        ask. What is read ``once``, by nobody else on this machine, need not stay in the system's cache."""
        ...

    def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Write these bytes to a new file, which is durable when this returns."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Put this content into a file at one instant, in place of an old one if there is any."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it, as far as that is possible; what stays is in nobody's way."""
        ...

    def make(self) -> None:
        """Make the directory."""
        ...

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep everybody else out of this place, where files can be locked; raise if somebody stays in for long."""
        ...


class Directory:
    """Reads and writes files on a file system of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def url(self) -> str:
        return str(self.path)

    def within(self, name: str) -> Directory:
        return Directory(self.path / name)

    def exists(self) -> bool:
        with self._asking():
            return self.path.exists()

    def is_file(self) -> bool:
        with self._asking():
            return self.path.is_file()

    def names(self) -> list[str]:
        with self._asking():
            return os.listdir(self.path) if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        with self._asking():
            return (self.path / name).is_file()

    def size(self, name: str) -> int:
        with self._asking():
            return (self.path / name).stat().st_size

    def sizes(self, folder: str) -> dict[str, int | None]:
        try:
            with self._asking(), os.scandir(self.path / folder) as found:
                return {each.name: each.stat().st_size for each in found if each.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, name: str, most: int, *, once: bool = False) -> memoryview:
        if once and (found := read_past_cache(self.path / name, most)) is not None:
            return found
        with self._asking(), (self.path / name).open("rb", buffering=0) as file:
            # Not a bytearray: that would be filled with zeros first.
            data, at = np.empty(min(most, os.fstat(file.fileno()).st_size), np.uint8).data, 0
            while at < len(data) and (got := file.readinto(data[at:])):
                at += got
        return data[:at]

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Surround every look at what is there. That something is not there is no error; that the system refuses to
        tell is one."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise CheckpointError(
                "the system does not let this process read here",
                where=self.url,
                got=str(error),
                todo="Let it read this directory and all in it; look at the disk if that is not what is wrong.",
            ) from error

    def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        with (self.path / name).open("xb", buffering=0) as file:
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                while len(rest):  # a write may end early
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # nobody reads it soon: the next file may have its place in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def publish(self, name: str, data: bytes) -> None:
        draft = f".{name}-{secrets.token_hex(4)}"
        try:
            self.create(draft, [data])
            sync_directory(self.path)
            os.replace(self.path / draft, self.path / name)
        except BaseException:
            self.remove(draft)
            raise
        sync_directory(self.path)

    def remove(self, name: str) -> None:
        remove(self.path / name)

    def make(self) -> None:
        make_directory(self.path)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            clock = SystemClock()
            began = clock.now()
            while locked(descriptor) is False:
                if clock.now() - began > _LOCK_DEADLINE_S:
                    raise DeadlineError(
                        "another process keeps this directory locked",
                        where=self.url,
                        expected=f"to have it within {_LOCK_DEADLINE_S:g} s",
                        todo="Look for a job that saves here and hangs, and end it.",
                    )
                clock.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(descriptor)


class Remote:
    """Reads and writes files wherever fsspec reaches. Nothing can be renamed there, but a file appears only when all of
    it has been written."""

    def __init__(self, fs: Any, path: str, protocol: str) -> None:
        self._fs = fs
        self._path = path.rstrip("/")
        self._protocol = protocol

    @property
    def url(self) -> str:
        # In some stores, http:// for one, paths are URLs themselves.
        return self._path if "://" in self._path else f"{self._protocol}://{self._path.lstrip('/')}"

    def within(self, name: str) -> Remote:
        return Remote(self._fs, self._at(name), self._protocol)

    def beside(self, relative: str) -> Remote:
        """Return the place that a relative name means here; ``..`` goes up."""
        path = self._path
        for part in PurePosixPath(relative).parts:
            path = path.rpartition("/")[0] if part == ".." else f"{path}/{part}"
        return Remote(self._fs, path, self._protocol)

    def exists(self) -> bool:
        return self._kind(self._path) is not None

    def is_file(self) -> bool:
        return self._kind(self._path) == "file"

    def names(self) -> list[str]:
        with self._asking():
            self._fs.invalidate_cache()
            try:
                return [PurePosixPath(each).name for each in self._fs.ls(self._path, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def has(self, name: str) -> bool:
        return self._kind(self._at(name)) == "file"

    def size(self, name: str) -> int:
        with self._asking():
            return int(self._fs.size(self._at(name)))

    def sizes(self, folder: str) -> dict[str, int | None]:
        with self._asking():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._at(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {PurePosixPath(each["name"]).name: each["size"] for each in found if each["type"] == "file"}

    def read(self, name: str, most: int, *, once: bool = False) -> memoryview:
        del once  # this machine keeps nothing of it
        # Not by ``open``: it goes by a size that may be remembered from before somebody else replaced the file, and
        # in memory:// all readers of a file share one position.
        with self._asking():
            return memoryview(bytearray(self._fs.cat_file(self._at(name), start=0, end=most)))

    def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        with self._asking(), self._fs.open(self._at(name), "wb") as file:
            for piece in pieces:
                file.write(memoryview(piece).cast("B"))

    def publish(self, name: str, data: bytes) -> None:
        with self._asking():
            self._fs.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        with contextlib.suppress(Exception):  # every store has errors of its own
            self._fs.rm(self._at(name), recursive=True)

    def make(self) -> None:
        """Do nothing: a bucket has no directories; they are where files are."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _kind(self, path: str) -> str | None:
        """Return ``"file"``, ``"directory"``, or None if there is nothing. It uses ``info``, since ``exists`` and
        ``isfile`` take a refusal for an absence."""
        with self._asking():
            self._fs.invalidate_cache()
            try:
                return str(self._fs.info(path)["type"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Surround every question to the store, which has errors of its own. That something is not there is no
        error."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                "the store refuses, or cannot be reached",
                where=self.url,
                got=repr(error),
                todo="Look whether it is there and lets this process read and write: credentials are found as fsspec's "
                "package for this protocol finds them, as s3fs does in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "in ~/.aws.",
            ) from error


def place_at(dirname: object) -> Place:
    """Return the place that a user means."""
    if not isinstance(dirname, str | os.PathLike):
        raise ArgumentTypeError("dirname must be a path or a URL", got=repr(dirname))
    text = os.fspath(dirname)
    if not isinstance(text, str):
        raise ArgumentTypeError("dirname must be a path or a URL of characters", got=repr(dirname))
    if not text:  # of a variable that is not set; as a path it would be the working directory
        raise CheckpointError("dirname is empty", expected="a path or a URL", todo="'.' is the working directory.")
    if "://" not in text:
        return _directory(text)
    try:
        import fsspec  # torch brings it along

        fs, path = fsspec.core.url_to_fs(text)
    except Exception as error:  # every protocol has errors of its own
        raise CheckpointError(
            "this place cannot be reached",
            where=text,
            got=repr(error),
            todo="A protocol may need a package of its own: s3:// needs s3fs.",
        ) from None
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)):
        return _directory(path)
    return Remote(fs, path, text.partition("://")[0])


def _directory(text: str) -> Directory:
    try:
        if len(text) > _LONGEST_PATH:  # going through it would take time by the square of its length
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        text.encode()  # other processes are told of it, and files of tensors name it, in UTF-8
        path = Path(text).resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        return Directory(path)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name that cannot be one
        raise CheckpointError(
            "this place cannot be reached",
            where=text.encode(errors="backslashreplace").decode(),
            got=repr(error),
            todo="Name a directory, or a path to be one.",
        ) from None


def reference(target: Place, seen_from: Place) -> str:
    """Return the name of one place in a file of another: a relative one where both can be moved together."""
    if isinstance(target, Directory) and isinstance(seen_from, Directory):
        return os.path.relpath(target.path, seen_from.path)
    return target.url


def referred(name: str, seen_from: Place) -> Place:
    """Return the place that ``reference`` named."""
    if isinstance(seen_from, Directory) and "://" not in name:
        return Directory((seen_from.path / name).resolve())
    if isinstance(seen_from, Remote) and "://" not in name and not os.path.isabs(name):
        return seen_from.beside(name)  # both were directories, and were copied to a store together
    return place_at(name)


# ---------------------------------------------------------------------------------------------- who is writing


class Claimed:
    """Claims a folder that this process writes into, by a mark in it that other processes find there.

    A process that is told the mark's content and finds it there looks at the same folder; a lock on the mark says that
    the writer lives.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.proof = secrets.token_hex(_PROOF_BYTES)
        self._descriptor: int | None = None
        if isinstance(folder, Directory):
            # It appears with its mark and with the lock on it, lest somebody take it for a dead writer's.
            draft = folder.path.with_name(f".{folder.path.name}")
            draft.mkdir(parents=True)
            try:
                Directory(draft).create(MARK, [self.proof.encode()])
                self._descriptor = os.open(draft / MARK, os.O_RDONLY)
                locked(self._descriptor)
                os.rename(draft, folder.path)
            except BaseException:
                self.close()
                remove(draft)
                raise
        else:
            folder.create(MARK, [self.proof.encode()])

    def done(self) -> None:
        """Note that everything is written."""
        self.folder.remove(MARK)
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def proven(url: str, proof: str) -> Place | None:
    """Return the folder that somebody else claimed, if this process sees it and can write there as well."""
    try:
        place = place_at(url)
        found = place.read(MARK, 2 * _PROOF_BYTES + 1)
    except Exception:  # every store has errors of its own, and none of them is anybody's mistake
        return None
    if not secrets.compare_digest(found, proof.encode()):
        return None
    writable = not isinstance(place, Directory) or os.access(place.path, os.W_OK | os.X_OK)
    return place if writable else None


def is_abandoned(folder: Place) -> bool:
    """Say whether the process that wrote here is gone."""
    if not isinstance(folder, Directory):
        return False  # nobody can tell
    try:
        descriptor = os.open(folder.path / MARK, os.O_RDONLY)
    except OSError:
        return True
    try:
        return locked(descriptor) is True
    finally:
        os.close(descriptor)
