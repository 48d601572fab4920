"""What servers and workers do in the jobs of test_ray.py: a module that Ray's processes can import."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import small_job
import torch
from harness import until
from patience import PROCESSES_S

import fleet
from fleet import Fleet
from fleet.api import default
from fleet.base.cluster import Endpoint

STEPS = 8
MAKING = threading.Lock()


def body(job: Fleet, worker: int, folder: Path | None = None) -> list[torch.Tensor]:
    """What a worker trains, and all that it sees at the end. What is to happen stands in ``folder``."""
    with MAKING:  # workers that are threads of one process would draw from each other's numbers
        torch.manual_seed(3)
        model = small_job.Net()
    optimizer = job.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
    job.init_worker()
    for step in range(job.resume_step(), STEPS):
        if folder is not None:
            happen(folder, f"worker-{worker}-step-{step}")
        small_job.train(model, optimizer, [2 * step + worker])
    return model.seen()


def happen(folder: Path, moment: str) -> None:
    """Do once what is to happen at this moment: the name of a file, and what is in it. ``wait`` is for the end of
    server 0, which is gone with its node or its driver, ``look`` until somebody has looked."""
    try:
        what, _, whom = (folder / moment).read_text().partition(" ")
        (folder / moment).unlink()
    except FileNotFoundError:
        return
    if what == "wait":
        (folder / "reached").touch()
        pid = int((folder / "server-0").read_text().split()[0])
        deadline = time.monotonic() + PROCESSES_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    if what == "look":
        (folder / "reached").touch()
        until(lambda: (folder / "looked").exists(), PROCESSES_S)
        return
    if what == "fail":
        raise ValueError(f"no such {whom}")
    pid, endpoint = (folder / whom).read_text().split()
    os.kill(int(pid), signal.SIGTERM if what == "end" else signal.SIGKILL)
    if what == "occupy":  # until this process ends; the dead one may hold the port for a moment
        taken = Endpoint.parse(endpoint)
        while True:
            try:
                HELD.append(socket.create_server((taken.host, taken.port)))
                return
            except OSError:
                continue


HELD: list[socket.socket] = []


def come(folder: Path | None) -> None:
    """Find out who this process is, and leave word of it."""
    fleet.init()
    if folder is None:
        return
    (folder / f"pid-{os.getpid()}").touch()
    if fleet.is_server():
        endpoint = fleet.server_endpoints()[fleet.server_index()]
        (folder / f"server-{fleet.server_index()}").write_text(f"{os.getpid()} {endpoint}")
    else:
        (folder / f"worker-{fleet.worker_index()}").write_text(f"{os.getpid()} -")


def train(folder: Path | None = None) -> Any:
    come(folder)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return "a server"
    me = fleet.worker_index()
    try:
        seen = body(default, me, folder)
    finally:  # whatever ends it
        fleet.stop_worker()
    return me, os.environ["OMP_NUM_THREADS"], seen


def grow(folder: Path, elastic: bool) -> Any:
    """Train until two workers do; return who this one is, how many it was told of, and how many there were."""
    come(folder)
    strategy = fleet.StrategyFactory.create_half_async_strategy(elastic=elastic)
    model = small_job.Net()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), strategy, model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    me = fleet.worker_index()
    (folder / f"{me} trains").touch()
    deadline = time.monotonic() + PROCESSES_S
    while len(list(folder.glob("* trains"))) < 2 and time.monotonic() < deadline:
        small_job.train(model, optimizer, [me])
    there = fleet.all_reduce_worker(1)
    fleet.stop_worker()
    return me, fleet.worker_num(), int(there)
