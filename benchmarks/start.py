"""How long a job of two servers and two workers takes from its start to its first step, and what memory its processes
have then, beside two processes of plain PyTorch that are started at once and train the same model.

    python benchmarks/start.py [--quick] [--json FILE] [--rounds N]

Both take turns, on a machine that has everything compiled and in its cache of files; what counts are medians. Seconds
are those of the last worker, CPU seconds those of one process up to there, and memory is what a process has to itself.
Servers run the script of the workers, as Fluid's do (``script``), or ``fleet server`` (``command``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measuring import busy_s, end_like_an_exit, free_endpoints, print_table, progress, write_json

SERVERS, WORKERS = 2, 2
DEADLINE_S = 120.0


def train(folder: Path, *, plain: bool) -> None:
    """A step on a small model with a table. Then the process says how it is, and waits until it has been looked at."""
    import torch

    if not plain:
        import fleet

        fleet.init()
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 4, sparse=True) if plain else fleet.nn.Embedding(None, 4)
    model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not plain:
        optimizer = fleet.distributed_optimizer(optimizer, model=model)
        if fleet.is_server():
            fleet.init_server()
            (folder / f"server-{os.getpid()}").write_text("{}")
            fleet.run_server()
            return
        fleet.init_worker()
    model(torch.arange(8).reshape(4, 2)).square().mean().backward()
    optimizer.step()
    told = {"at": time.time(), "cpu_s": time.process_time()}
    (folder / f"worker-{os.getpid()}.new").write_text(json.dumps(told))
    (folder / f"worker-{os.getpid()}.new").rename(folder / f"worker-{os.getpid()}")
    while not (folder / "seen").exists():
        time.sleep(0.01)
    if not plain:
        fleet.stop_worker()


def _commands(how: str, script: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return what is started at once, with which variables."""
    if how == "plain":
        return [([*script, "--plain"], {})] * WORKERS
    numbers = ["--server_num", str(SERVERS), "--worker_num", str(WORKERS)]
    if how == "script":
        return [(["-m", "fleet.launch", *numbers, *script], {})]
    servers = free_endpoints(SERVERS)
    job = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers), "PADDLE_TRAINERS_NUM": str(WORKERS)}
    workers = [{**job, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)} for index in range(WORKERS)]
    serving = [(["-m", "fleet", "server", "--endpoint", each], job) for each in servers]
    return [*serving, *((script, each) for each in workers)]


def measure(how: str) -> dict[str, float]:
    """Start the processes, and look at them after the first step."""
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "--in", folder]
        running = []
        before, began = busy_s(), time.time()
        for command, variables in _commands(how, script):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen([sys.executable, *command], env=environment, cwd=folder, **quiet))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while len(workers := [*Path(folder).glob("worker-*[0-9]")]) < WORKERS:
                assert time.monotonic() < deadline, f"{how}: no first step"
                time.sleep(0.01)
            busy = busy_s() - before
            told = [json.loads(each.read_text()) for each in workers]
            of_servers = [int(each.name.split("-")[1]) for each in Path(folder).glob("server-*")]
            figures = {
                "seconds": max(each["at"] for each in told) - began,
                "CPU s of a worker": statistics.mean(each["cpu_s"] for each in told),
                "CPU s of all": busy,
                "MiB of a worker": _own_mib([int(each.name.split("-")[1]) for each in workers]),
            }
            if how == "command":
                of_servers = [each.pid for each in running[:SERVERS]]
            figures["MiB of a server"] = _own_mib(of_servers) if of_servers else math.nan
            (Path(folder) / "seen").touch()
            for each in running:
                each.wait(DEADLINE_S)
        finally:
            for each in running:
                each.kill()
                each.wait()
    return figures


def _own_mib(pids: list[int]) -> float:
    return statistics.mean(psutil.Process(pid).memory_full_info().uss for pid in pids) / (1 << 20)


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, with nothing before it")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        train(options.folder, plain=options.plain)
        return
    ways, rounds = ["plain", "script", "command"], 1 if options.quick else options.rounds
    for how in () if options.quick else ways:
        measure(how)  # whatever is compiled or read for the first time
    figures: dict[str, list[dict[str, float]]] = {how: [] for how in ways}
    for how in progress(ways * rounds, str):
        figures[how].append(measure(how))
    rows = []
    for how, each in figures.items():
        rows.append((how, *(statistics.median(one[name] for one in each) for name in each[0])))
    headings = ["how", *figures["plain"][0]]
    print_table(f"{SERVERS} servers, {WORKERS} workers, medians of {rounds} rounds", headings, rows)
    write_json(options.json, rounds=rounds, quick=options.quick, results=figures)


if __name__ == "__main__":
    main()
