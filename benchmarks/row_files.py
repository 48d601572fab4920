"""What rows that do not fit in memory cost in files: engines on the same requests, under the same limit of memory.

    python benchmarks/row_files.py [--quick] [--rows N] [--share 0.2] [--traces zipf uniform] [--engines NAME …]
                                   [--seconds S] [--dir FOLDER] [--json FILE]

A server's table has ``--rows`` rows of 16 weights, 16 numbers of Adagrad's state and a version: 132 bytes, and an id of
8. A request is the distinct ids of a batch of a click model: its rows are read, changed and written back. Ids are
Zipf-distributed (1.05), and those often asked for lie anywhere among the others; or they are uniform, the worst case.

Each engine works in a process of its own. Its memory is limited to ``--share`` of the rows' bytes and 48 MiB. That
counts what the system keeps of its files, but not the interpreter and libraries, which are there before. It takes a
cgroup of version 1 that may be written to; where there is none, figures are without a limit, and the table says so.
Rows are loaded in the order of their ids, without a limit. Then, with cold caches and unmeasured, they are asked for in
the order of how frequent they are, for ``--warm`` seconds or until a hot set is full, and half as long as they will be.

    rows/s       rows read and written back a second
    p50, p99     of a request, both halves, in ms
    cpu          microseconds of processor time a row, of the process and of what the system does for it
    read         bytes that came from the device for each byte asked for
    written      bytes that went to files for each byte changed, when the system has written all it holds
    device       the same as the whole device counted it, others' included
    own, group   memory of the process alone, libraries included, at the end; and of the limited group, with what the
                 system keeps of its files, at the worst moment
    on disk      bytes of the files for each byte of rows
    filled       how much of a hot set was in use before; below 1, too little was written
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measuring import end_like_an_exit, print_table, progress, write_json
from row_engines import ENGINES, ROW, WORDS, Array

GROUPS = Path("/sys/fs/cgroup/memory")
BASE = 48 << 20
EXPONENT = 1.05
#: How many ids are drawn for a request; a Zipf request has about half as many distinct ones.
DRAWN = {"zipf": 13_000, "uniform": 6_000}
LOADED = 50_000
#: These rows' versions are compared at the end.
FOLLOWED = 2_000
GAP = 977


# ---------------------------------------------------------------- requests


class Requests:
    """Draws ids of ``rows``, the same ones for every engine."""

    def __init__(self, trace: str, rows: int) -> None:
        self._trace, self._rows, self._random = trace, rows, np.random.default_rng(7)
        # Steps of about the golden ratio, and no common divisor, lead to every place once and never to a neighbour.
        step = int(rows * 0.6180339887) | 1
        while np.gcd(step, rows) != 1:
            step += 2
        self._step = step

    def next(self) -> Array:
        """Return the distinct ranks of a request; rank 0 is the most frequent."""
        drawn = self._random.random(DRAWN[self._trace])
        if self._trace == "zipf":
            power = 1 - EXPONENT
            ranks = (1 + drawn * ((self._rows + 1.0) ** power - 1)) ** (1 / power) - 1
        else:
            ranks = drawn * self._rows
        return self._random.permutation(np.unique(ranks.astype(np.int64).clip(0, self._rows - 1)))

    def ids(self, ranks: Array) -> Array:
        return ids_at(ranks * self._step % self._rows)


def ids_at(places: Array) -> Array:
    """The ids in their order; they are not dense."""
    return places * GAP + 12_345


# ---------------------------------------------------------------- in the process of an engine


def load(engine: str, folder: Path, rows: int, memory: int) -> dict[str, Any]:
    held = ENGINES[engine][2](folder, rows, memory)
    began = time.perf_counter()
    for start in range(0, rows, LOADED):
        ids = ids_at(np.arange(start, min(rows, start + LOADED)))
        values = np.full((ids.size, WORDS), 1.0, "<f4").view("<u4")
        values[:, 0], values[:, -1] = ids, 0
        held.load(ids, values)
    held.close()
    return {"loaded/s": rows / (time.perf_counter() - began)}


def serve(
    engine: str, folder: Path, rows: int, memory: int, *, trace: str, warm_s: float, seconds: float, group: str | None
) -> dict[str, Any]:
    requests = Requests(trace, rows)
    if group is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    held = ENGINES[engine][2](folder, rows, memory)
    times: list[float] = []
    followed, sizes = np.zeros(FOLLOWED, np.int64), 0

    def step(ranks: Array) -> None:
        nonlocal sizes
        ids = requests.ids(ranks)
        began = time.perf_counter()
        values = held.read(ids)
        middle = time.perf_counter()
        if not np.array_equal(values[:, 0], ids.astype("<u4")):
            raise LookupError("a row came back that was not asked for")
        changed = np.ascontiguousarray(values)
        changed[:, 1:-1].view("<f4")[...] += 0.5
        changed[:, -1] += 1
        again = time.perf_counter()
        held.write(ids, changed)
        times.append(time.perf_counter() - again + middle - began)
        sizes += ids.size
        followed[ranks[ranks < FOLLOWED]] += 1

    started = versions(held, requests, rows)
    ends = time.monotonic() + warm_s
    for start in range(0, rows // 4, 10_000):
        if time.monotonic() > ends and held.filled() == 1.0:
            break
        step(np.arange(start, min(rows, start + 10_000)))
    ends = time.monotonic() + warm_s / 2
    while time.monotonic() < ends:
        step(requests.next())

    filled = held.filled()
    times.clear()
    sizes = 0
    if group is not None:
        Path(group, "memory.max_usage_in_bytes").write_text("0")
    before, began, ends = counted(folder), time.perf_counter(), time.monotonic() + seconds
    while time.monotonic() < ends:
        step(requests.next())
    took = time.perf_counter() - began
    after = counted(folder)
    peak = int(Path(group, "memory.max_usage_in_bytes").read_text()) if group else None
    if not np.array_equal(versions(held, requests, rows) - started, followed[:rows]):
        raise LookupError("a row lost a change")
    held.close()
    bytes_changed = sizes * ROW.itemsize
    spent = {name: after[name] - before[name] for name in before}
    return {
        "ids": sizes / len(times),
        "rows/s": sizes / sum(times),
        "p50": float(np.percentile(times, 50)) * 1e3,
        "p99": float(np.percentile(times, 99)) * 1e3,
        "cpu": spent["cpu_s"] / sizes * 1e6,
        "read": spent["read_bytes"] / bytes_changed,
        "written": spent["write_bytes"] / bytes_changed,
        "device": spent["device"] / bytes_changed,
        "own MiB": after["own"] / 2**20,
        "group MiB": peak and peak / 2**20,
        "on disk": after["files"] / (rows * ROW.itemsize),
        "filled": filled,
        "requests": len(times),
        "busy": sum(times) / took,
    }


def versions(held: Any, requests: Requests, rows: int) -> Array:
    return held.read(requests.ids(np.arange(min(FOLLOWED, rows))))[:, -1].astype(np.int64)


def counted(folder: Path) -> dict[str, float]:
    """What this process and the device of its files have done so far. A page that waits to be written is counted."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    times = os.times()
    return {
        "read_bytes": int(io["read_bytes"]),
        "write_bytes": int(io["write_bytes"]),
        "device": _written_by_device(folder),
        "cpu_s": times.user + times.system,
        "own": int(status["RssAnon"].split()[0]) * 1024,
        "files": sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file()),
    }


def _written_by_device(folder: Path) -> int:
    number = folder.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        major, minor, _, *figures = line.split()
        if (int(major), int(minor)) == (os.major(number), os.minor(number)):
            return int(figures[6]) * 512
    return 0


# ---------------------------------------------------------------- around it


@contextlib.contextmanager
def limited(limit: int) -> Iterator[str | None]:
    """A group of processes that have so much memory together, gone afterwards; None where there can be none."""
    group = GROUPS / f"fleet-row-files-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield str(group)
    finally:
        # Processes of the group have ended, but the system may still be busy with them.
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
        else:
            print(f"{group} could not be removed", file=sys.stderr)


def in_a_process(deadline_s: float, **call: Any) -> dict[str, Any]:
    """What a call of ``load`` or ``serve`` returns, or why there is nothing."""
    command = [sys.executable, __file__, "--call", json.dumps(call)]
    # Memory that threads have freed would otherwise stay with each of them.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {deadline_s:.0f} s"}
    finally:
        process.kill()
        process.wait()
    if process.returncode == 0:
        return dict(json.loads(said.splitlines()[-1]))
    if process.returncode == -signal.SIGKILL:
        return {"failed": "needed more memory than the limit"}
    return {"failed": (errors.strip().splitlines() or ["no reason given"])[-1]}


