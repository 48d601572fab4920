"""Saving and loading take little memory beside what is saved and loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import run_job

import fleet.nn
from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.pieces import PieceFile
from fleet.checkpoint.writer import CheckpointWriter
from fleet.plan.plan import make_plan
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.checkpoint_share import write_share
from fleet.ps.table.shard import Piece, Shard

DIM, ROWS = 64, 800_000
ALLOWED = 64 << 20
#: A server that loads takes the memory of its rows some time before they come.
AHEAD = 48 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's largest size"),
]


def resident(which: str) -> int:
    (found,) = re.findall(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


def beyond(act: Callable[[], object]) -> int:
    """How far this process grows while something is done, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


def test_a_server_with_a_table_of_200_megabytes(tmp_path: Path) -> None:
    def body(fleet_: Fleet, worker: int) -> None:
        table = fleet.nn.Embedding(None, DIM)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        fleet_.init_worker()
        optimizer.minimize(table(torch.arange(3)).sum())
        fleet_.save_persistables(tmp_path / "small")

    run_job(body, 1, 1)
    spec = Checkpoint.open(tmp_path / "small").manifest.spec
    options = [json.dumps(torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults)]

    def server() -> Shard:
        return Shard(make_plan(spec), 0, 0, options)

    shard = server()
    for start in range(0, ROWS, 50_000):
        ids = np.arange(start, start + 50_000)
        shard.tables[0].load(ids, {"weight": np.full((len(ids), DIM), start, np.float32)})
    size = shard.tables[0].nbytes
    assert size > 200_000_000

    with CheckpointWriter(tmp_path / "large") as writer:

        def export(cursor: str, _: object) -> Piece:
            return shard.export(cursor)

        def save() -> None:
            reply = write_share(writer.folder.url, writer.proof, 0, export, SystemClock(), behind=False)
            writer.add(PieceFile.from_json(each) for each in json.loads(reply.message.about))

        assert beyond(save) < ALLOWED
        writer.commit(1, 0, spec)
    shard.tables.clear()
    fresh = server()
    assert beyond(lambda: restore_from(tmp_path / "large").fill(fresh, 0)) < size + ALLOWED + AHEAD
    assert len(fresh.tables[0]) == ROWS
    assert fresh.read(0, np.array([ROWS - 1]), True)[0, 0] == ROWS - 50_000
