"""Decides where a server may listen: if nothing keeps strangers out, only where no stranger is expected."""

from __future__ import annotations

import ipaddress
import logging
import socket

from fleet.base.cluster import Endpoint
from fleet.errors import ConfigurationError

_log = logging.getLogger("fleet.wire")

#: This machine, networks of one owner (RFC 1918, RFC 4193), of one link, and behind a carrier's NAT (RFC 6598). What
#: ``ipaddress`` calls private is more than that, 0.0.0.0 included.
_PRIVATE = [
    ipaddress.ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
]


def is_private(address: str) -> bool:
    """Say whether an IP address is loopback or private; one that stands for all of a machine's addresses is neither."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in _PRIVATE if network.version == ip.version)


def public_addresses(endpoint: Endpoint) -> list[str]:
    """Return those of the host's addresses that strangers may reach; none where the name is unknown."""
    return sorted(address for address in _addresses(endpoint) if not is_private(address))


def _addresses(endpoint: Endpoint) -> set[str]:
    try:
        found = socket.getaddrinfo(endpoint.host.strip("[]"), endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(info[4][0]) for info in found}


def warn_if_only_here(endpoint: Endpoint) -> None:
    """Warn of a host's name that stands for 127.0.1.1, as on some systems: a server there waits for workers in vain."""
    addresses = _addresses(endpoint)
    host = endpoint.host.strip("[]")
    meant = host == "localhost" or host in addresses
    if addresses and not meant and all(ipaddress.ip_address(each).is_loopback for each in addresses):
        _log.warning(
            "%s is %s on this machine, where no other machine reaches it: "
            "set FLEET_BIND_ADDRESS to an address that they reach",
            host,
            ", ".join(sorted(addresses)),
        )


def refuse_public(endpoint: Endpoint) -> None:
    """Refuse an endpoint that strangers may reach, for a server that lets everybody in."""
    public = public_addresses(endpoint)
    if public:
        raise ConfigurationError(
            "this server would let anybody in, and its address is not a private one",
            where=str(endpoint),
            expected="a loopback or private address, a token, or certificates of clients",
            got=", ".join(public),
            todo="Set FLEET_AUTH_TOKEN, or FLEET_TLS_CERT, FLEET_TLS_KEY and FLEET_TLS_CA, or give the server a "
            "private address. FLEET_INSECURE=1 lets it listen all the same.",
        )
