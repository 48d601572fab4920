"""How fresh a model is that follows a running job, and what following costs the job.

    python benchmarks/fresh.py [--quick] [--json FILE] [--rounds N] [--only fresh|cost]

A job of one worker and two servers trains rows of 16 floats; whoever follows is a process of its own, over real
connections. *Fresh*: 10,000 rows change a second, and each push is timed from the return of ``minimize`` to the end of
the first forward that shows it. *Outage*: the same follower is stopped for a minute (SIGSTOP), and goes on. *Cost*: the
job trains as fast as it can, beside none, one and eight followers in turns: with as much computing in a step as makes
that about 10,000 rows a second, and with none at all. These followers have what the job leaves of the processors
(SCHED_IDLE), as if they had machines of their own: what they cost is what the servers do for them.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measuring import PROGRAMS, Process, end_like_an_exit, free_endpoints, median_ratio, print_table, write_json

ROWS, DIM, HZ, CHANGED = 1_000_000, 16, 40, 250
SPAN_S, OUTAGE_S = 30.0, 60.0
FOLLOWERS = (0, 1, 8)
#: So much computing in a step.
BUSY_S = {"about 10,000 rows a second": 0.022, "as fast as it can": 0.0}
WANTED = {"p50 s": 0.3, "p99 s": 2.0, "bytes": 1.3, "catching up s": 5.0, 1: 0.97, 8: 0.9}
DEADLINE_S = 120.0


class Job:
    """A job that has filled its table, and who follows it."""

    def __init__(self, rows: int, batch: int, folder: Path, running: contextlib.ExitStack) -> None:
        self._folder, self._running = folder, running
        self._common = {"servers": free_endpoints(2), "rows": rows, "batch": batch}
        self.servers = [self._start("server", index) for index in range(2)]
        self.worker = self._start("worker", 0)
        self.worker.report("warm", self.deadline)

    @property
    def deadline(self) -> float:
        return time.monotonic() + DEADLINE_S

    def follow(self, count: int, seconds: float, *, background: bool) -> list[Process]:
        more = {"seconds": seconds, "background": background, "poll_s": 0.1}
        return [self._start("follower", index, **more) for index in range(count)]

    def _start(self, role: str, index: int, **more: Any) -> Process:
        argument = json.dumps({**self._common, **more, "role": role, "index": index})
        command = [sys.executable, str(PROGRAMS / "fresh.py"), argument]
        return self._running.enter_context(Process(f"{role}{index}", command, self._folder, {}))


@contextlib.contextmanager
def job(rows: int, batch: int) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        yield Job(rows, batch, Path(folder), running)


def delays(pushed: dict[str, Any], seen: Sequence[tuple[float, int]]) -> list[float]:
    """From each push that was applied while somebody followed to the forward that shows it."""
    steps = [step for _, step in seen]
    found = []
    for step, applied in enumerate(pushed["times"], pushed["first"] + 1):
        place = bisect.bisect_left(steps, step)
        if place and place < len(seen):
            found.append(max(0.0, seen[place][0] - applied))
    return found


def freshness(rows: int, span_s: float) -> dict[str, Any]:
    with job(rows, CHANGED) as made:
        (follower,) = made.follow(1, span_s, background=False)
        filled = follower.report("warm", made.deadline)
        made.worker.go(f"{span_s} {HZ} 0")
        follower.go()
        pushed = made.worker.report("done", made.deadline)
        told = follower.report("done", made.deadline)
    found = sorted(delays(pushed, told["seen"]))
    changed = (told["last"] - told["first"]) * CHANGED * DIM * 4
    return {
        "rows changed a second": pushed["rate"] * CHANGED,
        "p50 s": found[len(found) // 2],
        "p99 s": found[int(len(found) * 0.99)],
        "versions shown a second": len(told["seen"]) / span_s,
        "bytes": told["bytes"] / changed,
        "filled in s": filled["seconds"],
    }


def outage(rows: int, outage_s: float) -> dict[str, Any]:
    """How long a follower that was stopped takes to show what had been trained when it went on."""
    after_s = 15.0
    with job(rows, CHANGED) as made:
        (follower,) = made.follow(1, outage_s + after_s, background=False)
        follower.report("warm", made.deadline)
        made.worker.go(f"{outage_s + after_s} {HZ} 0")
        follower.go()
        time.sleep(2.0)
        follower.send(signal.SIGSTOP)
        time.sleep(outage_s)
        went_on = time.monotonic()
        follower.send(signal.SIGCONT)
        pushed = made.worker.report("done", made.deadline)
        told = follower.report("done", made.deadline)
    due = pushed["first"] + bisect.bisect_right(pushed["times"], went_on)
    there = [when for when, step in told["seen"] if step >= due and when >= went_on]
    before = max(step for when, step in told["seen"] if when < went_on)
    return {"outage s": outage_s, "versions missed": due - before, "catching up s": min(there) - went_on}


def cost(rows: int, followers: int, span_s: float, busy_s: float) -> dict[str, float]:
    with job(rows, CHANGED) as made:
        following = made.follow(followers, span_s, background=True)
        for each in following:
            each.report("warm", made.deadline)
        cpu_s = -sum(server.cpu_s() for server in made.servers)
        made.worker.go(f"{span_s} 0 {busy_s}")
        for each in following:
            each.go()
        told = made.worker.report("done", made.deadline)
        cpu_s += sum(server.cpu_s() for server in made.servers)
        return {"rate": told["rate"], "server cpu": cpu_s / len(told["times"]), "worker cpu": told["cpu_us"] / 1e6}


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, short spans, one round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["fresh", "cost"], help="a part of it")
    options = parser.parse_args()
    rows, span_s, outage_s = (20_000, 4.0, 3.0) if options.quick else (ROWS, SPAN_S, OUTAGE_S)
    rounds = 1 if options.quick else options.rounds

    found: dict[str, Any] = {}
    if options.only != "cost":
        found["fresh"] = tell_freshness(rounds, rows, span_s, outage_s)
    if options.only != "fresh":
        found["cost"] = tell_cost(rounds, rows, span_s)
    write_json(options.json, rounds=rounds, quick=options.quick, **found)


def tell_freshness(rounds: int, rows: int, span_s: float, outage_s: float) -> list[list[Any]]:
    shown = [freshness(rows, span_s) for _ in range(rounds)]
    fresh = {name: statistics.median(each[name] for each in shown) for name in shown[0]}
    missed = outage(rows, outage_s)
    figures = [[name, value, WANTED.get(name)] for name, value in {**fresh, **missed}.items()]
    print_table(f"Freshness, {rows:,} rows, medians of {rounds}", ["figure", "value", "wanted"], figures)
    return figures


def tell_cost(rounds: int, rows: int, span_s: float) -> list[dict[str, Any]]:
    taken: dict[tuple[str, int], list[dict[str, float]]] = {(name, count): [] for name in BUSY_S for count in FOLLOWERS}
    for _ in range(rounds):
        for (name, count), found in taken.items():
            found.append(cost(rows, count, span_s / 3, BUSY_S[name]))
    costs = []
    for (name, count), found in taken.items():
        none = taken[name, 0]
        of_none = {key: median_ratio([each[key] for each in found], [each[key] for each in none]) for key in found[0]}
        rate = statistics.median(each["rate"] for each in found)
        costs.append(
            {
                "training": name,
                "followers": count,
                "rows changed a second": rate * CHANGED,
                "rate, of none": of_none["rate"],
                "wanted": WANTED.get(count) if BUSY_S[name] else None,
                "servers' CPU a step": of_none["server cpu"],
                "worker's CPU a step": of_none["worker cpu"],
            }
        )
    title = "Training beside followers, of training beside none"
    print_table(title, list(costs[0]), [list(each.values()) for each in costs])
    return costs


if __name__ == "__main__":
    main()
