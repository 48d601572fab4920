"""What stale gradients cost, and how much of it delay compensation (DC-ASGD) brings back.

    python benchmarks/delays.py [--quick] [--json FILE] [--figures FOLDER]

The order of pushes comes from a simulated clock, so the staleness is exact and every run is the same: a step takes
each worker a time drawn anew, and the workers push in the order in which they would be ready. The pushes are real ones
in a real job: half-asynchronous, so that a worker is handed new values with the answer to its push and nothing else
lies in between. Plain SGD trains a small network on scikit-learn's handwritten digits (1400 to learn, 397 to test) by a
fixed number of updates, whatever the number of workers.

Every way is given eight trials to find its settings in, on seeds that are not reported: plain SGD eight learning rates,
compensation four of these with two strengths each. What counts there is the loss on the training set at the end.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import math
import random
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import draw_lines
from in_process import run_job

from fleet import Fleet, StrategyFactory
from fleet.strategy.parameter_server import Strategy

WORKERS = (4, 8, 20)
UPDATES, BATCH, HIDDEN, TRAINED_ON = 1000, 32, 32, 1400
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101, 102)

#: No push waits longer for its turn; only a job that failed makes it.
PATIENCE_S = 60.0

#: A loss that is not finite counts as this one: what guessing gives.
GUESSING = math.log(10)


@dataclass(frozen=True)
class Trial:
    """A learning rate, and how delay is compensated for."""

    rate: float
    strength: float = 0.0
    adaptive: bool = False

    @property
    def strategy(self) -> Strategy:
        return StrategyFactory.create_half_async_strategy(dc_asgd_lambda=self.strength, dc_asgd_adaptive=self.adaptive)


RATES = tuple(0.05 * 2 ** (half / 2) for half in range(-1, 7))
EVERY_OTHER_RATE = RATES[1::2]

WAYS: Mapping[str, Sequence[Trial]] = {
    "plain": [Trial(rate) for rate in RATES],
    "DC-ASGD": [Trial(rate, strength) for strength in (10.0, 30.0) for rate in EVERY_OTHER_RATE],
    "DC-ASGD, adaptive": [Trial(rate, strength, True) for strength in (1.0, 3.0) for rate in EVERY_OTHER_RATE],
}
ONE_PROCESS = [Trial(4 * rate) for rate in RATES]


def arrivals(workers: int, pushes: int, seed: int) -> list[int]:
    """Who pushes when, on a simulated clock: a step takes a time drawn anew, of mean 1 and standard deviation 1/2."""
    draw = random.Random(seed)
    due = [(draw.gammavariate(4, 1 / 4), worker) for worker in range(workers)]
    heapq.heapify(due)
    order = []
    for _ in range(pushes):
        now, worker = due[0]
        order.append(worker)
        heapq.heapreplace(due, (now + draw.gammavariate(4, 1 / 4), worker))
    return order


def staleness(order: Sequence[int]) -> list[int]:
    """How many pushes of others came between each push and the one before it of the same worker (or the start)."""
    last: dict[int, int] = {}
    found = []
    for place, worker in enumerate(order):
        found.append(place - last.get(worker, -1) - 1)
        last[worker] = place
    return found


def train_in_order(
    untrained: torch.nn.Module,
    loss_of: Callable[[torch.nn.Module, int], torch.Tensor],
    order: Sequence[int],
    trial: Trial,
) -> torch.nn.Module:
    """The model after a job whose pushes came in this order. ``loss_of(model, place)`` is what push ``place`` is the
    gradient of; it is computed as soon as its worker has the values, which is long before its turn."""
    turns = [threading.Event() for _ in range(len(order) + 1)]
    ready = threading.Barrier(max(order) + 1)

    def work(fleet: Fleet, worker: int) -> torch.nn.Module:
        model = copy.deepcopy(untrained)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.rate)
        distributed = fleet.distributed_optimizer(optimizer, trial.strategy, model=model)
        fleet.init_worker()
        ready.wait(PATIENCE_S)  # everybody has the initial values before the first push changes them
        turns[0].set()
        for place in (place for place, who in enumerate(order) if who == worker):
            distributed.zero_grad()
            loss_of(model, place).backward()
            if not turns[place].wait(PATIENCE_S):
                raise TimeoutError(f"push {place} never had its turn")
            distributed.step()
            turns[place + 1].set()
        return model

    return run_job(work, max(order) + 1)[order[-1]]  # whoever pushed last was answered with what the servers hold


class Digits:
    """The task: pixels, digits, and a network of one hidden layer."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        self.pixels = torch.from_numpy(pixels).float()[shuffled] / 16
        self.digits = torch.from_numpy(digits)[shuffled]

    def train(self, workers: int, trial: Trial, seed: int, updates: int = UPDATES) -> tuple[float, float]:
        """The loss on the training set after the last update, and the accuracy on the test set."""
        draw = torch.Generator().manual_seed(seed)
        batches = torch.randint(0, TRAINED_ON, (updates, BATCH), generator=draw)
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))
        order = arrivals(workers, updates, seed)
        trained = train_in_order(network, lambda model, place: self.loss(model, batches[place]), order, trial)
        with torch.no_grad():
            loss = self.loss(trained, torch.arange(TRAINED_ON)).item()
            right = trained(self.pixels[TRAINED_ON:]).argmax(1) == self.digits[TRAINED_ON:]
        return loss if math.isfinite(loss) else GUESSING, right.float().mean().item()

    def loss(self, model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(self.pixels[chosen]), self.digits[chosen])


