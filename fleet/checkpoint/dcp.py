"""Reads checkpoints where ``torch.distributed.checkpoint`` (DCP) reads its own, writes them in DCP's format, and back.

A parameter has its name. A table with ``num_embeddings`` is one matrix of all its rows, as ``torch.nn.Embedding`` has
it; rows that were never trained have their initial values. A table for any id is ``user.ids``, sorted, and
``user.weight``, a row for each. What an optimizer knows of either stands beside it, as ``user.weight.state.sum``.

DCP's metadata are a pickle. They are read by names on a list, and nothing else in them can be built.
"""

from __future__ import annotations

import fnmatch
import json
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fleet.checkpoint.entries import STATE, VALUE, entries_of, names, split
from fleet.checkpoint.files import remove
from fleet.checkpoint.inspection import WEIGHT, Rows, buffers, parameters, scratch
from fleet.checkpoint.manifest import BUFFERS, DENSE, TABLE, Checkpoint
from fleet.checkpoint.pieces import DTYPES, PIECE_BYTES, header
from fleet.checkpoint.places import writing
from fleet.checkpoint.plain_files import short
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import CheckpointError, ConfigurationError, ProtocolError, UnsupportedError
from fleet.numeric.tensors import dtype_name
from fleet.plan.life import PREFIX
from fleet.plan.specs import DTYPES as SPEC_DTYPES
from fleet.plan.specs import (
    TABLE_DTYPES,
    GroupSpec,
    Initializer,
    JobSpec,
    ParamSpec,
    PlanSettings,
    TableSpec,
)
from fleet.ps.table.initializers import InitialRows

#: What an export has beside tensors, so that a checkpoint can be made of it again.
JOB = "fleet.job"
#: Of a table with ``num_embeddings``, which rows are more than their initial values.
TRAINED = f"{STATE}ids"
_METADATA = ".metadata"
_MOST_METADATA = 1 << 30
_WHAT = "an export"

Array = np.ndarray[Any, Any]


# ---------------------------------------------------------------------------------------------- by DCP's names


