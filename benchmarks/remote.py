"""From which size of a table on its rows belong on the servers: 26 embeddings dense on the workers, and remote.

    python benchmarks/remote.py [--quick] [--json FILE] [--rounds N] [--rows N …] [--modes MODE …] [--optimizer NAME]

A click model with 26 ``torch.nn.Embedding`` of 16 numbers a row, three layers of 32, batches of 1000. One script: with
``remote="all"`` its tables are on the servers, without they travel whole in every step. Both take turns, ``--rounds``
times, and what counts is the median of the ratios within a round. Which ids are asked for is Zipf-distributed; those
beyond a table's last row are that row. Every process has one thread for computing.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measuring import Cost, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

ROWS = (100, 1000, 10_000, 100_000)
MODES = ("sync", "async")
#: (servers, workers)
SHAPES = ((1, 1), (2, 2))
PLACES = ("dense", "all")


def steps_of(rows: int, *, quick: bool) -> int:
    """Fewer of those that carry large tables."""
    steps = 20 if rows >= 100_000 else 100 if rows >= 10_000 else 300
    return steps // 5 if quick else steps


def measure(mode: str, rows: int, shape: tuple[int, int], optimizer: str, *, quick: bool) -> Cost:
    work: dict[str, Any] = {
        "mode": mode,
        "width": 32,
        "batch": 1000,
        "tables": 26,
        "dim": 16,
        "vocabulary": rows,
        "optimizer": optimizer,
        "steps": steps_of(rows, quick=quick),
        "warmup": 5 if rows >= 100_000 else 20,
    }
    servers, workers = shape
    return run_job("ours", work, servers=servers, workers=workers)


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a fifth of the steps, small tables only")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adam"))
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    sizes = [rows for rows in options.rows if rows <= 1000] if options.quick else options.rows

    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        for mode in options.modes:
            costs: dict[tuple[int, str], list[Cost]] = {}
            turns = [(rows, place) for rows in sizes for _ in range(rounds) for place in PLACES]
            for rows, place in progress(turns, lambda turn, mode=mode: f"{mode}, {turn[0]} rows, {turn[1]}"):
                cost = measure(f"{mode}+{place}", rows, shape, options.optimizer, quick=options.quick)
                costs.setdefault((rows, place), []).append(cost)
            table = [row(rows, costs[rows, "dense"], costs[rows, "all"]) for rows in sizes]
            servers, workers = shape
            title = f"{mode}, {servers} servers, {workers} workers, {options.optimizer}, medians of {rounds} rounds"
            print_table(title, list(table[0]), [list(each.values()) for each in table])
            results.append(
                {
                    "mode": mode,
                    "shape": shape,
                    "rows": table,
                    "costs": {f"{rows} {place}": each for (rows, place), each in costs.items()},
                }
            )
    write_json(options.json, rounds=rounds, quick=options.quick, optimizer=options.optimizer, results=results)


def row(rows: int, dense: list[Cost], remote: list[Cost]) -> dict[str, Any]:
    def ms(costs: list[Cost]) -> list[float]:
        """Of one step of 1000 examples of one worker, by its share of all."""
        return [cost.seconds / cost.examples * 1e6 for cost in costs]

    def cpu_ms(costs: list[Cost]) -> list[float]:
        return [(cost.worker_cpu_s + cost.server_cpu_s) / cost.examples * 1e6 for cost in costs]

    return {
        "rows a table": rows,
        "dense, ms": statistics.median(ms(dense)),
        "remote, ms": statistics.median(ms(remote)),
        "remote / dense": median_ratio(ms(remote), ms(dense)),
        "dense CPU ms": statistics.median(cpu_ms(dense)),
        "remote CPU ms": statistics.median(cpu_ms(remote)),
        "CPU, remote / dense": median_ratio(cpu_ms(remote), cpu_ms(dense)),
        "others, cores": max(cost.foreign for cost in (*dense, *remote)),
    }


if __name__ == "__main__":
    main()
