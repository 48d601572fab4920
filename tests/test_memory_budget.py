"""Jobs whose servers have little memory for rows end to the bit where others end."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_processes
import torch
from dying import ENVIRON, DyingJob, every
from harness import PATIENT, SOON, Job, assert_same, run_job
from inside import flush, take_fresh, tiny_tiers
from test_processes import Processes, Started, ended

import fleet.nn
from fleet import Fleet
from fleet.base.settings import ProcessSettings
from fleet.base.unknown_variables import remarks
from fleet.errors import ConfigurationError, DeadlineError, TableFileError
from fleet.ps.server.deferring_lock import DeferringLock
from fleet.ps.table import row_file
from fleet.ps.table.row_file import Reading
from fleet.ps.wire.real_network import real_network
from fleet.strategy.parameter_server import StrategyFactory

processes = test_processes.processes  # the fixture

ROWS, DIM = 120, 4

Make = Callable[[Any], torch.optim.Optimizer]

#: Every optimizer of rows, with as much state as it can have.
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ftrl": lambda p: fleet.optim.Ftrl(p, lr=0.1),
    "decayed adagrad": lambda p: fleet.optim.DecayedAdagrad(p, lr=0.1),
    "row-wise adagrad": lambda p: fleet.optim.RowWiseAdagrad(p, lr=0.1),
}

#: With one worker all of these are reproducible.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
    "ssp": StrategyFactory.create_ssp_strategy,
    "dc-asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.5),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tiers(monkeypatch)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.open = fleet.nn.Embedding(None, DIM)
        self.known = fleet.nn.Embedding(ROWS, DIM)
        self.head = torch.nn.Linear(DIM, 2)
        with torch.no_grad():
            for number, parameter in enumerate(self.head.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + number)

    def loss(self, step: int, worker: int) -> torch.Tensor:
        ids = torch.randint(0, ROWS, (16, 2), generator=torch.Generator().manual_seed(97 * step + worker))
        rows = torch.tanh(self.open(ids * 7 - 30).mean(1) + self.known(ids).mean(1))
        return (self.head(rows) - 1).square().mean()


def trains(
    optimizer: str, strategy: str = "sync", steps: int = 5, at: Callable[[Fleet, int, int], None] | None = None
) -> Callable[[Fleet, int], Any]:
    def body(made: Fleet, index: int) -> dict[str, torch.Tensor]:
        model = Model()
        wrapped = made.distributed_optimizer(
            OPTIMIZERS[optimizer](model.parameters()), STRATEGIES[strategy](), model=model
        )
        made.init_worker()
        for step in range(steps):
            wrapped.minimize(model.loss(step, index))
            if strategy in ("async", "dc-asgd"):  # else what has arrived by now depends on the machine
                flush(made)
                take_fresh(wrapped)
            if at is not None:
                at(made, index, step)
        made.barrier_worker()
        return {name: value.clone() for name, value in made.state_dict(model).items()}

    return body


def budget(directory: Path, environ: dict[str, str] = PATIENT) -> dict[str, str]:
    return {**environ, "FLEET_TABLE_MEMORY_MB": "1", "FLEET_TABLE_DIR": str(directory)}


@cache
def unbounded(optimizer: str, strategy: str, workers: int, servers: int) -> Any:
    return run_job(trains(optimizer, strategy), workers, servers)[0]


# ---------------------------------------------------------------- to the bit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.pairs(2)
def test_every_optimizer_ends_where_it_does_without_a_bound(tmp_path: Path, optimizer: str) -> None:
    got = run_job(trains(optimizer), 1, 1, environ=budget(tmp_path))[0]
    assert_same(got, unbounded(optimizer, "sync", 1, 1))
    assert not list(tmp_path.iterdir())


@pytest.mark.pairs(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_mode_ends_where_it_does_without_a_bound(tmp_path: Path, strategy: str) -> None:
    got = run_job(trains("adagrad", strategy), 1, 2, environ=budget(tmp_path))[0]
    assert_same(got, unbounded("adagrad", strategy, 1, 2))


def test_two_workers_and_two_servers(tmp_path: Path) -> None:
    for result in run_job(trains("adam"), 2, 2, environ=budget(tmp_path)):
        assert_same(result, unbounded("adam", "sync", 2, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(2)
def test_servers_that_are_killed(tmp_path: Path, strategy: str, optimizer: str) -> None:
    workers = 2 if strategy == "sync" else 1
    job = DyingJob(
        trains(optimizer, strategy),
        tmp_path / "durable",
        plan=every(5, 2),
        workers=workers,
        environ=budget(tmp_path / "rows", ENVIRON),
    )
    got = job.run()[0]
    assert job.kills
    assert_same(got, unbounded(optimizer, strategy, workers, 2))
    assert not list((tmp_path / "rows").iterdir())


def test_checkpoints_come_from_and_go_to_jobs_with_other_bounds(tmp_path: Path) -> None:
    def saving(made: Fleet, _: int, step: int) -> None:
        if step == 2:
            made.save_persistables(tmp_path / "saved")

    run_job(trains("adam", steps=3, at=saving), 1, 2, environ=budget(tmp_path / "rows"))
    ends = [
        run_job(trains("adam"), 1, 1, environ=environ, model_dir=str(tmp_path / "saved"))[0]
        for environ in (PATIENT, budget(tmp_path / "rows"))
    ]
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(1)
def test_deltas_go_to_another_number_of_servers_in_every_mode(tmp_path: Path, strategy: str) -> None:
    def saving(made: Fleet, _: int, step: int) -> None:
        if step in (1, 3):
            made.save_persistables(folder / str(step), mode="full" if step == 1 else "delta")

    ends = []
    for number, environ in enumerate((PATIENT, budget(tmp_path / "rows"))):
        folder = tmp_path / str(number)
        run_job(trains("adam", strategy, steps=4, at=saving), 1, 2, environ=environ)
        ends += run_job(trains("adam", strategy, steps=3), 1, 3, environ=environ, model_dir=str(folder / "3"))
    assert_same(ends[1], ends[0])


def test_values_that_are_read_beside_the_training(tmp_path: Path) -> None:
    def back(made: Fleet, _: int, step: int) -> None:
        if step == 1:
            made.save_persistables(saved)
        if step == 3:
            made.load_persistables(saved)

    saved = tmp_path / "one"
    expected = run_job(trains("adam", at=back), 1, 1)[0]
    saved = tmp_path / "other"
    assert_same(run_job(trains("adam", at=back), 1, 1, environ=budget(tmp_path / "rows"))[0], expected)


def test_rows_do_lie_in_files(tmp_path: Path) -> None:
    found: list[Path] = []
    run_job(trains("adam", at=lambda *_: found.extend(tmp_path.rglob("*.rows"))), 1, 1, environ=budget(tmp_path))
    assert found


# ---------------------------------------------------------------- who waits for the disk


class Held(threading.local):
    """Whether this thread holds a server's lock."""

    lock = False


