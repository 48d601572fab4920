"""Writing a checkpoint so that it exists whole or not at all.

A new directory is filled beside its place and renamed into it. Where a checkpoint is already, the new pieces go into
a folder of their own, the manifest is replaced by a rename, and only then do the old pieces go.
"""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
import torch

from fleet.checkpoint.manifest import MANIFEST, Manifest, PieceFile
from fleet.errors import CheckpointError
from fleet.transpiler.specs import JobSpec


class CheckpointWriter:
    """Used as a context: leaving it without ``commit`` removes what was written."""

    def __init__(self, dirname: str) -> None:
        self._final = Path(dirname)
        self._replacing = (self._final / MANIFEST).is_file()
        if self._final.exists() and not self._replacing and (not self._final.is_dir() or any(self._final.iterdir())):
            raise CheckpointError(
                "will not write a checkpoint over something else",
                where=str(self._final),
                expected="a new or empty directory, or a checkpoint to replace",
                todo="Choose another directory.",
            )
        token = secrets.token_hex(4)
        self._folder = f"step-{token}"
        self._root = self._final if self._replacing else self._final.with_name(f".{self._final.name}.{token}")
        self._pieces: list[PieceFile] = []

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
        draft = self._root / f".{MANIFEST}.{self._folder}"
        _write(draft, manifest.to_json().encode())
        _sync_directory(self._root / self._folder)
        os.replace(draft, self._root / MANIFEST)
        _sync_directory(self._root)
        if self._replacing:
            for old in self._final.glob("step-*"):
                if old.name != self._folder:
                    shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(self._root, self._final)
            _sync_directory(self._final.absolute().parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            shutil.rmtree(self._root / self._folder if self._replacing else self._root, ignore_errors=True)


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
