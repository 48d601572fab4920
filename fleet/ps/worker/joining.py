"""A worker's hello to every server, and what their answers must agree on."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from fleet.errors import CheckpointError, ServerLostError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.floor import Floor


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


def _check_alike(floor: Floor, answers: Sequence[Any]) -> None:
    clients = floor.lines.clients
    versions = [answer.version for answer in answers]
    # Servers may be a round apart where this worker starts again, while others train.
    is_mixed = max(versions) > 0 and len({answer.initialized for answer in answers}) > 1
    if floor.mode.lockstep and (is_mixed or max(versions) - min(versions) > 1):
        raise ServerLostError(
            "the servers are not at the same step: one was restarted without its state",
            got=", ".join(f"{c.endpoint} at {a.version}" for c, a in zip(clients, answers, strict=True)),
            todo="Start the whole job again, from its last checkpoint if there is one.",
        )
    if len({answer.about for answer in answers}) > 1:
        raise CheckpointError(
            "the servers do not start from the same checkpoint",
            got=", ".join(f"{c.endpoint} from {a.about or 'none'}" for c, a in zip(clients, answers, strict=True)),
            todo="Give every server the same directory, and let no other job save there meanwhile.",
        )
