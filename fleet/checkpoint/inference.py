"""Writes and reads a model to serve: a directory with its tensors, their description, perhaps a program, and a page.

The directory is filled beside its place and renamed into it. An older one steps aside for the moment of two renames, so
there is always the old directory, or none, or the new one, and never a mixture.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fleet.base.checksum import content_crc32
from fleet.base.clock import SystemClock
from fleet.checkpoint.files import measure, remove, sync_directory, sync_file, write_file
from fleet.checkpoint.places import writing
from fleet.checkpoint.readme import readme
from fleet.errors import CheckpointError

FORMAT = "fleet-inference-model"
FORMAT_VERSION = 1
DESCRIPTION, TENSORS, PROGRAM, README = "inference.json", "model.safetensors", "model.pt2", "README.md"
#: One that is replaced while it is read is read so often again, and comes back after so long.
_MORE_TIMES, _MOMENT_S = 10, 0.05
#: What errors call it.
_WHAT = "a model to serve"


@dataclass(frozen=True)
class TableFacts:
    """Says what a table's rows do not tell: ``mean`` is what ids without a row read; with ``zero_padding`` the padding
    id reads zeros, and not its row."""

    num_embeddings: int | None
    embedding_dim: int
    mean: float
    padding_idx: int | None
    zero_padding: bool

    def check(self) -> None:
        """Refuse with a ``ValueError`` what no file of ours says."""
        sizes = (self.num_embeddings or 1, self.embedding_dim)
        fits = (
            all(type(size) is int and size > 0 for size in sizes)
            and type(self.mean) is float
            and type(self.zero_padding) is bool
            and type(self.padding_idx) in (int, type(None))
        )
        if not fits:
            raise ValueError(f"a table is impossible: {self}")


@dataclass(frozen=True)
class InferenceModel:
    """Holds tensors by the names of ``state_dict``. A table in ``tables`` has its trained rows under its weight's name,
    and beside them their sorted ids (``ids_key``)."""

    values: Mapping[str, torch.Tensor]
    tables: Mapping[str, TableFacts]

    def check(self) -> None:
        """Refuse with a ``ValueError`` tables whose tensors are not as described."""
        for key, facts in self.tables.items():
            facts.check()
            ids, rows = self.values[ids_key(key)], self.values[key]
            fits = (
                ids.dtype == torch.int64
                and ids.dim() == 1
                and rows.shape == (len(ids), facts.embedding_dim)
                and bool((ids[1:] > ids[:-1]).all())
            )
            if not fits:
                raise ValueError(f"{key!r} does not have one row of {facts.embedding_dim} for each of its sorted ids")


def ids_key(weight: str) -> str:
    """Return where a table's ids stand: ``user.ids`` beside ``user.weight``."""
    prefix, dot, _ = weight.rpartition(".")
    return f"{prefix}{dot}ids"


# ---------------------------------------------------------------- writing


def check_place(dirname: str) -> None:
    """Refuse to write over something else."""
    final = Path(dirname).resolve()
    with writing(_WHAT, str(final)):
        if final.is_dir():
            names = set(os.listdir(final))
            free = not names or (_is_ours(final) and names <= {DESCRIPTION, TENSORS, PROGRAM, README})
        else:
            free = not final.exists()
    if not free:
        raise CheckpointError(
            "will not write a model to serve over something else",
            where=str(final),
            expected="a new or empty directory, or one that save_inference_model wrote, with nothing added to it",
            todo="Choose another directory.",
        )


