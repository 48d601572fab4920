"""What grows with what: workers, servers, and ids that a table has ever seen.

    python benchmarks/scaling.py [--quick] [--json FILE] [--figures FOLDER] [--curves workers crowd servers hot ids]

workers    1 to 64 against one server: examples a second of all together, which must not fall from 4 workers to 64
crowd      the same for workers that compute next to nothing and share few processes: what one server can take of them
servers    1 to 4 for two workers: the same, and what an example costs
hot        4 servers, and the busiest one's load over the mean: the most frequent ids are in all batches, and more of
           them may lie on one server than on another, with one table for all slots or one for each, in batches of 32 up
ids        a table that has seen 10^4 to 10^7 ids (10^8 with ``--most-ids``, for machines with 16 GB to spare), of which
           every step trains 5000: time of a step, and memory

Workers and servers run the click model of ctr.py, 3 x 32, all workers on the same batches: the more ids a table has
seen, the slower it is, and that is another curve. All processes are on this machine, one thread of computing each, so
once its cores are busy a straight line is the best there can be, and 64 processes share their caches as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import Point, draw_lines
from measuring import DEADLINE_S, Cost, JobFailed, end_like_an_exit, print_table, progress, run_job, write_json

WORKERS = (1, 2, 4, 8, 16, 32, 64)
SERVERS = (1, 2, 3, 4)
MODES = ("sync", "async")
#: After so many steps every worker has seen all of its batches, and no row is new.
CLICKS = {"width": 32, "batch": 1000, "warmup": 20, "alike": True}
#: Steps of all workers together, but for a least number each.
STEPS, LEAST_STEPS = 1600, 25
IDS_A_STEP = 5000
#: So many processes share the workers that compute nothing: more would take cores from the server that is measured.
#: After the warm-up, of as many steps as crowd.py has batches, all of them have seen all.
CROWDS, CROWD_WARMUP = 2, 64
#: Batches that have few ids beside the most frequent ones, and such as have many.
HOT_BATCHES, HOT_SERVERS = (32, 100, 1000), 4
#: What the curves of whole jobs count.
UNITS = {"workers": "workers", "crowd": "workers that compute nothing", "servers": "servers"}

#: A line's name and the place on it; what was measured there, once a round.
Place = tuple[str, int]
Costs = dict[Place, list[Cost]]


def measure(places: Sequence[Place], rounds: int, job: Callable[[Place], Cost]) -> Costs:
    """All places in turn, so that a slow minute of the machine hits all of them."""
    costs: Costs = {place: [] for place in places}
    for place in progress([*places] * rounds, lambda place: f"{place[0]} {place[1]:,}"):
        try:
            cost = job(place)
        except JobFailed as failure:
            print(f"{place[0]} {place[1]:,}: {failure}")
            continue
        if cost.learned:
            costs[place].append(cost)
        else:
            print(f"{place[0]} {place[1]:,}: learned nothing, loss {cost.first_loss:.4f} -> {cost.last_loss:.4f}")
    return {place: each for place, each in costs.items() if each}


def median(costs: Sequence[Cost], figure: Callable[[Cost], float]) -> float:
    return statistics.median(map(figure, costs))


def lines(costs: Costs, figure: Callable[[Cost], float]) -> dict[str, list[Point]]:
    """For a chart: medians, and as far to either side as the farthest round."""
    found: dict[str, list[Point]] = {}
    for (name, at), each in costs.items():
        middle = median(each, figure)
        reach = max(abs(figure(cost) - middle) for cost in each)
        found.setdefault(name, []).append((at, middle, reach))
    return found


def thousands_a_second(cost: Cost) -> float:
    return cost.rate / 1000


def worker_us(cost: Cost) -> float:
    return cost.worker_cpu_s / cost.examples * 1e6


def server_us(cost: Cost) -> float:
    return cost.server_cpu_s / cost.examples * 1e6


def step_ms(cost: Cost) -> float:
    """An example is an id there."""
    return cost.seconds / (cost.examples / IDS_A_STEP) * 1e3


def clicks(mode: str, workers: int, servers: int, quick: bool) -> Cost:
    steps = max(LEAST_STEPS, STEPS // workers // (8 if quick else 1))
    work = {**CLICKS, "mode": mode, "steps": steps}
    return run_job("ours", work, workers=workers, servers=servers, deadline_s=DEADLINE_S + 15 * workers)


def scale_workers(options: argparse.Namespace) -> Costs:
    most = 4 if options.quick else 64
    places = [(mode, workers) for mode in MODES for workers in WORKERS if workers <= most]
    return measure(places, options.rounds, lambda place: clicks(place[0], place[1], 1, options.quick))


def scale_crowd(options: argparse.Namespace) -> Costs:
    def job(place: Place) -> Cost:
        mode, crowd = place
        steps = max(LEAST_STEPS, 2 * STEPS // crowd // (8 if options.quick else 1))
        processes = min(crowd, CROWDS)
        work = {**CLICKS, "mode": mode, "steps": steps, "warmup": CROWD_WARMUP, "crowd": crowd // processes}
        return run_job("crowd", work, workers=processes, servers=1)

    most = 4 if options.quick else 64
    return measure([(mode, crowd) for mode in MODES for crowd in WORKERS if crowd <= most], options.rounds, job)


def scale_servers(options: argparse.Namespace) -> Costs:
    most = 2 if options.quick else 4
    places = [(mode, servers) for mode in MODES for servers in SERVERS if servers <= most]
    return measure(places, options.rounds, lambda place: clicks(place[0], 2, place[1], options.quick))


def scale_hot(options: argparse.Namespace) -> Costs:
    def job(place: Place) -> Cost:
        tables, batch = place
        steps = min(4000, 400_000 // batch) // (8 if options.quick else 1)
        work = {**CLICKS, "alike": False, "mode": "async", "batch": batch, "steps": steps}
        more = {} if tables == "one table" else {"tables": 26, "vocabulary": 1_000_000}
        return run_job("ours", {**work, **more}, workers=2, servers=HOT_SERVERS)

    batches = HOT_BATCHES[-1:] if options.quick else HOT_BATCHES
    return measure([(each, batch) for each in ("one table", "26 tables") for batch in batches], options.rounds, job)


def scale_ids(options: argparse.Namespace) -> Costs:
    seen = [10**power for power in range(4, 9) if 10**power <= (10**5 if options.quick else options.most_ids)]

    def job(place: Place) -> Cost:
        work = {
            "mode": "sync",
            "width": 0,
            "batch": IDS_A_STEP,
            "vocabulary": place[1],
            "dim": 16,
            "steps": 50 if options.quick else 400,
            "warmup": 20,
        }
        return run_job("ids_seen", work, workers=1, servers=1, deadline_s=DEADLINE_S + place[1] / 50_000)

    return measure([("sync", count) for count in seen], options.rounds, job)


def report_jobs(name: str, costs: Costs, figures: Path | None) -> None:
    print_table(
        f"{name.capitalize()}, medians",
        ["mode", UNITS[name], "1000 examples/s", "worker us/example", "server us/example"],
        [
            [mode, at, median(each, thousands_a_second), median(each, worker_us), median(each, server_us)]
            for (mode, at), each in costs.items()
        ],
    )
    if figures:
        draw_lines(
            figures / f"scaling-{name}.png",
            lines(costs, thousands_a_second),
            title=f"Throughput by number of {UNITS[name]}",
            x=UNITS[name],
            y="1000 examples a second, all workers",
            logarithmic="" if name == "servers" else "x",
            from_zero=True,
        )


def report_hot(costs: Costs) -> None:
    print_table(
        f"The busiest of {HOT_SERVERS} servers, medians",
        ["ids in", "batch", "its processor time over the mean", "server us/example"],
        [
            [tables, batch, median(each, lambda cost: cost.busiest), median(each, server_us)]
            for (tables, batch), each in costs.items()
        ],
    )


def report_ids(costs: Costs, figures: Path | None) -> None:
    print_table(
        "Ids ever seen, medians",
        ["ids seen", "ms a step", "worker us/id", "server us/id", "server MB", "worker MB"],
        [
            [
                f"{seen:,}",
                median(each, step_ms),
                median(each, worker_us),
                median(each, server_us),
                median(each, lambda cost: cost.server_bytes / 1e6),
                median(each, lambda cost: cost.worker_bytes / 1e6),
            ]
            for (_, seen), each in costs.items()
        ],
    )
    if figures:
        draw_lines(
            figures / "scaling-ids.png",
            lines(costs, step_ms),
            title=f"A step that trains {IDS_A_STEP} rows, by size of the table",
            x="ids ever seen",
            y="milliseconds",
            logarithmic="x",
            from_zero=True,
        )
        sizes = {"server": lambda cost: cost.server_bytes / 1e6, "worker": lambda cost: cost.worker_bytes / 1e6}
        drawn = {name: lines(costs, size)["sync"] for name, size in sizes.items()}
        draw_lines(
            figures / "scaling-memory.png",
            drawn,
            title="Memory by size of the table",
            x="ids ever seen",
            y="MB",
            logarithmic="xy",
        )


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the smaller places, few steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw them, into this folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curves", nargs="+", default=["workers", "crowd", "servers", "hot", "ids"])
    parser.add_argument("--most-ids", type=float, default=1e7)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    scales = {
        "workers": scale_workers,
        "crowd": scale_crowd,
        "servers": scale_servers,
        "hot": scale_hot,
        "ids": scale_ids,
    }
    results: dict[str, Any] = {}
    for name in options.curves:
        costs = scales[name](options)
        if name == "ids":
            report_ids(costs, options.figures)
        elif name == "hot":
            report_hot(costs)
        else:
            report_jobs(name, costs, options.figures)
        results[name] = [{"line": line, "at": at, "costs": each} for (line, at), each in costs.items()]
    write_json(options.json, quick=options.quick, rounds=options.rounds, results=results)


if __name__ == "__main__":
    main()
