"""Brings the dense state of a worker, parameters and what optimizers keep of them, to other workers, into checkpoints
and out of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
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
from fleet.numeric.tensors import dtype_name
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


def hand_over(
    group: DenseGroup, described: Description, options: DenseOptions, source: int, loads: int, *, takes: bool = True
) -> int:
    """Give all what the rank ``source`` has, and what its steps have changed of ``options``; who ``takes`` it not has
    the same, and may be in a backward that needs it as it is. ``loads`` is how often its values have been replaced;
    return what that is for all now."""
    gives = group.rank == source
    told: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    if gives:
        for entry, tensor in _entries(described):
            kind = {}
            if tensor is not None:
                kind = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "device": tensor.device.type}
                tensors.append(tensor)
            told.append({**entry, **kind})
    loads, told, moved = told_by(group, source, [loads, told, options.moved()])
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
        options.move(moved)
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
    size = torch.tensor([len(text)], device="cpu")
    group.broadcast([size], source)
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    if group.rank != source:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    group.broadcast([data], source)
    return json.loads(data.numpy().tobytes())


class DenseOptions:
    """Reads and writes the options by which a worker's optimizers step on dense parameters: numbers, text, tensors of
    one number that are on the CPU, and lists of such."""

    def __init__(self, described: Description, moving: Collection[tuple[int, str]] = ()) -> None:
        spec = described.spec
        self._groups = {
            index: (described.groups[index], [*described.optimizers[spec.groups[index].optimizer].defaults])
            for index in sorted({param.group for param in spec.params})
        }
        #: by group and name, those that steps themselves have changed: some classes count there
        self.moving = {*moving}

    def read(self) -> list[dict[str, Any]]:
        return [
            {name: told for name in names if name in group and (told := _told(group[name])) is not _UNTOLD}
            for group, names in self._groups.values()
        ]

    @property
    def digest(self) -> int:
        """Return four bytes, never zero, that others are with other options."""
        return 1 + zlib.crc32(json.dumps(self.read()).encode()) % 0xFFFFFFFF

    @contextmanager
    def of_a_step(self, leading: Sequence[Mapping[str, Any]] | None) -> Iterator[None]:
        """Let these be the options of a step, if there are any. What the step itself changes of them stays."""
        own: list[dict[str, tuple[Any, Any]]] = []
        if leading is not None:
            own = [
                {name: (group[name], _told(group[name])) for name in names if name in group}
                for group, names in self._all
            ]
        for (group, _), new in zip(self._all, leading or (), strict=leading is not None):
            group.update({name: _made(told, group.get(name)) for name, told in new.items()})
        before = self.read()
        try:
            yield
        finally:
            for index, was, now in zip(self._groups, before, self.read(), strict=True):
                if now == was:  # as nearly always
                    continue
                self.moving |= {(index, name) for name in now if json.dumps(now[name]) != json.dumps(was.get(name))}
            if leading is not None:
                self._put_back(own)

    def _put_back(self, own: Sequence[Mapping[str, tuple[Any, Any]]]) -> None:
        """Let options be again what they were, each with how that is told, but those that steps change."""
        for (index, (group, _)), mine in zip(self._groups.items(), own, strict=True):
            for name, (value, told) in mine.items():
                if (index, name) not in self.moving:
                    group[name] = value
                    if told is not _UNTOLD:
                        _made(told, value)  # as tensors have stayed the same ones

    def moved(self) -> list[tuple[int, str, Any]]:
        """Return those that steps change, as they are now."""
        found = [(index, name, _told(self._groups[index][0].get(name))) for index, name in sorted(self.moving)]
        return [each for each in found if each[2] is not _UNTOLD]

    def move(self, moved: Iterable[tuple[int, str, Any]]) -> None:
        """Take over what steps of another worker have changed."""
        for index, name, told in moved:
            group = self._groups[index][0]
            group[name] = _made(told, group.get(name))
            self.moving.add((index, name))

    @property
    def _all(self) -> Collection[tuple[dict[str, Any], list[str]]]:
        return self._groups.values()


#: Stands for an option that is not told: an object, or a tensor that would have to come from a device.
_UNTOLD = object()


def _told(value: Any) -> Any:
    """Return an option as JSON has it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or not value.is_cpu:
            return _UNTOLD
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return _told(value.item())
    if isinstance(value, tuple | list):
        told = [_told(each) for each in value]
        return _UNTOLD if _UNTOLD in told else told
    return value if value is None or isinstance(value, int | float | str) else _UNTOLD


def _made(told: Any, like: Any) -> Any:
    """Return what an option is that was told so, in place of one that is ``like`` this: a tensor stays the same one."""
    if isinstance(told, dict):
        dtype = getattr(torch, told["dtype"])
        if not isinstance(like, torch.Tensor) or like.dtype != dtype or list(like.shape) != told["shape"]:
            return torch.full(told["shape"], told["tensor"], dtype=dtype, device="cpu")
        return like.fill_(told["tensor"])
    if isinstance(told, list):
        places = like if isinstance(like, tuple | list) and len(like) == len(told) else [None] * len(told)
        made = [_made(each, place) for each, place in zip(told, places, strict=True)]
        return tuple(made) if isinstance(like, tuple) else made
    return told


def _place(entry: dict[str, Any], device: torch.device) -> torch.device:
    return device if entry["device"] == device.type else torch.device("cpu")
