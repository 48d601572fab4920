"""A step of a collective job beside one of DistributedDataParallel, and what the compressing options send.

    python benchmarks/collective.py [--quick] [--workers N] [--json FILE]

Both train in the same processes and the same Gloo group, taking turns of a few steps, so that what else the machine
does hits both. A figure is the median over all steps of the slowest worker.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fleet
from fleet.collective import DGC, DistributedStrategy, PowerSGD
from fleet.role_maker import UserDefinedCollectiveRoleMaker

#: Widths of the layers, rows of a batch, turns, steps in a turn.
MODELS = {
    "small, 26 thousand parameters": ((64, 128, 128, 10), 64, 40, 10),
    "large, 17 million parameters": ((2048, 2048, 2048, 2048, 2048, 10), 32, 12, 3),
}
WARM_UP = 3
STRATEGIES = {
    "all-reduce": DistributedStrategy(),
    "fp16 all-reduce": DistributedStrategy(fp16_allreduce=True),
    "PowerSGD, rank 4": DistributedStrategy(power_sgd=PowerSGD(rank=4, start_step=2)),
    "DGC, 99.9 % left out": DistributedStrategy(dgc=DGC(sparsity=(0.999,))),
}


def network(widths: tuple[int, ...]) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def collective_job(model: torch.nn.Module, strategy: DistributedStrategy, rank: int, size: int) -> tuple[Any, Any]:
    job = fleet.Fleet(environ={})
    endpoints = [f"127.0.0.1:{port}" for port in range(1, size + 1)]  # nobody listens: the group is adopted
    job.init(UserDefinedCollectiveRoleMaker(rank, endpoints))
    optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), strategy, model=model)
    job.init_worker()
    return job, optimizer


def compare(name: str, rank: int, size: int, quick: bool) -> dict[str, Any]:
    widths, rows, turns, steps = MODELS[name]
    x = torch.randn(rows, widths[0])
    wrapped = DistributedDataParallel(network(widths))
    plain = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    model = network(widths)
    job, optimizer = collective_job(model, DistributedStrategy(), rank, size)

    def ddp() -> None:
        plain.zero_grad()
        wrapped(x).square().mean().backward()
        plain.step()

    def ours() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    times: dict[str, list[float]] = {"ddp": [], "fleet": []}
    for turn in range(-WARM_UP, turns // (4 if quick else 1)):
        for way, step in (("ddp", ddp), ("fleet", ours))[:: 1 if turn % 2 else -1]:
            for _ in range(steps):
                took = slowest(step)
                if turn >= 0:
                    times[way].append(took)
    job.stop_worker()
    medians = {way: statistics.median(each) for way, each in times.items()}
    return {
        "model": name,
        **{f"{way}_ms": 1e3 * m for way, m in medians.items()},
        "ratio": medians["fleet"] / medians["ddp"],
    }


def slowest(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)  # and all begin the next one together
    return took.item()


def sent(name: str, rank: int, size: int) -> list[dict[str, Any]]:
    """Bytes that one worker sends in a step."""
    widths, rows, _, _ = MODELS[name]
    told = []
    for way, strategy in STRATEGIES.items():
        model = network(widths)
        job, optimizer = collective_job(model, strategy, rank, size)
        for _ in range(3):
            before = job.summary()["gradient_bytes"]
            optimizer.minimize(model(torch.randn(rows, widths[0])).square().mean())
        told.append({"model": name, "way": way, "bytes": job.summary()["gradient_bytes"] - before})
        job.stop_worker()
    return told


def work(rank: int, size: int, quick: bool, store: str) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    told = {
        "steps": [compare(name, rank, size, quick) for name in MODELS],
        "bytes": [line for name in MODELS for line in sent(name, rank, size)],
    }
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--work", nargs=2, metavar=("RANK", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(int(options.work[0]), options.workers, options.quick, options.work[1])
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--workers", str(options.workers), *(["--quick"] * options.quick)]
        workers = [
            subprocess.Popen([*command, "--work", str(rank), f"{scratch}/store"], stdout=subprocess.PIPE, text=True)
            for rank in range(options.workers)
        ]
        out = workers[0].communicate()[0]
        if any(worker.wait() for worker in workers):
            sys.exit("a worker failed")
    told = json.loads(out)
    print(f"{'ms a step':<34}{'DDP':>10}{'fleet':>10}{'ratio':>8}")
    for line in told["steps"]:
        print(f"{line['model']:<34}{line['ddp_ms']:>10.2f}{line['fleet_ms']:>10.2f}{line['ratio']:>8.3f}")
    print(f"\n{'bytes a worker sends in a step':<34}{'':>24}{'bytes':>14}{'of all':>10}")
    for line in told["bytes"]:
        whole = next(other["bytes"] for other in told["bytes"] if other["model"] == line["model"])
        print(f"{line['model']:<34}{line['way']:>24}{line['bytes']:>14,}{line['bytes'] / whole:>10.4f}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "workers": options.workers, **told}, indent=1))


if __name__ == "__main__":
    main()
