"""What benchmarks share: whole jobs of real processes with one thread of computing each, their cost, and tables."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = Path(__file__).parent / "peers"
REPORT = "REPORT "  # as peers/work.py has it
#: A job that takes longer, if its benchmark allows no more, is ended and counts as failed. The second is for servers to
#: end after their workers.
DEADLINE_S, GRACE_S = 240.0, 10.0
#: A loss has fallen when it is below this part of what it was.
LEARNED = 0.97


class JobFailed(Exception):
    """A job that came to no result; what it said last is in the message."""


@dataclass(frozen=True)
class Cost:
    """What one job took, warm-up and start excluded. CPU seconds, and bytes of memory at the end, are those of all
    workers, and of all servers, together; ``busiest`` is those of the busiest server, of the mean, and ``waiting_s``
    how long the workers' main threads did not compute. ``foreign`` is how many cores others used meanwhile: figures
    from a busy machine are worth little."""

    examples: int
    seconds: float
    worker_cpu_s: float
    server_cpu_s: float
    worker_bytes: int
    server_bytes: int
    first_loss: float
    last_loss: float
    foreign: float
    busiest: float = 1.0
    waiting_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.examples / self.seconds

    @property
    def learned(self) -> bool:
        return self.last_loss < LEARNED * self.first_loss


@dataclass(frozen=True)
class Place:
    """A machine's address, and the command that starts a process there."""

    host: str
    command: Sequence[str]


def run_job(
    program: str,
    work: Mapping[str, Any],
    *,
    servers: int,
    workers: int,
    python: str = sys.executable,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
    places: Mapping[str, Place] | None = None,
) -> Cost:
    """One job of ``peers/{program}.py``, to its end, its processes with more variables if there are some, and those of
    a role ("server" or "worker") in their place. All workers start their measured steps together."""
    places = places or {}
    endpoints = free_endpoints(servers + workers + 1)
    if "server" in places:
        endpoints = [f"{places['server'].host}:{endpoint.rpartition(':')[2]}" for endpoint in endpoints]
    common = {**work, "servers": endpoints[:servers], "meeting": endpoints[servers:], "workers": workers}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:

        def start(role: str, index: int) -> Process:
            argument = json.dumps({**common, "role": role, "index": index})
            inside = places[role].command if role in places else ()
            command = [*inside, python, str(PROGRAMS / f"{program}.py"), argument]
            return running.enter_context(Process(f"{role}{index}", command, Path(folder), environment or {}))

        serving = [start("server", index) for index in range(servers)]
        working = [start("worker", index) for index in range(workers)]
        deadline = time.monotonic() + deadline_s
        for worker in working:
            worker.report("warm", deadline)
        before, busy_before, began = [each.cpu_s() for each in serving], busy_s(), time.monotonic()
        computed_before = sum(each.main_thread_cpu_s() for each in working)
        for worker in working:
            worker.go()
        reports = [worker.report("done", deadline) for worker in working]
        took = time.monotonic() - began
        by_server = [each.cpu_s() - began_with for each, began_with in zip(serving, before, strict=True)]
        server_cpu_s = sum(by_server)
        worker_cpu_s = sum(report["cpu_s"] for report in reports)
        computed = sum(each.main_thread_cpu_s() for each in working) - computed_before
        busy = busy_s() - busy_before
        worker_bytes = sum(each.own_bytes() for each in working)
        server_bytes = sum(each.own_bytes() for each in serving)
        for worker in working:
            worker.go()
        for worker in working:
            worker.wait(deadline)
        for server in serving:
            server.wait(time.monotonic() + GRACE_S)
    return Cost(
        examples=sum(report["examples"] for report in reports),
        seconds=max(report["seconds"] for report in reports),
        worker_cpu_s=worker_cpu_s,
        server_cpu_s=server_cpu_s,
        worker_bytes=worker_bytes,
        server_bytes=server_bytes,
        first_loss=statistics.mean(report["first_loss"] for report in reports),
        last_loss=statistics.mean(report["last_loss"] for report in reports),
        foreign=max(0.0, busy - server_cpu_s - worker_cpu_s) / took,
        busiest=max(by_server, default=0.0) * servers / server_cpu_s if server_cpu_s else 1.0,
        waiting_s=sum(report["seconds"] for report in reports) - computed,
    )


