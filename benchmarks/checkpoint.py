"""What it costs to save and to load a job with a large table, beside what the disk gives a plain program.

    python benchmarks/checkpoint.py [--quick] [--rows N] [--rounds N] [--folder DIR] [--json FILE]

One asynchronous job of one worker and one server, each a process with one thread of computing: rows of 16 floats with
Adagrad's state, 10 million unless told otherwise, and three layers. All ways take turns; ratios are medians over
rounds of those within one round.

    save     ``save_persistables`` beside a plain program that writes as many bytes in a row to one file, and fsyncs it;
             how far the server's process grew meanwhile
    load     ``load_persistables`` into the running job, and ``init_server``'s reading into a new table, beside a plain
             program that reads one file, into the same small buffer or into memory that holds all of it; with nothing
             of the files in the system's cache, and with all of it
    delta    ``save_persistables`` with ``mode="delta"`` after 1 % of the rows have been trained
    train    examples a second while ``Checkpoints`` saves behind the training, beside a window before it
    pause    the longest step of a synchronous job while ``Checkpoints`` saves, beside its median step without

Three times the size of the checkpoint is needed on the disk of ``--folder``, and ten times in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import (
    DEADLINE_S,
    JobFailed,
    end_like_an_exit,
    free_endpoints,
    median_ratio,
    print_table,
    progress,
    write_json,
)

import fleet
from fleet.checkpoint.manifest import MANIFEST, Checkpoint
from fleet.plan.plan import make_plan
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.table.shard import Shard
from fleet.role_maker import Role, UserDefinedRoleMaker

DIM, SLOTS, WIDTH, BATCH = 16, 26, 400, 1000
ROWS, QUICK_ROWS = 10_000_000, 200_000
#: So many ids are trained in one step where it is not the training that is measured.
CHUNK = 100_000
CHANGED = 100  # one row in so many is trained before a delta
WARM_STEPS = 20
PAUSE_STEPS = 100  # without a save, for the median
PLAIN_BYTES = 16 << 20
PAGE_BYTES = 4096

Figures = dict[str, float]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, DIM, initializer="uniform(-0.1, 0.1)")
        widths = (SLOTS * DIM, WIDTH, WIDTH, WIDTH)
        layers = [torch.nn.Linear(*pair) for pair in pairwise(widths)]
        self.layers = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.rows(ids).flatten(1)).square().mean()


def numbered(numbers: torch.Tensor) -> torch.Tensor:
    """Distinct ids without an order that an index could profit from."""
    return numbers * 0x1E3779B97F4A7C15 + 12345


def member(role: Role, server: str) -> tuple[Model, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    fleet.init(UserDefinedRoleMaker(0, role, 1, [server]))
    model = Model()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.01)


def serve(server: str, model_dir: Path | None = None) -> None:
    model, optimizer = member(Role.SERVER, server)
    fleet.distributed_optimizer(optimizer, fleet.StrategyFactory.create_async_strategy(), model=model)
    fleet.init_server(model_dir)
    fleet.run_server()


def batches(rows: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return cycle([numbered(torch.randint(rows, (BATCH, SLOTS), generator=draw)) for _ in range(20)])


class Ballast:
    """Memory that nobody uses until somebody is measured. A virtual machine gives what is free for some seconds back to
    its host and gets it again page by page: nobody is to pay for that. Loading takes what the system caches of the
    files, the table, and its index."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._take()

    def _take(self) -> None:
        self._held: Any = np.empty(self._count, np.uint8)
        self._held[::PAGE_BYTES] = 0

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        self._held = None
        try:
            yield
        finally:
            self._take()


class Worker:
    """The job's worker, and what it measures."""

    def __init__(self, server: str, server_pid: int, rows: int, folder: Path) -> None:
        self._model, self._options = member(Role.WORKER, server)
        strategy = fleet.StrategyFactory.create_async_strategy()
        self._optimizer = fleet.distributed_optimizer(self._options, strategy, model=self._model)
        fleet.init_worker()
        self._server, self._rows, self._folder = Path(f"/proc/{server_pid}"), rows, folder
        self._batches = batches(rows)
        self._touch(1)
        for _ in range(WARM_STEPS):
            self._step()

    def _touch(self, every: int) -> None:
        """Train one row in so many."""
        numbers = torch.arange(0, self._rows, every)
        for part in numbers.split(CHUNK):
            self._optimizer.minimize(self._model.rows(numbered(part)).sum())

    def _step(self) -> None:
        self._optimizer.minimize(self._model.loss(next(self._batches)))

    def round(self) -> Figures:
        return {**self._trained(), **self._saved(), **self._loaded()}

    def _trained(self) -> Figures:
        root = self._folder / "series"
        checkpoints = fleet.Checkpoints(root, every_steps=1)

        def rate(going_on: Callable[[], bool]) -> tuple[float, float]:
            began, steps = time.perf_counter(), 0
            while going_on():
                self._step()
                steps += 1
            took = time.perf_counter() - began
            return steps * BATCH / took, took

        self._step()
        checkpoints.after_step()
        during, took = rate(lambda: not any(root.glob(f"*/{MANIFEST}")))
        checkpoints.close()
        shutil.rmtree(root)
        settle()
        end = time.perf_counter() + took
        before, _ = rate(lambda: time.perf_counter() < end)
        return {"rate alone": before, "rate saving": during, "seconds saving": took}

    def _saved(self) -> Figures:
        full, delta, plain = (self._folder / name for name in ("full", "delta", "plain"))
        for old in (full, delta):
            shutil.rmtree(old, ignore_errors=True)
        settle()
        (self._server / "clear_refs").write_text("5")  # its largest size is counted from here
        before = self._resident("VmRSS")
        figures = {"save": seconds(lambda: fleet.save_persistables(full))}
        figures["save, bytes beyond"] = self._resident("VmHWM") - before
        figures["bytes"] = size(full)
        settle()
        figures["plain write"] = seconds(lambda: write_plainly(plain, size(full)))
        self._touch(CHANGED)
        settle()
        figures["delta"] = seconds(lambda: fleet.save_persistables(delta, mode="delta"))
        figures["delta bytes"] = size(delta)
        return figures

    def _resident(self, which: str) -> int:
        (found,) = re.findall(rf"{which}:\s+(\d+) kB", (self._server / "status").read_text())
        return int(found) << 10

    def _loaded(self) -> Figures:
        full, plain = self._folder / "full", self._folder / "plain"
        ways = {
            "plain read": lambda: read_plainly(plain),
            "read and kept": lambda: read_and_keep(plain),
            "load": lambda: fleet.load_persistables(full),
            "start": lambda: restore_from(full).fill(self._shard(full), 0),
        }
        self._shard(full).warm()
        ballast = Ballast(3 * size(full))
        settle()
        figures = {}
        for name, way in ways.items():
            forget([plain, *files(full)])
            with ballast.let_go():
                figures[f"{name}, cold"] = seconds(way)
        for name, way in ways.items():
            for file in (plain, *files(full)):
                read_plainly(file)
            with ballast.let_go():
                figures[f"{name}, warm"] = seconds(way)
        return figures

    def _shard(self, dirname: Path) -> Shard:
        """What a server fills that starts from a checkpoint, once it knows the job."""
        spec = Checkpoint.open(dirname).manifest.spec
        options = [json.dumps(self._options.defaults)] * len(spec.groups)
        return Shard(make_plan(spec), 0, 0, options)


def settle() -> None:
    """Have what was sent arrived, and what was written on the disk, so that what follows does not pay for it."""
    fleet.barrier_worker()
    os.sync()


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in files(folder))


def write_plainly(file: Path, count: int) -> None:
    block = memoryview(os.urandom(min(count, PLAIN_BYTES)))
    with file.open("wb", buffering=0) as out:
        while count:
            count -= out.write(block[:count])
        os.fsync(out.fileno())


def read_plainly(file: Path) -> None:
    block = bytearray(PLAIN_BYTES)
    with file.open("rb", buffering=0) as data:
        while data.readinto(block):
            pass


def read_and_keep(file: Path) -> None:
    """What no program can do without that has in memory afterwards what is in a file."""
    block, at = np.empty(file.stat().st_size, np.uint8).data, 0  # with large pages, as numpy asks for them
    with file.open("rb", buffering=0) as data:
        while got := data.readinto(block[at : at + PLAIN_BYTES]):
            at += got


