"""Reads and writes MultiSlot text, the format of PaddlePaddle's data feeds: a line is a sample, with a count and the
values for each slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from numbers import Integral, Real
from typing import IO, Any

import numpy as np

from fleet.data import line_parser
from fleet.data.batches import Rows
from fleet.data.columns import Column, Floats, Ids, layout
from fleet.data.dataset import SampleFiles
from fleet.data.faults import Faults
from fleet.data.line_parser import SlotParser
from fleet.data.text import TODO, Piece, line_in_file, lines_of, ranges, shown
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError


class MultiSlot(SampleFiles):
    """Reads files of MultiSlot text, plain or ``.gz``. ``columns`` names all slots of a line, in the order of the line.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("clicks.txt").write_text("1 1 1 7\\n1 0 1 8\\n")  # how many values, then the values, of each slot
        >>> columns = {"clicked": fleet.data.Floats(1), "user": fleet.data.Ids(1)}
        >>> next(iter(fleet.data.MultiSlot(["clicks.txt"], columns, batch_size=2)))["user"]
        tensor([[7],
                [8]])
    """

    def _check_columns(self, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            for option, unset in (("missing", None), ("hash", False)):
                if getattr(column, option, unset) is not unset:
                    raise ConfigurationError(
                        f"{option} has nothing to act on: in MultiSlot text all are numbers, and none is missing",
                        where=f"slot {name!r}",
                        got=column,
                        todo="Leave it out.",
                    )

    def _pieces(self, file: str) -> list[Piece]:
        return ranges(file)

    def _read(self, piece: Piece, faults: Faults) -> Iterator[Rows]:
        parser = SlotParser(layout(self.columns))
        for first, text, number in lines_of(piece, faults):
            parser.take(text, number)
            while (fault := parser.fault()) != line_parser.DONE:
                faults.found(partial(self._described, piece, first, parser, fault))
            yield parser.rows()

    def _described(self, piece: Piece, first: int, parser: SlotParser, fault: int) -> DataError:
        expected, got = _expected_and_got(fault, parser, self.columns[parser.column])
        return DataError(
            "a line of MultiSlot text is malformed",
            where=f"{piece.file}:{line_in_file(piece, first + parser.line)}, slot {parser.column!r}",
            expected=expected,
            got=got,
            todo=TODO,
        )


def _expected_and_got(fault: int, parser: SlotParser, column: Column) -> tuple[str, str]:
    word = shown(parser.word)
    count = "how many values the slot has, 1 or more"
    told: dict[int, tuple[str, str]] = {
        line_parser.NO_COUNT: (count, "the end of the line"),
        line_parser.BAD_COUNT: (count, word),
        line_parser.OTHER_WIDTH: (f"{getattr(column, 'width', None)} values", f"{parser.wanted}"),
        line_parser.TOO_FEW: (f"{parser.wanted} values", f"{parser.number} before the end of the line"),
        line_parser.NO_ID: ("a whole number", word),
        line_parser.ID_RANGE: ("a whole number from -2^63 to 2^64 - 1", word),
        line_parser.NO_FLOAT: ("a number", word),
        line_parser.FLOAT_RANGE: ("a number that a float32 can hold", word),
        line_parser.MORE: ("the end of the line behind the last slot", word),
    }
    return told[fault]


def write_multislot(file: IO[str], samples: Iterable[Mapping[str, Any]], slots: Mapping[str, Column]) -> None:
    """Write samples as lines of MultiSlot text. Each sample maps slots to a number or a sequence of numbers (a list, an
    array, a tensor). ``slots`` says which slots are written, and in which order; an ``Ignored`` one is written as ``1
    0``.

    Examples:
        >>> import io
        >>> file = io.StringIO()
        >>> slots = {"clicked": fleet.data.Floats(1), "user": fleet.data.Ids()}
        >>> fleet.data.write_multislot(file, [{"clicked": 1, "user": [7, 9]}], slots)
        >>> file.getvalue()
        '1 1.0 2 7 9\\n'
    """
    for number, sample in enumerate(samples):
        words: list[str] = []
        for name, column in slots.items():
            where = f"sample {number}, slot {name!r}"
            if isinstance(column, Ids | Floats):
                if name not in sample:
                    raise ConfigurationError("a slot is missing", where=where, got=", ".join(map(repr, sample)))
                words.extend(_written(sample[name], column, where))
            else:
                words.extend("10")
        file.write(" ".join(words) + "\n")


def _written(given: Any, column: Ids | Floats, where: str) -> list[str]:
    values = given.tolist() if hasattr(given, "tolist") else given
    values = list(values) if isinstance(values, list | tuple) else [values]
    kind, expected = (Integral, "whole numbers") if isinstance(column, Ids) else (Real, "numbers")
    if not all(isinstance(value, kind) for value in values):
        raise ArgumentTypeError(f"a slot takes one or several {expected}", where=where, got=repr(given))
    if len(values) != (column.width or max(len(values), 1)):
        raise ConfigurationError(
            "a slot has a wrong number of values",
            where=where,
            expected=column.width or "1 or more",
            got=len(values),
            todo="Where there is none, MultiSlot text needs one that stands for none.",
        )
    if isinstance(column, Ids):
        fitting = all(-(2**63) <= value < 2**64 for value in values)
        words = [str(int(value)) for value in values]
    else:
        with np.errstate(over="ignore"):
            small = [np.float32(value) for value in values]
        fitting = all(np.isfinite(one) or not math.isfinite(value) for one, value in zip(small, values, strict=True))
        words = [str(one) for one in small]
    if not fitting:
        raise ConfigurationError("a number is too large for its slot", where=where, got=repr(given))
    return [str(len(words)), *words]
