"""How ranks agree on who serves where: real sockets, and threads of this process in the place of MPI's ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from patience import PATIENCE_S

from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.base.ports import is_taken
from fleet.bootstrap.mpi_world import launcher_of, place_in
from fleet.bootstrap.rendezvous import Offer, own_addresses, visit
from fleet.errors import ConfigurationError
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.role_maker import MPISymetricRoleMaker, MPISymmetricRoleMaker, RoleMakerBase

CLOCK = SystemClock()


class Launch:
    """Ranks that are threads. ``run`` gives what ``body`` returned or raised on each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.cards: list[dict[str, Any]] = [{} for _ in range(size)]
        self.engaged: set[int] = set()

    def run(self, body: Callable[[ThreadRank], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = body(ThreadRank(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results


class ThreadRank:
    def __init__(self, launch: Launch, rank: int) -> None:
        self.launch = launch
        self.rank = rank
        self.size = launch.size

    def exchange(self, card: Mapping[str, Any], deadline_s: float, what: str) -> list[dict[str, Any]]:
        self.launch.cards[self.rank] = dict(card)
        self.launch.barrier.wait()
        cards = list(self.launch.cards)
        self.launch.barrier.wait()
        return cards

    def engage(self) -> None:
        self.launch.engaged.add(self.rank)

    def done(self) -> None:
        self.launch.engaged.remove(self.rank)


def assignments(size: int, is_collective: bool = False) -> list[Assignment]:
    def body(rank: ThreadRank) -> Assignment:
        return MPISymmetricRoleMaker(is_collective, {}, ranks=rank).assignment()

    return Launch(size).run(body)


def test_even_ranks_serve_and_odd_ranks_train() -> None:
    cluster = assignments(6)
    assert [(a.role, a.index) for a in cluster] == [
        *((Role.SERVER, 0), (Role.WORKER, 0), (Role.SERVER, 1)),
        *((Role.WORKER, 1), (Role.SERVER, 2), (Role.WORKER, 2)),
    ]
    assert {(a.worker_num, a.servers, a.collective) for a in cluster} == {(3, cluster[0].servers, False)}
    assert len(set(cluster[0].servers)) == 3
    assert {server.host for server in cluster[0].servers} == {"127.0.0.1"}, "all are on one machine"
    assert [a.origin for a in cluster[:2]] == ["MPI, rank 0 of 6", "MPI, rank 1 of 6"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collective_ranks_are_all_workers(size: int) -> None:
    cluster = assignments(size, is_collective=True)
    assert [(a.index, a.worker_num, a.local_rank, a.collective) for a in cluster] == [
        (rank, size, rank, True) for rank in range(size)
    ]
    assert {a.workers for a in cluster} == {cluster[0].workers}
    assert len(set(cluster[0].workers)) == size


@pytest.mark.parametrize("size", [1, 3, 5])
def test_ranks_that_are_no_pairs_are_refused_on_every_rank(size: int) -> None:
    for rank, error in enumerate(assignments(size)):
        assert isinstance(error, ConfigurationError)
        assert f"at rank {rank}" in str(error)
        assert f"got {size}" in str(error)
        assert "even" in str(error)


def test_ranks_that_disagree_on_the_kind_are_refused_on_every_rank() -> None:
    def body(rank: ThreadRank) -> Assignment:
        return MPISymmetricRoleMaker(rank.rank == 2, {}, ranks=rank).assignment()

    for error in Launch(4).run(body):
        assert isinstance(error, ConfigurationError)
        assert "is_collective=True on ranks [2], False on ranks [0, 1, 3]" in str(error)


def test_the_port_is_kept_until_the_server_listens() -> None:
    servers = assignments(2)
    endpoint = servers[0].servers[0]
    assert not is_taken(endpoint), "a server can take it"
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((endpoint.host, endpoint.port))  # whoever does not ask to reuse it cannot have it
    listener = GrpcNetwork(2).listen(endpoint, lambda frame, respond: None)
    assert is_taken(endpoint)
    listener.close()


def test_an_address_only_some_workers_reach_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bridge or a loopback that means another machine to another worker."""
    monkeypatch.setattr("fleet.role_maker.mpi.own_addresses", lambda: ["127.0.0.2", "127.0.0.3", "127.0.0.4"])

    def visit_but(offers: list[tuple[Endpoint, bytes]], guest: int, clock: SystemClock) -> None:
        visit([(e, token) for e, token in offers if (e.host, guest) != ("127.0.0.2", 3)], guest, clock)

    monkeypatch.setattr("fleet.role_maker.mpi.visit", visit_but)
    cluster = assignments(4)
    assert [server.host for server in cluster[0].servers] == ["127.0.0.3", "127.0.0.3"]


def test_no_address_that_all_workers_reach_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.role_maker.mpi.own_addresses", lambda: ["127.0.0.1", "192.0.2.7"])

    def visit_but(offers: list[tuple[Endpoint, bytes]], guest: int, clock: SystemClock) -> None:
        visit(offers if guest == 1 else [], guest, clock)

    monkeypatch.setattr("fleet.role_maker.mpi.visit", visit_but)
    for error in assignments(4):
        assert isinstance(error, ConfigurationError)
        assert "not every worker reaches rank 0" in str(error)
        assert "ranks [1, 3]" in str(error)
        assert "by ranks [1]" in str(error)
        assert "192.0.2.7" not in str(error), "an address of another machine cannot be offered"


def test_a_stranger_s_card_does_not_count() -> None:
    offer = Offer(["127.0.0.1"])
    (endpoint,) = offer.endpoints
    visit([(endpoint, b"x" * len(offer.token))], 0, CLOCK)
    with socket.create_connection((endpoint.host, endpoint.port)) as scanner:
        scanner.send(b"GET / HTTP/1.0\r\n\r\n")
    visit([(endpoint, offer.token)], 1, CLOCK)
    chosen, visitors = offer.choose({0, 1}, CLOCK)
    assert chosen is None
    assert visitors == {endpoint: {1}}


def test_a_stranger_who_says_nothing_holds_nobody_up() -> None:
    offer = Offer(["127.0.0.1"])
    (endpoint,) = offer.endpoints
    with socket.create_connection((endpoint.host, endpoint.port)):
        visit([(endpoint, offer.token)], 1, CLOCK)
        assert offer.choose({1}, CLOCK) == (endpoint, {endpoint: {1}})


def test_a_machine_without_ipv6_visits_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer(["127.0.0.1"])
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *rest)

    monkeypatch.setattr("fleet.bootstrap.rendezvous.socket.socket", without_ipv6)
    visit([(Endpoint("[2001:db8::1]", 9), b"token"), (offer.endpoints[0], offer.token)], 0, CLOCK)
    monkeypatch.undo()
    assert offer.choose({0}, CLOCK)[0] is not None


def test_a_rank_is_engaged_until_its_part_is_over() -> None:
    launch = Launch(2)
    cluster = launch.run(lambda rank: MPISymmetricRoleMaker(False, {}, ranks=rank).assignment())
    assert launch.engaged == {0, 1}
    network = LoopbackNetwork()

    def part(place: int) -> None:
        fleet = Fleet(environ={}, network=network)
        fleet.init(Known(cluster[place]))
        weight = torch.nn.Parameter(torch.zeros(1))
        fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
        else:
            fleet.init_worker()
            assert launch.engaged == {0, 1}
            fleet.stop_worker()

    threads = [threading.Thread(target=part, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert launch.engaged == set()


class Known(RoleMakerBase):
    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def assignment(self) -> Assignment:
        return self._assignment


def test_visits_to_nobody_end() -> None:
    with contextlib.closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        refused = Endpoint("127.0.0.1", silent.getsockname()[1])
        nowhere = Endpoint("[fe80::1]", 9)  # needs an interface, and has none
        visiting = threading.Thread(
            target=visit, args=([(refused, b"token"), (nowhere, b"token")], 0, CLOCK), daemon=True
        )
        visiting.start()
        visiting.join(PATIENCE_S)
        assert not visiting.is_alive()


def test_own_addresses_begin_with_loopback_and_name_none_twice() -> None:
    addresses = own_addresses()
    assert addresses[0] == "127.0.0.1"
    assert len(set(addresses)) == len(addresses)


def test_both_spellings() -> None:
    assert MPISymetricRoleMaker is MPISymmetricRoleMaker


def test_is_collective_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="is_collective"):
        MPISymmetricRoleMaker(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "launcher", "place"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=4", "MPI rank 1 of 4"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2", "MPI rank 0 of 2"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3", "MPI rank 3"),
        ({"PMI_SIZE": " "}, None, "MPI rank ?"),
        ({}, None, "MPI rank ?"),
    ],
)
def test_launchers_are_known_by_their_variables(environ: dict[str, str], launcher: str | None, place: str) -> None:
    assert launcher_of(environ) == launcher
    assert place_in(environ) == place
