"""Chooses which of a model's embeddings have their rows on the servers, and turns those into remote ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from fleet.errors import ArgumentTypeError, UnsupportedError
from fleet.nn.embedding import check_remote, make_remote, refuse_idle_rules
from fleet.nn.table_weight import TableWeight
from fleet.nn.trainables import members
from fleet.ps.worker.describe import check_table

#: What the user says: ``"sparse"``, ``"all"``, or a function of an embedding's name and itself.
Remote: TypeAlias = str | Callable[[str, torch.nn.Module], bool]

#: What may go remote.
Torchs: TypeAlias = torch.nn.Embedding | torch.nn.EmbeddingBag


class RemoteChoice:
    """Decides once for every embedding that is trained: one that becomes trainable in a running job stays where it
    is."""

    def __init__(self, remote: Remote) -> None:
        """``remote`` is what ``distributed_optimizer`` was given, and known to be one of what it takes."""
        self._remote = remote
        self._decided: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    def go_remote(self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> None:
        """Turn the chosen ones among the model's embeddings that the optimizers have; all or none, if one of them
        cannot go."""
        if model is None:
            return
        given = {id(member.param): member for member in members(optimizers, model)}
        for name, module in model.named_modules():
            if id(getattr(module, "weight", None)) in given:
                refuse_idle_rules(module, name or type(model).__name__)
        trained = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Torchs) and not isinstance(module.weight, TableWeight) and id(module.weight) in given
        }
        chosen = {name: module for name, module in trained.items() if self._takes(name, module)}
        for name, module in chosen.items():
            check_remote(module, name or type(model).__name__)
            check_table(given[id(module.weight)])
        for module in chosen.values():
            make_remote(module)

    def _takes(self, name: str, module: Torchs) -> bool:
        if module not in self._decided:
            self._decided[module] = self._decide(name, module)
        return self._decided[module]

    def _decide(self, name: str, module: Torchs) -> bool:
        if self._remote == "sparse":
            return module.sparse
        if self._remote == "all":
            return module.sparse or module.weight.requires_grad  # what is frozen has nothing to gain there
        assert callable(self._remote)
        answer = self._remote(name, module)
        if not isinstance(answer, bool):
            raise ArgumentTypeError(
                f"the function given as remote= did not say whether {name!r} goes remote",
                expected="True or False",
                got=repr(answer),
            )
        if module.sparse and not answer:
            raise UnsupportedError(
                f"{name!r} has sparse gradients and is to stay on the workers; servers take such for rows only",
                todo="Let the function given as remote= return True for it, or make it with sparse=False.",
            )
        return answer
