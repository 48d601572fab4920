"""How long a job on Ray takes from ``fleet.ray.run`` to its first step, and how much of that is Ray's own start.

    python benchmarks/ray_start.py [--quick] [--json FILE] [--rounds N]

Two servers and two workers, each an actor of one CPU, on a Ray that is started for it on this machine. Ray's own start
is that of as many actors that do nothing: a placement group for them, until each has answered. Both take turns, and
what counts is the median of the differences. CPU seconds are those of one process up to the first step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import ray
from measuring import busy_s, end_like_an_exit, print_table, progress, write_json
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import fleet.ray

SERVERS, WORKERS = 2, 2


class Idle:
    """An actor that does nothing."""

    def cpu_s(self) -> float:
        return time.process_time()


def own_start() -> tuple[float, float]:
    """How long Ray takes for as many actors, and the CPU seconds of one."""
    count, began = SERVERS + WORKERS, time.time()
    group = ray.util.placement_group([{"CPU": 1}] * count, strategy="PACK")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(count)]
    actors = [ray.remote(Idle).options(num_cpus=1, scheduling_strategy=place).remote() for place in places]
    cpu_s = ray.get([actor.cpu_s.remote() for actor in actors])
    took = time.time() - began
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)
    return took, statistics.mean(cpu_s)


def train() -> tuple[float, float] | None:
    """A step on a small model with a table; a worker returns when that was, and its CPU seconds."""
    import torch

    import fleet

    fleet.init()
    model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    optimizer.minimize(model(torch.arange(8).reshape(4, 2)).square().mean())
    first_step = time.time(), time.process_time()
    fleet.stop_worker()
    return first_step


def measure() -> dict[str, float]:
    own_s, own_cpu_s = own_start()
    before, began = busy_s(), time.time()
    workers = fleet.ray.run(train, server_num=SERVERS, worker_num=WORKERS)
    took, busy = max(at for at, _ in workers) - began, busy_s() - before
    cpu_s = statistics.mean(cpu_s for _, cpu_s in workers)
    return {
        "Ray's own, s": own_s,
        "run() to first step, s": took,
        "beyond Ray's own, s": took - own_s,
        "idle actor, CPU s": own_cpu_s,
        "worker, CPU s": cpu_s,
        # Servers take as much as workers, but for the step.
        "others, cores": max(0.0, busy - (SERVERS + WORKERS) * cpu_s) / took,
    }


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    ray.init("local", num_cpus=SERVERS + WORKERS, include_dashboard=False, log_to_driver=False)
    measure()  # whatever is compiled or read for the first time
    figures: list[dict[str, Any]] = [measure() for _ in progress(range(rounds), lambda _: "a job")]
    medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
    print_table(f"{SERVERS} servers, {WORKERS} workers, medians of {rounds} rounds", list(medians), [medians.values()])
    write_json(options.json, rounds=rounds, quick=options.quick, results=figures)


if __name__ == "__main__":
    main()
