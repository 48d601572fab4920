"""What it costs that a job shows its figures.

    python benchmarks/observing.py [--quick] [--json figures.json]

First the parts: the processor time of what counting adds to a step, and of what showing figures once takes a worker.
Then the click model of ``ctr.py``, one server and one worker. Whole jobs differ by more than all of it from one to the
next, so both ways take turns inside a job (``peers/observed.py``), and where figures are shown it is ten times as often
as ever: a tenth of what is found is the cost. Each span of time is compared with the mean of its two neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from ctr import KINDS
from measuring import end_like_an_exit, print_table, progress, run_job, write_json

from fleet.base.clock import SystemClock
from fleet.base.settings import ObservingSettings, ProcessSettings
from fleet.telemetry.prometheus import Page
from fleet.telemetry.record import Record
from fleet.telemetry.tensorboard import Scalars
from fleet.telemetry.worker_figures import ProfilerRange, WorkerFigures

MODES = ("sync", "async")
STEPS, FEW_STEPS = 14_000, 3_000


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
        page = Page("worker 0", "worker", read, ProcessSettings(observing=ObservingSettings(metrics_port=0)))

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


def against_neighbours(spans: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """What each span with figures shown took, over the mean of those before and after it, without."""
    around = zip(spans, spans[1:], spans[2:], strict=False)
    return [2 * span[name] / (before[name] + after[name]) for before, span, after in around if span["shown"]]


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short job of one mode")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    (kind,) = (known for known in KINDS if known.name == "3x32")

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        each = parts(Path(folder))
        print_table("Processor time of a part", ["part", "each", "us"], each)
        for mode in progress(MODES[:1] if options.quick else MODES):
            file = Path(folder) / f"{mode}.jsonl"
            work = {**kind.work(mode, quick=False), "steps": FEW_STEPS if options.quick else STEPS}
            environment = {"FLEET_RECORD_DIR": f"{folder}/records", "SPANS": str(file)}
            cost = run_job("observed", work, servers=1, workers=1, environment=environment)
            spans = [json.loads(line) for line in file.read_text().splitlines()]
            ratios = {name: against_neighbours(spans, name) for name in ("seconds", "cpu_s")}
            rows.append(
                {
                    "mode": mode,
                    "spans": len(ratios["seconds"]),
                    "time": statistics.median(ratios["seconds"]),
                    "quarters": " to ".join(f"{quarter:.2f}" for quarter in quarters(ratios["seconds"])),
                    "worker's CPU": statistics.median(ratios["cpu_s"]),
                    "others, cores": cost.foreign,
                }
            )
    print_table("Recorded ten times a second over not at all", list(rows[0]), [list(row.values()) for row in rows])
    write_json(options.json, quick=options.quick, parts=each, rows=rows)


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Where the middle half of them begins and ends."""
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


if __name__ == "__main__":
    main()
