"""MultiSlot text: what is read, against a parser in plain Python, and what is said of what cannot be."""

from __future__ import annotations

import gzip
import io
import logging
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fleet.data import Csv, Floats, Ids, Ignored, MultiSlot, Ragged, text, write_multislot
from fleet.data.columns import Column
from fleet.data.line_parser import nearest_float32
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError

SLOTS: dict[str, Column] = {"label": Ids(1), "dense": Floats(2), "user": Ids(), "item": Ids(2), "note": Ignored()}
GOOD = "1 1 2 0.5 -1e-3 3 7 8 9 2 4 5 1 hello"


def written(path: Path, content: str | bytes, name: str = "part-0") -> str:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    (path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path / name)


def read(file: str, slots: dict[str, Column], **options: Any) -> list[dict[str, list[float]]]:
    """Every sample, as lists of Python's numbers."""
    return [{name: value.tolist() for name, value in sample.items()} for sample in MultiSlot([file], slots, **options)]


# ---------------------------------------------------------------------------------------------- what is read


def test_a_batch_is_matrices_and_bags(tmp_path: Path) -> None:
    file = written(tmp_path, f"{GOOD}\n1 0 2 1 2 1 18446744073709551615 2 -1 6 2 a b\n")
    (batch,) = MultiSlot([file], SLOTS, batch_size=2)
    assert list(batch) == ["label", "dense", "user", "item"]
    assert torch.equal(batch["label"], torch.tensor([[1], [0]]))
    assert torch.equal(batch["dense"], torch.tensor([[0.5, -1e-3], [1.0, 2.0]]))
    assert torch.equal(batch["item"], torch.tensor([[4, 5], [-1, 6]]))
    assert isinstance(batch["user"], Ragged)
    assert torch.equal(batch["user"].values, torch.tensor([7, 8, 9, -1]))
    bag = torch.nn.EmbeddingBag(10, 3, mode="sum")
    batch["user"].values[3] = 2
    expected = torch.stack([bag.weight[7:10].sum(0), bag.weight[2]])
    assert torch.allclose(bag(*batch["user"]), expected)


