"""Saves the state of a collective job as one checkpoint, and loads it.

The format is that of a parameter-server job, and servers can start from it: every parameter is one block, with its
optimizer state; the model's buffers come in a piece of their own. One worker writes, and one reads and hands everything
to the others, so only its machine needs the files.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from fleet.averaging.communicators import outline
from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import VALUE, entries_of, names, refuse_loose_state, set_state, split
from fleet.checkpoint.manifest import BUFFERS, DENSE, Checkpoint
from fleet.checkpoint.pieces import PIECE_BYTES, PieceWriter
from fleet.checkpoint.places import place_at
from fleet.checkpoint.state import Bytes, write_states
from fleet.checkpoint.writer import CheckpointWriter
from fleet.collective import object_states
from fleet.collective.lease import write_once
from fleet.collective.worker import CollectiveWorker
from fleet.errors import ArgumentTypeError, CheckpointError, UnsupportedError
from fleet.numeric.tensors import dtype_name
from fleet.plan.specs import DTYPES, GroupSpec, JobSpec, ParamSpec, PlanSettings

_log = logging.getLogger("fleet.checkpoint")


def save(worker: CollectiveWorker, dirname: object, mode: object, own: Bytes | None, wanted: str) -> None:
    """Write a checkpoint, as the first worker that calls this after a step; the others wait until it is done. ``own``
    is the state of this worker's own objects, ``wanted`` the name under which others give theirs, or empty for that of
    this call."""
    if mode != "full":
        raise UnsupportedError(
            "a collective job has no rows of which only the changed ones could be saved",
            expected="mode='full'",
            got=repr(mode),
        )
    spec, where = _spec(worker), place_at(dirname).url

    def write() -> None:
        with CheckpointWriter(dirname) as files:
            with files.pieces("worker") as pieces:
                _write(worker, pieces)
            files.add(pieces.files)
            if own is not None or wanted:
                with files.pieces("workers") as pieces:
                    write_states(pieces, object_states.collect(worker, name, everyone=not wanted))
                files.add(pieces.files)
            files.commit(worker.steps, 0, spec)

    name = wanted or f"{where} after step {worker.steps}"
    if own is not None:
        object_states.give(worker, name, own)
    write_once(worker, f"checkpoint {where}", write)


def _spec(worker: CollectiveWorker) -> JobSpec:
    params = []
    for member in worker.members:
        dtype = dtype_name(member.param.dtype)
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


def _write(worker: CollectiveWorker, pieces: PieceWriter) -> None:
    refuse_loose_state(worker.optimizers)
    told: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    for member in worker.members:
        entries, copies = split(entries_of(member.name, 0, member.param, member.optimizer.state.get(member.param, {})))
        told += entries
        tensors += copies
        if sum(tensor.nbytes for tensor in tensors) >= PIECE_BYTES:
            pieces.add({DENSE: told}, dict(zip(names(told), tensors, strict=True)))
            told, tensors = [], []
    pieces.add({DENSE: told}, dict(zip(names(told), tensors, strict=True)))
    buffers = {} if worker.model is None else dict(worker.model.named_buffers())
    pieces.add({BUFFERS: list(buffers)}, {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()})


def load_state(worker: CollectiveWorker, model: object, state: object) -> None:
    """Take over the values that worker 0 was given; every worker calls this."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model must be a torch.nn.Module", got=type(model).__name__)
    if not isinstance(state, Mapping):
        raise ArgumentTypeError("state must be a dict of tensors by name", got=type(state).__name__)
    before = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:  # it names each parameter, with both shapes, and has copied what fits
        model.load_state_dict(before)
        raise CheckpointError(
            "the state does not fit the model",
            got=str(error),
            todo="Build the model as it was when the state was taken.",
        ) from None
    # What a module keeps there beside tensors stays as each worker was given it.
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    worker.group.check_alike("load_state_dict()", {"values": outline(tensors.items())})
    worker.group.broadcast(list(tensors.values()), 0)


