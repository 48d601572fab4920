"""Both networks keep one promise: a request gets its reply, however late, or an error; nobody blocks others."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from harness import until
from patience import PATIENCE_S

from fleet import errors
from fleet.base.cluster import Endpoint
from fleet.base.ports import is_taken
from fleet.errors import ConfigurationError, FleetError, PortInUseError, ProtocolError, StateError
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct import DirectNetwork
from fleet.ps.wire.frame import PIECE_BYTES, Frame, read_frame
from fleet.ps.wire.grpc_client import EXCHANGE, UPLOAD
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Call, Channel, Handler, Listener, Network, Respond, TransportError
from fleet.ps.wire.wire_errors import error_reply, raise_if_error

THREADS = 4
MEBI = 1 << 20


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def free_port(host: str = "127.0.0.1", family: int = socket.AF_INET) -> int:
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def free_endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


class Line:
    """A network with one endpoint on it; whatever a test opens is closed after it."""

    def __init__(self, network: Network, stack: contextlib.ExitStack) -> None:
        self.network = network
        self.endpoint = free_endpoint()
        self._stack = stack

    def listen(self, handler: Handler) -> Listener:
        listener = self.network.listen(self.endpoint, handler)
        self._stack.callback(listener.close)
        return listener

    def connect(self) -> Channel:
        channel = self.network.connect(self.endpoint)
        self._stack.callback(channel.close)
        return channel


NETWORKS: dict[str, Callable[[], Network]] = {
    "loopback": LoopbackNetwork,
    "grpc": lambda: GrpcNetwork(THREADS),
    "direct": lambda: DirectNetwork(GrpcNetwork(THREADS)),
}


@pytest.fixture(params=NETWORKS)
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    with contextlib.ExitStack() as stack:
        yield Line(NETWORKS[request.param](), stack)


@pytest.fixture
def sockets() -> Iterator[Line]:
    with contextlib.ExitStack() as stack:
        yield Line(GrpcNetwork(THREADS), stack)


def ask(step: int = 0, *tensors: torch.Tensor, worker: int = 0) -> Frame:
    return Frame(pb.Request(worker=worker, step=step, pull=pb.Pull()), [WireTensor.of(tensor) for tensor in tensors])


def answer(version: int, *tensors: torch.Tensor) -> Frame:
    return Frame(pb.Reply(version=version), [WireTensor.of(tensor) for tensor in tensors])


def echo(frame: Frame, respond: Respond) -> None:
    respond(Frame(pb.Reply(version=frame.message.step), frame.tensors))


class Parking:
    """A handler that keeps every request until it is told to answer."""

    def __init__(self) -> None:
        self.parked: queue.Queue[tuple[Frame, Respond]] = queue.Queue()

    def __call__(self, frame: Frame, respond: Respond) -> None:
        self.parked.put((frame, respond))

    def take(self) -> tuple[Frame, Respond]:
        return self.parked.get(timeout=PATIENCE_S)


def patiently(call: Call) -> Frame:
    """``result`` on a thread, so that a call that never ends fails its test instead of stopping it."""
    outcome: queue.Queue[Frame | BaseException] = queue.Queue()

    def wait() -> None:
        try:
            outcome.put(call.result())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=wait, daemon=True).start()
    got = outcome.get(timeout=PATIENCE_S)
    if isinstance(got, BaseException):
        raise got
    return got


# ---------------------------------------------------------------------------------------------- requests and replies


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE_BYTES - 64, PIECE_BYTES, PIECE_BYTES + 1, 20 * MEBI])
def test_small_and_large_frames_both_ways(line: Line, size: int) -> None:
    line.listen(echo)
    sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    reply = line.connect().start(ask(7, sent), PATIENCE_S).result()
    assert reply.message.version == 7
    assert torch.equal(reply.tensors[0].torch(), sent)


def test_many_calls_at_once(line: Line) -> None:
    line.listen(echo)
    channels = [line.connect() for _ in range(4)]

    def call(step: int) -> tuple[int, bool]:
        sent = torch.full((step * 37 % 300_000,), step, dtype=torch.int64)
        reply = channels[step % 4].start(ask(step, sent), PATIENCE_S).result()
        return reply.message.version, torch.equal(reply.tensors[0].torch(), sent)

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(call, range(400))) == [(step, True) for step in range(400)]


def test_many_calls_under_way_from_one_thread(line: Line) -> None:
    line.listen(echo)
    channel = line.connect()
    calls = [channel.start(ask(step), PATIENCE_S) for step in range(200)]
    assert [call.result().message.version for call in calls] == list(range(200))


@pytest.mark.parametrize("size", [1, 3 * MEBI])
def test_a_late_reply_from_another_thread(line: Line, size: int) -> None:
    parking = Parking()
    line.listen(parking)
    call = line.connect().start(ask(5), PATIENCE_S)
    frame, respond = parking.take()
    thread = threading.Thread(target=respond, args=(answer(frame.message.step + 1, torch.ones(size)),))
    thread.start()
    reply = patiently(call)
    thread.join()
    assert reply.message.version == 6
    assert reply.tensors[0].torch().sum() == size


def test_replies_in_another_order(line: Line) -> None:
    parking = Parking()
    line.listen(parking)
    channel = line.connect()
    calls = [channel.start(ask(step), PATIENCE_S) for step in range(20)]
    for frame, respond in sorted((parking.take() for _ in calls), key=lambda entry: -entry[0].message.step):
        respond(answer(frame.message.step))
    assert [patiently(call).message.version for call in calls] == list(range(20))


def test_a_parked_call_holds_no_thread(line: Line) -> None:
    parked: list[tuple[Frame, Respond]] = []
    lock = threading.Lock()

    def handler(frame: Frame, respond: Respond) -> None:
        with lock:
            if frame.message.step < 64:
                parked.append((frame, respond))
                return
        for kept, late in parked:
            late(answer(kept.message.step, torch.full((1000,), kept.message.step)))
        respond(answer(64))

    line.listen(handler)
    channels = [line.connect() for _ in range(8)]
    calls = [channels[step % 8].start(ask(step, worker=step), PATIENCE_S) for step in range(64)]
    until(lambda: len(parked) == 64)
    assert patiently(channels[0].start(ask(64), PATIENCE_S)).message.version == 64
    for step, call in enumerate(calls):
        reply = patiently(call)
        assert reply.message.version == step
        assert (reply.tensors[0].torch() == step).all()


# ---------------------------------------------------------------------------------------------- calls that end badly


def test_nobody_listens(line: Line) -> None:
    with pytest.raises(TransportError, match=r"nobody listens|unavailable"):
        line.connect().start(ask(), PATIENCE_S).result()


def test_a_server_that_comes_up_later_is_found(line: Line) -> None:
    channel = line.connect()
    with pytest.raises(TransportError):
        channel.start(ask(), PATIENCE_S).result()
    line.listen(echo)

    def found() -> bool:
        with contextlib.suppress(TransportError):
            return bool(channel.start(ask(3), PATIENCE_S).result().message.version == 3)
        return False

    until(found)


def test_no_reply_in_time(line: Line) -> None:
    parking = Parking()
    line.listen(parking)
    channel = line.connect()
    while parking.parked.empty():  # a busy machine may send nothing in so short a time
        with pytest.raises(TransportError, match=r"no reply within 0\.05 s"):
            channel.start(ask(), 0.05).result()
    _, respond = parking.take()
    respond(answer(1, torch.ones(MEBI)))
    again = channel.start(ask(), PATIENCE_S)
    parking.take()[1](answer(2))
    assert patiently(again).message.version == 2


def test_cancel_wakes_who_waits(line: Line) -> None:
    parking = Parking()
    line.listen(parking)
    channel = line.connect()
    call = channel.start(ask())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call.result)
        _, respond = parking.take()
        assert not waiting.done()
        call.cancel()
        with pytest.raises(TransportError):
            waiting.result(PATIENCE_S)
    respond(answer(1, torch.ones(MEBI)))  # to nobody
    call.cancel()
    again = channel.start(ask(), PATIENCE_S)
    parking.take()[1](answer(2))
    assert patiently(again).message.version == 2


def test_cancel_after_the_reply(line: Line) -> None:
    line.listen(echo)
    call = line.connect().start(ask(3), PATIENCE_S)
    assert call.result().message.version == 3
    call.cancel()


def test_who_gives_up_a_call_that_has_its_reply_disturbs_no_other(line: Line) -> None:
    line.listen(echo)
    channel = line.connect()
    done = channel.start(ask(3), PATIENCE_S)
    assert done.result().message.version == 3
    following = channel.start(ask(4), PATIENCE_S)
    done.cancel()
    with contextlib.suppress(TransportError, FleetError):
        patiently(done)
    assert patiently(following).message.version == 4


def test_a_channel_that_closes_ends_its_calls(line: Line) -> None:
    parking = Parking()
    line.listen(parking)
    mine, other = line.connect(), line.connect()
    ending = [mine.start(ask(step)) for step in range(5)]
    staying = other.start(ask(9), PATIENCE_S)
    parked = [parking.take() for _ in range(6)]
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(call.result) for call in ending]
        mine.close()
        for outcome in waiting:
            with pytest.raises(TransportError):
                outcome.result(PATIENCE_S)
    for frame, respond in parked:
        respond(answer(frame.message.step))
    assert patiently(staying).message.version == 9


def test_a_closed_channel_starts_nothing(line: Line) -> None:
    line.listen(echo)
    channel = line.connect()
    assert channel.start(ask(3), PATIENCE_S).result().message.version == 3
    channel.close()
    channel.close()
    for request in (ask(), ask(0, torch.ones(MEBI))):
        call = channel.start(request, PATIENCE_S)
        call.cancel()
        with pytest.raises(TransportError):
            call.result()


def test_a_server_that_closes_ends_the_calls(line: Line) -> None:
    parking = Parking()
    listener = line.listen(parking)
    channel = line.connect()
    calls = [channel.start(ask(step)) for step in range(8)]
    parked = [parking.take() for _ in calls]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(call.result) for call in calls]
        listener.close()
        for outcome in waiting:
            with pytest.raises(TransportError):
                outcome.result(PATIENCE_S)
    for _, respond in parked:
        respond(answer(1))  # too late, and nobody is disturbed
    with pytest.raises(TransportError):
        channel.start(ask(), PATIENCE_S).result()
    listener.close()


def test_replies_under_way_leave_before_the_server_closes(line: Line) -> None:
    parking = Parking()
    listener = line.listen(lambda frame, respond: (echo if frame.message.step else parking)(frame, respond))
    channel = line.connect()
    call = channel.start(ask(), PATIENCE_S)
    _, respond = parking.take()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(call.result)
        closing = pool.submit(listener.close, PATIENCE_S)

        def refuses() -> bool:
            late = channel.start(ask(1), 2.0)  # less than the other one waits for: gRPC may lose it in between
            try:
                late.result()
            except TransportError:
                return True
            return False

        until(refuses)
        assert not closing.done()
        respond(answer(3, torch.ones(3 * MEBI)))
        reply = waiting.result(PATIENCE_S)
        closing.result(PATIENCE_S)
    assert reply.message.version == 3
    assert reply.tensors[0].torch().sum() == 3 * MEBI


# ---------------------------------------------------------------------------------------------- errors


def told(line: Line, error: Exception) -> FleetError:
    """What a caller sees when its handler raises; the next request has to be answered as ever."""

    def handler(frame: Frame, respond: Respond) -> None:
        if frame.message.step == 1:
            raise error
        echo(frame, respond)

    line.listen(handler)
    channel = line.connect()
    with pytest.raises(FleetError) as caught:
        raise_if_error(channel.start(ask(1), PATIENCE_S).result())
    assert raise_if_error(channel.start(ask(2), PATIENCE_S).result()).message.version == 2
    return caught.value


def test_an_error_of_the_handler(line: Line) -> None:
    sent = StateError("too early", where="worker 3, step 7", expected="a hello", got=0, todo="Say hello.")
    got = told(line, sent)
    assert type(got) is StateError
    assert (got.what, got.where, got.expected, got.got, got.todo) == (
        "too early",
        "worker 3, step 7",
        "a hello",
        "0",
        "Say hello.",
    )
    assert str(got) == str(sent)


@pytest.mark.parametrize("error", [RuntimeError("what a bug"), MemoryError("none"), KeyError("k"), TransportError("t")])
def test_a_bug_in_the_handler(line: Line, error: Exception) -> None:
    got = told(line, error)
    assert type(got) is FleetError
    assert got.got == repr(error)


def test_an_error_whose_text_is_no_text(line: Line) -> None:
    got = told(line, errors.CheckpointError("cannot read \udcff", got="/tmp/\udc80.bin"))
    assert type(got) is errors.CheckpointError
    assert got.got == "/tmp/\\udc80.bin"


def test_a_handler_that_fails_after_its_answer(line: Line) -> None:
    def handler(frame: Frame, respond: Respond) -> None:
        echo(frame, respond)
        respond(answer(99))
        raise RuntimeError("too late")

    line.listen(handler)
    channel = line.connect()
    for step in range(20):
        sent = torch.ones(step * MEBI // 8)
        reply = raise_if_error(channel.start(ask(step, sent), PATIENCE_S).result())
        assert reply.message.version == step
        assert torch.equal(reply.tensors[0].torch(), sent)


CLASSES = [
    cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, FleetError) and cls.__name__ == name
]


@pytest.mark.parametrize("fields", [{}, {"where": "w", "expected": "e", "got": "g", "todo": "t"}], ids=["bare", "full"])
@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_comes_back(cls: type[FleetError], fields: dict[str, Any]) -> None:
    reply = read_frame(pb.Reply, error_reply(cls("what", **fields)).pieces())
    with pytest.raises(FleetError) as caught:
        raise_if_error(reply)
    assert type(caught.value) is cls
    assert vars(caught.value) == vars(cls("what", **fields))
    assert str(caught.value) == str(cls("what", **fields))


@pytest.mark.parametrize(
    ("older", "newer"), [("PlaceTakenError", "DuplicateWorkerError"), ("StillBusyError", "ServerBusyError")]
)
def test_peers_of_an_older_release_know_an_error_by_its_older_name(older: str, newer: str) -> None:
    cls: type[FleetError] = getattr(errors, newer)
    assert getattr(errors, older) is cls
    assert error_reply(cls("what")).message.error.kind == older
    for name in (older, newer):
        with pytest.raises(cls) as caught:
            raise_if_error(Frame(pb.Reply(error=pb.Error(kind=name, what="what"))))
        assert type(caught.value) is cls


def test_an_error_of_an_unknown_class() -> None:
    class Newer(StateError):
        pass

    for reply in (error_reply(Newer("what")), Frame(pb.Reply(error=pb.Error(kind="SystemExit", what="what")))):
        with pytest.raises(FleetError) as caught:
            raise_if_error(reply)
        assert type(caught.value) is FleetError
        assert caught.value.what == "what"


# ---------------------------------------------------------------------------------------------- one peer and the others


@contextlib.contextmanager
def raw_channel(endpoint: Endpoint) -> Iterator[grpc.Channel]:
    """A peer that speaks gRPC and nothing else of ours, on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(str(endpoint), options=options) as channel:
        yield channel


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\0" * 100,
        b"FLT1" + b"\xff" * 100,
        b"FLT1" + bytes(12) + b"\0" * 50,
        bytes(range(256)) * 2000,
        next(Frame(pb.Reply(version=3)).pieces())[:-1],
    ],
    ids=["nothing", "text", "zeros", "sizes", "longer", "much", "cut"],
)
@pytest.mark.parametrize("method", [EXCHANGE, UPLOAD])
def test_garbage_is_answered_with_an_error(sockets: Line, method: str, data: bytes) -> None:
    sockets.listen(echo)
    with raw_channel(sockets.endpoint) as channel:
        if method == EXCHANGE:
            pieces = channel.unary_stream(method)(data, timeout=PATIENCE_S, wait_for_ready=True)
        else:
            pieces = channel.stream_stream(method)(iter([data, data]), timeout=PATIENCE_S, wait_for_ready=True)
        with pytest.raises(ProtocolError):
            raise_if_error(read_frame(pb.Reply, pieces))
    assert sockets.connect().start(ask(3), PATIENCE_S).result().message.version == 3


