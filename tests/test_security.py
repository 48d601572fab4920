"""Who is let in: tokens, certificates, and where a server may listen that has neither. Real sockets throughout."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import torch
import trustme
from harness import PATIENT, Job, run_job, values
from prepared import Prepared
from test_processes import ended

from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.exposure import is_private, public_addresses
from fleet.base.settings import ProcessSettings, SecuritySettings
from fleet.errors import AuthenticationError, ConfigurationError, DeadlineError, FleetError, UnsupportedError
from fleet.ps.wire import direct_client
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire import security as security_module
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.grpc_client import EXCHANGE, TOKEN, UPLOAD, URGENT
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls_line import TlsLine
from fleet.ps.wire.transport import Respond, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.role_maker import Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from fleet.strategy.parameter_server import Strategy, StrategyFactory

ROOT = Path(__file__).parent.parent
SECRET = "correct-horse-battery-staple"
Environ = Mapping[str, str]


class Files:
    """Certificates and keys of two authorities, one of which nobody should trust."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities = {name: trustme.CA() for name in ("ours", "theirs")}
        self.ca = {name: self._write(f"{name}.pem", ca.cert_pem.bytes()) for name, ca in self._authorities.items()}

    def issued(self, name: str, *, by: str = "ours", year: int | None = None) -> dict[str, str]:
        """The variables that show a certificate for ``name``; one of a ``year`` that is over."""
        dates = {"not_after": datetime.datetime(year, 12, 31)} if year else {}
        dates |= {"not_before": datetime.datetime(year, 1, 1)} if year else {}
        made = self._authorities[by].issue_cert(name, **dates)
        stem = f"{name}-{by}-{year}"
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        return {
            "FLEET_TLS_CERT": self._write(f"{stem}.pem", chain),
            "FLEET_TLS_KEY": self._write(f"{stem}.key", made.private_key_pem.bytes()),
        }

    def trusting(self, authority: str = "ours") -> dict[str, str]:
        return {"FLEET_TLS_CA": self.ca[authority]}

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def endpoint(free_endpoints: Callable[[int], list[str]]) -> Endpoint:
    return Endpoint.parse(free_endpoints(1)[0])


@pytest.fixture
def listen(endpoint: Endpoint) -> Iterator[Callable[..., None]]:
    """Starts the server of ``endpoint``, which answers a request with its step."""
    made = []

    def start(environ: Environ) -> None:
        made.append(real_network(ProcessSettings.read(environ)).listen(endpoint, _echo))

    yield start
    for listener in made:
        listener.close()


def _echo(frame: Frame, respond: Respond) -> None:
    respond(Frame(pb.Reply(version=frame.message.step)))


def asked(endpoint: Endpoint, environ: Environ) -> int:
    """What a worker is answered: the step it asked for, unless it is turned away."""
    channel = real_network(ProcessSettings.read(environ)).connect(endpoint)
    try:
        reply = raise_if_error(channel.start(Frame(pb.Request(step=7, pull=pb.Pull())), 10.0).result())
        return int(reply.message.version)
    finally:
        channel.close()


# ---------------------------------------------------------------------------------------------- whole jobs


class Secured(Job):
    """A job over real sockets, whose servers and workers have environments of their own."""

    def __init__(self, body: Any, servers: Environ, workers: Environ, endpoints: list[str]) -> None:
        super().__init__(body, workers=2, endpoints=endpoints)
        self._environs = {Role.SERVER: {**PATIENT, **servers}, Role.WORKER: {**PATIENT, **workers}}

    def fleet(self, role: Role, index: int) -> Fleet:
        fleet = Fleet(environ=self._environs[role])
        fleet.init(UserDefinedRoleMaker(index, role, self.workers, self.endpoints))
        return fleet


torch.manual_seed(3)
TEMPLATE = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 1))


def train(fleet: Fleet, index: int, strategy: Strategy | None = None) -> list[torch.Tensor]:
    model = copy.deepcopy(TEMPLATE)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), strategy, model=model)
    fleet.init_worker()
    for step in range(4):
        ids = (torch.arange(6).reshape(3, 2) * (index + 2) + step) % 20
        optimizer.minimize(model(ids).square().mean())
    return values(model)


