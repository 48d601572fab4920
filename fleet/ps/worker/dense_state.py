"""Brings the dense state of a worker, parameters and what optimizers keep of them, to other workers, into checkpoints
and out of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import (
    VALUE,
    Entry,
    cut,
    entries_of,
    joined,
    refuse_loose_state,
    set_state,
    split,
    state_entries,
)
from fleet.checkpoint.pieces import PIECE_BYTES
from fleet.errors import UnsupportedError
from fleet.plan.specs import ParamSpec
from fleet.ps.worker.dense_group import DenseGroup
from fleet.ps.worker.describe import Description

#: Entries of a checkpoint, with a tensor for each that has one.
Piece = tuple[list[dict[str, Any]], list[torch.Tensor]]


def pieces(described: Description) -> list[Piece]:
    """Return copies of all dense parameters and of what optimizers keep of them, as they stand in a checkpoint."""
    refuse_loose_state(described.optimizers)
    found: list[Piece] = []
    left = 0
    for spec, param in zip(described.spec.params, described.params, strict=True):
        whole = list(entries_of(spec.name, 0, param, _owner(described, spec).state.get(param, {})))
        each = sum(tensor.itemsize for entry, tensor in whole if tensor is not None and entry["elementwise"])
        start = 0
        while start < param.numel() or (start == 0 and not param.numel()):
            if left <= 0:
                found.append(([], []))
                left = PIECE_BYTES
            stop = min(param.numel(), start + max(1, left // each))
            told, tensors = split(cut(whole, start, stop))
            found[-1][0].extend(told)
            found[-1][1].extend(tensors)
            left -= sum(tensor.nbytes for tensor in tensors)
            start = max(stop, 1)
    return found


def fill(
    described: Description,
    read: Iterable[tuple[list[dict[str, Any]], Sequence[torch.Tensor]]],
    whole: Collection[str],
    values: Collection[str],
    where: str,
) -> None:
    """Take over what a checkpoint has: parameters and what optimizers keep of them of the ``whole`` ones, parameters
    alone of others."""
    wanted = {spec.name: spec.numel for spec in described.spec.params if spec.name in whole or spec.name in values}
    assembly = Assembly(wanted, where)
    for told, tensors in read:
        assembly.add(told, tensors)
    for spec, param in zip(described.spec.params, described.params, strict=True):
        if spec.name in wanted:
            found, flat = assembly.whole(spec.name)
            with torch.no_grad():
                param.copy_(found[VALUE].view(param.shape))
            owner = _owner(described, spec)
            owner.state.pop(param, None)
            if spec.name in whole and len(found) > 1:
                set_state(owner, param, found, flat)


def _entries(described: Description) -> Iterable[Entry]:
    """Yield what the optimizers keep of the dense parameters."""
    for spec, param in zip(described.spec.params, described.params, strict=True):
        yield from state_entries(spec.name, 0, param, _owner(described, spec).state.get(param, {}))


def _owner(described: Description, spec: ParamSpec) -> torch.optim.Optimizer:
    return described.optimizers[described.spec.groups[spec.group].optimizer]


def hand_over(group: DenseGroup, described: Description, source: int, loads: int, *, takes: bool = True) -> int:
    """Give all what the rank ``source`` has; who ``takes`` it not has the same, and may be in a backward that needs it
    as it is. ``loads`` is how often its values have been replaced; return what that is for all now."""
    gives = group.rank == source
    told: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    if gives:
        for entry, tensor in _entries(described):
            kind = {}
            if tensor is not None:
                kind = {"shape": list(tensor.shape), "dtype": _name(tensor.dtype), "device": tensor.device.type}
                tensors.append(tensor)
            told.append({**entry, **kind})
    loads, told = told_by(group, source, [loads, told])
    device = described.params[0].device if described.params else torch.device("cpu")
    if not gives:
        tensors = [
            torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]), device=_place(each, device))
            for each in told
            if "plain" not in each
        ]
    params = described.params if gives or takes else [torch.empty_like(each) for each in described.params]
    group.broadcast([*params, *tensors], source)
    if takes and not gives:
        _take(described, told, tensors)
    return loads


def _take(described: Description, told: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> None:
    found: dict[str, dict[str, Any]] = {spec.name: {} for spec in described.spec.params}
    for entry, tensor in joined(told, tensors):
        found[entry["param"]][entry["key"]] = entry["plain"] if tensor is None else tensor
    for spec, param in zip(described.spec.params, described.params, strict=True):
        owner = _owner(described, spec)
        owner.state.pop(param, None)
        if found[spec.name]:
            set_state(owner, param, found[spec.name], set())


def told_by(group: DenseGroup, source: int, told: Any) -> Any:
    """Return what the rank ``source`` has told, in JSON."""
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
    return json.loads(data.numpy().tobytes())


class DenseOptions:
    """Reads and writes the options by which a worker's optimizers step on dense parameters: those that are plain."""

    def __init__(self, described: Description) -> None:
        spec, groups = described.spec, sorted({param.group for param in described.spec.params})
        self._groups = [
            (described.groups[index], [*described.optimizers[spec.groups[index].optimizer].defaults])
            for index in groups
        ]

    def read(self) -> list[dict[str, Any]]:
        return [
            {name: value for name in names if (value := _plain(group.get(name))) is not None}
            for group, names in self._groups
        ]

    @property
    def digest(self) -> int:
        """Return two bytes, never zero, that others are with other options."""
        return 1 + zlib.crc32(repr(self.read()).encode()) % 0xFFFF

    @contextmanager
    def being(self, values: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Let these be the options of a step."""
        own = self.read()
        self._write(values)
        try:
            yield
        finally:
            self._write(own)

    def _write(self, values: Sequence[Mapping[str, Any]]) -> None:
        for (group, _), new in zip(self._groups, values, strict=True):
            for name, value in new.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _plain(value: Any) -> Any:
    """Return an option as JSON has it; None where it is not that plain, or would have to come from a device."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.is_cpu else None
    if isinstance(value, tuple):
        return list(value) if all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, int | float | str) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(entry: dict[str, Any], device: torch.device) -> torch.device:
    return device if entry["device"] == device.type else torch.device("cpu")
