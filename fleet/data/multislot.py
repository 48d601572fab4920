"""MultiSlot text, the format of PaddlePaddle's data feeds: a sample is a line, and a line says for each slot in order how
many values it has, and the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import IO, Any

import numpy as np

from fleet.data import parsing
from fleet.data.columns import Column, Floats, Ids, layout
from fleet.data.dataset import SampleFiles
from fleet.data.faults import Faults
from fleet.data.parsing import Parser
from fleet.data.rows import Rows
from fleet.data.text import TODO, Piece, line_in_file, lines_of, ranges, shown
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError


class MultiSlot(SampleFiles):
    """Files of MultiSlot text, plain or ``.gz``. ``slots`` names all slots of a line, in the order of the line."""

    def __init__(
        self,
        files: Sequence[str | PathLike[str]],
        slots: Mapping[str, Column],
        *,
        batch_size: int | None = None,
        drop_last: bool = False,
        shuffle_mb: float = 0,
        seed: int = 0,
        on_error: str = "raise",
    ) -> None:
        super().__init__(
            *(files, slots),
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle_mb=shuffle_mb,
            seed=seed,
            on_error=on_error,
        )

    def _check_columns(self, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            if isinstance(column, Ids | Floats) and column.missing is not None:
                raise ConfigurationError(
                    "missing has nothing to act on: in MultiSlot text no value can be missing",
                    where=f"slot {name!r}",
                    got=column,
                    todo="Leave it out.",
                )

    def _pieces(self, file: str) -> list[Piece]:
        return ranges(file)

    def _read(self, piece: Piece, faults: Faults) -> Iterator[Rows]:
        parser = Parser(layout(self.columns))
        for first, text in lines_of(piece, faults):
            parser.take(text)
            while (fault := parser.fault()) != parsing.DONE:
                line = line_in_file(piece, first + parser.line)
                expected, got = _described(fault, parser, self.columns)
                faults.found(
                    DataError(
                        "a line of MultiSlot text is malformed",
                        where=f"{piece.file}:{line}, slot {parser.slot!r}",
                        expected=expected,
                        got=got,
                        todo=TODO,
                    )
                )
            yield parser.rows()


def _described(fault: int, parser: Parser, columns: Mapping[str, Column]) -> tuple[str, str]:
    """What was expected and what is there."""
    word, column = shown(parser.word), columns[parser.slot]
    count = "how many values the slot has, 1 or more"
    told: dict[int, tuple[str, str]] = {
        parsing.NO_COUNT: (count, "the end of the line"),
        parsing.BAD_COUNT: (count, word),
        parsing.OTHER_WIDTH: (f"{getattr(column, 'width', None)} values", f"{parser.wanted}"),
        parsing.TOO_FEW: (f"{parser.wanted} values", f"{parser.number} before the end of the line"),
        parsing.NO_ID: ("a whole number", word),
        parsing.ID_RANGE: ("a whole number from -2^63 to 2^64 - 1", word),
        parsing.NO_FLOAT: ("a number", word),
        parsing.FLOAT_RANGE: ("a number that a float32 can hold", word),
        parsing.MORE: ("the end of the line behind the last slot", word),
    }
    return told[fault]


def write_multislot(file: IO[str], samples: Iterable[Mapping[str, Any]], slots: Mapping[str, Column]) -> None:
    """Write samples as lines of MultiSlot text: mappings of slots to a number or a sequence of numbers (a list, an array, a
    tensor). ``slots`` says which, and in which order; an ``Ignored`` one is written as ``1 0``."""
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


def _written(values: object, column: Ids | Floats, where: str) -> list[str]:
    array = np.atleast_1d(np.asarray(values))
    kinds = "iu" if isinstance(column, Ids) else "iuf"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        expected = "whole numbers" if isinstance(column, Ids) else "numbers"
        raise ArgumentTypeError(f"a slot takes one or several {expected}", where=where, got=repr(values))
    if len(array) == 0 or (column.width is not None and len(array) != column.width):
        raise ConfigurationError(
            "a slot has a wrong number of values",
            where=where,
            expected=f"{column.width or '1 or more'}",
            got=len(array),
            todo="Where there is none, MultiSlot text needs one that stands for none.",
        )
    if isinstance(column, Ids):
        return [str(len(array)), *map(str, array.tolist())]
    small = array.astype(np.float32)
    if any(math.isinf(each) and math.isfinite(given) for each, given in zip(small.tolist(), array.tolist(), strict=True)):
        raise ConfigurationError("a number is too large for a float32", where=where, got=repr(values))
    return [str(len(array)), *map(str, small)]
