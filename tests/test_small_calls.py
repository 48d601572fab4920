"""Small look-ups beside gRPC: the same answers, whoever asks at the same time, and what is in error goes back to it."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import test_replica
import torch
from harness import until
from patience import PATIENCE_S
from test_follower import CLOSED, DIM, IDS, Net, rows_of
from test_replica import Caller, Served, asking
from test_security import Files, files  # noqa: F401 (a fixture)

from fleet.base.cluster import Endpoint
from fleet.errors import FleetError
from fleet.ps.wire import small_calls
from fleet.ps.wire.small_calls import MOST_ASKED, Door, SmallCallChannel, SmallCallListener
from fleet.ps.wire.transport import TransportError
from fleet.serving import RemoteModel
from fleet.serving import lookup_pb2 as pb
from fleet.serving.editions import Editions
from fleet.serving.look_ups import LookUps
from fleet.serving.source import Piece, SourceDescription, TableDescription

served = test_replica.served  # the fixture
HERE = Endpoint("127.0.0.1", 1)


# ---------------------------------------------------------------------------------------------- together


def filled(tables: dict[str, TableDescription], rows: dict[str, Any]) -> Editions:
    editions = Editions()
    editions.fit(SourceDescription({}, tables))
    for version, whole in ((1, True), (2, False)):
        draft = editions.begin(whole, version)
        draft.add(Piece(rows=rows if whole else {"a": rows_of([1, 2], 5.0)}))
        assert draft.publish()
    return editions


ALIKE = {name: TableDescription(DIM, limit, 0.5) for name, limit in (("a", None), ("b", 50), ("c", None))}
UNLIKE = {**ALIKE, "d": TableDescription(2, None, 0.0, torch.float64)}


@pytest.mark.parametrize("tables", [ALIKE, UNLIKE], ids=["rows of one kind", "of two"])
@pytest.mark.parametrize("seed", range(5))
def test_each_of_many_is_answered_as_if_it_were_alone(tables: dict[str, TableDescription], seed: int) -> None:
    draw = random.Random(seed)
    rows = {
        name: type(some := rows_of(range(0, 40, draw.randint(1, 3)), 1.0))(
            some.ids, torch.randn(len(some.ids), table.embedding_dim, dtype=table.dtype)
        )
        for name, table in tables.items()
    }
    look_ups = LookUps(filled(tables, rows), 7, lambda: 0.25)
    kinds = [[(draw.randrange(len(tables)), draw.randint(0, 3)) for _ in range(draw.randint(0, 4))] for _ in range(6)]

    def request() -> bytes:
        wanted = [(place, [draw.randint(0, 45) for _ in range(count)]) for place, count in draw.choice(kinds)]
        at = draw.choice([{}, {"instance": 7, "edition": 1}, {"instance": 7, "edition": 2}, {"instance": 8}])
        made = asking(*wanted, **at).SerializeToString()
        bad = asking((1, [draw.choice([50, -1, 3])])).SerializeToString()
        return draw.choice([made] * 8 + [bad, b"\xff\xff", asking((9, [1])).SerializeToString(), b"", bad[:-1]])

    def alone(asked: bytes) -> Any:
        with contextlib.suppress(FleetError):
            return pb.Rows.FromString(look_ups.one(asked, 1 << 20))
        return None

    requests = [request() for _ in range(90)]
    together = [each if each is None else pb.Rows.FromString(each) for each in look_ups.together(requests, 1 << 20)]
    assert together == [alone(each) for each in requests]


def test_what_is_asked_together_is_counted_and_bounded() -> None:
    editions = filled(ALIKE, {name: rows_of(range(9), 1.0) for name in ALIKE})
    look_ups = LookUps(editions, 7, lambda: 0.0)
    request = asking((0, [1, 2]), (1, [3, 49])).SerializeToString()
    assert len(set(look_ups.together([request] * 5, 1 << 20))) == 1
    assert (editions.lookups, editions.rows_asked, editions.misses) == (5, 20, 5)
    assert look_ups.together([request], 16) == [None], "it asks for more than 16 bytes"


# ---------------------------------------------------------------------------------------------- connections


class Echo:
    """Answers with what was asked, and holds answers back as long as it is told to; ``no`` is for gRPC."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __call__(self, requests: Any) -> list[bytes | None]:
        self.batches.append(len(requests))
        assert self.goes_on.wait(PATIENCE_S)
        return [None if each == b"no" else each * 2 for each in requests]


