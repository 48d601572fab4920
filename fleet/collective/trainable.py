"""Refuses by name what cannot train the same on every worker of a collective job."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleet.errors import UnsupportedError
from fleet.nn.embedding import is_remote, refuse_idle_rules
from fleet.nn.table_weight import TableWeight
from fleet.nn.trainables import refuse_uninitialized


def refuse_untrainable(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS cannot be honoured: it decides by the loss, which differs between workers",
                todo="Take one that goes by gradients alone, such as torch.optim.Adam, or train in one process.",
            )
    for name, value in [] if model is None else (*model.named_parameters(), *model.named_buffers()):
        refuse_uninitialized(name, value)
    for name, module in [] if model is None else model.named_modules():
        refuse_idle_rules(module, name)
        is_table = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if is_table or (is_remote(module) and isinstance(module.weight, TableWeight)):
            raise UnsupportedError(
                f"{name!r} is a sparse table, and a collective job has no servers to hold it",
                todo="Use torch.nn.Embedding(sparse=False), or a parameter-server job.",
            )


def refuse_remote(remote: object) -> None:
    if remote != "sparse":
        raise UnsupportedError(
            f"remote={remote!r} cannot be honoured: a collective job has no servers to hold rows",
            todo="Leave it out, or start a parameter-server job.",
        )
