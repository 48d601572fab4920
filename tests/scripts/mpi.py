"""The script of every rank in test_mpi.py: a job whose end is known, and ranks that end badly in every way."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import fleet


def rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def speak_into_a_file() -> Path:
    """What this rank says on stderr goes into a file: launchers may drop the last words of those that end badly."""
    place = Path(os.environ["WORDS"])
    words = os.open(place / f"{rank()}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(words, sys.stderr.fileno())
    os.close(words)
    return place


def meet(place: Path, last: bool) -> None:
    """The last one goes on when all others wait in fleet.init(), which has by then set how they end on SIGTERM."""

    def look() -> None:
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            time.sleep(0.05)
        (place / f"{rank()}.met").touch()

    if not last:
        threading.Thread(target=look, daemon=True).start()
        return
    while len(list(place.glob("*.met"))) < 3:
        time.sleep(0.05)
    time.sleep(0.5)  # from there to MPI's own start


def main(variant: str, who: int) -> None:
    place = speak_into_a_file()
    mine = rank() == who
    if variant in ("exit-before", "never-calls"):
        meet(place, mine)
        if mine:
            sys.exit(3 if variant == "exit-before" else 0)
    if variant == "comes-late" and mine:
        time.sleep(11.5)  # who waits says so every ten seconds
    if variant == "discord":
        fleet.init(is_collective=mine)
    fleet.init(is_collective=variant == "collective" or None)
    if variant == "collective":
        endpoints = fleet.worker_endpoints()
        print(f"worker {fleet.worker_index()} of {fleet.worker_num()} at {len(set(endpoints))} endpoints", flush=True)
        import torch

        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        for _ in range(5):
            optimizer.minimize(weight.sum() * fleet.worker_index())
        fleet.stop_worker()
        print(f"weight {weight[0].item()}", flush=True)
        return
    if variant == "exit-early" and mine:
        sys.exit(2)
    if variant == "raise-early" and mine:
        raise ValueError("no data here")
    import torch  # here, so that the ranks that never come so far need not wait for it

    from fleet.ps.server.lean import be_lean

    if fleet.is_worker():  # servers do so by themselves
        be_lean()

    weight = torch.nn.Parameter(torch.zeros(4))
    table = fleet.nn.Embedding(None, 2, initializer="zeros")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight, *table.parameters()], lr=1.0))
    if fleet.is_server():
        fleet.init_server()
        if variant == "raise" and mine:
            raise ValueError("a bad server")
        fleet.run_server()
        print(f"served at {fleet.server_endpoints()[fleet.server_index()]}", flush=True)
        if variant == "finalize":
            from mpi4py import MPI

            MPI.Finalize()
            time.sleep(0.5)
        return
    fleet.init_worker()
    for step in range(5):
        optimizer.minimize(weight.sum() + table(torch.tensor([fleet.worker_index()])).sum())
        if step == 2 and variant == "raise" and mine:
            raise ValueError("a bad batch")
        if step == 2 and variant == "kill":
            time.sleep(1)  # all are in their loops
            if mine:
                os.kill(os.getpid(), 9)
    print(f"weight {weight[0].item()} row {table(torch.tensor([0]))[0, 0].item()}", flush=True)
    if variant == "uses-mpi":
        from mpi4py import MPI

        print(f"neighbour {MPI.COMM_WORLD.sendrecv(rank(), dest=4 - rank(), source=4 - rank())}", flush=True)
    fleet.stop_worker()
    if variant == "finalize":
        from mpi4py import MPI

        MPI.Finalize()
        time.sleep(0.5)  # longer than between two looks of whoever watches


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else -1)
