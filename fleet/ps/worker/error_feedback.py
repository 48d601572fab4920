"""What leaves of a worker's gradients where they travel in fewer bits, and what is left of them.

Dense gradients are rounded to the nearest, and what rounding leaves of each block stays here and joins its next
gradient, so that nothing is lost in the long run (error feedback). A GEO worker needs no such memory: what the servers
were not told remains in the difference between its values and those agreed on.

Rows have no memory either; it would grow with the ids. bf16 and fp16 round each element by a small part of itself,
which leaves none behind. int8 would round the small elements of a row to nothing, always; so it rounds up or down by
chance, in proportion, and the mean over steps is right. Chance is a hash of id, column, worker and step: it is the same
in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import DenseLayout
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.worker.dense_buffers import Flat, end_to_end, joined
from fleet.ps.worker.geo_training import Change

#: For one server: which blocks are there, and the tensors that travel for them.
Sent = tuple[bytes, Sequence[WireTensor]]


class ErrorFeedback:
    def __init__(self, narrow: Narrow, layouts: Sequence[DenseLayout]) -> None:
        self._narrow = narrow
        self._layouts = layouts
        self._left: Sequence[Flat] = [
            {
                dtype: torch.zeros(size, dtype=getattr(torch, dtype))
                for dtype, size in layout.sizes.items()
                if narrow.of(dtype) is not None
            }
            for layout in layouts
        ]

    def grown(self, layouts: Sequence[DenseLayout]) -> ErrorFeedback:
        """The same for layouts that go on from these."""
        fresh = ErrorFeedback(self._narrow, layouts)
        for left, before in zip(fresh._left, self._left, strict=True):
            for dtype, tensor in before.items():
                left[dtype][: len(tensor)] = tensor
        return fresh

    def narrowed(
        self, blocks: Sequence[tuple[bytes, Mapping[str, list[torch.Tensor]]]]
    ) -> tuple[list[Sent], Callable[[], None]]:
        """The gradients of every server's ``blocks`` as they travel, joined by what earlier ones have left; and what to
        call when they have arrived. Those that travel as they are may leave from where they are."""
        sent: list[Sent] = []
        left: list[Flat] = []
        for layout, before, (present, by_dtype) in zip(self._layouts, self._left, blocks, strict=True):
            sizes = layout.sizes_of(present)
            flat = {dtype: joined(by_dtype[dtype], sizes[dtype]) for dtype in before if dtype in by_dtype}
            for piece, place in places(layout, present, flat, before):
                piece.add_(place)
            tensors: list[WireTensor] = []
            for dtype, pieces in by_dtype.items():
                if dtype in flat:
                    tensors += self._narrow.encode(flat[dtype], keep=True)
                else:
                    tensors.append(end_to_end(pieces, sizes[dtype]))
            sent.append((present, tensors))
            if all(present):
                left.append(flat)
            else:
                after = {dtype: tensor.clone() for dtype, tensor in before.items()}
                for piece, place in places(layout, present, flat, after):
                    place.copy_(piece)
                left.append(after)

        def arrived() -> None:
            self._left = left

        return sent, arrived


def encoded(narrow: Narrow, flat: Flat) -> list[WireTensor]:
    return [part for tensor in flat.values() for part in narrow.encode(tensor)]


def places(layout: DenseLayout, present: bytes, flat: Flat, whole: Flat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The blocks that are present, as they lie end to end in ``flat``, and their places in ``whole``, which has all of
    some element types."""
    if all(present):
        yield from ((flat[dtype], tensor) for dtype, tensor in whole.items())
        return
    for dtype, here, place in layout.places(present):
        if dtype in whole:
            yield flat[dtype][here], whole[dtype][place]


def as_read(
    narrow: Narrow,
    layouts: Sequence[DenseLayout],
    change: Change,
    dense: Sequence[Sent],
    rows: Mapping[int, Sequence[WireTensor]],
) -> Change:
    """A GEO worker's change as the servers will read what travels of it."""
    if narrow.is_plain:
        return change
    wholes = []
    for layout, (present, tensors), mine in zip(layouts, dense, change.dense, strict=True):
        whole = {dtype: torch.zeros_like(tensor) for dtype, tensor in mine.items()}
        read = narrow.decode_flats(tensors, layout.sizes_of(present))
        for piece, place in places(layout, present, read, whole):
            place.copy_(piece)
        wholes.append(whole)
    return Change(
        wholes,
        {
            index: (ids, narrow.decode(rows[index][1:], grads.dtype.name, grads.shape).numpy())
            for index, (ids, grads) in change.rows.items()
        },
    )
