"""Connects an embedding module to the servers: ids go out, rows come in, gradients of rows are collected.

A handle hangs on the module's ``weight`` (``handle_of``) and stands for the table on the servers. Gradients of rows
are collected in ``weight.grad`` (see gradient.py).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from fleet.base import checks
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    IdOutOfRangeError,
    NotInitializedError,
    UnsupportedError,
)
from fleet.nn.gradient import Entry, RowGradient
from fleet.nn.trainables import check_type
from fleet.numeric.compiler import uncompiled
from fleet.numeric.jit import Ids
from fleet.plan.specs import Initializer

_ATTRIBUTE = "_fleet_handle"

#: Backwards of several threads may come to one table, as torch lets them come to one parameter.
_collecting = threading.Lock()

#: What a table is called until a job gives it its name.
_UNNAMED = "an embedding"


@dataclass(frozen=True)
class Lookup:
    """Distinct ids of one forward, their rows, and for every id asked for its place among them."""

    ids: torch.Tensor
    rows: torch.Tensor
    inverse: torch.Tensor


class Wanted(NamedTuple):
    """Ids of one table that a forward asks for."""

    handle: TableHandle
    ids: torch.Tensor
    training: bool


class Asking(NamedTuple):
    """A module's forward that needs rows."""

    handle: TableHandle
    ids: torch.Tensor
    training: bool
    padding_idx: int | None
    weight: torch.Tensor


class RowSource(Protocol):
    """What a running job offers to its embeddings."""

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]: ...


class Found(NamedTuple):
    """What an embedding goes on with: rows, the place of every id among them in the shape of the ids, and the padding
    row's place."""

    rows: torch.Tensor
    inverse: torch.Tensor
    padding: int | None


class TableHandle:
    def __init__(
        self,
        weight: torch.nn.Parameter,
        num_embeddings: int | None,
        dim: int,
        initializer: Initializer,
        *,
        padding_idx: int | None = None,
        zero_padding: bool = True,
        uploaded: bool = False,
    ) -> None:
        """``zero_padding``: the padding row reads as zeros; ``uploaded``: the rows start from ``weight``'s values."""
        self.weight = weight
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.initializer = initializer
        self.padding_idx = padding_idx
        self.zero_padding = zero_padding
        self.uploaded = uploaded
        self.source: RowSource | None = None
        self.name = _UNNAMED
        setattr(weight, _ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableHandle:
        """A copy of a model that stands in a job (an average of weights, say) looks at the same table; before that
        it is a model of its own, as any other copy."""
        weight = copy.deepcopy(self.weight, memo)
        if self.name == _UNNAMED:
            return TableHandle(
                weight,
                self.num_embeddings,
                self.dim,
                self.initializer,
                padding_idx=self.padding_idx,
                zero_padding=self.zero_padding,
                uploaded=self.uploaded,
            )
        setattr(weight, _ATTRIBUTE, self)
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} cannot be pickled: its rows live on the servers",
            todo="Save the job with fleet.save_persistables(dirname), or the model's state_dict for its dense part.",
        )

    def running(self) -> RowSource:
        """The job that this table belongs to."""
        if self.source is None:
            raise NotInitializedError(
                f"{self.name} was asked for rows before its job was there",
                todo="Hand its weight to an optimizer, that to fleet.distributed_optimizer, then fleet.init_worker().",
            )
        return self.source

    def wanted(self, ids: torch.Tensor, training: bool) -> Wanted:
        """Whether the ids are in range is for the job to see, which looks at each of them once."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            got = getattr(ids, "dtype", type(ids).__name__)
            raise ArgumentTypeError(f"{self.name} needs a tensor of int64 or int32 ids", got=got)
        return Wanted(self, ids, training)

    def found(self, lookup: Lookup, ids: torch.Tensor, padding_idx: int | None, weight: torch.Tensor) -> Found:
        """A lookup as the asking module needs it, with its gradient collected here.

        ``weight`` is the asking module's: a copy of a model reads the same rows, and its backward trains nothing.
        """
        if weight is self.weight:
            check_type(self.name, weight, lookup.rows.dtype)
        rows = lookup.rows.to(ids.device)
        padding: int | None = None
        if padding_idx is not None:
            found = (lookup.ids == padding_idx).nonzero()
            if len(found):
                padding = int(found[0])
                if self.zero_padding:
                    rows[padding].zero_()
        if torch.is_grad_enabled() and weight.requires_grad:
            rows.requires_grad_()
            if weight is self.weight:
                collect = partial(self._collect, lookup.ids, padding)
                rows.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        return Found(rows, lookup.inverse.to(ids.device).view(ids.shape), padding)

    def has(self, ids: Ids) -> bool:
        """Whether they are in range."""
        return self.num_embeddings is None or not ids.size or bool(ids.min() >= 0 and ids.max() < self.num_embeddings)

    def check_range(self, ids: Ids) -> None:
        if not self.has(ids):
            low, high = int(ids.min()), int(ids.max())
            raise IdOutOfRangeError(
                f"an id is out of range for {self.name}",
                expected=f"0 <= id < {self.num_embeddings}",
                got=low if low < 0 else high,
            )

    def _collect(self, ids: torch.Tensor, padding: int | None, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if padding is not None:
            keep = torch.arange(len(ids)) != padding
            ids, grad = ids[keep], grad[keep.to(grad.device)]
        entry = ids, grad.detach().cpu()
        with _collecting:
            if not isinstance(self.weight.grad, RowGradient):
                self.weight.grad = RowGradient.of(self.weight)
            self.weight.grad.entries.append(entry)

    def collected(self) -> list[Entry]:
        """The gradients since they were last dropped.

        Empty: no backward came through here. An entry without ids: one did, and touched no row.
        """
        return self.weight.grad.entries if isinstance(self.weight.grad, RowGradient) else []


@uncompiled
def look_up(asking: Sequence[Asking]) -> list[Found]:
    """The rows that several tables of one job are asked for, with as few requests as for one."""
    if not asking:
        return []
    source = asking[0].handle.running()
    for each in asking:
        if each.handle.running() is not source:
            raise ConfigurationError(f"{each.handle.name} and {asking[0].handle.name} belong to different jobs")
    lookups = source.lookup([each.handle.wanted(each.ids, each.training) for each in asking])
    return [
        each.handle.found(lookup, each.ids, each.padding_idx, each.weight)
        for each, lookup in zip(asking, lookups, strict=True)
    ]


def handle_of(parameter: torch.Tensor) -> TableHandle | None:
    """The handle of a remote table's ``weight``; None for an ordinary parameter."""
    return getattr(parameter, _ATTRIBUTE, None)


def padding_index(padding_idx: int | None, num_embeddings: int | None) -> int | None:
    """torch's reading of ``padding_idx``: negative ones count from the end, if there is one."""
    if padding_idx is None:
        return None
    checks.integer("padding_idx", padding_idx, "an int or None")
    low, high = (-(2**63), 2**63) if num_embeddings is None else (-num_embeddings, num_embeddings)
    if not low <= padding_idx < high:
        raise ConfigurationError("padding_idx is out of range", expected=f"from {low} to {high - 1}", got=padding_idx)
    return padding_idx if num_embeddings is None else padding_idx % num_embeddings
