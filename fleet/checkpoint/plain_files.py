"""Exports a checkpoint for other programs: safetensors with everything in it, Parquet for the rows of a table.

Files are written beside their place and renamed into it. Rows stand in the order of their ids: each is written to where
it belongs in a file as it passes by, so no table is ever in memory; the system keeps the pages of such a file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from fleet.checkpoint.files import allocate, remove
from fleet.checkpoint.inspection import WEIGHT, Rows, buffers, parameters, scratch
from fleet.checkpoint.manifest import BUFFERS, DENSE, TABLE, Checkpoint
from fleet.checkpoint.pieces import NAMES
from fleet.checkpoint.places import Buffer, place_at, writing
from fleet.errors import CheckpointError, ConfigurationError, UnsupportedError
from fleet.numeric.bits import as_bytes
from fleet.plan.specs import TableSpec

SAFETENSORS, PARQUET = ".safetensors", ".parquet"
#: The file of a folder that has what belongs to no table.
PARAMETERS = f"parameters{SAFETENSORS}"

#: Rows of a Parquet file that are handed over, and can be read, together.
_ROWS_A_GROUP = 1 << 16
#: An entry of a safetensors header has its name and at most this beside it: three words, shape and offsets.
_ENTRY_BYTES = 320


def export(checkpoint: Checkpoint, out: str, *, tables: list[str], state: bool, force: bool) -> list[Path]:
    """Write the file or the folder that ``out`` names, and return the files. ``tables`` names the tables wanted;
    without any, everything is written."""
    chosen = _chosen(checkpoint, tables)
    jobs = _planned(checkpoint, out, chosen, everything=not tables, state=state)
    present = [path for path in jobs if path.exists()]
    if present and not force:
        raise ConfigurationError(
            "will not overwrite what is there", where=", ".join(map(str, present)), todo="Give --force to replace it."
        )
    with ExitStack() as opened:  # all files appear, or none: a folder with some of them would look like a whole export
        drafts = {}
        for path, write in jobs.items():
            with writing("an export", str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                drafts[path] = opened.enter_context(_beside(path))
                write(drafts[path])
        for path, draft in drafts.items():
            with writing("an export", str(path)):
                os.replace(draft, path)
    return list(jobs)


def short(table: str) -> str:
    """Return a table's name beside its rows: the name of its embedding, if its parameter has torch's usual name."""
    return table.removesuffix(f".{WEIGHT}")


def _chosen(checkpoint: Checkpoint, names: list[str]) -> list[TableSpec]:
    specs = checkpoint.manifest.spec.tables
    known = {spec.name: spec for spec in specs} | {short(spec.name): spec for spec in specs}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(
            f"there is no table {unknown[0]}",
            where=checkpoint.where,
            expected=f"one of {', '.join(short(spec.name) for spec in specs)}" if specs else "a checkpoint with tables",
        )
    return [known[name] for name in names] if names else list(specs)


def _planned(
    checkpoint: Checkpoint, out: str, chosen: list[TableSpec], *, everything: bool, state: bool
) -> dict[Path, Callable[[Path], None]]:
    """Return the files that are to be written, each with the function that writes it."""

    def parquet(spec: TableSpec) -> Callable[[Path], None]:
        return lambda draft: _write_parquet(checkpoint, spec, draft, state)

    def safetensors(specs: list[TableSpec], *, dense: bool) -> Callable[[Path], None]:
        return lambda draft: _write_safetensors(checkpoint, specs, draft, dense=dense, state=state)

    if "://" in out:
        raise UnsupportedError("an export goes to this machine", expected="a path", got=out)
    place_at(out)  # a name that is impossible is told of before anything is read
    path = Path(out)
    if out.endswith(SAFETENSORS):
        return {path: safetensors(chosen, dense=everything)}
    if out.endswith(PARQUET):
        _import_pyarrow()
        if len(chosen) != 1:
            raise ConfigurationError(
                "a Parquet file has the rows of one table",
                got=f"{len(chosen)} tables: {', '.join(short(spec.name) for spec in chosen)}" if chosen else "no table",
                todo="Choose one with --table, or name a folder, which gets a file for each."
                if chosen
                else f"Parameters go to a file that ends in {SAFETENSORS}.",
            )
        return {path: parquet(chosen[0])}
    if out.endswith("/") or path.is_dir():
        if chosen:
            _import_pyarrow()
        jobs = {path / f"{quote(short(spec.name), safe='')}{PARQUET}": parquet(spec) for spec in chosen}
        return ({path / PARAMETERS: safetensors([], dense=True)} if everything else {}) | jobs
    raise ConfigurationError(
        "the kind of the export is not clear",
        expected=f"a file that ends in {SAFETENSORS} or {PARQUET}, or a folder, with a slash at its end",
        got=out,
    )


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Give a name for a draft, which is to become ``path``, and remove what is left of it."""
    if path.is_dir():
        raise ConfigurationError("a file cannot replace a folder", where=str(path))
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield draft
    finally:
        remove(draft)


# ---------------------------------------------------------------------------------------------- safetensors


