"""How fast four workers are together, all alike or one of them four times slower, in modes that wait and others.

    python benchmarks/uneven.py [--quick] [--json FILE] [--rounds N]

A step's computing is a pause in place of an accelerator's, so that workers do not take each other's cores; the model is
small. Modes take turns; what counts is the median of the ratios within a round. The warm-up is long enough for auto to
have made up its mind. How much dearer a step is where a processor has no time to lose is for
``ctr.py --systems 'fleet *'`` to say.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

MODES = ("sync", "gba", "auto", "async")
SERVERS, SLOWER, PAUSE_S = (1, 2), 4, 0.05
STEPS, WARMUP, BATCH = 100, 25, 32
#: What is wanted: of synchronous training with one slow worker, of asynchronous training with even ones.
FASTER, AS_FAST = 2.2, 0.95


def rate(mode: str, servers: int, workers: int, slower: int, steps: int) -> float:
    """Steps a second of all workers of one job."""
    work = {"mode": mode, "steps": steps, "warmup": WARMUP, "batch": BATCH, "width": 32, "dim": 8, "pause_s": PAUSE_S}
    cost = run_job("ours", {**work, "slower": slower, "vocabulary": 10_000}, servers=servers, workers=workers)
    return cost.examples / BATCH / cost.seconds


def row(mode: str, rates: Mapping[str, list[float]], servers: int, slower: int) -> dict[str, Any]:
    wanted = None
    if mode in ("gba", "auto"):
        wanted = f"{FASTER} of sync" if slower > 1 else f"{AS_FAST} of async"
    return {
        "servers": servers,
        "workers": "even" if slower == 1 else f"one {slower} times slower",
        "mode": mode,
        "steps a second": statistics.median(rates[mode]),
        "of sync": median_ratio(rates[mode], rates["sync"]),
        "of async": median_ratio(rates[mode], rates["async"]),
        "wanted": wanted,
    }


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round, a quarter of the steps, one server, two uneven workers"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, steps, workers = (1, STEPS // 4, 2) if options.quick else (options.rounds, STEPS, 4)
    places = [(SERVERS[0], SLOWER)] if options.quick else [(each, slower) for each in SERVERS for slower in (1, SLOWER)]
    rates: dict[tuple[int, int], dict[str, list[float]]] = {place: {mode: [] for mode in MODES} for place in places}
    turns = [(place, mode) for _ in range(rounds) for place in places for mode in MODES]
    for place, mode in progress(turns, lambda turn: f"{turn[1]}, {turn[0]}"):
        servers, slower = place
        rates[place][mode].append(rate(mode, servers, workers, slower, steps))
    rows = [row(mode, rates[place], *place) for place in places for mode in MODES]
    title = f"{workers} workers, steps of {PAUSE_S * 1e3:.0f} ms, medians of {rounds} rounds"
    print_table(title, list(rows[0]), [list(each.values()) for each in rows])
    write_json(options.json, rounds=rounds, quick=options.quick, rows=rows)


if __name__ == "__main__":
    main()
