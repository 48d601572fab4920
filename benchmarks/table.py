"""What a sparse table does a second on one core, what it takes, and how long a single call may take while it grows.

    python benchmarks/table.py [--quick] [--json FILE]

Rows of 16 floats with Adagrad's state, requests of 26,000 ids, and tables of different sizes, filled request by
request. Rates are in millions of rows a second, of the time in which this process computed, so that a busy machine
spoils them less; all but ``created`` are medians over requests:

    found      ids looked up, all known
    read       rows looked up and copied out
    updated    gradients applied to rows that are there
    created    gradients applied to rows that are not: rows made, given their initial values and updated; the mean, as
               growing is part of it
    steps      8000 ids, the same in every table, read and updated: what it costs must not depend on what else is there

``worst`` is the slowest request while the table grew, in milliseconds of computing, and ``waited`` the one that took
longest with all waits for a processor. ``bytes`` are those of the process for each row, at the worst moment after the
first tenth; the numbers themselves and the id are 136.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fleet.kernels import RULES
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.table.table import Table

DIM, REQUEST, TOUCHED = 16, 26_000, 8_000
SPEC = TableSpec("user", DIM, "float32", 0, None, Initializer.parse("uniform(-0.1, 0.1)"))
OPTIONS = {"lr": 0.01}
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
REPEATS = 60
Figures = dict[str, float]


def numbered(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Distinct ids without an order that an index could profit from."""
    return numbers * 0x9E3779B97F4A7C1 + 12345


def rate(call: Callable[[np.ndarray[Any, Any]], object], requests: list[np.ndarray[Any, Any]]) -> float:
    rates = []
    for ids in requests:
        began = time.thread_time()
        call(ids)
        rates.append(ids.size / (time.thread_time() - began) / 1e6)
    return statistics.median(rates)


def measure(size: int) -> Figures:
    kernel = RULES["Adagrad"].rows
    assert kernel is not None
    table, process = Table(SPEC, kernel, seed=1), psutil.Process()
    table.warm(OPTIONS)
    # A virtual machine gets memory it has not used lately from its host, page by page; that is not the table's doing.
    np.ones(size * 200, np.uint8)
    grads = np.full((REQUEST, DIM), 0.01, np.float32)

    def update(ids: np.ndarray[Any, Any]) -> None:
        table.apply(ids, grads[: ids.size], OPTIONS, 1)

    empty = process.memory_info().rss
    walls, computing, worst_bytes = [], [], 0.0
    for start in range(0, size, REQUEST):
        ids = numbered(np.arange(start, min(size, start + REQUEST)))
        began, computed = time.perf_counter(), time.thread_time()
        update(ids)
        computing.append(time.thread_time() - computed)
        walls.append(time.perf_counter() - began)
        if start > size // 10:
            worst_bytes = max(worst_bytes, (process.memory_info().rss - empty) / len(table))

    random = np.random.default_rng(0)
    drawn = [random.integers(0, size, min(REQUEST, size)) for _ in range(REPEATS)]
    known = [numbered(each) for each in drawn]
    # Updates are of distinct ids, out of order, and none are in the cache because they were just read.
    distinct = [numbered(random.permutation(np.unique(random.integers(0, size, each.size)))) for each in drawn]
    touched = numbered(random.permutation(10_000)[:TOUCHED])

    def step(ids: np.ndarray[Any, Any]) -> None:
        table.read(ids, training=True)
        update(ids)

    return {
        "rows": size,
        "found": rate(table.known, known),
        "read": rate(lambda ids: table.read(ids, training=True), known[::-1]),
        "updated": rate(update, distinct),
        "created": size / sum(computing) / 1e6,
        "steps": rate(step, [touched] * REPEATS),
        "worst": max(computing) * 1e3,
        "waited": max(walls) * 1e3,
        "bytes": worst_bytes or (process.memory_info().rss - empty) / len(table),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to a million rows")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    measured = []
    for size in SIZES[: -1 if options.quick else None]:
        figures = measure(size)
        if not measured:
            print("".join(f"{name:>10}" for name in figures))
        print(f"{size:>10}" + "".join(f"{value:>10.1f}" for value in list(figures.values())[1:]), flush=True)
        measured.append(figures)
    if options.json:
        options.json.write_text(json.dumps({"numpy": np.__version__, "tables": measured}, indent=1))


if __name__ == "__main__":
    main()
