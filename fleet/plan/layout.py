"""Says how the dense blocks of one server lie in a message: one flat tensor for each element type, blocks in plan
order.

Worker and server compute it from the same plan, so a message needs to say only which blocks are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleet.plan.plan import Block, Plan


@dataclass(frozen=True)
class Slot:
    """Says where a block stands: its position among the server's blocks, and its range in the flat tensor."""

    position: int
    block: Block
    dtype: str
    start: int
    is_whole: bool  #: all of its parameter

    @property
    def part(self) -> slice | None:
        """Return the block's range in the parameter; None for all of it."""
        return None if self.is_whole else slice(self.block.offset, self.block.offset + self.block.numel)

    @property
    def stop(self) -> int:
        return self.start + self.block.numel


@dataclass(frozen=True)
class DenseLayout:
    slots: tuple[Slot, ...]
    sizes: dict[str, int]

    @cached_property
    def cuts(self) -> dict[str, list[tuple[int, int, slice | None]]]:
        """Return for each element type its blocks in their order: position, parameter, and range in that, None for
        all."""
        return {
            dtype: [(slot.position, slot.block.param, slot.part) for slot in self.slots if slot.dtype == dtype]
            for dtype in self.sizes
        }

    @cached_property
    def params(self) -> list[int]:
        """Return the parameter of every block, in their order."""
        return [slot.block.param for slot in self.slots]

    @property
    def dtypes(self) -> list[str]:
        """Return the element types in the order their tensors travel."""
        return list(self.sizes)

    def places(self, present: bytes) -> Iterator[tuple[str, slice, slice]]:
        """Yield for each block marked in ``present`` its element type, and where it lies when only these lie end to
        end, and when all do."""
        ends: dict[str, int] = {}
        for slot in self.slots:
            if present[slot.position]:
                start = ends.get(slot.dtype, 0)
                ends[slot.dtype] = start + slot.block.numel
                yield slot.dtype, slice(start, ends[slot.dtype]), slice(slot.start, slot.stop)

    def sizes_of(self, present: bytes) -> dict[str, int]:
        """Return for each element type how long the blocks marked in ``present`` are together."""
        if all(present):
            return self.sizes
        sizes: dict[str, int] = {}
        for slot in self.slots:
            if present[slot.position]:
                sizes[slot.dtype] = sizes.get(slot.dtype, 0) + slot.block.numel
        return dict(sorted(sizes.items()))


def dense_layout(plan: Plan, server: int, present: Sequence[int] | bytes | None = None) -> DenseLayout:
    """Return the layout of all blocks of ``server``, or of those marked in ``present``."""
    slots: list[Slot] = []
    sizes: dict[str, int] = {}
    for position, block in enumerate(plan.by_server[server]):
        if present is not None and not present[position]:
            continue
        param = plan.param_of(block)
        dtype, start = param.dtype, sizes.get(param.dtype, 0)
        slots.append(Slot(position, block, dtype, start, block.numel == param.numel))
        sizes[dtype] = start + block.numel
    return DenseLayout(tuple(slots), dict(sorted(sizes.items())))
