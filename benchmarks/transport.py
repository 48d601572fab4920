"""How a reply can come late over Python's gRPC, and what each way costs: the figures behind docs/decisions/0001.

    python benchmarks/transport.py [--quick] [--json FILE]

One server process a way, one client, loopback; the ways take turns, three times. Every exchange sends ``up`` bytes
and gets ``down`` bytes back.

    threaded       a handler that returns its reply: fast, and a reply that has to wait holds a thread of the pool
    non-blocking   a handler that is given a callback and may answer from any thread, any time: what fleet uses
    aio            grpc.aio, the reply made on the event loop
    aio + threads  grpc.aio, the reply made on a thread, as real work would have to be
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

METHOD = "/benchmark/Exchange"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
WAYS = ("threaded", "non-blocking", "aio", "aio + threads")
#: bytes up, bytes down, exchanges
SIZES = ((100, 100, 400), (300_000, 100_000, 400), (1_500_000, 1_500_000, 100), (16_000_000, 16_000_000, 15))
THREADS = 4
ROUNDS = 3


def reply_to(request: bytes) -> bytes:
    return bytes(int.from_bytes(request[:8], "little"))


def serve_threads(way: str) -> None:
    def non_blocking(request: bytes, _: Any, send: Any) -> None:
        send(reply_to(request))
        send(None)

    non_blocking.experimental_non_blocking = True  # type: ignore[attr-defined]

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            if way == "threaded":
                return grpc.unary_unary_rpc_method_handler(lambda request, _: reply_to(request))
            return grpc.unary_stream_rpc_method_handler(non_blocking)

    server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
    server.add_generic_rpc_handlers((Handlers(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(0)


async def serve_aio(way: str) -> None:
    pool = ThreadPoolExecutor(THREADS)

    async def handler(request: bytes, _: Any) -> bytes:
        if way == "aio":
            return reply_to(request)
        return await asyncio.get_running_loop().run_in_executor(pool, reply_to, request)

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(handler)

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Handlers(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def measure(way: str, quick: bool) -> list[list[float]]:
    """Seconds of every exchange, one list for each of ``SIZES``."""
    command = [sys.executable, __file__, "--serve", way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
            method = (channel.unary_stream if way == "non-blocking" else channel.unary_unary)(METHOD)

            def exchange(request: bytes) -> int:
                return sum(map(len, method(request))) if way == "non-blocking" else len(method(request))

            measured = []
            for up, down, count in SIZES:
                request = down.to_bytes(8, "little") + bytes(max(0, up - 8))
                times = []
                for number in range(count // (10 if quick else 1) + 3):
                    began = time.perf_counter()
                    assert exchange(request) == down
                    if number >= 3:  # the first ones set up the connection
                        times.append(time.perf_counter() - began)
                measured.append(times)
        server.stdin.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the exchanges")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        if options.serve.startswith("aio"):
            asyncio.run(serve_aio(options.serve))
        else:
            serve_threads(options.serve)
        return
    times: dict[str, list[list[float]]] = {way: [[] for _ in SIZES] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            for all_times, more in zip(times[way], measure(way, options.quick), strict=True):
                all_times += more
    rows = [
        {"way": way, "up": up, "down": down, "median_us": round(statistics.median(times[way][index]) * 1e6)}
        for way in WAYS
        for index, (up, down, _) in enumerate(SIZES)
    ]
    print(f"{'median, microseconds':<20}" + "".join(f"{way:>15}" for way in WAYS))
    for up, down, _ in SIZES:
        figures = [row["median_us"] for row in rows if (row["up"], row["down"]) == (up, down)]
        print(f"{up:>9} /{down:>9}" + "".join(f"{figure:>15}" for figure in figures))
    if options.json:
        options.json.write_text(json.dumps({"grpcio": grpc.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
