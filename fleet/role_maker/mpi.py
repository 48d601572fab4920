"""Makes a cluster of an MPI launcher's ranks: even ones serve, odd ones train, or all are workers of a collective job.

Where a server listens is agreed, not guessed: each offers a free port at every address it has, the workers try them,
and the first one that all of them have reached is the server's endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from fleet.base import checks
from fleet.base.clock import Clock, SystemClock
from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.bootstrap.mpi_world import world
from fleet.bootstrap.rendezvous import Offer, own_addresses, visit
from fleet.errors import ConfigurationError
from fleet.role_maker.base import RoleMakerBase, collective

Cards = list[dict[str, Any]]


class Ranks(Protocol):
    """Reaches the processes of one launch, which exchange messages through it."""

    rank: int
    size: int

    def exchange(self, card: Mapping[str, Any], deadline_s: float, what: str) -> Cards:
        """Give every rank this one's card, and return theirs, by rank."""
        ...

    def engage(self) -> None:
        """Note that this rank takes part in a job from now on."""
        ...

    def done(self) -> None:
        """Note that this rank's part of the job has come to its end."""
        ...


class MPISymmetricRoleMaker(RoleMakerBase):
    """Describes one of the processes that ``mpirun`` started. Every rank has to make one, since they agree together:
    ranks 0, 1, 2, 3, … become server 0, worker 0, server 1, worker 1, …; with ``is_collective`` all are workers.

    Examples:
        >>> from types import SimpleNamespace
        >>> from fleet.role_maker import MPISymmetricRoleMaker
        >>> MPISymmetricRoleMaker(ranks=SimpleNamespace(rank=0, size=3))  # what mpirun -n 3 comes to
        Traceback (most recent call last):
            ...
        fleet.errors.ConfigurationError: a parameter-server job under MPI needs pairs of ranks: ...
    """

    def __init__(
        self,
        is_collective: bool = False,
        environ: Mapping[str, str] = PROCESS_ENVIRONMENT,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        checks.switch("is_collective", is_collective)
        deadline_s = ProcessSettings.read(environ).startup_deadline_s
        clock = SystemClock()
        present = world(environ, clock, deadline_s) if ranks is None else ranks
        if not is_collective and (present.size < 2 or present.size % 2):
            raise ConfigurationError(
                "a parameter-server job under MPI needs pairs of ranks: the even ones serve, the odd ones train",
                where=f"rank {present.rank}",
                expected="an even number of ranks, 2 or more",
                got=f"{present.size}",
                todo="mpirun -n 2, -n 4, …; or fleet.init(is_collective=True), where every rank is a worker.",
            )
        self._assignment = _agree(present, is_collective, clock, deadline_s)

    def assignment(self) -> Assignment:
        return self._assignment


#: As the source documents spell it.
MPISymetricRoleMaker = MPISymmetricRoleMaker


def _agree(ranks: Ranks, is_collective: bool, clock: Clock, deadline_s: float) -> Assignment:
    def is_host(rank: int) -> bool:
        return is_collective or rank % 2 == 0

    guests = {rank for rank in range(ranks.size) if is_collective or rank % 2}
    offer = Offer(own_addresses()) if is_host(ranks.rank) else None
    card: dict[str, Any] = {"collective": is_collective}
    if offer is not None:
        card |= {"token": offer.token.hex(), "offers": [str(endpoint) for endpoint in offer.endpoints]}
    cards = ranks.exchange(card, deadline_s, "the kind of job and the addresses")
    _refuse_discord(cards)
    if ranks.rank in guests:
        hosts = [card for rank, card in enumerate(cards) if is_host(rank)]
        offers = [(Endpoint.parse(text), bytes.fromhex(host["token"])) for host in hosts for text in host["offers"]]
        visit(offers, ranks.rank, clock)
    ranks.exchange({}, deadline_s, "having tried the addresses")
    found: dict[str, Any] = {}
    if offer is not None:
        chosen, visitors = offer.choose(guests, clock)
        found = {
            "endpoint": None if chosen is None else str(chosen),
            "seen": "; ".join(f"{endpoint} by ranks {sorted(seen)}" for endpoint, seen in visitors.items()),
        }
    results = ranks.exchange(found, deadline_s, "the addresses agreed on")
    settled = {rank: result for rank, result in enumerate(results) if is_host(rank)}
    for rank, result in settled.items():
        if result["endpoint"] is None:
            raise ConfigurationError(
                f"not every worker reaches rank {rank}",
                expected=f"one address that ranks {sorted(guests)} connect to",
                got=result["seen"][:1000] or "no address that can be bound",
                todo="Look at host names and firewalls, or say who is who with PADDLE_* variables instead.",
            )
    endpoints = tuple(Endpoint.parse(result["endpoint"]) for result in settled.values())
    origin = f"MPI, rank {ranks.rank} of {ranks.size}"
    if is_collective:
        return replace(collective(endpoints, ranks.rank, origin), held=offer)
    role = Role.SERVER if is_host(ranks.rank) else Role.WORKER
    ranks.engage()
    return Assignment(
        role, ranks.rank // 2, ranks.size // 2, endpoints, origin=origin, held=offer, when_done=ranks.done
    )


def _refuse_discord(cards: Cards) -> None:
    kinds = {kind: [rank for rank, card in enumerate(cards) if card["collective"] is kind] for kind in (True, False)}
    if all(kinds.values()):
        raise ConfigurationError(
            "the ranks do not ask for one kind of job",
            expected="the same is_collective on every rank",
            got=f"is_collective=True on ranks {kinds[True]}, False on ranks {kinds[False]}",
        )
