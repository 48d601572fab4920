"""Brings other values into a running job, by one worker for all: ``load_persistables`` and ``load_state_dict``.

A checkpoint is read by the servers, each its part, and taken over when all of them have; plain tensors are sent to
them. Whoever makes the call goes on with the new values when it returns, and every other worker with its next step or
barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fleet.checkpoint.inference import ids_key
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.places import place_at
from fleet.checkpoint.state import check_state, restore, warn_of_none
from fleet.errors import ArgumentTypeError, CheckpointError, FleetError, ServerBusyError
from fleet.nn.handle import TableHandle, handle_of
from fleet.numeric.jit import Array
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.worker.lease import once, withdrawn_if_it_fails
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.ps.worker.upload import replace


def load(worker: WorkerRuntime, dirname: object) -> None:
    where = place_at(dirname).url
    with worker.turns.take():
        _load(worker, dirname, where)


def _load(worker: WorkerRuntime, dirname: object, where: str) -> None:
    worker.in_turn("load_persistables()", worker.flush)

    def read(granted: dict[str, Any]) -> None:
        checkpoint = Checkpoint.open(dirname)
        checkpoint.check_fits(worker.trained.plan.spec)
        attempt = _attempt(worker, granted)
        asked = pb.Load(id=checkpoint.manifest.id, url=checkpoint.place.url, attempt=attempt)
        while True:
            with withdrawn_if_it_fails(worker, attempt):
                worker.connections.ask(f"loading {where}", load=asked)
            try:
                return _take_over(worker, attempt)
            except ServerBusyError:  # a server was killed in between, and has to read again
                continue

    if worker.dense is not None:
        worker.turns.refuse_other_thread("load_persistables()")  # it changes what that one trains
    once(worker, worker.progress.name_of_call(f"load_persistables({where!r})"), read, by_anyone=True)
    worker.reload_in_turn()
    if worker.dense is not None:
        worker.dense.replace({})


def load_own_state(worker: WorkerRuntime, state: object) -> bool:
    """Give the worker's own objects what the job has of them; return whether it has anything."""
    check_state(state)
    data = worker.in_turn("load_state()", worker.own_states.recall)
    if data is not None:
        restore(state, data, str(worker.assignment))
    elif worker.progress.went_on_at:
        warn_of_none(worker.assignment.index, worker.progress.went_on_at)
    return data is not None


