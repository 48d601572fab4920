"""Where a server listens and where others reach it: two addresses, IPv6, names that lead nowhere, and health checks."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from harness import Job, until

from fleet import Fleet
from fleet.base import exposure, ports
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import AuthenticationError, ConfigurationError, PortInUseError, UnsupportedError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.health import Health
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.transport import Listener, Respond
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.role_maker import Role, UserDefinedRoleMaker

Environ = Mapping[str, str]
TOKEN = {"FLEET_AUTH_TOKEN": "t"}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _has_ipv6() -> bool:
    try:
        return bool(free_port("::1"))
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    """Starts the server of an endpoint, which answers a request with its step."""

    def echo(frame: Frame, respond: Respond) -> None:
        respond(Frame(pb.Reply(version=frame.message.step)))

    with ExitStack() as stack:

        def start(endpoint: Endpoint, environ: Environ) -> Listener:
            listener = real_network(ProcessSettings.read(environ)).listen(endpoint, echo)
            stack.callback(listener.close)
            return listener

        yield start


def asked(endpoint: Endpoint, environ: Environ) -> int:
    """What a worker is answered: the step it asked for."""
    channel = real_network(ProcessSettings.read(environ)).connect(endpoint)
    try:
        reply = raise_if_error(channel.start(Frame(pb.Request(step=7, pull=pb.Pull())), 10.0).result())
        return int(reply.message.version)
    finally:
        channel.close()


# ---------------------------------------------------------------------------------------------- bound and public


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", "ps0:6174"),
        (" 10.0.0.1 ", "10.0.0.1:6174"),
        ("10.0.0.1:7", "10.0.0.1:7"),
        ("fd00::0:1", "[fd00::1]:6174"),
        ("[::]:7", "[::]:7"),
    ],
)
def test_where_a_server_listens(text: str, at: str) -> None:
    assert str(ProcessSettings.read({"FLEET_BIND_ADDRESS": text}).binding.of(Endpoint("ps0", 6174))) == at


@pytest.mark.parametrize("text", ["a b", "10.0.0.1:0", "10.0.0.1:x", "1:2:3", ":7"])
def test_what_is_no_place_to_listen(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"FLEET_BIND_ADDRESS is not usable; expected an address of this"):
        ProcessSettings.read({"FLEET_BIND_ADDRESS": text})


@pytest.mark.parametrize("direct", ["", "off"])
def test_a_server_is_reached_where_it_does_not_listen_itself(listen: Callable[..., Listener], direct: str) -> None:
    """As behind a forwarded port: others know one address, the machine has another."""
    public, bound = Endpoint("server.example.com", 6174), Endpoint("127.0.0.2", free_port("127.0.0.2"))
    environ = {"FLEET_BIND_ADDRESS": str(bound), "FLEET_DIRECT_PORT": direct}
    listen(public, environ)
    assert asked(bound, {}) == 7
    with pytest.raises(PortInUseError, match=f"port {bound.port} is in use; at {bound}"):
        listen(public, environ)


def test_a_refusal_names_the_address_that_the_worker_knows(listen: Callable[..., Listener]) -> None:
    port = free_port()
    listen(Endpoint("server.example.com", 6174), {"FLEET_BIND_ADDRESS": f"127.0.0.1:{port}", **TOKEN})
    with pytest.raises(AuthenticationError, match=r"at the server at server\.example\.com:6174"):
        asked(Endpoint("127.0.0.1", port), {})


@needs_ipv6
def test_all_addresses_take_a_token_and_then_serve_both_kinds(listen: Callable[..., Listener]) -> None:
    port = free_port()
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigurationError, match="would let anybody in"):
            listen(Endpoint("127.0.0.1", port), {"FLEET_BIND_ADDRESS": everywhere})
    listen(Endpoint("127.0.0.1", port), {"FLEET_BIND_ADDRESS": "::", "FLEET_DIRECT_PORT": "0", **TOKEN})
    for address in ("127.0.0.1", "[::1]"):
        assert asked(Endpoint(address, port), TOKEN) == 7


def test_a_name_for_loopback_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        known = {"node1": ["127.0.1.1"], "node2": ["127.0.1.1", "10.0.0.2"], "localhost": ["127.0.0.1", "::1"]}
        return [(0, 0, 0, "", (address, port)) for address in known.get(host, [host])]

    monkeypatch.setattr(exposure.socket, "getaddrinfo", resolve)
    with caplog.at_level(logging.WARNING, "fleet.wire"):
        for host in ("node2", "localhost", "127.0.0.1", "[::1]", "10.0.0.1"):
            exposure.warn_if_only_here(Endpoint(host, 1))
        assert caplog.messages == []
        exposure.warn_if_only_here(Endpoint("node1", 1))
    assert caplog.messages == [
        "node1 is 127.0.1.1 on this machine, where no other machine reaches it: "
        "set FLEET_BIND_ADDRESS to an address that they reach"
    ]


# ---------------------------------------------------------------------------------------------- IPv6


def _link_local() -> str | None:
    """An address that means something together with an interface only."""
    for _, interface in socket.if_nameindex():
        for line in Path("/proc/net/if_inet6").read_text().splitlines() if _has_ipv6() else ():
            digits, *_, name = line.split()
            if digits.startswith("fe80") and name == interface:
                return f"[{ipaddress.IPv6Address(int(digits, 16))}%{interface}]"
    return None


@pytest.mark.skipif(_link_local() is None, reason="this machine has no link-local address")
@pytest.mark.parametrize("direct", ["", "off"])
def test_an_address_of_one_link(listen: Callable[..., Listener], direct: str) -> None:
    host = _link_local()
    assert host is not None
    endpoint = Endpoint.parse(f"{host}:{free_port()}")
    listen(endpoint, {"FLEET_DIRECT_PORT": direct})
    assert asked(endpoint, {}) == 7


def test_a_way_to_any_of_a_hosts_addresses_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first one may be of a kind that this machine does not have, or on a network that it does not reach."""

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            if self.family is socket.AF_INET6:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.9", 7

    found: list[tuple[object, ...]] = [
        (family, socket.SOCK_DGRAM, 0, "", (host, 1))
        for family, host in ((socket.AF_INET6, "2001:db8::1"), (12345, "?"), (socket.AF_INET, "10.0.0.1"))
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Probe)
    network, towards = real_network(ProcessSettings.read({})), Endpoint("server.example.com", 1)
    assert network.own_address(towards) == "10.0.0.9"
    del found[2]
    assert network.own_address(towards) == "127.0.0.1"


