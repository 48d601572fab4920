"""How many servers and workers a model needs, from what a step costs; and whether runs on this machine agree.

    python benchmarks/needs.py [--check] [--quick] [--json FILE]

A step's bytes and CPU seconds follow from how many distinct ids a batch has, how wide rows are, and how many dense
parameters there are. Three models are worked out. With ``--check`` the bytes that jobs hand to their transport stand
beside what the arithmetic says, and real jobs of the click model beside what ``fleet plan`` predicts of them.
docs/scaling.md explains both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from in_process import run_job as run_in_process
from measuring import PROGRAMS, end_like_an_exit, print_table, write_json
from meter import MeteredNetwork

import fleet
from fleet import Fleet
from fleet.telemetry.forecast import Costs, Observed, Site, observed
from fleet.telemetry.record import read_records

CLICKS = PROGRAMS / "clicks.py"

#: Microseconds of one core, measured on the machine of RESULTS.md: of the worker for a distinct id in a batch, there
#: and back; of its servers for the same; of a server for the update of one dense parameter, and of a worker for the
#: arithmetic of one, forward and backward, in one example.
WORKER_US_AN_ID, SERVER_US_AN_ID, SERVER_US_A_PARAMETER = 0.5, 0.2, 0.006
WORKER_US_A_PARAMETER = 6 / 78_000
#: Of every server for a worker's step, whatever is in it: two requests.
SERVER_US_A_STEP = 200
#: For an id, and for a number.
ID_BYTES, NUMBER_BYTES = 8, 4
#: What finding a row takes beside it, and what a growing table keeps ready, as a factor on its numbers and id.
ROOM = 1.4


@dataclass(frozen=True)
class Model:
    """``distinct``: ids in a batch of ``batch`` examples; ``state``: numbers of optimizer state for each of a row's."""

    name: str
    batch: int
    distinct: int
    dim: int
    dense: int
    rows: float
    state: int
    wanted: float

    @property
    def bytes_up(self) -> int:
        """Of one worker's step: ids to look up, then ids and gradients."""
        return self.distinct * (2 * ID_BYTES + self.dim * NUMBER_BYTES) + self.dense * NUMBER_BYTES

    @property
    def bytes_down(self) -> int:
        return (self.distinct * self.dim + self.dense) * NUMBER_BYTES

    @property
    def worker_us(self) -> float:
        """Of one step."""
        return self.distinct * WORKER_US_AN_ID + self.batch * self.dense * WORKER_US_A_PARAMETER

    @property
    def server_us(self) -> float:
        """Of one worker's step, all servers together, but for what each request costs."""
        return self.distinct * SERVER_US_AN_ID + self.dense * SERVER_US_A_PARAMETER

    @property
    def table_bytes(self) -> float:
        return self.rows * (self.dim * (1 + self.state) * NUMBER_BYTES + ID_BYTES) * ROOM


@dataclass(frozen=True)
class Machine:
    """``bytes_a_second`` one way. Of cores and memory a part is left to the system and to bursts."""

    cores: int = 32
    memory: float = 256 * 2**30
    bytes_a_second: float = 25e9 / 8
    usable: float = 0.7


@dataclass(frozen=True)
class Needs:
    """Workers are counted in cores: one with several threads takes as many."""

    worker_cores: int
    worker_machines: int
    servers: int
    server_machines: int
    limit: str


