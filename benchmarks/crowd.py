"""A thousand workers and fifty servers, simulated: their code is real, and how long it takes was recorded before.

    python benchmarks/crowd.py [--quick] [--json FILE] [--figures FOLDER] [--parts check curves restarts]
    python benchmarks/crowd.py --record

The job is the click model of ctr.py, 3 x 32, all workers on the same batches. Servers, workers and what they say to
each other are the package's own, in one process, on the network, clock and scheduler of tests/simulation. Computing and
handling messages are times of a processor, recorded with real jobs by ``--record`` into crowd_times.json. Each process
is on a machine of its own with 10 Gbit/s, but for those that stand beside real jobs.

check       4 to 64 workers with 1 to 4 servers on this machine's cores: what is predicted beside real jobs
curves      4 to 1,000 workers with 10 and 50 servers: steps a second, also with stragglers; what servers and links do
restarts    all durable servers are killed and started again, one after the other, while the workers train
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from figures import Point, draw_lines
from measuring import (
    PROGRAMS,
    Cost,
    JobFailed,
    Process,
    end_like_an_exit,
    free_endpoints,
    print_table,
    progress,
    run_job,
    write_json,
)

sys.path.insert(0, str(PROGRAMS))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ours import STRATEGIES, OneTable
from simulation.crowd import Cabling, Crowd, Times
from torch_model import make_model
from work import Work, clicks

import fleet
from fleet import Fleet
from fleet.telemetry.record import read_records

RECORDED = Path(__file__).parent / "crowd_times.json"
MODES = ("sync", "async", "gba")
CLICKS = {"width": 32, "batch": 1000, "alike": True}
#: After so many steps every worker has seen all of its batches, and no row is new.
WARMUP = 20
#: Steps of one worker differ by so much: the deviation of the logarithm of their time.
SPREAD = 0.1
SLOWER = 4.0


# ---------------------------------------------------------------- simulated jobs


@dataclass(frozen=True)
class Setting:
    mode: str
    workers: int
    servers: int
    steps: int
    #: steps of each worker that are not counted
    warmup: int = 1
    #: how long a worker computes
    step_s: float = 0.0
    #: this part of the workers takes four times as long
    stragglers: float = 0.0
    #: on this machine's cores, all together
    together: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """What came of a simulated job. Figures of servers are those of the busiest one, or the fullest."""

    steps_a_second: float
    requests_a_second: float
    load: float
    beats_load: float
    worker_load: float
    #: bytes of all messages of a worker's step, and of a server's link, in and out, in a round
    step_bytes: float
    link_bytes: float
    link_load: float
    beats_bytes: float
    held_bytes: int
    #: microseconds of a processor that a push takes here, in its real code
    push_us: float
    joined_s: float
    took_s: float
    #: what a step took of all workers' processors, and of all servers'
    worker_s: float
    server_s: float


@cache
def batches() -> list[tuple[torch.Tensor, ...]]:
    """The distinct ids of what all workers train on."""
    work = Work("worker", 0, [], 1, [], "sync", 0, 0, **CLICKS)
    return [torch.from_numpy(np.unique(ids)) for ids, _, _ in clicks(work)]


class Clicks:
    """Is what all workers of a simulated job do: steps of the click model without its computing."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        #: (when, worker, step), of steps that are done
        self.done: list[tuple[float, int, int]] = []
        self.joined: list[float] = []
        self.last: dict[int, float] = {}
        #: the longest time that a worker took for a step
        self.longest_s = 0.0
        #: what looks when the first counted step begins, and when the last one has ended
        self.look: Callable[[], object] = lambda: None
        count = round(setting.stragglers * setting.workers)
        self._slow = {*random.Random(setting.seed).sample(range(setting.workers), count)}

    def __call__(self, crowd: Crowd, here: Fleet, worker: int) -> None:
        setting, ids = self._setting, batches()
        work = Work("worker", worker, [], setting.workers, [], setting.mode, 0, 0, **CLICKS)
        table = fleet.nn.Embedding(None, work.dim, initializer="zeros")
        model = make_model(work, lambda: OneTable(table))
        rate = work.rate
        strategy = STRATEGIES[setting.mode]()
        optimizer = here.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=rate), strategy, model=model)
        here.init_worker()
        self.joined.append(crowd.scheduler.now)
        draw = random.Random(f"{setting.seed} {worker}")
        slower = SLOWER if worker in self._slow else 1.0
        dense = [parameter for name, parameter in model.named_parameters() if name.startswith("top")]
        # One more, so that at the end of what is counted workers are as far into the next step as at its beginning.
        for step in range(setting.warmup + setting.steps + 1):
            self.last[worker] = crowd.scheduler.now
            # Before the look-up, as a step is: its time is drawn around what was recorded.
            crowd.compute(setting.step_s * slower * draw.lognormvariate(-SPREAD * SPREAD / 2, SPREAD))
            optimizer.minimize(table(ids[step % len(ids)]).sum() + sum(each.sum() for each in dense))
            self.longest_s = max(self.longest_s, crowd.scheduler.now - self.last[worker])
            self.done.append((crowd.scheduler.now, worker, step))
            if len(self.done) in (setting.warmup * setting.workers, (setting.warmup + setting.steps) * setting.workers):
                self.look()


