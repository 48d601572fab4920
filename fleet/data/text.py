"""Reads files of lines, a range of bytes at a time: local or anywhere fsspec reaches, plain or compressed by gzip.

A line belongs to the range that it begins in, so that ranges can be read by different processes and nothing is lost or
read twice. What can be cut is cut into ranges of ``PIECE`` bytes; a compressed file is one. Lines come in chunks whose
sizes depend on the file's content alone: what is built on chunks is the same each time the file is read.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import IO, Any, NamedTuple

import numpy as np

from fleet.data.faults import Faults
from fleet.errors import ArgumentTypeError, DataError
from fleet.numeric.jit import compiled

PIECE = 4 << 20
CHUNK = 1 << 20
#: A longer line is malformed, and never held as a whole.
LONGEST_LINE = 16 << 20

TODO = "Repair the file, or pass on_error='skip' to go on without what is malformed."


class Piece(NamedTuple):
    """Names a part of a file that can be read by itself: of text a range of bytes, of Parquet one of row groups."""

    file: str
    begin: int
    end: int


class Lines(NamedTuple):
    """Holds so many whole lines, each with its end; ``first`` counts from one, from where the piece begins."""

    first: int
    text: bytes
    number: int


def check_files(files: object) -> list[str]:
    if isinstance(files, str | bytes | PathLike) or not isinstance(files, Sequence):
        raise ArgumentTypeError(
            "files must be a list", expected="paths and URLs, such as fleet.split_files(…) gives", got=repr(files)
        )
    for file in files:
        if not isinstance(file, str | PathLike) or not isinstance(os.fspath(file), str):
            raise ArgumentTypeError("a file must be a path or a URL", got=repr(file))
    return [os.fspath(file) for file in files]


def unreadable(file: str, error: Exception) -> DataError:
    return DataError(
        "a file of training data cannot be read",
        where=file,
        got=repr(error),
        todo="Look whether it is there and whole; a URL's protocol may need a package of its own: s3:// needs s3fs.",
    )


def opened(file: str) -> IO[bytes]:
    """Open the file as it lies there, without decompressing it."""
    try:
        if "://" not in file:
            return open(file, "rb")
        import fsspec  # torch brings it along

        handle: IO[bytes] = fsspec.open(file, "rb").open()
    except Exception as error:  # every protocol has errors of its own
        raise unreadable(file, error) from None
    return handle


def size_of(file: str) -> int:
    with opened(file) as handle:
        return handle.seek(0, os.SEEK_END)


def ranges(file: str) -> list[Piece]:
    size = size_of(file)
    step = max(size, 1) if _is_compressed(file) else PIECE
    return [Piece(file, begin, min(begin + step, size)) for begin in range(0, size, step)]


def lines_of(piece: Piece, faults: Faults) -> Iterator[Lines]:
    """Yield all lines that begin in the piece, in chunks."""

    def malformed(what: str, expected: str, got: str) -> DataError:
        return DataError(what, where=f"{piece.file}:{line_in_file(piece, line)}", expected=expected, got=got, todo=TODO)

    rest, line, overlong = b"", 1, False
    blocks = _blocks(piece)
    while True:
        try:
            block = next(blocks)
        except StopIteration:
            break
        except _Broken as broken:
            # What came after is lost, and nobody knows how much it was; nor where the last line would have ended.
            rest, told = b"", ("a compressed file is damaged or ends too early", "all that was compressed", str(broken))
            faults.found(partial(malformed, *told))
            break
        if overlong:
            end = block.find(b"\n") + 1
            if not end:
                continue
            block, overlong, line = block[end:], False, line + 1
        cut = block.rfind(b"\n") + 1
        if cut:
            text = b"".join((rest, memoryview(block)[:cut]))
            number = _ends_of_lines(text)
            yield Lines(line, text, number)
            line += number
            rest = block[cut:]
        else:
            rest += block
        if len(rest) > LONGEST_LINE:
            told = ("a line is too long", f"at most {LONGEST_LINE} bytes", f"more, beginning with {shown(rest)}")
            faults.found(partial(malformed, *told))
            rest, overlong = b"", True
    if rest:
        yield Lines(line, rest + b"\n", 1)


@compiled
def _count(text: Any, character: int) -> int:
    """Count as ``bytes.count`` does, in a fraction of its time."""
    number = 0
    for each in text:
        number += each == character
    return number


def _ends_of_lines(text: bytes) -> int:
    return _count(np.frombuffer(text, np.uint8), ord("\n"))


def line_in_file(piece: Piece, line: int) -> int:
    """Return which line of the file the piece's line is. The file is read again up to there; errors are rare."""
    if piece.begin:
        with _reading(piece.file), opened(piece.file) as handle:
            at = _first_line(handle, piece.begin)
            handle.seek(0)
            while at > 0 and (block := handle.read(min(CHUNK, at))):
                line += block.count(b"\n")
                at -= len(block)
    return line


def shown(text: bytes) -> str:
    """Return the beginning of ``text``, which may be anything, for an error."""
    most = 40
    return repr(text[:most].decode("ascii", "backslashreplace")) + ("…" if len(text) > most else "")


class _Broken(Exception):
    """Says that the compressed data does not go on."""


def _is_compressed(file: str) -> bool:
    return file.endswith(".gz")


@contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise unreadable(file, error) from None


def _blocks(piece: Piece) -> Iterator[bytes]:
    """Yield the bytes of all lines that begin in the piece."""
    with _reading(piece.file), opened(piece.file) as handle:
        if _is_compressed(piece.file):
            yield from _unpacked(handle)
            return
        at = handle.seek(_first_line(handle, piece.begin))
        while at < piece.end:
            block = _filled(handle, min(CHUNK, piece.end - at))
            if not block:
                return
            at += len(block)
            yield block
            ended = block.endswith(b"\n")
            if at >= piece.end and not ended:
                yield from _to_line_end(handle)


def _first_line(handle: IO[bytes], begin: int) -> int:
    """Return where the first line begins that begins at ``begin`` or later."""
    if not begin:
        return 0
    at = handle.seek(begin - 1)
    while block := handle.read(CHUNK):
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return at


def _to_line_end(handle: IO[bytes]) -> Iterator[bytes]:
    while block := handle.read(1 << 16):
        end = block.find(b"\n") + 1
        yield block[:end] if end else block
        if end:
            return


def _filled(handle: Any, size: int) -> bytes:
    """Return as many bytes as were asked for, unless the file ends: a store may give them in parts."""
    block: bytes = handle.read(size)
    while len(block) < size and (more := handle.read(size - len(block))):
        block += more
    return block


def _unpacked(handle: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=handle, mode="rb") as stream:
        block = b""
        try:
            while more := stream.read1(CHUNK - len(block)):
                block += more
                if len(block) == CHUNK:
                    yield block
                    block = b""
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield block
            raise _Broken(repr(error)) from None
        yield block