def needs(model: Model, machine: Machine) -> Needs:
    """A server computes on one core. Machines for servers are as many as the scarcest of three things asks for."""
    rate = model.wanted / model.batch
    spare = machine.usable - rate * SERVER_US_A_STEP / 1e6
    if spare <= 0:
        raise SystemExit(
            f"{model.name}: {rate:,.0f} steps a second are more than a server can take. Use larger batches."
        )
    traffic = rate * max(model.bytes_up, model.bytes_down)
    cores = math.ceil(rate * model.worker_us / 1e6 / machine.usable)
    servers = math.ceil(rate * model.server_us / 1e6 / spare)
    for_network = math.ceil(traffic / machine.bytes_a_second / machine.usable)
    asked = {
        "computing": math.ceil(servers / machine.cores),
        "memory": math.ceil(model.table_bytes / machine.memory / machine.usable),
        "network": for_network,
    }
    limit = max(asked, key=lambda name: asked[name])
    worker_machines = max(math.ceil(cores / machine.cores), for_network)
    return Needs(cores, worker_machines, max(servers, asked[limit]), asked[limit], limit)


#: (26 slots x 10 and 13 numbers) x 400 x 400 x 400 x 2, and the like.
MODELS = (
    Model("clicks: CTR-DNN, 3 x 400", 1000, 4_800, 10, 431_202, 1e8, 1, 100_000),
    Model("ads: 300 ids, 1024-512-256", 10_000, 700_000, 16, 2_295_809, 1e10, 1, 10_000_000),
    Model("words: skip-gram, 5 negatives", 10_000, 25_000, 128, 0, 2e7, 0, 2_000_000),
)


def count_bytes(distinct: int, dim: int, width: int, steps: int = 5) -> tuple[float, int]:
    """What a worker's step hands to the transport, and what the arithmetic says."""
    network = MeteredNetwork()

    def work(job: Fleet, _: int) -> int:
        model = torch.nn.ModuleDict({"rows": fleet.nn.Embedding(None, dim), "top": torch.nn.Linear(dim, width)})
        optimizer = job.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.init_worker()
        begun = network.bytes
        for step in range(steps):
            ids = torch.arange(step, step + distinct)
            optimizer.minimize(model["top"](model["rows"](ids)).square().mean())
        return network.bytes - begun

    (counted,) = run_in_process(work, network=network)
    asked = Model("", 1, distinct, dim, dim * width + width, 0, 0, 0)
    return counted / steps, asked.bytes_up + asked.bytes_down


@dataclass(frozen=True)
class Script:
    """``ours`` of peers/clicks.py, and the ``steps`` that each worker of a real job takes."""

    mode: str
    width: int
    pause_ms: float
    steps: int

    @property
    def name(self) -> str:
        waiting = f", {self.pause_ms:g} ms for data" if self.pause_ms else ""
        return f"3 x {self.width}, {self.mode}{waiting}"

    def arguments(self, steps: int) -> list[str]:
        return f"--mode {self.mode} --width {self.width} --pause_ms {self.pause_ms} --steps {steps}".split()


#: With a pause workers are not in each other's way, as on machines of their own: what they wait for is servers.
SCRIPTS = (
    Script("sync", 32, 0, 800),
    Script("async", 32, 0, 800),
    Script("sync", 400, 0, 200),
    Script("async", 400, 0, 200),
    Script("sync", 32, 60, 150),
    Script("async", 32, 60, 150),
)
#: None of them is a sample's.
SHAPES = ((2, 1), (1, 2), (1, 4), (2, 4))
#: What is predicted, and how it is called in ``fleet.telemetry.forecast.Observed``.
PREDICTED = {
    "steps/s": lambda seen: seen.workers / seen.step_s,
    "sent": lambda seen: seen.sent_bytes,
    "received": lambda seen: seen.received_bytes,
    "worker": lambda seen: seen.worker_bytes,
    "server": lambda seen: seen.server_bytes + seen.table_bytes / seen.servers,
}


def planned(script: Script, folder: Path, servers: int, workers: int, steps: float) -> dict[str, float]:
    """What ``fleet plan`` predicts, of a sample that was taken before."""
    told = json.loads((folder / "plan.json").read_text())
    one, two = (Observed(**{**each, "growth": tuple(map(tuple, each["growth"]))}) for each in told["observed"])
    costs = Costs(one, two, os.cpu_count() or 1)
    site = Site(math.inf, 0.0, None if script.pause_ms else os.cpu_count())
    said = costs.forecast(servers, workers, site, costs.rows_after(steps))
    return dict(
        zip(
            PREDICTED,
            (said.rate, said.sent_bytes, said.received_bytes, said.worker_bytes, said.server_bytes),
            strict=True,
        )
    )


