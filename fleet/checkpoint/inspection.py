"""Looks at a checkpoint without a job: what is in it, and whether all of it is as it was written.

Nothing is held whole. Parameters are put together some at a time. Of a table's rows only the ids are held, with the
place of each among them (some 60 bytes a row while they are sorted); the rest passes by piece after piece.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import STATE, VALUE, joined
from fleet.checkpoint.files import allocate
from fleet.checkpoint.manifest import (
    BUFFERS,
    COUNTS,
    DENSE,
    STATES,
    TABLE,
    Checkpoint,
    Manifest,
    chain,
    lacking_tables,
    read,
)
from fleet.checkpoint.pieces import REMOVED, PieceFile
from fleet.checkpoint.places import Place
from fleet.checkpoint.state import Bytes, decoded, shares_of, values
from fleet.errors import CheckpointError
from fleet.plan.life import PREFIX
from fleet.plan.specs import JobSpec, ParamSpec, TableSpec

Array = np.ndarray[Any, Any]

#: The column of a table's rows that is no state of an optimizer.
WEIGHT = "weight"

#: So many elements of parameters, or one parameter, are held at a time, each with its state.
ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Parameter:
    """Holds one whole parameter: its value in its shape, and its optimizer's state, tensors and plain numbers."""

    spec: ParamSpec
    value: torch.Tensor
    state: Mapping[str, Any]


def parameters(checkpoint: Checkpoint, names: Container[str] | None = None) -> Iterator[Parameter]:
    """Yield the parameters of these names, or all; the files of others are not read."""
    files = checkpoint.files(DENSE)
    for some in _batches([each for each in checkpoint.manifest.spec.params if names is None or each.name in names]):
        wanted = {spec.name: spec.numel for spec in some}
        assembly = Assembly(wanted, checkpoint.where)
        for place, piece in files:
            if any(entry["param"] in wanted for entry in piece.about[DENSE]):
                assembly.add(piece.about[DENSE], checked(place, piece, checkpoint))
        for spec in some:
            pieces, flat = assembly.whole(spec.name)
            shaped = {key: value.reshape(spec.shape) if key in flat else value for key, value in pieces.items()}
            value = shaped.pop(VALUE)
            yield Parameter(spec, value, {key.removeprefix(STATE): each for key, each in shaped.items()})


