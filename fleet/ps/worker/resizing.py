"""One worker moves its job to other servers: those that there are stand still, all that they have is copied, and the
first of them decides. Other workers wait at their next request meanwhile, and go over with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.base.turns import run_uninterrupted
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    FleetError,
    ServerBusyError,
    ServersMovedError,
    UnsupportedError,
)
from fleet.numeric.ids import partition
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.ps.consistency.movable import refuse_unmovable
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import RETRY_PAUSE_S, Connection
from fleet.ps.worker.lease import once
from fleet.ps.worker.new_servers import Move
from fleet.ps.worker.runtime import WorkerRuntime

_log = logging.getLogger("fleet.worker")

#: So much is told of what keeps a job from moving.
_MOST_REASON = 2000
#: Where an export begins.
_FIRST = "dense:0:0"


def resize(worker: WorkerRuntime, endpoints: object) -> None:
    servers = _checked(endpoints)
    if worker.assignment.embedded:
        raise UnsupportedError("a job of one process has its server in it", todo="Start servers of their own.")
    refuse_unmovable(worker.trained.plan.spec)
    with worker.turns:
        worker.finish_interrupted("resize_servers()")
        worker.following(worker.flush)
        call = f"resize_servers({','.join(map(str, servers))})"
        once(
            worker, worker.progress.name_of_call(call), lambda granted: _move(worker, servers, granted), by_anyone=True
        )


def move_as_asked(worker: WorkerRuntime) -> None:
    """Move the job to the servers that somebody outside wants it to have. What keeps it from moving is told there, and
    the training goes on."""
    try:
        resize(worker, list(worker.connections.wanted_servers))
    except FleetError as error:
        if not worker.connections.is_healthy:
            raise
        _log.warning("the job stays with its servers: %s", error)
        refusal = pb.Rearrange(failure=str(error)[:_MOST_REASON])
        for connection in worker.connections.by_server:
            connection.wanted_servers = ()
            connection.call(
                Frame(connection.request(worker.progress.completed, rearrange=refusal)), "a refusal to move"
            )


def _checked(endpoints: object) -> tuple[Endpoint, ...]:
    if isinstance(endpoints, str) or not isinstance(endpoints, Sequence):
        raise ArgumentTypeError("endpoints must be a list of 'host:port'", got=repr(endpoints)[:200])
    servers = tuple(Endpoint.parse(str(each)) for each in endpoints)
    if not servers or len({*servers}) != len(servers):
        raise ConfigurationError("a job needs servers, each once", got=", ".join(map(str, servers)))
    return servers


def _move(worker: WorkerRuntime, servers: tuple[Endpoint, ...], granted: dict[str, Any]) -> None:
    if servers == worker.assignment.servers:
        return
    attempt = f"{granted['name']} by {worker.incarnation}"
    former = [*worker.connections.by_server]
    new = worker.connect(servers, worker.incarnation)
    try:
        for connection in new:  # now, not when all stand still
            connection.hello(Frame(connection.request(0, where=pb.Where())), wait=True)
        try:
            states = _halt(worker, former, attempt)
            _stage(worker, new, attempt, servers, *states)
            _copy(worker, former, new, attempt)
        except BaseException:
            over = pb.Switch(attempt=attempt, given_up=True)
            for connection in (*former, *new):
                connection.farewell(Frame(connection.request(0, switch=over)))
            raise
    finally:
        for connection in new:
            connection.close()
    told = pb.Switch(attempt=attempt, endpoints=map(str, servers))

    def decide() -> None:
        with contextlib.suppress(ServersMovedError):  # a heartbeat has heard of it, and the answer was lost
            former[0].call(Frame(former[0].request(0, switch=told)), "the move to other servers")
        worker.go_over(Move(attempt, servers))

    run_uninterrupted(decide, "fleet-move")


def _halt(worker: WorkerRuntime, former: Sequence[Connection], attempt: str) -> tuple[str, Sequence[WireTensor]]:
    """Let the servers stand still, the first one first; return the state of the job, and the records beside it."""
    step, halt = worker.progress.completed, pb.Halt(attempt=attempt, version=worker.progress.completed)
    clock = former[0].clock
    began, replies = clock.now(), []
    for connection in former:
        while True:
            try:
                replies.append(connection.call(Frame(connection.request(step, halt=halt)), "a move to other servers"))
                break
            except ServerBusyError:
                if clock.now() - began > connection.deadline_s:
                    raise
                clock.sleep(RETRY_PAUSE_S)
    return replies[0].message.about, replies[0].tensors


def _stage(
    worker: WorkerRuntime,
    new: Sequence[Connection],
    attempt: str,
    servers: Sequence[Endpoint],
    state: str,
    records: Sequence[WireTensor],
) -> None:
    """Let every new server get ready to take over its part."""
    plan = make_plan(worker.trained.plan.spec.on_servers(len(servers)))
    without = json.dumps({**json.loads(state), "records": []})
    for server, connection in enumerate(new):
        stage = pb.Stage(
            attempt=attempt,
            spec=plan.spec.to_json(),
            fingerprint=plan.fingerprint,
            server=server,
            endpoints=map(str, servers),
            state=without if server else state,
        )
        connection.insist(
            Frame(connection.request(0, stage=stage), [] if server else [*records]), "a move to other servers"
        )


def _copy(worker: WorkerRuntime, former: Sequence[Connection], new: Sequence[Connection], attempt: str) -> None:
    """Copy the values of all servers to those that are to have them."""
    number = 0

    def fill(about: str, parts: Sequence[Sequence[WireTensor]]) -> None:
        message = pb.Fill(attempt=attempt, number=number, about=about)
        for connection, tensors in zip(new, parts, strict=True):
            connection.insist(Frame(connection.request(0, fill=message), [*tensors]), f"piece {number} of a move")

    for connection in former:
        for about, tensors in _exported(connection, worker.progress.completed, attempt):
            number += 1
            fill(about, _parts(json.loads(about), tensors, len(new)))
    number += 1
    fill("", [()] * len(new))


def _exported(connection: Connection, step: int, attempt: str) -> Iterator[tuple[str, Sequence[WireTensor]]]:
    cursor = _FIRST
    while cursor:
        export = pb.Export(cursor=cursor, version=step, checkpoint=attempt)
        reply = connection.call(Frame(connection.request(step, export=export)), f"export of {cursor}")
        yield reply.message.about, reply.tensors
        cursor = reply.message.cursor


def _parts(about: dict[str, Any], tensors: Sequence[WireTensor], servers: int) -> list[Sequence[WireTensor]]:
    """Return what every server gets of a piece: its rows, or all of what is exported of parameters."""
    if "dense" in about or servers == 1:
        return [tensors] * servers
    parts = partition(tensors[0].array, servers)
    return [[WireTensor(each.dtype, each.array[part]) for each in tensors] for part in parts]
