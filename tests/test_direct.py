"""Direct connections: what goes over them and what does not, who is let in, and what happens when they fail; in the
clear, and under TLS with certificates on both sides.

That they keep the promises of every network is tested in test_transport.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trustme
from harness import until
from patience import PATIENCE_S

from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import ConfigurationError, PortInUseError
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import direct_client, direct_connections
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct import DirectNetwork
from fleet.ps.wire.direct_client import PATIENCE, WELCOME, DirectChannel
from fleet.ps.wire.direct_server import DirectListener
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.leader_pool import SPARE
from fleet.ps.wire.line import Line, Outgoing
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.security import Security
from fleet.ps.wire.tls_line import TlsLine
from fleet.ps.wire.transport import Call, Channel, Handler, Listener, Network, Respond, TransportError
from fleet.ps.wire.wire_errors import raise_if_error

LARGE = torch.arange(4 << 20)
ENDPOINT = Endpoint("127.0.0.1", 0)


class Counting:
    """A network that counts the kinds of requests that are started on it."""

    def __init__(self, inner: Network) -> None:
        self._inner = inner
        self.kinds: list[str] = []

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        return self._inner.listen(endpoint, handler)

    def connect(self, endpoint: Endpoint) -> Channel:
        channel = self._inner.connect(endpoint)
        start = channel.start

        def counted(request: Frame, timeout_s: float | None = None, **how: bool) -> Call:
            self.kinds.append(request.message.WhichOneof("kind"))
            return start(request, timeout_s, **how)

        channel.start = counted  # type: ignore[method-assign]
        return channel


def echo(frame: Frame, respond: Respond) -> None:
    respond(Frame(pb.Reply(version=frame.message.step), frame.tensors))


def ask(step: int, *tensors: torch.Tensor) -> Frame:
    return Frame(pb.Request(step=step, pull=pb.Pull()), [WireTensor.of(tensor) for tensor in tensors])


def beat() -> Frame:
    return Frame(pb.Request(beat=pb.Beat()))


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def control() -> Counting:
    return Counting(LoopbackNetwork())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Security:
    """What a process has of which the other side is a copy."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
    variables = {"CA": authority.cert_pem.bytes(), "CERT": chain, "KEY": made.private_key_pem.bytes()}
    for name, data in variables.items():
        (folder / name).write_bytes(data)
    environ = {f"FLEET_TLS_{name}": str(folder / name) for name in variables}
    return Security.of(ProcessSettings.read(environ).security)