@pytest.mark.parametrize(
    ("method", "data"), [(EXCHANGE, bytes(3 * MEBI)), ("/fleet.ParameterServer/Other", b""), ("/", b"")]
)
def test_what_grpc_itself_refuses(sockets: Line, method: str, data: bytes) -> None:
    sockets.listen(echo)
    with raw_channel(sockets.endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(method)(data, timeout=PATIENCE_S, wait_for_ready=True))
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
    assert sockets.connect().start(ask(3), PATIENCE_S).result().message.version == 3


def test_bytes_that_are_no_http(sockets: Line) -> None:
    sockets.listen(echo)
    with socket.create_connection((sockets.endpoint.host, sockets.endpoint.port), PATIENCE_S) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        with contextlib.suppress(ConnectionError):
            while peer.recv(1 << 16):
                pass
    assert sockets.connect().start(ask(3), PATIENCE_S).result().message.version == 3


LARGE = torch.ones(4 * MEBI)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_peer_that_does_not_read_blocks_nobody(sockets: Line, late: bool) -> None:
    """It is owed more large replies than the server has threads, and reads none of them."""
    parking = Parking()

    def handler(frame: Frame, respond: Respond) -> None:
        if frame.message.worker == 1:
            parking(frame, respond)
            if not late:
                respond(answer(0, LARGE))
        else:
            echo(frame, respond)

    listener = sockets.listen(handler)
    with raw_channel(sockets.endpoint) as stalled:
        data = next(ask(worker=1).pieces())
        unread = [stalled.unary_stream(EXCHANGE)(data, wait_for_ready=True) for _ in range(3 * THREADS)]
        parked = [parking.take() for _ in unread]
        if late:
            for _, respond in parked:
                respond(answer(0, LARGE))
        channel = sockets.connect()
        for step in range(3):
            reply = patiently(channel.start(ask(step, LARGE), PATIENCE_S))
            assert reply.message.version == step
        # It reads after all: nothing was lost.
        with ThreadPoolExecutor(len(unread)) as pool:
            for reply in pool.map(lambda call: read_frame(pb.Reply, call), unread, timeout=PATIENCE_S):
                assert torch.equal(reply.tensors[0].torch(), LARGE)
    listener.close()


