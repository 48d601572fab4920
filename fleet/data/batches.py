"""Holds rows, and makes batches of them.

All whole numbers of a batch share one piece of memory and all its floats another. So a ``DataLoader``'s worker process
hands over two pieces and not one for every column, which would cost more than reading them did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fleet.data.columns import FLOATS, Batch, Layout, Ragged, Words
from fleet.numeric.jit import compiled, lying_at, prefetch

Indices = npt.NDArray[np.int64]

#: So many words lie in a line of the cache, and so many rows ahead a row is asked for.
_LINE, _AHEAD = 8, 8
#: So many rows are made of columns at a time.
_TOGETHER = 64


class Rows(NamedTuple):
    """Holds samples one after the other: row ``i`` is the words from ``bounds[i]`` to ``bounds[i + 1]``."""

    words: Words
    bounds: Indices

    @property
    def number(self) -> int:
        return len(self.bounds) - 1

    def part(self, begin: int, end: int | None = None) -> Rows:
        """Return some of the rows, without a copy."""
        return Rows(self.words, self.bounds[begin : None if end is None else end + 1])


@compiled
def _measure(words: Any, bounds: Any, picks: Any, widths: Any, totals: Any) -> None:
    """Count how many values of each column the picked rows have."""
    totals[:] = 0
    for pick in picks:
        at = bounds[pick]
        for column in range(len(widths)):
            width = widths[column]
            if width == 0:
                width = words[at]
                at += 1
            totals[column] += width
            at += width


@compiled
def _spread(
    words: Any,
    lines: Any,
    reals: Any,
    bounds: Any,
    picks: Any,
    kinds: Any,
    widths: Any,
    starts: Any,
    offsets: Any,
    ids: Any,
    floats: Any,
) -> None:
    """Copy the picked rows into columns: column c begins at ``starts[c]`` of ``ids`` or ``floats``, and its offsets,
    where it has some, at ``offsets[c]`` of ``ids``. ``lines`` are the same words, in lines of the cache."""
    filled = starts.copy()
    for index in range(len(picks)):
        if index + _AHEAD < len(picks):
            ahead = picks[index + _AHEAD]
            for line in range(bounds[ahead] // _LINE, bounds[ahead + 1] // _LINE + 1):
                prefetch(lines, line)
        at = bounds[picks[index]]
        for column in range(len(widths)):
            to = filled[column]
            width = widths[column]
            if width == 1:  # as it mostly is
                if kinds[column] == FLOATS:
                    floats[to] = reals[2 * at]
                else:
                    ids[to] = words[at]
                filled[column] = to + 1
                at += 1
                continue
            if width == 0:
                width = words[at]
                at += 1
                ids[offsets[column] + index] = to - starts[column]
            if kinds[column] == FLOATS:
                for number in range(width):
                    floats[to + number] = reals[2 * (at + number)]
            else:
                for number in range(width):
                    ids[to + number] = words[at + number]
            filled[column] = to + width
            at += width


class _Run(NamedTuple):
    """Holds columns of one kind and one width whose values lie one after the other, or one column of any number."""

    names: tuple[str, ...]
    is_real: bool
    width: int
    start: int
    stop: int
    offsets: int


class _Places(NamedTuple):
    """Says where the columns of a batch lie, among its floats or its whole numbers, and how many there are of these."""

    starts: Indices
    offsets: Indices
    ids: int
    floats: int
    runs: tuple[_Run, ...]


class Batches:
    """Makes batches of rows."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._real, self._ragged = layout.kinds == FLOATS, layout.widths == 0
        #: of a batch of so many rows, where all of them have the same places
        self._fixed: dict[int, _Places] = {}

    def make(self, rows: Rows, picks: Indices) -> Batch:
        """Return the picked rows as tensors, in this order."""
        layout, size, places = self._layout, len(picks), self._places(rows, picks)
        ids, floats = np.empty(places.ids, np.int64), np.empty(places.floats, np.float32)
        lines = rows.words[: len(rows.words) // _LINE * _LINE].reshape(-1, _LINE)
        how = (layout.kinds, layout.widths, places.starts, places.offsets)
        _spread(rows.words, lines, rows.words.view(np.float32), rows.bounds, picks, *how, ids, floats)

        all_ids, all_floats = torch.from_numpy(ids), torch.from_numpy(floats)
        batch: Batch = dict.fromkeys(layout.names)  # type: ignore[assignment]
        for run in places.runs:
            values = (all_floats if run.is_real else all_ids)[run.start : run.stop]
            if run.width:
                # Each is a tensor by itself, not one of several views that autograd would know of.
                columns = map(torch.Tensor.detach, values.view(-1, size, run.width).unbind())
                batch.update(zip(run.names, columns, strict=True))
            else:
                batch[run.names[0]] = Ragged(values, all_ids[run.offsets : run.offsets + size])
        return batch

    def _places(self, rows: Rows, picks: Indices) -> _Places:
        size, real, ragged = len(picks), self._real, self._ragged
        if size in self._fixed:
            return self._fixed[size]
        totals = size * self._layout.widths
        if ragged.any():
            _measure(rows.words, rows.bounds, picks, self._layout.widths, totals)
        of_floats, of_ids, of_offsets = np.where(real, totals, 0), np.where(real, 0, totals), np.where(ragged, size, 0)
        starts = np.where(real, np.cumsum(of_floats) - of_floats, np.cumsum(of_ids) - of_ids)
        offsets = of_ids.sum() + np.cumsum(of_offsets) - of_offsets
        runs = self._runs(starts.tolist(), totals.tolist(), offsets.tolist())
        places = _Places(starts, offsets, int(of_ids.sum() + of_offsets.sum()), int(of_floats.sum()), runs)
        if not ragged.any():
            self._fixed = {size: places}
        return places

    def _runs(self, starts: list[int], totals: list[int], offsets: list[int]) -> tuple[_Run, ...]:
        runs: dict[bool, list[_Run]] = {True: [], False: []}
        columns = zip(self._layout.names, self._real.tolist(), self._layout.widths.tolist(), strict=True)
        for (name, is_real, width), start, total, offset in zip(columns, starts, totals, offsets, strict=True):
            last = runs[is_real][-1] if runs[is_real] else None
            if last is not None and width and last.width == width:
                runs[is_real][-1] = last._replace(names=(*last.names, name), stop=start + total)
            else:
                runs[is_real].append(_Run((name,), is_real, width, start, start + total, offset))
        return (*runs[True], *runs[False])


def samples_of(batch: Batch) -> Iterator[Batch]:
    """Yield the samples of a batch one by one: a vector for each column."""
    taken = [_single(column) for column in batch.values()]
    for values in zip(*taken, strict=True):
        yield dict(zip(batch, values, strict=True))


def _single(column: torch.Tensor | Ragged) -> Sequence[torch.Tensor]:
    if isinstance(column, torch.Tensor):
        return column.unbind()
    return column.values.tensor_split(column.offsets[1:])


def collated(samples: Sequence[Batch], layout: Layout) -> Batch:
    """Return the batch that consists of these samples."""
    batch: Batch = {}
    for name, width in zip(layout.names, layout.widths.tolist(), strict=True):
        values: list[Any] = [sample[name] for sample in samples]
        if width:
            batch[name] = torch.stack(values)
        else:
            sizes = torch.tensor([0, *map(len, values)], device="cpu")
            batch[name] = Ragged(torch.cat(values), sizes.cumsum(0)[:-1])
    return batch


@compiled
def _interleave(
    words: Any,
    reals: Any,
    bounds: Any,
    kinds: Any,
    widths: Any,
    values: Any,
    offsets: Any,
    like_ids: Any,
    like_floats: Any,
) -> None:
    """Write columns into rows, of which it is known where they begin; ``values`` and ``offsets`` are addresses. A few
    rows are written at a time, since more of them do not stay in the nearest cache until the last column."""
    number = len(bounds) - 1
    at = np.empty(_TOGETHER, np.int64)
    for first in range(0, number, _TOGETHER):
        stop = min(first + _TOGETHER, number)
        at[: stop - first] = bounds[first:stop]
        for column in range(len(widths)):
            width, count = widths[column], number * widths[column]
            begins = lying_at(like_ids, offsets[column], number + 1)
            if width == 0:
                count = begins[number]
            whole, real = lying_at(like_ids, values[column], count), lying_at(like_floats, values[column], count)
            if width == 1:  # as it mostly is
                for row in range(first, stop):
                    to = at[row - first]
                    if kinds[column] == FLOATS:
                        words[to] = 0
                        reals[2 * to] = real[row]
                    else:
                        words[to] = whole[row]
                    at[row - first] = to + 1
                continue
            for row in range(first, stop):
                to, begin = at[row - first], row * width
                end = begin + width
                if width == 0:
                    begin, end = begins[row], begins[row + 1]
                    words[to] = end - begin
                    to += 1
                for place in range(begin, end):
                    if kinds[column] == FLOATS:
                        words[to] = 0
                        reals[2 * to] = real[place]
                    else:
                        words[to] = whole[place]
                    to += 1
                at[row - first] = to


def interleaved(columns: Sequence[tuple[npt.NDArray[Any], Indices | None]], number: int, layout: Layout) -> Rows:
    """Return so many rows made of columns. Each has its values; and where that follows from no width, the places where
    each row's begin, with one more at the end."""
    kinds = [np.float32 if kind == FLOATS else np.int64 for kind in layout.kinds]
    flat = [np.ascontiguousarray(values, kind) for (values, _), kind in zip(columns, kinds, strict=True)]
    begins = [offsets for _, offsets in columns]
    sizes = np.full(number, layout.widths.sum() + (layout.widths == 0).sum(), np.int64)
    for offsets in begins:
        if offsets is not None:
            sizes += np.diff(offsets)
    bounds = np.zeros(number + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    words = np.empty(bounds[-1], np.int64)
    addresses = np.array([values.ctypes.data for values in flat])
    of_offsets = np.array([0 if offsets is None else offsets.ctypes.data for offsets in begins])
    like = (np.empty(0, np.int64), np.empty(0, np.float32))
    _interleave(words, words.view(np.float32), bounds, layout.kinds, layout.widths, addresses, of_offsets, *like)
    return Rows(words, bounds)
