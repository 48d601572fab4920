"""Defines what an optimizer is to a server: how it updates dense blocks and rows of a table, and what it cannot honour.

Dense blocks are updated by ``torch.optim`` itself. Rows have their own kernels: lazily, that is by the optimizer's
dense formula on the rows touched in a step and nothing on the others, in torch's order of operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from fleet.errors import UnsupportedError
from fleet.numeric.jit import Array, Ids, Rows

#: Options that choose among torch's implementations of one formula; rows have a single one, so they mean nothing there.
HINTS = frozenset({"foreach", "fused"})

#: Options no server can honour. Refused when they are on.
REFUSED_OPTIONS: Mapping[str, str] = {
    "differentiable": "updates happen on servers, where no autograd graph reaches",
    "capturable": "updates happen on servers, outside of any CUDA graph",
}


@dataclass(frozen=True)
class Column:
    """Describes one kind of state of a row: how many numbers it has, and what they are before the row is first
    touched."""

    width: int
    fill: float = 0.0


class RowKernel(Protocol):
    """Updates rows. It has no state of its own, so one object serves every table."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Return every option that the formula honours, with torch's default."""

    def columns(self, options: Mapping[str, Any], dim: int) -> dict[str, Column]:
        """Return the state that rows of ``dim`` numbers need under these options; memory is taken for no other."""

    def idle_changes(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name what in the dense formula changes rows without a gradient too, or their state, under these options.
        None of it: lazy rows end where dense ones do."""

    def step(
        self,
        weights: Rows,
        state: Mapping[str, Rows],
        slots: Ids,
        grads: Array,
        options: Mapping[str, Any],
        step: int,
    ) -> None:
        """Update the rows at ``slots``, which are distinct, in place. ``step`` counts from one."""


@dataclass(frozen=True)
class Rule:
    """Describes one optimizer: the class that users name, which also updates dense blocks, and what updates rows."""

    optimizer: type[torch.optim.Optimizer]
    dense: bool = True  #: False: it cannot update dense parameters
    sliceable: bool = True  #: the update is elementwise, so a parameter may be cut into flat blocks
    seamless: bool = True  #: if sliceable: where a tensor ends shows in no bit of the update, in float32 and float64
    rows: RowKernel | None = None  #: None: it cannot update rows of a table
    takes_sparse: bool = False  #: without weight decay, a sparse gradient of a parameter does what the dense one does
    constructor_only: frozenset[str] = frozenset()  #: options read in the constructor, whatever a group says
    refused: Mapping[str, str] = field(default_factory=lambda: REFUSED_OPTIONS)
    kept_from_the_first: Mapping[str, str] = field(default_factory=dict)
    """Options with a state that is only made in a parameter's first step: they cannot be turned on after that."""

    @property
    def joinable(self) -> bool:
        """Say whether several parameters may be updated as one."""
        return self.sliceable and self.seamless

    @property
    def name(self) -> str:
        return self.optimizer.__name__

    def refuse_late(self, options: Mapping[str, Any], kept: Collection[str], of: str) -> None:
        """Refuse options that are on, and whose state is not among what has been ``kept`` since the first step."""
        for option, state in self.kept_from_the_first.items():
            if options.get(option) and state not in kept:
                raise self.too_late(option, options[option], of)

    def too_late(self, option: str, value: object, of: str) -> UnsupportedError:
        """Return the error for an option that was turned on after the first step."""
        return UnsupportedError(
            f"{option}={value!r} of {self.name} comes too late for {of}: what it goes by begins with the first step",
            todo=f"Leave {option} as it was, or begin with it.",
        )


def column(state: Mapping[str, Rows], name: str, weights: Rows) -> Rows:
    """Return a state column. Where the options need none, the weights stand for it, which the update must then leave
    alone: an argument of the same type lets all options share one compilation."""
    return state.get(name, weights)


def named(options: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return options with their values, as they stand in a call: those among these names that are not zero."""
    return tuple(f"{name}={options[name]}" for name in names if options[name] != 0)


@lru_cache(1 << 8)  # a step asks for the same once a table
def scalars(dtype: np.dtype[Any], *numbers: float) -> tuple[Any, ...]:
    """Return numbers in the element type of the table: torch, too, computes them in double and rounds them once."""
    return tuple(dtype.type(number) for number in numbers)
