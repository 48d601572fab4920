"""Kills servers at random under a synchronous job, starts them again at once, and compares the end, bit for bit, with
that of a job that nobody disturbed.

    python tests/chaos/kills.py --minutes 2 --servers 2 --workers 2

Both jobs take the same number of steps: as many as the disturbed one has come to when the time is up. Prints how often
servers were killed and what came of it; the exit code is 0 if both ended alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: A step that takes no time would be over before anybody is killed.
PAUSE_S = 0.005
#: From when a server listens until it is killed; one in so many is killed before it does.
LIFE_S, EARLY = (0.0, 3.0), 5
#: For a job to end once nobody is killed any more.
END_S = 120.0


def work(until: float, steps: int) -> None:
    """One process of the job; with ``steps`` it takes so many, else as many as there is time for."""
    import torch

    import fleet
    import fleet.nn

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.open = fleet.nn.Embedding(None, 8)
            self.known = torch.nn.Embedding(500, 8, sparse=True)
            self.head = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.open(ids).mean(1) + self.known(ids % 500).mean(1))

    torch.manual_seed(1)
    fleet.init()
    model = Model()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    draw = torch.Generator().manual_seed(fleet.worker_index())
    step, goes_on = 0, True
    while goes_on:
        for _ in range(20):
            ids = torch.randint(0, 5000, (64, 6), generator=draw)
            optimizer.minimize((model(ids) - 1).square().mean())
            step += 1
            time.sleep(0 if steps else PAUSE_S)
        more = step < steps if steps else time.time() < until
        goes_on = bool(fleet.all_reduce_worker(torch.tensor(float(more)), op="min"))
    digest = hash_of(fleet.state_dict(model))
    print(f"END {step} {digest}", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


def hash_of(state: dict[str, object]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())  # type: ignore[attr-defined]
    return digest.hexdigest()


class Job:
    def __init__(self, servers: int, workers: int, folder: Path, arguments: list[str], durable: Path | None) -> None:
        self._folder = folder
        self._command = [sys.executable, __file__, "--role", *arguments]
        self.endpoints = free_endpoints(servers)
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "PADDLE_TRAINERS_NUM": str(workers),
            "FLEET_JOB_ID": folder.name,
            **({} if durable is None else {"FLEET_DURABLE_DIR": str(durable)}),
        }
        self.servers = [self.serve(index) for index in range(servers)]
        self.workers = [
            self._start(f"worker{index}", "TRAINER", PADDLE_TRAINER_ID=str(index)) for index in range(workers)
        ]

    def serve(self, index: int) -> subprocess.Popen[str]:
        return self._start(f"server{index}", "PSERVER", PADDLE_CURRENT_ENDPOINT=self.endpoints[index])

    def _start(self, name: str, role: str, **variables: str) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                self._command,
                env={**self._environment, "PADDLE_TRAINING_ROLE": role, **variables},
                stdout=subprocess.PIPE if role == "TRAINER" else subprocess.DEVNULL,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.servers, *self.workers):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def end(self) -> list[list[str]]:
        """What every worker says at the end: how many steps it took, and what it has then."""
        deadline = time.monotonic() + END_S
        said = [each.communicate(timeout=max(1.0, deadline - time.monotonic()))[0].split() for each in self.workers]
        codes = [each.wait(max(1.0, deadline - time.monotonic())) for each in (*self.workers, *self.servers)]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}; what was said is in {self._folder}")
        return said


def free_endpoints(count: int) -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def wait_for(endpoint: str, until: float) -> None:
    """Until somebody listens there."""
    host, port = endpoint.split(":")
    while time.time() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.02)


def disturbed(options: argparse.Namespace, folder: Path) -> tuple[list[list[str]], int]:
    until = time.time() + 60 * options.minutes
    draw, kills = random.Random(options.seed), 0
    durable = folder / "durable"
    with Job(options.servers, options.workers, folder, ["--until", str(until)], durable) as job:
        while time.time() < until and all(worker.poll() is None for worker in job.workers):
            index = draw.randrange(options.servers)
            if draw.randrange(EARLY):
                wait_for(job.endpoints[index], until)
            time.sleep(draw.uniform(*LIFE_S))
            job.servers[index].send_signal(signal.SIGKILL)
            job.servers[index].wait()
            job.servers[index] = job.serve(index)
            kills += 1
        said = job.end()
    left = sorted(each.name for each in durable.iterdir())
    if left:
        raise RuntimeError(f"the job is over and has left {left}")
    return said, kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--role", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        work(options.until, options.steps)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kills-"))  # it stays if something goes wrong
    said, kills = disturbed(options, folder)
    steps = said[0][1]
    quiet = folder / "quiet"
    quiet.mkdir()
    with Job(options.servers, options.workers, quiet, ["--steps", steps], None) as job:
        expected = job.end()
    same = said == expected
    if same:
        shutil.rmtree(folder)
    print(f"{kills} kills in {steps} steps: {'the same end, bit for bit' if same else f'{said} and not {expected}'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
