"""Finds out which of a process's addresses the others reach, by trying and not by guessing from a host's name.

A host offers a port at every address it has; the offer goes to the guests by some other way (MPI, say). Every guest
visits all of these ports and leaves a card. When all guests have said that they are done, the host looks at its cards
and chooses the first address where everybody was. An address may belong to another machine as well (a container bridge
has the same one everywhere), so a card shows a token that nobody else knows.

The port of the chosen address stays bound, without listening, for as long as the ``Offer`` lives: the system gives it
to nobody meanwhile, and a server that listens with SO_REUSEADDR, as gRPC does, can take it over.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from collections.abc import Sequence

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint

#: What a guest gives an address that does not answer: a SYN that is lost is sent again after one second.
VISIT_S = 2.5
#: What a host gives cards that are still under way when all guests say that they have been there.
STRAGGLERS_S = 1.0

TOKEN_BYTES, RANK_BYTES = 16, 4

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
#: Connections tried at once: a process may have 1024 files open by default.
_AT_ONCE = 256


def own_addresses() -> list[str]:
    """Return this machine's addresses as far as they are easily found, loopback first."""
    found = [_LOOPBACK, *sorted(addresses_of(socket.gethostname()))]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing: it only asks which address such a packet would carry.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found.append(probe.getsockname()[0])
    return list(dict.fromkeys(found))


def addresses_of(host: str) -> set[str]:
    """Return what a host's name stands for; nothing if it is unknown."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


class Offer:
    """Holds the host's side: a port at each of ``addresses`` that can be bound."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._held: dict[Endpoint, socket.socket] = {}
        self._open: dict[Endpoint, socket.socket] = {}
        for address in addresses:
            with contextlib.suppress(OSError):  # a name may stand for an address that this machine does not have
                self._bind(address)

    def _bind(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        held = _reusable(family)
        held.bind((address, 0))
        port: int = held.getsockname()[1]
        listening = _reusable(family)
        try:
            listening.bind((address, port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except OSError:
            held.close()
            listening.close()
            raise
        endpoint = Endpoint(f"[{address}]" if family == socket.AF_INET6 else address, port)
        self._held[endpoint], self._open[endpoint] = held, listening

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._open)

    def choose(self, guests: set[int], clock: Clock) -> tuple[Endpoint | None, dict[Endpoint, set[int]]]:
        """Return the first endpoint where all guests have left their card, and which guests were where. The other ports
        are let go."""
        visitors: dict[Endpoint, set[int]] = {endpoint: set() for endpoint in self._open}
        doors = {listening.fileno(): (endpoint, listening) for endpoint, listening in self._open.items()}
        inside: dict[int, tuple[Endpoint, socket.socket]] = {}
        poller = select.poll()
        for number in doors:
            poller.register(number, select.POLLIN)
        until = clock.now() + STRAGGLERS_S
        while not any(guests <= seen for seen in visitors.values()) and clock.now() < until:
            for number, _ in poller.poll(max(0.0, until - clock.now()) * 1000):
                if number in doors:
                    endpoint, listening = doors[number]
                    with contextlib.suppress(OSError):  # hung up already
                        visitor, _address = listening.accept()
                        visitor.setblocking(False)
                        inside[visitor.fileno()] = endpoint, visitor
                        poller.register(visitor, select.POLLIN)
                else:
                    endpoint, visitor = inside.pop(number)
                    poller.unregister(number)
                    guest = self._read_card(visitor)
                    if guest is not None:
                        visitors[endpoint].add(guest)
        for _, visitor in inside.values():
            visitor.close()
        chosen = next((endpoint for endpoint, seen in visitors.items() if guests <= seen), None)
        for endpoint, listening in self._open.items():
            listening.close()
            if endpoint != chosen:
                self._held[endpoint].close()
        self._open.clear()
        return chosen, visitors

    def _read_card(self, visitor: socket.socket) -> int | None:
        """Return the guest's number, if the whole card is there, as it is at once when it was sent in one piece."""
        with visitor, contextlib.suppress(OSError):
            card = visitor.recv(TOKEN_BYTES + RANK_BYTES)
            if len(card) == TOKEN_BYTES + RANK_BYTES and card.startswith(self.token):
                return int.from_bytes(card[-RANK_BYTES:], "big")
        return None


def visit(offers: Sequence[tuple[Endpoint, bytes]], guest: int, clock: Clock) -> None:
    """Act the guest's side: leave a card wherever somebody answers, with the token that goes with the address."""
    for start in range(0, len(offers), _AT_ONCE):
        _visit_some(offers[start : start + _AT_ONCE], guest, clock)


def _visit_some(offers: Sequence[tuple[Endpoint, bytes]], guest: int, clock: Clock) -> None:
    poller = select.poll()
    trying: dict[int, tuple[socket.socket, bytes]] = {}
    try:
        for endpoint, token in offers:
            host = endpoint.host.strip("[]")
            try:
                caller = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            except OSError:  # this machine has no IPv6, say
                continue
            caller.setblocking(False)
            caller.connect_ex((host, endpoint.port))
            trying[caller.fileno()] = caller, token
            poller.register(caller, select.POLLOUT)
        until = clock.now() + VISIT_S
        while trying and clock.now() < until:
            for number, _ in poller.poll(max(0.0, until - clock.now()) * 1000):
                caller, token = trying.pop(number)
                poller.unregister(number)
                with caller, contextlib.suppress(OSError):  # refused, or no way there
                    caller.send(token + guest.to_bytes(RANK_BYTES, "big"))
    finally:
        for caller, _ in trying.values():
            caller.close()


def _reusable(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