@pytest.mark.pairs(1)
@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_no_request_waits_for_the_disk_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    tiny_tiers(monkeypatch, rows=160)  # room for what one step needs
    held, waits = Held(), list[bool]()
    enter, leave, run = DeferringLock.__enter__, DeferringLock.__exit__, Reading.run

    def entered(lock: DeferringLock) -> None:
        held.lock = True  # also by what was put off
        enter(lock)

    def left(lock: DeferringLock, *error: object) -> None:
        leave(lock, *error)
        held.lock = False

    def ran(reading: Reading) -> None:
        waits.append(held.lock)
        run(reading)

    monkeypatch.setattr(DeferringLock, "__enter__", entered)
    monkeypatch.setattr(DeferringLock, "__exit__", left)
    monkeypatch.setattr(Reading, "run", ran)

    def body(made: Fleet, index: int) -> None:
        table = fleet.nn.Embedding(None, DIM)
        optimizer = made.distributed_optimizer(
            torch.optim.Adagrad(table.parameters(), lr=0.1), STRATEGIES[strategy](), model=table
        )
        made.init_worker()
        batches = [torch.arange(32) + start for start in range(0, 320, 32)]
        for ids in batches * 2:
            loss = table(ids).square().sum()
            with torch.no_grad():  # rows leave memory between their look-up and their gradient
                for other in batches:
                    table(other)
            optimizer.minimize(loss)
            flush(made)

    run_job(body, 1, 1, environ=budget(tmp_path))
    assert waits
    assert not any(waits)


# ---------------------------------------------------------------- a disk that fails


def failing(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1 << 30) -> None:
    left, write = [times], os.pwrite

    def fails(file: int, data: memoryview, start: int) -> int:
        if not left[0]:
            return write(file, data, start)
        left[0] -= 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(row_file.os, "pwrite", fails)


def test_a_full_disk_ends_the_job_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.ENOSPC)
    job = Job(trains("adam", steps=60), 2, 1, environ=budget(tmp_path, SOON))
    job.join(job.start())
    assert job.errors.keys() == {"server 0", "worker 0", "worker 1"}
    for error in job.errors.values():
        assert isinstance(error, TableFileError), error
        assert str(tmp_path) in str(error)
        assert "more bytes" in str(error)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("harm", ["full", "damaged"])