@pytest.fixture(scope="module")
def unprotected() -> list[list[torch.Tensor]]:
    """What the same job comes to without sockets."""
    return run_job(train, 2, 2)


def _kinds(files: Files) -> dict[str, tuple[Environ, Environ]]:
    server, worker = files.issued("127.0.0.1"), files.issued("worker")
    token = {"FLEET_AUTH_TOKEN": SECRET}
    return {
        "nothing": ({}, {}),
        "token": (token, token),
        "token, gRPC alone": ({**token, "FLEET_DIRECT_PORT": "off"}, token),
        "tls": (server, files.trusting()),
        "mutual": ({**server, **files.trusting()}, {**worker, **files.trusting()}),
        "all": ({**server, **files.trusting(), **token}, {**worker, **files.trusting(), **token}),
    }


@pytest.mark.parametrize("kind", ["nothing", "token", "token, gRPC alone", "tls", "mutual", "all"])
@pytest.mark.pairs(4)
def test_a_job_ends_where_it_ends_unprotected(
    kind: str,
    files: Files,
    unprotected: list[list[torch.Tensor]],
    free_endpoints: Callable[[int], list[str]],
) -> None:
    got = Secured(train, *_kinds(files)[kind], free_endpoints(2)).run()
    for ours, theirs in zip(got, unprotected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["tls", "mutual"])
