"""The ranks of collective jobs, as processes: started once, they run many checks one after the other.

A check is a function of a script in ``tests/scripts``; every rank runs it with ``Rank`` and returns something that JSON
can carry. An importer of torch takes seconds, so the checks of a module share their processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inside import abort
from patience import PROCESSES_S
from prepared import Prepared, Process

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parent.parent

Check = Callable[["Rank"], Any]
#: Has a ``value``, which the check returned, or an ``error``.
Told = dict[str, Any]


@dataclass
class Rank:
    """One rank's view while it runs a check. ``fleet()`` begins a job with the other ranks."""

    rank: int
    size: int
    endpoints: list[str]
    scratch: Path
    jobs: list[Any] = field(default_factory=list)

    def fleet(self, **environ: str) -> Any:
        from fleet import Fleet
        from fleet.role_maker import UserDefinedCollectiveRoleMaker

        made = Fleet(environ={"FLAGS_rpc_deadline": "60000", "FLEET_STARTUP_DEADLINE_S": "30", **environ})
        made.init(UserDefinedCollectiveRoleMaker(self.rank, self.endpoints))
        self.jobs.append(made)
        return made


def serve(checks: Mapping[str, Check]) -> None:
    """The script's end: run the checks that the command line names, and print what came of each."""
    import torch

    torch.set_num_threads(1)

    rank, size, scratch, endpoints, *names = sys.argv[1:]
    for name in names:
        me = Rank(int(rank), int(size), endpoints.split(","), Path(scratch))
        told: dict[str, Any] = {"name": name}
        began = time.monotonic()
        try:
            told["value"] = checks[name](me)
        except BaseException:
            told["error"] = traceback.format_exc()
            for job in me.jobs:
                abort(job, told["error"])
        told["seconds"] = round(time.monotonic() - began, 2)
        print("\n" + json.dumps(told), flush=True)
        if "error" in told:
            os._exit(1)  # the ranks are out of step, whatever comes next


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _communicate(process: Process) -> tuple[str, str]:
    try:
        return process.communicate(PROCESSES_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def run(prepared: Prepared, script: str, size: int, names: Sequence[str], scratch: Path) -> dict[str, list[Told]]:
    """What came of each check on every rank."""
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(size))
    strange = ("PADDLE_", "FLAGS_", "FLEET_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    arguments = (str(size), str(scratch), endpoints, *names)
    started = [prepared.start([str(SCRIPTS / script), str(rank), *arguments], environ) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(_communicate, started))
    results: dict[str, list[Told]] = {name: [] for name in names}
    for process, (out, err) in zip(started, said, strict=True):
        told = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
        by_name = {each["name"]: each for each in told}
        ended = f"the rank ended before it, with {process.returncode}: {err[-2000:]}"
        for name in names:
            results[name].append(by_name.get(name, {"error": ended}))
    return results
