"""Reads CSV and similar text in chunks: lines are found here, as in all text, and taken apart by pyarrow."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

from fleet.base import checks
from fleet.data.arrow import described, pyarrow, rows_of
from fleet.data.batches import Rows
from fleet.data.columns import Column, Floats, Ids, Ignored
from fleet.data.dataset import SampleFiles
from fleet.data.faults import Faults
from fleet.data.text import TODO, Piece, line_in_file, lines_of, ranges, shown
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
        names = tuple(next(csv.reader([text], delimiter=self.delimiter), []))
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
        for first, text in lines_of(piece, faults):
            if self.header and piece.begin == 0 and first == 1:
                first, text = 2, text.partition(b"\n")[2]
            yield from self._rows(piece, first, text, faults)

    def _rows(self, piece: Piece, first: int, text: bytes, faults: Faults) -> Iterator[Rows]:
        """Yield the rows of these lines. pyarrow does not say which line it cannot read, so it is looked for by
        halving."""
        arrow = pyarrow("Reading CSV")

        def malformed(line: int, where: str, expected: str, got: str) -> DataError:
            return DataError(
                "a line of a CSV file is malformed",
                where=f"{piece.file}:{line_in_file(piece, line)}{where}",
                expected=expected,
                got=got,
                todo=TODO,
            )

        def report(row: int, column: str, expected: str, got: str) -> None:
            full = [number for number, line in enumerate(text.split(b"\n")) if line.strip(b"\r")]
            faults.found(partial(malformed, first + full[row], f", column {column!r}", expected, got))

        if not text.strip(b"\r\n"):
            return
        try:
            arrays = self._arrays(piece.file, text)
        except arrow.ArrowInvalid as error:
            half = text.rfind(b"\n", 0, len(text) // 2) + 1 or text.find(b"\n") + 1
            if half == len(text):
                expected = f"{len(self._names[piece.file])} cells of the types asked for"
                faults.found(partial(malformed, first, "", expected, f"{shown(text.rstrip())}: {error}"))
                return
            yield from self._rows(piece, first, text[:half], faults)
            yield from self._rows(piece, first + text.count(b"\n", 0, half), text[half:], faults)
        else:
            yield rows_of(arrays, self.columns, self._layout, report)

    def _arrays(self, file: str, text: bytes) -> dict[str, Any]:
        arrow = pyarrow("Reading CSV")
        from pyarrow import csv as reader

        wanted = {name: column for name, column in self.columns.items() if isinstance(column, Ids | Floats)}
        table = reader.read_csv(
            arrow.BufferReader(text),
            read_options=reader.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=list(self._names[file])
            ),
            parse_options=reader.ParseOptions(delimiter=self.delimiter),
            convert_options=reader.ConvertOptions(
                column_types={name: self._cell(column) for name, column in wanted.items()},
                include_columns=list(wanted),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
        arrays = {name: table.column(name).combine_chunks() for name in wanted}
        return {name: self._split(array, wanted[name]) for name, array in arrays.items()}

    def _has_lists(self, column: Ids | Floats) -> bool:
        return self.list_delimiter is not None and column.width != 1

    def _cell(self, column: Ids | Floats) -> Any:
        arrow = pyarrow("Reading CSV")
        if self._has_lists(column) or (isinstance(column, Ids) and column.hash):
            return arrow.string()
        return arrow.int64() if isinstance(column, Ids) else arrow.float64()

    def _split(self, array: Any, column: Ids | Floats) -> Any:
        if not self._has_lists(column):
            return array
        arrow = pyarrow("Reading CSV")
        if isinstance(column, Ids):
            kind = arrow.string() if column.hash else arrow.int64()
        else:
            kind = arrow.float64()
        return arrow.compute.split_pattern(array, self.list_delimiter).cast(arrow.list_(kind))


def _checked_delimiter(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a string", got=repr(value))
    if len(value) != 1 or not value.isascii() or value in '"\r\n':
        raise ConfigurationError(
            f"{name} is impossible", expected="one ASCII character, no quote or end of line", got=repr(value)
        )
    return value
