"""What each mode loses in quality against one process, and what GEO saves in traffic.

    python benchmarks/quality.py [--quick] [--json FILE] [--figures FOLDER]

A click-like model learns which flights arrive late (see examples/flights.py), in whole jobs inside this process. All
modes take the same number of updates on the same batches as one process: a synchronous job shares every batch out to
its workers, in the others each worker computes whole ones of its own, every so many-th. The learning rate of one
process serves the synchronous mode; every other mode has its own at every number of workers, chosen by the validation
AUC of a seed that is not reported. AUC is measured on flights that nobody trained on, by a fresh job that loads what
the servers held at the end. Most runs are short; a few long ones show what is left of a loss when training has come to
its end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Point, draw_lines
from in_process import run_job
from meter import MeteredNetwork
from torch.nn.functional import binary_cross_entropy_with_logits

import fleet
from fleet import Fleet, StrategyFactory
from fleet.optimizer import DistributedOptimizer
from fleet.strategy.parameter_server import Strategy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from flights import Examples, Task, flights

DIM, HIDDEN = 8, 32
WORKERS = (2, 4, 8)
RATES = (0.02, 0.03, 0.045, 0.07)
TUNING_SEED, SEEDS = 100, (0, 1, 2)

SYNC = StrategyFactory.create_sync_strategy()
RELAXED: Mapping[str, Strategy] = {
    "ssp, staleness 4": StrategyFactory.create_ssp_strategy(4),
    "half-async": StrategyFactory.create_half_async_strategy(),
    "async": StrategyFactory.create_async_strategy(),
    "async, DC-ASGD": StrategyFactory.create_async_strategy(dc_asgd_lambda=1.0),
    "GEO, k=10": StrategyFactory.create_geo_strategy(10),
}

#: All of these divide the steps that each of four workers takes, so that no exchange is cut short.
FREQUENCIES, GEO_WORKERS = (1, 2, 5, 10, 20, 50, 100), 4

#: Long runs are fewer: what loses much in short ones, and settings with which it loses less.
LONG_RATES, LONG_SEEDS = (0.03, 0.045), (0, 1)
LONG_JOBS: Sequence[tuple[str, Strategy, int]] = (
    ("async", RELAXED["async"], 8),
    ("async, queue of 1", StrategyFactory.create_async_strategy(send_queue_size=1), 8),
    *(("async, DC-ASGD", RELAXED["async, DC-ASGD"], workers) for workers in (4, 8)),
    ("GEO, k=10", RELAXED["GEO, k=10"], 8),
    *(("GEO, k=2", StrategyFactory.create_geo_strategy(2), workers) for workers in WORKERS),
)

#: No mode should lose more.
AIM = 0.002


@dataclass(frozen=True)
class Length:
    """How long a job trains."""

    batch: int
    updates: int

    def batches(self, examples: int) -> Sequence[torch.Tensor]:
        """Which examples are in which batch: pass after pass over all of them, each in an order of its own."""
        needed = self.batch * self.updates
        passes = [torch.randperm(examples) for _ in range(math.ceil(needed / examples))]
        return torch.cat(passes)[:needed].split(self.batch)


SHORT, LONG = Length(128, 1600), Length(32, 12800)


class ClickModel(torch.nn.Module):
    """Wide and deep: of every id's row the first number is added up, the others go through a small network."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, 1 + DIM, initializer="normal(0, 0.01)")
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(fields * DIM, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        return rows[..., 0].sum(1) + self.deep(rows[..., 1:].flatten(1)).squeeze(1)


@dataclass(frozen=True)
class Result:
    """``staleness``: how many updates the dense parameters had had since a gradient's worker read them, on average."""

    validation: float
    test: float
    bytes_a_step: float
    staleness: float


def train(task: Task, length: Length, strategy: Strategy, workers: int, rate: float, seed: int) -> Result:
    """One job from its first update to its last, and how good it has become."""
    torch.manual_seed(seed)
    untrained = ClickModel(task.train.ids.shape[1])
    batches = length.batches(len(task.train))
    if strategy.mode == "sync":
        shares = list(zip(*(batch.tensor_split(workers) for batch in batches), strict=True))
    else:
        shares = [batches[worker::workers] for worker in range(workers)]
    network = MeteredNetwork()

    def begin(fleet_: Fleet, strategy: Strategy) -> tuple[ClickModel, DistributedOptimizer]:
        model = copy.deepcopy(untrained)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=rate)
        distributed = fleet_.distributed_optimizer(optimizer, strategy, model=model)
        fleet_.init_worker()
        return model, distributed

    def work(fleet_: Fleet, worker: int) -> float:
        model, optimizer = begin(fleet_, strategy)
        for batch in shares[worker]:
            examples = task.train.part(batch)
            optimizer.minimize(binary_cross_entropy_with_logits(model(examples.ids), examples.labels))
        fleet_.barrier_worker()  # all that anybody computed is applied now
        if worker != 0:
            return 0.0
        fleet_.save_persistables(directory)
        seen = [by_name["dense"] for by_name in fleet_.summary()["staleness"].values() if "dense" in by_name]
        return statistics.mean(each["mean"] for each in seen) if seen else 0.0

    def evaluate(fleet_: Fleet, _: int) -> tuple[float, float]:
        model, _ = begin(fleet_, SYNC)
        model.eval()
        return auc(model, task.validation), auc(model, task.test)

    with tempfile.TemporaryDirectory() as directory:
        staleness, *_ = run_job(work, workers, network=network)
        ((validation, test),) = run_job(evaluate, model_dir=directory)
    return Result(validation, test, network.bytes / sum(map(len, shares)), staleness)