def test_small_replies_overtake_large_ones(sockets: Line) -> None:
    def handler(frame: Frame, respond: Respond) -> None:
        respond(answer(1) if frame.message.step == 1 else answer(0, LARGE))

    sockets.listen(handler)
    with raw_channel(sockets.endpoint) as peer:
        call = peer.unary_stream(EXCHANGE)
        unread = [call(next(ask().pieces()), wait_for_ready=True) for _ in range(3 * THREADS)]
        beat = call(next(ask(1).pieces()), timeout=PATIENCE_S)
        assert read_frame(pb.Reply, beat).message.version == 1
        for large in unread:
            large.cancel()


def test_who_closes_a_round_waits_for_no_reader(sockets: Line) -> None:
    """The last one to arrive does not read its reply; the one released by it gets its own all the same."""
    parking = Parking()

    def handler(frame: Frame, respond: Respond) -> None:
        if frame.message.worker == 0:
            parking(frame, respond)
        else:
            _, released = parking.take()
            respond(answer(1, LARGE))
            released(answer(1, LARGE))

    sockets.listen(handler)
    waiting = sockets.connect().start(ask(), PATIENCE_S)
    until(lambda: not parking.parked.empty())
    with raw_channel(sockets.endpoint) as stalled:
        unread = stalled.unary_stream(EXCHANGE)(next(ask(worker=1).pieces()), wait_for_ready=True)
        assert torch.equal(patiently(waiting).tensors[0].torch(), LARGE)
        unread.cancel()