def _batches(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    some: list[ParamSpec] = []
    for spec in specs:
        if some and sum(each.numel for each in some) + spec.numel > ELEMENTS_AT_ONCE:
            yield some
            some = []
        some.append(spec)
    if some:
        yield some


def buffers(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return what the model of a collective job has beside its parameters."""
    found: dict[str, torch.Tensor] = {}
    for place, piece in checkpoint.files(BUFFERS):
        found |= zip(piece.about[BUFFERS], checked(place, piece, checkpoint), strict=True)
    return found


@dataclass(frozen=True)
class OwnState:
    """Holds the state of one worker's own objects."""

    worker: int
    #: how many of its steps it had taken
    steps: int
    bytes: int
    #: by path, as `schedule.last_epoch`
    values: Mapping[str, Any]


def states(checkpoint: Checkpoint) -> list[OwnState]:
    """Return what each worker had beside the model, in the order of their indices."""

    def own(worker: int, steps: int, data: Bytes) -> OwnState:
        return OwnState(worker, steps, data.nbytes, values(data, f"{checkpoint.where}, worker {worker}"))

    found = [
        own(*share)
        for place, piece in checkpoint.files(STATES)
        for share in shares_of(piece.about, checked(place, piece, checkpoint))
    ]
    return sorted(found, key=lambda each: each.worker)


class Rows:
    """Holds the rows of one table: for an id that was saved several times, the newest."""

    def __init__(self, checkpoint: Checkpoint, spec: TableSpec) -> None:
        self.spec = spec
        #: the optimizer's step count
        self.step = 0
        #: how many numbers a row has in each column
        self.widths: dict[str, int] = {WEIGHT: spec.dim}
        self._checkpoint = checkpoint
        self._files = [each for each in checkpoint.files(TABLE) if each[1].about[TABLE] == spec.name]
        saved: list[Array] = [np.empty(0, np.int64)]
        gone: list[Array] = [np.empty(0, bool)]
        for about, ids, columns in self._pieces():
            self.step = max(self.step, about["step"])
            self.widths |= {name: values.shape[1] for name, values in columns.items()}
            saved.append(ids)
            gone.append(np.full(len(ids), REMOVED in about))
        every = np.concatenate(saved)
        order = np.argsort(every, kind="stable")
        every = every[order]
        is_last = np.append(every[1:] != every[:-1], True)[: len(every)]
        is_gone = np.concatenate(gone)[order]
        was_saved = every[~is_gone]
        is_last &= ~is_gone
        #: distinct and sorted
        self.ids = every[is_last]
        #: how many rows were saved that are gone since
        self.removed = int(np.count_nonzero(was_saved[1:] != was_saved[:-1])) + bool(len(was_saved)) - len(self.ids)
        #: for each row as it was saved, one after the other, where its id stands in ``ids``; -1 if it came again
        self._ranks = np.full(len(every), -1)
        self._ranks[order[is_last]] = np.arange(len(self.ids))

    def parts(self) -> Iterator[tuple[Array, dict[str, Array]]]:
        """Yield some rows at a time: where their ids stand in ``ids``, and their columns. Each row comes once; a column
        that it was saved without is zero."""
        start = 0
        for about, ids, columns in self._pieces():
            ranks = self._ranks[start : start + len(ids)]
            start += len(ids)
            if REMOVED in about:
                continue
            current = ranks >= 0
            yield ranks[current], {name: values[current] for name, values in columns.items()}

    def fill(self, columns: Mapping[str, Array]) -> None:
        """Fill the given columns, which hold zeros, in the order of ``ids``."""
        for ranks, part in self.parts():
            for name in columns.keys() & part.keys():
                columns[name][ranks] = part[name]

    def _pieces(self) -> Iterator[tuple[dict[str, Any], Array, dict[str, Array]]]:
        for place, piece in self._files:
            ids, *columns = (tensor.numpy() for tensor in checked(place, piece, self._checkpoint))
            named = zip(piece.about["columns"], columns, strict=True)
            yield piece.about, ids, {name: values for name, values in named if not name.startswith(PREFIX)}


def scratch(path: Path, shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeros in a new file; the system keeps them in memory as far as there is room."""
    if not all(shape):
        return np.zeros(shape, dtype)
    allocate(path, math.prod(shape) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=shape)


# ---------------------------------------------------------------------------------------------- what is wrong


@dataclass(frozen=True)
class Problem:
    where: str
    what: str


def verify(dirname: object) -> Iterator[PieceFile | Problem]:
    """Read all that a checkpoint consists of, and yield every piece that turns out to be whole, and whatever is
    wrong."""
    lineage: list[tuple[Place, Manifest]] = []
    is_whole = True
    links = chain(dirname)
    while True:
        try:
            place, manifest = next(links)
        except StopIteration:
            break
        except CheckpointError as error:
            is_whole = False
            yield Problem(error.where or str(dirname), _told(error))
            break
        lineage.append((place, manifest))
        for piece in manifest.pieces:
            where = f"{place.url.rstrip('/')}/{piece.file}"
            try:
                fault = _fault(piece, read(place, piece), manifest.spec)
            except CheckpointError as error:
                fault = _told(error)
            if fault:
                is_whole = False
                yield Problem(where, fault)
            else:
                yield piece
    if is_whole:  # else it is no news that something is missing
        place, manifest = lineage[0]
        for fault in _missing(manifest):
            yield Problem(place.url, fault)
        for table in lacking_tables(manifest.spec, (each for _, each in lineage)):
            yield Problem(place.url, f"nothing of the table {table!r} is there")


def _told(error: CheckpointError) -> str:
    return str(CheckpointError(error.what, expected=error.expected, got=error.got))


def _missing(manifest: Manifest) -> Iterator[str]:
    """Yield the parameters that the pieces of a checkpoint, sound as they are, do not make whole."""
    come: dict[tuple[str, str], list[tuple[int, int]]] = {(spec.name, VALUE): [] for spec in manifest.spec.params}
    for piece in manifest.pieces:
        for entry in piece.about.get(DENSE, ()):
            if entry.get("elementwise"):
                parts = come.setdefault((entry["param"], entry["key"]), [])
                parts.append((entry["offset"], entry["offset"] + entry["numel"]))
    numel = {spec.name: spec.numel for spec in manifest.spec.params}
    for (name, key), parts in come.items():
        parts.sort()
        if [*(start for start, _ in parts), numel[name]] != [0, *(stop for _, stop in parts)]:
            yield f"{name!r} lacks elements of its {key}, or has them twice"


def checked(place: Place, piece: PieceFile, checkpoint: Checkpoint) -> list[torch.Tensor]:
    tensors = read(place, piece)
    fault = _fault(piece, tensors, checkpoint.manifest.spec)
    if fault:
        raise CheckpointError(
            "a piece of the checkpoint is not as it should be", where=f"{place.url}/{piece.file}", got=fault
        )
    return tensors


def _fault(piece: PieceFile, tensors: Sequence[torch.Tensor], spec: JobSpec) -> str:
    """Return in words what is wrong with a piece whose checksum is right."""
    try:
        if DENSE in piece.about:
            return _dense_fault(piece.about[DENSE], tensors, {each.name: each for each in spec.params})
        if COUNTS in piece.about:
            return _counts_fault(piece.tensors, tensors)
        if REMOVED in piece.about:
            return _removed_fault(tensors)
        if TABLE in piece.about:
            return _rows_fault(piece.about, tensors, {each.name: each for each in spec.tables})
        if STATES in piece.about:
            for worker, _, data in shares_of(piece.about, tensors):
                decoded(data, f"worker {worker}")
            return ""
        return "" if len(piece.about[BUFFERS]) == len(tensors) else "it names other buffers than it has"
    except CheckpointError as error:
        return str(error)
    except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        return f"what it says of itself makes no sense: {error!r}"


def _dense_fault(
    entries: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor], specs: Mapping[str, ParamSpec]
) -> str:
    if sum("plain" not in entry for entry in entries) != len(tensors):
        return "it names other tensors than it has"
    for entry, tensor in joined(entries, tensors):
        spec = specs.get(entry["param"])
        if spec is None:
            return f"{entry['param']!r} is no parameter of the job"
        if tensor is None or not entry["elementwise"]:
            continue
        fits = tensor.numel() == entry["numel"] and 0 <= entry["offset"] <= spec.numel - entry["numel"]
        if not fits or (entry["key"] == VALUE and str(tensor.dtype) != f"torch.{spec.dtype}"):
            what = f"{entry['key']} of {spec.name!r} from {entry['offset']} on"
            return f"{what} does not fit a parameter of {spec.dtype} {spec.shape}"
    return ""


def _counts_fault(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> str:
    if list(names) == ["cells"]:
        return "" if tensors[0].dim() == 2 and tensors[0].dtype == torch.uint8 else "its cells are no bytes"
    ids, counts = tensors
    fits = ids.dtype == torch.int64 and ids.dim() == 1 and counts.shape == ids.shape
    return "" if list(names) == ["ids", "counts"] and fits else "it does not have a count for each id"


def _removed_fault(tensors: Sequence[torch.Tensor]) -> str:
    (ids,) = tensors
    return "" if ids.dtype == torch.int64 and ids.dim() == 1 else "the ids that are gone are no int64 numbers"


def _rows_fault(about: Mapping[str, Any], tensors: Sequence[torch.Tensor], specs: Mapping[str, TableSpec]) -> str:
    ids, *columns = tensors
    spec = specs.get(about[TABLE])
    if spec is None:
        return f"{about[TABLE]!r} is no table of the job"
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(np.unique(ids.numpy())) != len(ids):
        return f"the ids of {spec.name!r} are not distinct int64 numbers"
    if spec.num_embeddings is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < spec.num_embeddings:
        return f"an id of {spec.name!r} is out of range, which ends at {spec.num_embeddings}"
    if WEIGHT not in about["columns"] or not isinstance(about["step"], int):
        return f"the rows of {spec.name!r} lack their weights, or the step"
    for name, column in zip(about["columns"], columns, strict=True):
        width = spec.dim if name == WEIGHT else column.shape[-1]
        if name.startswith(PREFIX) and column.shape == (len(ids), 1):
            continue
        if column.shape != (len(ids), width) or str(column.dtype) != f"torch.{spec.dtype}":
            return (
                f"{name} of {spec.name!r} is {column.dtype} {tuple(column.shape)}, not {spec.dtype} {(len(ids), width)}"
            )
    return ""
