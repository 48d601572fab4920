"""What it costs that a job shows its figures.

    python benchmarks/observing.py [--quick] [--rounds 9] [--against FOLDER] [--json figures.json]

The click model of ``ctr.py``, one server and one worker, in alternating rounds: nobody looks; figures are recorded, as
under ``fleetrun``; figures are recorded, go to TensorBoard, and can be had by Prometheus. ``--against`` is a checkout
of another version of the package, to compare with. The ratios within a round are what counts; those of processor time
suffer less from what else a machine does.

What jobs of seconds cannot tell apart from noise is measured by itself first: the processor time of what counting adds
to a step, and of what one second's showing takes a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from ctr import KINDS
from measuring import Cost, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

from fleet.clock import SystemClock
from fleet.environ import Knobs, ObservingKnobs
from fleet.observing.prometheus import Page
from fleet.observing.record import Record
from fleet.observing.tensorboard import Scalars
from fleet.observing.worker import ProfilerRange, WorkerFigures

MODES = ("sync", "async")


def cpu(cost: Cost) -> float:
    """Microseconds of all processes for an example."""
    return (cost.worker_cpu_s + cost.server_cpu_s) / cost.examples * 1e6


def processor_us(act: Callable[[], object], times: int) -> float:
    """Microseconds of all threads that it takes, at best."""

    def once() -> float:
        began = time.process_time()
        for _ in range(times):
            act()
        return time.process_time() - began

    return min(once() for _ in range(9)) / times * 1e6


def parts(folder: Path) -> list[tuple[str, str, float]]:
    """What each costs, and how often it does."""
    figures, loss = WorkerFigures(SystemClock()), torch.ones((), requires_grad=True) * 1
    waiting = ProfilerRange("fleet.wait")

    def count_a_step() -> None:
        for span in (figures.pull, figures.push):
            with span, waiting:
                pass
        figures.saw(loss)
        figures.report(1000, None, {})

    def read() -> dict[str, float]:
        return figures.read(steps=1, queue=0, sent_bytes=1, received_bytes=1)

    record, scalars = Record(folder, "worker 0"), Scalars(str(folder), "worker 0")
    with contextlib.closing(record), contextlib.closing(scalars):
        page = Page("worker 0", "worker", read, Knobs(observing=ObservingKnobs(metrics_port=0)))

        def look() -> bytes:
            with urllib.request.urlopen(page.url) as answer:
                return answer.read()

        with contextlib.closing(page):
            return [
                ("counting", "step", processor_us(count_a_step, 10_000)),
                ("reading the figures", "second", processor_us(read, 1000)),
                ("recording them", "second", processor_us(lambda: record.write(time.time(), "worker", read()), 300)),
                ("TensorBoard", "second", processor_us(lambda: scalars.write(time.time(), "worker", read()), 100)),
                ("Prometheus, both sides", "look", processor_us(look, 100)),
            ]


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of one mode, a quarter of the steps")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    (kind,) = (known for known in KINDS if known.name == "3x32")

    with tempfile.TemporaryDirectory() as folder:
        each = parts(Path(folder))
        print_table("Processor time of a part", ["part", "each", "us"], each)
        recorded = {"FLEET_RECORD_DIR": f"{folder}/records"}
        ways = {
            "nobody looks": {},
            "recorded": recorded,
            "all of it": {**recorded, "FLEET_METRICS_PORT": "0", "FLEET_TENSORBOARD_DIR": f"{folder}/tensorboard"},
        }
        if options.against is not None:
            ways["the other version"] = {"PYTHONPATH": str(options.against.resolve())}
        modes = MODES[:1] if options.quick else MODES
        costs: dict[tuple[str, str], list[Cost]] = {(mode, way): [] for mode in modes for way in ways}
        turns = [(mode, way) for _ in range(rounds) for mode in modes for way in ways]
        for mode, way in progress(turns):
            cost = run_job("ours", kind.work(mode, options.quick), servers=1, workers=1, environment=ways[way])
            costs[mode, way].append(cost)
    rows = []
    for (mode, way), found in costs.items():
        plain = costs[mode, "nobody looks"]
        rows.append(
            {
                "mode": mode,
                "figures": way,
                "examples/s": statistics.median(cost.rate for cost in found),
                "ratio": median_ratio([cost.rate for cost in found], [cost.rate for cost in plain]),
                "CPU us/example": statistics.median(map(cpu, found)),
                "CPU ratio": median_ratio(list(map(cpu, found)), list(map(cpu, plain))),
                "others, cores": max(cost.foreign for cost in found),
            }
        )
    print_table(f"3x32, medians of {rounds} rounds", list(rows[0]), [list(row.values()) for row in rows])
    write_json(options.json, rounds=rounds, quick=options.quick, parts=each, rows=rows)


if __name__ == "__main__":
    main()
