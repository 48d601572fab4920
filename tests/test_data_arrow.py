"""Parquet and CSV: what is read, against what was written, and what is said of what cannot be."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import fleet
from fleet.data import Csv, Floats, Ids, Ignored, MultiSlot, Parquet, Ragged, text, write_multislot
from fleet.errors import ArgumentTypeError, ConfigurationError, DataError, UnsupportedError

ROWS = 500
COLUMNS = {"label": Ids(1), "price": Floats(1), "pair": Floats(2), "users": Ids()}


@pytest.fixture
def samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "label": int(rng.integers(2)),
            "price": float(np.float32(rng.random())),
            "pair": rng.random(2).astype(np.float32).tolist(),
            "users": rng.integers(-(2**62), 2**62, rng.integers(1, 5)).tolist(),
        }
        for _ in range(ROWS)
    ]


def plain(batches: Any) -> list[Any]:
    return [
        {
            name: [each.tolist() for each in value] if isinstance(value, Ragged) else value.tolist()
            for name, value in b.items()
        }
        for b in batches
    ]


def parquet(path: Path, table: pa.Table, **options: Any) -> list[str]:
    pq.write_table(table, path / "a.parquet", **options)
    return [str(path / "a.parquet")]


def csv(path: Path, content: str, name: str = "a.csv") -> list[str]:
    data = content.encode()
    (path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return [str(path / name)]


def test_one_and_the_same_in_every_format(
    samples: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", 4000)
    monkeypatch.setattr(text, "CHUNK", 1000)
    with (tmp_path / "a.txt").open("w") as file:
        write_multislot(file, samples, COLUMNS)
    lines = [
        f"{s['price']},x,{'|'.join(map(str, s['users']))},{s['label']},{'|'.join(map(str, s['pair']))}" for s in samples
    ]
    content = "price,other,users,label,pair\n" + "\n".join(lines)
    options: dict[str, Any] = {"batch_size": 64}
    expected = plain(MultiSlot([tmp_path / "a.txt"], COLUMNS, **options))
    assert sum(len(batch["label"]) for batch in expected) == ROWS
    table = pa.Table.from_pylist(samples).append_column("other", pa.array(["x"] * ROWS))
    assert plain(Parquet(parquet(tmp_path, table, row_group_size=150), COLUMNS, **options)) == expected
    assert plain(Csv(csv(tmp_path, content), COLUMNS, list_delimiter="|", **options)) == expected
    packed = csv(tmp_path, content.replace("\n", "\r\n"), "a.csv.gz")
    assert plain(Csv(packed, COLUMNS, list_delimiter="|", **options)) == expected


def test_types_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "small": pa.array([1, 2], pa.int8()),
            "unsigned": pa.array([2**64 - 1, 3], pa.uint64()),
            "truth": [True, False],
            "whole": pa.array([2**24 + 1, 5], pa.int64()),
            "decimal": pa.array([1, 2], pa.decimal128(5, 2)),
            "half": pa.array(np.array([0.5, 1.5], np.float16)),
            "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
            "large": pa.array([[1], [2, 3]], pa.large_list(pa.int64())),
            "names": pa.array(["a", "bc"]).dictionary_encode(),
        }
    )
    columns: dict[str, Any] = {name: Ids(1) for name in ("small", "unsigned", "truth")}
    columns |= {name: Floats(1) for name in ("whole", "decimal", "half")}
    columns |= {"fixed": Ids(2), "large": Ids(), "names": Ids(hash=True)}
    (batch,) = Parquet(parquet(tmp_path, table), columns, batch_size=2)
    assert [batch[name].flatten().tolist() for name in ("small", "unsigned", "truth")] == [[1, 2], [-1, 3], [1, 0]]
    assert [batch[name].flatten().tolist() for name in ("whole", "decimal", "half")] == [[2**24, 5], [1, 2], [0.5, 1.5]]
    assert batch["fixed"].tolist() == [[1, 2], [3, 4]]
    assert batch["large"].offsets.tolist() == [0, 1]
    assert batch["names"].values.tolist() == [fnv1a(b"a"), fnv1a(b"bc")]


def fnv1a(text: bytes) -> int:
    state = 0xCBF29CE484222325
    for byte in text:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return state - 2**64 * (state >= 2**63)


def test_strings_become_ids(tmp_path: Path) -> None:
    strings = ["", "a", "foobar", "ä", "a,b"]
    assert fnv1a(b"foobar") == 0x85944171F73967E8 - 2**64, "the test vector of the hash's authors"
    table = pa.table({"s": strings, "many": [strings, [], None, ["a"], [""]]})
    (batch,) = Parquet(parquet(tmp_path, table), {"s": Ids(1, hash=True), "many": Ids(hash=True)}, batch_size=5)
    hashes = [fnv1a(each.encode()) for each in strings]
    assert batch["s"].flatten().tolist() == hashes
    assert batch["many"].values.tolist() == [*hashes, hashes[1], hashes[0]]
    assert batch["many"].offsets.tolist() == [0, 5, 5, 5, 6]
    file = csv(tmp_path, 's;many\n"a,b";a|ä\nfoobar;\n')
    columns = {"s": Ids(1, hash=True), "many": Ids(hash=True)}
    (batch,) = Csv(file, columns, delimiter=";", list_delimiter="|", batch_size=5)
    assert batch["s"].flatten().tolist() == [hashes[4], hashes[2]]
    assert batch["many"].values.tolist() == [hashes[1], hashes[3]]


def test_what_is_missing(tmp_path: Path) -> None:
    table = pa.table({"a": [1, None], "b": [[1.0, 2.0], None], "c": [None, [3]], "d": pa.array([None, 4], pa.int32())})
    columns = {"a": Ids(1, missing=-1), "b": Floats(2, missing=0.5), "c": Ids(), "d": Ids()}
    (batch,) = Parquet(parquet(tmp_path, table), columns, batch_size=2)
    assert plain([batch]) == [{"a": [[1], [-1]], "b": [[1, 2], [0.5, 0.5]], "c": [[3], [0, 0]], "d": [[4], [0, 0]]}]
    file = csv(tmp_path, "1\t1|2\t\t\tignored\n\t\t3\t4\n".replace("4\n", "4\t\n"))
    columns = {**columns, "e": Ignored()}  # type: ignore[dict-item]
    (batch,) = Csv(file, columns, header=False, delimiter="\t", list_delimiter="|", batch_size=2)
    assert plain([batch]) == [{"a": [[1], [-1]], "b": [[1, 2], [0.5, 0.5]], "c": [[3], [0, 0]], "d": [[4], [0, 0]]}]


@pytest.mark.parametrize(
    ("column", "values", "expected", "got"),
    [
        (Ids(1), [1, 2, None], "a value", "nothing"),
        (Ids(2), [[1, 2], [3, 4], [5]], "2 values", "1"),
        (Ids(), [[1], [], [None]], "values", "a null in the list"),
        (Floats(1), [1.0, float("inf"), 1e39], "a number that a float32 can hold", "1e+39"),
    ],
)
def test_a_malformed_row_of_parquet(tmp_path: Path, column: Any, values: Any, expected: str, got: str) -> None:
    good = values[:2] * 3
    files = parquet(tmp_path, pa.table({"a": [*good, values[2], *good]}), row_group_size=4)
    with pytest.raises(DataError) as caught:
        list(Parquet(files, {"a": column}, batch_size=2))
    assert caught.value.where == f"{files[0]}, row 6, column 'a'"
    assert (caught.value.expected, caught.value.got) == (expected, got)
    assert len(list(Parquet(files, {"a": column}, on_error="skip"))) == 12


@pytest.mark.parametrize(
    ("column", "kind", "good"),
    [
        (Ids(), pa.bool_(), True),
        (Ids(hash=True), pa.binary(), b"a"),
        (Ids(hash=True), pa.large_string(), "a"),
        (Ids(hash=True), pa.dictionary(pa.int32(), pa.string()), "a"),
    ],
    ids=str,
)
def test_a_null_in_a_list_of_any_kind(tmp_path: Path, column: Any, kind: Any, good: Any) -> None:
    files = parquet(tmp_path, pa.table({"a": pa.array([[good], [good, None], [good, good]], pa.list_(kind))}))
    with pytest.raises(DataError, match="a null in the list"):
        list(Parquet(files, {"a": column}))
    assert [len(sample["a"]) for sample in Parquet(files, {"a": column}, on_error="skip")] == [1, 2]


@pytest.mark.parametrize(
    ("line", "where", "message"),
    [
        ("x,1,1", ", column 'a'", "expected a whole number; got 'x'"),
        ("1,1", "", "expected 3 cells; got 2"),
        ("1,1,1,1", "", "expected 3 cells; got 4"),
        ("1,y,1", ", column 'b'", "expected a number; got 'y'"),
        ("1,1,1|z", ", column 'c'", "expected a whole number; got 'z'"),
        ("1,1,1|", ", column 'c'", "expected a whole number; got ''"),
        ("1,1e60,1", ", column 'b'", "expected a number that a float32 can hold; got '1e60'"),
        (",1,1", ", column 'a'", "expected a value; got nothing"),
        ('"",1,1', ", column 'a'", "expected a value; got nothing"),
        ("1.5,1,1", ", column 'a'", "expected a whole number; got '1.5'"),
        ("2" * 20 + ",1,1", ", column 'a'", "expected a whole number from -2^63 to 2^64 - 1; got '2222"),
        ('1,"1,1', "", "expected a second quote in the line; got '1,\"1,1'"),
        ('1,"1""1",1', ", column 'b'", "expected a number; got '1\"1'"),
    ],
)
def test_a_malformed_line_of_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, where: str, message: str
) -> None:
    monkeypatch.setattr(text, "PIECE", 100)
    monkeypatch.setattr(text, "CHUNK", 50)
    files = csv(tmp_path, "a,b,c\n" + "1,2,3|4\n" * 20 + "\n" + line + "\r\n" + "5,6,\n" * 9)
    columns = {"a": Ids(1), "b": Floats(1), "c": Ids()}
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        list(Csv(files, columns, list_delimiter="|", batch_size=4))
    assert caught.value.where == f"{files[0]}:23{where}"
    assert len(list(Csv(files, columns, list_delimiter="|", on_error="skip"))) == 29


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("nope", Ids(), "column 'nope'; expected integers, or lists of them; got no such column; there are a, b, c"),
        ("a", Ids(), "column 'a'; expected integers, or lists of them; got double"),
        ("b", Floats(1), "column 'b'; expected numbers; got string"),
        ("b", Floats(3), "column 'b'; expected lists of 3 numbers; got string"),
        ("c", Ids(hash=True), "column 'c'; expected strings, or lists of them; got list<"),
        ("c", Ids(1, hash=True), "column 'c'; expected strings; got list<"),
    ],
)
def test_columns_that_a_parquet_file_has_not(tmp_path: Path, name: str, column: Any, message: str) -> None:
    files = parquet(tmp_path, pa.table({"a": [1.5], "b": ["x"], "c": [[1]]}))
    with pytest.raises(DataError, match=re.escape(f"{files[0]}, {message}")):
        Parquet(files, {name: column})


@pytest.mark.parametrize(
    ("content", "got"), [("a,b\n1,2\n", "none; the header is 'a,b'"), ("x,x\n", "2; the header is 'x,x'")]
)
def test_columns_that_a_csv_file_has_not(tmp_path: Path, content: str, got: str) -> None:
    files = csv(tmp_path, content)
    with pytest.raises(DataError, match=re.escape(f"{files[0]}:1, column 'x'; expected one of integers; got {got}")):
        Csv(files, {"x": Ids(1)})


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (Csv, {"delimiter": ";;"}, ConfigurationError, "delimiter is impossible"),
        (Csv, {"delimiter": "e"}, ConfigurationError, "none that a number may have; got 'e'"),
        (Csv, {"delimiter": ",", "list_delimiter": "-"}, ConfigurationError, "list_delimiter is impossible"),
        (Csv, {"delimiter": 3}, ArgumentTypeError, "delimiter must be a string"),
        (Csv, {"list_delimiter": ","}, ConfigurationError, "delimiter and list_delimiter are the same"),
        (Csv, {"header": 1}, ArgumentTypeError, "header must be True or False"),
        (Csv, {"columns": {"a": Ids(2)}}, ConfigurationError, "need a list_delimiter between them; at column 'a'"),
        (Csv, {"columns": {"a": Ids(1), "b": Ignored()}}, ConfigurationError, "nothing to ignore; at column 'b'"),
        (Parquet, {"columns": {"a": Ids(1), "b": Ignored()}}, ConfigurationError, "nothing to ignore; at column 'b'"),
    ],
)
def test_what_is_refused(kind: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kind(**{"files": [], "columns": {"a": Ids(1)}, **arguments})


def test_what_is_no_parquet_file(tmp_path: Path) -> None:
    files = csv(tmp_path, "a\n1\n")
    for wanted in (files, [str(tmp_path / "none")]):
        with pytest.raises(DataError, match=re.escape(f"cannot be read; at {wanted[0]}; got ")):
            Parquet(wanted, {"a": Ids(1)})


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = csv(tmp_path, "a\n1\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'torch-fleet[arrow]'")):
        list(Parquet(files, {"a": Ids(1)}))
    (batch,) = Csv(files, {"a": Ids(1)}, batch_size=1)
    assert batch["a"].tolist() == [[1]]


@pytest.mark.parametrize("stop", [0, 3, 9])
def test_parquet_goes_on_at_the_exact_sample(tmp_path: Path, stop: int) -> None:
    files = parquet(tmp_path, pa.table({"a": range(100)}), row_group_size=11)

    def reading() -> Parquet:
        return Parquet(files, {"a": Ids(1)}, batch_size=10, shuffle_mb=0.0005)

    expected = plain(reading())
    first, second = reading(), reading()
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    second.load_state_dict(first.state_dict())
    assert plain(second) == expected[stop:]
    assert sorted(number for batch in expected for (number,) in batch["a"]) == list(range(100))


def test_bags_of_a_loader_go_into_an_embedding_bag(tmp_path: Path) -> None:
    files = parquet(tmp_path, pa.table({"ids": [[1, 2], [], [3]]}))
    bag = torch.nn.EmbeddingBag(5, 4, mode="sum")
    (batch,) = DataLoader(Parquet(files, {"ids": Ids()}, batch_size=3), batch_size=None)
    assert torch.equal(bag(*batch["ids"])[1], torch.zeros(4))
    assert torch.allclose(bag(*batch["ids"])[0], bag.weight[1] + bag.weight[2])


def test_the_page_runs_as_it_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fleet, "init", Mock())
    monkeypatch.setattr(fleet, "split_files", list)
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert names["pooled"].shape == (100, 8)
    assert names["batch"]["dense"].shape == (100, 2)
    together = torch.cat([names["first"]["dense"], names["second"]["dense"]])
    assert len(together[:, 1].unique()) == 200
