"""Tells whether an iterator writes over batches that it gave before, and whose turn is to come."""

from __future__ import annotations

from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from itertools import islice
from types import MemberDescriptorType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fleet.errors import ConfigurationError
from fleet.nn.handle import Wanted
from fleet.numeric.bits import as_bytes

Batch = TypeVar("Batch")

#: Stands where there is no batch.
NONE: Any = object()

#: So many parts of a batch are looked at, and of one list: memory that is used again shows in the first ones.
_MOST_PARTS, _MOST_OF_A_LIST = 256, 64
#: What an iterator does with memory shows in its first reads, and in the first when more batches wait than ever before:
#: so many, and more where more wait. Then all of a batch is looked at, of each part so many numbers at its beginning
#: and at its end; later its ids are.
_WATCHED, _SAMPLE = 16, 4096
#: Python has one object for all that are equal.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
#: What numbers lie in, and what other parts of a batch do.
_DATA = (torch.Tensor, np.ndarray, np.generic, bytearray, array)
_CONTAINERS = (dict, list, tuple, deque, UserDict, UserList)


@dataclass
class _Waiting(Generic[Batch]):
    """Holds a batch whose turn is to come, and what it will look up: copies of the ids, or None where that cannot be
    said any more."""

    batch: Batch
    names: Sequence[str]
    ids: Sequence[torch.Tensor] | None
    memory: dict[int, Any]
    versions: int = 0
    #: what it looked like before the next one was asked for; None where that was not looked at
    looks: dict[str, Any] | None = None
    #: it is another one too, or lies in the memory of another, so the loop may have changed it with that one
    is_shared: bool = False


