"""What it costs that servers lose nothing when they are killed, and how soon they are there again.

    python benchmarks/durable.py [--quick] [--rounds 5] [--dir .] [--json figures.json]

Throughput is that of the click model of ``ctr.py``, one server and one worker, with ``FLEET_DURABLE_DIR`` and without,
in alternating rounds: the ratios of a round are what counts. Recovery is of a server with many rows that was killed,
from what it left on the disk, once after a snapshot and once with all of it in the journal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from ctr import KINDS
from measuring import end_like_an_exit, median_ratio, print_table, progress, run_job, write_json

import fleet.nn
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.ps.server.durability import state_directory
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.role_maker import Role, UserDefinedRoleMaker

#: When the journal is synced, and how much of it is kept.
POLICIES = ((None, None), ("os", "needed"), ("interval", "needed"), ("interval", "all"), ("always", "needed"))
MODES = ("sync", "async")
DIM, BATCH = 16, 50_000
ENDPOINT = "server:1"

_RECOVER = """
import json, sys, time
began = time.perf_counter()
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.wire.loopback import LoopbackNetwork
imported = time.perf_counter()
ServerRuntime(Endpoint.parse(sys.argv[2]), LoopbackNetwork(), ProcessSettings(durable_dir=sys.argv[1]), SystemClock())
print(json.dumps([imported - began, time.perf_counter() - imported]))
"""


def throughput(rounds: int, quick: bool, folder: Path) -> list[dict[str, Any]]:
    (kind,) = (each for each in KINDS if each.name == "3x32")
    rates: dict[tuple[str, str | None, str | None], list[float | None]] = {}
    modes = MODES[:1] if quick else MODES
    turns = [
        (mode, *policy) for _ in range(rounds) for mode in modes for policy in (POLICIES[:3] if quick else POLICIES)
    ]
    for mode, sync, keep in progress(turns):
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            told = {}
            if sync is not None and keep is not None:
                told = {"FLEET_DURABLE_DIR": kept, "FLEET_DURABLE_SYNC": sync, "FLEET_DURABLE_KEEP": keep}
            cost = run_job("ours", kind.work(mode, quick), servers=1, workers=1, environment=told)
        rates.setdefault((mode, sync, keep), []).append(cost.rate)
    return [
        {
            "mode": mode,
            "FLEET_DURABLE_SYNC": sync or "(not durable)",
            "FLEET_DURABLE_KEEP": keep or "",
            "examples/s": sorted(found)[len(found) // 2],
            "ratio": median_ratio(found, rates[mode, None, None]),
        }
        for (mode, sync, keep), found in rates.items()
    ]


def killed(rows: int, folder: Path, journal_bytes: int) -> Path:
    """What a server with so many rows leaves behind when it is killed."""
    state_directory.JOURNAL_BYTES = journal_bytes
    network, copy = LoopbackNetwork(), folder / "left"
    settings = ProcessSettings(durable_dir=str(folder / "kept"), durable_sync="os")
    clock = SystemClock()
    server = ServerRuntime(Endpoint.parse(ENDPOINT), network, settings, clock)
    serving = threading.Thread(target=server.run)
    serving.start()
    worker = Fleet(environ={}, network=network)
    worker.init(UserDefinedRoleMaker(0, Role.WORKER, 1, [ENDPOINT]))
    table = fleet.nn.Embedding(None, DIM)
    optimizer = worker.distributed_optimizer(torch.optim.Adagrad(table.parameters(), lr=0.1), model=table)
    worker.init_worker()
    for start in range(0, rows, BATCH):
        optimizer.minimize(table(torch.arange(start, min(rows, start + BATCH))).square().sum())
    while any(thread.name.startswith("fleet-snapshot") for thread in threading.enumerate()):
        time.sleep(0.05)
    shutil.copytree(folder / "kept", copy)
    worker.stop_worker()
    serving.join()
    return copy


def recovery(rows: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    found = []
    for what, journal_bytes in (("a snapshot", 32 << 20), ("the journal alone", 1 << 40)):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            left = killed(rows, Path(scratch), journal_bytes)
            nbytes = sum(each.stat().st_size for each in left.rglob("*") if each.is_file())
            times = []
            for _ in range(rounds):
                command = [sys.executable, "-c", _RECOVER, str(left), ENDPOINT]
                began = time.perf_counter()
                out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
                times.append((*json.loads(out), time.perf_counter() - began))
        imports, recovers, whole = (sorted(each)[len(times) // 2] for each in zip(*times, strict=True))
        found.append(
            {
                "from": what,
                "rows": rows,
                "MB": nbytes / 1e6,
                "recovery s": recovers,
                "imports s": imports,
                "all s": whole,
            }
        )
    return found


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round, one mode, three policies, a quarter of the steps, a tenth of the rows",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where state is kept: the disk makes a difference")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds

    recovered = recovery(100_000 if options.quick else 1_000_000, rounds, options.dir)
    print_table("A killed server is there again", list(recovered[0]), [list(row.values()) for row in recovered])
    rates = throughput(rounds, options.quick, options.dir)
    print_table("3x32, 1 server, 1 worker", list(rates[0]), [list(row.values()) for row in rates])
    write_json(options.json, rounds=rounds, quick=options.quick, throughput=rates, recovery=recovered)


if __name__ == "__main__":
    main()
