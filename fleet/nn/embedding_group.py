"""Looks up many tables together, with one request to each server, however many tables there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.nn.embedding import Embedding, asking, is_remote
from fleet.nn.expand import embedded
from fleet.nn.handle import Wanted
from fleet.nn.jagged import like


class EmbeddingGroup(torch.nn.ModuleDict):
    """Maps a dict of ids to a dict of outputs, with an ``Embedding`` for each name, given as ``(num_embeddings,
    embedding_dim)``, or with a dict of its ``admit`` and ``evict`` behind these. Ids may be given for some of the
    tables only, and a dict of ``weights=`` for some of these. ``padding_idx`` and ``initializer`` hold for all tables.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> group = fleet.nn.EmbeddingGroup({"user": (None, 16), "item": (1000, 8)})
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(group.parameters(), lr=0.1), model=group)
        >>> fleet.init_worker()
        >>> found = group({"user": torch.tensor([2**40, 3]), "item": torch.tensor([17])})
        >>> found["user"].shape, found["item"].shape
        (torch.Size([2, 16]), torch.Size([1, 8]))
        >>> fleet.nn.EmbeddingGroup({"user": (None, 16, {"admit": fleet.nn.CountFilter(2)}), "item": (1000, 8)})["user"]
        Embedding(any id, 16, admit=CountFilter(2))
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[int | None, int] | tuple[int | None, int, Mapping[str, Any]]],
        *,
        padding_idx: int | None = None,
        initializer: str | None = None,
    ) -> None:
        if not isinstance(tables, Mapping):
            raise ArgumentTypeError(
                "tables must be a dict of (num_embeddings, embedding_dim)", got=type(tables).__name__
            )
        made = {}
        nothing = torch.nn.ModuleDict()  # which has some of its attributes from __init__ alone
        for name, sizes in tables.items():
            if not isinstance(name, str) or not name or "." in name or hasattr(nothing, name):
                raise ConfigurationError(
                    "a table of a group cannot have this name",
                    expected="text without a dot that is no attribute of torch.nn.ModuleDict",
                    got=repr(name),
                )
            if (
                not isinstance(sizes, tuple | list)
                or not 2 <= len(sizes) <= 3
                or not isinstance(_rules(sizes), Mapping)
            ):
                raise ArgumentTypeError(
                    f"table {name!r} is not described",
                    expected="(num_embeddings, embedding_dim), or with a dict of admit and evict behind them",
                    got=repr(sizes),
                )
            unknown = [each for each in _rules(sizes) if each not in ("admit", "evict")]
            if unknown:
                raise ConfigurationError(
                    f"table {name!r} of a group has unknown options",
                    expected="admit, evict",
                    got=", ".join(map(repr, unknown)),
                )
            made[name] = Embedding(
                sizes[0], sizes[1], padding_idx=padding_idx, initializer=initializer, **_rules(sizes)
            )
        super().__init__(made)

    def forward(
        self, ids: Mapping[str, torch.Tensor], *, weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        asked = {name: each for name, each in self.asking(ids, weights).items() if _is_only_looked_up(self[name])}
        found = dict(zip(asked, embedded(list(asked.values())), strict=True))
        weighed = {name: {"weights": each} for name, each in (weights or {}).items()}
        return {
            name: like(values, found[name]) if name in found else self[name](values, **weighed.get(name, {}))
            for name, values in ids.items()
        }

    def asking(
        self, ids: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Wanted]:
        if not isinstance(ids, Mapping):
            raise ArgumentTypeError("an EmbeddingGroup needs a dict of ids by table", got=type(ids).__name__)
        weights = {} if weights is None else weights
        if not isinstance(weights, Mapping):
            raise ArgumentTypeError("an EmbeddingGroup needs a dict of weights by table", got=type(weights).__name__)
        unknown = [name for name in ids if name not in self]
        if unknown:
            raise ConfigurationError(
                "ids for tables that the group does not have",
                expected=", ".join(self),
                got=", ".join(map(repr, unknown)),
            )
        unknown = [name for name in weights if name not in ids]
        if unknown:
            raise ConfigurationError(
                "weights for tables that are not looked up",
                expected=", ".join(ids),
                got=", ".join(map(repr, unknown)),
            )
        asked = {
            name: asking(self[name], values, weights.get(name)) if is_remote(self[name]) else None
            for name, values in ids.items()
        }
        return {name: each for name, each in asked.items() if each is not None}


def _is_only_looked_up(module: torch.nn.Module) -> bool:
    """Say whether a call of this module would do nothing but look its table up: no hook is told of it, no forward of a
    script's own takes part, and torch's own functions need not see the values."""
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return False
    told = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_told = any(not _is_ours(hook) for hooks in told for hook in hooks.values())
    is_plain = type(module).forward is Embedding.forward and "forward" not in vars(module)
    return is_plain and not is_told and not _has_any_global_hook()  # type: ignore[no-untyped-call]


def _is_ours(hook: object) -> bool:
    """Say whether a hook is one that Fleet has set, as it does on each module of a model that is served."""
    return str(getattr(hook, "__module__", "")).startswith("fleet.")


def _rules(sizes: Any) -> Any:
    """Return what stands behind the two numbers that describe a table."""
    return sizes[2] if len(sizes) == 3 else {}