@torch.no_grad()
def auc(model: ClickModel, examples: Examples) -> float:
    from sklearn.metrics import roc_auc_score

    scores = torch.cat([model(ids) for ids in examples.ids.split(4096)])
    return float(roc_auc_score(examples.labels, scores))


Row = dict[str, Any]


class Study:
    """Jobs of one length, each compared with the one process of its seed."""

    def __init__(self, task: Task, length: Length, rates: Sequence[float], seeds: Sequence[int]) -> None:
        self._task = task
        self._length = length
        self._rates = rates
        self._seeds = seeds
        self._rate = self._best_rate(SYNC, 1)
        self._alone = [self._train(SYNC, 1, self._rate, seed) for seed in seeds]

    def _train(self, strategy: Strategy, workers: int, rate: float, seed: int) -> Result:
        return train(self._task, self._length, strategy, workers, rate, seed)

    def _best_rate(self, strategy: Strategy, workers: int) -> float:
        if len(self._rates) == 1:
            return self._rates[0]
        return max(self._rates, key=lambda rate: self._train(strategy, workers, rate, TUNING_SEED).validation)

    def one_process(self) -> Row:
        return self._row("one process", 1, self._rate, self._alone)

    def mode(self, name: str, strategy: Strategy, workers: int) -> Row:
        rate = self._rate if strategy.mode == "sync" else self._best_rate(strategy, workers)
        results = [self._train(strategy, workers, rate, seed) for seed in self._seeds]
        return self._row(name, workers, rate, results)

    def _row(self, name: str, workers: int, rate: float, results: Sequence[Result]) -> Row:
        lost = [alone.test - result.test for alone, result in zip(self._alone, results, strict=True)]
        return {
            "mode": name,
            "updates": self._length.updates,
            "workers": workers,
            "rate": rate,
            "auc": [round(result.test, 5) for result in results],
            "lost": [round(each, 5) for each in lost],
            "bytes_a_step": round(statistics.mean(result.bytes_a_step for result in results)),
            "staleness": round(statistics.mean(result.staleness for result in results), 2),
        }


HEADING = f"{'mode':<18}{'workers':>7}{'rate':>7}{'AUC':>9}{'lost':>9}{'+-':>8}{'staleness':>11}{'bytes a step':>14}"


def line(row: Row) -> str:
    return (
        f"{row['mode']:<18}{row['workers']:>7}{row['rate']:>7}{statistics.mean(row['auc']):>9.4f}"
        f"{statistics.mean(row['lost']):>9.4f}{spread(row['lost']):>8.4f}{row['staleness']:>11}{row['bytes_a_step']:>14}"
    )


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def point(row: Row, x: float) -> Point:
    return x, statistics.mean(row["lost"]), spread(row["lost"])


def show(heading: str, rows: Iterable[Row]) -> list[Row]:
    """Print each row when it is there."""
    print(f"\n{heading}\n{HEADING}", flush=True)
    shown = []
    for row in rows:
        print(line(row), flush=True)
        shown.append(row)
    return shown


def all_modes(study: Study) -> Iterator[Row]:
    yield study.one_process()
    for name, strategy in {"sync": SYNC, **RELAXED}.items():
        yield from (study.mode(name, strategy, workers) for workers in WORKERS)


def all_frequencies(study: Study) -> Iterator[Row]:
    for k in FREQUENCIES:
        yield {"k": k, **study.mode(f"GEO, k={k}", StrategyFactory.create_geo_strategy(k), GEO_WORKERS)}


def long_runs(study: Study) -> Iterator[Row]:
    yield study.one_process()
    for job in LONG_JOBS:
        yield study.mode(*job)


def draw(modes: Sequence[Row], frequencies: Sequence[Row], folder: Path) -> None:
    series = {name: [point(row, row["workers"]) for row in modes if row["mode"] == name] for name in ("sync", *RELAXED)}
    draw_lines(
        folder / "quality.svg",
        series,
        title="AUC lost against one process (dashed: 0.002)",
        x="workers",
        y="AUC lost",
        limit=AIM,
    )
    draw_lines(
        folder / "geo.svg",
        {f"GEO, {GEO_WORKERS} workers": [point(row, row["k"]) for row in frequencies]},
        title="AUC lost against one process (dashed: 0.002)",
        x="k, steps between exchanges",
        y="AUC lost",
        limit=AIM,
        logarithmic="x",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, half of the learning rates, no long runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw quality.svg and geo.svg in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = flights()
    short = Study(task, SHORT, *((RATES[1:3], SEEDS[:1]) if options.quick else (RATES, SEEDS)))
    tables = {
        "modes": show(f"{SHORT.updates} updates on batches of {SHORT.batch}", all_modes(short)),
        "frequencies": show(f"GEO by its frequency, {SHORT.updates} updates", all_frequencies(short)),
    }
    if not options.quick:
        long = Study(task, LONG, LONG_RATES, LONG_SEEDS)
        tables["long"] = show(f"{LONG.updates} updates on batches of {LONG.batch}", long_runs(long))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, **tables}, indent=1))
    if options.figures:
        draw(tables["modes"], tables["frequencies"], options.figures)


if __name__ == "__main__":
    main()
