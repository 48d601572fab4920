"""Finds out who holds a port: for the error that a user meets when starting a second job on the first one's ports."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fleet.base.cluster import Endpoint
from fleet.base.system_errors import reason


def is_taken(endpoint: Endpoint) -> bool:
    """Say whether somebody listens where we want to listen. An address that is not ours does not count as taken."""
    # An address or a family that this machine does not have is no port in use.
    return any(error.errno == errno.EADDRINUSE for error in _refusals(endpoint))


def why_not(endpoint: Endpoint) -> str:
    """Return the system's reason for which nobody can listen there; empty if it has none."""
    for error in _refusals(endpoint):
        hint = "; ports below 1024 are for those whom the system permits" if error.errno == errno.EACCES else ""
        return f"{reason(error)}{hint}"
    return ""


def _refusals(endpoint: Endpoint) -> Iterator[OSError]:
    """Try to listen at every address of an endpoint, and yield what the system says against it."""
    try:
        infos = socket.getaddrinfo(endpoint.host.strip("[]"), endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield error
        return
    for family, kind, proto, _, address in infos:
        try:
            with socket.socket(family, kind, proto) as probe:
                # As servers do: connections of a job that just ended (TIME_WAIT) do not hold its port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            yield error


def holder_of(port: int) -> str:
    """Return the process that listens on ``port``, as far as /proc tells."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                if _target(descriptor) in inodes:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    in_one_line = " ".join(command.split())  # which a script after -c is not
                    return f"held by process {process.name} ({in_one_line[:120]})"
        except OSError:
            continue
    return "held by another process"


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed since it was listed, as the listing's own is
        return ""


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            listening = fields[3] == "0A"
            if listening and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes
