"""Reads and writes the files of a checkpoint: safetensors, each small enough for memory, each with its checksum.

They are encoded and decoded here and not by the safetensors library because that copies every tensor, and more than
once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
import torch

from fleet.base.checksum import crc32
from fleet.checkpoint.places import Buffer, Place
from fleet.errors import CheckpointError
from fleet.numeric.bits import as_bytes

#: Pieces are about this large.
PIECE_BYTES = 16 << 20
#: So many are on their way to the disk while the next one is made: one is written while another waits for the disk.
_WRITERS = 2

#: Where this stands in what a piece of rows says of itself, it names rows that are gone.
REMOVED = "removed"

#: What safetensors calls the element types that a checkpoint may hold.
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

DTYPES = {name: dtype for dtype, name in NAMES.items()}

Tensors = Mapping[str, "torch.Tensor | np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class PieceFile:
    """Names one file, the names of its tensors in the order of ``about``, and ``about``, which describes them."""

    file: str
    bytes: int
    crc32: int
    tensors: tuple[str, ...]
    about: dict[str, Any]

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PieceFile:
        """Return a piece file from JSON, which has no tuples."""
        return cls(**{**raw, "tensors": tuple(raw["tensors"])})


def rows_in_order(files: Iterable[PieceFile]) -> list[PieceFile]:
    """Return files of rows in the order in which they are to be taken: what one save has removed comes before what it
    has. Every save has a folder of its own, and its files may be in any order."""
    folders: dict[PurePosixPath, list[PieceFile]] = {}
    for file in files:
        folders.setdefault(PurePosixPath(file.file).parent, []).append(file)
    return [file for each in folders.values() for file in sorted(each, key=lambda file: REMOVED not in file.about)]


def encoded(tensors: Tensors) -> list[Buffer]:
    """Return what a safetensors file of these tensors consists of."""
    header: dict[str, Any] = {}
    bodies: list[Buffer] = []
    at = 0
    for name, given in tensors.items():
        tensor = (given if isinstance(given, torch.Tensor) else torch.from_numpy(given)).cpu()
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name!r} is {tensor.dtype}, which no checkpoint holds", expected=", ".join(map(str, NAMES))
            )
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
        if tensor.nbytes:
            bodies.append(as_bytes(tensor).numpy())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *bodies]


def header(place: Place, piece: PieceFile) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the types and shapes of a file's tensors, in their order. Nothing else of it is read or verified."""
    where = f"{place.url.rstrip('/')}/{piece.file}"
    try:
        end = 8 + int.from_bytes(place.read(piece.file, 8), "little")
        told = json.loads(bytes(place.read(piece.file, min(end, piece.bytes))[8:]))
        return [(DTYPES[told[name]["dtype"]], tuple(map(int, told[name]["shape"]))) for name in piece.tensors]
    except CheckpointError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise CheckpointError("a piece of the checkpoint cannot be read", where=where, got=repr(error)) from None


def decoded(piece: PieceFile, data: memoryview, where: str) -> list[torch.Tensor]:
    """Return the tensors of a file, in their order, once its checksum is right: views of its bytes."""
    found = (len(data), crc32(data))
    if found != (piece.bytes, piece.crc32):
        raise CheckpointError(
            "a piece of the checkpoint is damaged",
            where=where,
            expected=f"{piece.bytes} bytes with crc32 {piece.crc32:08x}",
            got=f"{found[0]} bytes with crc32 {found[1]:08x}",
        )
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:end]))
        return [_tensor(header[name], data[end:]) for name in piece.tensors]
    except (KeyError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise CheckpointError("a piece of the checkpoint cannot be read", where=where, got=repr(error)) from None


def _tensor(told: Mapping[str, Any], body: memoryview) -> torch.Tensor:
    start, stop = told["data_offsets"]
    dtype, shape = DTYPES[told["dtype"]], [int(size) for size in told["shape"]]
    if not 0 <= start <= stop <= len(body) or min(shape, default=0) < 0:
        raise ValueError(f"a tensor lies outside of its file: {told}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor has another size than its shape: {told}")
    if start == stop:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(body[start:stop], dtype=dtype).view(shape)


def _step_back() -> None:
    """Give way to every other thread of this machine, where threads have a priority of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class PieceWriter:
    """Writes files into a folder while the next ones are made. Leaving it as a context waits for the last one."""

    def __init__(self, folder: Place, folder_name: str, prefix: str, *, behind: bool = False) -> None:
        """``folder_name/prefix-number`` is a file's name, as seen from the checkpoint. ``behind`` a training, files are
        written when nobody else wants the processor."""
        self._folder = folder
        self._folder_name = folder_name
        self._prefix = prefix
        self._pool = ThreadPoolExecutor(
            _WRITERS, thread_name_prefix="fleet-checkpoint", initializer=_step_back if behind else None
        )
        self._adding = threading.Lock()
        self._under_way: deque[Future[None]] = deque()
        self.files: list[PieceFile] = []

    def __enter__(self) -> PieceWriter:
        return self

    def add(self, about: dict[str, Any], tensors: Tensors) -> None:
        """Add a file, from any thread, and return when there is room for one more. The failure of an earlier one is
        raised here."""
        pieces = encoded(tensors)
        size, crc = 0, 0
        for piece in pieces:
            size, crc = size + len(piece), crc32(piece, crc)
        with self._adding:
            name = f"{self._prefix}-{len(self.files):05d}.safetensors"
            while len(self._under_way) >= _WRITERS:
                self._under_way.popleft().result()
            self._under_way.append(self._pool.submit(self._folder.create, name, pieces))
            self.files.append(PieceFile(f"{self._folder_name}/{name}", size, crc, tuple(tensors), about))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            for written in self._under_way:
                written.result()
