"""What stale gradients cost, and how much of it delay compensation (DC-ASGD) or a global batch (GBA) brings back.

    python benchmarks/delays.py [--quick] [--json FILE] [--figures FOLDER] [--ways "one process" plain GBA …]

The order of pushes comes from a simulated clock, so the staleness is exact and every run is the same: a step takes
each worker a time drawn anew, and the workers push in the order in which they would be ready. The pushes are real ones
in a real job: half-asynchronous, so that a worker is handed new values with the answer to its push and nothing else
lies in between. Plain SGD trains a small network on scikit-learn's handwritten digits (1400 to learn, 397 to test) by a
fixed number of updates, whatever the number of workers.

Every way is given eight trials to find its settings in, on seeds that are not reported: plain SGD eight learning rates,
compensation four of these with two strengths each. What counts there is the loss on the training set at the end.

GBA and auto have the learning rate of one process and no trials, and their workers share its batches: as many updates
on as many examples. Their courses come from simulated_clock.py, which computes them in plain PyTorch; with "one slow"
the last worker is four times slower.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import draw_lines
from simulated_clock import Course, follow, simulate, train

from fleet import Fleet, StrategyFactory
from fleet.optimizer import DistributedOptimizer
from fleet.strategy.parameter_server import Strategy

WORKERS = (4, 8, 20)
UPDATES, BATCH, HIDDEN, TRAINED_ON = 1000, 32, 32, 1400
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101, 102)

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
#: way -> the mode, and whether one worker is slow
SHARED: Mapping[str, tuple[str, bool]] = {
    "GBA": ("gba", False),
    "GBA, one slow": ("gba", True),
    "auto": ("auto", False),
    "auto, one slow": ("auto", True),
}


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

    def begin(fleet: Fleet) -> tuple[torch.nn.Module, DistributedOptimizer]:
        model = copy.deepcopy(untrained)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.rate)
        distributed = fleet.distributed_optimizer(optimizer, trial.strategy, model=model)
        fleet.init_worker()
        return model, distributed

    return follow(Course(order), begin, loss_of, lambda _, model: model)


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
        network, batches = self._begin(seed, updates)
        order = arrivals(workers, updates, seed)
        return self._result(
            train_in_order(network, lambda model, place: self.loss(model, batches[place]), order, trial)
        )

    def train_shared(self, mode: str, workers: int, rate: float, seed: int, *, one_slow: bool) -> tuple[float, float]:
        """The same where workers share every batch."""
        network, batches = self._begin(seed, UPDATES)
        shares = [share for batch in batches for share in batch.tensor_split(workers)]
        course = simulate(mode, workers, len(shares), seed, one_slow=one_slow)

        def loss_of(places: Sequence[int]) -> torch.Tensor:
            return torch.stack([self.loss(network, shares[place]) for place in places]).mean()

        train(course, network, torch.optim.SGD(network.parameters(), lr=rate), loss_of)
        return self._result(network)

    @staticmethod
    def _begin(seed: int, updates: int) -> tuple[torch.nn.Module, torch.Tensor]:
        """The network, and which examples are in which batch."""
        draw = torch.Generator().manual_seed(seed)
        batches = torch.randint(0, TRAINED_ON, (updates, BATCH), generator=draw)
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10)), batches

    def _result(self, trained: torch.nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            loss = self.loss(trained, torch.arange(TRAINED_ON)).item()
            right = trained(self.pixels[TRAINED_ON:]).argmax(1) == self.digits[TRAINED_ON:]
        return loss if math.isfinite(loss) else GUESSING, right.float().mean().item()

    def loss(self, model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(self.pixels[chosen]), self.digits[chosen])


def best(task: Digits, workers: int, trials: Sequence[Trial], seeds: Sequence[int]) -> Trial:
    return min(trials, key=lambda trial: statistics.mean(task.train(workers, trial, seed)[0] for seed in seeds))


def study(task: Digits, quick: bool, ways: Sequence[str]) -> list[dict[str, Any]]:
    seeds, tuning_seeds = (SEEDS[:2], TUNING_SEEDS[:1]) if quick else (SEEDS, TUNING_SEEDS)
    alone = best(task, 1, ONE_PROCESS[1::2] if quick else ONE_PROCESS, tuning_seeds)
    cells = [(1, "one process", [alone])]
    cells += [(workers, way, trials) for workers in WORKERS for way, trials in WAYS.items()]
    rows = []

    def enter(
        workers: int, way: str, trial: Trial, behind: Sequence[float], found: Sequence[tuple[float, float]]
    ) -> None:
        losses, accuracies = zip(*found, strict=True)
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

    for workers, way, trials in cells:
        if way in ways:
            trial = (
                trials[0] if trials == [alone] else best(task, workers, trials[1::2] if quick else trials, tuning_seeds)
            )
            behind = staleness(arrivals(workers, UPDATES, seeds[0]))
            enter(workers, way, trial, behind, [task.train(workers, trial, seed) for seed in seeds])
    for workers in WORKERS:
        for way, (mode, one_slow) in SHARED.items():
            if way in ways:
                behind = simulate(mode, workers, UPDATES * workers, seeds[0], one_slow=one_slow).behind
                found = [task.train_shared(mode, workers, alone.rate, seed, one_slow=one_slow) for seed in seeds]
                enter(workers, way, alone, behind, found)
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
        for way in (*WAYS, *SHARED)
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
    all_ways = ("one process", *WAYS, *SHARED)
    parser.add_argument("--ways", nargs="+", default=all_ways, choices=all_ways, help="which of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'workers':>7}  {'way':<18}{'staleness':>10}{'max':>5}{'rate':>8}{'lambda':>8}{'loss':>18}{'accuracy':>20}")
    rows = study(Digits(), options.quick, options.ways)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    if options.figures and [*options.ways] == [*all_ways]:
        draw(rows, options.figures)


if __name__ == "__main__":
    main()