@dataclass(frozen=True)
class _Tensor:
    """Describes what has a name in DCP. ``table`` and ``column`` say which rows it is; ``column`` may be ``ids``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    table: TableSpec | None = None
    column: str = ""

    @property
    def properties(self) -> TensorProperties:
        return TensorProperties(dtype=self.dtype)


class _Contents:
    """Knows a checkpoint by DCP's names. The ids of a table for any id are read to know how many rows it has; anything
    else is read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._rows: dict[str, Rows] = {}
        self.tensors: dict[str, _Tensor] = {**self._dense(), **self._tables()}

    def rows(self, table: TableSpec) -> Rows:
        if table.name not in self._rows:
            self._rows[table.name] = Rows(self.checkpoint, table)
        return self._rows[table.name]

    def _dense(self) -> dict[str, _Tensor]:
        shapes = {spec.name: spec.shape for spec in self.checkpoint.manifest.spec.params}
        found: dict[str, _Tensor] = {}
        for place, piece in self.checkpoint.files(DENSE):
            told = header(place, piece)
            with_tensors = (entry for entry in piece.about[DENSE] if "plain" not in entry)
            for entry, (dtype, shape) in zip(with_tensors, told, strict=True):
                name, key = entry["param"], entry["key"]
                whole = shapes[name] if entry["elementwise"] else shape
                found[name if key == VALUE else f"{name}.{key}"] = _Tensor(whole, dtype)
        for place, piece in self.checkpoint.files(BUFFERS):
            for name, (dtype, shape) in zip(piece.about[BUFFERS], header(place, piece), strict=True):
                found[name] = _Tensor(shape, dtype)
        return found

    def _tables(self) -> dict[str, _Tensor]:
        columns: dict[str, dict[str, tuple[torch.dtype, int]]] = {}
        for place, piece in self.checkpoint.files(TABLE):
            _, *told = header(place, piece)
            of_table = columns.setdefault(piece.about[TABLE], {})
            for name, (dtype, shape) in zip(piece.about["columns"], told, strict=True):
                if not name.startswith(PREFIX):
                    of_table[name] = dtype, shape[1]
        found: dict[str, _Tensor] = {}
        for spec in self.checkpoint.manifest.spec.tables:
            count = spec.num_embeddings
            if count is None:
                count = len(self.rows(spec).ids)
                found[f"{short(spec.name)}.ids"] = _Tensor((count,), torch.int64, spec, "ids")
            kinds = {WEIGHT: (getattr(torch, spec.dtype), spec.dim), **columns.get(spec.name, {})}
            for column, (dtype, width) in kinds.items():
                name = spec.name if column == WEIGHT else f"{spec.name}.{STATE}{column}"
                found[name] = _Tensor((count, width), dtype, spec, column)
        return found

    def metadata(self) -> Metadata:
        """Return what DCP knows of the tensors: each is one chunk."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    each.properties,
                    torch.Size(each.shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(each.shape)), torch.Size(each.shape))],
                )
                for name, each in self.tensors.items()
            }
        )

    def dense(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the parameters, their states and buffers that are wanted."""
        owners = {spec.name for spec in self.checkpoint.manifest.spec.params}
        asked = {name for name in owners if any(each == name or each.startswith(f"{name}.{STATE}") for each in wanted)}
        for parameter in parameters(self.checkpoint, asked):
            name = parameter.spec.name
            yield name, parameter.value
            for key, value in parameter.state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}.{STATE}{key}", value
        if any(name in wanted for _, piece in self.checkpoint.files(BUFFERS) for name in piece.about[BUFFERS]):
            yield from buffers(self.checkpoint).items()

    def fill(self, table: TableSpec, parts: Sequence[_Rows]) -> None:
        """Fill in rows of a table, in one pass over its files."""
        rows = self.rows(table)
        initial = InitialRows(table, self.checkpoint.manifest.seed)
        for part in parts:
            if part.column == "ids":
                part.out[:] = rows.ids[part.start : part.stop]
            elif part.column == WEIGHT and table.num_embeddings is not None:
                for start in range(part.start, part.stop, _ROWS_AT_ONCE):
                    ids = np.arange(start, min(start + _ROWS_AT_ONCE, part.stop))
                    values = np.empty((len(ids), table.dim), table.dtype)
                    initial.fill(ids, values)
                    part.out[ids - part.start] = values[:, part.columns]
            else:
                part.out[:] = 0
        values_wanted = [part for part in parts if part.column != "ids"]
        for ranks, columns in rows.parts() if values_wanted else ():
            places = ranks if table.num_embeddings is None else rows.ids[ranks]
            for part in values_wanted:
                if part.column in columns:
                    here = (places >= part.start) & (places < part.stop)
                    part.out[places[here] - part.start] = columns[part.column][here][:, part.columns]


_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class _Rows:
    """Is a range of one column's rows, and where they are wanted."""

    column: str
    start: int
    stop: int
    columns: slice
    out: Array


