"""Reads CSV and similar text, a line for each sample."""

from __future__ import annotations

import csv
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

from fleet.base import checks
from fleet.data import line_parser
from fleet.data.batches import Rows
from fleet.data.columns import Column, Floats, Ids, Ignored, described
from fleet.data.dataset import SampleFiles
from fleet.data.faults import Faults
from fleet.data.line_parser import CellParser
from fleet.data.text import TODO, Piece, line_in_file, lines_of, ranges, shown
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_DELIMITERS = '"\r\n\0+-.' + string.digits + string.ascii_letters


class Csv(SampleFiles):
    """Reads CSV files, plain or ``.gz``, with a header or without; without one, ``columns`` names all columns in their
    order.

    ``list_delimiter`` stands between the values of a cell that has several, which is a cell of any column whose width
    is not 1. A value in quotes may hold the delimiter, but no end of line. ``options`` are those that all formats have.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("clicks.csv").write_text("clicked,user\\n1,7\\n0,8\\n")
        >>> columns = {"clicked": fleet.data.Floats(1), "user": fleet.data.Ids(1)}
        >>> next(iter(fleet.data.Csv(["clicks.csv"], columns, batch_size=2)))["user"]
        tensor([[7],
                [8]])
    """

    def __init__(
        self,
        files: Sequence[str | PathLike[str]],
        columns: Mapping[str, Column],
        *,
        delimiter: str = ",",
        list_delimiter: str | None = None,
        header: bool = True,
        **options: Any,
    ) -> None:
        self.delimiter = _checked_delimiter("delimiter", delimiter)
        self.list_delimiter = None if list_delimiter is None else _checked_delimiter("list_delimiter", list_delimiter)
        if self.delimiter == self.list_delimiter:
            raise ConfigurationError("delimiter and list_delimiter are the same", got=repr(delimiter))
        self.header = checks.switch("header", header)
        self._names: dict[str, tuple[str, ...]] = {}
        super().__init__(files, columns, **options)

    def _check_columns(self, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            if isinstance(column, Ignored):
                if self.header:
                    raise ConfigurationError(
                        "columns are found by the header, so that there is nothing to ignore",
                        where=f"column {name!r}",
                        todo="Leave it out.",
                    )
            elif column.width not in (None, 1) and self.list_delimiter is None:
                raise ConfigurationError(
                    "several values in a cell need a list_delimiter between them", where=f"column {name!r}", got=column
                )

    def _pieces(self, file: str) -> list[Piece]:
        pieces = ranges(file)
        self._names[file] = self._header(pieces[0]) if self.header and pieces else tuple(self.columns)
        return pieces

    def _header(self, piece: Piece) -> tuple[str, ...]:
        head = next(lines_of(piece, Faults(skip=False)), None)
        line = b"" if head is None else head.text.partition(b"\n")[0].removeprefix(_BYTE_ORDER_MARK)
        text = line.decode("utf-8", "backslashreplace").rstrip("\r")
        try:
            names = tuple(next(csv.reader([text], delimiter=self.delimiter), []))
        except csv.Error as error:
            raise DataError(
                "a line of a CSV file is malformed",
                where=f"{piece.file}:1",
                expected="the names of the columns",
                got=f"{shown(line)}: {error}",
                todo="Without a header, give header=False.",
            ) from None
        for name, column in self.columns.items():
            assert isinstance(column, Ids | Floats)
            if names.count(name) != 1:
                raise DataError(
                    "a CSV file has not the columns that were asked for",
                    where=f"{piece.file}:1, column {name!r}",
                    expected=f"one of {described(column)}",
                    got=f"{names.count(name) or 'none'}; the header is {shown(line)}",
                    todo="Without a header, give header=False.",
                )
        return names

    def _read(self, piece: Piece, faults: Faults) -> Iterator[Rows]:
        names = self._names[piece.file]
        columns = {name: column for name, column in self.columns.items() if isinstance(column, Ids | Floats)}
        places = [names.index(name) for name in columns]
        marks = self.delimiter, self.list_delimiter
        parser = CellParser([*columns.values()], self._layout, places, len(names), *marks)
        for first, text, number in lines_of(piece, faults):
            if piece.begin == 0 and first == 1:
                text = text.removeprefix(_BYTE_ORDER_MARK)
                if self.header:
                    first, text, number = 2, text.partition(b"\n")[2], number - 1
            parser.take(text, number)
            while (fault := parser.fault()) != line_parser.DONE:
                faults.found(partial(self._described, piece, first, parser, fault))
            yield parser.rows()

    def _described(self, piece: Piece, first: int, parser: CellParser, fault: int) -> DataError:
        of_line = {
            line_parser.OTHER_CELLS: (f"{len(self._names[piece.file])} cells", f"{parser.number}"),
            line_parser.OPEN_QUOTE: ("a second quote in the line", shown(parser.word)),
        }
        where = "" if fault in of_line else f", column {parser.column!r}"
        column = self.columns[parser.column]
        assert isinstance(column, Ids | Floats)
        width = "a value" if column.width == 1 else f"{column.width} values"
        word = shown(parser.word)
        of_cell = {
            line_parser.NO_VALUE: (width, "nothing"),
            line_parser.OTHER_WIDTH: (width, f"{parser.number}"),
            line_parser.NO_ID: ("a whole number", word),
            line_parser.ID_RANGE: ("a whole number from -2^63 to 2^64 - 1", word),
            line_parser.NO_FLOAT: ("a number", word),
            line_parser.FLOAT_RANGE: ("a number that a float32 can hold", word),
        }
        expected, got = of_line[fault] if fault in of_line else of_cell[fault]
        return DataError(
            "a line of a CSV file is malformed",
            where=f"{piece.file}:{line_in_file(piece, first + parser.line)}{where}",
            expected=expected,
            got=got,
            todo=TODO,
        )


def _checked_delimiter(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a string", got=repr(value))
    if len(value) != 1 or not value.isascii() or value in _NO_DELIMITERS:
        raise ConfigurationError(
            f"{name} is impossible",
            expected="one ASCII character, no quote or end of line, and none that a number may have",
            got=repr(value),
        )
    return value