@pytest.mark.parametrize("name", ["part-0", "part-0.gz"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n  \n"])
def test_ends_of_lines_and_blanks(tmp_path: Path, name: str, end: str) -> None:
    file = written(tmp_path, f"1 3\t2  5 6\r\n\n 1 4 1 7 \n1 5 1 8{end}", name)
    slots: dict[str, Column] = {"a": Ids(1), "b": Ids()}
    assert read(file, slots) == [{"a": [3], "b": [5, 6]}, {"a": [4], "b": [7]}, {"a": [5], "b": [8]}]


def test_what_the_generators_of_paddle_write(tmp_path: Path) -> None:
    """Lines of PaddlePaddle 1.8.5's MultiSlotDataGenerator, and what its QueueDataset hands to a program for them."""
    lines = (
        "3 1926 8 17 1 1 2 0.1 1e-05\n"
        "1 18446744073709551615 1 0 2 3 -0.0\n"
        "2 9223372036854775808 0 1 1 2 1e+16 0.030150753768844223\n"
    )
    found = read(written(tmp_path, lines), {"words": Ids(), "label": Ids(1), "dense": Floats(2)})
    assert [sample["words"] for sample in found] == [[1926, 8, 17], [-1], [-(2**63), 0]]
    assert [sample["label"] for sample in found] == [[1], [0], [1]]
    single = [np.float32(x).item() for x in (0.1, 1e-05, 3, -0.0, 1e16, 0.030150753768844223)]
    assert [x for sample in found for x in sample["dense"]] == single
    assert math.copysign(1, found[1]["dense"][1]) == -1


# ---------------------------------------------------------------------------------------------- numbers

decimals = st.builds(
    lambda sign, whole, part, exponent: sign + whole + part + exponent,
    st.sampled_from(["", "-", "+"]),
    st.text("0123456789", min_size=1, max_size=30),
    st.one_of(st.just(""), st.just("."), st.text("0123456789", max_size=30).map(".".__add__)),
    st.one_of(st.just(""), st.integers(-60, 30).map("e{}".format), st.integers(-400, 30).map("E{:+}".format)),
)


def halfway(number: float) -> str:
    """All digits of what lies exactly between a float32 and the next larger one."""
    beyond = float(np.nextafter(np.float32(number), np.float32(np.inf)))
    digits = f"{Decimal((number + beyond) / 2):f}"
    return digits if "." in digits else f"{digits}."


#: Exactly between two float32 numbers, and a little to either side of it.
halves = st.one_of(
    st.builds("{}{}".format, st.floats(-(2.0**90), 2.0**90, width=32).map(halfway), st.sampled_from(["", "0", "0001"])),
    st.floats(2.0**-60, 2.0**60, width=32).map(
        lambda number: f"{Decimal(halfway(number)) * Decimal('0.99999999999999999'):e}"
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(decimals, halves, st.floats(width=32).map(repr), st.floats(-1e38, 1e38).map(repr)), min_size=1)
)
@example(["16777217", "16777219", "16777217.0", "16777217.000000000001", "1e-45", "7e-46", "0.7006492321624085e-45"])
@example(["340282356779733660e21", "340282356779733661637539395458142568447", "-34028235677973366e22"])
@example(
    [
        "340282356779733661637539395458142568448",
        "340282356779733661.637539395458142568447999e21",
        "0.00034028235677974e42",
    ]
)
@example(["1.17549435e-38", "1.1754942e-38", "3.4028235e38", "3.4028235677973366e38", "3.4028236e38", "1e39", "1e999"])
@example([".5", "5.", "-.5e-3", "nan", "-inf", "INFINITY", "00000000000000000000000000000001", "0e999", "1e-999"])
@example(["0." + "0" * 40 + "1", "1" + "0" * 37, "1" * 39, "9" * 25 + "e-10"])
def test_a_float_is_the_nearest_one(tmp_path: Path, numbers: list[str]) -> None:
    expected = []
    for number in numbers:
        if not math.isfinite(float(number)) and not number[-1].isdigit():
            expected.append(np.float32(float(number)))
        elif 2**128 - 2**104 < abs(Fraction(number)) < 2**128 - 2**103:  # between the largest one and too large
            expected.append(np.float32(math.copysign(2**128 - 2**104, float(number))))
        elif abs(Fraction(number)) < 2**128 - 2**103:
            expected.append(nearest_float32(number))
    file = written(tmp_path, "".join(f"1 {number}\n" for number in numbers))
    found = [value for sample in MultiSlot([file], {"x": Floats(1)}, on_error="skip") for value in sample["x"].numpy()]
    assert np.array(found).view(np.int32).tolist() == np.array(expected, np.float32).view(np.int32).tolist()


@settings(max_examples=60, deadline=None)
@given(st.one_of(decimals, halves))
def test_what_decides_doubtful_floats_is_right(number: str) -> None:
    """No other float32 is nearer, and of two that are equally near it is the even one."""
    exact = Fraction(number)
    assume(abs(float(number)) < 2**128 - 2**103)
    found = nearest_float32(number)
    distance = abs(exact - Fraction(float(found)))
    for towards in (-np.inf, np.inf):
        other = np.nextafter(found, np.float32(towards))
        if np.isfinite(other):
            away = abs(exact - Fraction(float(other)))
            assert distance < away or (distance == away and found.view(np.int32) % 2 == 0)


def test_many_doubtful_floats_in_a_line(tmp_path: Path) -> None:
    numbers = [f"{2**24 + 2 * k + 1}.5e-1" for k in range(3)] + ["1e-45"] * 10_000
    file = written(tmp_path, f"{len(numbers)} {' '.join(numbers)}\n")
    (sample,) = MultiSlot([file], {"x": Floats()})
    assert sample["x"].tolist() == [float(nearest_float32(number)) for number in numbers]


# ---------------------------------------------------------------------------------------------- any line

words = st.one_of(
    st.integers(-(2**65), 2**65).map(str),
    st.integers(0, 4).map(str),
    st.sampled_from(["1.5", "x", "-", "+3", "1e2", "nan", "", "\0", "0x10", "1_0", "é"]),
)
lines = st.lists(st.lists(words, max_size=12).map(" ".join), max_size=8)
PLAIN: dict[str, Column] = {"a": Ids(1), "b": Floats(), "c": Ignored(), "d": Ids()}


def plainly(line: str) -> dict[str, list[float]] | None:
    """What the line says, in the simplest Python, or None if it is malformed."""
    rest = line.split(" ")
    rest = [word for word in rest if word]
    sample: dict[str, list[float]] = {}
    for name, column in PLAIN.items():
        if not rest or not re.fullmatch(r"[+-]?[0-9]+", rest[0]) or int(rest[0]) < 1:
            return None
        count = int(rest.pop(0))
        values, rest = rest[:count], rest[count:]
        if len(values) < count or (isinstance(column, Ids) and column.width not in (None, count)):
            return None
        if isinstance(column, Ids):
            if not all(re.fullmatch(r"[+-]?[0-9]+", value) and -(2**63) <= int(value) < 2**64 for value in values):
                return None
            sample[name] = [(int(value) + 2**63) % 2**64 - 2**63 for value in values]
        elif isinstance(column, Floats):
            number = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
            if not all(re.fullmatch(number + "|nan", value) for value in values):
                return None
            sample[name] = [float("nan") if v == "nan" else nearest_float32(v).item() for v in values]
    return None if rest else sample


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines)
@example(["1 1 1 2 1 x 1 3", "1 1 1 2 1 x 1", "1 1 1 2 1 x 1 3 4", "2 1 1 1 2 1 x 1 3"])
def test_any_line_is_read_as_plain_python_reads_it(tmp_path: Path, lines: list[str]) -> None:
    file = written(tmp_path, "".join(f"{line}\n" for line in lines))
    expected = [sample for line in lines if (sample := plainly(line)) is not None]
    assert repr(read(file, PLAIN, on_error="skip")) == repr(expected)
    bad = [number for number, line in enumerate(lines, 1) if line.strip(" ") and plainly(line) is None]
    if bad:
        with pytest.raises(DataError, match=re.escape(f"{file}:{bad[0]}, slot")):
            read(file, PLAIN)


@pytest.mark.parametrize(
    ("line", "slot", "expected", "got"),
    [
        ("1 1 2 0.5", "dense", "2 values", "1 before the end of the line"),
        ("1 1", "dense", "how many values the slot has, 1 or more", "the end of the line"),
        ("0", "label", "how many values the slot has, 1 or more", "'0'"),
        ("-1 3", "label", "how many values the slot has, 1 or more", "'-1'"),
        ("2 1 1 2 1 2", "label", "1 values", "2"),
        ("1 x", "label", "a whole number", "'x'"),
        ("1 1.0", "label", "a whole number", "'1.0'"),
        ("1 18446744073709551616", "label", "a whole number from -2^63 to 2^64 - 1", "'18446744073709551616'"),
        ("1 -9223372036854775809", "label", "a whole number from -2^63 to 2^64 - 1", "'-9223372036854775809'"),
        ("1 1 2 1,5 2", "dense", "a number", "'1,5'"),
        ("1 1 2 1e39 2", "dense", "a number that a float32 can hold", "'1e39'"),
        (f"{GOOD} 9 more", "note", "the end of the line behind the last slot", "'9'"),
        ("1 \0\udcff\udcfe", "label", "a whole number", r"'\x00\\xff\\xfe'"),
        ("1 " + "7" * 100, "label", "a whole number from -2^63 to 2^64 - 1", "'" + "7" * 40 + "'…"),
        ("9999999999999999999 1", "label", "how many values the slot has, 1 or more", "'9999999999999999999'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, slot: str, expected: str, got: str) -> None:
    file = written(tmp_path, f"{GOOD}\n\n{line}\r\n{GOOD}\n")
    with pytest.raises(DataError) as caught:
        read(file, SLOTS)
    assert caught.value.where == f"{file}:3, slot {slot!r}"
    assert (caught.value.expected, caught.value.got) == (expected, got)
    assert len(read(file, SLOTS, on_error="skip")) == 2


def test_the_line_is_that_of_the_file_wherever_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 64)
    monkeypatch.setattr(text, "CHUNK", 16)
    file = written(tmp_path, "".join(f"1 {number if number != 61 else 'x'}\n" for number in range(1, 100)))
    with pytest.raises(DataError, match=re.escape(f"{file}:61,")):
        read(file, {"a": Ids(1)})


@pytest.mark.parametrize("name", ["part-0", "part-0.gz"])
def test_a_line_that_is_too_long_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(text, "CHUNK", 16)
    monkeypatch.setattr(text, "LONGEST_LINE", 100)
    file = written(tmp_path, f"1 1\n1 {'2' * 1000}\n1 3\n", name)
    with pytest.raises(DataError, match=re.escape(f"a line is too long; at {file}:2; expected at most 100 bytes")):
        read(file, {"a": Ids(1)})
    assert read(file, {"a": Ids(1)}, on_error="skip") == [{"a": [1]}, {"a": [3]}]


def test_a_compressed_file_that_ends_too_early(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"1 {number**5 % 99991}\n" for number in range(5000)).encode())
    (tmp_path / "a.gz").write_bytes(whole[: len(whole) // 2])
    file = str(tmp_path / "a.gz")
    found = read(file, {"a": Ids(1)}, on_error="skip")
    assert [sample["a"] for sample in found] == [[number**5 % 99991] for number in range(len(found))]
    assert 1000 < len(found) < 5000
    told = re.escape(f"a compressed file is damaged or ends too early; at {file}:{len(found) + 1}")
    with pytest.raises(DataError, match=told):
        read(file, {"a": Ids(1)})
    (tmp_path / "b.gz").write_bytes(b"1 1\n1 2\n")
    with pytest.raises(DataError, match=r"damaged or ends too early; at .*b\.gz:1;.*[Nn]ot a gzipped file"):
        read(str(tmp_path / "b.gz"), {"a": Ids(1)})


def test_what_is_skipped_is_counted_and_some_of_it_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, "1 1\n" + "1 x\n" * 1000)
    with caplog.at_level(logging.WARNING, "fleet"):
        assert len(read(file, {"a": Ids(1)}, on_error="skip")) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 12
    assert f"{file}:2, slot 'a'" in messages[0]
    assert messages[-1].startswith("1000 malformed samples were skipped")


# ---------------------------------------------------------------------------------------------- writing


def test_what_is_written_is_read(tmp_path: Path) -> None:
    samples = [
        {"label": 1, "dense": np.array([0.1, -2.5]), "user": [2**64 - 1, 5], "item": torch.tensor([1, 2])},
        {"label": [0], "dense": [1e-45, float("nan")], "user": [-3], "item": (3, 4)},
    ]
    with (tmp_path / "out").open("w") as file:
        write_multislot(file, samples, SLOTS)
    first, second = MultiSlot([tmp_path / "out"], SLOTS)
    assert first["user"].tolist() == [-1, 5]
    assert torch.equal(first["dense"], torch.tensor([0.1, -2.5]))
    assert second["item"].tolist() == [3, 4]
    assert second["dense"].tolist()[0] == np.float32(1e-45).item()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([], ConfigurationError, "wrong number of values; at sample 0, slot 'a'; expected 1 or more; got 0"),
        ([1.5], ArgumentTypeError, "one or several whole numbers; at sample 0, slot 'a'"),
        ("x", ArgumentTypeError, "slot 'a'"),
        (2**64, ConfigurationError, "a number is too large for its slot; at sample 0, slot 'a'"),
        ([[1]], ArgumentTypeError, "slot 'a'"),
    ],
)
def test_what_cannot_be_written(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        write_multislot(io.StringIO(), [{"a": value}], {"a": Ids()})


# ---------------------------------------------------------------------------------------------- arguments


def refused() -> Iterator[tuple[dict[str, Any], type[Exception], str]]:
    yield {"files": "part-0"}, ArgumentTypeError, "files must be a list"
    yield {"files": [3]}, ArgumentTypeError, "a file must be a path"
    yield {"columns": ["a"]}, ArgumentTypeError, "the columns must be a mapping"
    yield {"columns": {"a": int}}, ArgumentTypeError, "column 'a' is of the wrong type"
    yield {"columns": {"a": Ignored()}}, ConfigurationError, "no column is to be read"
    yield {"columns": {"a": Ids(1, missing=0)}}, ConfigurationError, "missing has nothing to act on"
    yield {"columns": {"a": Ids(1, hash=True)}}, ConfigurationError, "hash has nothing to act on"
    yield {"batch_size": 0}, ConfigurationError, "batch_size is out of range"
    yield {"batch_size": True}, ArgumentTypeError, "batch_size must be an int"
    yield {"drop_last": 1}, ArgumentTypeError, "drop_last must be True or False"
    yield {"drop_last": True}, ConfigurationError, "drop_last has nothing to act on"
    yield {"shuffle_mb": -1}, ConfigurationError, "shuffle_mb is out of range"
    yield {"shuffle_mb": True}, ArgumentTypeError, "shuffle_mb must be a number"
    yield {"shuffle_mb": math.inf}, ConfigurationError, "shuffle_mb is out of range"
    yield {"seed": -1}, ConfigurationError, "seed is out of range"
    yield {"on_error": "ignore"}, ConfigurationError, "on_error is unknown"


@pytest.mark.parametrize(("arguments", "error", "message"), [*refused()], ids=str)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MultiSlot(**{"files": [], "columns": {"a": Ids(1)}, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ids(0), "width is out of range"),
        (lambda: Floats(1.0), "width must be an int"),  # type: ignore[arg-type]
        (lambda: Ids(1, missing=0.5), "missing must be an int"),  # type: ignore[arg-type]
        (lambda: Floats(missing=0), "missing has nothing to stand in for"),
        (lambda: Ids(hash=1), "hash must be True or False"),  # type: ignore[arg-type]
        (lambda: Ids(1, missing=2**63), "missing is out of range"),
    ],
)
def test_a_column_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises((ArgumentTypeError, ConfigurationError), match=message):
        make()


@pytest.mark.parametrize("kind", [MultiSlot, Csv])
def test_a_file_that_is_not_there_is_named_at_once(kind: Any, tmp_path: Path) -> None:
    for file in (str(tmp_path / "none"), "memory://fleet-data/none"):
        with pytest.raises(DataError, match=f"cannot be read; at {file}"):
            kind([file], {"a": Ids(1)})
