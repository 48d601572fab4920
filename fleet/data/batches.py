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
from fleet.numeric.jit import compiled, prefetch

Indices = npt.NDArray[np.int64]

#: So many words lie in a line of the cache, and so many rows ahead a row is asked for.
_LINE, _AHEAD = 8, 8


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
                batch.update(zip(run.names, values.view(-1, size, run.width).unbind(), strict=True))
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
            sizes = torch.tensor([0, *map(len, values)])
            batch[name] = Ragged(torch.cat(values), sizes.cumsum(0)[:-1])
    return batch


@compiled
def _place(words: Any, at: Any, values: Any, offsets: Any, counted: bool) -> None:
    """Write one column into all rows: row i goes on at ``at[i]``, which moves behind what was written."""
    for row in range(len(at)):
        to = at[row]
        begin, end = offsets[row], offsets[row + 1]
        if counted:
            words[to] = end - begin
            to += 1
        for number in range(begin, end):
            words[to] = values[number]
            to += 1
        at[row] = to


def interleaved(columns: Sequence[tuple[npt.NDArray[Any], Indices]], layout: Layout) -> Rows:
    """Return rows made of columns, int64 or float32. Each column has its values, and the places where each row's begin,
    with one more at the end."""
    counted = layout.widths == 0
    sizes = sum(np.diff(offsets) for _, offsets in columns) + counted.sum()
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    words = np.empty(bounds[-1], np.int64)
    at = bounds[:-1].copy()
    for (values, offsets), count in zip(columns, counted.tolist(), strict=True):
        if values.dtype == np.float32:
            wide = np.zeros(len(values), np.int64)
            wide.view(np.float32)[::2] = values
            values = wide
        _place(words, at, values, offsets, count)
    return Rows(words, bounds)