class FleetStorageReader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a checkpoint of a job, whole or each rank its shards. Of each
    table or parameter that is asked for the files are read, and no others.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from fleet.checkpoint.dcp import FleetStorageReader
        >>> fleet.save_persistables("ckpt")
        >>> state = {"1.bias": torch.zeros(1), "1.weight": torch.zeros(1, 4)}
        >>> dcp.load(state, storage_reader=FleetStorageReader("ckpt"), no_dist=True)
        >>> bool((state["1.bias"] == model[1].bias).all())
        True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """``path`` is a directory, or a URL."""
        self._path = path
        self._contents: _Contents | None = None

    def _opened(self) -> _Contents:
        if self._contents is None:
            self._contents = _Contents(Checkpoint.open(self._path))
        return self._contents

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint if one is named."""
        self._contents = None
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the names, shapes and types of all that can be loaded."""
        return self._opened().metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: every rank reads for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for."""
        contents = self._opened()
        asked: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            asked.setdefault(item.storage_index.fqn, []).append(item)
        for name, value in contents.dense({name for name in asked if contents.tensors[name].table is None}):
            for item in asked.get(name, ()):
                part = value
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        for table in contents.checkpoint.manifest.spec.tables:
            items = [item for name in asked if contents.tensors[name].table is table for item in asked[name]]
            if items:
                self._read_rows(contents, table, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _read_rows(contents: _Contents, table: TableSpec, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        parts, targets = [], []
        for item in items:
            described = contents.tensors[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            fits = target.is_cpu and target.dtype == described.dtype
            room = target if fits else torch.empty(target.shape, dtype=described.dtype, device="cpu")
            start, stop = item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]
            first = item.storage_offsets[1] if len(item.lengths) > 1 else 0
            columns = slice(first, first + item.lengths[1]) if len(item.lengths) > 1 else slice(None)
            parts.append(_Rows(described.column, start, stop, columns, room.numpy()))
            targets.append((item, target, room))
        contents.fill(table, parts)
        for item, target, room in targets:
            if room is not target:
                target.copy_(room)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Say no: DCP is to choose this reader only when it is named."""
        return False


# ---------------------------------------------------------------------------------------------- export


def export_to_dcp(checkpoint: Checkpoint, out: str, *, state: bool, force: bool) -> list[Path]:
    """Write all of a checkpoint as a directory that DCP loads, and return its files. With ``state``, the optimizer's is
    there as well, and ``import_from_dcp`` makes the same checkpoint of it."""
    if "://" in out:
        raise UnsupportedError("an export goes to this machine", expected="a path", got=out)
    final = Path(out)
    with writing(_WHAT, out), _directory(final, force) as draft:
        _Export(_Contents(checkpoint), draft, state).write()
    return sorted(final.iterdir())


@contextmanager
def _directory(final: Path, force: bool) -> Iterator[Path]:
    """Give a directory to be filled, which comes to its place when it has been."""
    there = os.listdir(final) if final.is_dir() else [final.name] if final.exists() else []
    if there and not (force and _METADATA in there):
        raise ConfigurationError(
            "will not overwrite what is there",
            where=str(final),
            todo="Give --force to replace a checkpoint of DCP's; choose another directory otherwise.",
        )
    token = secrets.token_hex(4)
    draft, old = (final.with_name(f".{final.name}-{token}{end}") for end in ("", ".old"))
    draft.mkdir(parents=True)
    try:
        yield draft
        if there:
            os.rename(final, old)
        os.replace(draft, final)
    finally:
        remove(draft)
        if final.exists():
            remove(old)
        elif old.exists():
            os.rename(old, final)


