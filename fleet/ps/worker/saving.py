"""``save_persistables``: one worker reads every server's state piece by piece and writes the checkpoint.

Called by one worker or by all: server 0 grants the writing to the first that asks, and answers the others when it is
done. In GEO the first worker writes, since its optimizer's state is the job's. In a synchronous job the state stands
still meanwhile, since no round closes without the worker that reads; in the other modes workers go on, and each block
and row is saved as it is when its turn comes.
"""

from __future__ import annotations

import logging

from fleet.checkpoint.entries import VALUE, joined, split
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.exporting import exported
from fleet.ps.worker.runtime import WorkerRuntime

_log = logging.getLogger("fleet.worker")


def save(worker: WorkerRuntime, dirname: str) -> None:
    worker.settle("save_persistables()")
    worker.flush()
    arbiter, step = worker.clients[0], worker.completed
    worker.saves[dirname] += 1
    # The same call on every worker: after the same step where steps are shared, else the one with the same number.
    name = f"{dirname}@{step}" if worker.mode.lockstep else f"{dirname}#{worker.saves[dirname]}"
    claim = arbiter.call(Frame(arbiter.request(step, claim=pb.Claim(name=name))), f"claim of checkpoint {dirname}")
    if not claim.message.granted:
        return
    failure = "it was interrupted"
    try:
        _write(worker, dirname)
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        release = pb.Release(name=name, failure=failure)
        try:
            arbiter.call(Frame(arbiter.request(step, release=release)), f"release of checkpoint {dirname}")
        except FleetError as error:
            if not failure:
                raise
            _log.warning("the failure of a checkpoint could not be reported: %s", error)


def _write(worker: WorkerRuntime, dirname: str) -> None:
    seed = 0
    with CheckpointWriter(dirname) as writer:
        for client in worker.clients:
            for about, tensors in exported(client, worker.completed):
                seed = about.pop("seed", seed)
                if "dense" in about and worker.replica is not None:
                    # Without the state that a server was given to start from: the worker's own is newer.
                    told = joined(about["dense"], tensors)
                    entries, tensors = split(pair for pair in told if pair[0]["key"] == VALUE)
                    about = {"dense": entries}
                writer.add(about, tensors)
        if worker.replica is not None:
            entries, state = split(worker.replica.state())
            writer.add({"dense": entries}, state)
        writer.commit(worker.steps, seed, worker.plan.spec)
