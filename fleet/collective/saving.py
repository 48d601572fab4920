"""The state of a collective job as one checkpoint, and back.

The same format as that of a parameter-server job, and servers can start from it: every parameter is one block, with its
optimizer state; the model's buffers come in a piece of their own. One worker writes, one reads and hands it to the
others, so that only its machine needs the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.writer import CheckpointWriter
from fleet.collective.worker import CollectiveWorker
from fleet.errors import CheckpointError, FleetError, UnsupportedError
from fleet.members import Member
from fleet.transpiler.specs import DTYPES, GroupSpec, JobSpec, ParamSpec, PlanSettings

#: A piece is closed when it is this large.
_PIECE_BYTES = 16 << 20


def save(worker: CollectiveWorker, dirname: str) -> None:
    """Written by the first worker that calls it after this step; the others wait until it has been."""
    spec = _spec(worker)
    clerk, key = worker.group.clerk, f"save/{worker.steps}/{dirname}"
    writer = clerk.ask(lambda store: store.compare_set(f"{key}/writer", "", str(clerk.rank)))
    if int(writer) != clerk.rank:
        clerk.until(lambda store: store.check([f"{key}/outcome"]) or None)
        failure = clerk.ask(lambda store: store.get(f"{key}/outcome")).decode()
        if failure:
            raise FleetError(f"worker {int(writer)} could not write the checkpoint", got=failure)
        return
    failure = "it was interrupted"
    try:
        with CheckpointWriter(dirname) as files:
            _write(worker, files)
            files.commit(worker.steps, 0, spec)
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        clerk.ask(lambda store: store.set(f"{key}/outcome", failure))


def _spec(worker: CollectiveWorker) -> JobSpec:
    params = []
    for member in worker.members:
        dtype = str(member.param.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise UnsupportedError(f"{member.name!r} is {dtype}, which no checkpoint holds", expected=", ".join(DTYPES))
        params.append(ParamSpec(member.name, tuple(member.param.shape), dtype, member.group))
    groups = [
        GroupSpec(type(optimizer).__name__, position, tuple(sorted(optimizer.defaults)), False)
        for position, optimizer in enumerate(worker.optimizers)
        for _ in optimizer.param_groups
    ]
    settings = PlanSettings(server_num=1, worker_num=worker.assignment.worker_num)
    return JobSpec(tuple(params), (), tuple(groups), settings)


def _write(worker: CollectiveWorker, files: CheckpointWriter) -> None:
    entries: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    for member in worker.members:
        for entry, tensor in _entries(member):
            entries.append(entry)
            tensors += [] if tensor is None else [tensor.detach().cpu()]
        if sum(tensor.nbytes for tensor in tensors) >= _PIECE_BYTES:
            files.add({"dense": entries}, tensors)
            entries, tensors = [], []
    files.add({"dense": entries}, tensors)
    buffers = {} if worker.model is None else dict(worker.model.named_buffers())
    files.add({"buffers": list(buffers)}, [buffer.detach().cpu().clone() for buffer in buffers.values()])


def _entries(member: Member) -> list[tuple[dict[str, Any], torch.Tensor | None]]:
    place = {"param": member.name, "offset": 0, "numel": member.param.numel()}
    made: list[tuple[dict[str, Any], torch.Tensor | None]] = [
        ({**place, "key": "value", "elementwise": True}, member.param.reshape(-1).clone())
    ]
    for key, value in member.optimizer.state.get(member.param, {}).items():
        if isinstance(value, torch.Tensor):
            whole = value.shape == member.param.shape
            made.append(({**place, "key": f"state.{key}", "elementwise": whole}, value.clone()))
        else:
            made.append(({**place, "key": f"state.{key}", "plain": value}, None))
    return made


def load(worker: CollectiveWorker, dirname: str) -> None:
    """Every worker calls it; worker 0 reads."""
    group, clerk = worker.group, worker.group.clerk
    found: dict[str, Any] = {}
    values: list[torch.Tensor] = []
    key = f"load/{worker.loads}"
    worker.loads += 1
    if clerk.rank == 0:
        try:
            found, values = _read(worker, Checkpoint.open(dirname))
        except Exception as error:
            failure = json.dumps({"failure": str(error)})
            clerk.ask(lambda store: store.set(key, failure))
            raise
        clerk.ask(lambda store: store.set(key, json.dumps(found)))
    else:
        clerk.until(lambda store: store.check([key]) or None)
        found = json.loads(clerk.ask(lambda store: store.get(key)))
        if "failure" in found:
            raise CheckpointError("worker 0 could not load the checkpoint", where=dirname, got=found["failure"])
        values = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in found["tensors"]]
    values = [value.to(worker.device) for value in values]
    group.broadcast(values, 0)
    _fill(worker, found, values)


def _read(worker: CollectiveWorker, checkpoint: Checkpoint) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What there is, and the tensors of it in that order."""
    manifest = checkpoint.manifest
    _check_fit(checkpoint, worker)
    told: list[dict[str, Any]] = []
    values: list[torch.Tensor] = []
    spread: dict[tuple[str, str], int] = {}
    for about, tensors in checkpoint.pieces("dense"):
        arriving = iter(tensors)
        for entry in about["dense"]:
            name, key = entry["param"], entry["key"]
            if "plain" in entry:
                told.append({"param": name, "key": key, "plain": entry["plain"]})
                continue
            tensor = next(arriving)
            if not entry["elementwise"]:
                told.append({"param": name, "key": key, "tensor": len(values)})
                values.append(tensor)
                continue
            # Blocks of servers come in any order; together they are the parameter's elements.
            place = spread.setdefault((name, key), len(values))
            if place == len(values):
                spec = next(param for param in manifest.spec.params if param.name == name)
                told.append({"param": name, "key": key, "tensor": place})
                values.append(torch.empty(spec.shape, dtype=tensor.dtype))
            values[place].view(-1)[entry["offset"] : entry["offset"] + entry["numel"]] = tensor.reshape(-1)
    for about, tensors in checkpoint.pieces("buffers"):
        told += [{"buffer": name, "tensor": len(values) + index} for index, name in enumerate(about["buffers"])]
        values += tensors
    kinds = [(list(value.shape), str(value.dtype).removeprefix("torch.")) for value in values]
    return {"step": manifest.version, "entries": told, "tensors": kinds}, values


