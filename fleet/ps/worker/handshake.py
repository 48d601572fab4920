"""A worker's hello to every server, and what their answers must agree on, these and those to its pushes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from fleet.checkpoint.resume_choice import are_apart, not_at_the_same_step
from fleet.errors import CheckpointError, ServerLostError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.context import Floor

_START_AGAIN = "Start the whole job again, from its last checkpoint if there is one."


def join(floor: Floor) -> list[pb.Reply]:
    """What the servers answer, which all are of one mind."""
    answers = [_hello(floor, server) for server in range(len(floor.lines.clients))]
    _check_alike(floor, answers)
    return answers


def _hello(floor: Floor, server: int) -> pb.Reply:
    client, plan = floor.lines.clients[server], floor.trained.plan
    hello = pb.Hello(
        spec=plan.spec.to_json(),
        fingerprint=plan.fingerprint,
        server=server,
        endpoints=[str(endpoint) for endpoint in floor.assignment.servers],
        seed=torch.initial_seed() & (1 << 64) - 1,
        options=floor.trained.description.options(),
        label=f"{socket.gethostname()}:{os.getpid()}",
        job_id=floor.knobs.job_id,
    )
    reply: pb.Reply = client.hello(Frame(client.request(0, hello=hello)), wait=floor.strategy.wait_port).message
    client.start_pulse()
    return reply


def check_delivered(floor: Floor, step: int, replies: Sequence[Frame]) -> None:
    """Refuse to go on with a server that answers a push as if it had come long ago: it has gone on from another state
    than it had, and takes this worker's steps for repetitions."""
    delivered = [reply.message.delivered for reply in replies]
    if max(delivered) > step:
        raise _ended(floor, not_at_the_same_step(floor.assignment.servers, delivered))


def check_loads(floor: Floor, replies: Sequence[Frame]) -> None:
    """Refuse to go on with a server that has other values than it had taken over."""
    lost = [
        str(client.endpoint)
        for client, reply, known in zip(floor.lines.clients, replies, floor.progress.loads, strict=True)
        if reply.message.loads < known
    ]
    if lost:
        error = ServerLostError(
            "a server has lost the values that had replaced all others", where=", ".join(lost), todo=_START_AGAIN
        )
        raise _ended(floor, error)


def _ended(floor: Floor, error: ServerLostError) -> ServerLostError:
    """The others must not go on either."""
    floor.lines.farewell(abort=pb.Abort(reason=str(error)))
    return error


def _check_alike(floor: Floor, answers: Sequence[Any]) -> None:
    clients = floor.lines.clients
    # Servers may be a round apart where this worker starts again, while others train, or have its last push or not.
    steps = [answer.version if floor.policy.shares_steps else answer.delivered for answer in answers]
    is_mixed = max(steps) > 0 and len({answer.initialized for answer in answers}) > 1
    if is_mixed or (are_apart(steps) and not floor.policy.may_lose_steps):
        has_state = [answer.initialized for answer in answers]
        told = [step if there else None for step, there in zip(steps, has_state, strict=True)]
        raise not_at_the_same_step(floor.assignment.servers, told)
    if len({answer.about for answer in answers}) > 1:
        raise CheckpointError(
            "the servers do not start from the same checkpoint",
            got=", ".join(f"{c.endpoint} from {a.about or 'none'}" for c, a in zip(clients, answers, strict=True)),
            todo="Give every server the same directory, and let no other job save there meanwhile.",
        )
