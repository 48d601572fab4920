"""Defines ``SampleFiles``, which every format shares: who reads what, in which order, in batches, and from where.

Files consist of pieces, which are dealt to the processes that read: the workers of a ``DataLoader``, or this one alone.
Each process reads its pieces into rows, holds as many rows as the bound on memory allows (a *window*; only a few rows
where nothing is shuffled) and makes batches of them. Its place is a ``Position``: where in the pieces its window
begins, and how many samples of the window it has handed out. A window has a whole number of batches, except for the
last, and its content follows from where it begins. So to go on, a process reads one window again and skips what it had
handed out.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fleet.base import checks
from fleet.data.batches import Batches, Rows, collated, samples_of
from fleet.data.columns import Batch, Column, check_columns, layout
from fleet.data.faults import Faults
from fleet.data.order import dealt, shuffled
from fleet.data.text import Piece, check_files
from fleet.errors import ArgumentTypeError, ConfigurationError, StateError

#: Samples that are made at once where they are asked for one by one.
TOGETHER = 256

_EPOCH, _ELSEWHERE = 0, 1


@dataclass(frozen=True)
class Position:
    """Says where a window begins, so many rows into one of this process's pieces, and how many samples it has handed
    out."""

    piece: int = 0
    row: int = 0
    done: int = 0


@dataclass(frozen=True)
class _Window:
    begins: Position
    rows: Rows


class SampleFiles(IterableDataset[Batch], ABC):
    """Yields batches, or samples, from files; ``MultiSlot``, ``Parquet`` and ``Csv`` derive from it.

    ``batch_size=None`` yields samples, for a ``DataLoader`` with ``collate_fn=dataset.collate``. Otherwise it yields
    whole batches, for a ``DataLoader`` with ``batch_size=None``, which is much faster. Each reading process may hold
    ``shuffle_mb`` MB of samples to shuffle them (0: the order of the files); ``seed`` and ``set_epoch`` decide the
    order. ``on_error="skip"`` counts and logs what is malformed, and goes on.
    """

    def __init__(
        self,
        files: Sequence[str | PathLike[str]],
        columns: Mapping[str, Column],
        *,
        batch_size: int | None = None,
        drop_last: bool = False,
        shuffle_mb: float = 0,
        seed: int = 0,
        on_error: str = "raise",
    ) -> None:
        self.files = check_files(files)
        self.columns = check_columns(columns)
        self._check_columns(self.columns)
        self.batch_size = _checked_batch_size(batch_size)
        self.drop_last = _checked_drop_last(drop_last, batch_size)
        self.shuffle_mb = _checked_shuffle(shuffle_mb)
        self.seed = _checked_int("seed", seed)
        if on_error not in ("raise", "skip"):
            raise ConfigurationError("on_error is unknown", expected="'raise' or 'skip'", got=repr(on_error))
        self.on_error = on_error
        self._layout = layout(self.columns).used()
        self._all_pieces = [piece for file in self.files for piece in self._pieces(file)]
        #: Shared with worker processes, those that are there already too: the epoch, and whether such processes read.
        self._shared = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._position: Position | None = None
        self._loaded: Mapping[str, Any] | None = None

    # ---------------------------------------------------------------- of a format

    def _check_columns(self, columns: Mapping[str, Column]) -> None:
        """Refuse what this format cannot honour."""

    @abstractmethod
    def _pieces(self, file: str) -> list[Piece]:
        """Return the pieces of the file, each to be read by one process."""

    @abstractmethod
    def _read(self, piece: Piece, faults: Faults) -> Iterator[Rows]:
        """Yield the rows of a piece, in portions that depend on nothing but the file, each valid until the next."""

    # ---------------------------------------------------------------- for users

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in worker processes too: each epoch has an order of its own."""
        epoch = _checked_int("epoch", epoch)
        if epoch != self._shared[_EPOCH]:
            self._shared[_EPOCH] = epoch
            self._loaded = self._position = None

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        self._shared[_ELSEWHERE] = info is not None
        reader, readers = (0, 1) if info is None else (info.id, info.num_workers)
        start = Position()
        if self._loaded is not None:
            start = _position_in(self._loaded, self._settings(readers), reader)
            self._loaded = None
        self._position = start
        return self._batches(start, reader, readers)

    def state_dict(self) -> dict[str, Any]:
        """Return where this process is: after ``load_state_dict``, reading goes on with the sample after the last one
        that was yielded."""
        info = get_worker_info()
        if info is None and self._shared[_ELSEWHERE]:
            raise StateError(
                "worker processes of a DataLoader read this dataset, and only they know where they are",
                todo="Use torchdata.stateful_dataloader.StatefulDataLoader and its state_dict(), or num_workers=0.",
            )
        if self._loaded is not None:
            return dict(self._loaded)
        position = self._position or Position()
        reader, readers = (0, 1) if info is None else (info.id, info.num_workers)
        return {
            "epoch": int(self._shared[_EPOCH]),
            "reader": reader,
            "piece": position.piece,
            "row": position.row,
            "done": position.done,
            "settings": self._settings(readers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from ``state``, in the epoch it was saved in, with the same files and
        settings."""
        if not isinstance(state, Mapping):
            raise ArgumentTypeError("a state must be what state_dict() returned", got=type(state).__name__)
        if missing := sorted({"epoch", "reader", "piece", "row", "done", "settings"} - set(state)):
            raise ConfigurationError(
                "this is not the state of a dataset", expected="what state_dict() returned", got=f"no {missing[0]!r}"
            )
        if not isinstance(state["settings"], Mapping):
            raise ConfigurationError(
                "this is not the state of a dataset",
                expected="what state_dict() returned",
                got=f"settings of the type {type(state['settings']).__name__}",
            )
        epoch = _checked_int("epoch", state["epoch"])
        _position_of(state)
        self._shared[_EPOCH] = epoch
        self._loaded = dict(state)

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Return the batch of these samples; a ``DataLoader`` takes this as its ``collate_fn``."""
        return collated(samples, self._layout)

    # ---------------------------------------------------------------- reading

    def _settings(self, readers: int) -> dict[str, Any]:
        """Return everything that decides which sample comes when."""
        sizes = repr([piece[1:] for piece in self._all_pieces]).encode()
        return {
            "files": len(self.files),
            "sizes": hashlib.sha256(sizes).hexdigest()[:16],
            "columns": repr(self.columns),
            "batch_size": self.batch_size,
            "shuffle_mb": self.shuffle_mb,
            "seed": self.seed,
            "num_workers": readers,
        }

    def _batches(self, start: Position, reader: int, readers: int) -> Iterator[Batch]:
        key = (self.seed, int(self._shared[_EPOCH]))
        shuffle = self.shuffle_mb > 0
        pieces = dealt(self._all_pieces, reader, readers, key if shuffle else None)
        step = self.batch_size or TOGETHER
        faults, batches = Faults(skip=self.on_error == "skip"), Batches(self._layout)
        for window in self._windows(pieces, start, faults):
            rows, begins = window.rows, window.begins
            if shuffle:
                order = shuffled(rows.number, *key, reader, begins.piece, begins.row)
            else:
                order = np.arange(rows.number)
            for done in range(start.done, rows.number, step):
                picks = order[done : done + step]
                batch = batches.make(rows, picks)
                if self.batch_size is not None:
                    self._position = replace(begins, done=done + len(picks))
                    yield batch
                    continue
                for number, sample in enumerate(samples_of(batch), done + 1):
                    self._position = replace(begins, done=number)
                    yield sample
            start = Position()
        self._position = Position(piece=len(pieces))
        faults.close()

    def _windows(self, pieces: Sequence[Piece], start: Position, faults: Faults) -> Iterator[_Window]:
        held = _Held(self.batch_size or 1, int(self.shuffle_mb * 1e6))
        for number in range(start.piece, len(pieces)):
            row = 0
            skip = start.row if number == start.piece else 0
            with closing(self._read(pieces[number], faults)) as portions:  # type: ignore[type-var]
                for rows in portions:
                    fresh = rows.part(min(max(skip - row, 0), rows.number))
                    if fresh.number:
                        held.add(fresh, Position(number, row + rows.number - fresh.number))
                    row += rows.number
                    if held.is_full:
                        yield held.window()
                        held.drop()
        if held.number and not self.drop_last:
            yield held.window(all_of_them=True)
        elif held.number >= held.batch:
            yield held.window()


class _Held:
    """Holds rows that were read and not handed out, in one piece of memory: a window lies there until it is dropped."""

    def __init__(self, batch: int, most_bytes: int) -> None:
        self.batch = batch
        self._most_bytes = most_bytes
        try:
            self._words = np.empty(most_bytes // 8 + (1 << 17), np.int64)
        except (MemoryError, ValueError):  # more than the machine has: the samples may be fewer, and it grows
            self._words = np.empty(1 << 17, np.int64)
        self._start_with(np.zeros(1, np.int64), [])

    def _start_with(self, bounds: npt.NDArray[np.int64], begins: list[tuple[int, Position]]) -> None:
        self.number = len(bounds) - 1
        self._bounds = [bounds]
        self._begins = begins  #: where the first row comes from, and each that does not follow the one before it
        self._end = int(bounds[-1])
        self._taken = 0

    def add(self, rows: Rows, begins: Position) -> None:
        first, last = int(rows.bounds[0]), int(rows.bounds[-1])
        end = self._end + last - first
        if end > len(self._words):
            larger = np.empty(end + end // 4, np.int64)
            larger[: self._end] = self._words[: self._end]
            self._words = larger
        self._words[self._end : end] = rows.words[first:last]
        self._bounds.append(rows.bounds[1:] + (self._end - first))
        self._begins.append((self.number, begins))
        self.number += rows.number
        self._end = end

    @property
    def is_full(self) -> bool:
        return self.number >= self.batch and 8 * (self._end + self.number) >= self._most_bytes

    def window(self, all_of_them: bool = False) -> _Window:
        """Return the rows held, as far as they make whole batches; the rest stays."""
        self._taken = self.number if all_of_them else self.number - self.number % self.batch
        self._bounds = [np.concatenate(self._bounds)]
        return _Window(self._begins[0][1], Rows(self._words, self._bounds[0][: self._taken + 1]))

    def drop(self) -> None:
        """Forget the window, which was handed out; the rows that are left move to the beginning."""
        bounds = self._bounds[0][self._taken :]
        begin, end = int(bounds[0]), int(bounds[-1])
        self._words[: end - begin] = self._words[begin:end]
        begins = [(at - self._taken, position) for at, position in self._begins]
        first = max(index for index, (at, _) in enumerate(begins) if at <= 0)
        at, position = begins[first]
        begins[first] = (0, replace(position, row=position.row - at))
        self._start_with(bounds - begin, begins[first:] if len(bounds) > 1 else [])


def _position_in(state: Mapping[str, Any], settings: Mapping[str, Any], reader: int) -> Position:
    """Return where ``state`` says to go on, if it is a state of the same reading."""
    for name, now in {**settings, "reader": reader}.items():
        then = state[name] if name == "reader" else state["settings"].get(name)
        if then != now:
            raise ConfigurationError(
                f"this reading cannot go on from that state: {_MEANING.get(name, name)} differs",
                expected=f"{then!r}, as it was",
                got=repr(now),
                todo="Go on with the same files and arguments, or with another epoch by set_epoch().",
            )
    return _position_of(state)


def _position_of(state: Mapping[str, Any]) -> Position:
    return Position(*(_checked_int(name, state[name]) for name in ("piece", "row", "done")))


_MEANING = {
    "files": "the number of files",
    "sizes": "the size of some file",
    "num_workers": "the number of DataLoader workers",
    "reader": "the number of the DataLoader worker",
}


def _checked_int(name: str, value: object) -> int:
    number = checks.integer(name, value)
    if not 0 <= number < 2**63:
        raise ConfigurationError(f"{name} is out of range", expected="0 to 2^63 - 1", got=value)
    return number


def _checked_batch_size(value: object) -> int | None:
    if value is not None and _checked_int("batch_size", value) < 1:
        raise ConfigurationError("batch_size is out of range", expected="at least 1, or None for samples", got=value)
    return value  # type: ignore[return-value]


def _checked_drop_last(value: object, batch_size: object) -> bool:
    given = checks.switch("drop_last", value)
    if given and batch_size is None:
        raise ConfigurationError(
            "drop_last has nothing to act on where samples come one by one",
            expected="batch_size beside it",
            todo="Give drop_last to the DataLoader.",
        )
    return given


def _checked_shuffle(value: object) -> float:
    given = checks.real("shuffle_mb", value)
    if not 0 <= given < float("inf"):
        raise ConfigurationError("shuffle_mb is out of range", expected="0 (no shuffling) or more", got=value)
    return float(given)
