"""Reading samples of a click model from files: CPU seconds for a million, of Fleet and of others, in turn.

    python benchmarks/data.py [--quick] [--json FILE] [--peers FOLDER]

A sample is a label, 13 numbers with some 17 digits and 26 slots of one id each below a million; ``bags`` has one to
three ids a slot. ``Criteo`` is the format of that company's click logs, where numbers are small counts, ids are eight
letters that are hashed, and some are missing; as MultiSlot text it has numbers for the letters. All of it is read, into
batches of 1000 for those who make batches, by one thread; CPU seconds are those of all threads. Peers have the samples
in files of their format: pandas and pyarrow read CSV into one table, and pyarrow Parquet into a tensor for each column
of a group of rows. PaddlePaddle reads the same MultiSlot text as Fleet, if $BENCHMARK_PEERS or ``--peers`` has it
(README.md), and what the two have read is compared, bit by bit. ``hand-over`` is what the process that trains spends
where a ``DataLoader``'s worker process reads.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import torch
from measuring import PROGRAMS, print_table, progress, write_json
from torch.utils.data import DataLoader

from fleet.data import Csv, Floats, Ids, MultiSlot, Parquet, Ragged, write_multislot
from fleet.data.dataset import SampleFiles

NUMBERS, SLOTS, BATCH, ROUNDS = 13, 26, 1000, 3
DENSE = tuple(f"I{i}" for i in range(1, NUMBERS + 1))
SPARSE = tuple(f"C{i}" for i in range(1, SLOTS + 1))
PLAIN = {"label": Ids(1), "dense": Floats(NUMBERS), **{name: Ids(1) for name in SPARSE}}
BAGS = {"label": Ids(1), "dense": Floats(NUMBERS), **{name: Ids() for name in SPARSE}}
CRITEO = {
    "label": Ids(1),
    **{name: Floats(1, missing=0.0) for name in DENSE},
    **{name: Ids(1, missing=0, hash=True) for name in SPARSE},
}
FLAT = {"label": Ids(1), **{name: Floats(1) for name in DENSE}, **{name: Ids(1) for name in SPARSE}}


def make_files(folder: Path, samples: int) -> None:
    random = np.random.default_rng(0)
    dense = random.random((samples, NUMBERS))  # written with some 17 digits, as Python writes normalised features
    ids = random.integers(0, 1_000_000, (samples, SLOTS, 3))
    many = random.integers(1, 4, (samples, SLOTS))
    label = random.integers(0, 2, samples)
    columns = {
        "label": label,
        **dict(zip(DENSE, dense.T, strict=True)),
        **dict(zip(SPARSE, ids[:, :, 0].T, strict=True)),
    }
    table = pyarrow.table({name: np.ascontiguousarray(column) for name, column in columns.items()})
    pyarrow.csv.write_csv(table, folder / "plain.csv")
    pyarrow.parquet.write_table(table, folder / "plain.parquet", row_group_size=50_000)
    with (folder / "plain.txt").open("w") as file:
        for one in zip(label.tolist(), dense.tolist(), ids[:, :, 0].tolist(), strict=True):
            slots = " ".join(f"1 {id}" for id in one[2])
            file.write(f"1 {one[0]} {NUMBERS} {' '.join(map(str, one[1]))} {slots}\n")
    make_clicks(folder, samples, random)
    with (folder / "bags.txt").open("w") as file:
        each = zip(label.tolist(), dense, ids, many, strict=True)
        slots = ({name: given[s, : size[s]] for s, name in enumerate(SPARSE)} for _, _, given, size in each)
        each = zip(label.tolist(), dense, slots, strict=True)
        write_multislot(file, ({"label": one[0], "dense": one[1], **one[2]} for one in each), BAGS)


def make_clicks(folder: Path, samples: int, random: np.random.Generator) -> None:
    counts = np.minimum(random.zipf(1.6, (samples, NUMBERS)), 65_535)
    ids = np.minimum(random.zipf(1.2, (samples, SLOTS)), 10_000_000).astype(np.uint64)
    letters = (ids * np.uint64(2_654_435_761) + np.arange(SLOTS, dtype=np.uint64) * np.uint64(97)) % np.uint64(1 << 32)
    missing = random.random((samples, NUMBERS)) < 0.2, random.random((samples, SLOTS)) < 0.05
    label = random.integers(0, 2, samples)
    with (folder / "clicks.tsv").open("w") as file, (folder / "clicks.txt").open("w") as slots:
        each = zip(*(array.tolist() for array in (label, counts, letters, *missing)), strict=True)
        for clicked, numbers, words, no_number, no_word in each:
            cells = ["" if none else str(number) for number, none in zip(numbers, no_number, strict=True)]
            cells += ["" if none else f"{word:08x}" for word, none in zip(words, no_word, strict=True)]
            file.write(f"{clicked}\t" + "\t".join(cells) + "\n")
            numbered = " ".join(f"1 {word % 1_000_003}" for word in words)
            slots.write(f"1 {clicked} {NUMBERS} {' '.join(map(str, numbers))} {numbered}\n")


def all_of(dataset: SampleFiles) -> int:
    return sum(len(batch["label"]) for batch in dataset)


def handed_over(dataset: SampleFiles) -> int:
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    return sum(len(batch["label"]) for batch in loader)


def by_pandas(file: Path) -> int:
    import pandas

    return len(pandas.read_csv(file))


def by_pyarrow(file: Path) -> int:
    options = pyarrow.csv.ReadOptions(use_threads=False)
    return int(pyarrow.csv.read_csv(file, options).num_rows)


def clicks_by_pyarrow(file: Path) -> int:
    kinds = [pyarrow.int64(), *[pyarrow.float64()] * NUMBERS, *[pyarrow.string()] * SLOTS]
    types = dict(zip(CRITEO, kinds, strict=True))
    return int(
        pyarrow.csv.read_csv(
            file,
            pyarrow.csv.ReadOptions(use_threads=False, column_names=list(types)),
            pyarrow.csv.ParseOptions(delimiter="\t"),
            pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
        ).num_rows
    )


def tensors_by_pyarrow(file: Path) -> int:
    samples = 0
    with pyarrow.parquet.ParquetFile(file) as parquet:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, use_threads=False)
            columns = {name: torch.tensor(table.column(name).to_numpy()) for name in table.column_names}
            samples += len(columns["label"])
    return samples


def digests(dataset: SampleFiles) -> dict[str, str]:
    """Of every slot's values, in their order."""
    found = {name: hashlib.sha256() for name in dataset.columns}
    for batch in dataset:
        for name, column in batch.items():
            values = column.values if isinstance(column, Ragged) else column
            found[name].update(values.numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in found.items()}


