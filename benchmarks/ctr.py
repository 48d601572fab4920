"""A click model on Fleet and on other systems, in turn on the same work: examples and CPU seconds.

    python benchmarks/ctr.py [--quick] [--json FILE] [--figures FOLDER] [--peers FOLDER] [--before CHECKOUT]
                             [--works PATTERN …] [--systems PATTERN …]

The work is that of CTR-DNN: 26 slots of one id each, Zipf-distributed over a million, rows of 10 numbers, 13 numbers
beside, three layers of 32 (which leaves communication the say) or of 400 (computing), batches of 1000. Every process
has one thread for computing; where CUDA is, there are works whose workers compute there. Which ids are clicked is
learnable, and a system whose loss does not fall has no figure.

Systems take turns, ``--rounds`` times, and what counts is the median of the ratios within a round, as absolute speed
differs from hour to hour. Peers are found as virtual environments in ``--peers`` (or $BENCHMARK_PEERS), one folder
each: paddle18, paddle26, tensorflow, torchrec; README.md tells how to make them. What is not there is left out.
With ``--before`` a synchronous Fleet of another commit runs beside this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from figures import draw_bars, draw_stacks
from measuring import Cost, JobFailed, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json


@dataclass(frozen=True)
class Kind:
    """One table of figures: the same work for all systems."""

    name: str
    width: int
    steps: int
    optimizer: str = "sgd"
    tables: int = 1
    servers: int = 1
    workers: int = 1
    batch: int = 1000
    warmup: int = 20
    device: str = "cpu"

    def work(self, mode: str, quick: bool) -> dict[str, Any]:
        return {
            "mode": mode,
            "width": self.width,
            "batch": self.batch,
            "optimizer": self.optimizer,
            "tables": self.tables,
            "steps": self.steps // 4 if quick else self.steps,
            "warmup": self.warmup,
            "device": self.device,
        }


KINDS = (
    Kind("3x32", 32, 800),
    Kind("3x400", 400, 240),
    Kind("3x32, 2+2", 32, 600, servers=2, workers=2),
    Kind("3x400, 2+2", 400, 160, servers=2, workers=2),
    Kind("3x32, adam", 32, 600, optimizer="adam"),
    Kind("3x32, 26 tables", 32, 400, tables=26),
    Kind("3x400, GPU", 400, 400, device="cuda"),
    Kind("3x4096, GPU", 4096, 100, device="cuda", batch=8192),
)


def anything(_: Kind) -> bool:
    return True


def on_the_cpu(kind: Kind) -> bool:
    return kind.device == "cpu"


def sgd_on_one_table(kind: Kind) -> bool:
    return on_the_cpu(kind) and (kind.optimizer, kind.tables) == ("sgd", 1)


def tables_of_their_own(kind: Kind) -> bool:
    return kind.tables > 1


def sgd_alone(kind: Kind) -> bool:
    return sgd_on_one_table(kind) and kind.workers == 1


@dataclass(frozen=True)
class System:
    """A program of ``peers/`` in one mode; ``venv`` is its folder in ``--peers``, None for this interpreter's. Where
    there are no servers, all processes but those of a job alone are workers."""

    name: str
    program: str
    mode: str
    venv: str | None = None
    does: Callable[[Kind], bool] = anything
    has_servers: bool = True
    #: what its process finds before anything else
    path: str = ""

    def processes(self, kind: Kind) -> dict[str, int]:
        if self.has_servers:
            return {"servers": kind.servers, "workers": kind.workers}
        return {"servers": 0, "workers": 1 if self.mode == "local" else kind.servers + kind.workers}


LOCAL = System("local torch", "local_torch", "local", None, lambda kind: kind.workers == 1, has_servers=False)
OURS = (
    *(
        System(f"fleet {mode}", "ours", mode)
        for mode in (
            "sync",
            "sync+prefetch",
            "sync+bf16",
            "sync+int8",
            "async",
            "async+prefetch",
            "half-async",
            "gba",
            "auto",
            "geo",
        )
    ),
    *(
        System(f"fleet {mode}", "ours", mode, None, tables_of_their_own)
        for mode in ("sync+group", "async+group", "async+group+prefetch")
    ),
)
RPC = tuple(
    System(f"torch rpc {mode}", "torch_rpc", mode, None, sgd_on_one_table)
    for mode in ("sync", "async", "async+prefetch")
)
PADDLE18 = tuple(
    System(f"paddle 1.8.5 {mode}", "paddle18", mode, "paddle18", on_the_cpu)
    for mode in ("sync", "async", "half-async", "geo")
)
OTHERS = (
    System("paddle 2.6.2 async", "paddle26", "async", "paddle26", on_the_cpu),
    System("tensorflow async", "tensorflow_ps", "async", "tensorflow", sgd_alone),
    System("torchrec sync", "torchrec_rows", "sync", "torchrec", sgd_on_one_table, has_servers=False),
)
SYSTEMS = (LOCAL, *OURS, *RPC, *PADDLE18, *OTHERS)
#: Whose steps are drawn.
SYNCHRONOUS = ("local torch", "fleet sync, before", "fleet sync", "fleet sync+prefetch, before", "fleet sync+prefetch")
#: What the others are compared with, beside local torch: each with the peer in its own mode, ahead of time or not.
AGAINST = {"paddle 1.8.5": PADDLE18, "torch rpc": RPC}


def as_before(checkout: Path) -> tuple[System, ...]:
    program = str(checkout / "benchmarks" / "peers" / "ours")
    return tuple(
        System(f"fleet {mode}, before", program, mode, None, sgd_alone, path=str(checkout))
        for mode in ("sync", "sync+prefetch")
    )


def interpreter(system: System, peers: Path | None) -> str | None:
    """The one that has the system, or None where it is not installed."""
    if system.venv is None:
        return sys.executable
    python = peers / system.venv / "bin" / "python" if peers else None
    return str(python) if python and python.exists() else None


def opponent(system: System, family: Iterable[System]) -> System | None:
    """Who of a family computes what this one does, or else what is next to it: asynchronously."""
    modes = {each.mode: each for each in family}
    return modes.get(system.mode.partition("+")[0], modes["async"])


class Figures:
    """What each system reached in each round of one kind of work; None where it failed or learned nothing."""

    def __init__(self, rounds: int, systems: Iterable[System]) -> None:
        self.costs: dict[System, list[Cost | None]] = {system: [None] * rounds for system in systems}
        self.failures: dict[System, str] = {}

    def enter(self, system: System, round_: int, cost: Cost) -> None:
        if cost.learned:
            self.costs[system][round_] = cost
        else:
            self.failures[system] = f"learned nothing: loss {cost.first_loss:.4f} -> {cost.last_loss:.4f}"

    def _each(self, system: System | None, figure: str) -> list[float | None]:
        if system is None or system not in self.costs:
            return [None] * len(next(iter(self.costs.values())))
        of = {
            "rate": lambda cost: cost.rate,
            "worker_cpu": lambda cost: cost.worker_cpu_s / cost.examples * 1e6,
            "server_cpu": lambda cost: cost.server_cpu_s / cost.examples * 1e6,
            "waiting": lambda cost: cost.waiting_s / cost.examples * 1e6,
            "cpu": lambda cost: (cost.worker_cpu_s + cost.server_cpu_s) / cost.examples * 1e6,
        }[figure]
        return [None if cost is None else of(cost) for cost in self.costs[system]]

    def row(self, system: System) -> dict[str, Any]:
        def median(figure: str) -> float | None:
            known = [value for value in self._each(system, figure) if value is not None]
            return statistics.median(known) if known else None

        def ratio(other: System | None, figure: str = "rate") -> float | None:
            return median_ratio(self._each(system, figure), self._each(other, figure))

        good = [cost for cost in self.costs[system] if cost is not None]
        row: dict[str, Any] = {
            "system": system.name,
            "1000 examples/s": None if (rate := median("rate")) is None else rate / 1000,
            "of local torch": ratio(LOCAL),
        }
        for name, family in AGAINST.items():
            row[f"of {name}"] = ratio(opponent(system, family))
        row |= {
            "worker us/example": median("worker_cpu"),
            "server us/example": median("server_cpu"),
            "waiting us/example": median("waiting"),
        }
        for name, family in AGAINST.items():
            row[f"CPU of {name}"] = ratio(opponent(system, family), "cpu")
        return row | {
            "loss": f"{good[-1].first_loss:.3f} -> {good[-1].last_loss:.3f}" if good else None,
            "others, cores": max((cost.foreign for cost in good), default=None),
        }


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[bool]:
    return [any(fnmatch(name, pattern) for pattern in patterns) for name in names]


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw them, into this folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=os.environ.get("BENCHMARK_PEERS"), help="their environments")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--works", nargs="+", default=["*"], help=f"of {[kind.name for kind in KINDS]}")
    parser.add_argument("--systems", nargs="+", default=["*"], help=f"of {[system.name for system in SYSTEMS]}")
    options = parser.parse_args()
    peers = Path(options.peers).resolve() if options.peers else None
    rounds = 1 if options.quick else options.rounds

    systems = (*SYSTEMS, *(as_before(options.before.resolve()) if options.before else ()))
    there: dict[System, str] = {}
    for system, wanted in zip(systems, chosen([each.name for each in systems], options.systems), strict=True):
        python = interpreter(system, peers)
        if wanted and python is None:
            print(f"{system.name}: left out, no {system.venv}/bin/python in --peers")
        elif wanted:
            there[system] = python
    kinds = [
        kind
        for kind, wanted in zip(KINDS, chosen([each.name for each in KINDS], options.works), strict=True)
        if wanted and (on_the_cpu(kind) or torch.cuda.is_available())
    ]

    results: dict[str, Any] = {}
    for kind in kinds:
        systems = [system for system in there if system.does(kind)]
        figures = Figures(rounds, systems)
        turns = [(round_, system) for round_ in range(rounds) for system in systems]
        for round_, system in progress(turns, lambda turn, kind=kind: f"{kind.name}, {turn[1].name}"):
            try:
                cost = run_job(
                    system.program,
                    kind.work(system.mode, options.quick),
                    python=there[system],
                    environment={"PYTHONPATH": system.path} if system.path else {},
                    **system.processes(kind),
                )
            except JobFailed as failure:
                figures.failures[system] = str(failure)
            else:
                figures.enter(system, round_, cost)
        rows = [figures.row(system) for system in systems]
        title = f"{kind.name}: {kind.servers} servers, {kind.workers} workers, medians of {rounds} rounds"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])
        for system, failure in figures.failures.items():
            print(f"\n{system.name}: {failure}")
        results[kind.name] = {
            "rows": rows,
            "costs": {system.name: costs for system, costs in figures.costs.items()},
            "failures": {system.name: failure for system, failure in figures.failures.items()},
        }
    if options.figures:
        draw(options.figures, {name: result["rows"] for name, result in results.items()})
    write_json(options.json, rounds=rounds, quick=options.quick, results=results)


def draw(folder: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Thousands of examples a second, and where the time of a synchronous step goes, of the works that one server and
    one worker do with SGD on one table."""
    shown = [kind for kind in KINDS if sgd_alone(kind) and kind.name in rows]
    groups = {kind.name: {row["system"]: row["1000 examples/s"] or 0.0 for row in rows[kind.name]} for kind in shown}
    if groups:
        draw_bars(folder / "systems.svg", groups, title="One server and one worker", x="1000 examples a second")
    steps = {}
    for kind in shown:
        by_name = {row["system"]: row for row in rows[kind.name] if row["1000 examples/s"]}
        steps[kind.name] = {
            name: took for each in SYNCHRONOUS if each in by_name for name, took in parts(kind, by_name[each]).items()
        }
    if steps and all(steps.values()):
        draw_stacks(folder / "synchronous-step.svg", steps, title="A synchronous step", x="microseconds")


def parts(kind: Kind, row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What the worker's main thread does in a step, and below it its server, which also computes while nobody waits."""
    waits, serves = kind.batch * row["waiting us/example"], kind.batch * (row["server us/example"] or 0.0)
    worker = {"computes": kind.batch / row["1000 examples/s"] * 1000 - waits, "waits": waits}
    return {row["system"]: worker} | (
        {f"{row['system']}, server": {"computes": serves, "waits": 0.0}} if serves else {}
    )


if __name__ == "__main__":
    main()