def best(task: Digits, workers: int, trials: Sequence[Trial], seeds: Sequence[int]) -> Trial:
    return min(trials, key=lambda trial: statistics.mean(task.train(workers, trial, seed)[0] for seed in seeds))


def study(task: Digits, quick: bool) -> list[dict[str, Any]]:
    seeds, tuning_seeds = (SEEDS[:2], TUNING_SEEDS[:1]) if quick else (SEEDS, TUNING_SEEDS)
    cells = [(1, "one process", ONE_PROCESS)]
    cells += [(workers, way, trials) for workers in WORKERS for way, trials in WAYS.items()]
    rows = []
    for workers, way, trials in cells:
        trial = best(task, workers, trials[1::2] if quick else trials, tuning_seeds)
        losses, accuracies = zip(*(task.train(workers, trial, seed) for seed in seeds), strict=True)
        behind = staleness(arrivals(workers, UPDATES, seeds[0]))
        rows.append(
            {
                "workers": workers,
                "way": way,
                "rate": round(trial.rate, 4),
                "lambda": trial.strength,
                "mean_staleness": round(statistics.mean(behind), 2),
                "max_staleness": max(behind),
                "losses": [round(loss, 4) for loss in losses],
                "accuracies": [round(accuracy, 4) for accuracy in accuracies],
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Mapping[str, Any]) -> str:
    loss, accuracy = statistics.mean(row["losses"]), statistics.mean(row["accuracies"])
    return (
        f"{row['workers']:>7}  {row['way']:<18}{row['mean_staleness']:>10}{row['max_staleness']:>5}"
        f"{row['rate']:>8}{row['lambda']:>8}{loss:>9.4f} ± {statistics.stdev(row['losses']):.4f}"
        f"{accuracy:>11.4f} ± {statistics.stdev(row['accuracies']):.4f}"
    )


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    series = {
        way: [
            (row["workers"], statistics.mean(row["losses"]), statistics.stdev(row["losses"]))
            for row in rows
            if row["way"] == way
        ]
        for way in WAYS
    }
    draw_lines(
        folder / "delays.svg",
        series,
        title="Loss after the same number of updates (dashed: one process)",
        x="workers",
        y="training loss",
        limit=statistics.mean(rows[0]["losses"]),
        logarithmic="y",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, and half of the trials")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw delays.svg in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'workers':>7}  {'way':<18}{'staleness':>10}{'max':>5}{'rate':>8}{'lambda':>8}{'loss':>18}{'accuracy':>20}")
    rows = study(Digits(), options.quick)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    if options.figures:
        draw(rows, options.figures)


if __name__ == "__main__":
    main()