def test_closing_does_not_wait_for_a_peer_that_does_not_read(sockets: Line) -> None:
    parking = Parking()
    listener = sockets.listen(parking)
    with raw_channel(sockets.endpoint) as stalled:
        data = next(ask().pieces())
        unread = [stalled.unary_stream(EXCHANGE)(data, wait_for_ready=True) for _ in range(2 * THREADS)]
        for _, respond in [parking.take() for _ in unread]:
            respond(answer(0, LARGE))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(listener.close, 0.1).result(PATIENCE_S)
        for call in unread:
            with pytest.raises(grpc.RpcError):
                list(call)
    assert not is_taken(sockets.endpoint)


# ---------------------------------------------------------------------------------------------- ports


def test_a_port_of_this_process_is_taken(line: Line) -> None:
    line.listen(echo)
    with pytest.raises(PortInUseError) as caught:
        line.network.listen(line.endpoint, echo)
    assert isinstance(caught.value, OSError)
    assert str(line.endpoint) in str(caught.value)
    if not isinstance(line.network, LoopbackNetwork):
        assert re.search(rf"\bport {line.endpoint.port} is in use\b", str(caught.value))
        assert re.search(rf"\bprocess {os.getpid()}\b", str(caught.value))
    assert line.connect().start(ask(3), PATIENCE_S).result().message.version == 3


