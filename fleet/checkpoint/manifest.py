"""What a checkpoint is: a manifest and the pieces it names. Reading one trusts nothing it has not checked."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from fleet.errors import CheckpointError, ProtocolError
from fleet.transpiler.specs import JobSpec

MANIFEST = "manifest.json"
FORMAT = "fleet-checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PieceFile:
    """One safetensors file: its tensors are named "0", "1", … and ``about`` says what they are."""

    file: str
    bytes: int
    crc32: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """A whole job at one step: the spec it had, the rows' seed, and where everything is."""

    version: int
    seed: int
    spec: JobSpec
    pieces: tuple[PieceFile, ...]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "version": self.version,
                "seed": self.seed,
                "spec": json.loads(self.spec.to_json()),
                "pieces": [asdict(piece) for piece in self.pieces],
            },
            indent=1,
        )


@dataclass(frozen=True)
class Checkpoint:
    """A manifest together with the directory it was found in."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, dirname: str) -> Checkpoint:
        directory = Path(dirname)
        path = directory / MANIFEST
        if not path.is_file():
            raise CheckpointError(
                "there is no checkpoint here",
                where=str(directory),
                expected=f"a directory with a {MANIFEST}",
                got="no such directory" if not directory.is_dir() else "a directory without one",
            )
        try:
            raw = json.loads(path.read_text())
            if (raw["format"], raw["format_version"]) != (FORMAT, FORMAT_VERSION):
                raise CheckpointError(
                    "the checkpoint has another format",
                    where=str(path),
                    expected=f"{FORMAT} {FORMAT_VERSION}",
                    got=f"{raw['format']} {raw['format_version']}",
                )
            pieces = tuple(PieceFile(**piece) for piece in raw["pieces"])
            manifest = Manifest(int(raw["version"]), int(raw["seed"]), JobSpec.from_json(json.dumps(raw["spec"])), pieces)
        except (KeyError, TypeError, ValueError, ProtocolError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError("the manifest cannot be read", where=str(path), got=repr(error)) from None
        return cls(directory, manifest)

    def pieces(self, kind: str) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The pieces whose ``about`` has the key ``kind`` ("dense" or "table"), each read and verified."""
        for piece in self.manifest.pieces:
            if kind in piece.about:
                yield piece.about, self._read(piece)

    def _read(self, piece: PieceFile) -> list[torch.Tensor]:
        path = self.directory / piece.file
        if Path(piece.file).is_absolute() or ".." in Path(piece.file).parts:
            raise CheckpointError("a manifest points out of its directory", where=str(self.directory), got=piece.file)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError("a piece of the checkpoint is missing", where=str(path), got=str(error)) from None
        found = (len(data), zlib.crc32(data))
        if found != (piece.bytes, piece.crc32):
            raise CheckpointError(
                "a piece of the checkpoint is damaged",
                where=str(path),
                expected=f"{piece.bytes} bytes with crc32 {piece.crc32:08x}",
                got=f"{found[0]} bytes with crc32 {found[1]:08x}",
            )
        try:
            tensors = safetensors.torch.load(data)
            return [tensors[str(index)] for index in range(len(tensors))]
        except (KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError("a piece of the checkpoint cannot be read", where=str(path), got=repr(error)) from None