def test_a_durable_server_goes_on_with_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    times, write = iter(range(3)), os.pwrite

    def harmed(file: int, data: memoryview, start: int) -> int:
        if next(times, None) is None:
            return write(file, data, start)
        if harm == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, bytes(len(data)), start)

    monkeypatch.setattr(row_file.os, "pwrite", harmed)
    job = DyingJob(
        trains("adam"), tmp_path / "durable", workers=2, servers=1, environ=budget(tmp_path / "rows", ENVIRON)
    )
    for result in job.run():
        assert_same(result, run_job(trains("adam"), 2, 1)[0])
    assert job.hosts[0].losses
    assert all(isinstance(each, TableFileError) for each in job.hosts[0].losses)


@pytest.mark.parametrize("harm", ["full", "damaged"])
def test_run_server_of_a_durable_server_raises_what_became_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    write = os.pwrite

    def damaging(file: int, data: memoryview, start: int) -> int:
        return write(file, bytes(len(data)), start)

    def harming(_made: Fleet, _index: int, step: int) -> None:
        if step == 1 and harm == "full":
            failing(monkeypatch, errno.ENOSPC)
        elif step == 1:
            monkeypatch.setattr(row_file.os, "pwrite", damaging)

    environ = {**budget(tmp_path / "rows", SOON), "FLEET_DURABLE_DIR": str(tmp_path / "durable")}
    job = Job(trains("adam", steps=60, at=harming), 1, 1, environ=environ)
    job.join(job.start())
    error = job.errors["server 0"]
    assert isinstance(error, TableFileError)
    assert str(tmp_path / "rows") in str(error)
    assert ("Make room" in str(error)) == (harm == "full")
    assert isinstance(job.errors["worker 0"], DeadlineError), "it waits for the server to be started again"
    assert [*(tmp_path / "durable").iterdir()], "what it goes on from then"


@pytest.mark.parametrize("what", ["save", "load"])
def test_who_saves_or_loads_does_not_notice_that_a_durable_server_has_lost_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    harmed: list[int] = []
    write = os.pwrite

    def harming(file: int, data: memoryview, start: int) -> int:
        if what == "load" and harms[0] and not harmed:
            harmed.append(start)
            return write(file, bytes(len(data)), start)
        return write(file, data, start)

    def body(made: Fleet, index: int) -> torch.Tensor:
        table = fleet.nn.Embedding(200, DIM)
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
        wrapped = made.distributed_optimizer(optimizer, model=table)
        made.init_worker()
        for start in range(0, 200, 20):
            wrapped.minimize((table(torch.arange(start, start + 20)) - 1).square().sum())
        if what == "load":
            made.save_persistables(tmp_path / "saved")
            harms[0] = True
            made.load_persistables(tmp_path / "saved")
        else:
            for file in (tmp_path / "rows").rglob("*.rows"):
                file.write_bytes(bytes(file.stat().st_size))
                harmed.append(0)
            made.save_persistables(tmp_path / "saved")
        return table.weight.clone()

    harms = [False]
    monkeypatch.setattr(row_file.os, "pwrite", harming)
    environ = budget(tmp_path / "rows", ENVIRON)
    job = DyingJob(body, tmp_path / "durable", workers=1, servers=1, environ=environ)
    (got,) = job.run()
    assert harmed
    assert len(job.hosts[0].losses) == 1

    def loaded(made: Fleet, index: int) -> torch.Tensor:
        table = fleet.nn.Embedding(200, DIM)
        made.distributed_optimizer(torch.optim.Adagrad(table.parameters(), lr=0.1), model=table)
        made.init_worker()
        return table.weight.clone()

    assert torch.equal(got, run_job(loaded, model_dir=str(tmp_path / "saved"))[0])


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "much", "nan"])
def test_a_bound_that_is_none(value: str) -> None:
    with pytest.raises(ConfigurationError, match="FLEET_TABLE_MEMORY_MB"):
        Fleet(environ={"FLEET_TABLE_MEMORY_MB": value}).init()


def test_a_bound_that_is_too_small_for_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tiers(monkeypatch, segment_bytes=256 << 10)
    job = Job(trains("adam"), 1, 1, environ=budget(tmp_path, SOON))
    job.join(job.start())
    assert job.errors.keys() == {"server 0", "worker 0"}
    for error in job.errors.values():
        assert "the tables of a server do not fit" in str(error)
        assert "FLEET_TABLE_MEMORY_MB=1" in str(error)


def test_a_directory_without_a_bound_is_told() -> None:
    (said,) = remarks({"FLEET_TABLE_DIR": "/somewhere"})
    assert said == "the environment variable FLEET_TABLE_DIR has no effect without FLEET_TABLE_MEMORY_MB"
    assert not remarks({"FLEET_TABLE_DIR": "/somewhere", "FLEET_TABLE_MEMORY_MB": "64"})


