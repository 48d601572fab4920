"""Declares the columns to be read, and the form that all formats read them into.

A *row* is one sample as 64-bit *words*, column by column: the values, after their number where that may differ from row
to row. A float32 lies in one half of its word. So a row of any format is one piece of memory, which makes shuffling a
copy per sample, and it is as large as the text of its line, more or less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fleet.base import checks
from fleet.errors import ArgumentTypeError, ConfigurationError

Words = npt.NDArray[np.int64]

IDS, FLOATS, IGNORED = 0, 1, 2

#: What some numbers of a column must be.
_INT = "an int or None"


@dataclass(frozen=True)
class Ids:
    """Declares whole numbers, as int64: ``width`` of them in every sample, or any number (``None``), for an
    ``EmbeddingBag``.

    ``missing``, for Parquet and CSV, stands in for a null or an empty cell, which is malformed otherwise; in a column
    without a width such a cell has no ids at all. ``hash=True``, also for these formats, makes ids of strings: the
    64-bit FNV-1a hash of their bytes.

    Examples:
        >>> fleet.data.Ids(width=None)  # any number of ids in a sample, for an EmbeddingBag
        Ids(width=None, ...)
    """

    width: int | None = None
    missing: int | None = None
    hash: bool = False

    def __post_init__(self) -> None:
        _check_width(self.width)
        checks.switch("hash", self.hash)
        if self.missing is not None and not -(2**63) <= checks.integer("missing", self.missing, _INT) < 2**63:
            raise ConfigurationError("missing is out of range", expected="an int64", got=self.missing)
        _check_missing(self)


@dataclass(frozen=True)
class Floats:
    """Declares numbers, as float32: ``width`` of them in every sample, or any number (``None``). ``missing`` works as
    for ``Ids``.

    Examples:
        >>> fleet.data.Floats(width=13)
        Floats(width=13, ...)
    """

    width: int | None = None
    missing: float | None = None

    def __post_init__(self) -> None:
        _check_width(self.width)
        if self.missing is not None:
            missing = checks.real("missing", self.missing, "a number or None")
            if math.isfinite(missing) and abs(missing) > float(np.finfo(np.float32).max):
                raise ConfigurationError("missing is out of range", expected="a float32", got=self.missing)
        _check_missing(self)


@dataclass(frozen=True)
class Ignored:
    """Declares something in the line that is not wanted.

    Examples:
        >>> columns = {"clicked": fleet.data.Floats(), "comment": fleet.data.Ignored(), "user": fleet.data.Ids()}
    """


Column: TypeAlias = Ids | Floats | Ignored


def described(column: Ids | Floats) -> str:
    """Return in words what a column has to consist of."""
    each = "numbers" if isinstance(column, Floats) else "strings" if column.hash else "integers"
    if column.width is None:
        return f"{each}, or lists of them"
    return each if column.width == 1 else f"lists of {column.width} {each}"


def _check_width(width: object) -> None:
    if width is None:
        return
    if checks.integer("width", width, _INT) < 1:
        raise ConfigurationError("width is out of range", expected="at least 1, or None for any number", got=width)


def _check_missing(column: Ids | Floats) -> None:
    if column.missing is not None and column.width is None:
        raise ConfigurationError(
            "missing has nothing to stand in for where any number of values may be",
            expected="a width beside it",
            got=column,
            todo="Leave it out: a null is no values then.",
        )


class Ragged(NamedTuple):
    """Holds the values of a batch whose samples have different numbers of them: those of sample ``i`` begin at
    ``offsets[i]``. An ``EmbeddingBag`` takes them as ``bag(*ragged)``.

    Examples:
        >>> bag = torch.nn.EmbeddingBag(10, 4, mode="sum")
        >>> tags = fleet.data.Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))  # [1, 2] and [3]
        >>> bag(*tags).shape
        torch.Size([2, 4])
    """

    values: torch.Tensor
    offsets: torch.Tensor


#: What a dataset yields: a matrix of as many columns as the width, or ``Ragged``. A sample has one dimension less.
Batch: TypeAlias = dict[str, torch.Tensor | Ragged]


class Layout(NamedTuple):
    """Holds the columns as compiled loops take them."""

    names: tuple[str, ...]
    kinds: npt.NDArray[np.uint8]
    widths: npt.NDArray[np.int64]  #: 0: any number

    def used(self) -> Layout:
        """Return the layout without the ignored columns, of which rows are made."""
        kept = self.kinds != IGNORED
        names = tuple(name for name, keep in zip(self.names, kept, strict=True) if keep)
        return Layout(names, self.kinds[kept], self.widths[kept])


def check_columns(columns: object) -> dict[str, Column]:
    if not isinstance(columns, Mapping):
        raise ArgumentTypeError(
            "the columns must be a mapping",
            expected='names to Ids, Floats or Ignored, like {"label": Ids(1)}',
            got=type(columns).__name__,
        )
    for name, column in columns.items():
        if not isinstance(name, str):
            raise ArgumentTypeError("the name of a column must be a string", got=repr(name))
        if not isinstance(column, Ids | Floats | Ignored):
            raise ArgumentTypeError(
                f"column {name!r} is of the wrong type", expected="Ids(…), Floats(…) or Ignored()", got=repr(column)
            )
    if all(isinstance(column, Ignored) for column in columns.values()):
        raise ConfigurationError("no column is to be read", expected="at least one of Ids or Floats", got=dict(columns))
    return dict(columns)


def layout(columns: Mapping[str, Column]) -> Layout:
    kinds = {Ids: IDS, Floats: FLOATS, Ignored: IGNORED}
    return Layout(
        tuple(columns),
        np.array([kinds[type(column)] for column in columns.values()], np.uint8),
        np.array([0 if isinstance(column, Ignored) else column.width or 0 for column in columns.values()], np.int64),
    )
