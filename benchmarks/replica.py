"""How many look-ups a replica answers on one core, and how long the slowest take at half of that.

    python benchmarks/replica.py [--quick] [--json FILE]

The replica is a process with one core, whose rows come from nowhere else; those who ask are another with the other
cores. A request is for 26 rows of 16 numbers, of 26 tables. Askers cost as much as the replica does: beside requests a
second stands what a request takes of the replica's processor, which bounds them.

    handler     the replica's part alone, in one process, of one request after the other
    N behind    the same for an edition that N others have followed, each with 10,000 changed rows: a model asks for
                the edition of its dense parameters
    put         to put such an edition in place
    N beside    as many connections beside gRPC, each with one request under way, as predictors have them
    N threads   as many of one asker through gRPC, each with one request under way
    M together  requests for the rows of M predictions, as a forward with a batch of M makes them
    half        at half the rate of the best of these with one prediction a request, or of what is wanted, sent at
                even times
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import end_like_an_exit, free_endpoints, print_table, write_json

from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.ps.wire.plain_service import PlainChannel
from fleet.ps.wire.security import Security
from fleet.ps.wire.small_calls import Door, SmallCallChannel
from fleet.serving import lookup_pb2 as pb
from fleet.serving.editions import Editions
from fleet.serving.look_ups import LookUps
from fleet.serving.replica import MOST_BYTES, SERVICE, Replica
from fleet.serving.source import Piece, RowChanges, SourceDescription, TableDescription, Update

TABLES, DIM, ROWS = 26, 16, 40_000
CHANGED = 10_000 // TABLES
THREADS, TOGETHER = (1, 4, 16), (1, 16, 128)
CONNECTIONS = (1, 8, 64)
BEHIND = (0, 1, 5)
#: Requests a second of one core; p99 is to be 5 ms at half of that.
WANTED = 20_000


class Made:
    """A source of rows that are made here; with ``period_s`` 10,000 of them change so often."""

    ended = False

    def __init__(self, period_s: float | None) -> None:
        self._period_s = period_s
        self._version = 0
        self._closed = threading.Event()

    @property
    def heard_at(self) -> float:
        return SystemClock().now()

    def describe(self) -> SourceDescription:
        return SourceDescription(
            {"bias": ((16,), torch.float32)}, {f"t{k}": TableDescription(DIM, None, 0.0) for k in range(TABLES)}
        )

    def next(self, timeout_s: float) -> Update | None:
        if self._version and self._closed.wait(self._period_s or timeout_s):
            return None
        if self._version and self._period_s is None:
            return None
        self._version += 1
        return Update(self._version, self._version == 1, self._pieces(ROWS if self._version == 1 else CHANGED))

    def _pieces(self, count: int) -> Iterator[Piece]:
        yield Piece({"bias": torch.zeros(16)})
        generator = np.random.default_rng(self._version)
        for k in range(TABLES):
            ids = generator.choice(ROWS, count, replace=False).astype(np.int64)
            yield Piece(rows={f"t{k}": RowChanges(ids, torch.rand(count, DIM))})

    def close(self) -> None:
        self._closed.set()


def requests(together: int, many: int = 512) -> list[bytes]:
    generator = np.random.default_rng(0)
    return [
        pb.LookUpRequest(
            tables=range(TABLES),
            counts=[together] * TABLES,
            ids=generator.integers(0, ROWS, TABLES * together).astype("<i8").tobytes(),
        ).SerializeToString()
        for _ in range(many)
    ]


def serve(endpoint: str, period_s: float | None) -> None:
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    settings = ProcessSettings.read(dict(os.environ))
    with Replica(Made(period_s), "rows made here", Endpoint.parse(endpoint), settings) as replica:
        replica.begin()
        print("ready", flush=True)
        sys.stdin.read()


class Asked:
    """What came of some seconds of asking."""

    def __init__(self, latencies: list[float], seconds: float, cpu_s: float) -> None:
        self.rate = len(latencies) / seconds
        self.p50_ms, self.p99_ms = (1e3 * float(np.percentile(latencies, p)) for p in (50, 99))
        self.cpu_us = 1e6 * cpu_s / len(latencies)


def ask(endpoint: str, pid: int, threads: int, together: int, seconds: float, rate: float | None = None) -> Asked:
    """Ask from threads, each as fast as it can, or all together at an even rate."""
    channel = PlainChannel(SERVICE, Endpoint.parse(endpoint), Security(), MOST_BYTES)
    bodies = requests(together)
    latencies: list[list[float]] = [[] for _ in range(threads)]
    begins = time.perf_counter() + 0.3

    def work(index: int) -> None:
        for body in bodies[:20]:
            channel.ask("LookUp", body, 10.0)
        at, number = begins + (index / rate if rate else 0.0), 0
        time.sleep(max(0.0, begins - time.perf_counter()))
        while (now := time.perf_counter()) < begins + seconds:
            if rate:
                if now < at:
                    time.sleep(at - now)
                sent, at = at, at + threads / rate  # a late one has waited
            else:
                sent = now
            channel.ask("LookUp", bodies[(index + number) % len(bodies)], 10.0)
            latencies[index].append(time.perf_counter() - sent)
            number += 1

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    time.sleep(max(0.0, begins - time.perf_counter()))
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    for worker in workers:
        worker.join()
    spent, took = sum(process.cpu_times()[:2]) - before, time.perf_counter() - began
    channel.close()
    return Asked([each for part in latencies for each in part], took, spent)


def ask_beside(endpoint: str, pid: int, connections: int, seconds: float, rate: float | None = None) -> Asked:
    """Ask over connections beside gRPC, each as fast as it can, or all together at an even rate."""
    where, channel = Endpoint.parse(endpoint), PlainChannel(SERVICE, Endpoint.parse(endpoint), Security(), MOST_BYTES)
    told = pb.Description.FromString(channel.ask("Describe", b"", 10.0)).door
    channel.close()
    door = Door(told.key, told.local, told.port)
    # What a channel sends, without a thread for each: this one asks for all of them.
    socks = [SmallCallChannel(where, door)._connect(10.0) for _ in range(connections)]
    framed = [len(body).to_bytes(4, "little") + body for body in requests(1)]
    latencies: list[float] = []
    process = psutil.Process(pid)
    with selectors.DefaultSelector() as selector:
        sent_at = dict.fromkeys(socks, 0.0)
        for sock in socks:
            sock.settimeout(10.0)
            selector.register(sock, selectors.EVENT_READ)
        idle, number, due = list(socks), 0, time.perf_counter() + 0.2
        began, until = due, due + seconds
        before = sum(process.cpu_times()[:2])
        while (now := time.perf_counter()) < until or len(idle) < connections:
            while idle and now < until and (rate is None or now >= due):
                sock = idle.pop()
                sent_at[sock] = now if rate is None else due  # a late one has waited
                sock.sendall(framed[number % len(framed)])
                number += 1
                due += 1 / rate if rate else 0.0
            for key, _ in selector.select(0 if idle else 1.0):
                sock = key.fileobj
                size = int.from_bytes(sock.recv(4), "little")
                while size:
                    size -= len(sock.recv(size))
                latencies.append(time.perf_counter() - sent_at[sock])
                idle.append(sock)
        spent, took = sum(process.cpu_times()[:2]) - before, time.perf_counter() - began
    for sock in socks:
        sock.close()
    return Asked(latencies, took, spent)


def handler_us(together: int, seconds: float) -> float:
    """The replica's part of a request alone."""
    (endpoint,) = free_endpoints(1)
    with Replica(Made(None), "rows made here", Endpoint.parse(endpoint), ProcessSettings.read({})) as replica:
        replica.begin()
        bodies, count = requests(together), 0
        for body in bodies:
            replica._look_up(body)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            replica._look_up(bodies[count % len(bodies)])
            count += 1
        return 1e6 * (time.perf_counter() - began) / count