@pytest.fixture
def echo() -> Iterator[tuple[Echo, SmallCallListener]]:
    answer = Echo()
    with contextlib.closing(SmallCallListener(HERE, 0, answer, only_near=False)) as listener:
        yield answer, listener
        answer.goes_on.set()


@pytest.fixture(params=["near", "far"])
def channel(request: Any, echo: tuple[Echo, SmallCallListener]) -> Iterator[SmallCallChannel]:
    """By the name on this machine, or over TCP."""
    door = echo[1].door
    if request.param == "far":
        with contextlib.closing(SmallCallListener(HERE, free_port(), echo[0], only_near=False)) as listener:
            door = Door(listener.door.key, "", listener.door.port)
            with contextlib.closing(SmallCallChannel(HERE, door)) as made:
                yield made
        return
    with contextlib.closing(SmallCallChannel(HERE, Door(door.key, door.local))) as made:
        yield made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_calls_of_many_threads_have_their_own_answers(channel: SmallCallChannel) -> None:
    wrong: list[Any] = []

    def ask(number: int) -> None:
        draw = random.Random(number)
        for _ in range(30):
            asked = draw.randbytes(draw.choice([1, 10, 1000, MOST_ASKED]))
            answer = channel.ask(asked, PATIENCE_S)
            if answer != asked * 2:
                wrong.append((number, len(asked), answer and len(answer)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []


def test_what_has_come_meanwhile_is_answered_together(echo: tuple[Echo, SmallCallListener]) -> None:
    answer, listener = echo
    answer.goes_on.clear()
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(connected(listener.door)) for _ in range(9)]
        socks[0].sendall(framed(b"first"))
        until(lambda: answer.batches == [1])
        for sock in socks[1:]:
            sock.sendall(framed(b"a") + framed(b"b"))
        time.sleep(0.05)  # for the system to have them all
        answer.goes_on.set()
        assert [received(sock) for sock in socks[1:]] == [b"aa"] * 8
        assert [received(sock) for sock in socks[1:]] == [b"bb"] * 8
    assert max(answer.batches) > 1


def connected(door: Door, key: bytes | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect("\0" + door.local)
    with contextlib.suppress(BrokenPipeError):  # it may have been hung up on
        sock.sendall(door.key if key is None else key)
    return sock


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def received(sock: socket.socket) -> bytes:
    (size,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(size, socket.MSG_WAITALL)


def is_hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_calls_that_come_faster_than_answers_leave_wait_in_the_socket(
    echo: tuple[Echo, SmallCallListener], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come takes no more memory than one message, and none of it is lost."""
    most, read = [0], small_calls._Peer.read

    def watched(peer: Any) -> None:
        read(peer)
        most[0] = max(most[0], len(peer.came))

    monkeypatch.setattr(small_calls._Peer, "read", watched)
    count = 400_000 // (size + 4)
    with connected(echo[1].door) as sock:
        sender = threading.Thread(target=sock.sendall, args=(framed(b"x" * size) * count,))
        sender.start()
        assert {received(sock) for _ in range(count)} == {b"x" * 2 * size}
        sender.join(PATIENCE_S)
    assert 0 < most[0] <= len(framed(bytes(MOST_ASKED)))


@pytest.mark.parametrize(
    ("key", "sent"),
    [
        (bytes(16), framed(b"x")),
        (b"short", b""),
        (None, struct.pack("<I", MOST_ASKED + 1)),
        (None, struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000),
        (None, framed(b"no")),
    ],
    ids=["another key", "a part of a key", "too large", "much too large", "for gRPC"],
)
def test_who_is_not_served_is_hung_up_on_and_others_go_on(
    echo: tuple[Echo, SmallCallListener], key: bytes | None, sent: bytes
) -> None:
    with connected(echo[1].door) as good, connected(echo[1].door, key) as bad:
        with contextlib.suppress(ConnectionError):  # by now, perhaps
            bad.sendall(sent)
        assert is_hung_up(bad)
        good.sendall(framed(b"x"))
        assert received(good) == b"xx"


def test_messages_that_come_in_parts_and_several_at_once(echo: tuple[Echo, SmallCallListener]) -> None:
    with connected(echo[1].door) as sock:
        stream = framed(b"one") + framed(b"") + framed(b"three" * 5000)
        for start in range(0, len(stream), 7001):
            sock.sendall(stream[start : start + 7001])
            time.sleep(0.002)
        assert [received(sock) for _ in range(3)] == [b"oneone", b"", b"three" * 10_000]


def test_who_does_not_read_is_left_and_holds_up_nobody(
    echo: tuple[Echo, SmallCallListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_calls, "_STALL_S", 0.2)
    monkeypatch.setattr(small_calls, "_LOOK_S", 0.05)
    with connected(echo[1].door) as deaf, connected(echo[1].door) as good:
        deaf.settimeout(0.5)
        large, sent = framed(b"x" * MOST_ASKED), 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 1000:  # until it is not read from any more
                deaf.sendall(large)
                sent += 1
        assert sent < 1000
        good.sendall(framed(b"x"))
        assert received(good) == b"xx"
        until(lambda: len(echo[1]._peers) == 1)


def test_who_says_nothing_is_left(echo: tuple[Echo, SmallCallListener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_calls, "_HANDSHAKE_S", 0.1)
    monkeypatch.setattr(small_calls, "_LOOK_S", 0.05)
    with connected(echo[1].door, b"") as silent:
        assert is_hung_up(silent)


def test_strangers_are_only_so_many(echo: tuple[Echo, SmallCallListener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_calls, "_MOST_STRANGERS", 2)
    with contextlib.ExitStack() as opened:
        good = opened.enter_context(connected(echo[1].door))
        good.sendall(framed(b"x"))
        assert received(good) == b"xx"
        for _ in range(2):
            opened.enter_context(connected(echo[1].door, b""))
        until(lambda: len(echo[1]._peers) == 3)
        assert is_hung_up(opened.enter_context(connected(echo[1].door, b"")))


def test_a_channel_goes_to_grpc_when_there_is_nobody(
    echo: tuple[Echo, SmallCallListener], channel: SmallCallChannel
) -> None:
    assert channel.ask(b"x", PATIENCE_S) == b"xx"
    assert channel.ask(b"no", PATIENCE_S) is None
    assert channel.ask(b"x", PATIENCE_S) == b"xx", "over another connection"
    assert channel.ask(b"x" * (MOST_ASKED + 1), PATIENCE_S) is None
    echo[0].goes_on.clear()
    with pytest.raises(TransportError, match=r"no answer within 0\.1 s"):
        channel.ask(b"x", 0.1)
    echo[0].goes_on.set()
    channel.close()
    assert channel.ask(b"x", PATIENCE_S) is None


def test_a_door_that_is_gone_is_tried_again_after_longer_and_longer(
    echo: tuple[Echo, SmallCallListener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleet.wire")
    clock = SimpleNamespace(now=lambda: now[0])
    now = [0.0]
    door = echo[1].door
    with contextlib.closing(SmallCallChannel(HERE, Door(door.key, door.local), clock)) as channel:
        with monkeypatch.context() as network:
            network.setattr(small_calls, "reach", lambda *_: (_ for _ in ()).throw(OSError("no way there")))
            for _ in range(2000):
                assert channel.ask(b"x", 1.0) is None
                now[0] += 0.1
        tried = [float(each) for each in re.findall(r"through gRPC for ([\d.]+) s: no way", caplog.text)]
        assert tried[:4] == [0.1, 0.2, 0.4, 0.8]
        assert tried[-1] == 60.0
        assert len(tried) < 15
        now[0] += 60.0
        assert channel.ask(b"x", PATIENCE_S) == b"xx", "the network is back"


def test_a_peer_that_asks_on_and_does_not_read_has_one_answer_under_way(echo: tuple[Echo, SmallCallListener]) -> None:
    with connected(echo[1].door) as deaf:
        message = b"x" * 16_000
        deaf.setblocking(False)
        sent, stream = 0, framed(message) * 4000
        until(lambda: echo[1]._peers)
        (peer,) = echo[1]._peers

        def is_left_waiting() -> bool:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += deaf.send(stream[sent : sent + 100_000])
            return peer.waits

        until(is_left_waiting)
        assert len(peer.unsent) <= len(framed(message * 2))
        assert len(peer.came) < 3 * MOST_ASKED
        deaf.settimeout(PATIENCE_S)
        whole = sent // len(framed(message))
        for _ in range(whole):
            assert received(deaf) == message * 2
        assert whole > 3


def test_without_descriptors_others_are_served_and_the_doors_open_again(
    echo: tuple[Echo, SmallCallListener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small_calls, "_LOOK_S", 0.2)
    with connected(echo[1].door) as good:
        good.sendall(framed(b"x"))
        assert received(good) == b"xx"
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        fresh = socket.socket(socket.AF_UNIX)
        fresh.settimeout(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        try:
            fresh.connect("\0" + echo[1].door.local)
            until(lambda: "could be taken" in caplog.text)
            good.sendall(framed(b"x"))
            assert received(good) == b"xx"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        with fresh:
            fresh.sendall(echo[1].door.key + framed(b"y"))
            assert received(fresh) == b"yy"
    assert caplog.text.count("could be taken") < 20, "it does not spin"


def test_without_descriptors_nobody_is_let_in_at_any_door_and_the_others_are_served() -> None:
    answer, port = Echo(), free_port()
    with contextlib.ExitStack() as opened:
        listener = SmallCallListener(HERE, port, answer, only_near=False)
        opened.callback(listener.close)
        good = opened.enter_context(connected(listener.door))
        answer.goes_on.clear()
        opened.callback(answer.goes_on.set)
        good.sendall(framed(b"x"))
        until(lambda: answer.batches == [1])
        late = [opened.enter_context(socket.socket(family)) for family in (socket.AF_UNIX, socket.AF_INET)]
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        try:
            # Both have come when the listener looks next.
            late[0].connect("\0" + listener.door.local)
            late[1].connect(("127.0.0.1", port))
            answer.goes_on.set()
            assert received(good) == b"xx"
            until(lambda: listener._is_shut)
            good.sendall(framed(b"y"))
            assert received(good) == b"yy"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        for sock in late:
            sock.settimeout(PATIENCE_S)
            sock.sendall(listener.door.key + framed(b"z"))
            assert received(sock) == b"zz"


# ---------------------------------------------------------------------------------------------- replicas


def door_of(endpoint: str) -> Any:
    with Caller(endpoint) as call:
        told = call("Describe", pb.DescribeRequest())
        return told.door if told.HasField("door") else None


def test_a_replica_answers_beside_grpc_as_by_it(served: Served) -> None:
    endpoint = served.start()
    door = door_of(endpoint)
    with contextlib.closing(SmallCallChannel(HERE, Door(door.key, door.local, door.port))) as channel:
        with Caller(endpoint) as call:
            request = asking((0, [0, 3, 5]), (1, [2]))
            beside = pb.Rows.FromString(channel.ask(request.SerializeToString(), PATIENCE_S))
            by_it = call("LookUp", request)
        assert beside.values == by_it.values
        assert (beside.state.instance, beside.state.edition) == (by_it.state.instance, by_it.state.edition)
        assert channel.ask(asking((1, [CLOSED])).SerializeToString(), PATIENCE_S) is None, "gRPC says why"


def test_a_remote_model_asks_beside_grpc(served: Served) -> None:
    endpoint = served.start()
    with RemoteModel(Net(), [endpoint]) as remote:
        remote(IDS)
        (replica,) = remote._source._replicas
        first = replica.small
        assert len(first._idle) == 1
        assert "LookUp" not in replica.channel._calls
        served.end(endpoint)
        served.start(endpoint)  # another instance, with another door
        remote(IDS)
        until(lambda: replica.small is not first)
        remote(IDS)
        assert len(replica.small._idle) == 1


def test_where_direct_connections_are_off_all_goes_by_grpc(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert door_of(served.start(FLEET_DIRECT_PORT="off")) is None
    endpoint = served.start()
    monkeypatch.setenv("FLEET_DIRECT_PORT", "off")
    with RemoteModel(Net(), [endpoint]) as remote:
        remote(IDS)
        assert remote._source._replicas[0].small is None


def test_with_certificates_only_the_own_machine_is_let_in_beside_grpc(
    served: Served,
    files: Files,  # noqa: F811
) -> None:
    endpoint = served.start(**files.issued("127.0.0.1"), **files.trusting(), FLEET_DIRECT_PORT=str(free_port()))
    door = served.running[endpoint][0]._small.door
    assert door.local
    assert not door.port
