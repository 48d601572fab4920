"""Has models of several tables, some of which a forward looks up together, for habits that were written for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import fleet.nn
from habits.habit import DIM, ROWS, Net


class Side(Net):
    """Has three tables: two that each forward looks up for all fields, and one for a field alone."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.side = torch.nn.Embedding(ROWS, DIM, sparse=sparse)
        self.third = torch.nn.Embedding(ROWS, DIM, sparse=sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids) + self.side(ids) ** 2 + self.third(ids[:, 1])[:, None]
        return self.above(found.flatten(1))


class Bags(Net):
    """Has two tables that sum up what they find, and one that does not."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.table = torch.nn.EmbeddingBag(ROWS, DIM, sparse=sparse, mode="sum")
        self.side = torch.nn.EmbeddingBag(ROWS, DIM, sparse=sparse)
        self.third = torch.nn.Embedding(ROWS, DIM, sparse=sparse)
        self.hidden = torch.nn.Linear(DIM, 5, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.above(self.table(ids) + self.side(ids) ** 2 + self.third(ids[:, 1]))


class Group(torch.nn.ModuleDict):
    """Is what an ``EmbeddingGroup`` is in plain torch."""

    def forward(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self[name](values) for name, values in ids.items()}


def group_of_two(sparse: bool) -> torch.nn.ModuleDict:
    """Return the tables of a group, on the servers where they are ``sparse``."""
    names = ("table", "side")
    if sparse:
        return fleet.nn.EmbeddingGroup(dict.fromkeys(names, (ROWS, DIM)), initializer="constant(0.1)")
    group = Group({name: torch.nn.Embedding(ROWS, DIM) for name in names})
    for each in group.values():
        torch.nn.init.constant_(each.weight, 0.1)
    return group


class Grouped(Net):
    """Has two tables in a group, which each forward asks for at once."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        del self.table
        self.group = group_of_two(sparse)

    def __getattr__(self, name: str) -> Any:
        if name == "table" and "group" in self._modules:
            return self.group["table"]
        return super().__getattr__(name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.group({"table": ids, "side": ids})
        # Rows are alike in the beginning, which a norm over the batch would make rounding errors of.
        return self.above(((2 + torch.sin(ids))[..., None] * found["table"] + found["side"] ** 2).flatten(1))


NETS: Mapping[str, Callable[[bool], torch.nn.Module]] = {"three tables": Side, "bags": Bags, "a group": Grouped}
