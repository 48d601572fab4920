"""Decides which server a block goes to. A dispatcher is a class with one method, registered in ``DISPATCHERS``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol


class Dispatcher(Protocol):
    """Assigns the blocks of a plan, in plan order, to servers ``0 .. server_num - 1``."""

    def __init__(self, server_num: int) -> None: ...

    def dispatch(self, blocks: Sequence[str]) -> list[int]:
        """Return one server index for each block, given their names: ``weight`` of a whole parameter, ``weight.block0``
        and so on of one that is cut."""
        ...


class _EqualToItsName(type):
    """Makes a class equal to its name, as a script may set ``split_method`` to either and compare it with either."""

    def __eq__(cls, other: object) -> bool:
        named: object = DISPATCHERS.get(other) if isinstance(other, str) else other
        return cls is named

    def __hash__(cls) -> int:
        return hash(cls.__name__)


class RoundRobin(metaclass=_EqualToItsName):
    """Deals all blocks of all parameters in turn, with one cursor.

    Examples:
        >>> from fleet.transpiler import RoundRobin
        >>> RoundRobin(2).dispatch(["weight.block0", "weight.block1", "bias"])
        [0, 1, 0]
    """

    def __init__(self, server_num: int) -> None:
        self.server_num = server_num

    def dispatch(self, blocks: Sequence[str]) -> list[int]:
        return [position % self.server_num for position in range(len(blocks))]


class HashName(metaclass=_EqualToItsName):
    """Places a block by a stable hash of its name: the same on every machine and in every process.

    Examples:
        >>> from fleet.transpiler import HashName
        >>> HashName(3).dispatch(["weight.block0", "weight.block1", "weight.block2", "bias"])
        [0, 2, 2, 2]
    """

    def __init__(self, server_num: int) -> None:
        self.server_num = server_num

    def dispatch(self, blocks: Sequence[str]) -> list[int]:
        return [zlib.crc32(name.encode()) % self.server_num for name in blocks]


DISPATCHERS: dict[str, type[Dispatcher]] = {cls.__name__: cls for cls in (RoundRobin, HashName)}


def name_of(method: type[Dispatcher] | str) -> str:
    """Return the name of a dispatcher, given as a class or by its name."""
    return method if isinstance(method, str) else method.__name__
