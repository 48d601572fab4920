"""The models as PyTorch modules, for every program that trains them with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import torch
from work import FEATURES, SLOTS, Work, clicks, vectors, vectors_and_ids

torch.set_num_threads(1)


def batches(work: Work) -> list[tuple[torch.Tensor, ...]]:
    made = {"ctr": clicks, "dense": vectors, "both": vectors_and_ids}[work.model](work)
    return as_tensors(made)


def as_tensors(made: list[tuple[np.ndarray, ...]]) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(map(torch.from_numpy, batch)) for batch in made]


def layers(sizes: Iterable[int]) -> torch.nn.Sequential:
    torch.manual_seed(0)
    modules: list[torch.nn.Module] = []
    for width_in, width_out in pairwise(sizes):
        linear = torch.nn.Linear(width_in, width_out)
        torch.nn.init.xavier_uniform_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        modules += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*modules[:-1])


def top(work: Work) -> torch.nn.Sequential:
    """What comes after the rows."""
    return layers([SLOTS * work.dim + FEATURES, *[work.width] * 3, 2])


class OneTable(torch.nn.Module):
    """Rows of all slots side by side, from one table."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).flatten(1)


class TableEach(torch.nn.Module):
    """The same from a table of each slot's own."""

    def __init__(self, tables: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(tables)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(slot) for table, slot in zip(self.tables, ids.unbind(1), strict=True)], 1)


class ClickModel(torch.nn.Module):
    def __init__(self, work: Work, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.top = top(work)
        self.device = work.device
        self.to(work.device)

    def loss(self, ids: torch.Tensor, numbers: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        ids, numbers, clicked = (each.to(self.device) for each in (ids, numbers, clicked))
        scores = self.top(torch.cat([self.rows(ids), numbers], 1))
        return torch.nn.functional.cross_entropy(scores, clicked)


class DenseModel(torch.nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = layers([work.width] * 5)

    def loss(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(given), wanted)


class RowsAndLayers(torch.nn.Module):
    """Layers whose input begins with rows of a table."""

    def __init__(self, work: Work, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.top = layers([work.width] * 5)

    def loss(self, ids: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        return torch.nn.functional.mse_loss(self.top(torch.cat([rows, given[:, rows.shape[1] :]], 1)), wanted)


def make_model(work: Work, make_rows: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    if work.model == "dense":
        return DenseModel(work)
    return (ClickModel if work.model == "ctr" else RowsAndLayers)(work, make_rows())
