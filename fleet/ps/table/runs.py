"""``torch.optim`` updates neighbouring blocks as one parameter, a run.

The optimizer goes through its parameters in Python, which takes longer than the update itself where they are small. A
run lasts for as long as its blocks fare alike: once some of them have a gradient in a round and others have none, their
state differs in more than their elements (step counts do), and the run is split there for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fleet.kernels import RULES
from fleet.plan.layout import Slot
from fleet.plan.plan import Plan

#: No run is longer, in elements: beyond, the temporary tensors of an update no longer stay in the processor's caches,
#: which costs more than the parameters saved.
LONGEST = 1 << 18

#: torch computes these alike wherever a tensor ends. Half precision it rounds once an update in the vector loops, and
#: after every operation among the last elements, so that the result would tell what was joined.
_JOINABLE_DTYPES = ("float32", "float64")

#: A block's state in a checkpoint, by key, and the keys that have a number for each of its elements.
BlockState = tuple[Mapping[str, Any], set[str]]


class Run:
    """Joins neighbours for one update: ``slots`` are neighbours in ``flat``, in its order, and of one param group."""

    def __init__(self, plan: Plan, slots: Sequence[Slot], flat: torch.Tensor) -> None:
        first = plan.param_of(slots[0].block)
        self.slots = slots
        self.group = first.group
        self.start, self.stop = slots[0].start, slots[-1].stop
        # A whole parameter by itself keeps its shape, for rules that look at it.
        alone = len(slots) == 1 and slots[0].block.numel == first.numel
        self._shape = first.shape if alone else (self.stop - self.start,)
        self.param = torch.nn.Parameter(self._view(flat))

    def _view(self, flat: torch.Tensor, origin: int = 0) -> torch.Tensor:
        return flat[self.start - origin : self.stop - origin].view(self._shape)

    def move(self, flat: torch.Tensor) -> None:
        """Note that the values lie in another flat tensor from now on, at the same place."""
        self.param.data = self._view(flat)

    def cut(self, state: Mapping[str, Any], part: Run) -> dict[str, Any]:
        """Return the part of this run's optimizer state that belongs to ``part``: views of what has the run's shape,
        and everything else as it is."""
        return {
            key: part._view(value.reshape(-1), self.start)
            if isinstance(value, torch.Tensor) and value.shape == self.param.shape
            else value
            for key, value in state.items()
        }


def parted(slots: Sequence[Slot], belongs: Callable[[list[Slot], Slot], bool]) -> list[list[Slot]]:
    """``slots`` in their order, cut wherever the next one does not belong to those since the last cut."""
    parts: list[list[Slot]] = []
    for slot in slots:
        if parts and belongs(parts[-1], slot):
            parts[-1].append(slot)
        else:
            parts.append([slot])
    return parts


def joined(plan: Plan, slots: Sequence[Slot], options: Sequence[Mapping[str, Any]]) -> list[list[Slot]]:
    """Join neighbours of one element type into as few runs as give, to the bit, what each block by itself would."""

    def belongs(run: list[Slot], slot: Slot) -> bool:
        same_group = plan.param_of(run[0].block).group == plan.param_of(slot.block).group
        return same_group and joinable(run[0]) and joinable(slot) and slot.stop - run[0].start <= LONGEST

    def joinable(slot: Slot) -> bool:
        param = plan.param_of(slot.block)
        rule = RULES[plan.spec.groups[param.group].rule]
        fused = options[param.group].get("fused")  # these kernels, too, round otherwise where a tensor ends
        # What belongs to the whole of a parameter without dimensions has its very shape, and a run could not tell it.
        return rule.joinable and not fused and slot.dtype in _JOINABLE_DTYPES and len(param.shape) > 0

    return parted(slots, belongs)


def split(run: Run, parts: Sequence[Run], optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Replace ``run`` by ``parts`` in its optimizer."""
    state = optimizer.state.pop(run.param, {})
    for part in parts:
        mine = run.cut(state, part).items()
        optimizer.state[part.param] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in mine}
    at = next(index for index, param in enumerate(group["params"]) if param is run.param)
    group["params"][at : at + 1] = [part.param for part in parts]


def agree(one: BlockState, other: BlockState) -> bool:
    """Say whether one run can have both: they differ in nothing but their elements."""
    (mine, flat), (theirs, also_flat) = one, other
    return (
        flat == also_flat
        and mine.keys() == theirs.keys()
        and all(_same(mine[key], theirs[key]) for key in mine.keys() - flat)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def together(states: Sequence[BlockState]) -> BlockState:
    """Return the state of a run whose blocks have these states, which agree."""
    first, flat = states[0]
    return {
        key: torch.cat([pieces[key].reshape(-1) for pieces, _ in states]) if key in flat else value
        for key, value in first.items()
    }, flat