def simulate(setting: Setting, times: Times) -> Seen:
    began = time.monotonic()
    work = Clicks(setting)
    crowd = Crowd(setting.workers, setting.servers, work, times, together=setting.together, seed=setting.seed)
    servers = [name for name in crowd.names if name.startswith("server")]
    workers = [name for name in crowd.names if name.startswith("worker")]
    looks: list[dict[str, Any]] = []

    def look() -> None:
        wires = crowd.wires
        seen = {
            "now": crowd.scheduler.now,
            "requests": {name: sum(wires.handled[name].requests.values()) for name in servers},
            "busy": {name: sum(wires.processor(name).busy_s.values()) for name in crowd.names},
            "beats": {name: wires.processor(name).busy_s["beat"] for name in servers},
            "links": {name: crowd.machines[name].sent_bytes + crowd.machines[name].received_bytes for name in servers},
            "frames": sum(wires.bytes_of.values()) - wires.bytes_of["beat"],
            "beat frames": wires.bytes_of["beat"],
            "pushes": {name: wires.handled[name].requests["push"] for name in servers},
            "push_s": {name: wires.handled[name].took_s["push"] for name in servers},
        }
        looks.append(seen)

    work.look = look
    crowd.run()
    before, after = looks
    seconds = after["now"] - before["now"]
    steps = setting.steps * setting.workers

    def grown(what: str, name: str) -> float:
        return after[what][name] - before[what][name]

    frames = after["frames"] - before["frames"]
    beats = after["beat frames"] - before["beat frames"]
    pushes = sum(grown("pushes", name) for name in servers)
    busiest_link = max(grown("links", name) for name in servers)
    return Seen(
        steps_a_second=steps / seconds,
        requests_a_second=max(grown("requests", name) for name in servers) / seconds,
        load=max(grown("busy", name) for name in servers) / seconds,
        beats_load=max(grown("beats", name) for name in servers) / seconds,
        worker_load=statistics.mean(grown("busy", name) for name in workers) / seconds,
        step_bytes=frames / steps,
        link_bytes=busiest_link / setting.steps,
        link_load=busiest_link / 2 / seconds / Cabling().bytes_s,
        beats_bytes=beats / (frames + beats),
        held_bytes=max(crowd.wires.handled[name].most_held_bytes for name in servers),
        push_us=sum(grown("push_s", name) for name in servers) / max(1, pushes) * 1e6,
        joined_s=max(work.joined),
        took_s=time.monotonic() - began,
        worker_s=sum(grown("busy", name) for name in workers) / steps,
        server_s=sum(grown("busy", name) for name in servers) / steps,
    )


# ---------------------------------------------------------------- recorded times


def real_job(mode: str, workers: int, servers: int, steps: int, record: Path | None = None) -> Cost:
    environment = {} if record is None else {"FLEET_RECORD_DIR": str(record)}
    work = {**CLICKS, "mode": mode, "steps": steps, "warmup": WARMUP}
    return run_job("ours", work, workers=workers, servers=servers, deadline_s=400.0, environment=environment)


def features(mode: str, workers: int, servers: int) -> tuple[float, float]:
    """Requests and bytes of a worker's step, counted in a simulated job."""
    work = Clicks(Setting(mode, workers, servers, 4))
    crowd = Crowd(workers, servers, work, Times())
    counted: list[tuple[int, int]] = []

    def look() -> None:
        asked = sum(sum(each.requests.values()) - each.requests["beat"] for each in crowd.wires.handled.values())
        counted.append((asked, sum(crowd.wires.bytes_of.values()) - crowd.wires.bytes_of["beat"]))

    work.look = look
    crowd.run()
    (asked, sent), (asked_then, sent_then) = counted
    return (asked_then - asked) / workers / 4, (sent_then - sent) / workers / 4


