"""How fast bytes move between two processes of this machine: a TCP socket, Python's gRPC, and Fleet's transports.

    python benchmarks/wire.py [--quick] [--json FILE]

Every exchange sends some bytes, waits until all are there, and gets as many back, as a push of gradients and the new
values do. The ways take turns. What they move lies in memory that exists before.

    TCP socket     into a buffer that exists already
    gRPC stream    messages of 1 MiB, made before and thrown away: the least that gRPC can be asked to do
    gRPC, buffers  the same, cut from one buffer and put into another: what anybody does who has tensors to move
    fleet, gRPC    a frame with one tensor, where no direct connection can be made
    fleet          the same over a direct connection
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from measuring import end_like_an_exit, print_table, progress, write_json

from fleet.base.cluster import Endpoint
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct import DirectNetwork
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.transport import Network, Respond

#: Bytes up, and as many down, with the exchanges of a round.
SIZES = ((1 << 10, 300), (1 << 14, 300), (1 << 17, 200), (1 << 20, 100), (1 << 23, 20), (1 << 26, 6))
MESSAGE_BYTES = 1 << 20
#: First exchanges set up the connection and grow its windows.
WARMUP = 3
ROUNDS = 5
METHOD = "/benchmark/Exchange"
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.lookahead_bytes", 1 << 22),
]

Exchange = Callable[[], None]


# ---------------------------------------------------------------- a TCP socket


def serve_tcp(size: int) -> None:
    buffer = bytearray(size)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _announce(listening.getsockname()[1])
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while _receive(connection, buffer):
                connection.sendall(buffer)


@contextlib.contextmanager
def over_tcp(port: int, size: int) -> Iterator[Exchange]:
    sent, received = bytes(size), bytearray(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange() -> None:
            connection.sendall(sent)
            assert _receive(connection, received)

        yield exchange


def _receive(connection: socket.socket, buffer: bytearray) -> bool:
    """Fill the buffer; False where the peer has hung up."""
    rest = memoryview(buffer)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            return False
        rest = rest[count:]
    return True


# ---------------------------------------------------------------- gRPC


def ready_made(size: int) -> Callable[[], Iterable[bytes]]:
    messages = [bytes(min(MESSAGE_BYTES, size - start)) for start in range(0, size, MESSAGE_BYTES)]
    return lambda: iter(messages)


def cut(size: int) -> Callable[[], Iterable[bytes]]:
    buffer = memoryview(bytearray(size))
    return lambda: (bytes(buffer[start : start + MESSAGE_BYTES]) for start in range(0, size, MESSAGE_BYTES))


def drop(size: int) -> Callable[[Iterable[bytes]], None]:
    def take(messages: Iterable[bytes]) -> None:
        assert sum(map(len, messages)) == size

    return take


def put(size: int) -> Callable[[Iterable[bytes]], None]:
    buffer = memoryview(bytearray(size))

    def take(messages: Iterable[bytes]) -> None:
        filled = 0
        for message in messages:
            buffer[filled : filled + len(message)] = message
            filled += len(message)
        assert filled == size

    return take


def serve_grpc(size: int, make: Any, use: Any) -> None:
    messages, take = make(size), use(size)

    def handler(requests: Iterator[bytes], _: Any) -> Iterable[bytes]:
        take(requests)
        return messages()

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(handler)

    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((Handlers(),))
    _announce(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    sys.stdin.read()
    server.stop(0)


@contextlib.contextmanager
def over_grpc(port: int, size: int, make: Any, use: Any) -> Iterator[Exchange]:
    messages, take = make(size), use(size)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        method = channel.stream_stream(METHOD)
        yield lambda: take(method(messages()))


# ---------------------------------------------------------------- fleet's transport


def _tensor(size: int) -> WireTensor:
    return WireTensor.of(np.zeros(size // 4, np.float32))


def plain() -> Network:
    return GrpcNetwork(threads=12)


def direct() -> Network:
    return DirectNetwork(plain())


def serve_fleet(network: Network, size: int) -> None:
    tensor = _tensor(size)

    def handler(_: Frame, respond: Respond) -> None:
        respond(Frame(pb.Reply(version=1), [tensor]))

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as chosen:
        port = chosen.getsockname()[1]
    listener = network.listen(Endpoint.parse(f"127.0.0.1:{port}"), handler)
    _announce(port)
    sys.stdin.read()
    listener.close()


@contextlib.contextmanager
def over_fleet(network: Network, port: int, size: int) -> Iterator[Exchange]:
    tensor = _tensor(size)
    channel = network.connect(Endpoint.parse(f"127.0.0.1:{port}"))

    def exchange() -> None:
        reply = channel.start(Frame(pb.Request(push=pb.Push()), [tensor])).result()
        assert reply.tensors[0].array.nbytes == size

    with contextlib.closing(channel):
        yield exchange


# ---------------------------------------------------------------- measuring

WAYS: dict[str, tuple[Callable[[int], None], Callable[[int, int], contextlib.AbstractContextManager[Exchange]]]] = {
    "TCP socket": (serve_tcp, over_tcp),
    "gRPC stream": (
        lambda size: serve_grpc(size, ready_made, drop),
        lambda port, size: over_grpc(port, size, ready_made, drop),
    ),
    "gRPC, buffers": (
        lambda size: serve_grpc(size, cut, put),
        lambda port, size: over_grpc(port, size, cut, put),
    ),
    "fleet, gRPC": (
        lambda size: serve_fleet(plain(), size),
        lambda port, size: over_fleet(plain(), port, size),
    ),
    "fleet": (
        lambda size: serve_fleet(direct(), size),
        lambda port, size: over_fleet(direct(), port, size),
    ),
}


def _announce(port: int) -> None:
    print(port, flush=True)


def measure(way: str, size: int, count: int) -> list[float]:
    """Seconds of each exchange with a server in a process of its own."""
    command = [sys.executable, __file__, "--serve", way, "--size", str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            times = []
            with WAYS[way][1](int(server.stdout.readline()), size) as exchange:
                for _ in range(count + WARMUP):
                    began = time.perf_counter()
                    exchange()
                    times.append(time.perf_counter() - began)
            server.stdin.close()
            server.wait(10)
        finally:
            server.kill()
    return times[WARMUP:]


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the exchanges")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        WAYS[options.serve][0](options.size)
        return
    times: dict[tuple[str, int], list[float]] = {(way, size): [] for way in WAYS for size, _ in SIZES}
    turns = [
        (way, size, count // 4 + 1 if options.quick else count)
        for _ in range(1 if options.quick else ROUNDS)
        for size, count in SIZES
        for way in WAYS
    ]
    for way, size, count in progress(turns, lambda turn: f"{turn[0]}, {turn[1]:,} bytes"):
        times[way, size] += measure(way, size, count)
    median_s = {key: statistics.median(each) for key, each in times.items()}
    print_table(
        "Microseconds of an exchange, medians",
        ["bytes up, and down", *WAYS],
        [[f"{size:,}", *(median_s[way, size] * 1e6 for way in WAYS)] for size, _ in SIZES],
    )
    print_table(
        "GB a second, both ways counted",
        ["bytes up, and down", *WAYS],
        [[f"{size:,}", *(2e-9 * size / median_s[way, size] for way in WAYS)] for size, _ in SIZES],
    )
    write_json(
        options.json,
        quick=options.quick,
        rows=[{"way": way, "bytes": size, "median_s": each} for (way, size), each in median_s.items()],
    )


if __name__ == "__main__":
    main()
