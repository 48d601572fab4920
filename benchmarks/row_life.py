"""Rows that come and go by rules, in jobs of one process: what it costs to count ids that have no row, and whether a
step waits while many rows leave.

    python benchmarks/row_life.py [--quick] [--ids N] [--rows N] [--json FILE]

``CountFilter``: a look-up has 26,000 ids that were never seen before, until ``--ids`` were, and none gets a row. "bytes
an id" is what the process has grown by. Evictions: a table has ``--rows`` rows, half of which leave after one step
while the training goes on, and are taken out bit by bit. Every job has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import print_table, write_json

import fleet

LOOKED_UP, MADE = 26_000, 50_000
DIM = 16
FILTERS = {"exact": {}, "sketch": {"sketch_mb": 128}}
RULES = ("unused", "recent", "often")


def job(rules: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    fleet.init()
    table = fleet.nn.Embedding(None, DIM, **rules)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    return table, fleet.distributed_optimizer(optimizer, fleet.StrategyFactory.create_sync_strategy(), model=table)


def step(table: torch.nn.Module, optimizer: Any, ids: np.ndarray[Any, Any]) -> float:
    began = time.perf_counter()
    optimizer.minimize(table(torch.from_numpy(ids)).sum() * 0.0)
    return time.perf_counter() - began


def count(kind: str, ids: int) -> dict[str, Any]:
    rule = FILTERS[kind]
    table, optimizer = job({"admit": fleet.nn.CountFilter(3, **rule)})
    fleet.init_worker()
    # Of about the golden ratio's multiples none comes twice, and they lie anywhere.
    every = (np.arange(start, start + LOOKED_UP) * 0x9E3779B97F4A7C1 for start in range(0, ids, LOOKED_UP))
    step(table, optimizer, next(every))
    before = psutil.Process().memory_info().rss
    took = [step(table, optimizer, each) for each in every]
    grown = psutil.Process().memory_info().rss - before
    about = fleet.summary()["tables"]["weight"]
    fleet.stop_worker()
    return {
        "what": f"CountFilter(3), {kind}",
        "ids": ids,
        "rows": about["rows"],
        "bytes an id": grown / ids,
        **milliseconds(took),
    }


def evict(kind: str, rows: int) -> dict[str, Any]:
    fill = rows // MADE
    every = fill + fill // 4
    os.environ["FLEET_EVICT_EVERY"] = str(every)
    rule = fleet.nn.Unused(steps=every - fill // 2) if kind == "unused" else fleet.nn.MaxRows(rows // 2, by=kind)
    table, optimizer = job({"evict": rule})
    fleet.init_worker()
    for start in range(0, rows, MADE):
        step(table, optimizer, np.arange(start, start + MADE))
    draw = np.random.default_rng(3)
    took = [step(table, optimizer, draw.integers(rows // 2, rows, LOOKED_UP)) for _ in range(2 * every - fill - 1)]
    about = fleet.summary()["tables"]["weight"]
    fleet.stop_worker()
    return {
        "what": f"half of the rows leave, {kind}",
        "rows": rows,
        "evicted": about["evicted"],
        **milliseconds(took),
        "evicting step ms": 1e3 * took[every - fill - 1],
    }


def milliseconds(took: list[float]) -> dict[str, float]:
    median = statistics.median(took)
    return {"median ms": 1e3 * median, "slowest ms": 1e3 * max(took), "of the median": max(took) / median}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a million ids, and as many rows")
    parser.add_argument("--ids", type=int, default=100_000_000)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.ids = options.rows = 1_000_000
    if options.only in FILTERS:
        print(json.dumps(count(options.only, options.ids)))
    elif options.only:
        print(json.dumps(evict(options.only, options.rows)))
    else:
        command = [sys.executable, __file__, "--ids", str(options.ids), "--rows", str(options.rows), "--only"]
        found = [
            json.loads(subprocess.run([*command, kind], check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            for kind in (*FILTERS, *RULES)
        ]
        for part in (found[: len(FILTERS)], found[len(FILTERS) :]):
            print_table("", list(part[0]), [list(each.values()) for each in part])
        write_json(options.json, results=found)


if __name__ == "__main__":
    main()
