"""Describes one parameter, or one block of it, in a checkpoint: its values, and the state of its optimizer.

An entry tells which parameter, which of its elements, which key ("value", or "state." and torch's name), and whether
the tensor has one number for each of these elements; what is no tensor stands in the entry itself, as "plain".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fleet.errors import UnsupportedError

VALUE, STATE = "value", "state."

#: What torch makes at a parameter's first step alone, where an option is on: beside which other state.
_OPTIONAL = (
    ("exp_avg_sq", "amsgrad", "max_exp_avg_sq"),
    ("square_avg", "centered", "grad_avg"),
    ("square_avg", "momentum", "momentum_buffer"),
)

#: An entry, and its tensor if it has one.
Entry = tuple[dict[str, Any], torch.Tensor | None]


def entries_of(name: str, offset: int, param: torch.Tensor, state: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the entries of ``param``, a whole parameter or the block of it that begins at ``offset``; ``state`` is its
    optimizer's."""
    yield {**_place(name, offset, param), "key": VALUE, "elementwise": True}, param.detach().reshape(-1)
    yield from state_entries(name, offset, param, state)


def state_entries(name: str, offset: int, param: torch.Tensor, state: Mapping[str, Any]) -> Iterator[Entry]:
    for key, value in state.items():
        entry = {**_place(name, offset, param), "key": f"{STATE}{key}"}
        is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not isinstance(key, str) or not (is_tensor or _is_plain(value)):
            raise UnsupportedError(
                f"the optimizer's state {key!r} of {name!r} is {type(value).__name__}, which no checkpoint holds",
                expected="a name that is text; a dense tensor, a number, text, None, or a list of the last three",
                todo="Let the optimizer keep it as one of these, under a name of its own each.",
            )
        if is_tensor:
            # State of the parameter's own shape is cut with it; anything else belongs to the whole.
            yield {**entry, "elementwise": value.shape == param.shape}, value
        else:
            yield {**entry, "plain": value}, None


def refuse_loose_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse state that belongs to no parameter: a checkpoint would be without it."""
    for optimizer in optimizers:
        for key in optimizer.state:
            if not isinstance(key, torch.Tensor):
                raise UnsupportedError(
                    f"the state {key!r} of {type(optimizer).__name__} belongs to no parameter: no checkpoint holds it",
                    todo="Let the optimizer keep it in the state of a parameter, state[param][name].",
                )


def _is_plain(value: object) -> bool:
    """Say whether JSON gives back what it was given."""
    return value is None or isinstance(value, int | float | str) or (type(value) is list and all(map(_is_plain, value)))


def _place(name: str, offset: int, param: torch.Tensor) -> dict[str, Any]:
    return {"param": name, "offset": offset, "numel": param.numel()}


def cut(entries: Iterable[Entry], start: int, stop: int) -> Iterator[Entry]:
    """Yield the entries of a block's elements from ``start`` to ``stop``; an entry for all elements goes with the first
    part."""
    for entry, tensor in entries:
        if tensor is not None and entry["elementwise"] and stop - start < tensor.numel():
            part = tensor.reshape(-1)[start:stop]
            yield {**entry, "offset": entry["offset"] + start, "numel": part.numel()}, part
        elif start == 0:
            yield entry, tensor


def names(told: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what the tensors of entries are called in a file."""
    return [
        f"{each['param']}[{each['offset']}:{each['offset'] + each['numel']}]/{each['key']}"
        for each in told
        if "plain" not in each
    ]


def split(entries: Iterable[Entry]) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Separate entries from tensors, as they are sent and written. Tensors are copied, since training goes on and a
    file's tensors may share no memory."""
    told, tensors = [], []
    for entry, tensor in entries:
        told.append(entry)
        if tensor is not None:
            tensors.append(tensor.detach().to("cpu", copy=True))
    return told, tensors


def joined(told: Iterable[dict[str, Any]], tensors: Iterable[torch.Tensor]) -> list[Entry]:
    """Join each entry with its tensor, which ``split`` has separated."""
    arriving = iter(tensors)
    return [(entry, None if "plain" in entry else next(arriving)) for entry in told]


def set_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, pieces: Mapping[str, Any], flat: set[str]) -> None:
    """Give a parameter the optimizer state among ``pieces``, by key, in place of what it has; ``flat`` names the keys
    that have a number for each of its elements. Tensors are copied: blocks of one parameter get the same ones, and
    torch alters its own."""
    before = optimizer.state.get(param, {})
    state: dict[str, Any] = {}
    for key, value in pieces.items():
        if not key.startswith(STATE):
            continue
        name = key.removeprefix(STATE)
        if isinstance(value, torch.Tensor):
            present = before.get(name)
            # A step count that torch has not placed itself is on the CPU: only capturable optimizers want it elsewhere.
            default = torch.device("cpu") if name == "step" else param.device
            device = present.device if isinstance(present, torch.Tensor) else default
            value = (value.reshape(param.shape) if key in flat else value).to(device, copy=True)
        state[name] = value
    if state:
        optimizer.state[param] = state | _made_up(optimizer, param, state)
    elif before.get("step") != 0:  # some optimizers are made with state that no step has changed, and need it
        optimizer.state.pop(param, None)


def _made_up(optimizer: torch.optim.Optimizer, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer needs beside a state that was kept under other options, as torch begins with it."""
    lacking = [(beside, option, name) for beside, option, name in _OPTIONAL if beside in state and name not in state]
    if not lacking:
        return {}
    group = next(group for group in optimizer.param_groups if any(each is param for each in group["params"]))
    return {name: torch.zeros_like(state[beside]) for beside, option, name in lacking if group.get(option)}
