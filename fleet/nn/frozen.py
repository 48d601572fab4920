"""Freezes remote embeddings for serving: replaces them by modules of plain torch.

Each holds the sorted ids of its table and a matrix with their rows, and finds the row of an id by binary search. Below
the rows the matrix has one of the initializer's mean, which unknown ids read as they do in evaluation, and one of
zeros, for padding. So nothing in a look-up branches on data, and ``torch.export`` can follow it. Weights of look-ups
mean nothing here, where none is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fleet.errors import ArgumentTypeError, UnsupportedError
from fleet.nn.embedding import BAGS, EMBEDDINGS, looks_up_as
from fleet.nn.embedding_group import EmbeddingGroup
from fleet.nn.jagged import bag_parts, flat, like


@dataclass(frozen=True, eq=False)
class FrozenTable:
    """Holds a table's rows for sorted ids. ``mean`` is what other ids read; with ``zero_padding`` the padding id reads
    zeros, and not its row."""

    ids: torch.Tensor
    rows: torch.Tensor
    num_embeddings: int | None
    mean: float
    zero_padding: bool


class _Frozen(torch.nn.Module):
    ids: torch.Tensor
    weight: torch.Tensor

    def __init__(self, source: Any, table: FrozenTable) -> None:
        super().__init__()
        ids, rows = table.ids, table.rows
        if not len(ids):
            # A search needs an id to end at. With the mean for its row this one is as unknown as any other.
            ids, rows = ids.new_zeros(1), rows.new_full((1, rows.shape[1]), table.mean)
        self.num_embeddings = table.num_embeddings
        self.embedding_dim = rows.shape[1]
        self.padding_idx: int | None = source.padding_idx
        self.register_buffer("ids", ids)
        self.register_buffer(
            "weight", torch.cat([rows, rows.new_tensor([[table.mean], [0.0]]).expand(2, rows.shape[1])])
        )
        self._unknown = len(ids)
        self._padding = self._unknown + 1
        self._nowhere = self._unknown + 2

    def _places(self, ids: torch.Tensor, pads: bool) -> torch.Tensor:
        """Return where in the matrix each id's row is."""
        ids = ids.long().contiguous()
        found = torch.searchsorted(self.ids, ids).clamp(max=self._unknown - 1)
        places = torch.where(self.ids[found] == ids, found, self._unknown)
        if pads and self.padding_idx is not None:
            places = torch.where(ids == self.padding_idx, self._padding, places)
        if self.num_embeddings is not None:
            # torch refuses a place that the matrix does not have, as it does in an embedding of this size.
            places = torch.where((ids >= 0) & (ids < self.num_embeddings), places, self._nowhere)
        return places

    def extra_repr(self) -> str:
        size = "any id" if self.num_embeddings is None else self.num_embeddings
        return f"{size}, {self.embedding_dim}, rows={self._unknown}"


def _given(ids: torch.Tensor | None, as_torch_names_them: torch.Tensor | None) -> torch.Tensor:
    """Return the ids that a forward was given: by ``fleet.nn``'s name for them or, where it stands for one of torch's
    embeddings, by torch's."""
    given = [each for each in (ids, as_torch_names_them) if each is not None]
    if len(given) != 1:
        raise ArgumentTypeError(f"an embedding was called {'with two sets of' if given else 'without'} ids")
    return given[0]


class FrozenEmbedding(_Frozen):
    def __init__(self, source: Any, table: FrozenTable) -> None:
        super().__init__(source, table)
        self._pads = table.zero_padding

    def forward(
        self,
        ids: torch.Tensor | None = None,
        *,
        input: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        ids = _given(ids, input)
        return like(ids, F.embedding(self._places(flat(ids), self._pads), self.weight))


class FrozenEmbeddingBag(_Frozen):
    def __init__(self, source: Any, table: FrozenTable) -> None:
        super().__init__(source, table)
        self.mode: str = source.mode
        self.include_last_offset: bool = source.include_last_offset

    def forward(
        self,
        ids: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        input: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        ids = _given(ids, input)
        offsets, per_sample_weights, has_last_offset = bag_parts(self, ids, offsets, per_sample_weights)
        return F.embedding_bag(
            self._places(flat(ids), pads=True),
            self.weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=has_last_offset,
            padding_idx=None if self.padding_idx is None else self._padding,
        )


class FrozenEmbeddingGroup(torch.nn.ModuleDict):
    def forward(
        self,
        ids: Mapping[str, torch.Tensor],
        *,
        weights: Mapping[str, torch.Tensor] | None = None,  # noqa: ARG002
    ) -> dict[str, torch.Tensor]:
        return {name: self[name](values) for name, values in ids.items()}


def freeze(
    model: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    tables: Mapping[str, FrozenTable],
    instead: Mapping[int, object],
) -> torch.nn.Module:
    """Return a deep copy in evaluation mode, on the CPU, with these ``values`` for its parameters and buffers and with
    frozen embeddings for its ``tables``, all by the names that ``state_dict`` has for them.

    ``instead``: by identity, what else the copy is to have another object for.
    """
    # Whatever refers to one of these refers to its stand-in in the copy: a module's attributes, lists and closures too.
    stand_ins: dict[int, Any] = dict(instead)
    for name, module in model.named_modules():
        table = tables.get(f"{name}.weight" if name else "weight")
        if table is not None:
            stand_ins[id(module)] = _frozen(name, module, table)
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingGroup):
            _refuse_subclass(name, module, EmbeddingGroup)
            stand_ins[id(module)] = FrozenEmbeddingGroup({key: stand_ins[id(each)] for key, each in module.items()})
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in values and id(param) not in stand_ins:
            stand_ins[id(param)] = torch.nn.Parameter(_lying_as(param, values[name]), requires_grad=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in values:
            stand_ins[id(buffer)] = _lying_as(buffer, values[name])
    try:
        copied = copy.deepcopy(model, stand_ins)
    except Exception as error:
        raise UnsupportedError(
            "the model cannot be copied",
            where=type(model).__name__,
            got=f"{type(error).__name__}: {error}",
            todo="Keep what copy.deepcopy cannot copy (files, locks, connections) out of the model's attributes.",
        ) from error
    return copied.to("cpu").eval()


def _lying_as(given: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values in the order in memory that a tensor has: what is computed of them depends on it, in the last
    bits."""
    if values.shape != given.shape or values.stride() == given.stride():
        return values  # as they are: of a table its rows alone are here
    return torch.empty_like(given, device="cpu").copy_(values)


def _frozen(name: str, module: torch.nn.Module, table: FrozenTable) -> torch.nn.Module:
    holds_more = {*module._modules, *module._buffers, *module._parameters} != {"weight"}  # which its stand-in has not
    kind = None if holds_more else looks_up_as(module)
    if kind in EMBEDDINGS:
        return FrozenEmbedding(module, table)
    if kind in BAGS:
        return FrozenEmbeddingBag(module, table)
    raise _unknown_class(name, module, "fleet.nn's or torch.nn's own Embedding or EmbeddingBag")


def _refuse_subclass(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    if type(module) is not kind:
        raise _unknown_class(name, module, f"fleet.nn.{kind.__name__} itself")


def _unknown_class(name: str, module: torch.nn.Module, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} cannot be frozen: its class may do more than look rows up",
        expected=expected,
        got=f"{type(module).__module__}.{type(module).__qualname__}",
        todo="Let the model hold one of these and do the rest around it.",
    )
