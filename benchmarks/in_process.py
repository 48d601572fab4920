"""Whole jobs inside one process: every worker and every server is a thread with a ``Fleet`` of its own.

What is studied is what users run: each message is encoded and read again, and only the sockets are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fleet import Fleet
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Network
from fleet.role_maker import Role, UserDefinedRoleMaker

T = TypeVar("T")


def run_job(
    body: Callable[[Fleet, int], T],
    workers: int = 1,
    servers: int = 1,
    *,
    network: Network | None = None,
    model_dir: str | None = None,
) -> list[T]:
    """What ``body(fleet, worker_index)`` returns on each worker. It calls ``init_worker()``; the end is called here."""
    network = network or LoopbackNetwork()
    endpoints = [f"server{index}:1" for index in range(servers)]

    def member(role: Role, index: int) -> Fleet:
        fleet = Fleet(environ={}, network=network)
        fleet.init(UserDefinedRoleMaker(index, role, workers, endpoints))
        return fleet

    def serve(index: int) -> None:
        fleet = member(Role.SERVER, index)
        fleet.init_server(model_dir)
        fleet.run_server()

    def work(index: int) -> T:
        fleet = member(Role.WORKER, index)
        try:
            return body(fleet, index)
        finally:
            fleet.stop_worker()  # also after a failure, or the others would wait for this one

    with ThreadPoolExecutor(workers + servers) as threads:
        serving = [threads.submit(serve, index) for index in range(servers)]
        working = [threads.submit(work, index) for index in range(workers)]
        results = [each.result() for each in working]
        for each in serving:
            each.result()
    return results