class _SafetensorsFile:
    """Writes a file whose tensors come one after the other: room for its header is left before them, and what the
    header does not need stays blank, as the format allows."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        """``names`` are those of everything that may come, tensors or text."""
        self._header: dict[str, Any] = {"__metadata__": {}}
        size = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names) + _ENTRY_BYTES
        self._room = size + -size % 8
        self._path = path
        self._size = 0
        with path.open("xb") as file:
            file.truncate(8 + self._room)

    def note(self, name: str, value: object) -> None:
        self._header["__metadata__"][name] = str(value)

    def add(self, name: str, value: torch.Tensor) -> None:
        self._enter(name, NAMES[value.dtype], tuple(value.shape), value.nbytes)
        bits: Buffer = as_bytes(value).numpy()
        with self._path.open("ab") as file:
            file.write(bits)

    def room(self, name: str, shape: tuple[int, int], dtype: str) -> np.ndarray[Any, Any]:
        """Return zeros in the file, to be written to in any order."""
        kind = getattr(torch, dtype)
        at = 8 + self._room + self._size
        self._enter(name, NAMES[kind], shape, shape[0] * shape[1] * kind.itemsize)
        if not all(shape):
            return np.zeros(shape, dtype)
        allocate(self._path, 8 + self._room + self._size)
        return np.memmap(self._path, dtype, "r+", offset=at, shape=shape)

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        if name in self._header:
            raise CheckpointError(f"two tensors of the export would be called {name!r}")
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._size, self._size + size]}
        self._size += size

    def close(self) -> None:
        header = json.dumps(self._header).encode()
        assert len(header) <= self._room, "an entry is longer than was thought"
        with self._path.open("r+b") as file:
            file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
            file.flush()
            os.fsync(file.fileno())


def _write_safetensors(
    checkpoint: Checkpoint, tables: list[TableSpec], draft: Path, *, dense: bool, state: bool
) -> None:
    file = _SafetensorsFile(draft, _names(checkpoint))
    file.note("step", checkpoint.manifest.version)
    if dense:
        for parameter in parameters(checkpoint):
            file.add(parameter.spec.name, parameter.value)
            for key, value in parameter.state.items() if state else ():
                name = f"{parameter.spec.name}.state.{key}"
                if isinstance(value, torch.Tensor):
                    file.add(name, value)
                else:
                    file.note(name, value)
        for name, value in buffers(checkpoint).items():
            file.add(name, value)
    for spec in tables:
        rows = Rows(checkpoint, spec)
        columns = _columns(rows, state)
        file.add(f"{short(spec.name)}.ids", torch.from_numpy(rows.ids))
        names = {column: spec.name if column == WEIGHT else f"{spec.name}.state.{column}" for column in columns}
        if state:
            file.note(f"{spec.name}.state.step", rows.step)
        rows.fill({c: file.room(names[c], (len(rows.ids), width), spec.dtype) for c, width in columns.items()})
    file.close()


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield names and texts at least as long as all of an export's, texts of plain values included."""
    for piece in checkpoint.manifest.pieces:
        yield from (f"{entry['param']}.{entry['key']}{entry.get('plain')}" for entry in piece.about.get(DENSE, ()))
        yield from piece.about.get(BUFFERS, ())
    for _, piece in checkpoint.files(TABLE):
        yield from (f"{piece.about[TABLE]}.state.{column}" for column in piece.about["columns"])
    for spec in checkpoint.manifest.spec.tables:
        yield from (f"{spec.name}.state.{key}" for key in (WEIGHT, "ids", "step"))


def _columns(rows: Rows, state: bool) -> dict[str, int]:
    return rows.widths if state else {WEIGHT: rows.spec.dim}


# ---------------------------------------------------------------------------------------------- Parquet


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError(
            "Parquet files are written by pyarrow, which is not installed",
            todo="pip install 'torch-fleet[arrow]', or export to a file that ends in .safetensors.",
        ) from None
    return pyarrow


def _write_parquet(checkpoint: Checkpoint, spec: TableSpec, draft: Path, state: bool) -> None:
    arrow = _import_pyarrow()
    rows = Rows(checkpoint, spec)
    columns = _columns(rows, state)
    scratches = {column: draft.with_name(f"{draft.name}-{index}") for index, column in enumerate(columns)}
    try:
        values = {c: scratch(scratches[c], (len(rows.ids), width), spec.dtype) for c, width in columns.items()}
        rows.fill(values)
        kinds = [(c, arrow.list_(arrow.from_numpy_dtype(spec.dtype), width)) for c, width in columns.items()]
        schema = arrow.schema([("id", arrow.int64()), *kinds])
        with arrow.parquet.ParquetWriter(draft, schema) as writer:
            for start in range(0, len(rows.ids), _ROWS_A_GROUP):
                some = slice(start, start + _ROWS_A_GROUP)
                lists = [
                    arrow.FixedSizeListArray.from_arrays(np.array(values[c][some]).reshape(-1), width)
                    for c, width in columns.items()
                ]
                writer.write_table(arrow.Table.from_arrays([arrow.array(rows.ids[some]), *lists], schema=schema))
    finally:
        for path in scratches.values():
            path.unlink(missing_ok=True)