@needs_ipv6
def test_a_whole_job_over_ipv6(tmp_path: Path) -> None:
    """Its endpoints are spelt differently by workers and servers, and written into a checkpoint."""
    ports = [free_port("::1") for _ in range(2)]

    class Spelt(Job):
        def fleet(self, role: Role, index: int) -> Fleet:
            loopback = "[::1]" if role is Role.SERVER else "[0:0:0:0:0:0:0:1]"
            fleet = Fleet(environ=self.environ, network=self.network)
            fleet.init(UserDefinedRoleMaker(index, role, self.workers, [f"{loopback}:{port}" for port in ports]))
            return fleet

    def body(fleet: Fleet, index: int) -> float:
        assert fleet.server_endpoints() == [f"[::1]:{port}" for port in ports]
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        optimizer.minimize(weight.sum())
        fleet.save_persistables(tmp_path / "ckpt")
        optimizer.minimize(weight.sum())
        fleet.load_persistables(tmp_path / "ckpt")
        return weight[0].item()

    network = real_network(ProcessSettings.read({}))
    assert Spelt(body, workers=2, servers=2, network=network).run() == [-1.0, -1.0]


# ---------------------------------------------------------------------------------------------- health


def health_of(port: int, *, service: str = "", method: str = "Check") -> str:
    """What the kubelet is told: it has neither token nor certificate."""
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2", reason="the extra 'health'")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary(
            f"/grpc.health.v1.Health/{method}",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = ask(health_pb2.HealthCheckRequest(service=service), timeout=10, wait_for_ready=False)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_a_server_tells_whoever_asks_that_it_is_ready(listen: Callable[..., Listener]) -> None:
    pytest.importorskip("grpc_health", reason="the extra 'health'")
    server, health = free_port(), free_port()
    listener = listen(Endpoint("127.0.0.1", server), {"FLEET_HEALTH_PORT": str(health), **TOKEN})
    assert health_of(health) == "SERVING"
    assert health_of(health, service="other") == "NOT_FOUND"
    assert health_of(health, method="Watch") == "UNIMPLEMENTED"
    assert asked(Endpoint("127.0.0.1", server), TOKEN) == 7
    listener.close()
    until(lambda: health_of(health) == "UNAVAILABLE")


def test_a_health_port_that_cannot_be_had(listen: Callable[..., Listener]) -> None:
    pytest.importorskip("grpc_health", reason="the extra 'health'")
    first, second, health = free_port(), free_port(), free_port()
    listen(Endpoint("127.0.0.1", first), {"FLEET_HEALTH_PORT": str(health)})
    with pytest.raises(PortInUseError, match=rf"port {health} is in use; at 127.0.0.1:{health}, for health checks"):
        listen(Endpoint("127.0.0.1", second), {"FLEET_HEALTH_PORT": str(health)})
    with pytest.raises(PortInUseError, match=f"port {first} is in use"):
        listen(Endpoint("127.0.0.1", first), {"FLEET_HEALTH_PORT": str(second)})
    for port in ("0", "x", "65536", "-1"):
        with pytest.raises(ConfigurationError, match="FLEET_HEALTH_PORT is not usable; expected a port from 1"):
            ProcessSettings.read({"FLEET_HEALTH_PORT": port})


def test_why_nobody_can_listen_there_is_told(listen: Callable[..., Listener]) -> None:
    """The system says it, and gRPC does not."""
    pytest.importorskip("grpc_health", reason="the extra 'health'")
    elsewhere, reason = Endpoint("203.0.113.1", free_port()), r"got Cannot assign requested address \(EADDRNOTAVAIL\)"
    with pytest.raises(ConfigurationError, match=f"cannot listen here; at {elsewhere}; {reason}"):
        listen(elsewhere, {"FLEET_INSECURE": "1", "FLEET_DIRECT_PORT": "off"})
    with pytest.raises(ConfigurationError, match=f"cannot take health checks here; at {elsewhere}; {reason}"):
        Health(elsewhere)


def test_a_port_that_the_system_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Denied(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(ports.socket, "socket", Denied)
        told = ports.why_not(Endpoint("127.0.0.1", 80))
    assert told == "Permission denied (EACCES); ports below 1024 are for those whom the system permits"
    assert ports.why_not(Endpoint("127.0.0.1", free_port())) == ""


def test_health_without_its_package(listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'torch-fleet\[health\]'"):
        listen(Endpoint("127.0.0.1", free_port()), {"FLEET_HEALTH_PORT": str(free_port())})
