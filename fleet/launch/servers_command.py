"""Runs ``fleet servers``: gives a running job more servers, or fewer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fleet.base.clock import SystemClock, Wait
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.errors import ConfigurationError, DeadlineError, NotInitializedError, ServerLostError, StateError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.transport import Channel, Network, TransportError
from fleet.ps.wire.wire_errors import raise_if_error

#: A server that does not answer for so long is not there.
_PATIENCE_S = 5.0
#: Between two looks at how the move stands.
_PAUSE_S = 0.1


def change_servers(
    asked: Sequence[Endpoint],
    action: str,
    changed: Sequence[Endpoint],
    timeout_s: float,
    network: Network | None = None,
) -> tuple[str, ...]:
    """Let a job have these servers as well, or no longer, and return all that it has when it has moved."""
    settings, clock = ProcessSettings.read(PROCESS_ENVIRONMENT), SystemClock()
    with ExitStack() as opened:
        job = _Job(network or real_network(replace(settings, direct_port=None)), opened)
        told = job.tell(asked)
        servers, names = told["servers"], [str(each) for each in changed]
        target = _target(action, servers, names)
        for name in [each for each in target if each not in servers]:
            job.check_there(name)
        job.ask(told["at"], pb.Rearrange(endpoints=target))
        wait = Wait(clock, timeout_s)
        while True:
            now = job.tell([told["at"], *map(Endpoint.parse, target), *asked])
            if now["servers"] == target:
                return tuple(target)
            if now["refusal"]:
                raise StateError("the job stays with its servers", where=", ".join(servers), got=now["refusal"])
            if not now["wanted"]:  # a server that has started again has not heard of it
                job.ask(now["at"], pb.Rearrange(endpoints=target))
            if wait.so_far_s > timeout_s:
                raise DeadlineError(
                    "the job has not moved yet",
                    where=", ".join(servers),
                    expected=f"{', '.join(target)} within {timeout_s:g} s",
                    got=", ".join(now["servers"]),
                    todo="It moves when its first worker ends a step: see fleet top whether it takes any.",
                )
            clock.sleep(_PAUSE_S)


def _target(action: str, servers: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the servers that a job is to have."""
    wrong = [name for name in names if (name in servers) is (action == "add")]
    if wrong or len({*names}) < len(names):
        raise ConfigurationError(
            f"servers that the job {'has' if action == 'add' else 'does not have'}, or one of them twice",
            where=f"fleet servers … {action}",
            expected=f"{'others than' if action == 'add' else 'some of'} {', '.join(servers)}",
            got=", ".join(wrong or names),
        )
    target = [*servers, *names] if action == "add" else [each for each in servers if each not in names]
    if not target:
        raise ConfigurationError("a job needs a server", got="remove all of them", todo="End its workers instead.")
    return target


class _Job:
    """Asks servers, which may go meanwhile."""

    def __init__(self, network: Network, opened: ExitStack) -> None:
        self._network = network
        self._opened = opened
        self._channels: dict[Endpoint, Channel] = {}

    def ask(self, endpoint: Endpoint, message: Any) -> dict[str, Any]:
        request = pb.Request(status=message) if isinstance(message, pb.Status) else pb.Request(rearrange=message)
        about: dict[str, Any] = json.loads(self._reply(endpoint, request).message.about)
        return about

    def _reply(self, endpoint: Endpoint, request: Any) -> Frame:
        if endpoint not in self._channels:
            channel = self._channels[endpoint] = self._network.connect(endpoint)
            self._opened.callback(channel.close)
        return raise_if_error(self._channels[endpoint].start(Frame(request), _PATIENCE_S).result())

    def tell(self, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
        """Return what the first that answers tells of its job, and which one that is."""
        reasons = []
        for endpoint in dict.fromkeys(endpoints):
            try:
                return {"at": endpoint, **self.ask(endpoint, pb.Rearrange())}
            except (TransportError, NotInitializedError) as error:
                reasons.append(f"{endpoint}: {error}")
        raise ServerLostError(
            "no server of the job answers",
            got="; ".join(reasons),
            todo="Name a server of a job that runs: it may have ended.",
        )

    def check_there(self, name: str) -> None:
        try:
            self.ask(Endpoint.parse(name), pb.Status())
        except TransportError as error:
            raise ServerLostError(
                "a server that is to be added does not answer",
                where=name,
                got=str(error),
                todo=f"Start it first: fleet server --endpoint {name}",
            ) from None