def forget(cached: list[Path]) -> None:
    """Have the next who reads these files read them from the disk."""
    for file in cached:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(rows: int, rounds: int, folder: Path) -> list[Figures]:
    (server,) = free_endpoints(1)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(server,), daemon=True)
    process.start()
    assert process.pid is not None
    worker = Worker(server, process.pid, rows, folder)
    measured = [worker.round() for _ in progress(range(rounds))]
    fleet.stop_worker()
    process.join(60)
    for job in synchronous(spawn, rows, rounds, folder, pauses := spawn.SimpleQueue()):
        job.join(DEADLINE_S)
        if job.exitcode != 0:
            raise JobFailed(f"a process of the synchronous job ended with {job.exitcode} in {DEADLINE_S:.0f} s")
    return [{**figures, **pause} for figures, pause in zip(measured, pauses.get(), strict=True)]


def synchronous(spawn: Any, rows: int, rounds: int, folder: Path, pauses: Any) -> list[Any]:
    """A synchronous job that goes on from what the first one has saved."""
    (server,) = free_endpoints(1)
    jobs = [
        spawn.Process(target=serve, args=(server, folder / "full"), daemon=True),
        spawn.Process(target=pause, args=(server, rows, rounds, folder / "behind", pauses), daemon=True),
    ]
    for job in jobs:
        job.start()
    return jobs


def pause(server: str, rows: int, rounds: int, root: Path, pauses: Any) -> None:
    model, options = member(Role.WORKER, server)
    optimizer = fleet.distributed_optimizer(options, fleet.StrategyFactory.create_sync_strategy(), model=model)
    fleet.init_worker()
    batch = batches(rows)

    def step() -> float:
        return seconds(lambda: optimizer.minimize(model.loss(next(batch))))

    measured = []
    for _ in range(WARM_STEPS):
        step()
    for _ in range(rounds):
        settle()
        alone = [step() for _ in range(PAUSE_STEPS)]
        checkpoints = fleet.Checkpoints(root, every_steps=1)
        step()
        begun = seconds(checkpoints.after_step)
        during = [begun + step()]
        while not any(root.glob(f"*/{MANIFEST}")):
            during.append(step())
        checkpoints.close()
        shutil.rmtree(root)
        measured.append({"step alone": statistics.median(alone), "longest alone": max(alone), "pause": max(during)})
    fleet.stop_worker()
    pauses.put(measured)


def report(measured: list[Figures], rows: int) -> None:
    def column(name: str) -> list[float]:
        return [figures[name] for figures in measured]

    def median(name: str) -> float:
        return statistics.median(column(name))

    count = median("bytes")

    def compared(name: str, plain: str) -> list[object]:
        return [
            name,
            count / median(name) / 1e6,
            plain.partition(",")[0],
            count / median(plain) / 1e6,
            median_ratio(column(plain), column(name)),
        ]

    ways = [("save", "plain write")]
    ways += [
        (f"{way}, {cache}", f"{plain}, {cache}")
        for cache in ("cold", "warm")
        for way in ("load", "start")
        for plain in ("plain read", "read and kept")
    ]
    print_table(
        f"{rows:,} rows, {count / 1e6:,.0f} MB, medians of {len(measured)} rounds",
        ["way", "MB/s", "beside", "its MB/s", "of that"],
        [compared(*way) for way in ways],
    )
    beyond = max(column("save, bytes beyond")) / (1 << 20)
    print(f"\nSaving, the server grew by {beyond:.1f} MiB at most.")
    print(
        f"A delta of 1 % of the rows: {median('delta'):.2f} s and {median('delta bytes') / 1e6:.1f} MB, "
        f"{median_ratio(column('delta'), column('save')):.3f} and "
        f"{median_ratio(column('delta bytes'), column('bytes')):.3f} of all."
    )
    print(
        f"Training while all is saved, {median('seconds saving'):.1f} s: {median('rate saving'):,.0f} examples "
        f"a second, {median_ratio(column('rate saving'), column('rate alone')):.2f} of what it is otherwise."
    )
    alone, longest, saving = (1e3 * median(name) for name in ("step alone", "longest alone", "pause"))
    print(
        f"Synchronous training: a step takes {alone:.0f} ms, the longest of {PAUSE_STEPS} without a save "
        f"{longest:.0f}, the longest while all is saved {saving:.0f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_ROWS:,} rows")
    parser.add_argument("--rows", type=int, help=f"of the table, {ROWS:,} unless given")
    parser.add_argument("--rounds", type=int, help="how often to measure, 3 times unless given")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's for temporary files")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    rounds = options.rounds or (1 if options.quick else 3)
    end_like_an_exit()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = measure(rows, rounds, Path(folder))
    report(measured, rows)
    write_json(options.json, rows=rows, rounds=measured)


if __name__ == "__main__":
    main()
