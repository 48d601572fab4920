"""Jobs that follow one another on the same ports, or run side by side, have nothing to do with each other."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from harness import PATIENT, Job
from test_hostile import member_and_other
from test_processes import Processes, ended, processes  # noqa: F401 - a fixture
from test_resize import Resized

from fleet import Checkpoints, Fleet
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.errors import IdentityError, JobAbortedError, ServerBusyError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import Strategy

JOBS = 60
MANY_JOBS = str(Path(__file__).parent / "scripts" / "many_jobs.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "as fleetrun has it"])
def test_jobs_one_after_another_on_the_same_ports(
    processes: Processes,  # noqa: F811
    free_endpoints: Callable[[int], list[str]],
    name: str,
) -> None:
    """Every process goes from job to job at its own speed: early workers and late servers of each are about."""
    endpoints = free_endpoints(2)
    common = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints), "PADDLE_TRAINERS_NUM": "2"}
    common |= {"FLEET_JOB_ID": name} if name else {}
    started = [
        *(
            processes.start(MANY_JOBS, str(JOBS), TRAINING_ROLE="PSERVER", PADDLE_PSERVER_ID=str(index), **common)
            for index in range(2)
        ),
        *(
            processes.start(MANY_JOBS, str(JOBS), TRAINING_ROLE="TRAINER", PADDLE_TRAINER_ID=str(index), **common)
            for index in range(2)
        ),
    ]
    for process in started:
        code, out, err = ended(process)
        assert code == 0, err
        assert out == f"{JOBS} jobs\n"


@pytest.mark.slow
def test_a_worker_that_outlived_its_job_is_kept_out_of_the_next(
    processes: Processes,  # noqa: F811
    free_endpoints: Callable[[int], list[str]],
) -> None:
    endpoints = free_endpoints(1)
    first = processes.server(endpoints[0], endpoints, 1)
    orphan = processes.worker(0, endpoints, 1, "slow")
    assert orphan.stdout is not None
    assert orphan.stdout.readline() == "joined\n"
    first.kill()
    first.wait()
    second = processes.server(endpoints[0], endpoints, 1)
    # Long enough for the orphan to come by: it looks for its server every second.
    code, out, err = ended(processes.worker(0, endpoints, 1, "brief"))
    assert code == 0, err
    assert "weight -5.0 row -5.0" in out
    assert ended(second)[0] == 0
    code, _, err = ended(orphan)
    assert code == 1
    # Which of the two depends on whether the new worker 0 has said hello when the orphan comes by.
    here = re.escape(endpoints[0])
    assert re.search(rf"no longer part of this job; at {here}|does not know the worker's job: .*; at {here}", err), err


def test_two_jobs_side_by_side_and_a_worker_in_the_wrong_one(free_endpoints: Callable[[int], list[str]]) -> None:
    """Over real sockets, each process a thread."""
    endpoints = dict(zip("ab", free_endpoints(2), strict=True))
    network = GrpcNetwork(4)
    strayed = threading.Event()

    def body(fleet: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        assert strayed.wait(20)
        for _ in range(5):
            optimizer.minimize(weight.sum())
        return weight.item()

    def job(name: str, endpoint: str) -> Job:
        return Job(body, 1, 1, network=network, endpoints=[endpoint], environ={**PATIENT, "FLEET_JOB_ID": name})

    jobs = [job(name, endpoint) for name, endpoint in endpoints.items()]
    threads = [each.start() for each in jobs]
    stray = job("a", endpoints["b"])
    stray.work(0)
    assert isinstance(stray.errors["worker 0"], IdentityError)
    assert f"this server serves another job; at {endpoints['b']}; expected job b; got job a" in str(
        stray.errors["worker 0"]
    )
    strayed.set()
    for each, its_threads in zip(jobs, threads, strict=True):
        each.join(its_threads)
        assert (each.errors, each.results) == ({}, {0: -5.0})


def test_an_early_worker_of_the_next_job_waits_for_the_end_of_this_one() -> None:
    """Worker 0 goes on to the next job while its server still serves worker 1."""
    network, endpoints = LoopbackNetwork(), ["server:1"]
    environ = {**PATIENT, "FLEET_HEARTBEAT_S": "0.05"}
    early, ended_well = threading.Event(), []

    def body(fleet: Fleet, worker: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        if worker == 1:
            assert early.wait(20)
        optimizer.minimize(weight.sum()) if worker else None
        ended_well.append(weight.item())

    def next_body(fleet: Fleet, worker: int) -> float:
        weight = torch.nn.Parameter(torch.full((2,), 10.0))  # another model: the old server would refuse it
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        fleet.init_worker()
        optimizer.minimize(weight.sum())
        return weight[0].item()

    first = Job(body, 2, 1, network=network, endpoints=endpoints, environ=environ)
    following = Job(next_body, 2, 1, network=network, endpoints=endpoints, environ=environ)
    threads = first.start()
    threads[1].join(20)  # worker 0 has said goodbye
    newcomer = threading.Thread(target=following.work, args=(0,), daemon=True)
    newcomer.start()
    newcomer.join(0.5)
    assert newcomer.is_alive(), f"{following.errors}: it should wait"
    early.set()
    first.join(threads)
    rest = [threading.Thread(target=following.serve, args=(0,)), threading.Thread(target=following.work, args=(1,))]
    for thread in rest:
        thread.start()
    for thread in [newcomer, *rest]:
        thread.join(20)
    assert (first.errors, following.errors) == ({}, {})
    assert following.results == {0: 9.0, 1: 9.0}


class TwoJobs(Resized):
    """Its servers serve another job after this one, to which ``begin`` leads."""

    def __init__(self, begin: Callable[[Fleet, Role, int], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begin = begin

    def serve(self, index: int) -> None:
        made = self.fleet(Role.SERVER, index)
        for job in range(2):
            if job:
                self._begin(made, Role.SERVER, index)
            made.init_server()
            made.run_server()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["as before", "with another model", "resumed"])
def test_processes_go_on_to_a_next_job(tmp_path: Path, named: bool, kind: str) -> None:
    """Which has the name of this one where a launcher gave it. Worker 0 goes on while worker 1 is in this one, and
    server 1 while server 0 has not heard that worker 1 has left."""
    late = Fault(Action.DELAY, Endpoint.parse("server0:1"), 1, kind="bye", delay_s=0.2)
    network, steps = FaultyNetwork(LoopbackNetwork(), late), dict[str, int]()
    environ = {**PATIENT, "FLEET_JOB_ID": "a launcher's"} if named else PATIENT
    has_left = threading.Event()

    def begin(made: Fleet, role: Role, index: int) -> None:
        made.init(UserDefinedRoleMaker(index, role, 2, job.endpoints))
        if kind == "resumed":
            steps[f"{role.name} {index}"] = made.resume_from(tmp_path)

    def train(made: Fleet, elements: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(elements))
        optimizer = made.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        made.init_worker()
        with Checkpoints(tmp_path, every_steps=1, background=False, fleet=made) as checkpoints:
            optimizer.minimize(weight.sum())
            checkpoints.after_step()
        return weight.tolist()

    def body(made: Fleet, index: int) -> tuple[list[float], list[float]]:
        first = train(made, 1)
        if index == 1:
            assert has_left.wait(20)
            time.sleep(0.2)  # worker 0 asks for a place in the next job
        made.stop_worker()
        has_left.set()  # by worker 0, who waits for nobody
        begin(made, Role.WORKER, index)
        return first, train(made, 2 if kind == "with another model" else 1)

    job = TwoJobs(begin, body, [0, 1], [0, 1], network=network, environ=environ)
    ended = {"as before": [-1.0], "with another model": [-1.0, -1.0], "resumed": [-2.0]}[kind]
    assert job.run() == [([-1.0], ended)] * 2
    assert network.struck
    assert kind != "resumed" or steps == dict.fromkeys(["WORKER 0", "WORKER 1", "SERVER 0", "SERVER 1"], 1)


@pytest.mark.parametrize("then", [[1, 2], [2, 3]], ids=["one server stays", "none stays"])
def test_processes_go_on_to_a_next_job_after_a_move(then: list[int]) -> None:
    """Worker 0 moves the job, leaves it, and begins the next one, of the same name and on the servers that this one
    began on. Worker 1 has not heard of the move."""
    has_left = threading.Event()

    def begin(made: Fleet, role: Role, index: int) -> None:
        made.init(UserDefinedRoleMaker(index, role, 2, job.endpoints))

    def train(made: Fleet, between: Callable[[], object]) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = made.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
        made.init_worker()
        optimizer.minimize(weight.sum())
        if between():
            optimizer.minimize(weight.sum())
        return weight.item()

    def body(made: Fleet, index: int) -> tuple[float, float]:
        def is_left_alone() -> bool:
            if index == 0:
                made.resize_servers(job.then)
                return False
            assert has_left.wait(20)
            time.sleep(0.2)  # worker 0 asks for a place in the next job
            return True

        first = train(made, is_left_alone)
        made.stop_worker()
        has_left.set()
        begin(made, Role.WORKER, index)
        return first, train(made, lambda: True)

    # A heartbeat tells of a move: there is none.
    environ = {**PATIENT, "FLEET_JOB_ID": "a launcher's", "FLEET_HEARTBEAT_S": "30"}
    job = TwoJobs(begin, body, [0, 1], then, environ=environ)
    job.end(job.start())
    assert job.errors == {}
    assert job.results == {0: (-1.0, -2.0), 1: (-2.0, -2.0)}


def test_an_early_worker_that_is_told_not_to_wait_says_why() -> None:
    network, endpoints = LoopbackNetwork(), ["server:1"]
    early = threading.Event()

    def body(fleet: Fleet, worker: int) -> None:
        fleet.distributed_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        fleet.init_worker()
        assert worker == 0 or early.wait(20)

    def impatient(fleet: Fleet, worker: int) -> None:
        strategy = Strategy(wait_port=False)
        fleet.distributed_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), strategy)
        with pytest.raises(ServerBusyError, match="not finished an earlier job yet; at server:1; got a new worker"):
            fleet.init_worker()
        raise ZeroDivisionError

    first = Job(body, 2, 1, network=network, endpoints=endpoints)
    threads = first.start()
    threads[1].join(20)
    following = Job(impatient, 2, 1, network=network, endpoints=endpoints)
    following.work(0)
    assert isinstance(following.errors["worker 0"], ZeroDivisionError)
    early.set()
    first.join(threads)
    assert first.errors == {}


def test_a_server_is_free_as_soon_as_all_have_heard_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where somebody is not there to hear of it."""
    now = [SystemClock().now()]
    monkeypatch.setattr(SystemClock, "now", lambda _: now[0])
    bye, abort = {"bye": pb.Bye()}, {"abort": pb.Abort(reason="a bad batch")}

    ask, service = member_and_other()
    ask(0, bye)
    assert not service.ended.is_set()
    ask(1, bye)
    assert service.ended.is_set()

    ask, service = member_and_other()
    ask(0, abort)
    assert not service.ended.is_set()
    with pytest.raises(JobAbortedError, match="a bad batch"):
        ask(1, {"beat": pb.Beat()})
    service.tick()
    assert service.ended.is_set()

    ask, service = member_and_other()
    ask(0, abort)
    service.tick()
    assert not service.ended.is_set()
    now[0] += 3600
    service.tick()
    assert service.ended.is_set()