def run_script(script: Script, folder: Path, servers: int, workers: int) -> Observed:
    logs = folder / f"{servers}-{workers}"
    command = ["run", "--server_num", str(servers), "--worker_num", str(workers), "--log_dir", str(logs)]
    fleet_command(folder, *command, str(CLICKS), *script.arguments(script.steps))
    seen = observed(read_records(logs))
    assert seen is not None, "the job was too short"
    return seen


def fleet_command(folder: Path, *arguments: str) -> None:
    with (folder / "said").open("ab") as said:
        subprocess.run([sys.executable, "-m", "fleet", *arguments], check=True, stdout=said, stderr=said, timeout=600)


def compare_plans() -> list[dict[str, Any]]:
    """Samples and real jobs of some scripts, in turns."""
    results = []
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sample = ["--sample", str(script.steps // 2), "--json", str(folder / "plan.json")]
            fleet_command(folder, "plan", str(CLICKS), *sample, "--", *script.arguments(10**6))
            for servers, workers in SHAPES:
                seen = run_script(script, folder, servers, workers)
                said = planned(script, folder, servers, workers, seen.steps)
                had = {name: of(seen) for name, of in PREDICTED.items()}
                results.append(
                    {"script": script.name, "servers": servers, "workers": workers, "had": had, "said": said}
                )
    print_table(
        "What fleet plan predicts, as a part of what real jobs had",
        ["script", "servers + workers", "steps/s", *PREDICTED],
        [
            [
                each["script"],
                f"{each['servers']} + {each['workers']}",
                each["had"]["steps/s"],
                *(each["said"][name] / each["had"][name] for name in PREDICTED),
            ]
            for each in results
        ],
    )
    return results


def check(quick: bool) -> dict[str, Any]:
    shapes = [(1000, 8, 16), (5000, 32, 64), (200, 10, 1000)]
    counted = [(shape, *count_bytes(*shape)) for shape in shapes]
    print_table(
        "Bytes of a step, one worker",
        ["distinct ids x dim, dense", "counted", "computed", "ratio"],
        [[f"{d} x {dim}, {dim * w + w}", int(had), said, had / said] for (d, dim, w), had, said in counted],
    )
    return {"bytes": counted, "plans": [] if quick else compare_plans()}


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="also run jobs here, and compare")
    parser.add_argument("--quick", action="store_true", help="no whole jobs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    machine = Machine()
    found = {model.name: needs(model, machine) for model in MODELS}
    print_table(
        f"Needs, of machines with {machine.cores} cores, {machine.memory / 2**30:.0f} GiB and "
        f"{machine.bytes_a_second * 8 / 1e9:.0f} Gbit/s, {machine.usable:.0%} of them used",
        [
            "model",
            "examples/s",
            "kB up",
            "kB down",
            "worker ms",
            "server ms",
            "table GB",
            "worker cores",
            "machines",
            "servers",
            "machines",
            "limit",
        ],
        [
            [
                m.name,
                m.wanted,
                m.bytes_up / 1e3,
                m.bytes_down / 1e3,
                m.worker_us / 1e3,
                m.server_us / 1e3,
                m.table_bytes / 1e9,
                n.worker_cores,
                n.worker_machines,
                n.servers,
                n.server_machines,
                n.limit,
            ]
            for m, n in zip(MODELS, found.values(), strict=True)
        ],
    )
    results = check(options.quick) if options.check else {}
    write_json(options.json, needs={name: vars(each) for name, each in found.items()}, check=results)


if __name__ == "__main__":
    main()