def record(modes: Sequence[str], rounds: int, steps: int) -> None:
    """Run real jobs of two workers with 1 and 4 servers, and take apart what they cost: what a request costs shows in
    how that grows with the number of servers, and what bytes cost is the rest. Of several rounds the cheapest counts:
    what else this machine does can only add to it. Other modes stay as they were."""
    beats = {"mode": "sync", "width": 32, "batch": 1, "steps": 2000, "warmup": 200}
    beat = min((run_job("beats", beats, workers=1, servers=1) for _ in range(rounds)), key=lambda cost: cost.seconds)
    worker_beat_s, server_beat_s = beat.worker_cpu_s / beat.examples, beat.server_cpu_s / beat.examples
    kept = json.loads(RECORDED.read_text())["modes"] if RECORDED.exists() else {}
    machine = {"cores": psutil.cpu_count(), "processor": _processor(), "system": platform.platform()}
    start_s, idle = _start()
    told = {"date": f"{datetime.date.today()}", "machine": machine, "start_s": start_s, "idle": idle, "modes": kept}
    for mode in modes:
        worker_s: dict[int, float] = {}
        server_s: dict[int, float] = {}
        for servers in progress([1, 4] * rounds, lambda servers, mode=mode: f"{mode}, {servers} servers"):
            cost = real_job(mode, 2, servers, steps)
            beaten = 2 * servers * cost.seconds  # heartbeats, and what a server does that waits, go with the time
            a_step = (cost.worker_cpu_s - beaten * worker_beat_s) / (2 * steps)
            worker_s[servers] = min(worker_s.get(servers, a_step), a_step)
            a_step = (cost.server_cpu_s - beaten * server_beat_s - idle * servers * cost.seconds) / (2 * steps)
            server_s[servers] = min(server_s.get(servers, a_step), a_step)
        (few, sent), (many, _) = (features(mode, 2, servers) for servers in (1, 4))
        worker_request_s = (worker_s[4] - worker_s[1]) / (many - few)
        server_request_s = (server_s[4] - server_s[1]) / (many - few)
        times = Times(
            worker_request_s=worker_request_s,
            worker_beat_s=worker_beat_s,
            server_request_s=server_request_s,
            server_byte_s=(server_s[1] - few * server_request_s) / sent,
            server_beat_s=server_beat_s,
        )
        step_s = worker_s[1] - few * worker_request_s
        measured = {"requests": [few, many], "bytes": sent, "worker_s": worker_s, "server_s": server_s}
        kept[mode] = {"step_s": step_s, "times": dataclasses.asdict(times), "measured": measured}
        RECORDED.write_text(json.dumps(told, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _start() -> tuple[float, float]:
    """How long a processor works until a server listens that is started, and which part of one it takes then."""
    (endpoint,) = free_endpoints(1)
    work = {**CLICKS, "mode": "sync", "steps": 1, "warmup": 1, "servers": [endpoint], "meeting": [], "workers": 1}
    command = [sys.executable, str(PROGRAMS / "ours.py"), json.dumps({**work, "role": "server", "index": 0})]
    host, _, port = endpoint.rpartition(":")
    with tempfile.TemporaryDirectory() as folder, Process("server", command, Path(folder), {}) as server:
        while True:
            try:
                socket.create_connection((host, int(port)), 1.0).close()
            except OSError:
                time.sleep(0.05)
            else:
                break
        start_s = server.cpu_s()
        time.sleep(1.0)
        began, used_s = time.monotonic(), server.cpu_s()
        time.sleep(8.0)
        return start_s, (server.cpu_s() - used_s) / (time.monotonic() - began)


@dataclass(frozen=True)
class Recorded:
    step_s: Mapping[str, float]
    times: Mapping[str, Times]
    start_s: float


def recorded() -> Recorded:
    told = json.loads(RECORDED.read_text())
    step_s = {mode: each["step_s"] for mode, each in told["modes"].items()}
    return Recorded(step_s, {mode: Times(**each["times"]) for mode, each in told["modes"].items()}, told["start_s"])


# ---------------------------------------------------------------- beside real jobs


@dataclass(frozen=True)
class Real:
    """What a real job had. Its processor time says how fast it would have been with the cores for itself."""

    steps_a_second: float
    by_processor: float
    worker_s: float
    server_s: float
    step_bytes: float
    server_bytes: float
    foreign: float


def real(mode: str, workers: int, servers: int, steps: int) -> Real:
    with tempfile.TemporaryDirectory() as folder:
        cost = real_job(mode, workers, servers, steps, Path(folder))
        lines = read_records(Path(folder))
    last = {line.process: line.told for line in lines if line.kind == "worker"}
    talked = [told["sent_bytes"] + told["received_bytes"] for told in last.values()]
    memory = [line.told["figures"]["memory_bytes"] for line in lines if line.kind == "server"]
    total = steps * workers
    return Real(
        steps_a_second=total / cost.seconds,
        by_processor=psutil.cpu_count() / ((cost.worker_cpu_s + cost.server_cpu_s) / total),
        worker_s=cost.worker_cpu_s / total,
        server_s=cost.server_cpu_s / total,
        step_bytes=sum(talked) / ((steps + WARMUP) * workers),
        server_bytes=max(memory),
        foreign=cost.foreign,
    )


CHECKED = ((4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (4, 2), (16, 2), (64, 2), (8, 4), (32, 4), (64, 4))


def check(options: argparse.Namespace, known: Recorded) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    shapes = CHECKED[:1] if options.quick else [each for each in CHECKED if each[0] in options.workers]
    places = [(mode, *shape) for mode in (MODES[:1] if options.quick else options.modes) for shape in shapes]
    for mode, workers, servers in progress(places, str):
        steps = max(10, (200 if options.quick else 1200) // workers)
        try:
            had = real(mode, workers, servers, steps)
        except JobFailed as failure:
            print(f"{mode}, {workers} workers, {servers} servers: {failure}")
            continue
        setting = Setting(mode, workers, servers, 6, 2, known.step_s[mode], together=True)
        said = simulate(setting, known.times[mode])
        found.append({"mode": mode, "workers": workers, "servers": servers, "had": had, "said": said})
        write_json(options.json, check=found)
    print_table(
        "Beside real jobs on this machine's cores",
        [
            *("mode", "workers", "servers", "steps/s", "by processor time", "predicted", "of measured"),
            *("of processor's", "ms of workers a step", "predicted", "ms of servers a step", "predicted"),
            *("step kB", "of it predicted", "server MB", "others, cores"),
        ],
        [
            [
                *(each["mode"], each["workers"], each["servers"], had.steps_a_second, had.by_processor),
                *(said.steps_a_second, said.steps_a_second / had.steps_a_second),
                *(said.steps_a_second / had.by_processor, had.worker_s * 1e3, said.worker_s * 1e3),
                *(had.server_s * 1e3, said.server_s * 1e3, had.step_bytes / 1e3, said.step_bytes / had.step_bytes),
                *(had.server_bytes / 1e6, had.foreign),
            ]
            for each in found
            for had, said in [(each["had"], each["said"])]
        ],
    )
    return found


# ---------------------------------------------------------------- curves

WORKERS = (4, 16, 64, 250, 1000)
SERVERS = (10, 50)


def curves(options: argparse.Namespace, known: Recorded) -> list[dict[str, Any]]:
    """Jobs of more and more workers, with and without some that are slow. The largest take few steps, of which each
    costs two minutes."""
    places = [
        (mode, servers, stragglers, workers)
        for workers in (WORKERS[:1] if options.quick else options.workers)
        for servers in (SERVERS[:1] if options.quick else options.servers)
        for mode in options.modes
        for stragglers in options.stragglers
        if round(stragglers * workers) or not stragglers
    ]
    found: list[dict[str, Any]] = []
    for mode, servers, stragglers, workers in progress(places, str):
        steps = 2 if workers >= 1000 else 3 if workers >= 64 else 6
        step_s = options.step_s or known.step_s[mode]
        setting = Setting(mode, workers, servers, steps, 1, step_s, stragglers)
        seen = simulate(setting, known.times[mode])
        found.append({"setting": setting, "seen": seen})
        write_json(options.json, curves=found)
    print_table(
        "Simulated jobs, each process on a machine of its own",
        [
            *("mode", "servers", "workers", "slow", "steps/s", "rounds/s", "requests/s at a server", "its load"),
            *("of beats", "a worker's load", "kB a step", "MB of a link a round", "its load", "bytes of beats"),
            *("MB held", "us a push here"),
        ],
        [
            [
                *(at.mode, at.servers, at.workers, f"{at.stragglers:.0%}", seen.steps_a_second),
                *(seen.steps_a_second / at.workers, seen.requests_a_second, seen.load, seen.beats_load),
                *(seen.worker_load, seen.step_bytes / 1e3, seen.link_bytes / 1e6, seen.link_load, seen.beats_bytes),
                *(seen.held_bytes / 1e6, seen.push_us),
            ]
            for each in found
            for at, seen in [(each["setting"], each["seen"])]
        ],
    )
    if options.figures:
        draw(options.figures, found)
    return found


#: By picture: what it shows, its axis, and what is drawn of a job.
PICTURES: dict[str, tuple[str, str, Callable[[Any], float]]] = {
    "rates": ("Steps of all workers together, simulated", "steps a second", lambda seen: seen.steps_a_second),
    "memory": ("What a server holds for a round, simulated", "MB", lambda seen: seen.held_bytes / 1e6),
    "link": ("What the busiest link carries in a round, simulated", "MB", lambda seen: seen.link_bytes / 1e6),
}


def draw(folder: Path, found: Sequence[Mapping[str, Any]]) -> None:
    for name, (title, y, figure) in PICTURES.items():
        lines: dict[str, list[Point]] = {}
        for each in found:
            at, drawn = each["setting"], figure(each["seen"])
            if not at.stragglers and drawn > 0:
                lines.setdefault(f"{at.mode}, {at.servers} servers", []).append((at.workers, drawn, 0.0))
        draw_lines(folder / f"crowd-{name}.svg", lines, title=title, x="workers", y=y, logarithmic="xy")


# ---------------------------------------------------------------- restarts

#: A disk takes twice this at most to have on it what is to stay.
SYNC_S = 0.002


def restarts(options: argparse.Namespace, known: Recorded) -> list[dict[str, Any]]:
    """Kill and start again all servers of a synchronous job, each when a round was trained with the one before."""
    shapes = [(2, 2)] if options.quick else [(16, 10), (4, 50)]
    found = []
    for workers, servers in shapes:
        setting = Setting("sync", workers, servers, 10**9, 0, known.step_s["sync"])
        work = Clicks(setting)
        lasted: list[float] = []

        def operate(crowd: Crowd, lasted: list[float] = lasted, work: Clicks = work, servers: int = servers) -> None:
            def await_round() -> None:
                done = len(work.done)
                while len(work.done) < done + crowd.workers:
                    crowd.scheduler.block(0.1)

            await_round()
            work.longest_s = 0.0
            for index in range(servers):
                began = crowd.scheduler.now
                crowd.restart(f"server{index}", known.start_s)
                while crowd.served_at[f"server{index}"] <= began:
                    crowd.scheduler.block(0.1)
                await_round()
                lasted.append(crowd.scheduler.now - began)

        with tempfile.TemporaryDirectory() as folder:
            times = known.times["sync"]
            crowd = Crowd(workers, servers, work, times, durable=Path(folder), sync_s=2 * SYNC_S, operate=operate)
            crowd.run()
        took = {"all_s": sum(lasted), "one_s": max(lasted), "pause_s": work.longest_s}
        found.append({"workers": workers, "servers": servers, **took})
        write_json(options.json, restarts=found)
    print_table(
        "All durable servers started again, one after the other, while the workers train",
        ["workers", "servers", "s for all", "s for one, at most", "longest step"],
        [list(each.values()) for each in found],
    )
    return found


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small jobs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figures", type=Path, help="also draw them, into this folder")
    parts = {"check": check, "curves": curves, "restarts": restarts}
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--servers", nargs="+", type=int, default=SERVERS)
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    parser.add_argument("--stragglers", nargs="+", type=float, default=(0.0, 0.01), help="parts of the workers")
    parser.add_argument("--step_s", type=float, help="how long a worker computes, if not as long as was recorded")
    parser.add_argument("--record", action="store_true", help="measure on this machine how long everything takes")
    options = parser.parse_args()
    logging.getLogger("fleet").setLevel(logging.ERROR)  # each of a thousand says that it is there
    if options.record:
        record(options.modes, 1 if options.quick else 3, 60 if options.quick else 150)
        return
    known = recorded()
    results = {name: parts[name](options, known) for name in options.parts}
    write_json(options.json, quick=options.quick, **results)


if __name__ == "__main__":
    main()
