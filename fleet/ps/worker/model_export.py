"""Gathers the whole model from the servers as plain tensors: to hand to the user, or to save for serving.

Dense parameters and rows come in the pieces in which servers export their state. A piece is worked in when it has come,
so memory beyond the result is that of one piece, and of one column where rows have to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import VALUE, joined, split
from fleet.checkpoint.inference import TableFacts, ids_key
from fleet.checkpoint.manifest import DENSE
from fleet.nn.handle import TableHandle
from fleet.plan.specs import TableSpec
from fleet.ps.table.initializers import InitialRows
from fleet.ps.table.table import WEIGHT
from fleet.ps.worker.lease import once
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.ps.worker.state_reader import exported
from fleet.serving import export

#: Initial values of rows are made for so many ids at a time.
_IDS_AT_ONCE = 1 << 16


class Collector(Protocol):
    """Takes the rows of one table as they come, in any order."""

    def add(self, ids: torch.Tensor, rows: torch.Tensor) -> None: ...

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors in the result for the table of this key, once all rows have come."""


#: Of a table, how its initial values are drawn (the seed), and how many rows it has.
MakeCollector = Callable[[TableHandle, TableSpec, int, int], Collector]


def state_dict(worker: WorkerRuntime, model: torch.nn.Module, *, tables: bool) -> dict[str, torch.Tensor]:
    """Return the keys of ``model.state_dict()`` with the job's values. Tables of known size come whole, others as ids
    and rows; without ``tables`` none come."""

    def collector(handle: TableHandle, spec: TableSpec, seed: int, count: int) -> Collector:
        return SortedRows(spec, count) if spec.num_embeddings is None else AllRows(handle, spec, seed)

    with worker.turns.take():
        worker.in_turn("state_dict()", worker.flush)
        state = export.state_in_job(model, worker.trained.parts()[1])
        return worker.following(lambda: _collect(worker, state, collector if tables else None))


def save_inference_model(worker: WorkerRuntime, dirname: str, model: torch.nn.Module, example_inputs: object) -> None:
    """Save the model by the first worker that calls; the others wait until it is there."""
    state = export.state_to_save(model, worker.trained.parts()[1], example_inputs)

    def write(_: dict[str, Any]) -> None:
        def learn() -> dict[str, torch.Tensor]:
            return worker.following(
                lambda: _collect(worker, state, lambda _handle, spec, _seed, count: SortedRows(spec, count))
            )

        facts = {key: _facts(handle) for key, handle in export.remote_tables(state).items()}
        export.save(dirname, model, learn, facts, example_inputs, {})

    with worker.turns.take():
        worker.in_turn("save_inference_model()", worker.flush)
        once(worker, worker.progress.name_of_call(f"save_inference_model({dirname!r})"), write, by_anyone=True)


def _facts(handle: TableHandle) -> TableFacts:
    mean, padding = handle.initializer.mean, handle.padding_idx
    return TableFacts(handle.num_embeddings, handle.dim, mean, padding, handle.zero_padding)


def _collect(
    worker: WorkerRuntime, state: dict[str, torch.Tensor], make: MakeCollector | None
) -> dict[str, torch.Tensor]:
    """Return the ``state`` of a model with the job's values; ``make`` collects its tables."""
    params, tables = worker.trained.parts()
    if worker.trained.plan.spec.settings.has_dense_on_workers:
        params = {}  # the servers have none of them, and this worker has them all
    dense = {key: params[id(value)] for key, value in state.items() if id(value) in params}
    remote = {key: (handle, tables[id(handle)]) for key, handle in export.remote_tables(state).items()}
    wanted = {} if make is None else {spec.name: (handle, spec) for handle, spec in remote.values()}
    values = Assembly({spec.name: spec.numel for spec in dense.values()}, "what the servers hold")
    sizes = worker.summary()["tables"] if wanted else {}
    found: dict[str, Collector] = {}
    for connection in worker.connections.by_server:
        for piece in exported(connection, worker.progress.completed):
            about, tensors = piece.about, [torch.as_tensor(each, device="cpu") for each in piece.tensors.values()]
            if DENSE in about:
                seed = about["seed"]
                values.add(*split(pair for pair in joined(about[DENSE], tensors) if pair[0]["key"] == VALUE))
            elif make is None or not wanted:
                break
            elif about["table"] in wanted:
                name, (ids, *columns) = about["table"], tensors
                if name not in found:
                    found[name] = make(*wanted[name], seed, sizes[name]["rows"])
                found[name].add(ids, columns[about["columns"].index(WEIGHT)])
    result: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if key in remote:
            if make is not None:
                result |= found[remote[key][1].name].tensors(key)
        elif key in dense:
            result[key] = values.whole(dense[key].name)[0][VALUE].view(dense[key].shape)
        else:
            result[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    return result


class AllRows:
    """Collects a matrix with a row for every id there may be: ids that were never trained have their initial values."""

    def __init__(self, handle: TableHandle, spec: TableSpec, seed: int) -> None:
        assert spec.num_embeddings is not None
        self._zeros = handle.padding_idx if handle.zero_padding else None
        self._rows = torch.empty(spec.num_embeddings, spec.dim, dtype=getattr(torch, spec.dtype), device="cpu")
        rows, initial = self._rows.numpy(), InitialRows(spec, seed)
        for start in range(0, len(rows), _IDS_AT_ONCE):
            part = rows[start : start + _IDS_AT_ONCE]
            initial.fill(np.arange(start, start + len(part)), part)

    def add(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._rows[ids] = rows

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        if self._zeros is not None:
            self._rows[self._zeros] = 0
        return {key: self._rows}


class SortedRows:
    """Collects the rows there are, in the order of their ids. ``count`` is how many there are, or were a moment ago."""

    def __init__(self, spec: TableSpec, count: int) -> None:
        self._ids = torch.empty(count, dtype=torch.int64, device="cpu")
        self._rows = torch.empty(count, spec.dim, dtype=getattr(torch, spec.dtype), device="cpu")
        self._come = 0
        self._is_sorted = False

    def add(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        place = slice(self._come, self._come + len(ids))
        if place.stop > len(self._ids):  # other workers go on training, where the mode lets them
            more = place.stop // 8 + len(ids)
            self._ids = torch.cat([self._ids, self._ids.new_empty(more)])
            self._rows = torch.cat([self._rows, self._rows.new_empty(more, self._rows.shape[1])])
        self._ids[place], self._rows[place] = ids, rows
        self._come = place.stop

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        if not self._is_sorted:
            self._sort()
        return {ids_key(key): self._ids, key: self._rows}

    def _sort(self) -> None:
        self._rows = self._rows[: self._come]
        self._ids, order = torch.sort(self._ids[: self._come])
        for column in self._rows.t():
            column.copy_(column[order])
        self._is_sorted = True
