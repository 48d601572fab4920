"""Filling a server's shard from a checkpoint that was written by any number of servers, sliced in any way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fleet.checkpoint.manifest import Checkpoint
from fleet.errors import CheckpointError
from fleet.ps.kernels.rows import partition
from fleet.ps.server.service import Restore
from fleet.ps.table.shard import Shard
from fleet.transpiler.specs import JobSpec


def restore_from(dirname: str) -> Restore:
    """How to start from a checkpoint; its manifest is read now, its pieces when the job is known."""
    checkpoint = Checkpoint.open(dirname)

    def fill(shard: Shard, server: int) -> None:
        _check_model(checkpoint, shard.plan.spec)
        try:
            _restore_dense(checkpoint, shard)
            _restore_rows(checkpoint, shard, server)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            raise CheckpointError(
                "the checkpoint's contents do not fit the job", where=str(checkpoint.directory), got=repr(error)
            ) from error

    return Restore(checkpoint.manifest.seed, checkpoint.manifest.version, fill)


def _check_model(checkpoint: Checkpoint, spec: JobSpec) -> None:
    def outline(of: JobSpec) -> dict[str, str]:
        rules = [group.rule for group in of.groups]
        params = {p.name: f"{p.dtype} {p.shape}, {rules[p.group]}" for p in of.params}
        return params | {t.name: f"table of {t.dtype} x {t.dim}, {rules[t.group]}" for t in of.tables}

    saved, wanted = outline(checkpoint.manifest.spec), outline(spec)
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


def _restore_dense(checkpoint: Checkpoint, shard: Shard) -> None:
    """Assemble every parameter that has a block here from the blocks it was saved in, then cut our blocks."""
    plan, slots = shard.plan, shard.dense.layout.slots
    wanted = {plan.param_of(slot.block).name for slot in slots}
    whole: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    spread: dict[str, dict[str, int]] = {name: {} for name in wanted}  # how many elements of each key have come
    numel = {param.name: param.numel for param in plan.spec.params}
    for about, tensors in checkpoint.pieces("dense"):
        arriving = iter(tensors)
        for entry in about["dense"]:
            tensor = None if "plain" in entry else next(arriving)
            name, key = entry["param"], entry["key"]
            if name not in wanted:
                continue
            if tensor is None:
                whole[name][key] = entry["plain"]
            elif entry["elementwise"]:
                spread[name][key] = spread[name].get(key, 0) + tensor.numel()
                total = whole[name].setdefault(key, torch.empty(numel[name], dtype=tensor.dtype))
                total[entry["offset"] : entry["offset"] + entry["numel"]] = tensor.reshape(-1)
            else:
                whole[name].setdefault(key, tensor)
    for slot in slots:
        name, block = plan.param_of(slot.block).name, slot.block
        if "value" not in whole[name] or any(count != numel[name] for count in spread[name].values()):
            raise CheckpointError(f"the checkpoint lacks values of {name!r}", where=str(checkpoint.directory))
        mine = {
            key: value[block.offset : block.offset + block.numel] if key in spread[name] else value
            for key, value in whole[name].items()
        }
        shard.dense.write(slot.position, mine.pop("value"))
        state = {key.removeprefix("state."): value for key, value in mine.items()}
        if state:
            shard.dense.restore(slot.position, state, {key.removeprefix("state.") for key in spread[name]})


def _restore_rows(checkpoint: Checkpoint, shard: Shard, server: int) -> None:
    tables = {table.spec.name: table for table in shard.tables}
    servers = shard.plan.spec.settings.server_num
    shard.prepare()
    for about, tensors in checkpoint.pieces("table"):
        table = tables[about["table"]]
        table.step = max(table.step, int(about["step"]))
        arrays: Sequence[Any] = [tensor.numpy() for tensor in tensors]
        mine = partition(arrays[0], servers)[server]
        if len(mine):
            columns = dict(zip(about["columns"], (array[mine] for array in arrays[1:]), strict=True))
            table.load(arrays[0][mine], columns)
