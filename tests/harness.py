"""Whole jobs inside one process: every worker and server is a thread with a ``Fleet`` of its own."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, for longer than some jobs here wait for anybody
from inside import abort
from patience import PATIENCE_S

from fleet import Fleet
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Network
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.transpiler import DistributeTranspilerConfig

#: Long enough for a busy machine.
PATIENT = {"FLAGS_rpc_deadline": "60000", "FLEET_STARTUP_DEADLINE_S": "60"}
#: For who waits until somebody is given up on: a busy machine may let nobody speak for a second.
SOON = {**PATIENT, "FLAGS_rpc_deadline": "2000", "FLEET_HEARTBEAT_S": "0.05"}

Body = Callable[[Fleet, int], Any]


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.005)


class Job:
    """``workers`` threads run ``body(fleet, index)``; ``servers`` threads serve. ``run`` returns what the bodies do."""

    def __init__(
        self,
        body: Body,
        workers: int = 1,
        servers: int = 1,
        *,
        network: Network | None = None,
        environ: Mapping[str, str] | None = None,
        model_dir: str | None = None,
        endpoints: list[str] | None = None,
    ) -> None:
        self.body = body
        self.workers = workers
        self.endpoints = endpoints or [f"server{index}:1" for index in range(servers)]
        self.network = network or LoopbackNetwork()
        self.environ = PATIENT if environ is None else environ
        self.model_dir = model_dir
        self.results: dict[int, Any] = {}
        self.errors: dict[str, BaseException] = {}

    def fleet(self, role: Role, index: int) -> Fleet:
        fleet = Fleet(environ=self.environ, network=self.network)
        fleet.init(UserDefinedRoleMaker(index, role, self.workers, self.endpoints))
        return fleet

    def serve(self, index: int) -> None:
        try:
            fleet = self.fleet(Role.SERVER, index)
            fleet.init_server(self.model_dir)
            fleet.run_server()
        except BaseException as error:
            self.errors[f"server {index}"] = error

    def work(self, index: int) -> None:
        fleet = None
        try:
            fleet = self.fleet(Role.WORKER, index)
            self.results[index] = self.body(fleet, index)
            fleet.stop_worker()
        except BaseException as error:
            self.errors[f"worker {index}"] = error
            if fleet is not None:
                abort(fleet, "".join(traceback.format_exception(error)))

    def start(self) -> list[threading.Thread]:
        servers = [(self.serve, index) for index in range(len(self.endpoints))]
        threads = [
            threading.Thread(target=target, args=(index,), name=f"job-{target.__name__}-{index}", daemon=True)
            for target, index in [*servers, *((self.work, index) for index in range(self.workers))]
        ]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads: list[threading.Thread], timeout_s: float = 60.0) -> None:
        for thread in threads:
            thread.join(timeout_s)
            if thread.is_alive():
                # Not before: it may meet the end of another thread, and both wait for ever.
                frame = sys._current_frames().get(thread.ident or 0)
                where = "".join(traceback.format_stack(frame)) if frame is not None else ""
                raise AssertionError(f"{thread.name} hangs; others have failed by {self.errors}\n{where}")

    def run(self) -> list[Any]:
        """The results of all workers; the first failure is raised."""
        self.join(self.start())
        for name, error in sorted(self.errors.items(), key=lambda item: "worker" not in item[0]):
            raise AssertionError(f"{name} failed: {error}") from error
        return [self.results[index] for index in range(self.workers)]


def run_job(body: Body, workers: int = 1, servers: int = 1, **options: Any) -> list[Any]:
    return Job(body, workers, servers, **options).run()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of a model's dense parameters."""
    return [p.detach().clone() for p in model.parameters() if p.shape[:1] != (0,)]


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def config(**settings: Any) -> DistributeTranspilerConfig:
    made = DistributeTranspilerConfig()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