def editions_us(seconds: float) -> dict[str, float]:
    """What it takes to put an edition in place, and to look up rows of one that is newest, or so many behind."""
    made, editions = Made(0.0), Editions()
    editions.fit(made.describe())
    put_s = []
    for _ in range(20):
        update = made.next(0.0)
        assert update is not None
        draft = editions.begin(update.whole, update.version)
        for piece in update.pieces:
            draft.add(piece)
        began = time.perf_counter()
        draft.publish()
        put_s.append(time.perf_counter() - began)
    found = {"put": 1e6 * float(np.median(put_s[1:]))}
    look_ups, bodies = LookUps(editions, 1, lambda: 0.0), [pb.LookUpRequest.FromString(each) for each in requests(1)]
    for back in BEHIND:
        for body in bodies:
            body.instance, body.edition = 1, editions.newest.number - back
        named, count = [body.SerializeToString() for body in bodies], 0
        for body in named[:20]:
            look_ups.one(body, MOST_BYTES)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            look_ups.one(named[count % len(named)], MOST_BYTES)
            count += 1
        found[f"handler, {back} behind"] = 1e6 * (time.perf_counter() - began) / count
    return found


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--period", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.period)
        return
    seconds = 0.5 if options.quick else 5.0
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for together in TOGETHER:
        cost = handler_us(together, seconds)
        rows.append([f"handler, {together} together", 1e6 / cost, together * 1e6 / cost, cost, None, None])
    rows += [[name, 1e6 / cost, None, cost, None, None] for name, cost in editions_us(seconds).items()]
    cores = sorted(os.sched_getaffinity(0))
    for period_s in (None, 1.0):
        (endpoint,) = free_endpoints(1)
        command = [sys.executable, __file__, "--serve", str(endpoint)]
        command += [] if period_s is None else ["--period", str(period_s)]
        beside = "" if period_s is None else ", 10,000 rows change a second"
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                os.sched_setaffinity(0, set(cores[1:] or cores))
                best = 0.0
                cases = [(n, 1) for n in THREADS] + [(4, m) for m in TOGETHER[1:]]
                for threads, together in cases if period_s is None else cases[:1]:
                    got = ask(str(endpoint), child.pid, threads, together, seconds)
                    best = max(best, got.rate if together == 1 else 0.0)
                    rows.append(_row(f"{threads} threads, {together} together{beside}", got, together))
                half = ask(str(endpoint), child.pid, 8, 1, seconds, best / 2)
                rows.append(_row(f"half of the best through gRPC{beside}", half, 1))
                best = 0.0
                for connections in CONNECTIONS:
                    got = ask_beside(str(endpoint), child.pid, connections, seconds)
                    best = max(best, got.rate)
                    rows.append(_row(f"{connections} beside{beside}", got, 1))
                for rate, name in ((best / 2, "half of the best"), (WANTED / 2, "half of what is wanted")):
                    half = ask_beside(str(endpoint), child.pid, CONNECTIONS[-1], seconds, rate)
                    rows.append(_row(f"{name} beside{beside}", half, 1))
            finally:
                os.sched_setaffinity(0, set(cores))
                child.send_signal(signal.SIGKILL)
    head = ("asked by", "requests a second", "predictions a second", "replica's CPU, us", "p50, ms", "p99, ms")
    print_table("Look-ups of 26 rows of 16 for each prediction, a replica on one core", head, rows)
    write_json(options.json, rows=[dict(zip(head, row, strict=True)) for row in rows])


def _row(name: str, got: Asked, together: int) -> list[Any]:
    return [name, got.rate, together * got.rate, got.cpu_us, got.p50_ms, got.p99_ms]


if __name__ == "__main__":
    main()
