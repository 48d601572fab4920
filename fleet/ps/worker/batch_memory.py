"""Tells whether an iterator writes over batches that it gave before, and whose turn is to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fleet.errors import ConfigurationError
from fleet.nn.handle import Wanted

Batch = TypeVar("Batch")

#: Stands where there is no batch.
NONE: Any = object()

#: So many parts of a batch are looked at, and of one list: memory that is used again shows in the first ones.
_MOST_PARTS, _MOST_OF_A_LIST = 256, 64
#: Python has one object for all that are equal.
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass
class _Waiting(Generic[Batch]):
    """Holds a batch whose turn is to come, and what it will look up: copies of the ids, or None where that cannot be
    said any more."""

    batch: Batch
    names: Sequence[str]
    ids: Sequence[torch.Tensor] | None
    memory: dict[int, Any]
    versions: int = 0
    #: it is another one too, or lies in the memory of another, so the loop may have changed it with that one
    is_shared: bool = False


class BatchesAhead(Generic[Batch]):
    """Holds the batches that wait for their turn. A loop may change what it has been given, so only what the iterator
    changes is refused: what happens while it is asked for the next batch."""

    def __init__(self, lookup: Callable[[Batch], Sequence[Wanted]]) -> None:
        self._lookup = lookup
        self._waiting = deque[_Waiting[Batch]]()

    def add(self, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Note the batch that was read."""
        memory = _memory(batch, wanted)
        is_shared = any(_meet(each, batch, memory) for each in self._waiting)
        self._waiting.append(_Waiting(batch, [each.handle.name for each in wanted], _ids(wanted), memory, 0, is_shared))

    def take(self) -> None:
        """Note that the first one is the loop's now, which may do with it what it likes."""
        self._waiting.popleft()

    def look(self) -> None:
        """Note how they are before the next one is asked for."""
        for each in self._waiting:
            each.versions = _versions(each.memory)
            if each.is_shared:
                try:
                    each.ids = _ids(self._lookup(each.batch))
                except Exception:  # of a batch that the loop has made another: it is the loop's to say
                    each.ids = None

    def check(self, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Refuse an iterator that has just written over one of them, as some do that fill one buffer again and again.
        Looks at those alone for which there is a sign of it."""
        memory = _memory(batch, wanted)
        for each in self._waiting:
            shares = _meet(each, batch, memory)
            if not (shares or each.is_shared or _versions(each.memory) != each.versions) or each.ids is None:
                continue
            try:
                now = self._lookup(each.batch)
            except Exception as error:
                raise _overwritten(each.names[:1]) from error
            same = [_are_same(new.ids, old) for new, old in zip(now, each.ids, strict=False)]
            if len(now) != len(each.ids) or not all(same):
                raise _overwritten([name for name, is_same in zip(each.names, same, strict=False) if not is_same])
            each.is_shared |= shares


def _overwritten(names: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        "a batch was overwritten before its turn, when the next one was read ahead",
        where="".join(["prefetch()", *(f", ids of {name!r}" for name in names[:1])]),
        expected="batches that stay as they are until the loop has them",
        got="another batch in the same object, or in the same memory",
        todo="Let the iterator make each batch anew, or give prefetch() copies: "
        "(copy.deepcopy(batch) for batch in batches).",
    )


def _meet(waiting: _Waiting[Batch], batch: Batch, memory: dict[int, Any]) -> bool:
    """Say whether a batch is one that waits, or lies in its memory."""
    is_one = batch is waiting.batch and not isinstance(batch, _PLAIN)
    return is_one or not memory.keys().isdisjoint(waiting.memory)


def _ids(wanted: Sequence[Wanted]) -> list[torch.Tensor]:
    return [each.ids.detach().clone() for each in wanted]


def _are_same(ids: torch.Tensor, others: torch.Tensor) -> bool:
    return ids.dtype == others.dtype and ids.device == others.device and torch.equal(ids, others)


def _memory(batch: object, wanted: Sequence[Wanted]) -> dict[int, Any]:
    """Return the tensors and arrays in a batch, whatever kind of object it is, by where they are."""
    found: dict[int, Any] = {}
    parts = deque[Any]([*(each.ids for each in wanted), batch])
    for _ in range(_MOST_PARTS + len(wanted)):
        if not parts:
            break
        part = parts.popleft()
        if isinstance(part, torch.Tensor):
            if part.layout is torch.strided and part.numel():
                found[part.data_ptr()] = part
        elif isinstance(part, np.ndarray):
            found[part.ctypes.data] = part
        elif isinstance(part, dict):
            parts.extend(islice(dict.values(part), _MOST_PARTS))
        elif isinstance(part, list | tuple):
            parts.extend(islice(part, _MOST_OF_A_LIST))
        elif not isinstance(part, type):
            slots = (getattr(part, name, None) for name in getattr(type(part), "__slots__", ()))
            parts.extend([*getattr(part, "__dict__", {}).values(), *slots])
    return found


def _versions(memory: dict[int, Any]) -> int:
    """Return how often torch has written into memory, where it counts that."""
    return sum(each._version for each in memory.values() if isinstance(each, torch.Tensor) and not each.is_inference())