HOLDER = """
import socket, sys
with socket.socket() as held:
    held.bind(("127.0.0.1", 0))
    held.listen()
    print(held.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_port_of_another_process_is_taken() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            endpoint = Endpoint("127.0.0.1", int(holder.stdout.readline()))
            with pytest.raises(PortInUseError) as caught:
                GrpcNetwork(THREADS).listen(endpoint, echo)
        finally:
            holder.stdin.close()
    assert re.search(rf"\bport {endpoint.port} is in use\b", str(caught.value))
    assert re.search(rf"\bprocess {holder.pid}\b", str(caught.value))


def test_a_port_is_free_right_after_closing(line: Line) -> None:
    for step in range(100):
        listener = line.network.listen(line.endpoint, echo)
        channel = line.network.connect(line.endpoint)
        try:
            assert channel.start(ask(step), PATIENCE_S).result().message.version == step
        finally:
            # The server closes first: its side of the connection is the one that lingers.
            listener.close()
            channel.close()


def test_a_server_that_lets_in_late_is_reached_at_once() -> None:
    """Far away, or busy: a connection that takes its time is not begun anew, and the request has its answer."""
    network = GrpcNetwork(THREADS)
    with contextlib.ExitStack() as stack:
        behind = free_endpoint()
        stack.callback(network.listen(behind, echo).close)
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        let_in = threading.Thread(target=_let_in, args=(door, behind, 0.4), daemon=True)
        let_in.start()
        stack.callback(let_in.join)
        channel = network.connect(Endpoint("127.0.0.1", door.getsockname()[1]))
        stack.callback(channel.close)
        assert channel.start(ask(3), PATIENCE_S).result().message.version == 3


def _let_in(door: socket.socket, behind: Endpoint, after_s: float) -> None:
    near, _ = door.accept()
    threading.Event().wait(after_s)
    with near, socket.create_connection((behind.host, behind.port)) as far:
        other = {near: far, far: near}
        while True:
            for side in select.select([near, far], [], [])[0]:
                piece = side.recv(1 << 16)
                if not piece:
                    return
                other[side].sendall(piece)


def test_an_address_that_is_not_ours() -> None:
    endpoint = Endpoint("192.0.2.1", free_port())
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        GrpcNetwork(THREADS).listen(endpoint, echo)


def has_ipv6() -> bool:
    try:
        free_port("::1", socket.AF_INET6)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    network = GrpcNetwork(THREADS)
    endpoint = Endpoint.parse(f"[::1]:{free_port('::1', socket.AF_INET6)}")
    listener = network.listen(endpoint, echo)
    channel = network.connect(endpoint)
    try:
        assert channel.start(ask(3), PATIENCE_S).result().message.version == 3
        with pytest.raises(PortInUseError, match=rf"\bprocess {os.getpid()}\b"):
            network.listen(endpoint, echo)
    finally:
        channel.close()
        listener.close()
    assert not is_taken(endpoint)


def test_a_family_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sockets(*_arguments: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_sockets)
    assert not is_taken(Endpoint("127.0.0.1", 1))