def forget(folder: Path) -> None:
    """Have the system write what it holds of these files, and drop it."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(options: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    memory = int(options.rows * ROW.itemsize * options.share)
    results: list[dict[str, Any]] = []
    loaded: str | None = None
    turns = sorted(options.engines, key=lambda name: list(ENGINES).index(name))
    for engine in progress(turns):
        needs, files, _ = ENGINES[engine]
        if needs is not None and importlib.util.find_spec(needs) is None:
            results.append({"engine": engine, "trace": "-", "failed": f"left out: {needs} is not installed"})
            continue
        folder = place / files
        common: dict[str, Any] = {"engine": engine, "folder": str(folder), "rows": options.rows, "memory": memory}
        if files != loaded:
            shutil.rmtree(place / str(loaded), ignore_errors=True)
            folder.mkdir()
            loading = in_a_process(options.deadline_s, what="load", **common)
            loaded = files
        for trace in options.traces:
            outcome = dict(loading)
            if "failed" not in outcome:
                forget(folder)
                with limited(memory + BASE) as group:
                    outcome |= in_a_process(
                        options.deadline_s,
                        what="serve",
                        trace=trace,
                        warm_s=options.warm_s,
                        seconds=options.seconds,
                        group=group,
                        **common,
                    )
                outcome["limit MiB"] = (memory + BASE) / 2**20 if group else None
            results.append({"engine": engine, "trace": trace, **outcome})
            print(f"{engine}, {trace}: {_short(outcome)}", file=sys.stderr, flush=True)
    return results


def _short(outcome: dict[str, Any]) -> str:
    return outcome.get("failed") or f"{outcome['rows/s']:,.0f} rows a second"


COLUMNS = ("rows/s", "p50", "p99", "cpu", "read", "written", "device", "own MiB", "group MiB", "on disk", "filled")


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200,000 rows and a second each")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--share", type=float, default=0.2, help="how much of the rows' bytes may be in memory")
    parser.add_argument("--traces", nargs="+", default=["zipf"], choices=list(DRAWN))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each is measured")
    parser.add_argument("--warm", type=float, default=30.0, dest="warm_s", help="so long, or until a hot set is full")
    parser.add_argument("--deadline", type=float, default=900.0, dest="deadline_s")
    parser.add_argument("--dir", type=Path, help="where the files are made; not in a file system in memory")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--call", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call is not None:
        what, folder = options.call.pop("what"), Path(options.call.pop("folder"))
        print(json.dumps({"load": load, "serve": serve}[what](folder=folder, **options.call)))
        return
    if options.quick:
        options.rows, options.seconds, options.warm_s = 200_000, 1.0, 1.0
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="row-files-") as place:
        results = measure(options, Path(place))
    free = [each for each in results if "failed" not in each and each["limit MiB"] is None]
    for trace in options.traces:
        done = [each for each in results if each["trace"] == trace and "failed" not in each]
        title = f"{options.rows:,} rows, {trace}, {options.share:.0%} in memory" + ", WITHOUT A LIMIT" * bool(free)
        rows = [[each["engine"], *(each[name] for name in COLUMNS)] for each in done]
        print_table(title, ["engine", *COLUMNS], rows)
    for each in results:
        if "failed" in each:
            print(f"{each['engine']}, {each['trace']}: {each['failed']}")
    if free:
        print(f"No limit: {GROUPS} is not there or not writable, so memory and caches were as large as they liked.")
    write_json(options.json, rows=options.rows, share=options.share, results=results)


if __name__ == "__main__":
    main()