def by_paddle(python: Path, file: Path, columns: dict[str, Any], expected: dict[str, str]) -> float:
    slots = [[name, "float32" if isinstance(c, Floats) else "int64", c.width] for name, c in columns.items()]
    command = [python, PROGRAMS / "paddle18_reader.py", file, json.dumps(slots), str(BATCH)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["digests"] == expected, "PaddlePaddle has read other values"
    return float(report["cpu_s"])


def cpu_of(read: Callable[[], int], samples: int) -> float:
    began = time.process_time()
    assert read() == samples
    return time.process_time() - began


def readers(folder: Path, samples: int, peers: Path | None) -> dict[str, Callable[[], float]]:
    """What is measured: each returns its CPU seconds."""
    plain, bags, csv, parquet = (folder / name for name in ("plain.txt", "bags.txt", "plain.csv", "plain.parquet"))
    clicks = folder / "clicks.txt", folder / "clicks.tsv"
    tabs: dict[str, Any] = {"delimiter": "\t", "header": False, "batch_size": BATCH}
    here: dict[str, Callable[[], int]] = {
        "MultiSlot": lambda: all_of(MultiSlot([plain], PLAIN, batch_size=BATCH)),
        "MultiSlot, shuffled": lambda: all_of(MultiSlot([plain], PLAIN, batch_size=BATCH, shuffle_mb=16)),
        "MultiSlot, bags": lambda: all_of(MultiSlot([bags], BAGS, batch_size=BATCH)),
        "MultiSlot, hand-over": lambda: handed_over(MultiSlot([plain], PLAIN, batch_size=BATCH)),
        "MultiSlot, bags, hand-over": lambda: handed_over(MultiSlot([bags], BAGS, batch_size=BATCH)),
        "MultiSlot, Criteo": lambda: all_of(MultiSlot([clicks[0]], PLAIN, batch_size=BATCH)),
        "MultiSlot, Criteo, shuffled": lambda: all_of(MultiSlot([clicks[0]], PLAIN, batch_size=BATCH, shuffle_mb=16)),
        "Csv, Criteo": lambda: all_of(Csv([clicks[1]], CRITEO, **tabs)),
        "Csv, Criteo, shuffled": lambda: all_of(Csv([clicks[1]], CRITEO, **tabs, shuffle_mb=16)),
        "pyarrow.csv.read_csv, Criteo": lambda: clicks_by_pyarrow(clicks[1]),
        "Csv": lambda: all_of(Csv([csv], FLAT, batch_size=BATCH)),
        "Parquet": lambda: all_of(Parquet([parquet], FLAT, batch_size=BATCH)),
        "Parquet, shuffled": lambda: all_of(Parquet([parquet], FLAT, batch_size=BATCH, shuffle_mb=16)),
        "pyarrow.csv.read_csv": lambda: by_pyarrow(csv),
        "pyarrow, Parquet into tensors": lambda: tensors_by_pyarrow(parquet),
    }
    if importlib.util.find_spec("pandas"):
        here["pandas.read_csv"] = lambda: by_pandas(csv)
    measured: dict[str, Callable[[], float]] = {name: partial(cpu_of, read, samples) for name, read in here.items()}
    python = peers / "paddle18" / "bin" / "python" if peers else None
    if python is not None and python.exists():
        for name, file, columns in (("paddle 1.8.5", plain, PLAIN), ("paddle 1.8.5, bags", bags, BAGS)):
            expected = digests(MultiSlot([file], columns, batch_size=BATCH))
            measured[name] = partial(by_paddle, python, file, columns, expected)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 samples instead of 200,000")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--peers", type=Path, default=os.environ.get("BENCHMARK_PEERS"), help="folder with paddle18")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    samples = 20_000 if options.quick else 200_000
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), samples)
        measured = readers(Path(folder), samples, options.peers and Path(options.peers))
        for read in measured.values():
            read()  # compiles, and has the files in memory
        rounds = [(name, read) for _ in range(ROUNDS) for name, read in measured.items()]
        figures: dict[str, list[float]] = {name: [] for name in measured}
        for name, read in progress(rounds, lambda each: each[0]):
            figures[name].append(read() / samples * 1e6)
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    rows = [(name, statistics.median(each), min(each), 1 / statistics.median(each)) for name, each in figures.items()]
    headings = ["reader", "median", "best", "millions a second"]
    print_table("CPU seconds for a million samples", headings, rows)
    write_json(options.json, samples=samples, bytes=sizes, cpu_s_per_million=figures)


if __name__ == "__main__":
    main()
