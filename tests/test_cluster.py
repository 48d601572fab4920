import pytest

from fleet.base.cluster import Assignment, Endpoint, Role, parse_address
from fleet.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:6174", "127.0.0.1", 6174),
        (" ps0.example.com:80 ", "ps0.example.com", 80),
        ("localhost:0", "localhost", 0),
        ("a:65535", "a", 65535),
        ("[::1]:6174", "[::1]", 6174),
        ("[0:0:0:0:0:0:0:1]:6174", "[::1]", 6174),
        ("[FD00::0:1]:6174", "[fd00::1]", 6174),
        ("[fe80::1%eth0]:6174", "[fe80::1%eth0]", 6174),
    ],
)
def test_parse(text: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port) == (host, port)
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", ":1", "a:", "a:b", "a:-1", "a:+1", "a:65536", "a:1.0", "a: 1", "a:²", "a:" + "9" * 5000),
        *("a b:1", "a,b:1", "http://a:1", "::1:1", "[a]:1", "[::1:1", "[]:1", "[::g]:1"),
        *(".a:1", "a..b:1", "a" * 64 + ":1", "a\0b:1", "a\udcff:1"),
        *("user@a:1", "a?b:1", "a#b:1", "a%62:1", "a\\b:1"),
    ],
)
def test_malformed(text: str) -> None:
    with pytest.raises(ConfigurationError, match="malformed endpoint"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (" a ", "a", None),
        ("a:1", "a", 1),
        ("10.0.0.1", "10.0.0.1", None),
        ("fd00::0:1", "[fd00::1]", None),
        ("[fd00::1]", "[fd00::1]", None),
        ("[fd00::1]:7", "[fd00::1]", 7),
    ],
)
def test_an_address_with_or_without_a_port(text: str, host: str, port: int | None) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "a b", "a:", "fd00:::1", "[fd00::1]:x", "a:1:2"])
def test_no_address(text: str) -> None:
    with pytest.raises(ConfigurationError, match="malformed endpoint"):
        parse_address(text)


def test_equal_endpoints_are_one() -> None:
    assert len({Endpoint.parse("a:1"), Endpoint.parse(" a:01 ")}) == 1
    assert Endpoint.parse("a:2") < Endpoint.parse("a:10")


def test_assignment() -> None:
    servers = (Endpoint("a", 1), Endpoint("b", 2))
    server = Assignment(Role.SERVER, 1, 3, servers)
    assert (server.is_server, server.is_worker, server.server_num) == (True, False, 2)
    assert server.endpoint == servers[1]
    assert str(server) == "server 1"
    worker = Assignment(Role.WORKER, 0, 3, servers)
    assert (worker.is_server, worker.is_worker, worker.endpoint) == (False, True, None)


def test_a_worker_whose_address_is_unknown_has_none() -> None:
    master = Endpoint("a", 1)
    first, second = (Assignment(Role.WORKER, i, 2, workers=(master,), collective=True) for i in range(2))
    assert (first.endpoint, second.endpoint) == (master, None)


def test_role_numbers() -> None:
    assert (Role.WORKER.value, Role.SERVER.value) == (1, 2)
