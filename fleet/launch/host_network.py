"""Looks at this machine on the network: which ports are free, and which of a job's hosts it is."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable

from fleet.base.cluster import Endpoint
from fleet.base.ports import holder_of, is_taken
from fleet.base.system_errors import reason
from fleet.bootstrap.rendezvous import addresses_of, own_addresses
from fleet.errors import ConfigurationError, PortInUseError

LOOPBACK = "127.0.0.1"


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """Return ``count`` different ports that nobody listens on, none of ``besides``.

    All are held until the last one is chosen, or the kernel might give one twice. They stay free until the servers
    take them: Linux serves ``bind`` and ``connect`` from different halves of the range while both have room.
    """
    with contextlib.ExitStack() as held:
        found: list[int] = []
        try:
            while len(found) < count:
                each = held.enter_context(socket.socket())
                each.bind((LOOPBACK, 0))
                port = each.getsockname()[1]
                found += [port] if port not in besides else []
        except OSError as error:
            raise ConfigurationError(
                f"no {count} free ports are to be had", got=reason(error), todo="Start fewer processes on this machine."
            ) from None
        return found


def hold_port(host: str) -> socket.socket:
    """Return a socket that keeps a free port of this machine from others until it is closed."""
    held = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
    held.bind((host.strip("[]"), 0))
    return held


def consecutive_ports(start: int, count: int) -> list[int]:
    """Return ``start`` and the ports after it; refuse them if one is busy."""
    most = 65536 - count
    if not 1 <= start <= most:
        raise ConfigurationError(
            f"--start_port leaves no room for the ports of {count} processes",
            expected=f"1 to {most}" if most > 0 else "fewer processes than there are ports",
            got=start,
        )
    ports = list(range(start, start + count))
    for port in ports:
        check_free(Endpoint(LOOPBACK, port))
    return ports


def check_free(endpoint: Endpoint) -> None:
    """Refuse an endpoint another process listens on; one that cannot be tried here is left to the server."""
    if is_taken(endpoint):
        raise PortInUseError(
            f"port {endpoint.port} is busy, {holder_of(endpoint.port)}",
            where=str(endpoint),
            todo="End that process or choose another port.",
        )


def hosts_here(hosts: Iterable[str], node_ip: str | None) -> frozenset[str]:
    """Return those of ``hosts`` that are this machine; with ``node_ip``, those that are the machine of that name.

    A host is here if a socket can be bound to it. That asks the kernel, which knows, and holds for every interface,
    alias and loopback name.
    """
    unique = list(dict.fromkeys(hosts))
    if node_ip is None:
        here = frozenset(host for host in unique if any(map(_bindable, addresses_of(host))))
        described = f"this machine is {', '.join(machine_names())}"
    else:
        wanted = {node_ip, *addresses_of(node_ip)}
        here = frozenset(host for host in unique if host in wanted or wanted & addresses_of(host))
        described = f"--node_ip is {node_ip}"
    if not here:
        unknown = [host for host in unique if not addresses_of(host)]
        raise ConfigurationError(
            "nothing in --servers and --workers is on this machine",
            expected=f"one of {', '.join(unique)}" + (f" ({', '.join(unknown)}: unknown names)" if unknown else ""),
            got=described,
            todo="Correct the lists, or say which of these hosts this is with --node_ip.",
        )
    return here


def machine_names() -> list[str]:
    """Return the names and addresses of this machine, as far as they are easily found."""
    loopback, *others = own_addresses()
    return list(dict.fromkeys([socket.gethostname(), *others, loopback]))


def _bindable(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
