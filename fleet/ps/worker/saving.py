"""``save_persistables``: one worker claims a folder, every server writes its share into it, the worker adds the
manifest.

Called by one worker or by all, it is done once (once.py). In GEO the first worker does it, since its optimizer's state
is the job's. In a synchronous job the state stands still meanwhile, since no round closes without the worker that
waits; in the other modes workers go on, and each block and row is saved as it is when its turn comes. A server that
does not see the folder sends its share instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fleet.checkpoint.entries import names, split
from fleet.checkpoint.manifest import Saved
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import place_at
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import ConfigurationError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.exporting import exported
from fleet.ps.worker.once import given_up_if_it_fails, once
from fleet.ps.worker.runtime import WorkerRuntime

#: Everything, or what has changed since the last checkpoint.
FULL, DELTA = "full", "delta"


@dataclass(frozen=True)
class Moment:
    """What a worker is at the step that is saved, taken on the user's thread: it may go on while the rest is done."""

    steps: int
    #: in GEO the state of the dense parameters, as entries and tensors, on the worker whose state is the job's
    state: tuple[list[dict[str, Any]], list[torch.Tensor]] | None


def begin(worker: WorkerRuntime, dirname: object, mode: object) -> Callable[[], None]:
    """Have everything applied that this worker has computed. What is returned does the rest, on any thread; in a mode
    whose state stands still meanwhile, before the next step."""
    if mode not in (FULL, DELTA):
        raise ConfigurationError(
            "a checkpoint cannot be saved in this mode", expected="'full' or 'delta'", got=repr(mode)
        )
    where = place_at(dirname).url
    worker.settle("save_persistables()")
    worker.flush()
    replica = worker.replica if worker.assignment.index == 0 else None
    moment = Moment(worker.steps, None if replica is None else split(replica.state()))
    name = worker.name_of_call(f"save_persistables({where!r})")
    return lambda: once(worker, name, lambda last: _write(worker, dirname, mode, moment, last), by_anyone=False)


def _write(worker: WorkerRuntime, dirname: object, mode: object, moment: Moment, last: dict[str, Any]) -> None:
    # Without one before it, a delta has everything.
    after = Saved(last["id"], last["url"]) if mode == DELTA and last["id"] else None
    with CheckpointWriter(dirname, after) as writer, given_up_if_it_fails(worker, writer.id):
        save = pb.Save(
            id=writer.id,
            after="" if after is None else after.id,
            folder=writer.folder.url,
            proof=writer.proof,
            version=worker.completed,
        )
        replies = worker.ask_all(
            lambda _, client: Frame(client.request(worker.completed, save=save)), f"a checkpoint at {save.folder}"
        )
        seed = 0
        for server, reply in enumerate(replies):
            if reply.message.granted:
                files = [PieceFile.told(each) for each in json.loads(reply.message.about)]
            else:
                with writer.pieces(f"server-{server}") as pieces:
                    _fetch(worker, server, writer.id, pieces)
                files = pieces.files
            seed = files[0].about["seed"]
            writer.add(files)
        if moment.state is not None:
            told, state = moment.state
            with writer.pieces("worker-0") as pieces:
                pieces.add({"dense": told}, dict(zip(names(told), state, strict=True)))
            writer.add(pieces.files)
        saved = writer.commit(moment.steps, seed, worker.plan.spec)
    settle = pb.Settle(id=saved.id, url=saved.url)
    worker.ask_all(lambda _, client: Frame(client.request(worker.completed, settle=settle)), "end of a checkpoint")


def _fetch(worker: WorkerRuntime, server: int, checkpoint: str, pieces: PieceWriter) -> None:
    for piece in exported(worker.clients[server], worker.completed, checkpoint):
        pieces.add(piece.about, piece.tensors)