@pytest.fixture(autouse=True, params=["clear", "tls"])
def security(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Security:
    """What servers and clients of a test have. Under TLS they are on machines of their own, as it were."""
    made = request.getfixturevalue("certificates") if request.param == "tls" else Security()
    if made.tls is not None:
        monkeypatch.setattr(direct_client, "reach", over_tcp)
    monkeypatch.setitem(THERE, "security", made)
    return made


#: What ``line`` and ``connected`` are to use.
THERE: dict[str, Security] = {"security": Security()}


def over_tcp(endpoint: Endpoint, address: Any, timeout_s: float) -> socket.socket:
    return socket.create_connection((endpoint.host, address.port), timeout_s)


def opened(handler: Handler) -> DirectListener:
    return DirectListener(ENDPOINT, _free_port(), handler, THERE["security"])


def line(control: Network, stack: contextlib.ExitStack, handler: Handler = echo, *, port: int = 0) -> DirectChannel:
    security = THERE["security"]
    network = DirectNetwork(control, port or (_free_port() if security.tls else 0), security)
    stack.callback(network.listen(ENDPOINT, handler).close)
    channel = network.connect(ENDPOINT)
    stack.callback(channel.close)
    return channel


@pytest.fixture
def listener(stack: contextlib.ExitStack) -> DirectListener:
    made = opened(echo)
    stack.callback(made.close)
    return made


def connected(listener: DirectListener, stack: contextlib.ExitStack, key: bytes | None = None) -> Line:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", listener.address.port), PATIENCE_S))
    tls = THERE["security"].tls
    made = Line(sock) if tls is None else TlsLine(sock, tls.context(), "127.0.0.1")
    with contextlib.suppress(ConnectionError):  # it is hung up on
        made.shake_hands()
        made.say(listener.address.key if key is None else key)
    return made


def hung_up(line: Line) -> bool:
    try:
        line.fill(memoryview(bytearray(1)))
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def welcomed(listener: DirectListener, stack: contextlib.ExitStack) -> Line:
    made = connected(listener, stack)
    assert made.take(len(WELCOME)) == WELCOME
    return made


# ---------------------------------------------------------------------------------------------- what goes where


def test_only_the_question_goes_over_the_network(control: Counting, stack: contextlib.ExitStack) -> None:
    channel = line(control, stack)
    for step in range(3):
        assert channel.start(ask(step, LARGE)).result().message.version == step
    channel.start(beat(), urgent=True).result()
    assert control.kinds == ["direct"]


@pytest.mark.parametrize("near", [True, False], ids=["one machine", "over TCP"])
@pytest.mark.pairs(1)
def test_large_frames_both_ways(
    near: bool, control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not near:
        monkeypatch.setattr(direct_client, "reach", over_tcp)
    channel = line(control, stack, port=0 if near else _free_port())
    many = [torch.full((size % 50,), float(size)) for size in range(1500)]
    for sent in ([LARGE, LARGE * 2], many):
        calls = [channel.start(ask(step, *sent)) for step in range(2)]
        for call in calls:
            call.send()
        for step, call in enumerate(calls):
            reply = call.result()
            assert reply.message.version == step
            assert all(torch.equal(got.torch(), want) for got, want in zip(reply.tensors, sent, strict=True))


def test_connections_are_used_again(
    control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Line] = []
    connect = direct_client._connect

    def counted(*how: Any) -> Line:
        made.append(connect(*how))
        return made[-1]

    monkeypatch.setattr(direct_client, "_connect", counted)
    channel = line(control, stack)
    for step in range(20):
        assert channel.start(ask(step), PATIENCE_S if step % 2 else None).result().message.version == step
    assert len(made) == 1


# ---------------------------------------------------------------------------------------------- when they fail


def test_without_a_way_there_everything_goes_over_the_network(
    control: Counting,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nowhere(*_: Any) -> socket.socket:
        raise ConnectionRefusedError("a firewall")

    monkeypatch.setattr(direct_client, "reach", nowhere)
    channel = line(control, stack)
    for step in range(PATIENCE + 2):
        assert channel.start(ask(step)).result().message.version == step
    assert control.kinds == ["direct", "pull"] * PATIENCE + ["pull"] * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert "a firewall" in told
    assert str(ENDPOINT) in told


def test_a_server_that_takes_none(control: Counting, stack: contextlib.ExitStack) -> None:
    def handler(frame: Frame, respond: Respond) -> None:
        if frame.message.WhichOneof("kind") == "direct":
            raise ConfigurationError("a request of an unknown kind")
        echo(frame, respond)

    stack.callback(control.listen(ENDPOINT, handler).close)
    channel = DirectNetwork(control).connect(ENDPOINT)
    stack.callback(channel.close)
    assert [channel.start(ask(step)).result().message.version for step in (1, 2)] == [1, 2]
    assert control.kinds == ["direct", "pull", "pull"]


def test_the_successor_of_a_server_is_found(control: Counting, stack: contextlib.ExitStack) -> None:
    security = THERE["security"]
    network = DirectNetwork(control, _free_port() if security.tls else 0, security)
    channel = network.connect(ENDPOINT)
    stack.callback(channel.close)
    for step in range(3):
        listener = network.listen(ENDPOINT, echo)
        assert channel.start(ask(step)).result().message.version == step
        listener.close()
        with pytest.raises(TransportError):
            channel.start(ask(step)).result()
    assert "pull" not in control.kinds


def test_one_failure_is_not_the_end(
    control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = line(control, stack)
    with monkeypatch.context() as patch:
        patch.setattr(direct_client, "reach", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError("too early")))
        assert channel.start(ask(1)).result().message.version == 1
    assert channel.start(ask(2)).result().message.version == 2
    assert control.kinds == ["direct", "pull", "direct"]


def test_a_machine_that_does_not_answer(
    control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP gives up by itself, which Python calls a TimeoutError as well."""

    def silent(*_: Any) -> Frame:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    channel = line(control, stack)
    call = channel.start(ask(1))
    monkeypatch.setattr(Line, "receive", silent)
    with pytest.raises(TransportError, match="Connection timed out"):
        call.result()


def test_a_closed_channel_makes_no_connection(control: Counting, stack: contextlib.ExitStack) -> None:
    channel = line(control, stack)
    channel.close()
    with pytest.raises(TransportError, match="closed"):
        channel.start(ask(1)).result()
    assert control.kinds == []


def test_a_server_of_its_own_machine_takes_no_port(stack: contextlib.ExitStack) -> None:
    for endpoint, port in ((ENDPOINT, False), (Endpoint("0.0.0.0", 0), True)):
        listener = DirectListener(endpoint, 0, echo)
        stack.callback(listener.close)
        assert bool(listener.address.port) == port or not listener.address.local


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_no_side_waits_long_for_a_connection_that_is_gone(
    listener: DirectListener, stack: contextlib.ExitStack
) -> None:
    """Where something between the machines has forgotten it, the system alone would go on for a quarter of an hour."""
    ours = connected(listener, stack)
    ours.tune()
    until(lambda: [each.known for each in listener.connections._all] == [True])
    for sock in (ours.sock, *(each.line.sock for each in listener.connections._all)):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_somebody_else_at_the_port(
    control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    theirs.sendall(b"220 mail.example.org ESMTP")
    monkeypatch.setattr(direct_client, "reach", lambda *_: ours)
    assert line(control, stack).start(ask(1)).result().message.version == 1
    assert control.kinds == ["direct", "pull"]


# ---------------------------------------------------------------------------------------------- who is let in


def test_who_has_no_key_is_shown_the_door(listener: DirectListener, stack: contextlib.ExitStack) -> None:
    wrong = bytes(len(listener.address.key))
    assert hung_up(connected(listener, stack, wrong))
    welcomed(listener, stack)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x16\x03\x01\x40\x00" + bytes(64), bytes(1000)])
def test_who_does_not_speak_as_we_do_is_shown_the_door(
    first: bytes, listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "HANDSHAKE_S", 1)
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", listener.address.port), PATIENCE_S))
    sock.sendall(first)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1000):  # TLS says why
            continue
    until(lambda: not listener.connections)
    welcomed(listener, stack)


def test_who_says_nothing_is_not_waited_for(
    listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "HANDSHAKE_S", 1)
    assert hung_up(connected(listener, stack, b""))


def test_who_stops_in_the_middle_of_a_request_is_not_waited_for(
    listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "STALL_S", 1)
    slow = welcomed(listener, stack)
    time.sleep(1.2)  # before it begins it may take its time
    slow.say(b"FLT1")
    assert hung_up(slow)


def test_garbage_is_answered_and_disturbs_nobody(listener: DirectListener, stack: contextlib.ExitStack) -> None:
    bad, good = welcomed(listener, stack), welcomed(listener, stack)
    bad.say(b"GET / HTTP/1.1\r\n\r\n")
    told = bad.receive(pb.Reply).message.error
    assert (told.kind, told.what) == ("ProtocolError", "a message is not a frame of this protocol")
    assert hung_up(bad)
    Outgoing(ask(3)).send(good, wait=True)
    assert good.receive(pb.Reply).message.version == 3


def test_a_lying_size_takes_no_memory(listener: DirectListener, stack: contextlib.ExitStack) -> None:
    sock = welcomed(listener, stack)
    sock.say(struct.pack("<4sIQ", b"FLT1", 0, 2**64 - 1))
    assert sock.receive(pb.Reply).message.error.what == "a frame is too large"


def test_no_more_connections_than_there_is_room_for(
    listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "MAX_CONNECTIONS", 1)
    first = welcomed(listener, stack)
    assert hung_up(connected(listener, stack))
    first.close()
    until(lambda: not listener.connections)
    welcomed(listener, stack)


# ---------------------------------------------------------------------------------------------- who does not read


def test_a_peer_that_does_not_read_blocks_nobody(listener: DirectListener, stack: contextlib.ExitStack) -> None:
    unread = [welcomed(listener, stack) for _ in range(8)]
    senders = []
    for sock in unread:
        senders.append(threading.Thread(target=Outgoing(ask(0, LARGE)).send, args=(sock,), kwargs={"wait": True}))
        senders[-1].start()
    for sender in senders:
        sender.join(PATIENCE_S)
    other = welcomed(listener, stack)
    Outgoing(ask(5)).send(other, wait=True)
    assert other.receive(pb.Reply).message.version == 5
    for sock in unread:
        assert torch.equal(sock.receive(pb.Reply).tensors[0].torch(), LARGE)


def test_a_peer_that_reads_nothing_is_not_waited_for_forever(
    listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "STALL_S", 1)
    stalled = welcomed(listener, stack)
    Outgoing(ask(0, LARGE)).send(stalled, wait=True)
    until(lambda: not listener.connections)
    with pytest.raises(OSError):
        stalled.receive(pb.Reply)


def test_who_reads_too_late_asks_again(
    control: Counting, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "STALL_S", 1)
    channel = line(control, stack)
    late = channel.start(ask(1, LARGE))
    late.send()
    time.sleep(2.5)
    with pytest.raises(TransportError):
        late.result()
    assert torch.equal(channel.start(ask(1, LARGE)).result().tensors[0].torch(), LARGE)


def test_closing_does_not_wait_for_a_peer_that_does_not_read(
    listener: DirectListener, stack: contextlib.ExitStack
) -> None:
    stalled = welcomed(listener, stack)
    Outgoing(ask(0, LARGE)).send(stalled, wait=True)
    listener.close(0.1)
    with pytest.raises(OSError):
        stalled.receive(pb.Reply)


# ---------------------------------------------------------------------------------------------- who has to wait


class Keeping:
    """A handler that keeps what it is to answer; requests of an odd step it answers at once."""

    def __init__(self) -> None:
        self.kept: list[Respond] = []

    def __call__(self, frame: Frame, respond: Respond) -> None:
        if frame.message.step % 2:
            echo(frame, respond)
        else:
            self.kept.append(respond)

    def one(self) -> Respond:
        until(lambda: bool(self.kept))
        return self.kept.pop()


@pytest.fixture
def keeping() -> Keeping:
    return Keeping()


@pytest.fixture
def keeper(keeping: Keeping, stack: contextlib.ExitStack) -> DirectListener:
    made = opened(keeping)
    stack.callback(made.close)
    return made


def answered(sock: Line, step: int) -> bool:
    Outgoing(ask(step)).send(sock, wait=True)
    return sock.receive(pb.Reply).message.version == step


def test_who_stops_in_the_middle_holds_up_nobody(listener: DirectListener, stack: contextlib.ExitStack) -> None:
    request = b"".join(ask(7, LARGE).pieces())
    slow = [welcomed(listener, stack) for _ in range(5)]
    for each, length in zip(slow, (1, 15, 16, 40, 100_000), strict=True):
        each.say(request[:length])
    assert answered(welcomed(listener, stack), 1)
    for each, length in zip(slow, (1, 15, 16, 40, 100_000), strict=True):
        each.say(request[length:])
        assert torch.equal(each.receive(pb.Reply).tensors[0].torch(), LARGE)


def test_a_long_request_holds_up_nobody(stack: contextlib.ExitStack) -> None:
    over = threading.Event()

    def handler(frame: Frame, respond: Respond) -> None:
        if not frame.message.step:
            over.wait(PATIENCE_S)
        echo(frame, respond)

    listener = opened(handler)
    stack.callback(listener.close)
    long = [welcomed(listener, stack) for _ in range(12)]
    for each in long:
        Outgoing(ask(0)).send(each, wait=True)
    assert answered(welcomed(listener, stack), 1)
    assert not over.is_set()
    over.set()
    for each in long:
        assert each.receive(pb.Reply).message.version == 0
        assert answered(each, 3)


def test_a_parked_request_holds_no_thread(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    before = threading.active_count()
    parked = [welcomed(keeper, stack) for _ in range(50)]
    for each in parked:
        Outgoing(ask(0)).send(each, wait=True)
    until(lambda: len(keeping.kept) == len(parked))
    until(lambda: threading.active_count() <= before + SPARE + 1)
    for respond in keeping.kept:
        respond(Frame(pb.Reply(version=9)))
    assert {each.receive(pb.Reply).message.version for each in parked} == {9}


def test_who_answers_does_not_wait_for_the_reader(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    readers = [welcomed(keeper, stack) for _ in range(3)]
    for each in readers:
        Outgoing(ask(0)).send(each, wait=True)
    until(lambda: len(keeping.kept) == len(readers))
    for respond in keeping.kept:
        respond(Frame(pb.Reply(version=2), [WireTensor.of(LARGE)]))
    for each in readers:
        assert torch.equal(each.receive(pb.Reply).tensors[0].torch(), LARGE)
        assert answered(each, 3)


def test_who_hangs_up_is_forgotten_before_the_answer(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    gone, other = welcomed(keeper, stack), welcomed(keeper, stack)
    Outgoing(ask(0)).send(gone, wait=True)
    respond = keeping.one()
    gone.close()
    until(lambda: len(keeper.connections) == 1)
    respond(Frame(pb.Reply(version=2)))
    assert answered(other, 1)


def test_who_hangs_up_after_a_large_request_is_forgotten_too(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    gone = welcomed(keeper, stack)
    Outgoing(ask(0, LARGE)).send(gone, wait=True)
    keeping.one()
    gone.close()
    until(lambda: not len(keeper.connections))


def test_an_answer_that_cannot_be_made_is_the_misfortune_of_who_asked(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    first, second = welcomed(keeper, stack), welcomed(keeper, stack)
    replies = []
    for sock in (first, second):
        Outgoing(ask(0)).send(sock, wait=True)
        replies.append(keeping.one())
    replies[0](Frame("no message"))
    replies[1](Frame(pb.Reply(version=2)))
    assert hung_up(first)
    assert second.receive(pb.Reply).message.version == 2


def test_a_request_for_which_there_is_no_memory_ends_its_connection(
    listener: DirectListener, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Frame:
        raise MemoryError

    sock = welcomed(listener, stack)
    with monkeypatch.context() as patch:
        patch.setattr(Line, "receive", failing)
        Outgoing(ask(1)).send(sock, wait=True)
        assert hung_up(sock)
    assert answered(welcomed(listener, stack), 1)


def test_a_request_that_came_too_early_waits_for_its_turn(
    keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack
) -> None:
    sock, other = welcomed(keeper, stack), welcomed(keeper, stack)
    Outgoing(ask(0)).send(sock, wait=True)
    Outgoing(ask(1)).send(sock, wait=True)
    respond = keeping.one()
    assert answered(other, 1)
    respond(Frame(pb.Reply(version=2)))
    assert [sock.receive(pb.Reply).message.version for _ in range(2)] == [2, 1]


def test_a_second_answer_goes_nowhere(keeping: Keeping, keeper: DirectListener, stack: contextlib.ExitStack) -> None:
    sock = welcomed(keeper, stack)
    Outgoing(ask(0)).send(sock, wait=True)
    respond = keeping.one()
    for version in (2, 4):
        respond(Frame(pb.Reply(version=version)))
    assert sock.receive(pb.Reply).message.version == 2
    Outgoing(ask(6)).send(sock, wait=True)
    later = keeping.one()
    respond(Frame(pb.Reply(version=8)))
    later(Frame(pb.Reply(version=6)))
    assert sock.receive(pb.Reply).message.version == 6


def test_what_is_done_after_an_answer_comes_after_it(stack: contextlib.ExitStack) -> None:
    """Even where the peer has not read all of it yet."""
    done, read = threading.Event(), threading.Event()

    def handler(frame: Frame, respond: Respond) -> Callable[[], None]:
        respond(Frame(pb.Reply(), [WireTensor.of(LARGE)] * 4))
        return lambda: (read.wait(PATIENCE_S), done.set())[1]

    listener = opened(handler)
    stack.callback(listener.close)
    sock = welcomed(listener, stack)
    Outgoing(ask(0)).send(sock, wait=True)
    assert len(sock.receive(pb.Reply).tensors) == 4
    assert not done.is_set()
    read.set()
    assert done.wait(PATIENCE_S)


# ---------------------------------------------------------------------------------------------- the setting


def test_off() -> None:
    assert isinstance(real_network(ProcessSettings.read({"FLEET_DIRECT_PORT": "off"})), GrpcNetwork)
    assert isinstance(real_network(ProcessSettings.read({})), DirectNetwork)


def test_a_port_of_choice(stack: contextlib.ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} is in use.*process {os.getpid()}"):
            DirectListener(ENDPOINT, port, echo)
    network = real_network(ProcessSettings.read({"FLEET_DIRECT_PORT": str(port)}))
    endpoint = Endpoint("127.0.0.1", _free_port())
    stack.callback(network.listen(endpoint, echo).close)
    plain = GrpcNetwork(2).connect(endpoint)
    stack.callback(plain.close)
    told = raise_if_error(plain.start(Frame(pb.Request(direct=pb.Direct())), PATIENCE_S).result()).message.direct
    assert told.port == port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("text", ["on", "-1", "65536", "6174,6175"])
def test_a_port_that_is_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="FLEET_DIRECT_PORT"):
        ProcessSettings.read({"FLEET_DIRECT_PORT": text})