class BatchesAhead(Generic[Batch]):
    """Holds the batches that wait for their turn. A loop may change what it has been given, so only what the iterator
    changes is refused: what happens while it is asked for the next batch."""

    def __init__(self, lookup: Callable[[Batch], Sequence[Wanted]]) -> None:
        self._lookup = lookup
        self._waiting = deque[_Waiting[Batch]]()
        #: how many have waited at once, and how many reads are still watched
        self._most, self._watched = 0, _WATCHED

    def add(self, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Note the batch that was read."""
        memory = _memory(batch, wanted)
        is_shared = any(_meet(each, batch, memory) for each in self._waiting)
        names = [each.handle.name for each in wanted]
        self._waiting.append(_Waiting(batch, names, _ids(wanted), memory, is_shared=is_shared))
        self._watched -= 1
        if len(self._waiting) > self._most:  # so it may be that one is written over for the first time
            self._most = len(self._waiting)
            self._watched = max(_WATCHED, 2 * self._most)

    def take(self) -> None:
        """Note that the first one is the loop's now, which may do with it what it likes."""
        self._waiting.popleft()

    def look(self) -> None:
        """Note how they are before the next one is asked for."""
        is_watched = self._watched >= 0
        for each in self._waiting:
            each.versions = _versions(each.memory)
            each.looks = _looks(each.batch) if is_watched else None
            if each.is_shared:
                try:
                    each.ids = _ids(self._lookup(each.batch))
                except Exception:  # of a batch that the loop has made another: it is the loop's to say
                    each.ids = None

    def check(self, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Refuse an iterator that has just written over one of them, as some do that fill one buffer again and again.
        Later than in its first reads, looks at those alone for which there is a sign of it."""
        memory = _memory(batch, wanted)
        for each in self._waiting:
            shares = _meet(each, batch, memory)
            if (shares or each.is_shared or _versions(each.memory) != each.versions) and each.ids is not None:
                self._check_ids(each.names, each.ids, each.batch)
                each.is_shared |= shares
            if each.looks is not None and (now := _looks(each.batch)) != each.looks:
                changed = [name for name, look in {**now, **each.looks}.items() if now.get(name, NONE) != look]
                raise _overwritten(f"batch{min(changed, default='')}")

    def _check_ids(self, names: Sequence[str], ids: Sequence[torch.Tensor], batch: Batch) -> None:
        try:
            now = self._lookup(batch)
        except Exception as error:
            raise _overwritten(f"ids of {names[0]!r}" if names else "batch") from error
        same = [_are_same(new.ids, old) for new, old in zip(now, ids, strict=False)]
        if len(now) != len(ids) or not all(same):
            changed = [name for name, is_same in zip(names, same, strict=False) if not is_same]
            raise _overwritten(f"ids of {changed[0]!r}" if changed else "batch")


def _overwritten(what: str) -> ConfigurationError:
    return ConfigurationError(
        "a batch was overwritten before its turn, when the next one was read ahead",
        where=f"prefetch(), {what}",
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
        elif isinstance(part, list | tuple | deque):
            parts.extend(islice(part, _MOST_OF_A_LIST))
        else:
            parts.extend(value for _, value in _attributes(part))
    return found


def _looks(batch: object) -> dict[str, Any]:
    """Return what the parts of a batch look like, by where they are in it: of containers and what they hold, and of an
    object its tensors, arrays and containers."""
    found: dict[str, Any] = {}
    holders = deque[Iterable[tuple[str, Any]]]([[("", batch)]])
    for _ in range(_MOST_PARTS):  # lists in lists would be many more, or without end where one holds itself
        if not holders:
            break
        for at, part in holders.popleft():
            if _holds_data(part) or (part is batch and not isinstance(part, _DATA)):
                holders.append(_parts(at, part))
            else:
                found[at] = _look(part)
            if len(found) == _MOST_PARTS:
                return found
    return found


def _holds_data(part: object) -> bool:
    """Say whether all that something holds is a part of a batch: another object may hold what is its iterator's own."""
    return isinstance(part, _CONTAINERS) or (is_dataclass(part) and not isinstance(part, type))


def _look(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return _sample(part)
    if isinstance(part, np.ndarray):
        return part.shape, part.flat[:_SAMPLE].tobytes(), part.flat[-_SAMPLE:].tobytes()
    if isinstance(part, np.generic):
        return part.dtype, part.tobytes()
    if isinstance(part, bytearray | array):
        view = memoryview(part).cast("B")
        return len(view), bytes(view[:_SAMPLE]), bytes(view[-_SAMPLE:])
    return part if isinstance(part, _PLAIN) else _Object(part)


@dataclass(frozen=True)
class _Object:
    """Stands for something that is looked at no closer than whether it is the same."""

    itself: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.itself is self.itself


def _parts(at: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what something in a batch holds, and where."""
    if isinstance(holder, dict | UserDict):
        held = holder.data if isinstance(holder, UserDict) else holder
        yield from ((f"{at}[{key!r}]", each) for key, each in islice(dict.items(held), _MOST_PARTS))
    elif isinstance(holder, _CONTAINERS):
        yield from ((f"{at}[{index}]", each) for index, each in enumerate(islice(holder, _MOST_OF_A_LIST)))
    else:
        is_record, kind = is_dataclass(holder), type(holder)
        for name, each in _attributes(holder):
            is_made_when_asked_for = isinstance(getattr(kind, name, None), cached_property)
            if not is_made_when_asked_for and (is_record or isinstance(each, (*_DATA, *_CONTAINERS))):
                yield f"{at}.{name}", each


def _attributes(part: object) -> list[tuple[str, Any]]:
    """Return what an object holds, in slots of its class and of those that this derives from, too."""
    if isinstance(part, type):
        return []
    found = list(getattr(part, "__dict__", {}).items())
    for kind in type(part).__mro__:
        for name, slot in list(vars(kind).items()) if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # as nothing is there yet
                    found.append((name, slot.__get__(part)))
    return found


def _sample(tensor: torch.Tensor) -> Any:
    is_plain = (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )  # else it may have no memory of its own
    if not is_plain or tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        return id(tensor), _versions({0: tensor})
    with torch._C.DisableTorchFunctionSubclass():
        count, detached = tensor.numel(), tensor.detach()
        ends = (_between(detached, *each) for each in ((0, min(count, _SAMPLE)), (max(count - _SAMPLE, 0), count)))
        return (tensor.shape, *(as_bytes(each).numpy().tobytes() for each in ends))


def _between(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return some of the numbers of a tensor, in their order, without a copy of all of them."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    return tensor[torch.unravel_index(torch.arange(start, stop, device="cpu"), tensor.shape)]


def _versions(memory: dict[int, Any]) -> int:
    """Return how often torch has written into memory, where it counts that."""
    return sum(each._version for each in memory.values() if isinstance(each, torch.Tensor) and not each.is_inference())