def _check_fit(checkpoint: Checkpoint, worker: CollectiveWorker) -> None:
    def outline(spec: JobSpec) -> dict[str, str]:
        return {p.name: f"{p.dtype} {p.shape}, {spec.groups[p.group].rule}" for p in spec.params} | {
            table.name: "a sparse table" for table in spec.tables
        }

    saved, wanted = outline(checkpoint.manifest.spec), outline(_spec(worker))
    problems = [
        f"{name!r}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the job"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the model and its optimizer",
            where=str(checkpoint.directory),
            got="; ".join(problems),
        )


@torch.no_grad()
def _fill(worker: CollectiveWorker, found: dict[str, Any], values: Sequence[torch.Tensor]) -> None:
    by_name = {member.name: member for member in worker.members}
    buffers = {} if worker.model is None else dict(worker.model.named_buffers())
    states: dict[str, dict[str, Any]] = {}
    for entry in found["entries"]:
        value = entry["plain"] if "plain" in entry else values[entry["tensor"]]
        if "buffer" in entry:
            buffers[entry["buffer"]].copy_(value)
        elif entry["key"] == "value":
            by_name[entry["param"]].param.detach().copy_(value)
        else:
            states.setdefault(entry["param"], {})[entry["key"].removeprefix("state.")] = value
    for name, state in states.items():
        member = by_name[name]
        kept = member.optimizer.state[member.param]
        for key, value in state.items():
            # Step counts stay where torch has them, which is the CPU unless the optimizer is capturable.
            there = kept.get(key)
            is_count = isinstance(value, torch.Tensor) and value.dim() == 0
            device = there.device if isinstance(there, torch.Tensor) else torch.device("cpu") if is_count else None
            kept[key] = value.to(device or member.param.device) if isinstance(value, torch.Tensor) else value
    worker.steps = found["step"]