class Process:
    """One process of a job and what it reports. It is dead when the context ends, whatever happened."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as errors:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**_environment(), **environment},
                cwd=folder,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._psutil = psutil.Process(self._popen.pid)
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._reader.join()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def report(self, event: str, deadline: float) -> dict[str, Any]:
        try:
            report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise JobFailed(f"{self._name} was not {event} when time was up{self._last_words()}") from None
        if report is None:
            raise JobFailed(f"{self._name} ended before it was {event}{self._last_words()}")
        assert report["event"] == event
        return report

    def go(self, line: str = "") -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # one that has ended says so when it is asked for its report
            self._popen.stdin.write(f"{line}\n")
            self._popen.stdin.flush()

    def send(self, what: signal.Signals) -> None:
        os.killpg(self._popen.pid, what)

    def schedule(self, policy: int) -> None:
        """Have the system give processors to all its threads by this policy (``os.SCHED_IDLE``) from now on."""
        for thread in self._psutil.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread.id, policy, os.sched_param(0))

    def wait(self, deadline: float) -> None:
        """For an end by itself; what has done its work and does not end is ended with the context."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))

    def cpu_s(self) -> float:
        with self._there():
            times = self._psutil.cpu_times()
        return times.user + times.system

    def main_thread_cpu_s(self) -> float:
        with self._there():
            (main,) = [each for each in self._psutil.threads() if each.id == self._popen.pid]
        return main.user_time + main.system_time

    def io_bytes(self) -> tuple[int, int]:
        """What it has read from files, and what it has written to them."""
        with self._there():
            counted = self._psutil.io_counters()
        return counted.read_chars, counted.write_chars

    def own_bytes(self) -> int:
        """Memory that is this process's alone: without libraries, which all share."""
        with self._there():
            return self._psutil.memory_full_info().uss

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except psutil.Error:
            raise JobFailed(f"{self._name} ended too early{self._last_words()}") from None

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith(REPORT):
                self._reports.put(json.loads(line[len(REPORT) :]))
            else:
                self._said.append(line)
        self._reports.put(None)

    def _last_words(self) -> str:
        lines = [*self._said, *self._log.read_text(errors="replace").splitlines()]
        return "".join(f"\n    {line.strip()}" for line in lines[-12:] if line.strip())


def _environment() -> dict[str, str]:
    """This process's, with one thread for computing and nothing that sends loopback through a proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CPU_NUM"), "1")
    quiet = {"PYTHONWARNINGS": "ignore", "GLOG_minloglevel": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {
        **kept,
        **threads,
        **quiet,
        "FLEET_STARTUP_DEADLINE_S": "900",
    }  # many processes on few cores take long to start


def busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def free_endpoints(count: int) -> list[str]:
    """Loopback addresses nobody listens at, all held until all are chosen."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


# ---------------------------------------------------------------- what comes of it


def median_ratio(figures: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """The median of the ratios of figures that were taken in the same round; None where there is no such pair."""
    pairs = zip(figures, others, strict=True)
    ratios = [figure / other for figure, other in pairs if figure is not None and other is not None]
    return statistics.median(ratios) if ratios else None


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Markdown, aligned."""
    cells = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n**{title}**\n")
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return str(cell)


def write_json(path: Path | None, **what: Any) -> None:
    """The figures with the machine and the versions they were taken on."""
    if path is None:
        return
    import grpc
    import torch

    machine = {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
    }
    path.write_text(json.dumps({"machine": machine, **what}, indent=1, default=asdict) + "\n")


def progress(things: Sequence[Any], name: Any = str) -> Iterator[Any]:
    """The things in turn; a line on standard error, if that is a terminal, tells how far it is and what is left."""
    began = time.monotonic()
    shown = sys.stderr.isatty()
    for done, thing in enumerate(things):
        if shown:
            left = f", {(time.monotonic() - began) / done * (len(things) - done):.0f} s left" if done else ""
            bar = ("#" * (30 * done // len(things))).ljust(30)
            sys.stderr.write(f"\r\033[K[{bar}] {done}/{len(things)}{left}: {name(thing)}")
            sys.stderr.flush()
        yield thing
    if shown:
        sys.stderr.write("\r\033[K")


def end_like_an_exit() -> None:
    """So that processes are ended and folders removed when this one is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