def load(worker: CollectiveWorker, dirname: object, *, strict: bool = True) -> None:
    """Load a checkpoint, which worker 0 reads; every worker calls this. Unless it is ``strict``, what does not fit is
    logged and left out."""
    group, monitor = worker.group, worker.group.monitor
    found: dict[str, Any] = {}
    values: list[torch.Tensor] = []
    key = f"load/{worker.loads}"
    worker.loads += 1
    if monitor.rank == 0:
        try:
            checkpoint = Checkpoint.open(dirname)
            found, values = _read(worker, checkpoint, strict)
            found["states"] = object_states.bring(worker, checkpoint)
        except Exception as error:
            failure = json.dumps({"failure": str(error)})
            monitor.ask(lambda store: store.set(key, failure))
            group.check_alike("load_persistables()", {})
            raise
        monitor.ask(lambda store: store.set(key, json.dumps(found)))
        group.check_alike("load_persistables()", {})
    else:
        object_states.note_load(worker)
        group.check_alike("load_persistables()", {})
        found = json.loads(monitor.ask(lambda store: store.get(key)))
        if "failure" in found:
            raise CheckpointError("worker 0 could not load the checkpoint", where=str(dirname), got=found["failure"])
        values = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in found["tensors"]]
    values = [value.to(worker.device) for value in values]
    group.broadcast(values, 0)
    _fill(worker, found, values)


def _read(worker: CollectiveWorker, checkpoint: Checkpoint, strict: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Read what a checkpoint has, and its tensors in the same order."""
    spec = _spec(worker)
    if strict:
        checkpoint.check_fits(spec)
    fit = checkpoint.fit(spec)
    if fit.problems:
        _log.warning("%s is loaded as far as it fits: %s", checkpoint.where, "; ".join(fit.problems))
    there = [each for each in worker.members if each.name not in fit.lacking]
    assembly = Assembly({each.name: each.param.numel() for each in there}, checkpoint.where)
    for about, tensors in checkpoint.pieces(DENSE):
        assembly.add(about[DENSE], tensors)
    params: list[dict[str, Any]] = []
    values: list[torch.Tensor] = []
    for member in there:
        pieces, flat = assembly.whole(member.name)
        if member.name in fit.values:
            pieces, flat = {VALUE: pieces[VALUE]}, set()
        plain = {key: piece for key, piece in pieces.items() if not isinstance(piece, torch.Tensor)}
        keys = [key for key in pieces if key not in plain]
        has_state = member.name not in fit.values
        params.append(
            {"name": member.name, "tensors": keys, "flat": sorted(flat), "plain": plain, "has_state": has_state}
        )
        values += [pieces[key] for key in keys]
    buffers = _fitting_buffers(worker, checkpoint, strict)
    values += buffers.values()
    kinds = [(list(value.shape), dtype_name(value.dtype)) for value in values]
    return {"step": checkpoint.manifest.version, "params": params, "buffers": [*buffers], "tensors": kinds}, values


def _fitting_buffers(worker: CollectiveWorker, checkpoint: Checkpoint, strict: bool) -> dict[str, torch.Tensor]:
    """Return those of a checkpoint's buffers that fit the model's."""
    present = {} if worker.model is None else {name: each.shape for name, each in worker.model.named_buffers()}
    saved: dict[str, torch.Tensor] = {}
    for about, tensors in checkpoint.pieces(BUFFERS):
        saved |= zip(about[BUFFERS], tensors, strict=True)
    fitting = {name: value for name, value in saved.items() if present.get(name) == value.shape}
    problems: list[tuple[object, object]] = [
        (f"{name!r}: {tuple(value.shape)}", tuple(present[name]) if name in present else "none")
        for name, value in saved.items()
        if name not in fitting
    ]
    if worker.model is not None and checkpoint.files(BUFFERS):  # servers write none
        lacking = sorted((present.keys() & worker.model.state_dict(keep_vars=True).keys()) - saved.keys())
        problems += [(f"{name!r}: {tuple(present[name])}", "none in the checkpoint") for name in lacking]
    for expected, got in problems:
        error = CheckpointError(
            "the checkpoint does not fit the model's buffers", where=checkpoint.where, expected=expected, got=got
        )
        if strict:
            raise error
        _log.warning("%s", error)
    return fitting


@torch.no_grad()
def _fill(worker: CollectiveWorker, found: dict[str, Any], values: list[torch.Tensor]) -> None:
    """Fill in ``values``, which are used up one by one: a device may have no room for all of them twice."""
    values.reverse()
    members = {member.name: member for member in worker.members}
    for told in found["params"]:
        member = members[told["name"]]
        pieces = {**told["plain"], **{key: values.pop() for key in told["tensors"]}}
        member.param.copy_(pieces[VALUE].view(member.param.shape))
        if told["has_state"]:
            set_state(member.optimizer, member.param, pieces, set(told["flat"]))
    buffers = {} if worker.model is None else dict(worker.model.named_buffers())
    for name in found["buffers"]:
        buffers[name].copy_(values.pop())
    worker.go_on_from(found["step"], found["states"])
