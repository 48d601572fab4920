"""Dense parameters: the step of a large model, and how near a step's traffic comes to what gRPC can carry.

    python benchmarks/dense.py [--quick] [--json FILE] [--peers FOLDER]

1. Four layers of 2048 x 2048 (64 MiB of parameters), batches of 16, synchronous: milliseconds a step, against PyTorch
   in one process and PaddlePaddle 1.8.5 (``--peers``, as for ctr.py); also with gradients in fewer bits.
2. A step with nothing to compute: gradients up, SGD, values down, of one parameter of 64 MiB and of a thousand of
   1 KiB, against the same bytes through a bare gRPC stream in the same round (see wire.py).

All take turns, and what counts is the median of the ratios within a round. One server, one worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wire
from measuring import JobFailed, end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

from fleet.plan.specs import WIRE_DTYPES

LAYERS = {"model": "dense", "width": 2048, "batch": 16, "warmup": 5}
#: name: parameters, numbers in each, steps
SHAPES = {"one of 64 MiB": (1, 1 << 24, 20), "a thousand of 1 KiB": (1000, 1 << 8, 400)}
BARE = ("gRPC stream", "gRPC, buffers")


def step_ms(program: str, work: dict[str, Any], servers: int = 1, python: str = sys.executable) -> float | None:
    """Milliseconds of a step, None where the job failed or learned nothing."""
    try:
        cost = run_job(program, work, servers=servers, workers=1, python=python)
    except JobFailed as failure:
        print(f"{program}: {failure}", file=sys.stderr)
        return None
    if not cost.learned:
        print(f"{program}: learned nothing, loss {cost.first_loss:.4f} -> {cost.last_loss:.4f}", file=sys.stderr)
        return None
    return cost.seconds / work["steps"] * 1e3


def median(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def layers(rounds: int, steps: int, peers: Path | None, narrow: Sequence[str]) -> list[list[Any]]:
    ours, local, paddle = "fleet sync", "local torch", "paddle 1.8.5 sync"
    jobs: dict[str, tuple[str, str, int, str]] = {
        local: ("local_torch", "local", 0, sys.executable),
        ours: ("ours", "sync", 1, sys.executable),
        f"{ours}, backward and step": ("ours", "sync+apart", 1, sys.executable),
        "fleet async": ("ours", "async", 1, sys.executable),
        **{f"{ours}, {each}": ("ours", f"sync+{each}", 1, sys.executable) for each in narrow},
    }
    python = peers / "paddle18" / "bin" / "python" if peers else None
    if python and python.exists():
        jobs[paddle] = ("paddle18", "sync", 1, str(python))
        jobs["paddle 1.8.5 async"] = ("paddle18", "async", 1, str(python))
    else:
        print("paddle 1.8.5: left out, no paddle18/bin/python in --peers")
    figures: dict[str, list[float | None]] = {name: [] for name in jobs}
    for name in progress(list(jobs) * rounds, lambda name: f"layers, {name}"):
        program, mode, servers, interpreter = jobs[name]
        work = {**LAYERS, "mode": mode, "steps": steps}
        figures[name].append(step_ms(program, work, servers, interpreter))
    none: list[float | None] = [None] * rounds
    return [
        [
            name,
            median(each),
            median_ratio(figures[local], each),
            median_ratio(figures.get(paddle, none), each),
        ]
        for name, each in figures.items()
    ]


def push_pull(rounds: int, quick: bool) -> list[list[Any]]:
    rows = []
    for name, (parameters, numbers, steps) in SHAPES.items():
        steps = steps // 5 if quick else steps
        size = parameters * numbers * 4
        work = {"tables": parameters, "width": numbers, "batch": 1, "mode": "sync", "steps": steps, "warmup": 5}
        ours: list[float | None] = []
        bare: dict[str, list[float | None]] = {way: [] for way in BARE}
        for _ in progress(range(rounds), lambda round_, name=name: f"push and pull, {name}, round {round_}"):
            ours.append(step_ms("push_pull", work))
            for way in BARE:
                bare[way].append(statistics.median(wire.measure(way, size, steps)) * 1e3)
        rows.append(
            [
                name,
                median(ours),
                *(median(bare[way]) for way in BARE),
                *(median_ratio(bare[way], ours) for way in BARE),
            ]
        )
    return rows


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few steps, one narrow type")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=os.environ.get("BENCHMARK_PEERS"), help="their environments")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds

    layers_head = ["system", "ms a step", "speed of local torch", "speed of paddle 1.8.5 sync"]
    peers = Path(options.peers).resolve() if options.peers else None
    layers_rows = layers(rounds, 4 if options.quick else 40, peers, WIRE_DTYPES[:1] if options.quick else WIRE_DTYPES)
    print_table(f"Four layers of 2048 x 2048, batch 16, medians of {rounds} rounds", layers_head, layers_rows)

    push_head = [
        "parameters",
        "fleet, ms a step",
        *(f"{way}, ms" for way in BARE),
        *(f"speed of {way}" for way in BARE),
    ]
    push_rows = push_pull(rounds, options.quick)
    print_table(f"Push and pull with nothing to compute, medians of {rounds} rounds", push_head, push_rows)

    write_json(
        options.json,
        rounds=rounds,
        quick=options.quick,
        layers=[dict(zip(layers_head, row, strict=True)) for row in layers_rows],
        push_pull=[dict(zip(push_head, row, strict=True)) for row in push_rows],
    )


if __name__ == "__main__":
    main()