class _Export:
    """Hands a checkpoint to DCP's writer, a chunk at a time."""

    def __init__(self, contents: _Contents, folder: Path, state: bool) -> None:
        self._contents = contents
        self._folder = folder
        self._state = state
        tensors = {name: each for name, each in contents.tensors.items() if state or f".{STATE}" not in name}
        self._dense_names = {name for name, each in tensors.items() if each.table is None}
        self._dense = contents.dense(self._dense_names)
        self._come: dict[str, torch.Tensor] = {}
        self._table: tuple[str, dict[str, Array]] | None = None
        if state:
            self._come[JOB] = self._job()
            tensors[JOB] = _Tensor(tuple(self._come[JOB].shape), torch.uint8)
            for spec in contents.checkpoint.manifest.spec.tables:
                if spec.num_embeddings is not None:
                    ids = torch.from_numpy(contents.rows(spec).ids)
                    self._come[f"{spec.name}.{TRAINED}"] = ids
                    tensors[f"{spec.name}.{TRAINED}"] = _Tensor(tuple(ids.shape), torch.int64)
        self._tensors = tensors

    def _job(self) -> torch.Tensor:
        manifest = self._contents.checkpoint.manifest
        plain = {
            f"{entry['param']}.{entry['key']}": entry["plain"]
            for _, piece in self._contents.checkpoint.files(DENSE)
            for entry in piece.about[DENSE]
            if "plain" in entry
        }
        told = {
            "spec": json.loads(manifest.spec.to_json()),
            "seed": manifest.seed,
            "step": manifest.version,
            "steps": {spec.name: self._contents.rows(spec).step for spec in manifest.spec.tables},
            "plain": plain,
            "buffers": list(buffers(self._contents.checkpoint)),
        }
        return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)

    def write(self) -> None:
        described: dict[str, Any] = {}
        items = []
        for name, each in self._tensors.items():
            chunks = list(_chunks(each))
            size = torch.Size(each.shape)
            described[name] = TensorStorageMetadata(each.properties, size, chunks)
            items += [
                WriteItem(
                    MetadataIndex(name, chunk.offsets, index),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, each.properties, size),
                )
                for index, chunk in enumerate(chunks)
            ]
        # A file for each chunk: the writer holds what goes into a file until the file is whole.
        writer = FileSystemWriter(self._folder, single_file_per_rank=False, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
        planner: Any = self  # of a planner the writer needs ``resolve_data`` alone
        try:
            results = writer.write_data(plan, planner).wait()
            writer.finish(Metadata(described), [results])
        finally:
            self._drop_table()

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """Return the chunk that is to be written."""
        name = item.index.fqn
        described = self._tensors[name]
        assert item.tensor_data is not None
        if described.table is None:
            while name not in self._come:
                came, value = next(self._dense)
                if came in self._dense_names:
                    self._come[came] = value.reshape(self._tensors[came].shape)
            return self._come.pop(name).contiguous()
        offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
        rows = self._columns(described.table)[described.column]
        return torch.from_numpy(np.array(rows[offsets[0] : offsets[0] + sizes[0]]))

    def _columns(self, table: TableSpec) -> dict[str, Array]:
        """Return the columns of a table, in files beside the export until the next table's turn."""
        if self._table is None or self._table[0] != table.name:
            self._drop_table()
            named = {each.column: each for each in self._tensors.values() if each.table is table}
            columns = {
                column: scratch(self._scratch(at), each.shape, dtype_name(each.dtype))
                for at, (column, each) in enumerate(named.items())
            }
            parts = [_Rows(column, 0, len(out), slice(None), out) for column, out in columns.items()]
            self._contents.fill(table, parts)
            self._table = table.name, columns
        return self._table[1]

    def _scratch(self, at: int) -> Path:
        return self._folder.with_name(f"{self._folder.name}-{at}")

    def _drop_table(self) -> None:
        for at in range(len(self._table[1]) if self._table else 0):
            remove(self._scratch(at))
        self._table = None


def _chunks(tensor: _Tensor) -> Iterator[ChunkStorageMetadata]:
    """Cut a tensor's rows into chunks of about the size of a piece, if it is a table's."""
    if tensor.table is None or not tensor.shape[0]:
        yield ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
        return
    count, *rest = tensor.shape
    width = int(np.prod(rest)) * tensor.dtype.itemsize
    each = max(1, PIECE_BYTES // width)
    for start in range(0, count, each):
        sizes = torch.Size([min(each, count - start), *rest])
        yield ChunkStorageMetadata(torch.Size([start, *([0] * len(rest))]), sizes)


# ---------------------------------------------------------------------------------------------- import


#: All that metadata consist of.
_BUILT = {
    "builtins": {"set", "frozenset"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size", *(dtype_name(dtype) for dtype in DTYPES.values())},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class _MetadataOnly(pickle.Unpickler):
    """Builds what DCP's metadata consist of, and refuses any other name."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _BUILT.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata have no use for")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads a checkpoint of DCP's that nobody vouches for: of its tensors DCP lets through nothing but tensors."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        folder = Path(self.path)
        try:
            if (folder / _METADATA).stat().st_size > _MOST_METADATA:
                raise ValueError(f"they have more than {_MOST_METADATA} bytes")
            with (folder / _METADATA).open("rb") as file:
                metadata = _MetadataOnly(file).load()
            self._check(metadata, {entry.name: entry.stat().st_size for entry in os.scandir(folder)})
        except FileNotFoundError:
            raise CheckpointError(
                "there is no checkpoint of DCP's here", where=str(folder), expected=f"a directory with {_METADATA}"
            ) from None
        except Exception as error:  # whatever a stranger's pickle brings about
            raise CheckpointError("DCP's metadata cannot be read", where=str(folder), got=repr(error)) from None
        metadata.storage_meta = StorageMeta()
        found: Metadata = metadata
        return found

    @staticmethod
    def _check(metadata: Metadata, sizes: Mapping[str, int]) -> None:
        """Refuse tensors that no file has room for, and files elsewhere."""
        for name, told in metadata.state_dict_metadata.items():
            if not isinstance(told, TensorStorageMetadata):
                continue
            covered = 0
            for chunk in told.chunks:
                if len(chunk.sizes) != len(told.size) or min((*chunk.sizes, *chunk.offsets), default=0) < 0:
                    raise ValueError(f"a chunk of {name!r} is impossible")
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                file = PurePosixPath(info.relative_path)
                if len(file.parts) != 1 or file.name not in sizes:
                    raise ValueError(f"{name!r} is in {info.relative_path!r}, which is no file of this directory")
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(f"{name!r} was changed by an extension of DCP's when it was written")
                bytes_ = chunk.sizes.numel() * told.properties.dtype.itemsize
                if not 0 <= info.offset <= info.offset + info.length <= sizes[file.name] or bytes_ > info.length:
                    raise ValueError(f"{name!r} is larger than what was written of it")
                covered += chunk.sizes.numel()
            if covered != told.size.numel():
                raise ValueError(f"{name!r} lacks elements, or has them twice")


@dataclass(frozen=True)
class Meaning:
    """Says what a checkpoint of others' means: ``optimizer`` is the class of the job that is to go on from it."""

    optimizer: str = ""
    prefix: str = ""
    tables: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


def import_from_dcp(source: str, out: str, meaning: Meaning) -> list[str]:
    """Write a checkpoint with what a directory of DCP's has, and return the names in it that were left out."""
    reader = _Reader(source)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    source_ = _Source(reader, metadata)
    if JOB in source_.tensors:
        if meaning != Meaning():
            raise ConfigurationError(
                "this export says itself what it means",
                where=source,
                got="options that say it too",
                todo="Leave --optimizer, --prefix, --table and --skip out.",
            )
        job = _read_job(source_)
        left: list[str] = []
    else:
        job, left = _made_job(source_, meaning, source)
    with writing("a checkpoint", out), CheckpointWriter(out) as writer:
        with writer.pieces("import") as pieces:
            _Import(source_, job).write(pieces)
        writer.add(pieces.files)
        writer.commit(job.step, job.seed, job.spec)
    return left


@dataclass(frozen=True)
class _Job:
    """Says what is imported. ``names`` has DCP's name of each parameter, table and buffer."""

    spec: JobSpec
    names: Mapping[str, str]
    seed: int = 0
    step: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[str] = ()


class _Source:
    """Reads tensors of a checkpoint of DCP's, or some of their rows."""

    def __init__(self, reader: FileSystemReader, metadata: Metadata) -> None:
        self._reader = reader
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: told for name, told in metadata.state_dict_metadata.items() if isinstance(told, TensorStorageMetadata)
        }
        self.others = sorted(metadata.state_dict_metadata.keys() - self.tensors.keys())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        told = self.tensors[name]
        sizes = list(told.size)
        offsets = [0] * len(sizes)
        if stop is not None:
            offsets[0], sizes[0] = start, stop - start
        value = torch.empty(sizes, dtype=told.properties.dtype, device="cpu")
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, told, [wanted])
        planner: Any = _Into(value)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except Exception as error:  # as many kinds as torch has ways to read
            where = f"{self._reader.checkpoint_id}, {name}"
            raise CheckpointError("a tensor of DCP's cannot be read", where=where, got=repr(error)[:300]) from None
        return value

    def bands(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows that lie in the same chunks, so that each chunk is read once."""
        told = self.tensors[name]
        edges = sorted({edge for c in told.chunks for edge in (c.offsets[0], c.offsets[0] + c.sizes[0])})
        yield from pairwise(edges)


class _Into:
    """Has DCP's reader fill one tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        part = self._value
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is a part of the whole one."""


def _read_job(source: _Source) -> _Job:
    """Read what an export of ours says of itself."""
    try:
        told = json.loads(source.read(JOB).numpy().tobytes())
        spec = JobSpec.from_json(json.dumps(told["spec"]))
        names_here = [*(param.name for param in spec.params), *(table.name for table in spec.tables)]
        job = _Job(
            spec,
            {name: name for name in names_here},
            *(int(told["seed"]), int(told["step"])),
            {str(name): int(step) for name, step in told["steps"].items()},
            dict(told["plain"]),
            [str(name) for name in told["buffers"]],
        )
        for param in spec.params:
            if tuple(source.tensors[param.name].size) != param.shape:
                raise ValueError(f"{param.name!r} has another shape than it is said to have")
        for table in spec.tables:
            if source.tensors[table.name].size[1:] != (table.dim,):
                raise ValueError(f"{table.name!r} has other columns than it is said to have")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ProtocolError) as error:
        raise CheckpointError("what an export says of its job cannot be read", got=repr(error)[:300]) from None
    return job


def _made_job(source: _Source, meaning: Meaning, where: str) -> tuple[_Job, list[str]]:
    """Make up a job with the parameters and tables of a checkpoint of others', and tell what is no part of it."""
    if not meaning.optimizer:
        raise ConfigurationError(
            "a checkpoint of others' does not say which optimizer the job has",
            where=where,
            todo="Name its class, as --optimizer Adam. Its state begins anew.",
        )
    inside = {
        name.removeprefix(meaning.prefix): name
        for name in source.tensors
        if name.startswith(meaning.prefix) and not any(fnmatch.fnmatchcase(name, each) for each in meaning.skip)
    }
    with_ids = {name for name in inside if f"{short(name)}.ids" in inside and name.endswith(f".{WEIGHT}")}
    chosen = {name if name in inside else f"{name}.{WEIGHT}" for name in meaning.tables}
    unknown = sorted(chosen - inside.keys())
    if unknown:
        raise ConfigurationError(f"there is no table {unknown[0]}", where=where, expected=", ".join(sorted(inside)))
    tables, params, taken = [], [], set()
    for name, told in ((name, source.tensors[full]) for name, full in inside.items()):
        dtype = dtype_name(told.properties.dtype)
        if name in with_ids | chosen and len(told.size) == 2 and dtype in TABLE_DTYPES:
            count = None if name in with_ids else told.size[0]
            tables.append(TableSpec(name, told.size[1], dtype, 0, count, Initializer("zeros")))
            taken |= {name, f"{short(name)}.ids"} if name in with_ids else {name}
        elif name in chosen:
            raise ConfigurationError(
                f"{name} cannot be a table",
                where=where,
                expected=f"a matrix of {', '.join(TABLE_DTYPES)}",
                got=f"{dtype} {tuple(told.size)}",
            )
        elif told.properties.dtype.is_floating_point and dtype in SPEC_DTYPES:
            params.append(ParamSpec(name, tuple(told.size), dtype, 0))
            taken.add(name)
    if not params and not tables:
        raise ConfigurationError(
            "nothing in this checkpoint can be a parameter", where=where, got=f"with the prefix {meaning.prefix!r}"
        )
    spec = JobSpec(tuple(params), tuple(tables), (GroupSpec(meaning.optimizer, 0, ()),), PlanSettings(1, 1))
    try:
        spec.check()
    except ProtocolError as error:
        raise CheckpointError("this checkpoint cannot be a job's", where=where, got=str(error.got)) from None
    left = sorted({*source.others, *source.tensors} - {inside[name] for name in taken})
    return _Job(spec, {name: inside[name] for name in taken}), left


class _Import:
    """Writes the pieces of a checkpoint."""

    def __init__(self, source: _Source, job: _Job) -> None:
        self._source = source
        self._job = job

    def write(self, pieces: Any) -> None:
        told: list[dict[str, Any]] = []
        tensors: list[torch.Tensor] = []
        for param in self._job.spec.params:
            entries, values = split(entries_of(param.name, 0, self._value(param), self._state(param.name)))
            told += entries
            tensors += values
            if sum(tensor.nbytes for tensor in tensors) >= PIECE_BYTES:
                pieces.add({DENSE: told}, dict(zip(names(told), tensors, strict=True)))
                told, tensors = [], []
        pieces.add({DENSE: told}, dict(zip(names(told), tensors, strict=True)))
        if self._job.buffers:
            pieces.add(
                {BUFFERS: list(self._job.buffers)}, {name: self._source.read(name) for name in self._job.buffers}
            )
        for table in self._job.spec.tables:
            self._write_rows(table, pieces)

    def _value(self, param: ParamSpec) -> torch.Tensor:
        return self._source.read(self._job.names[param.name]).to(getattr(torch, param.dtype))

    def _state(self, name: str) -> dict[str, Any]:
        start = f"{name}.{STATE}"
        found: dict[str, Any] = {
            each.removeprefix(start): self._source.read(each)
            for each in self._source.tensors
            if self._job.names.get(name) == name and each.startswith(start)
        }
        plain = {each.removeprefix(start): value for each, value in self._job.plain.items() if each.startswith(start)}
        return found | plain

    def _write_rows(self, table: TableSpec, pieces: Any) -> None:
        source, full = self._source, self._job.names[table.name]
        ids_name = f"{short(full)}.ids" if table.num_embeddings is None else f"{full}.{TRAINED}"
        every = source.read(ids_name).numpy() if ids_name in source.tensors else None
        columns = {WEIGHT: full}
        for name in source.tensors:
            if name.startswith(f"{full}.{STATE}") and name != f"{full}.{TRAINED}" and full == table.name:
                columns[name.removeprefix(f"{full}.{STATE}")] = name
        count, written = source.tensors[full].size[0], False
        if every is not None and (
            every.dtype != np.int64
            or every.ndim != 1
            or len(np.unique(every)) != len(every)
            or (table.num_embeddings is None and len(every) != count)
            or (table.num_embeddings is not None and len(every) and not 0 <= every.min() <= every.max() < count)
        ):
            raise CheckpointError("the ids of a table are not distinct, or not as many as its rows", where=ids_name)
        for start, stop in source.bands(full):
            read = {column: source.read(name, start, stop).numpy() for column, name in columns.items()}
            if table.num_embeddings is None:
                assert every is not None
                ids, places = every[start:stop], np.arange(stop - start)
            else:
                ids = np.arange(start, stop) if every is None else every[(every >= start) & (every < stop)]
                places = ids - start
            width = sum(values.shape[1] * values.itemsize for values in read.values())
            each = max(1, PIECE_BYTES // width)
            for at in range(0, len(ids), each):
                some = slice(at, at + each)
                self._add_rows(table, pieces, ids[some], {c: values[places[some]] for c, values in read.items()})
                written = True
        if not written:  # which says that there are none
            empty = {c: np.empty((0, source.tensors[name].size[1]), table.dtype) for c, name in columns.items()}
            self._add_rows(table, pieces, np.empty(0, np.int64), empty)

    def _add_rows(self, table: TableSpec, pieces: Any, ids: Array, columns: Mapping[str, Array]) -> None:
        step = self._job.steps.get(table.name, 0)
        about = {TABLE: table.name, "step": step, "rows": len(ids), "columns": list(columns)}
        pieces.add(about, {"ids": ids, **{c: np.ascontiguousarray(values) for c, values in columns.items()}})