def _is_ours(directory: Path) -> bool:
    try:
        raw = json.loads((directory / DESCRIPTION).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def write(dirname: str, model: InferenceModel, save_program: Callable[[Path], None] | None) -> None:
    """Make the directory appear as a whole; ``save_program`` writes the program to the path it is given."""
    check_place(dirname)
    final = Path(dirname).resolve()
    with writing(_WHAT, str(final)):
        _write(final, model, save_program)


def _write(final: Path, model: InferenceModel, save_program: Callable[[Path], None] | None) -> None:
    staged = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    aside = staged.with_name(f"{staged.name}.old")
    try:
        staged.mkdir(parents=True)
        try:
            safetensors.torch.save_file(_storable(model.values), staged / TENSORS)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error
        if save_program is not None:
            save_program(staged / PROGRAM)
        written = [staged / name for name in (TENSORS, PROGRAM) if (staged / name).exists()]
        write_file(staged / README, readme(model.values, model.tables, save_program is not None).encode())
        for path in written:
            shutil.copymode(staged / README, path)  # safetensors keeps others from reading what it writes
            sync_file(path)
        write_file(staged / DESCRIPTION, _described(model, {path.name: measure(path) for path in written}).encode())
        sync_directory(staged)
        if _is_ours(final):
            os.replace(final, aside)
        try:
            os.replace(staged, final)
        except BaseException:
            if aside.exists():
                os.replace(aside, final)
            raise
        remove(aside)
        sync_directory(final.parent)
    finally:
        remove(staged)


def _storable(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without shared memory, which a file of tensors cannot express."""
    seen: set[int] = set()
    storable = {}
    for key, tensor in values.items():
        start = tensor.untyped_storage().data_ptr()
        storable[key] = tensor.clone() if start in seen else tensor.contiguous()
        seen.add(start)
    return storable


def _described(model: InferenceModel, files: Mapping[str, tuple[int, int]]) -> str:
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "files": {name: {"bytes": size, "crc32": crc} for name, (size, crc) in files.items()},
        "tensors": list(model.values),
        "tables": {key: asdict(facts) for key, facts in model.tables.items()},
    }
    return json.dumps({**content, "crc32": content_crc32(content)}, indent=1)


# ---------------------------------------------------------------- reading


def read(dirname: str) -> InferenceModel:
    """Read what was written, checked to the last byte; the program is left for torch to read. A model that is replaced
    meanwhile is read anew: half of it would look damaged."""
    directory = Path(dirname)
    for _ in range(_MORE_TIMES):
        before = _identity(directory)
        try:
            model = _read(directory)
        except CheckpointError:
            now = _identity(directory)
            if now is None:  # for the moment between two renames
                SystemClock().sleep(_MOMENT_S)
                now = _identity(directory)
            if now in (None, before):
                raise
        else:
            if _identity(directory) == before:
                return model
    return _read(directory)


def _identity(directory: Path) -> tuple[int, int, int] | None:
    """Return what tells a directory from another one in its place; None if there is none."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _read(directory: Path) -> InferenceModel:
    path = directory / DESCRIPTION
    try:
        is_there = path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from None
    if not is_there:
        raise CheckpointError(
            "there is no model to serve here",
            where=str(directory),
            expected=f"a directory with {DESCRIPTION}, as fleet.save_inference_model writes it",
            got="no such directory" if not directory.is_dir() else "a directory without one",
        )
    try:
        raw = json.loads(path.read_bytes().decode())
        found = (raw["format"], raw["format_version"])
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                "the model has another format",
                where=str(path),
                expected=f"{FORMAT} {FORMAT_VERSION}",
                got=f"{found[0]} {found[1]}",
            )
        told, computed = raw.pop("crc32"), content_crc32(raw)
        if told != computed:
            raise ValueError(f"its crc32 is {computed}, and it says {told}")
        tables = {key: TableFacts(**facts) for key, facts in raw["tables"].items()}
        keys, file = set(raw["tensors"]), raw["files"][TENSORS]
        expected = (file["bytes"], file["crc32"])
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    return _loaded(directory / TENSORS, expected, keys, tables)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError("the description of a model cannot be read", where=str(path), got=repr(error))


def _loaded(path: Path, expected: tuple[int, int], keys: set[str], tables: dict[str, TableFacts]) -> InferenceModel:
    try:
        found = measure(path)
    except OSError as error:
        raise CheckpointError("a file of the model is missing", where=str(path), got=str(error)) from None
    if found != expected:
        raise CheckpointError(
            "a file of the model is damaged",
            where=str(path),
            expected=f"{expected[0]} bytes with crc32 {expected[1]:08x}",
            got=f"{found[0]} bytes with crc32 {found[1]:08x}",
        )
    try:
        model = InferenceModel(safetensors.torch.load_file(path), tables)
        if model.values.keys() != keys:
            raise ValueError(f"the file has {sorted(model.values)}")
        model.check()
    except (KeyError, OSError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            "the model's tensors are not those it describes", where=str(path), got=repr(error)
        ) from None
    return model