def test_steps_between_machines_go_over_direct_connections_under_tls(
    kind: str,
    files: Files,
    unprotected: list[list[torch.Tensor]],
    free_endpoints: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, port = free_endpoints(2)
    servers, workers = _kinds(files)[kind]
    sealed: list[int] = []

    class Counted(TlsLine):
        def sealed(self, plain: Any) -> Any:
            sealed.append(sum(map(len, plain)))
            return super().sealed(plain)

    monkeypatch.setattr(direct_client, "TlsLine", Counted)
    monkeypatch.setattr(direct_client, "reach", lambda _, at, s: socket.create_connection(("127.0.0.1", at.port), s))
    servers = {**servers, "FLEET_DIRECT_PORT": port.rpartition(":")[2]}
    got = Secured(train, servers, workers, [endpoint]).run()
    for ours, theirs in zip(got, unprotected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert len(sealed) > 2 * 4  # more than each worker's steps


def test_a_strategy_protects_as_the_environment_does(
    files: Files, tmp_path: Path, unprotected: list[list[torch.Tensor]], free_endpoints: Callable[[int], list[str]]
) -> None:
    def stated(environ: Environ) -> Strategy:
        told = {name.removeprefix("FLEET_").lower(): value for name, value in environ.items()}
        return StrategyFactory.create_sync_strategy().with_settings(auth_token_file=str(token), **told)

    class Stated(Secured):
        def fleet(self, role: Role, index: int) -> Fleet:
            made = super().fleet(role, index)
            if role is Role.SERVER:
                model = copy.deepcopy(TEMPLATE)
                made.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), stated(server), model=model)
            return made

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        values = train(fleet, index, stated(worker))
        for environ in (worker, {"FLEET_AUTH_TOKEN": SECRET}):  # without the one, or the other
            with pytest.raises((AuthenticationError, TransportError)):
                asked(Endpoint.parse(endpoints[0]), environ)
        return values

    token = tmp_path / "token"
    token.write_text(SECRET)
    server, worker = ({**files.issued(name), **files.trusting()} for name in ("127.0.0.1", "worker"))
    endpoints = free_endpoints(2)
    got = Stated(body, {}, {}, endpoints).run()
    for ours, theirs in zip(got, unprotected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_strategy_that_contradicts_the_environment(files: Files, endpoint: Endpoint) -> None:
    fleet = Fleet(environ=files.trusting())
    fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 1, [str(endpoint)]))
    model, sync = torch.nn.Linear(1, 1), StrategyFactory.create_sync_strategy()

    def optimized(strategy: Strategy) -> None:
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)

    both = r"FLEET_TLS_CA says one thing in the environment and another in the strategy; .*ours\.pem.*theirs\.pem"
    with pytest.raises(ConfigurationError, match=both):
        optimized(sync.with_settings(tls_ca=files.ca["theirs"]))
    with pytest.raises(ConfigurationError, match="FLEET_TLS_CERT is set and FLEET_TLS_KEY is not"):
        optimized(sync.with_settings(tls_cert="cert.pem"))
    with pytest.raises(ConfigurationError, match=r"FLEET_TLS_CERT.*no such file"):
        optimized(sync.with_settings(tls_cert="no such file", tls_key="nor this"))
    with pytest.raises(TypeError, match="durable_dir must be a str"):
        sync.with_settings(durable_dir=Path("kept"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="tls_ca is empty"):
        sync.with_settings(tls_ca=" ")
    optimized(sync.with_settings(tls_ca=files.ca["ours"]))


def test_a_worker_that_is_turned_away_does_not_wait(
    files: Files, free_endpoints: Callable[[int], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it disturb the two that belong there."""
    token = {"FLEET_AUTH_TOKEN": SECRET}
    there = threading.Event()
    job = Secured(lambda fleet, index: (train(fleet, index), there.wait(30.0))[0], token, token, free_endpoints(1))
    threads = job.start()
    began = time.monotonic()
    stranger = Fleet(environ={**PATIENT, "FLEET_AUTH_TOKEN": "something else"})
    stranger.init(UserDefinedRoleMaker(0, Role.WORKER, 2, job.endpoints))
    model = torch.nn.Linear(2, 1)
    stranger.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with pytest.raises(AuthenticationError, match="the token is not the server's") as caught:
        stranger.init_worker()
    assert time.monotonic() - began < 10.0
    there.set()
    job.join(threads)
    assert job.errors == {}
    assert "something else" not in str(caught.value) + caplog.text
    assert SECRET not in caplog.text
    assert re.search(r"a request from ipv4:127\.0\.0\.1:\d+ was refused: the token is not", caplog.text)


# ---------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("of_server", "of_worker", "words"),
    [
        (SECRET, SECRET[:-1], "the token is not the server's"),
        (SECRET, SECRET + "x", "the token is not the server's"),
        (SECRET, "", "the server asks for a token, and there is none"),
        ("", SECRET, "a worker has a token, and the server has none"),
    ],
)
@pytest.mark.parametrize("direct", ["", "off"])
def test_tokens_that_differ(
    of_server: str,
    of_worker: str,
    words: str,
    direct: str,
    endpoint: Endpoint,
    listen: Callable[[Environ], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listen({"FLEET_AUTH_TOKEN": of_server})
    with pytest.raises(AuthenticationError, match=words) as caught:
        asked(endpoint, {"FLEET_AUTH_TOKEN": of_worker, "FLEET_DIRECT_PORT": direct})
    assert isinstance(caught.value, PermissionError)
    assert str(endpoint) in str(caught.value)
    for secret in filter(None, (of_server, of_worker)):
        assert secret not in str(caught.value)
        assert secret not in caplog.text


@pytest.mark.parametrize("method", [EXCHANGE, UPLOAD, URGENT, "/fleet.ParameterServer/Other"])
@pytest.mark.parametrize(
    "beside",
    [(), ((TOKEN, b"wrong"),), ((TOKEN, SECRET.encode()), (TOKEN, SECRET.encode())), ((TOKEN, b""),)],
    ids=["none", "wrong", "twice", "empty"],
)
def test_no_call_of_any_kind_gets_in_without_the_token(
    method: str, beside: Any, endpoint: Endpoint, listen: Callable[[Environ], None]
) -> None:
    listen({"FLEET_AUTH_TOKEN": SECRET})
    request = b"".join(Frame(pb.Request(beat=pb.Beat())).pieces())
    with grpc.insecure_channel(str(endpoint)) as channel:
        replies = channel.stream_stream(method)(iter([request]), timeout=10.0, metadata=beside, wait_for_ready=True)
        with pytest.raises(AuthenticationError):
            raise_if_error(read_frame(pb.Reply, replies))


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(security_module.hmac, "compare_digest", compare)
    security = security_module.Security(token=SECRET.encode())
    where = Endpoint("127.0.0.1", 1)
    assert security.refusal([SECRET.encode()], where) is None
    assert security.refusal([b"x"], where) is not None
    assert compared == [(SECRET.encode(), SECRET.encode()), (b"x", SECRET.encode())]


def test_a_token_in_a_file(tmp_path: Path, endpoint: Endpoint, listen: Callable[[Environ], None]) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {SECRET}\n")
    listen({"FLEET_AUTH_TOKEN_FILE": str(path)})
    assert asked(endpoint, {"FLEET_AUTH_TOKEN": SECRET}) == 7


@pytest.mark.parametrize("token", ["ünïcödé", "\udcff\udcfe", "with blanks\tin it", "x" * 1024])
def test_a_token_of_any_bytes(token: str, endpoint: Endpoint, listen: Callable[[Environ], None]) -> None:
    listen({"FLEET_AUTH_TOKEN": token})
    assert asked(endpoint, {"FLEET_AUTH_TOKEN": token}) == 7


def test_tokens_that_cannot_be_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" + SECRET.encode())
    for environ, words in (
        ({"FLEET_AUTH_TOKEN": SECRET, "FLEET_AUTH_TOKEN_FILE": str(empty)}, "are both set"),
        ({"FLEET_AUTH_TOKEN_FILE": str(empty)}, "holds no token"),
        ({"FLEET_AUTH_TOKEN_FILE": str(binary)}, "FLEET_AUTH_TOKEN_FILE cannot be read.*not text"),
        ({"FLEET_AUTH_TOKEN_FILE": str(tmp_path / "absent")}, "FLEET_AUTH_TOKEN_FILE cannot be read.*absent"),
        ({"FLEET_AUTH_TOKEN": SECRET * 50}, "the token is too long"),
    ):
        with pytest.raises(ConfigurationError, match=words) as caught:
            ProcessSettings.read(environ)
        assert SECRET not in str(caught.value)


def test_no_text_shows_the_token() -> None:
    settings = ProcessSettings.read({"FLEET_AUTH_TOKEN": SECRET})
    shown = [settings, settings.security, security_module.Security.of(settings.security)]
    assert [SECRET in text for each in shown for text in (repr(each), str(each))] == [False] * 6


def test_no_log_shows_the_token(
    free_endpoints: Callable[[int], list[str]],
    endpoint: Endpoint,
    listen: Callable[[Environ], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However much is logged, by whomever."""
    caplog.set_level(logging.DEBUG)
    token = {"FLEET_AUTH_TOKEN": SECRET}
    Secured(train, token, token, free_endpoints(1)).run()
    listen(token)
    with pytest.raises(AuthenticationError) as caught:
        asked(endpoint, {"FLEET_AUTH_TOKEN": SECRET[:-1]})
    assert {"fleet", "fleet.server", "fleet.wire"} <= {record.name for record in caplog.records}
    assert SECRET[:-1] not in caplog.text + "".join(traceback.format_exception(caught.value))


def test_fleetrun_hands_the_token_on_and_shows_it_nowhere(prepared: Prepared, tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("FLEET_", "PADDLE_"))}
    command = [
        *("-m", "fleet.launch", "--server_num", "1", "--worker_num", "1"),
        *("--log_dir", str(tmp_path), str(ROOT / "tests" / "scripts" / "secured.py")),
    ]
    code, out, err = ended(prepared.start(command, {**environ, "FLEET_AUTH_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}))
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert code == 0, err
    assert "turned away without the token" in out
    assert SECRET not in out + err + kept


# ---------------------------------------------------------------------------------------------- certificates


@pytest.mark.parametrize("case", ["trusted", "mutual", "another authority", "another name", "no certificate", "no tls"])
def test_who_is_let_in_over_tcp_with_tls(
    case: str, files: Files, endpoint: Endpoint, free_endpoints: Callable[[int], list[str]], listen: Callable[..., None]
) -> None:
    """Whoever has the key, and not what TLS asks for, gets nothing over a direct connection."""
    ours, mutual = files.issued("127.0.0.1"), {**files.issued("127.0.0.1"), **files.trusting()}
    port = free_endpoints(1)[0].rpartition(":")[2]
    listen({**(mutual if case in ("mutual", "no certificate") else ours), "FLEET_DIRECT_PORT": port})
    environ: Environ = {
        "trusted": files.trusting(),
        "mutual": {**files.issued("worker"), **files.trusting()},
        "another authority": files.trusting("theirs"),
        "another name": {**files.trusting(), "FLEET_TLS_SERVER_NAME": "servers.example"},
        "no certificate": files.trusting(),
        "no tls": {},
    }[case]
    permitted = {**files.issued("worker"), **files.trusting(), "FLEET_DIRECT_PORT": "off"}
    channel = real_network(ProcessSettings.read(permitted)).connect(endpoint)
    address = channel.start(Frame(pb.Request(direct=pb.Direct())), 10.0).result().message.direct
    channel.close()
    assert address.port == int(port)
    address.local = ""  # as from another machine
    try:
        line = direct_client._connect(endpoint, address, Security.of(SecuritySettings.read(environ)), 10.0)
    except OSError:
        assert case not in ("trusted", "mutual")
    else:
        line.close()
        assert case in ("trusted", "mutual")


def test_a_server_under_another_name(files: Files, endpoint: Endpoint, listen: Callable[[Environ], None]) -> None:
    listen(files.issued("servers.example"))
    with pytest.raises(AuthenticationError, match=r"not to be trusted.*mismatch"):
        asked(endpoint, files.trusting())
    assert asked(endpoint, {**files.trusting(), "FLEET_TLS_SERVER_NAME": "servers.example"}) == 7


def _refused(files: Files) -> dict[str, tuple[Environ, Environ, str]]:
    server, ours = files.issued("127.0.0.1"), files.trusting()
    mutual = {**server, **ours}
    no_certificate = "the server does not take this worker's certificate"
    return {
        "another authority": (server, files.trusting("theirs"), r"not to be trusted.*theirs\.pem.*issuer"),
        "no tls here": (server, {}, "the server speaks TLS only"),
        "no tls there": ({}, ours, "the server does not speak TLS"),
        "no tls here, mutual": (mutual, {}, "the server speaks TLS only"),
        "no certificate": (mutual, ours, f"{no_certificate}.*got none"),
        "a certificate of others": (
            mutual,
            {**ours, **files.issued("worker", by="theirs")},
            rf"{no_certificate}.*worker-theirs",
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "another authority",
        "no tls here",
        "no tls there",
        "no tls here, mutual",
        "no certificate",
        "a certificate of others",
    ],
)
def test_handshakes_that_fail(case: str, files: Files, endpoint: Endpoint, listen: Callable[[Environ], None]) -> None:
    of_server, of_worker, words = _refused(files)[case]
    listen(of_server)
    with pytest.raises(AuthenticationError, match=words) as caught:
        asked(endpoint, of_worker)
    assert str(endpoint) in str(caught.value)


def test_a_server_that_is_not_up_is_no_failed_handshake(files: Files, endpoint: Endpoint) -> None:
    for environ in ({}, files.trusting()):
        with pytest.raises(TransportError, match="unavailable"):
            asked(endpoint, environ)


def test_a_server_that_hangs_up_may_be_on_its_way_up(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        ending = threading.Event()

        def hang_up() -> None:
            door.settimeout(0.05)
            while not ending.is_set():
                try:
                    door.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        fleet = Fleet(environ={**PATIENT, **files.trusting(), "FLEET_STARTUP_DEADLINE_S": "1"})
        fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 1, [f"127.0.0.1:{door.getsockname()[1]}"]))
        model = torch.nn.Linear(2, 1)
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        try:
            with pytest.raises(DeadlineError, match="did not come up"):
                fleet.init_worker()
        finally:
            ending.set()
            thread.join()


def test_files_that_cannot_be_used(files: Files, tmp_path: Path, endpoint: Endpoint) -> None:
    server, worker, ours = files.issued("127.0.0.1"), files.issued("worker"), files.trusting()
    absent, junk = str(tmp_path / "absent.pem"), str(tmp_path / "junk.pem")
    Path(junk).write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    for environ, words in (
        ({"FLEET_TLS_CERT": server["FLEET_TLS_CERT"]}, "FLEET_TLS_CERT is set and FLEET_TLS_KEY is not"),
        ({"FLEET_TLS_KEY": server["FLEET_TLS_KEY"]}, "FLEET_TLS_KEY is set and FLEET_TLS_CERT is not"),
        ({**server, "FLEET_TLS_KEY": absent}, r"FLEET_TLS_KEY cannot be read; at .*absent\.pem.*No such file"),
        ({**server, "FLEET_TLS_CA": absent}, r"FLEET_TLS_CA cannot be read; at .*absent\.pem"),
        ({**server, "FLEET_TLS_CA": junk}, r"FLEET_TLS_CA holds no certificate; at .*junk\.pem"),
        ({**server, "FLEET_TLS_CERT": junk}, r"not a certificate and its key; at .*junk\.pem"),
        ({**server, "FLEET_TLS_KEY": worker["FLEET_TLS_KEY"]}, r"not a certificate and its key.*KEY_VALUES_MISMATCH"),
        (files.issued("127.0.0.1", year=2021), r"FLEET_TLS_CERT cannot be used; at .*2021\.pem.*has expired"),
        (files.issued("127.0.0.1", year=2121), r"FLEET_TLS_CERT cannot be used; at .*2121\.pem.*not yet valid"),
        (ours, "FLEET_TLS_CA alone makes no server"),
        ({**server, "FLEET_TLS_SERVER_NAME": "x"}, "FLEET_TLS_SERVER_NAME is set and FLEET_TLS_CA is not"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            real_network(ProcessSettings.read(environ)).listen(endpoint, _echo)
    with pytest.raises(ConfigurationError, match="cannot tell its servers from strangers without FLEET_TLS_CA"):
        real_network(ProcessSettings.read(server)).connect(endpoint)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ps0.example.com:1", "ps0.example.com"),
        ("10.0.0.1:1", "10.0.0.1"),
        ("[fd00::1]:1", "fd00::1"),
        ("[fe80::1%eth0]:1", "fe80::1"),
    ],
)
def test_the_name_that_a_certificate_is_for(text: str, name: str, files: Files) -> None:
    tls = Security.of(SecuritySettings.read({**files.issued("worker"), **files.trusting()})).tls
    assert tls is not None
    assert tls.name_of(Endpoint.parse(text)) == name
    tls.context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)


@pytest.mark.parametrize("change", ["gone", "of others"])
def test_files_that_change_matter_to_later_processes_only(
    change: str, files: Files, tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where certificates are renewed: a process keeps those that it began with, over gRPC and beside it."""
    monkeypatch.setattr("fleet.ps.wire.direct_server.local_door", _no_door)
    given = {**files.issued("127.0.0.1"), **files.trusting()}
    environ = {name: str(shutil.copy(path, tmp_path)) for name, path in given.items()}
    server, worker = (real_network(ProcessSettings.read({**environ, "FLEET_DIRECT_PORT": "0"})) for _ in range(2))
    if change == "gone":
        shutil.rmtree(tmp_path)
    else:
        others = {**files.issued("127.0.0.1", by="theirs"), **files.trusting("theirs")}
        for name, path in others.items():
            shutil.copy(path, environ[name])
    counted = Mock(side_effect=direct_client.DirectCall)
    monkeypatch.setattr(direct_client, "DirectCall", counted)
    with contextlib.ExitStack() as stack:
        early, channel = worker.connect(endpoint), worker.connect(endpoint)
        for each in (early, channel):
            stack.callback(each.close)
        with pytest.raises(TransportError, match="unavailable"):
            early.start(Frame(pb.Request(step=7)), 10.0).result()
        stack.callback(server.listen(endpoint, _echo).close)
        for _ in range(2):
            assert channel.start(Frame(pb.Request(step=7)), 10.0).result().message.version == 7
    assert counted.call_count == 2


def _no_door(_: str) -> socket.socket:
    raise OSError("none of this machine's own")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1251"])
def test_what_is_written_beside_certificates_is_in_any_encoding(
    encoding: str, files: Files, tmp_path: Path, endpoint: Endpoint, listen: Callable[[Environ], None]
) -> None:
    """As in the bundles of authorities that systems have, where each stands under its name."""
    remark = {"cp1251": "Удостоверяющий центр"}.get(encoding, "Autorità di certificazione")

    def remarked(path: str) -> str:
        made = tmp_path / Path(path).name
        made.write_bytes(f"# {remark}\n".encode(encoding) + Path(path).read_bytes())
        return str(made)

    given = {**files.issued("127.0.0.1"), **files.trusting()}
    environ = {name: remarked(path) for name, path in given.items()}
    listen(environ)
    assert asked(endpoint, environ) == 7


def test_a_key_with_a_password_asks_nobody_for_it(files: Files, tmp_path: Path, endpoint: Endpoint) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    server = files.issued("127.0.0.1")
    key = pem.load_pem_private_key(Path(server["FLEET_TLS_KEY"]).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigurationError, match="the key without a password"):
        real_network(ProcessSettings.read({**server, "FLEET_TLS_KEY": str(locked)})).listen(endpoint, _echo)


# ---------------------------------------------------------------------------------------------- where to listen


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.1.2.3", "172.31.0.1", "192.168.0.1", "169.254.1.1", "100.127.0.1"),
        *("::1", "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1"),
    ],
)
def test_private_addresses(address: str) -> None:
    assert is_private(address)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.2.1", "198.18.0.1"),
        *("::", "2001:db8::1", "::ffff:8.8.8.8"),
    ],
)
def test_addresses_of_everybody(address: str) -> None:
    assert not is_private(address)


def test_a_server_without_anything_listens_to_no_public_address(files: Files) -> None:
    for host in ("0.0.0.0", "[::]", "192.0.2.1"):
        public = Endpoint(host, 0)
        for environ in ({}, {"FLEET_DIRECT_PORT": "off"}, files.issued("127.0.0.1")):
            with pytest.raises(ConfigurationError, match=r"would let anybody in.*FLEET_AUTH_TOKEN.*FLEET_INSECURE=1"):
                real_network(ProcessSettings.read(environ)).listen(public, _echo)


def test_what_allows_a_public_address(files: Files) -> None:
    """Without any of these, listening raises a ConfigurationError, as a test above shows."""
    for environ in (
        {"FLEET_AUTH_TOKEN": SECRET},
        {**files.issued("127.0.0.1"), **files.trusting()},
        {"FLEET_INSECURE": "1"},
    ):
        real_network(ProcessSettings.read(environ)).listen(Endpoint("0.0.0.0", 0), _echo).close()


def test_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, port: int, **_: object) -> list[Any]:
        if host != "cluster.example":
            raise OSError("unknown")
        return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.1", "198.51.100.7")]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert public_addresses(Endpoint("cluster.example", 1)) == ["198.51.100.7"]
    assert public_addresses(Endpoint("nowhere.example", 1)) == []


def test_a_token_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture, files: Files) -> None:
    token = {"FLEET_AUTH_TOKEN": SECRET}
    for environ, host, warned in (
        (token, "192.0.2.1", True),
        (token, "127.0.0.1", False),
        ({**token, **files.trusting()}, "192.0.2.1", False),
        ({}, "192.0.2.1", False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            real_network(ProcessSettings.read(environ)).connect(Endpoint(host, 9)).close()
        assert ("travels in the clear to 192.0.2.1:9" in caplog.text) == warned
        assert SECRET not in caplog.text


# ---------------------------------------------------------------------------------------------- where it cannot be had


@pytest.mark.parametrize("name", ["FLEET_AUTH_TOKEN", "FLEET_TLS_CA"])
def test_collective_jobs_refuse_what_they_cannot_honour(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} cannot be honoured by a collective job") as caught:
        Fleet(environ={name: SECRET}).init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:6170"]))
    assert isinstance(caught.value, FleetError)
    assert SECRET not in str(caught.value)


# ---------------------------------------------------------------------------------------------- the documentation


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_the_certificates_of_the_documentation(
    tmp_path: Path, endpoint: Endpoint, listen: Callable[[Environ], None]
) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "security.md").read_text(), re.DOTALL)
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    def shown(who: str) -> Environ:
        variables = {"CERT": f"{who}.pem", "KEY": f"{who}.key", "CA": "ca.pem"}
        return {f"FLEET_TLS_{name}": str(tmp_path / file) for name, file in variables.items()}

    listen(shown("server"))
    assert asked(endpoint, shown("worker")) == 7
    with pytest.raises(AuthenticationError, match="does not take this worker's certificate"):
        asked(endpoint, {"FLEET_TLS_CA": str(tmp_path / "ca.pem")})
