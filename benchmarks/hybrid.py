"""Dense parameters among the workers, rows on the servers: against PyTorch's own ways and ``dense="servers"``.

    python benchmarks/hybrid.py [--quick] [--json FILE] [--peers FOLDER] [--works PATTERN …]

1. Four layers of 2048 x 2048 and a table: two workers and a server, against DistributedDataParallel whose processes
   have a table each and send nothing of it.
2. CTR-DNN with three layers of 400: two workers and two servers, against the same job with its layers on the servers,
   and against TorchRec in two processes.
3. Where there is CUDA: a worker and a server, against PyTorch alone with the table on the device, with 0.4 and with 35
   million dense parameters: rows as forwards ask for them, brought to the device ahead, and kept there for a while.

Systems take turns, and what counts is the median of the ratios of step times within a round. What a figure is wanted to
be stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from measuring import JobFailed, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json


@dataclass(frozen=True)
class System:
    """A program of ``peers/`` in one mode, and the time of its step that is wanted: at most so many times that of
    another system. ``venv`` is its folder in ``--peers``."""

    program: str
    mode: str
    workers: int
    servers: int
    against: str | None = None
    wanted: float | None = None
    venv: str | None = None


@dataclass(frozen=True)
class Kind:
    """One table of figures: the same work for all its systems."""

    name: str
    work: dict[str, Any]
    steps: int
    systems: dict[str, System] = field(default_factory=dict)


def on_device(name: str, width: int, batch: int, steps: int, wanted: tuple[float, float]) -> Kind:
    """A worker that computes on CUDA and averages its dense gradients with nobody, against a table that lies on the
    device."""
    local = "torch alone"
    work = {"model": "ctr", "width": width, "batch": batch, "device": "cuda", "alike": True}
    return Kind(
        name,
        work,
        steps,
        {
            local: System("local_torch", "local", 1, 0),
            "sync": System("ours", "sync+all_reduce", 1, 1, local),
            "sync, ahead": System("ours", "sync+all_reduce+ahead", 1, 1, local, wanted[0]),
            "async, ahead": System("ours", "async+all_reduce+ahead", 1, 1, local, wanted[0]),
            "async, kept": System("ours", "async+all_reduce+kept", 1, 1, local, wanted[1]),
        },
    )


KINDS = (
    Kind(
        "4 x 2048 and a table",
        {"model": "both", "width": 2048, "batch": 16},
        40,
        {
            "DistributedDataParallel": System("ddp", "ddp", 2, 0),
            "all_reduce": System("ours", "sync+all_reduce", 2, 1, "DistributedDataParallel", 1.05),
            "servers": System("ours", "sync", 2, 1, "DistributedDataParallel"),
        },
    ),
    Kind(
        "CTR-DNN 3x400",
        {"model": "ctr", "width": 400, "batch": 1000},
        160,
        {
            "servers, sync": System("ours", "sync", 2, 2),
            "all_reduce, sync": System("ours", "sync+all_reduce", 2, 2, "servers, sync", 1 / 1.1),
            "servers, async": System("ours", "async", 2, 2),
            "all_reduce, async": System("ours", "async+all_reduce", 2, 2, "servers, async", 1 / 1.1),
            "TorchRec": System("torchrec_rows", "sync", 2, 0, "servers, sync", None, "torchrec"),
        },
    ),
    on_device("0.4 M dense, batch 4096, GPU", 400, 4096, 200, (1 / 0.8, 1 / 0.9)),
    on_device("0.4 M dense, batch 16384, GPU", 400, 16384, 100, (1 / 0.8, 1 / 0.9)),
    on_device("35 M dense, batch 8192, GPU", 4096, 8192, 100, (1 / 0.95, 1 / 0.95)),
)


def interpreter(system: System, peers: Path | None) -> str | None:
    """The one that has the system, or None where it is not installed."""
    if system.venv is None:
        return sys.executable
    python = peers / system.venv / "bin" / "python" if peers else None
    return str(python) if python and python.exists() else None


def step_ms(kind: Kind, system: System, python: str, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and how many cores others used meanwhile."""
    work = {**kind.work, "mode": system.mode, "steps": steps, "warmup": 10}
    cost = run_job(system.program, work, servers=system.servers, workers=system.workers, python=python)
    if not cost.learned:
        raise JobFailed(f"learned nothing: loss {cost.first_loss:.4f} -> {cost.last_loss:.4f}")
    return cost.seconds / steps * 1e3, cost.foreign


HEAD = ["dense parameters", "ms a step", "against", "times its step", "wanted, at most", "others, cores"]


def measured(kind: Kind, rounds: int, steps: int, peers: Path | None) -> tuple[list[list[Any]], dict[str, str]]:
    """A row for every system, and why some have no figures."""
    figures: dict[str, list[float | None]] = {name: [None] * rounds for name in kind.systems}
    foreign: dict[str, float] = {}
    failures: dict[str, str] = {}
    turns = [(round_, name) for round_ in range(rounds) for name in kind.systems]
    for round_, name in progress(turns, lambda turn: f"{kind.name}, {turn[1]}"):
        system = kind.systems[name]
        python = interpreter(system, peers)
        if python is None:
            failures[name] = f"not measured: no {system.venv}/bin/python in --peers (README.md tells how to make it)"
            continue
        try:
            figures[name][round_], others = step_ms(kind, system, python, steps)
        except JobFailed as failure:
            failures[name] = str(failure)
        else:
            foreign[name] = max(others, foreign.get(name, 0.0))
    rows = []
    for name, system in kind.systems.items():
        known = [each for each in figures[name] if each is not None]
        times = None if system.against is None else median_ratio(figures[name], figures[system.against])
        median = statistics.median(known) if known else None
        rows.append([name, median, system.against, times, system.wanted, foreign.get(name)])
    return rows, failures


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, half of the steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=os.environ.get("BENCHMARK_PEERS"), help="their environments")
    parser.add_argument("--works", nargs="+", default=["*"], help=f"of {[kind.name for kind in KINDS]}")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    peers = Path(options.peers).resolve() if options.peers else None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results: dict[str, Any] = {}
    for kind in KINDS:
        if not any(fnmatch(kind.name, pattern) for pattern in options.works):
            continue
        if kind.work.get("device") == "cuda" and device is None:
            print(f"{kind.name}: not measured, there is no CUDA device")
            continue
        rows, failures = measured(kind, rounds, kind.steps // 2 if options.quick else kind.steps, peers)
        on = f", {device}" if kind.work.get("device") == "cuda" else ""
        print_table(f"{kind.name}{on}, medians of {rounds} rounds", HEAD, rows)
        for name, failure in failures.items():
            print(f"\n{name}: {failure}")
        results[kind.name] = {"rows": [dict(zip(HEAD, row, strict=True)) for row in rows], "failures": failures}
    write_json(options.json, rounds=rounds, quick=options.quick, device=device, results=results)


if __name__ == "__main__":
    main()
