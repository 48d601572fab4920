"""The one way from a test into a running job: what no user can reach is reached here, and under these names.

A test asks for what it needs (``connections(fleet)``, ``job_of(service)``); where in the product that lies is known to
this file alone.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

from simulation.disk import tiny_tiers as tiny_tiers  # which the simulation needs as well

from fleet import Checkpoints, Fleet
from fleet.base import exit_guard
from fleet.ps.server.durability.durability import Durability
from fleet.ps.server.service import Service
from fleet.ps.table.given import Given
from fleet.ps.table.row_file import RowFile
from fleet.ps.table.shard import Shard
from fleet.ps.table.stores import Stores, TieredStores

# ---------------------------------------------------------------- a process


def abort(fleet: Fleet, reason: str) -> None:
    """End its job for all, if it has one."""
    if fleet._chosen is not None:
        fleet._chosen.abort(reason)


def listening(fleet: Fleet) -> Any:
    """The runtime of the server in this process, from ``resume_from`` on."""
    return fleet._chosen._listening  # type: ignore[union-attr]


# ---------------------------------------------------------------- a worker


def worker_of(fleet: Fleet) -> Any:
    """The runtime of the worker."""
    return fleet._chosen._worker  # type: ignore[union-attr]


def wanted_servers(fleet: Fleet) -> tuple[str, ...]:
    """The servers that this worker is to move its job to."""
    wanted: tuple[str, ...] = worker_of(fleet).connections.wanted_servers
    return wanted


def is_copying(fleet: Fleet) -> bool:
    """Whether this worker copies the job to other servers, beside its training."""
    copy = worker_of(fleet).move_as_asked.__self__._copy
    return copy is not None and copy.is_under_way


def runtime_of(optimizer: Any) -> Any:
    """The same, by the optimizer that ``distributed_optimizer`` returned."""
    return optimizer._stepper()


def leave(fleet: Fleet) -> None:
    """Close what the worker has open without a goodbye, as a process does that is killed."""
    exit_guard.release(worker_of(fleet))
    worker_of(fleet).close()


def refresh(fleet: Fleet) -> None:
    """Take over the dense values that the servers have now."""
    values = worker_of(fleet)._values
    values.write(values.fetch("values"))


def flush(fleet: Fleet) -> None:
    """Let all that the worker has sent arrive."""
    worker_of(fleet).flush()


def exchange(fleet: Fleet) -> None:
    """Let a GEO worker agree with the servers at once."""
    geo = worker_of(fleet)._geo
    geo._agree(geo.replica)


def summed_up(fleet: Fleet) -> tuple[list[Any], list[Any]]:
    """Of a GEO worker, server by server: the dense values that it has agreed on, and how far it has come since."""
    replica = worker_of(fleet).replica
    ahead = [{dtype: each * fleet.worker_num() for dtype, each in flat.items()} for flat in replica.change().dense]
    return replica._agreed, ahead


def lines_of(worker: Any) -> Any:
    """The worker's connections to all servers, which it asks together."""
    return worker.connections


def connections(fleet: Fleet) -> Sequence[Any]:
    """The worker's connections, one a server."""
    return lines_of(worker_of(fleet)).by_server  # type: ignore[no-any-return]


def under_way(fleet: Fleet) -> list[int]:
    """Of each connection, how many requests have no answer yet."""
    return [len(connection._under_way) for connection in connections(fleet)]


def description_of(fleet: Fleet) -> Any:
    """The job as the worker has described it to the servers."""
    return worker_of(fleet).trained.description


def completed(fleet: Fleet) -> int:
    """Steps of this worker that are done."""
    return worker_of(fleet).progress.completed  # type: ignore[no-any-return]


def lose_steps(fleet: Fleet, count: int) -> None:
    """Let the worker believe that it has taken fewer steps than the servers know of."""
    worker_of(fleet).progress.completed -= count


def cuts_of(fleet: Fleet) -> Any:
    """What agrees with the servers on the rows that leave."""
    return worker_of(fleet).cuts


def set_time(fleet: Fleet, now: Any) -> None:
    """Let the worker read the time of day from ``now``."""
    worker_of(fleet)._pusher._now = now


def communicator_of(fleet: Fleet) -> Any:
    """What works behind the steps of the worker."""
    return worker_of(fleet)._training.communicator


def take_fresh(optimizer: Any) -> None:
    """Put the values that have arrived behind the user's back into the parameters."""
    worker = runtime_of(optimizer)
    fresh = worker._training.communicator.fresh()
    if fresh is not None:
        worker._values.write(fresh)


def running_forwards(optimizer: Any) -> int:
    """How many forwards are thought to run."""
    return len(runtime_of(optimizer)._prediction._running)


def is_in_a_meeting(fleet: Fleet) -> bool:
    """Whether a barrier or a reduction of this worker waits for its answer."""
    return bool(worker_of(fleet)._barrier._in_doubt)


# ---------------------------------------------------------------- a server


def found_job(service: Service) -> Any:
    """The server's job, None before the first hello."""
    return service.job


def job_of(service: Service) -> Any:
    """The server's job, which has begun."""
    assert service.job is not None
    return service.job


def shard_of(service: Service) -> Shard:
    return job_of(service).held()  # type: ignore[no-any-return]


def gate_of(service: Service) -> Any:
    return job_of(service).rounds.gate


def parked(service: Service) -> Any:
    """The requests that wait, by their tickets."""
    return job_of(service).rounds.parked


def outgrown(service: Service) -> set[int]:
    """The workers that do not know of all parameters."""
    return {*job_of(service).plans.outgrown}


def task_of(service: Service) -> Any:
    """What is done for a checkpoint on a thread of its own, or was last."""
    job = found_job(service)
    return None if job is None else job.background.task


def is_writing(checkpoints: Checkpoints) -> bool:
    """Say whether a checkpoint is being saved behind the training."""
    return checkpoints._is_writing()


def reductions_of(service: Service) -> Any:
    """What workers have brought to their barriers and reductions."""
    return job_of(service).reductions


def end_of(service: Service) -> Any:
    """Whether and how the job ends on the server."""
    return service.end


def durability_of(service: Service) -> Durability:
    assert service.durability is not None
    return service.durability


def filled_of(service: Service) -> int:
    """How many pieces have come of a job that moves there."""
    stage = service._moving._staging.stage
    return 0 if stage is None else stage.filled


def move_given(one: Given, other: Given) -> None:
    """Let one server know what another one remembers of what workers were given, as a move does it."""
    for key in one.keys:
        start: int | None = 0
        while start is not None:
            piece = one.piece(key, start)
            other.take_over(key, piece)
            start = piece.stop


# ---------------------------------------------------------------- rows in files


def scans_under_way() -> int:
    """How many scans of files of rows, in this process, keep something for what is read next."""
    files = [each for each in gc.get_objects() if isinstance(each, RowFile) and each.path.exists()]
    return sum(until > file._ages for file in files for until in file._scans.values())


def abandon(stores: Stores) -> None:
    """Let go of a killed server's files as the system would."""
    if isinstance(stores, TieredStores):
        stores._writer.shutdown(wait=True)
        os.close(stores._lock)
