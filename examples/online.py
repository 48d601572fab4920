"""Fresh predictions: a model that learns from a stream of clicks, and is served meanwhile. All of it on this machine.

    python examples/online.py [--port 8080] [--seconds S] [--redis URL] [--log_dir DIR]

Visitors of a made-up shop ask a predictor which items they would click, over HTTP, and then do or do not; that is the
stream, a file that grows or a stream of Redis. Two workers train on it, with two servers. The predictor follows the
servers. Its page, http://127.0.0.1:8080, draws how good the predictions were and how old the model is. Items come into
fashion and go out of it within a minute, so a model that is not fresh is soon wrong. Ctrl-C ends everything.

The parts are in examples/online, each of them as it would be in a system of many machines.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

PARTS = Path(__file__).resolve().parent / "online"
sys.path.insert(0, str(PARTS))

from stream import REDIS  # noqa: E402


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="where the page is; 0: any free port")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long visitors come; else for ever")
    parser.add_argument("--redis", help="redis://host:port, in place of a file")
    parser.add_argument("--log_dir", help="where the job's output is kept; else logs/online-PORT, by the page's port")
    given = parser.parse_args()
    if given.redis is not None and not given.redis.startswith(REDIS):  # it would be the name of a file
        parser.error(f"argument --redis: it begins with one of {', '.join(REDIS)}, and not {given.redis!r}")
    if not given.seconds > 0:
        parser.error(f"argument --seconds: a number above zero, and not {given.seconds:g}")
    try:
        socket.create_server(("127.0.0.1", given.port)).close()
    except (OSError, OverflowError) as error:  # a number that is no port is the latter
        sys.exit(f"the page cannot be at port {given.port}: {str(error).rstrip('.')}. Choose another with --port.")
    *ports, port = *free_ports(2), given.port or free_ports(1)[0]
    servers = ",".join(f"127.0.0.1:{each}" for each in ports)
    log_dir = given.log_dir or f"logs/online-{port}"  # which no other run has while this one lasts
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        place = f"{given.redis}#clicks-{os.getpid()}" if given.redis else f"{folder}/clicks"

        def start(*command: object) -> subprocess.Popen[bytes]:
            # In a session of its own: Ctrl-C is for this process alone, which ends the others, each of them once.
            process = subprocess.Popen([sys.executable, *map(str, command)], start_new_session=True)
            started.callback(process.wait)
            started.callback(process.terminate)
            return process

        predictor = start(PARTS / "serve.py", place, port, servers)
        fleetrun = ("-m", "fleet.launch", "--servers", servers, "--workers", "127.0.0.1,127.0.0.1")
        job = start(*fleetrun, "--log_dir", log_dir, "--view", "plain", PARTS / "train.py", place)
        visitors = start(PARTS / "visitors.py", place, port, given.seconds)
        print(f"The page: http://127.0.0.1:{port} (as soon as the job has begun)", flush=True)
        while (code := job.poll()) is None:  # it ends when the stream does
            failed = [each.returncode for each in (predictor, visitors) if each.poll()]
            if failed:
                return failed[0]
            time.sleep(0.2)
        return code


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("ended", flush=True)
