"""CSV: what is read, against Python's csv module and its numbers."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_data_arrow import fnv1a

from fleet.data import Csv, Floats, Ids, Ragged, text
from fleet.data.line_parser import nearest_float32
from fleet.errors import ConfigurationError, DataError

WHOLE = re.compile(r"[ \t]*([+-]?\d+)[ \t]*", re.ASCII)
REAL = re.compile(r"[ \t]*([+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity))[ \t]*", re.ASCII | re.IGNORECASE)

#: By name: a column, and what its cells are.
COLUMNS: dict[str, Ids | Floats] = {
    "id": Ids(1, missing=-7),
    "real": Floats(1, missing=0.25),
    "name": Ids(1, hash=True),
    "many": Ids(),
    "pair": Floats(2, missing=1.5),
    "names": Ids(hash=True),
}
PLAIN = {name: column for name, column in COLUMNS.items() if column.width == 1}


class _WrongError(Exception):
    """A cell is malformed."""


def value_of(cell: str, column: Ids | Floats) -> int | float:
    if isinstance(column, Ids) and column.hash:
        return fnv1a(cell.encode())
    found = (WHOLE if isinstance(column, Ids) else REAL).fullmatch(cell)
    if found is None:
        raise _WrongError
    if isinstance(column, Floats):
        with np.errstate(over="ignore"):
            real = np.float32(found[1])  # rounded twice
        if np.isfinite(real) and len(found[3] or "") < 6:
            real = nearest_float32(found[1])
        if np.isinf(real) and "inf" not in found[1].lower():
            raise _WrongError
        return float(real)
    whole = int(found[1])
    if not -(2**63) <= whole < 2**64:
        raise _WrongError
    return whole - 2**64 if whole >= 2**63 else whole


def values_of(cell: str, column: Ids | Floats) -> list[int | float]:
    if not cell:
        if column.width is not None and column.missing is None:
            raise _WrongError
        return [column.missing] * (column.width or 0)  # type: ignore[list-item]
    found = [value_of(each, column) for each in (cell.split("|") if column.width != 1 else [cell])]
    if column.width not in (None, len(found)):
        raise _WrongError
    return found


def expected_of(content: str, columns: dict[str, Ids | Floats]) -> list[dict[str, list[int | float]]]:
    """The samples of all lines that are well-formed."""
    samples = []
    for line in content.split("\n"):
        line = line.removesuffix("\r")
        if not line:
            continue
        rows = list(csv.reader([f"{line}\n", "next\n"]))
        try:
            if len(rows) != 2 or len(rows[0]) != len(columns):  # of one, if a quote is left open
                raise _WrongError
            samples.append({n: values_of(cell, c) for cell, (n, c) in zip(rows[0], columns.items(), strict=True)})
        except _WrongError:
            pass
    return samples


def read(path: Path, content: str, columns: dict[str, Ids | Floats], **options: Any) -> list[dict[str, list[float]]]:
    (path / "a.csv").write_bytes(content.encode())
    given = Csv([path / "a.csv"], columns, list_delimiter="|", header=False, on_error="skip", **options)
    return [{name: value.tolist() for name, value in sample.items()} for sample in given]


def same(got: object, expected: object) -> bool:
    return repr(got) == repr(expected)  # as nan is not nan


wholes = st.one_of(
    st.integers(-(2**63), 2**64 - 1).map(str),
    st.integers(0, 10**9).map("{:012}".format),
    st.integers(0, 9999).map(" {}\t".format),
    st.sampled_from(["+7", "-0", str(2**64), str(-(2**63) - 1), "12345678", "123456789", "0" * 40 + "1", "--1", "1_0"]),
)
reals = st.one_of(
    st.floats(width=32).map(repr),
    st.floats(-1e38, 1e38).map(repr),
    st.integers(0, 10**20).map(str),
    st.sampled_from(
        ["1e39", "-1.5E-3", ".5", "5.", ".", "1e", "infinity", "-INF", "nan", " 3.5 ", "16777217", "1.0000000596046448"]
    ),
)
words = st.text("ab,|\"ä \t'", max_size=12)


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


def cells_of(column: Ids | Floats) -> st.SearchStrategy[str]:
    each = words if isinstance(column, Ids) and column.hash else wholes if isinstance(column, Ids) else reals
    if column.width != 1:
        each = st.lists(each, max_size=3).map("|".join)
    bare = each.filter(lambda cell: not any(mark in cell for mark in ',"'))
    odd = st.one_of(st.text('01.,|" ', max_size=4), st.sampled_from([".inf", "-.nan", ".infinity", "inf.", "nan0"]))
    return st.one_of(bare, bare, st.just(""), each.map(quoted), odd)


def lines_of(columns: dict[str, Ids | Floats]) -> st.SearchStrategy[str]:
    line = st.tuples(*map(cells_of, columns.values())).map(",".join)
    return st.lists(st.tuples(line, st.sampled_from(["\n", "\n", "\r\n", "\n\n"])).map("".join), max_size=12).map(
        "".join
    )


tried = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@tried
@given(lines_of(COLUMNS), st.sampled_from([16, 200, 1 << 20]))
@example('1,2,"a""b",3|4,5|6,x|\n,,"",,,""\r\n1,2,a"b,,,""""\n1,2,"a"b,,,\n1,2,"a,,,\n\r\n', 200)
def test_cells_of_all_kinds(tmp_path: Path, content: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK", chunk)
        assert same(read(tmp_path, content, COLUMNS), expected_of(content, COLUMNS))


@tried
@given(lines_of(PLAIN), st.sampled_from([16, 200, 1 << 20]))
@example("1,2,a\n,,\n12345678,0.1,abcdefgh\n-5,1e-46,\n7,1.17549429e-38,x\r\n", 1 << 20)
def test_cells_of_one_value(tmp_path: Path, content: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK", chunk)
        assert same(read(tmp_path, content, PLAIN), expected_of(content, PLAIN))


def test_long_and_short_lines_around_all_places_of_a_word(tmp_path: Path) -> None:
    """Ends of cells, lines and chunks fall on every place of sixty-four bytes."""
    content = "".join(f"{10 ** (n % 19)},{n}.5,{'x' * (n % 71)}\n" for n in range(1500))
    columns = PLAIN
    assert same(read(tmp_path, content, columns), expected_of(content, columns))
    marked = content.replace("x" * 70, 'x"' + "x" * 68)
    assert same(read(tmp_path, marked, columns), expected_of(marked, columns))


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    halfway, small = "1.000000059604644775390625", "0" * 5000 + "1e-40"
    content = f"1,{halfway + '0' * 5000},a\n2,{halfway + '0' * 5000 + '1'},b\n3,{small},c\n{'0' * 5000 + '4'},1,d\n"
    got = read(tmp_path, content, PLAIN)
    assert [sample["real"] for sample in got] == [
        [1.0],
        [float(np.float32(1 + 2**-23))],
        [float(np.float32(1e-40))],
        [1.0],
    ]
    assert [sample["id"] for sample in got] == [[1], [2], [3], [4]]


def test_more_doubtful_floats_than_there_is_room_for(tmp_path: Path) -> None:
    """Those that lie all but halfway, with quotes and without."""
    halfway = "1.000000059604644775"  # and 390625
    content = "".join(f'1,{halfway}4{n},a\n1,"{halfway}2{n}",b\n' for n in range(9000))
    got = read(tmp_path, content, PLAIN)
    assert [sample["real"] for sample in got] == [[float(np.float32(1 + 2**-23))], [1.0]] * 9000


def test_what_is_missing_may_be_any_float32(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,\n2,\n")
    for missing in (-0.0, float("nan"), float("-inf"), 3.4028234e38):
        (batch,) = Csv([tmp_path / "a.csv"], {"a": Ids(1), "b": Floats(1, missing=missing)}, header=False, batch_size=2)
        assert repr(batch["b"].tolist()) == repr([[float(np.float32(missing))]] * 2)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="missing is out of range"):
        Floats(1, missing=1e39)


@pytest.mark.parametrize(("head", "got"), [(b"a\rb\r", "new-line character"), (b"x" * 140_000, "field larger")])
def test_a_header_that_is_none(tmp_path: Path, head: bytes, got: str) -> None:
    (tmp_path / "a.csv").write_bytes(head + b"\n1\n")
    with pytest.raises(DataError, match=f"a line of a CSV file is malformed; .*{got}"):
        Csv([tmp_path / "a.csv"], {"a": Ids(1)})


def test_a_batch_may_be_changed_in_place(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n4,5,6\n")
    columns = {name: Floats(1) for name in "abc"}
    for batch in Csv([tmp_path / "a.csv"], columns, header=False, batch_size=2):
        scale = torch.ones(1, requires_grad=True)
        for column in batch.values():
            assert isinstance(column, torch.Tensor)
            column.mul_(scale).sum().backward()  # type: ignore[no-untyped-call]
        assert scale.grad == 21


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("header", [False, True])
def test_the_mark_of_the_byte_order_is_no_part_of_a_cell(tmp_path: Path, mark: bytes, header: bool) -> None:
    (tmp_path / "a.csv").write_bytes(mark + b"id,name\n" * header + b"5,x\n")
    columns = {"id": Ids(1), "name": Ids(1, hash=True)}
    (batch,) = Csv([tmp_path / "a.csv"], columns, header=header, batch_size=1)
    assert [value.tolist() for value in batch.values() if not isinstance(value, Ragged)] == [[[5]], [[fnv1a(b"x")]]]


def test_columns_in_another_order_than_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,c,d\n1,2|3,x,0.5\n4,,y,1.5\n")
    columns = {"d": Floats(1), "b": Ids(), "a": Ids(1)}
    (batch,) = Csv([tmp_path / "a.csv"], columns, list_delimiter="|", batch_size=2)
    assert batch["d"].tolist() == [[0.5], [1.5]]  # type: ignore[union-attr]
    assert batch["a"].tolist() == [[1], [4]]  # type: ignore[union-attr]
    assert [each.tolist() for each in batch["b"]] == [[2, 3], [0, 2]]
    columns = {"d": Floats(1), "a": Ids(1)}
    (batch,) = Csv([tmp_path / "a.csv"], columns, batch_size=2)
    assert (batch["d"].tolist(), batch["a"].tolist()) == ([[0.5], [1.5]], [[1], [4]])  # type: ignore[union-attr]
