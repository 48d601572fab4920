"""What a job notices while it moves from two servers to four.

    python benchmarks/move.py [--quick] [--durable] [--json FILE] [--rounds N]

A synchronous job of one worker trains rows of 16 floats with Adagrad, 250 of them in a step, over real connections. Its
table is filled, and ``fleet servers add`` gives it two servers more, all as processes of this machine. The servers to
come have what the job leaves of the processors (SCHED_IDLE) until they are part of it, as if they had machines of their
own. With ``--durable`` all of them keep their state on a disk.
Told are the steps a second before, while rows move, and after; the longest step of each; and how long it took.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import PROGRAMS, Process, end_like_an_exit, free_endpoints, print_table, write_json

from fleet.base.cluster import Endpoint
from fleet.launch.servers_command import change_servers

ROWS, CHANGED, BUSY_S, SPAN_S = 10_000_000, 250, 0.01, 10.0
WANTED = {"rate while it moves, of before": 0.8, "longest step while it moves, s": 1.0}
DEADLINE_S = 600.0


def moved(rows: int, span_s: float, is_durable: bool) -> dict[str, float]:
    then = free_endpoints(4)
    common = {"rows": rows, "batch": CHANGED, "optimizer": "Adagrad"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:

        def start(role: str, index: int, servers: Sequence[str]) -> Process:
            argument = json.dumps({**common, "servers": servers, "role": role, "index": index})
            command = [sys.executable, str(PROGRAMS / "fresh.py"), argument]
            environ = {"FLEET_DURABLE_DIR": str(Path(folder) / "durable")} if is_durable else {}
            return running.enter_context(Process(f"{role}{index}", command, Path(folder), environ))

        for index in range(2):
            start("server", index, then[:2])
        worker = start("worker", 0, then[:2])
        worker.report("warm", time.monotonic() + DEADLINE_S)
        later = [start("server", index, then) for index in (2, 3)]
        for each in later:
            each.schedule(os.SCHED_IDLE)
        time.sleep(5.0)  # until they listen, so that a slow import is not taken for a slow move
        worker.go(f"{10_000 * span_s} 0 {BUSY_S}")
        time.sleep(span_s)
        began = time.monotonic()
        change_servers([Endpoint.parse(then[0])], "add", [Endpoint.parse(each) for each in then[2:]], DEADLINE_S)
        ended = time.monotonic()
        for each in later:
            each.schedule(os.SCHED_OTHER)
        time.sleep(span_s)
        worker.go("stop")
        times = worker.report("done", time.monotonic() + DEADLINE_S)["times"]
    steps = [*itertools.pairwise(times)]
    before = [(a, b) for a, b in steps if began - span_s / 2 < b <= began]
    while_it = [(a, b) for a, b in steps if a < ended and b > began]
    after = [(a, b) for a, b in steps if a >= ended + 1]
    return {
        "rows": rows,
        "steps a second before": rate(before),
        "rate while it moves, of before": rate(while_it) / rate(before),
        "rate after, of before": rate(after) / rate(before),
        "longest step before, s": longest(before),
        "longest step while it moves, s": longest(while_it),
        "longest step after, s": longest(after),
        "the move takes, s": ended - began,
    }


def rate(steps: Sequence[tuple[float, float]]) -> float:
    return len(steps) / (steps[-1][1] - steps[0][0])


def longest(steps: Sequence[tuple[float, float]]) -> float:
    return max(b - a for a, b in steps)


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, short spans, one round")
    parser.add_argument("--durable", action="store_true", help="servers keep their state on a disk")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows, span_s, rounds = (100_000, 2.0, 1) if options.quick else (ROWS, SPAN_S, options.rounds)
    shown = [moved(rows, span_s, options.durable) for _ in range(rounds)]
    figures: list[list[Any]] = [
        [name, statistics.median(each[name] for each in shown), WANTED.get(name)] for name in shown[0]
    ]
    kind = "durable " if options.durable else ""
    print_table(f"From two {kind}servers to four, medians of {rounds}", ["figure", "value", "wanted"], figures)
    write_json(options.json, rounds=rounds, durable=options.durable, quick=options.quick, figures=figures)


if __name__ == "__main__":
    main()
