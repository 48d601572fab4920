"""How fast a job is by the network between its machines: latency and bandwidth, in every mode.

    python benchmarks/network.py [--quick] [--rounds N] [--json FILE] [--figures FOLDER] [--works PATTERN …]
                                 [--systems PATTERN …] [--trips MS …] [--rates GBIT …]

The two machines are network namespaces of this one, so this takes Linux and root. A program forwards each frame between
them (tests/scripts/bad_switch.py), later by half a round trip and no more than so many bits a second. It takes time of
the same processors, so what counts is the ratio to the same job over the same cable with neither limit. Everything else
is as in ctr.py: a server, a worker, a thread each, and ways that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ctr import KINDS, OURS, RPC, Kind, System
from figures import draw_lines
from measuring import Cost, JobFailed, Place, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from network_namespaces import Machines, missing

SERVER, WORKER = "10.78.0.1", "10.78.0.2"
#: Sends what there is as soon as it may, as CUBIC does, which most systems have and a namespace may not always choose.
#: BBR, which this machine may have, spreads each request over a part of a round trip.
CONGESTION_CONTROL = "reno"
TRIPS_MS, RATES_GBIT = (0.1, 0.5, 2.0, 10.0), (10.0, 1.0, 0.2)
MORE = (
    "ssp",
    "ssp+prefetch",
    "half-async+prefetch",
    "sync+prefetch+bf16",
    "async+prefetch+bf16",
    "async+prefetch+int8",
)
SYSTEMS = (*OURS, *(System(f"fleet {mode}", "ours", mode) for mode in MORE), *RPC)


@dataclass(frozen=True)
class Cable:
    """A round trip in milliseconds, and a rate in Gbit/s, each way; None is neither."""

    trip_ms: float | None = None
    gbit: float | None = None

    def __str__(self) -> str:
        if self.gbit is not None:
            return f"{self.gbit:g} Gbit/s"
        return "no limit" if self.trip_ms is None else f"{self.trip_ms:g} ms"

    @property
    def limits(self) -> dict[str, float]:
        latency = {} if self.trip_ms is None else {"latency_s": self.trip_ms / 2000}
        return latency if self.gbit is None else {**latency, "bits_per_s": self.gbit * 1e9}


FREE = Cable()


def run(system: System, kind: Kind, cable: Cable, *, quick: bool) -> Cost:
    with Machines() as machines:
        server, worker = machines.machine("server"), machines.machine("worker")
        machines.join("lan", {server: f"{SERVER}/24", worker: f"{WORKER}/24"}, **cable.limits)
        for machine in (server, worker):
            machine.set_congestion_control(CONGESTION_CONTROL)
        places = {
            role: Place(host, ("ip", "netns", "exec", machine.namespace))
            for role, host, machine in (("server", SERVER, server), ("worker", WORKER, worker))
        }
        work = kind.work(system.mode, quick)
        found = {"GLOO_SOCKET_IFNAME": "lan", "TP_SOCKET_IFNAME": "lan"}  # by torch rpc
        return run_job(
            system.program, work, servers=kind.servers, workers=kind.workers, environment=found, places=places
        )


def measure(
    kind: Kind, systems: Sequence[System], cables: Sequence[Cable], rounds: int, *, quick: bool
) -> Iterator[dict[str, Any]]:
    costs: dict[tuple[System, Cable], list[Cost]] = {(system, cable): [] for system in systems for cable in cables}
    turns = [turn for _ in range(rounds) for turn in costs]
    for system, cable in progress(turns, lambda turn: f"{kind.name}, {turn[0].name}, {turn[1]}"):
        try:
            costs[system, cable].append(run(system, kind, cable, quick=quick))
        except JobFailed as error:
            print(f"{system.name}, {cable}: {error}", file=sys.stderr)
    for system in systems:
        free = [cost.rate for cost in costs[system, FREE]]
        for cable in cables:
            found = costs[system, cable]
            if not found or len(found) != len(free):
                continue
            yield {
                "system": system.name,
                "cable": str(cable),
                "trip_ms": cable.trip_ms,
                "gbit": cable.gbit,
                "1000 examples/s": statistics.median(cost.rate for cost in found) / 1000,
                "of no limit": median_ratio([cost.rate for cost in found], free),
                "kB a step": statistics.median(cost.worker_bytes / cost.examples for cost in found) * kind.batch / 1e3,
                "others, cores": max(cost.foreign for cost in found),
            }


def show(kind: Kind, rows: Sequence[dict[str, Any]], rounds: int) -> None:
    """One table of rates, a line a system and a column a cable."""
    cables = list(dict.fromkeys(row["cable"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["system"] for row in rows):
        by_cable = {row["cable"]: row for row in rows if row["system"] == name}
        cells = [
            f"{by_cable[cable]['1000 examples/s']:.0f} ({by_cable[cable]['of no limit']:.2f})"
            if cable in by_cable
            else "-"
            for cable in cables
        ]
        lines.append([name, *cells, f"{statistics.median(row['kB a step'] for row in by_cable.values()):.0f}"])
    title = f"{kind.name}: 1000 examples a second (of the same with no limit), medians of {rounds} rounds"
    print_table(title, ["system", *cables, "kB a step"], lines)


def draw(kind: Kind, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    trips = [row for row in rows if row["gbit"] is None and row["trip_ms"] is not None]
    series = {
        name: [(row["trip_ms"], row["1000 examples/s"], 0.0) for row in trips if row["system"] == name]
        for name in dict.fromkeys(row["system"] for row in trips)
    }
    draw_lines(
        folder / "network.svg",
        series,
        title=f"{kind.name} by the round trip to its server",
        x="round trip, ms",
        y="1000 examples a second",
        logarithmic="x",
    )


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw network.svg in this folder")
    parser.add_argument("--works", nargs="+", default=["3x32"], help=f"of {[kind.name for kind in KINDS]}")
    parser.add_argument("--systems", nargs="+", default=["*"], help=f"of {[system.name for system in SYSTEMS]}")
    parser.add_argument("--trips", nargs="*", type=float, default=TRIPS_MS, help="round trips in milliseconds")
    parser.add_argument("--rates", nargs="*", type=float, default=RATES_GBIT, help="rates in Gbit/s")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"there can be no network namespaces here: {reason}")
    rounds = 1 if options.quick else options.rounds
    cables = [FREE, *(Cable(trip_ms=each) for each in options.trips), *(Cable(gbit=each) for each in options.rates)]
    results: dict[str, Any] = {}
    for kind in KINDS:
        systems = [
            system
            for system in SYSTEMS
            if system.does(kind) and any(fnmatch(system.name, pattern) for pattern in options.systems)
        ]
        if any(fnmatch(kind.name, pattern) for pattern in options.works):
            results[kind.name] = list(measure(kind, systems, cables, rounds, quick=options.quick))
            show(kind, results[kind.name], rounds)
            if options.figures:
                draw(kind, results[kind.name], options.figures)
    write_json(options.json, figures=results)


if __name__ == "__main__":
    main()
