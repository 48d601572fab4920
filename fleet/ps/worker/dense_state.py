"""Hands the dense state of one worker to others: parameters, buffers, and what optimizers keep of the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fleet.checkpoint.entries import Entry, joined, set_state, state_entries
from fleet.errors import UnsupportedError
from fleet.ps.worker.dense_group import DenseGroup
from fleet.ps.worker.describe import Description


def entries(described: Description) -> Iterable[Entry]:
    """Yield what the optimizers keep of the dense parameters."""
    for spec, param in zip(described.spec.params, described.params, strict=True):
        owner = described.optimizers[described.spec.groups[spec.group].optimizer]
        yield from state_entries(spec.name, 0, param, owner.state.get(param, {}))


def hand_over(group: DenseGroup, described: Description, source: int) -> None:
    """Give all that lag behind the rank ``source`` what it has; the others have the same."""
    gives = group.rank == source
    told: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    if gives:
        for entry, tensor in entries(described):
            kind = {}
            if tensor is not None:
                kind = {"shape": list(tensor.shape), "dtype": _name(tensor.dtype), "device": tensor.device.type}
                tensors.append(tensor)
            told.append({**entry, **kind})
    told = _told(group, told, source)
    device = described.params[0].device if described.params else torch.device("cpu")
    if not gives:
        tensors = [
            torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]), device=_place(each, device))
            for each in told
            if "plain" not in each
        ]
    group.broadcast([*described.params, *tensors], source)
    if not gives:
        _take(described, told, tensors)


def _take(described: Description, told: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> None:
    pieces: dict[str, dict[str, Any]] = {spec.name: {} for spec in described.spec.params}
    for entry, tensor in joined(told, tensors):
        pieces[entry["param"]][entry["key"]] = entry["plain"] if tensor is None else tensor
    for spec, param in zip(described.spec.params, described.params, strict=True):
        owner = described.optimizers[described.spec.groups[spec.group].optimizer]
        owner.state.pop(param, None)
        if pieces[spec.name]:
            set_state(owner, param, pieces[spec.name], set())


def _told(group: DenseGroup, told: list[dict[str, Any]], source: int) -> list[dict[str, Any]]:
    """Return what the rank ``source`` tells in words."""
    try:
        text = json.dumps(told).encode()
    except TypeError as error:
        raise UnsupportedError(
            "an optimizer keeps something that cannot travel to another worker",
            expected="tensors, numbers and text",
            got=str(error),
        ) from None
    size = torch.tensor([len(text)])
    group.broadcast([size], source)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    if group.rank != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast([data], source)
    found: list[dict[str, Any]] = json.loads(data.numpy().tobytes())
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(entry: dict[str, Any], device: torch.device) -> torch.device:
    return device if entry["device"] == device.type else torch.device("cpu")
