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
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "version": self.version,
            "seed": self.seed,
            "spec": json.loads(self.spec.to_json()),
            "pieces": [asdict(piece) for piece in self.pieces],
        }
        return json.dumps({**content, "crc32": _crc32(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what ``to_json`` wrote; anything else is a ``ValueError`` or one of its like."""
        raw = json.loads(text)
        if (raw["format"], raw["format_version"]) != (FORMAT, FORMAT_VERSION):
            found = f"{raw['format']} {raw['format_version']}"
            raise CheckpointError("the checkpoint has another format", expected=f"{FORMAT} {FORMAT_VERSION}", got=found)
        told, computed = raw.pop("crc32"), _crc32(raw)
        if told != computed:
            raise CheckpointError("the manifest is damaged", expected=f"crc32 {told}", got=f"crc32 {computed}")
        pieces = tuple(PieceFile(**piece) for piece in raw["pieces"])
        for piece in pieces:
            path = Path(piece.file)
            if path.is_absolute() or ".." in path.parts or "\0" in piece.file:
                raise CheckpointError("the manifest points out of its directory", got=repr(piece.file))
            if not isinstance(piece.about, dict):
                raise ValueError(f"a piece does not say what it is: {piece.about!r}")
        return cls(int(raw["version"]), int(raw["seed"]), JobSpec.from_json(json.dumps(raw["spec"])), pieces)


def _crc32(content: dict[str, Any]) -> int:
    """Of the content as it would be written; without it an altered digit would go unnoticed."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def is_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint of ours, of any version and in whatever state; others have manifests too."""
    try:
        raw = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


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
            manifest = Manifest.from_json(path.read_bytes().decode())
        except CheckpointError as error:
            raise CheckpointError(error.what, where=str(path), expected=error.expected, got=error.got) from None
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError, ProtocolError) as error:
            raise CheckpointError("the manifest cannot be read", where=str(path), got=repr(error)) from None
        return cls(directory, manifest)

    def check_fits(self, spec: JobSpec) -> None:
        """Refuse a job with other parameters, tables or optimizers than the one this was saved from."""
        saved, wanted = _outline(self.manifest.spec), _outline(spec)
        problems = [
            f"{name!r}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the job"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if problems:
            raise CheckpointError(
                "the checkpoint does not fit the model and its optimizer",
                where=str(self.directory),
                got="; ".join(problems),
            )

    def pieces(self, kind: str) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The pieces whose ``about`` has the key ``kind`` ("dense", "table" or "buffers"), each read and verified."""
        for piece in self.manifest.pieces:
            if kind in piece.about:
                yield piece.about, self._read(piece)

    def _read(self, piece: PieceFile) -> list[torch.Tensor]:
        path = self.directory / piece.file
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
            raise CheckpointError(
                "a piece of the checkpoint cannot be read", where=str(path), got=repr(error)
            ) from None


def _outline(spec: JobSpec) -> dict[str, str]:
    """By name, what must be the same for a state to be taken over."""
    rules = [group.rule for group in spec.groups]
    params = {p.name: f"{p.dtype} {p.shape}, {rules[p.group]}" for p in spec.params}
    return params | {t.name: f"table of {t.dtype} x {t.dim}, {rules[t.group]}" for t in spec.tables}
