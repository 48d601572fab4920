"""What is trained, by name: the same names in the same order on every worker, and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet.errors import ConfigurationError, UnsupportedError


@dataclass(frozen=True)
class Member:
    """One parameter with its place: its optimizer, the number of its param group, counted over all optimizers, and
    that group itself."""

    name: str
    param: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    group: int
    options: dict[str, Any]


def members(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> list[Member]:
    """All parameters of the optimizers; named by the model, by torch's optimizer where it was given names, or else by
    their positions."""
    by_model = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    found: dict[int, Member] = {}
    group_number = -1
    for position, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            group_number += 1
            given = group.get("param_names")
            for place, param in enumerate(group["params"]):
                if id(param) in found:
                    raise ConfigurationError(f"the parameter {found[id(param)].name!r} stands in two groups")
                name = by_model.get(id(param), given[place] if given else f"group{number}.param{place}")
                if id(param) not in by_model and (not given or len(optimizers) > 1):
                    name = f"optimizer{position}.{name}"  # each optimizer has names of its own
                found[id(param)] = Member(name, param, optimizer, group_number, group)
    names = [member.name for member in found.values()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"parameters share a name: {', '.join(twice)}")
    return list(found.values())


def refuse_untrainable(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> None:
    """What cannot train the same on every worker is refused by name."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError("LBFGS cannot be honoured: it decides by the loss, which differs between workers")
    for name, module in [] if model is None else model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if is_table or "_handle" in module.__dict__:
            raise UnsupportedError(
                f"{name!r} is a sparse table, and a collective job has no servers to hold it",
                todo="Use torch.nn.Embedding(sparse=False), or a parameter-server job.",
            )
