"""Kills servers and workers of synchronous jobs at random, starts them again at once, and compares how every job ends,
bit for bit, with one that nobody disturbed.

    python tests/chaos/kills.py --minutes 2

Jobs run side by side, one after the other, each with its own servers. Every process of theirs lives for a random time,
from the moment it is started: so it is killed while it trains, while it starts, while it remembers, and while it takes
the place of another. A process is a fork of this one, which has imported what is slow and has neither threads nor
sockets, so that it is there in a tenth of the time a new Python takes.

Prints how many were killed and what came of it; the exit code is 0 if all jobs ended alike.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it

import fleet
import fleet.nn
import fleet.ps.backend  # what every process needs, and a fork has already
from fleet.kernels import RULES
from fleet.plan.specs import Initializer, TableSpec
from fleet.ps.table.table import Table

#: Steps of a job, and what is waited between two: one that takes no time would be over before anybody is killed.
STEPS, PAUSE_S = 150, 0.01
#: For a job to end once nobody is killed any more, and so many are killed at most before that.
END_S, MOST_KILLS = 120.0, 60
TICK_S = 0.01
#: Of every process, in the output of a run that fails.
SAID_CHARACTERS = 6000


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, 8)
        self.known = torch.nn.Embedding(500, 8, sparse=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.open(ids).mean(1) + self.known(ids % 500).mean(1))


def take_part(end: Path) -> None:
    """What a process of a job does; a worker leaves in ``end`` what it has at the end."""
    torch.manual_seed(1)
    fleet.init()
    model = Model()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    for step in range(fleet.resume_step(), STEPS):
        draw = torch.Generator().manual_seed(STEPS * fleet.worker_index() + step)
        optimizer.minimize((model(torch.randint(0, 5000, (64, 6), generator=draw)) - 1).square().mean())
        time.sleep(PAUSE_S)
    has = hash_of(fleet.state_dict(model))
    end.with_suffix(".new").write_text(has)
    end.with_suffix(".new").rename(end)
    fleet.stop_worker()


def hash_of(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


class Process:
    """A fork of this process, which takes a place in a job."""

    def __init__(self, log: Path, end: Path, environ: dict[str, str], dies_at: float) -> None:
        self.dies_at = dies_at
        self.code: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody else would end it
                if os.getppid() == parent:
                    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                    os.dup2(target, 1)
                    os.dup2(target, 2)
                    os.environ.update(environ)
                    take_part(end)
                    code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def has_ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this is entered it does nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self.code is None:
                os.kill(self.pid, signal.SIGCONT)


class Job:
    """Servers and workers, which live ``life_s`` each on the average; with none they live to the end."""

    def __init__(self, options: argparse.Namespace, folder: Path, draw: random.Random, life_s: float | None) -> None:
        folder.mkdir()
        self.folder = folder
        self.kills: Counter[str] = Counter()
        self._draw = draw
        self._life_s = life_s
        self._ends_by = time.monotonic() + END_S
        endpoints = [f"127.0.0.1:{free_port()}" for _ in range(options.servers)]
        common = {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
            "PADDLE_TRAINERS_NUM": str(options.workers),
            "FLEET_JOB_ID": folder.name,
            "FLEET_DURABLE_DIR": str(folder / "durable"),
            "FLEET_HEARTBEAT_S": "0.1",  # a worker's place is free after three
            "FLAGS_rpc_deadline": "30000",
        }
        self._environ = {
            **{
                f"server{index}": {**common, "PADDLE_TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": endpoint}
                for index, endpoint in enumerate(endpoints)
            },
            **{
                f"worker{index}": {**common, "PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)}
                for index in range(options.workers)
            },
        }
        self._kept = {
            name: folder / "durable" / environ["PADDLE_CURRENT_ENDPOINT"].replace(":", "_")
            for name, environ in self._environ.items()
            if name.startswith("server")
        }
        self.processes = {name: self._start(name) for name in self._environ}

    def _start(self, name: str) -> Process:
        life_s = float("inf") if self._life_s is None else self._draw.expovariate(1 / self._life_s)
        log = self.folder / f"{name}.log"
        return Process(log, self._end(name), self._environ[name], time.monotonic() + life_s)

    def _end(self, name: str) -> Path:
        return self.folder / f"{name}.end"

    def let_be(self) -> None:
        """Nobody is killed any more."""
        self._life_s = None
        self._ends_by = min(self._ends_by, time.monotonic() + END_S)
        for process in self.processes.values():
            process.dies_at = float("inf")

    def goes_on(self) -> bool:
        """Kill whoever's time has come; whether there is anything left to wait for."""
        for name, process in self.processes.items():
            if not process.has_ended() and process.dies_at < time.monotonic():
                self._kill(name, process)
        codes = {name: process.code for name, process in self.processes.items()}
        if any(codes.values()) or time.monotonic() > self._ends_by:
            raise RuntimeError(f"exit codes {codes}{self.said()}")
        return None in codes.values()

    def _kill(self, name: str, process: Process) -> None:
        with process.held():
            if self._is_done(name):
                process.dies_at = float("inf")
                return
            process.kill()
        self.kills[name.rstrip("0123456789")] += 1
        self._ends_by = time.monotonic() + END_S
        if self.kills.total() >= MOST_KILLS:
            self.let_be()
        self.processes[name] = self._start(name)

    def _is_done(self, name: str) -> bool:
        """Whether a process has done its part, so that nobody could do it over: a worker that says goodbye, and a
        server that has heard all of them and keeps nothing any more."""
        workers_have_ended = all(self._end(each).exists() for each in self._environ if each not in self._kept)
        if name in self._kept:
            return workers_have_ended and not self._kept[name].exists()
        return self._end(name).exists()

    def end(self) -> str:
        """What every worker has in the end, after a job that left nothing behind."""
        left = sorted(each.name for each in (self.folder / "durable").iterdir())
        if left:
            raise RuntimeError(f"the job is over and has left {left}{self.said()}")
        return " ".join(sorted({self._end(name).read_text() for name in self._environ if name not in self._kept}))

    def said(self) -> str:
        """What the processes said last, and where the rest is: for whoever sees nothing but the output."""
        lasts = (f"{log.name}:\n{log.read_text()[-SAID_CHARACTERS:]}" for log in sorted(self.folder.glob("*.log")))
        return "\n".join([f"; what was said is in {self.folder}", *lasts])

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def free_port() -> int:
    """One that the system gives to nobody by itself: a server that starts again must find it free. Runs with one seed
    may go on side by side, so it does not come from that."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port


def prepare() -> None:
    """Have the kernels loaded that every server would load."""
    rows = RULES["Adam"].rows
    assert rows is not None
    Table(TableSpec("", 8, "float32", 0, None, Initializer("zeros")), rows, 0).warm()


def disturbed(
    options: argparse.Namespace, folder: Path, draw: random.Random, expected: str
) -> tuple[Counter[str], int]:
    """Jobs until the time is up; how many were killed in how many of them."""
    kills: Counter[str] = Counter()
    began, until = 0, time.monotonic() + 60 * options.minutes
    running: list[Job] = []
    try:
        while running or time.monotonic() < until:
            is_late = time.monotonic() > until
            while len(running) < options.jobs and not is_late:
                running.append(Job(options, folder / f"job{began}", draw, options.life))
                began += 1
            for job in list(running):
                if is_late:
                    job.let_be()
                if not job.goes_on():
                    running.remove(job)
                    kills += job.kills
                    if job.end() != expected:
                        raise RuntimeError(f"{job.end()} and not {expected}{job.said()}")
                    shutil.rmtree(job.folder)
            time.sleep(TICK_S)
    finally:
        for job in running:
            job.kill()
    return kills, began


def undisturbed(options: argparse.Namespace, folder: Path, draw: random.Random) -> str:
    job = Job(options, folder / "undisturbed", draw, None)
    try:
        while job.goes_on():
            time.sleep(TICK_S)
        return job.end()
    finally:
        job.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=3, help="so many side by side")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--life", type=float, default=2.5, help="how many seconds a process lives, on the average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="kills-"))  # it stays if something goes wrong
    kills, jobs = disturbed(options, folder, draw, undisturbed(options, folder, draw))
    shutil.rmtree(folder)
    told = " and ".join(f"{kills[kind]} kills of {kind}s" for kind in ("server", "worker"))
    print(f"{told} in {jobs} jobs of {STEPS} steps: the same end, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
