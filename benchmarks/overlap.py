"""What it is worth that gradients leave while backward still runs, where the network and not the machine is the limit.

    python benchmarks/overlap.py [--quick] [--json FILE]

One worker and one server over gRPC, eight parameters of 8 MiB. A backward pauses before each of them and needs no core
meanwhile, as on an accelerator. Steps by ``minimize`` and by ``backward`` and ``step`` take turns. For a slower network
than loopback is (root is needed for it, and nothing else on the machine notices):

    unshare -n sh -c "ip link set lo up; tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 100ms;
        exec python benchmarks/overlap.py"
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import end_like_an_exit, free_endpoints, median_ratio, print_table, progress, write_json

import fleet
from fleet.role_maker import Role, UserDefinedRoleMaker

PARAMETERS, NUMBERS, PAUSE_S, ROUNDS = 8, 1 << 21, 0.1, 7


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: ARG004
        time.sleep(PAUSE_S)
        return grad


def join(role: Role, endpoint: str) -> tuple[list[torch.nn.Parameter], Any]:
    fleet.init(UserDefinedRoleMaker(0, role, 1, [endpoint]))
    parameters = [torch.nn.Parameter(torch.zeros(NUMBERS)) for _ in range(PARAMETERS)]
    return parameters, fleet.distributed_optimizer(torch.optim.SGD(parameters, lr=0.1))


def serve(endpoint: str) -> None:
    join(Role.SERVER, endpoint)
    fleet.init_server()
    fleet.run_server()


def train(endpoint: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step."""
    parameters, optimizer = join(Role.WORKER, endpoint)
    fleet.init_worker()

    def loss() -> torch.Tensor:
        value = torch.ones((), requires_grad=True)
        for parameter in parameters:
            value = Pause.apply(value * parameter[0])
        return value

    def apart() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    ways: dict[str, Callable[[], None]] = {
        "backward and step": apart,
        "minimize": lambda: optimizer.minimize(loss()),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for name in progress([*ways] * (rounds + 1)):
        began = time.perf_counter()
        ways[name]()
        took[name].append(time.perf_counter() - began)
    fleet.stop_worker()
    return {name: seconds[1:] for name, seconds in took.items()}  # the first step sets up connections


def main() -> None:
    end_like_an_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["FLEET_DIRECT_PORT"] = "off"  # what tc slows down is the network, not a Unix socket
    if options.serve:
        serve(options.serve)
        return
    (endpoint,) = free_endpoints(1)
    with subprocess.Popen([sys.executable, __file__, "--serve", endpoint]) as server:
        try:
            took = train(endpoint, 1 if options.quick else ROUNDS)
            server.wait(10)
        finally:
            server.kill()
    head = ["way", "s a step", "of backward and step"]
    plain = took["backward and step"]
    rows = [[name, statistics.median(each), median_ratio(each, plain)] for name, each in took.items()]
    title = f"{PARAMETERS} parameters of {NUMBERS * 4 >> 20} MiB, {PARAMETERS * PAUSE_S:.1f} s of backward"
    print_table(title, head, rows)
    write_json(options.json, took=took)


if __name__ == "__main__":
    main()
