"""Finds a job for those who look at it from outside: at its servers while it runs, or in the records it has left."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fleet.base.clock import wall_time
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.errors import ConfigurationError, DeadlineError, FleetError
from fleet.telemetry.cause import Cause, claimed
from fleet.telemetry.record import EVENT, is_over, newest, read_records, training_of, view_of
from fleet.telemetry.view import View, seen, server_name

if TYPE_CHECKING:
    from fleet.ps.wire.transport import Network

#: A server that says nothing for so long is not waited for.
PATIENCE_S = 3.0


class Source(Protocol):
    def look(self) -> View: ...

    def whole(self) -> tuple[View, View, View] | None:
        """Return views of the beginning and the end of the job's training, and of its own end, if it is over."""
        ...

    def ending(self) -> Cause | None:
        """Return who has ended the job, where that is known."""
        ...

    def close(self) -> None: ...


def source_of(target: str) -> Source:
    """Return the source that ``host:port,host:port`` or the name of a directory means."""
    if not target.strip():
        raise ConfigurationError("nothing to look at", expected="host:port of every server, or a log directory")
    if os.path.isdir(target):  # which is False, and no error, of a list too long for the name of a file
        return Recorded(Path(target))
    try:
        endpoints = [Endpoint.parse(text) for text in target.split(",")]
    except FleetError:
        raise ConfigurationError(
            "this is neither servers nor a directory",
            expected="host:port,host:port of a job's servers, or the log directory of a job",
            got=repr(target),
        ) from None
    return Running(endpoints)


class Running:
    """Looks at a job whose servers answer. Asking changes nothing there, and takes the job's token or certificates."""

    def __init__(self, endpoints: Sequence[Endpoint], network: Network | None = None) -> None:
        from fleet.ps.wire.real_network import real_network  # loads torch and grpc

        # Everything that is said here is small: no direct connections.
        settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
        self._network = network or real_network(replace(settings, direct_port=None))
        self._channels = {endpoint: self._network.connect(endpoint) for endpoint in dict.fromkeys(endpoints)}
        self._answered = False

    def look(self) -> View:
        known = {*self._channels}
        statuses = self._ask()
        return seen(wall_time(), statuses if known >= self._channels.keys() else self._ask(), {})

    def _ask(self) -> dict[str, Mapping[str, Any] | str]:
        from fleet.ps.wire import fleet_pb2 as pb
        from fleet.ps.wire.frame import Frame
        from fleet.ps.wire.transport import TransportError
        from fleet.ps.wire.wire_errors import raise_if_error

        calls = {
            endpoint: channel.start(Frame(pb.Request(status=pb.Status())), PATIENCE_S)
            for endpoint, channel in self._channels.items()
        }
        statuses: dict[str, Mapping[str, Any] | str] = {}
        silent: dict[Endpoint, str] = {}
        since: set[str] = set()
        for endpoint, call in calls.items():
            try:
                status = json.loads(raise_if_error(call.result()).message.about)
                statuses[server_name(status)] = status
                since.update(status.get("moved_to", ()))
                self._go_along([*status.get("wanted", ()), *status.get("moved_to", ())])
            except TransportError as error:
                silent[endpoint] = str(error)
        if not self._answered and not statuses:
            raise DeadlineError(
                "no server answers",
                got="; ".join(f"{endpoint}: {error}" for endpoint, error in silent.items()),
                todo="Give the endpoints of the servers of a job that runs.",
            )
        self._answered = True
        for endpoint in silent:
            if since and str(endpoint) not in since:  # the job has left it
                self._channels.pop(endpoint).close()
            else:
                statuses[f"server {endpoint}"] = "does not answer"
        return statuses

    def _go_along(self, servers: Sequence[str]) -> None:
        """Look at the servers that a job moves to as well."""
        for endpoint in map(Endpoint.parse, servers):
            if endpoint not in self._channels:
                self._channels[endpoint] = self._network.connect(endpoint)

    def whole(self) -> None:
        return None

    def ending(self) -> None:
        return None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


class Recorded:
    """Looks at a job that keeps records in a directory of this machine, as under ``fleetrun``; it may be over."""

    def __init__(self, directory: Path, processes: Sequence[str] | None = None) -> None:
        """``processes`` are those to look at; None means all."""
        self._directory = directory
        self._processes = processes

    def look(self) -> View:
        lines = newest(self._directory, self._processes)
        if not lines and self._processes is None:
            raise ConfigurationError(
                "no job has left a record in this directory",
                where=str(self._directory),
                todo="Give the directory that fleetrun logs into, or that FLEET_RECORD_DIR names.",
            )
        return view_of(wall_time(), lines)

    def whole(self) -> tuple[View, View, View] | None:
        view = self.look()
        if self.ending() is None and not is_over(newest(self._directory, self._processes), view.at):
            return None
        return training_of(read_records(self._directory))

    def ending(self) -> Cause | None:
        # Where no launcher has put away what earlier jobs have left, it may be one of theirs.
        is_launched = any(line.kind == EVENT for line in newest(self._directory))
        return claimed(self._directory) if is_launched else None

    def close(self) -> None:
        """Do nothing: nothing is kept open."""
