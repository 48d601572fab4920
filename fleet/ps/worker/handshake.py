"""A worker says hello to every server, and checks that the servers' answers agree, to hellos and to pushes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from fleet.checkpoint.resume_choice import are_apart, not_at_the_same_step
from fleet.errors import CheckpointError, ServerLostError
from fleet.plan.plan import Plan
from fleet.ps.consistency.policy import Policy
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections

_START_AGAIN = "Start the whole job again, from its last checkpoint if there is one."


def join(
    connections: Connections,
    plan: Plan,
    options: Sequence[str],
    policy: Policy,
    job_id: str,
    former: int,
    *,
    wait: bool,
    watch: Callable[[], None] = lambda: None,
) -> list[pb.Reply]:
    """Say hello to every server, and ``wait`` for those that are not up yet, calling ``watch`` meanwhile; return their
    answers, which fit together."""
    endpoints = [str(each.endpoint) for each in connections.by_server]
    answers = []
    for server, connection in enumerate(connections.by_server):
        hello = pb.Hello(
            spec=plan.spec.to_json(),
            fingerprint=plan.fingerprint,
            server=server,
            endpoints=endpoints,
            seed=torch.initial_seed() & (1 << 64) - 1,
            options=options,
            label=f"{socket.gethostname()}:{os.getpid()}",
            job_id=job_id,
            former=former,
        )
        answers.append(connection.hello(Frame(connection.request(0, hello=hello)), wait=wait, watch=watch).message)
        connection.start_heartbeat()
    _check_alike(connections, policy, answers)
    return answers


def check_delivered(connections: Connections, step: int, replies: Sequence[Frame]) -> None:
    """Refuse to go on with a server that answers a push as if it had come long ago: it has gone on from another state
    than it had, and takes this worker's steps for repetitions."""
    delivered = [reply.message.delivered for reply in replies]
    if max(delivered) > step:
        endpoints = [each.endpoint for each in connections.by_server]
        error = not_at_the_same_step(endpoints, delivered)
        connections.end_job(error)
        raise error


def check_loads(connections: Connections, known: Sequence[int], replies: Sequence[Frame]) -> None:
    """Refuse to go on with a server that has other values than it had taken over. Its values had been replaced as often
    as is ``known``."""
    lost = [
        str(connection.endpoint)
        for connection, reply, loads in zip(connections.by_server, replies, known, strict=True)
        if reply.message.loads < loads
    ]
    if lost:
        error = ServerLostError(
            "a server has lost the values that had replaced all others", where=", ".join(lost), todo=_START_AGAIN
        )
        connections.end_job(error)
        raise error


def _check_alike(connections: Connections, policy: Policy, answers: Sequence[pb.Reply]) -> None:
    endpoints = [each.endpoint for each in connections.by_server]
    # Servers may be a round apart where this worker starts again, while others train, or have its last push or not.
    steps = [answer.version if policy.shares_steps else answer.delivered for answer in answers]
    is_mixed = max(steps) > 0 and len({answer.initialized for answer in answers}) > 1
    if is_mixed or (are_apart(steps) and not policy.may_lose_steps):
        known = [step if answer.initialized else None for step, answer in zip(steps, answers, strict=True)]
        raise not_at_the_same_step(endpoints, known)
    if len({answer.about for answer in answers}) > 1:
        raise CheckpointError(
            "the servers do not start from the same checkpoint",
            got=", ".join(f"{at} from {answer.about or 'none'}" for at, answer in zip(endpoints, answers, strict=True)),
            todo="Give every server the same directory, and let no other job save there meanwhile.",
        )
