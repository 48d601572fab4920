"""Tables larger than the memory they may take: the same jobs with a budget and without, in turn.

    python benchmarks/memory.py [--quick] [--rows N] [--shares 0.2 0.05] [--modes async+prefetch sync] [--rounds N]
                                [--dir FOLDER] [--json FILE]

CTR-DNN, 26 slots, three layers of 32, batches of 1000, ``--rows`` rows of 16 numbers that are trained with Adagrad. All
jobs of one mode are there at once, one without a budget and one for each of ``--shares``, which is how much of the rows
fits in memory. First every row is made. Then the jobs take turns at so many steps, and what counts is the median of the
ratios within a round. The first rounds are not counted: what is asked for most has to come into memory.

    rate         of the job without a budget
    cpu          a server's processor time for an id, of the same
    missed       how many of the ids asked for were read from the file
    written      bytes written to the file for each byte of the rows that changed
    memory       a server's own, of its budget and what it takes without rows

What the system keeps of files is not limited: a file that fits in free memory is hardly read from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import (
    PROGRAMS,
    JobFailed,
    Process,
    busy_s,
    end_like_an_exit,
    free_endpoints,
    median_ratio,
    print_table,
    progress,
    write_json,
)

#: A row and its record: 16 weights, 16 numbers of state; the id, the checksum.
ROW_BYTES, RECORD_BYTES = 128, 144
#: Memory for a row beside its columns, and for any row wherever it is; the part for segments on their way to the disk.
FRAME_BYTES, INDEX_BYTES, ON_THE_WAY = 25, 11.2, 1 / 16
#: A table with so few rows takes next to nothing.
FEW_ROWS = 10_000
BATCH = 1000


@dataclass(frozen=True)
class Turn:
    """What one job took for some steps. ``foreign`` is how many cores others used meanwhile."""

    examples: int
    ids: int
    seconds: float
    server_cpu_s: float
    bytes_read: int
    bytes_written: int
    server_bytes: int
    foreign: float


def budget_mb(rows: int, share: float) -> int:
    needed = rows * (share * (ROW_BYTES + FRAME_BYTES) + INDEX_BYTES) / (1 - ON_THE_WAY)
    return max(4, int(needed) >> 20)


class Job:
    """A server and a worker."""

    def __init__(self, mode: str, rows: int, budget: int | None, folder: Path, running: contextlib.ExitStack) -> None:
        endpoints = free_endpoints(2)
        common = {"mode": mode, "servers": endpoints[:1], "meeting": endpoints[1:], "workers": 1, "vocabulary": rows}
        common |= {"steps": 0, "warmup": 0, "width": 32, "batch": BATCH, "dim": 16, "index": 0}
        limit = {} if budget is None else {"FLEET_TABLE_MEMORY_MB": str(budget), "FLEET_TABLE_DIR": str(folder)}

        def start(role: str) -> Process:
            place = Path(tempfile.mkdtemp(dir=folder))
            command = [sys.executable, str(PROGRAMS / "many_rows.py"), json.dumps({**common, "role": role})]
            return running.enter_context(Process(role, command, place, limit if role == "server" else {}))

        self.server, self.worker = start("server"), start("worker")
        self.budget = budget

    def fill(self, deadline_s: float) -> float:
        began = time.monotonic()
        self.worker.report("ready", began + deadline_s)
        return time.monotonic() - began

    def turn(self, trace: str, steps: int, deadline_s: float) -> Turn:
        cpu_s, (read, written) = self.server.cpu_s(), self.server.io_bytes()
        busy, began = busy_s(), time.monotonic()
        self.worker.go(f"{trace} {steps}")
        report = self.worker.report("done", time.monotonic() + deadline_s)
        read_since, written_since = self.server.io_bytes()
        own = report["cpu_s"] + self.server.cpu_s() - cpu_s
        return Turn(
            foreign=max(0.0, busy_s() - busy - own) / (time.monotonic() - began),
            examples=steps * BATCH,
            ids=report["ids"],
            seconds=report["seconds"],
            server_cpu_s=self.server.cpu_s() - cpu_s,
            bytes_read=read_since - read,
            bytes_written=written_since - written,
            server_bytes=self.server.own_bytes(),
        )

    def end(self) -> None:
        self.worker.go()
        self.worker.wait(time.monotonic() + 30)


def measure(mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    budgets = {"all": None, **{f"{share:.0%}": budget_mb(options.rows, share) for share in options.shares}}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="memory-") as place, contextlib.ExitStack() as running:
        jobs: dict[str, Job] = {}
        empty = empty_bytes(mode, options, Path(place))
        for name, budget in budgets.items():
            jobs[name] = Job(mode, options.rows, budget, Path(place), running)
            filled = jobs[name].fill(options.deadline_s)
            print(f"{mode}, {name}: {options.rows / filled:,.0f} rows made a second", file=sys.stderr, flush=True)
        rows = []
        for trace in options.traces:
            turns: dict[str, list[Turn]] = {name: [] for name in jobs}
            for number, name in progress([(n, name) for n in range(-options.warm, options.rounds) for name in jobs]):
                steps = options.steps if number >= 0 else options.warm_steps
                turn = jobs[name].turn(trace, steps, options.deadline_s)
                if number >= 0:
                    turns[name].append(turn)
            rows += [row(mode, trace, name, jobs[name].budget, empty, turns[name], turns["all"]) for name in jobs]
        for job in jobs.values():
            job.end()
    return rows


def empty_bytes(mode: str, options: argparse.Namespace, folder: Path) -> int:
    """Return the memory that a server takes without rows."""
    with contextlib.ExitStack() as running:
        job = Job(mode, FEW_ROWS, None, folder, running)
        job.fill(options.deadline_s)
        taken = job.turn("zipf", 20, options.deadline_s).server_bytes
        job.end()
    return taken - FEW_ROWS * ROW_BYTES


def row(
    mode: str, trace: str, name: str, budget: int | None, empty: int, turns: list[Turn], others: list[Turn]
) -> dict[str, Any]:
    def ratio(figure: Callable[[Turn], float]) -> float | None:
        return median_ratio([figure(turn) for turn in turns], [figure(other) for other in others])

    ids = sum(turn.ids for turn in turns)
    return {
        "mode": mode,
        "ids": trace,
        "in memory": name,
        "1000 examples/s": statistics.median(turn.examples / turn.seconds for turn in turns) / 1000,
        "rate": ratio(lambda turn: turn.examples / turn.seconds),
        "cpu": ratio(lambda turn: turn.server_cpu_s / turn.ids),
        "missed": sum(turn.bytes_read for turn in turns) / RECORD_BYTES / ids if budget else None,
        "written": sum(turn.bytes_written for turn in turns) / ROW_BYTES / ids if budget else None,
        "server MiB": turns[-1].server_bytes / 2**20,
        "memory": turns[-1].server_bytes / ((budget << 20) + empty) if budget else None,
        "others, cores": max(turn.foreign for turn in turns),
    }


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000,000 rows and few steps")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.05], help="how much of the rows has room")
    parser.add_argument("--modes", nargs="+", default=["async+prefetch", "sync"])
    parser.add_argument("--traces", nargs="+", default=["zipf", "uniform"], choices=["zipf", "uniform"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="of a turn that counts")
    parser.add_argument("--warm", type=int, default=2, help="so many rounds do not count")
    parser.add_argument("--warm-steps", type=int, default=200, help="of a turn that does not count")
    parser.add_argument("--deadline", type=float, default=600.0, dest="deadline_s", help="of whatever a job does")
    parser.add_argument("--dir", type=Path, help="where the files are made; not in a file system in memory")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds, options.steps, options.warm_steps = 2_000_000, 3, 20, 40
    rows: list[dict[str, Any]] = []
    for mode in options.modes:
        try:
            rows += measure(mode, options)
        except JobFailed as failure:
            print(f"{mode}: {failure}")
    if rows:
        print_table(f"{options.rows:,} rows", list(rows[0]), [list(row.values()) for row in rows])
    write_json(options.json, rows=options.rows, rounds=options.rounds, steps=options.steps, results=rows)


if __name__ == "__main__":
    main()
