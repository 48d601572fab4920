"""How fast four workers are together, all alike or one of them four times slower, in modes that wait and others.

    python benchmarks/uneven.py [--quick] [--json FILE] [--rounds N]

Whole jobs inside this process, with small layers and a table. A step's computing is a pause in place of an
accelerator's, so that workers do not take each other's cores. Modes take turns; what counts is the median of the ratios
within a round. The warm-up is long enough for auto to have made up its mind. How much dearer a step is where a
processor has no time to lose is for ``ctr.py --systems 'fleet *'`` to say.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from in_process import run_job
from measuring import end_like_an_exit, median_ratio, print_table, progress, write_json

import fleet
from fleet import Fleet, StrategyFactory
from fleet.strategy.parameter_server import Strategy

MODES: Mapping[str, Callable[[], Strategy]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "gba": StrategyFactory.create_gba_strategy,
    "auto": StrategyFactory.create_auto_strategy,
    "async": StrategyFactory.create_async_strategy,
}
WORKERS, SERVERS, SLOWER, PAUSE_S = 4, (1, 2), 4, 0.05
STEPS, WARMUP, BATCH = 100, 25, 32
#: What is wanted: of synchronous training with one slow worker, of asynchronous training with even ones.
FASTER, AS_FAST = 2.2, 0.95
PATIENCE_S = 300.0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, 8, initializer="zeros")
        self.top = torch.nn.Sequential(torch.nn.Linear(26 * 8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(ids).flatten(1))


def rate(mode: str, servers: int, slower: int, steps: int) -> float:
    """Steps a second of all workers of one job."""
    ready = threading.Barrier(WORKERS)

    def work(fleet_: Fleet, worker: int) -> tuple[int, float]:
        model, is_slow = Model(), slower > 1 and worker == WORKERS - 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(optimizer, MODES[mode](), model=model)
        fleet_.init_worker()
        draw = torch.Generator().manual_seed(worker)

        def step() -> None:
            loss = model(torch.randint(0, 10_000, (BATCH, 26), generator=draw)).square().mean()
            time.sleep(PAUSE_S * (slower if is_slow else 1))
            optimizer.minimize(loss)

        for _ in range(WARMUP):
            step()
        ready.wait(PATIENCE_S)
        began = time.monotonic()
        # Where nobody waits for it, a slow worker takes fewer steps in the same time.
        count = steps // slower if is_slow and mode != "sync" else steps
        for _ in range(count):
            step()
        fleet_.barrier_worker()  # what is still on its way counts
        return count, time.monotonic() - began

    results = run_job(work, WORKERS, servers)
    return sum(count for count, _ in results) / max(seconds for _, seconds in results)


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
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the steps, one server")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, steps = (1, STEPS // 4) if options.quick else (options.rounds, STEPS)
    places = [(servers, slower) for servers in (SERVERS[:1] if options.quick else SERVERS) for slower in (1, SLOWER)]
    rates: dict[tuple[int, int], dict[str, list[float]]] = {place: {mode: [] for mode in MODES} for place in places}
    turns = [(place, mode) for _ in range(rounds) for place in places for mode in MODES]
    for place, mode in progress(turns, lambda turn: f"{turn[1]}, {turn[0]}"):
        rates[place][mode].append(rate(mode, *place, steps))
    rows = [row(mode, rates[place], *place) for place in places for mode in MODES]
    title = f"{WORKERS} workers, steps of {PAUSE_S * 1e3:.0f} ms, medians of {rounds} rounds"
    print_table(title, list(rows[0]), [list(each.values()) for each in rows])
    write_json(options.json, rounds=rounds, quick=options.quick, rows=rows)


if __name__ == "__main__":
    main()
