"""What the user's optimizers train, by name: the same names in the same order on every worker, in every kind of job,
and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet.errors import ConfigurationError


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
    for index, (position, number, optimizer, group) in enumerate(groups(optimizers)):
        given = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if id(param) in found:
                raise ConfigurationError(
                    f"the parameter {found[id(param)].name!r} stands in two groups",
                    todo="Give each parameter to one group of one optimizer.",
                )
            name = by_model.get(id(param), given[place] if given else f"group{number}.param{place}")
            if id(param) not in by_model and (not given or len(optimizers) > 1):
                name = f"optimizer{position}.{name}"  # each optimizer has names of its own
            found[id(param)] = Member(name, param, optimizer, index, group)
    names = [member.name for member in found.values()]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigurationError(
            f"parameters share a name: {', '.join(twice)}",
            todo="Pass model= to distributed_optimizer, which names them, or give the optimizer other names.",
        )
    return list(found.values())


def groups(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[int, int, torch.optim.Optimizer, dict[str, Any]]]:
    """Every group with the position of its optimizer and its own number there."""
    for position, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            yield position, number, optimizer, group