@pytest.mark.slow
def test_a_server_takes_no_more_than_it_may(tmp_path: Path) -> None:
    taken = {}
    for rows in (0, 2_000_000):
        environ = {**os.environ, "FLEET_TABLE_DIR": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", FILLS, str(rows)], env=environ, capture_output=True, text=True, timeout=300
        )
        assert not ran.returncode, ran.stderr
        taken[rows] = int(ran.stdout)
    assert taken[2_000_000] - taken[0] < 1.15 * (64 << 20)


#: Fills a table and looks rows up, and prints the most memory that took.
FILLS = """
import resource, sys
from pathlib import Path
import numpy as np
from fleet.ps.table.stores import TieredStores
from fleet.base.settings import PROCESS_ENVIRONMENT

stores = TieredStores(Path(PROCESS_ENVIRONMENT["FLEET_TABLE_DIR"]), "fills", 64 << 20, 60.0)
store = stores.share()("rows", 1, 68)
store.ensure_column("weight", 16, 0.0, np.float32)
def fill(rows):
    for start in range(0, rows, 4096):
        for part in range(start, start + 4096, max(1, store.most)):
            ids = np.arange(part, min(part + store.most, start + 4096))
            store.write(store.insert(ids))
    draw = np.random.default_rng(1)
    for _ in range(50):
        store.find(draw.integers(0, rows, 1024))
    place = 0
    while place is not None:
        _, place = store.scan(place, 4096, ["weight"])
fill(20480)  # compiles
fill(int(sys.argv[1])) if int(sys.argv[1]) else None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
stores.close()
"""


BUDGET_MIB = 64
#: What rows may take of a server beyond what it takes without any, in bytes; and pieces on their way to a checkpoint.
ALLOWED, SAVING = BUDGET_MIB * 1178 << 10, 64 << 20


def taken(server: Started, what: str) -> int:
    (kib,) = re.findall(rf"{what}:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    return int(kib) << 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="says what memory a process takes, and is limited in it, elsewhere")
def test_a_server_with_little_memory_serves_a_table_that_is_larger(
    processes: Processes, free_endpoints: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """A process of its own, which the system gives no more than its bound, trains, looks up and saves more rows than
    that has room for."""
    (endpoint,) = free_endpoints(1)
    bound = {"FLEET_TABLE_MEMORY_MB": str(BUDGET_MIB), "FLEET_TABLE_DIR": str(tmp_path / "rows")}
    server = processes.python("-m", "fleet", "server", "--endpoint", endpoint, cwd=tmp_path, **bound)
    most = list[int]()

    def body(made: Fleet, _: int) -> None:
        table = fleet.nn.Embedding(None, 16, initializer="zeros")
        optimizer = made.distributed_optimizer(torch.optim.Adagrad(table.parameters(), lr=1.0), model=table)
        made.init_worker()

        def train(rows: range) -> None:
            for start in rows:
                ids = torch.arange(start, min(start + rows.step, rows.stop))
                optimizer.minimize((table(ids) * -ids[:, None].sign()).sum())

        train(range(1, 40_000, 4096))  # what is compiled and begun with the first rows is there without many as well
        made.save_persistables(tmp_path / "few")
        most.append(taken(server, "VmHWM"))
        allowed = taken(server, "VmData") + ALLOWED
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (allowed, allowed + SAVING))
        train(range(40_000, 1_500_000, 16_384))
        most.append(taken(server, "VmHWM"))
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (allowed + SAVING, allowed + SAVING))
        made.save_persistables(tmp_path / "many")
        with torch.no_grad():
            found = table(torch.randint(1, 1_500_000, (20_000,), generator=torch.Generator().manual_seed(1)))
        assert bool((found == 1).all())
        (told,) = made.summary()["tables"].values()
        assert told["rows"] == 1_499_999
        assert told["on_disk"] > told["rows"] / 2
        most.append(taken(server, "VmHWM"))

    job = Job(body, network=real_network(ProcessSettings.read({})), endpoints=[endpoint])
    job.work(0)
    assert not job.errors, job.errors
    assert most[1] - most[0] < ALLOWED
    assert most[2] - most[0] < ALLOWED + SAVING
    status, _, err = ended(server)
    assert status == 0, err


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = Job(trains("adam"), 1, 1, environ=budget(tmp_path / "file", {**SOON, "FLEET_STARTUP_DEADLINE_S": "1"}))
    job.join(job.start())
    assert "FLEET_TABLE_DIR cannot be used" in str(job.errors["server 0"])
