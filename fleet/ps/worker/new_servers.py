"""A worker finds out where its job has moved to, and tells servers that have not heard of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.errors import DeadlineError, ServersMovedError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import RETRY_PAUSE_S, Connection, Connections


class Move(NamedTuple):
    """Names a move that has been made, and all servers since."""

    attempt: str
    servers: tuple[Endpoint, ...]


def find_move(connections: Connections, clock: Clock, deadline_s: float) -> Move | None:
    """Return where the job has moved to from these servers; None if it is there. The first server decides: while it
    stands still it is asked again, and if nothing moves there, others that stand still are told."""
    began = clock.now()
    while True:
        answers = _ask(connections)
        move = _of(connections, answers)
        if move is not None:
            return move
        if 0 in answers and not answers[0]["halted"]:
            for server, answer in answers.items():
                if answer["halted"]:
                    over = pb.Switch(attempt=answer["halted"], given_up=True)
                    connection = connections.by_server[server]
                    connection.inquire(Frame(connection.request(0, switch=over)))
            return None
        if clock.now() - began > deadline_s:
            raise DeadlineError(
                "the servers that a job moves away from do not say where it is",
                where=", ".join(str(each.endpoint) for each in connections.by_server),
                expected=f"an answer within {deadline_s:g} s (FLAGS_rpc_deadline)",
                todo="Look at the log of the first of them.",
            )
        clock.sleep(RETRY_PAUSE_S)


def refuse_if_moved(connections: Connections) -> None:
    """Raise if one of these servers knows that the job is elsewhere; others may be gone."""
    if _of(connections, _ask(connections)) is not None:
        where = ", ".join(str(each.endpoint) for each in connections.by_server)
        raise ServersMovedError("the job has moved to other servers", where=where)


def tell_of(move: Move, connections: Sequence[Connection], *, surely: bool = True) -> None:
    """Tell servers of a move that has been made; those that have to go on with the job ``surely``."""
    told = pb.Switch(attempt=move.attempt, endpoints=map(str, move.servers))
    for connection in connections:
        frame = Frame(connection.request(0, switch=told))
        if surely:
            connection.insist(frame, "a move")
        else:
            connection.farewell(frame)


def _ask(connections: Connections) -> dict[int, dict[str, Any]]:
    answers = {}
    for server, connection in enumerate(connections.by_server):
        reply = connection.inquire(Frame(connection.request(0, where=pb.Where())))
        if reply is not None:
            answers[server] = json.loads(reply.message.about)
    return answers


def _of(connections: Connections, answers: dict[int, dict[str, Any]]) -> Move | None:
    here = [str(each.endpoint) for each in connections.by_server]
    for answer in answers.values():
        if answer["servers"] and answer["servers"] != here:
            return Move(answer["made"], tuple(map(Endpoint.parse, answer["servers"])))
    return None