def load_state(worker: WorkerRuntime, model: object, state: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model must be a torch.nn.Module", got=type(model).__name__)
    if not isinstance(state, Mapping):
        raise ArgumentTypeError("state must be a dict of tensors by name", got=type(state).__name__)
    with worker.turns.take():
        _load_state(worker, model, state)


def _load_state(worker: WorkerRuntime, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    worker.in_turn("load_state_dict()", worker.flush)
    found = _Sorted(worker, model, state)

    def send(granted: dict[str, Any]) -> None:
        attempt = _attempt(worker, granted)
        with withdrawn_if_it_fails(worker, attempt):
            replace(worker.connections, worker.trained, worker.progress.completed, found.dense, found.rows)
        _take_over(worker, attempt)

    if worker.dense is not None:
        worker.turns.refuse_other_thread("load_state_dict()")
    once(worker, worker.progress.name_of_call("load_state_dict()"), send, by_anyone=True)
    if worker.dense is not None:
        worker.dense.replace(found.dense)
    with torch.no_grad():
        for mine, value in found.local:
            mine.copy_(value)
    worker.reload_in_turn()
    for module, value in found.extra:  # the last, as it is a script's own code
        module.set_extra_state(value)


def _attempt(worker: WorkerRuntime, granted: dict[str, Any]) -> str:
    """Name what servers take over, apart from what a worker has left that was lost amid the same call."""
    return f"{granted['name']} by {worker.incarnation}"


def _take_over(worker: WorkerRuntime, attempt: str) -> None:
    try:
        worker.connections.ask("other values", ready=pb.Ready(anew=True, attempt=attempt))
    except ServerBusyError:
        raise
    except FleetError as error:
        # Other servers may go on from them already: nobody may go on as if nothing had happened.
        worker.abort(f"a server could not go on from other values: {error}")
        raise


class _Sorted:
    """Sorts a state by where its values belong: parameters and rows of the job, and what every worker has for itself.
    All of it fits, and nothing is missing."""

    def __init__(self, worker: WorkerRuntime, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        self.dense: dict[str, torch.Tensor] = {}
        self.rows: dict[str, tuple[Array, torch.Tensor]] = {}
        self.local: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: what modules keep that is no parameter and no buffer, and may be anything
        self.extra: list[tuple[torch.nn.Module, Any]] = []
        self._problems: list[str] = []
        params, tables = worker.trained.parts()
        wanted: set[str] = set()
        for name, mine in model.state_dict(keep_vars=True).items():
            handle = handle_of(mine)
            if handle is not None and id(handle) in tables:
                wanted |= self._sort_table(name, handle, tables[id(handle)].name, state)
                continue
            wanted.add(name)
            of_module, _, key = name.rpartition(".")
            if key == _EXTRA_STATE_KEY_SUFFIX:
                if name in state:
                    self.extra.append((model.get_submodule(of_module), state[name]))
                else:
                    self._problems.append(f"{name!r}: in the model, absent in the state")
                continue
            value = self._checked(name, state, tuple(mine.shape))
            if value is not None and id(mine) in params:
                self.dense[params[id(mine)].name] = value.to(mine.dtype)
            elif value is not None:
                self.local.append((mine, value))
        self._problems += [f"{name!r}: in the state, absent in the model" for name in state if name not in wanted]
        if self._problems:
            raise CheckpointError(
                "the state does not fit the model",
                got="; ".join(self._problems),
                todo="Build the model as it was when the state was taken.",
            )

    def _checked(self, name: str, state: Mapping[str, Any], shape: tuple[int | None, ...]) -> torch.Tensor | None:
        """Return a tensor of the state, if it is there in this shape; None stands for any length."""
        value = state.get(name)
        if value is None:
            self._problems.append(f"{name!r}: in the model, absent in the state")
        elif not isinstance(value, torch.Tensor):
            self._problems.append(f"{name!r}: {type(value).__name__} in the state, not a tensor")
        elif len(value.shape) != len(shape) or any(w not in (None, h) for w, h in zip(shape, value.shape, strict=True)):
            want = tuple("any" if size is None else size for size in shape)
            self._problems.append(f"{name!r}: {tuple(value.shape)} in the state, {want} in the model")
        else:
            return value.detach()
        return None

    def _sort_table(self, name: str, handle: TableHandle, table: str, state: Mapping[str, Any]) -> set[str]:
        """Take a table that stands there as a whole matrix, or as some rows with their ids beside it. Return its
        names."""
        of_ids = ids_key(name)
        if of_ids not in state and handle.num_embeddings is not None:
            rows = self._checked(name, state, (handle.num_embeddings, handle.dim))
            if rows is not None:
                self.rows[table] = (np.arange(len(rows)), rows.to(handle.weight.dtype))
            return {name}
        ids, rows = self._checked(of_ids, state, (None,)), self._checked(name, state, (None, handle.dim))
        if ids is not None and rows is not None:
            numbers = ids.cpu().numpy()
            bound = handle.num_embeddings
            if len(ids) != len(rows) or numbers.dtype != np.int64 or len(np.unique(numbers)) != len(ids):
                self._problems.append(f"{of_ids!r}: not one int64 id of its own for each of the {len(rows)} rows")
            elif bound is not None and not ((numbers >= 0) & (numbers < bound)).all():
                self._problems.append(f"{of_ids!r}: ids beyond the {bound} rows of the model")
            else:
                self.rows[table] = (numbers, rows.to(handle.weight.dtype))
        return {name, of_ids}
