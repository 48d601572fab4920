"""Reads Parquet files, a row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from fleet.data.arrow import fits, pyarrow, rows_of
from fleet.data.batches import Rows
from fleet.data.columns import Column, Floats, Ids, Ignored, described
from fleet.data.dataset import SampleFiles
from fleet.data.faults import Faults
from fleet.data.text import TODO, Piece, opened, unreadable
from fleet.errors import ConfigurationError, DataError

#: Rows that are held as Arrow arrays at once.
PORTION = 8192


class Parquet(SampleFiles):
    """Reads Parquet files. ``columns`` names those that are read: numbers, lists of numbers, or strings with
    ``Ids(hash=True)``; the files may have others.

    Examples:
        >>> import pyarrow.parquet
        >>> pyarrow.parquet.write_table(pyarrow.table({"clicked": [1.0, 0.0], "user": [7, 8]}), "clicks.parquet")
        >>> columns = {"clicked": fleet.data.Floats(1), "user": fleet.data.Ids(1)}
        >>> next(iter(fleet.data.Parquet(["clicks.parquet"], columns, batch_size=2)))["user"]
        tensor([[7],
                [8]])
    """

    def _check_columns(self, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            if isinstance(column, Ignored):
                raise ConfigurationError(
                    "a Parquet file's columns are found by name, so that there is nothing to ignore",
                    where=f"column {name!r}",
                    todo="Leave it out.",
                )

    def _pieces(self, file: str) -> list[Piece]:
        with _parquet(file) as parquet:
            schema = parquet.schema_arrow
            for name, column in self.columns.items():
                assert isinstance(column, Ids | Floats)
                index = schema.get_field_index(name)
                found = "no such column" if index < 0 else str(schema.field(index).type)
                if index < 0 or not fits(schema.field(index).type, column):
                    raise DataError(
                        "a Parquet file has not the columns that were asked for",
                        where=f"{file}, column {name!r}",
                        expected=described(column),
                        got=found if index >= 0 else f"{found}; there are {', '.join(schema.names)}",
                    )
            return [Piece(file, group, group + 1) for group in range(parquet.num_row_groups)]

    def _read(self, piece: Piece, faults: Faults) -> Iterator[Rows]:
        with _parquet(piece.file) as parquet:
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.begin))

            def malformed(number: int, column: str, expected: str, got: str) -> DataError:
                return DataError(
                    "a row of a Parquet file is malformed",
                    where=f"{piece.file}, row {row + number}, column {column!r}",
                    expected=expected,
                    got=got,
                    todo=TODO,
                )

            def report(*told: Any) -> None:
                faults.found(partial(malformed, *told))

            portions = parquet.iter_batches(
                PORTION, row_groups=[piece.begin], columns=list(self.columns), use_threads=False
            )
            for portion in portions:
                arrays = {name: portion.column(name) for name in self.columns}
                yield rows_of(arrays, portion.num_rows, self.columns, self._layout, report)
                row += portion.num_rows


@contextmanager
def _parquet(file: str) -> Iterator[Any]:
    arrow = pyarrow("Reading Parquet")
    from pyarrow.parquet import ParquetFile

    with opened(file) as handle:
        try:
            with ParquetFile(handle) as parquet:
                yield parquet
        except (arrow.ArrowException, OSError) as error:
            raise unreadable(file, error) from None
