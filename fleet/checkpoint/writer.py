"""Writing a checkpoint so that it exists whole or not at all.

A new directory is filled beside its place and renamed into it. Where a directory is already (a volume may be mounted
there, so it stays), the new pieces go into a folder of their own, the manifest appears by a rename, and only then do
the old pieces go.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
import torch

from fleet.checkpoint.manifest import MANIFEST, Manifest, PieceFile, is_checkpoint
from fleet.errors import CheckpointError
from fleet.transpiler.specs import JobSpec

#: Names of what a checkpoint is made of, or was to be: nobody else's things look like that.
_OURS = re.compile(r"(fleet-pieces-|\.manifest-)[0-9a-f]{8}")


class CheckpointWriter:
    """Used as a context: leaving it without ``commit`` removes what was written."""

    def __init__(self, dirname: str) -> None:
        self._final = Path(dirname).resolve()
        self._inside = self._final.is_dir()
        if self._inside:
            may = is_checkpoint(self._final) or all(_OURS.fullmatch(name) for name in os.listdir(self._final))
        else:
            may = not self._final.exists()
        if not may:
            raise CheckpointError(
                "will not write a checkpoint over something else",
                where=str(self._final),
                expected="a new or empty directory, or a checkpoint to replace",
                todo="Choose another directory.",
            )
        token = secrets.token_hex(4)
        self._folder = f"fleet-pieces-{token}"
        self._root = self._final if self._inside else self._final.with_name(f".{self._final.name}.{token}")
        self._draft = self._root / f".manifest-{token}"
        self._pieces: list[PieceFile] = []
        self._there = False

    def __enter__(self) -> CheckpointWriter:
        (self._root / self._folder).mkdir(parents=True)
        return self

    def add(self, about: dict[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        data = safetensors.torch.save({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)})
        name = f"{self._folder}/piece-{len(self._pieces):05d}.safetensors"
        _write(self._root / name, data)
        self._pieces.append(PieceFile(name, len(data), zlib.crc32(data), about))

    def commit(self, version: int, seed: int, spec: JobSpec) -> None:
        """Make the checkpoint appear."""
        manifest = Manifest(version, seed, spec, tuple(self._pieces))
        _write(self._draft, manifest.to_json().encode())
        _sync_directory(self._root / self._folder)
        os.replace(self._draft, self._root / MANIFEST)
        self._there = self._inside  # from here on a failure must not take the pieces away
        _sync_directory(self._root)
        if self._inside:
            for old in self._final.iterdir():
                if _OURS.fullmatch(old.name) and old.name != self._folder:
                    _remove(old)
        else:
            os.replace(self._root, self._final)
            _sync_directory(self._final.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._there:
            return
        for made in (self._root / self._folder, self._draft) if self._inside else (self._root,):
            _remove(made)


def _remove(path: Path) -> None:
    """As far as it can be: what stays is in nobody's way."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
