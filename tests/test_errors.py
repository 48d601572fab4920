"""What a user is told when something is wrong: what, where, expected and got, what to do; and never after a hang."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from faults import Action, Fault, FaultyNetwork
from fuzz import ENDPOINT, requests
from harness import PATIENT, SOON, Job, run_job, until
from inside import connections, description_of, flush, lose_steps
from small_job import join as join_small
from small_job import train

import fleet.nn
from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    DeadlineError,
    FleetError,
    IdentityError,
    JobAbortedError,
    NonFiniteGradientError,
    PlanMismatchError,
    PortInUseError,
    ServerLostError,
    StateError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import GroupSpec, JobSpec, PlanSettings
from fleet.ps.server.service import Service
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Handler, Listener
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.connection import Connections
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import StrategyFactory
from fleet.telemetry.cause import claimed

HASTY = {**SOON, "FLEET_STARTUP_DEADLINE_S": "2"}

torch.manual_seed(2)
TEMPLATE = torch.nn.Linear(3, 2)


def join(fleet_: Fleet, model: torch.nn.Module | None = None, **options: object) -> torch.optim.Optimizer:
    model = model or copy.deepcopy(TEMPLATE)
    optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
    fleet_.init_worker()
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    (param, *_) = optimizer.param_groups[0]["params"]
    optimizer.minimize((param**2).sum())


# ---------------------------------------------------------------- before there is a job


def test_init_refuses_what_is_no_role_maker() -> None:
    for wrong in ("worker", 0, UserDefinedRoleMaker):
        with pytest.raises(TypeError, match="RoleMakerBase"):
            Fleet(environ={}).init(wrong)


def test_calls_of_the_other_role() -> None:
    def fleet_of(role: Role) -> Fleet:
        made = Fleet(environ={}, network=LoopbackNetwork())
        made.init(UserDefinedRoleMaker(0, role, 1, ["s:1"]))
        return made

    server, worker = fleet_of(Role.SERVER), fleet_of(Role.WORKER)
    model = copy.deepcopy(TEMPLATE)
    optimizer = server.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for call in (server.init_worker, server.stop_worker, server.worker_index, optimizer.step):
        with pytest.raises(StateError, match="server"):
            call()
    with pytest.raises(RuntimeError, match="init_server"):
        server.run_server()
    for call in (worker.init_server, worker.run_server, worker.server_index):
        with pytest.raises(StateError, match="worker 0"):
            call()
    with pytest.raises(RuntimeError, match="distributed_optimizer"):
        worker.init_worker()
    with pytest.raises(RuntimeError, match="init_worker"):
        worker.stop_worker()
    with pytest.raises(TypeError, match="list"):
        worker.split_files(("a", "b"))
    with pytest.raises(TypeError, match="Optimizer"):
        worker.distributed_optimizer(model)
    with pytest.raises(TypeError, match="strategy"):
        worker.distributed_optimizer(torch.optim.SGD(model.parameters()), {"sync": True})
    worker.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateError, match="twice"):
        worker.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_split_files() -> None:
    def share(index: int, number: int, files: list[str]) -> list[str]:
        made = Fleet(environ={})
        made.init(UserDefinedRoleMaker(index, Role.WORKER, number, ["s:1"]))
        return made.split_files(files)

    assert [share(i, 2, list("abcde")) for i in range(2)] == [["a", "b", "c"], ["d", "e"]]
    assert [share(i, 3, ["a", "b"]) for i in range(3)] == [["a"], ["b"], []]


class Homemade(torch.optim.SGD):
    """An optimizer of the user's own."""


def refused(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> str:
    made = Fleet(environ={}, network=LoopbackNetwork())
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["s:1"]))
    with pytest.raises(UnsupportedError) as caught:
        made.distributed_optimizer(make(list(copy.deepcopy(TEMPLATE).parameters())))
    return str(caught.value)


def test_optimizers_and_options_that_cannot_be_honoured() -> None:
    assert "LBFGS" in refused(lambda p: torch.optim.LBFGS(p))
    assert "Homemade" in refused(lambda p: Homemade(p, lr=0.1))
    assert "differentiable" in refused(lambda p: torch.optim.Adam(p, differentiable=True))
    assert "capturable" in refused(lambda p: torch.optim.Adam([{"params": p, "capturable": True}]))
    assert "SparseAdam" in refused(lambda p: torch.optim.SparseAdam(p))
    table = fleet.nn.Embedding(None, 2)
    assert "ASGD" in refused(lambda p: torch.optim.ASGD(table.parameters()))

    def stepped(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
        return optimizer

    assert "state" in refused(stepped)
    assert "complex64" in refused(
        lambda p: torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
    )


# ---------------------------------------------------------------- coming together


def test_a_server_that_never_comes_up() -> None:
    made = Fleet(environ=HASTY, network=LoopbackNetwork())
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["nowhere:4711"]))
    with pytest.raises(DeadlineError, match=r"nowhere:4711.*within 2 s"):
        join(made)


def test_wait_port_false_does_not_wait() -> None:
    from fleet.transpiler import DistributeTranspilerConfig

    config = DistributeTranspilerConfig()
    config.wait_port = False
    made = Fleet(environ=PATIENT, network=LoopbackNetwork())
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["nowhere:4711"]))
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="nowhere:4711"):
        join(made, strategy=config)
    assert time.monotonic() - began < float(PATIENT["FLEET_STARTUP_DEADLINE_S"])


def test_no_worker_ever_comes(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lambda fleet_, index: None, workers=0, environ=HASTY)
    job.workers = 1
    server = threading.Thread(target=job.serve, args=(0,), daemon=True)
    server.start()
    job.join([server])
    assert isinstance(job.errors["server 0"], DeadlineError)
    assert "no worker said hello" in str(job.errors["server 0"])
    assert "server 0 listens at server0:1" in caplog.messages
    assert any(message.startswith("server0:1: waiting for worker 0, ") for message in caplog.messages)


def test_the_answer_to_the_last_goodbye_gets_lost() -> None:
    """Its server has ended then, which a worker cannot tell from one that was lost: it is told so at the deadline."""

    def body(fleet_: Fleet, index: int) -> list[torch.Tensor]:
        optimizer = join(fleet_)
        step(optimizer)
        return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]

    network = FaultyNetwork(LoopbackNetwork(), Fault(Action.DROP_REPLY, kind="bye"))
    job = Job(body, network=network, environ={**SOON, "FLAGS_rpc_deadline": "400"})
    job.join(job.start())
    assert list(job.errors) == ["worker 0"]
    assert isinstance(job.errors["worker 0"], DeadlineError)
    assert job.results[0]  # everything was done before


def init(job: Job, index: int, workers: int, servers: list[str] | None = None, **environ: str) -> Fleet:
    made = Fleet(environ={**HASTY, **environ}, network=job.network)
    made.init(UserDefinedRoleMaker(index, Role.WORKER, workers, servers or job.endpoints))
    return made


def test_a_server_tells_why_it_refused_all_that_came(tmp_path: Path) -> None:
    records = {"FLEET_RECORD_DIR": str(tmp_path)}
    job = Job(lambda fleet_, index: None, workers=2, environ={**HASTY, **records, "FLEET_JOB_ID": "ours"})
    server = threading.Thread(target=job.serve, args=(0,), daemon=True)
    server.start()
    strangers = [
        (init(job, 0, 2, [*job.endpoints, "elsewhere:1"], **records), "different lists of servers"),
        (init(job, 1, 2, **records, FLEET_JOB_ID="another"), "serves another job"),
        (
            init(job, 2, 3, **records),
            "different numbers of workers; at server0:1; expected 2, as this server was told; got 3",
        ),
    ]
    for stranger, why in strangers:
        with pytest.raises(FleetError, match=why):
            join(stranger)
    job.join([server])
    told = str(job.errors["server 0"])
    assert "every worker that came was refused" in told
    assert all(why in told for _, why in strangers)
    cause = claimed(tmp_path)
    assert cause is not None
    assert cause.process == "server 0"  # and none of those that were not let in


def test_a_refusal_from_before_the_job_began_is_told_of_who_never_came() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        with pytest.raises(PlanMismatchError):
            join(init(job, 1, 3))
        step(join(fleet_))

    job = Job(body, workers=2, environ=HASTY)
    threads = [threading.Thread(target=job.serve, args=(0,)), threading.Thread(target=job.work, args=(0,))]
    for thread in threads:
        thread.start()
    job.join(threads)
    assert re.search(r"worker 1 did not say hello.* worker 1 .* was refused: .*got 3", str(job.errors["server 0"]))


def test_who_fails_says_that_it_is_the_cause_and_who_follows_does_not(tmp_path: Path) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        for count in range(3):
            if (index, count) == (1, 2):
                raise ValueError("boom")
            step(optimizer)

    claims: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in ("worker.runtime", "server.job_end"):
            patched.setattr(
                f"fleet.ps.{module}.claim",
                lambda where, job, process, reason: claims.append([where, process, reason.split()[-1]]),
            )
        job = Job(body, workers=2, servers=2, environ={**PATIENT, "FLEET_RECORD_DIR": str(tmp_path)})
        job.join(job.start())
    assert set(job.errors) == {"worker 0", "worker 1", "server 0", "server 1"}
    assert claims == [[str(tmp_path), "worker 1", "boom"]]


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_worker_that_finds_its_job_broken_says_that_it_is_the_cause(mode: str, tmp_path: Path) -> None:
    """It says so before it ends the job for all, whichever of its threads it is; and once the user knows, a goodbye
    in somebody's ``finally`` hides nothing."""

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join_small(fleet_, mode)
        train(model, optimizer, range(6))
        flush(fleet_)
        lose_steps(fleet_, 2)
        with pytest.raises(ServerLostError, match="not at the same step"):
            until(lambda: train(model, optimizer, range(1)))
        fleet_.stop_worker()

    job = Job(body, servers=2, environ={**PATIENT, "FLEET_RECORD_DIR": str(tmp_path)})
    job.join(job.start())
    assert set(job.errors) == {"server 0", "server 1"}
    cause = claimed(tmp_path)
    assert cause is not None
    assert cause.process == "worker 0"
    assert cause.why.startswith("ServerLostError: the servers are not at the same step")


@pytest.mark.parametrize("error", [ServerLostError, DeadlineError])
def test_a_worker_that_finds_a_server_lost_is_the_cause(error: type[FleetError], tmp_path: Path) -> None:
    """Though no server says so; those that are left, and may end first, hear of it from this worker."""

    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        step(optimizer)
        if index == 0:
            connections(fleet_)[1].fail(error("it is gone"))
        for _ in range(3):
            step(optimizer)

    job = Job(body, workers=2, servers=2, environ={**PATIENT, "FLEET_RECORD_DIR": str(tmp_path)})
    job.join(job.start())
    cause = claimed(tmp_path)
    assert cause is not None
    assert cause.process == "worker 0"
    assert "it is gone" in cause.why


def test_whoever_asks_while_a_worker_ends_its_job_hears_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of its own, when servers know already that the job is over and the worker is not through."""
    heard: list[FleetError] = []
    farewell = Connections.farewell

    def asking(connections: Connections, **word: object) -> None:
        farewell(connections, **word)
        for connection in connections.by_server:
            with pytest.raises(FleetError) as caught:
                connection.call(Frame(connection.request(0, pull=pb.Pull())), "a look at values")
            heard.append(caught.value)

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join_small(fleet_)
        train(model, optimizer, range(6))
        lose_steps(fleet_, 2)
        monkeypatch.setattr(Connections, "farewell", asking)
        with pytest.raises(ServerLostError):
            until(lambda: train(model, optimizer, range(1)))
        monkeypatch.undo()

    job = Job(body, servers=2)
    job.join(job.start())
    assert [type(error) for error in heard] == [ServerLostError] * 2


def test_a_job_that_somebody_looks_after_says_less(caplog: pytest.LogCaptureFixture) -> None:
    run_job(lambda fleet_, index: step(join(fleet_)), environ={**PATIENT, "FLEET_LAUNCHER": "fleetrun"})
    alone = Fleet(environ=PATIENT)
    alone.init()
    step(join(alone))
    alone.stop_worker()
    assert caplog.messages == []


def test_a_worker_that_never_comes(caplog: pytest.LogCaptureFixture) -> None:
    """The one that came is told at the start-up deadline, not left waiting in its first round, and everybody who waits
    has said for whom."""
    job = Job(lambda fleet_, index: step(join(fleet_)), workers=2, environ=HASTY)
    threads = [threading.Thread(target=job.serve, args=(0,)), threading.Thread(target=job.work, args=(0,))]
    for thread in threads:
        thread.start()
    job.join(threads)
    assert isinstance(job.errors["worker 0"], JobAbortedError)
    for told in ("server0:1: waiting for worker 1, ", "worker 0 waits for worker 1, "):
        assert any(message.startswith(told) for message in caplog.messages), told
    assert "worker 1 did not say hello" in str(job.errors["worker 0"])
    assert "worker 1 did not say hello" in str(job.errors["server 0"])


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        (False, r"worker 0 fell silent before .* initial values; at .*; expected a sign .*; got none for .* s\. See "),
        (True, r"worker 0 left before it had sent the initial values; at .*\. Look at its output"),
    ],
    ids=["silent", "left"],
)
def test_worker_0_is_gone_before_anybody_has_values(leaves: bool, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """One whose machine froze has not left, and its script did not end."""
    clock = Mock(now=Mock(return_value=0.0))
    service = Service(ENDPOINT, ProcessSettings.read(PATIENT), clock)
    replies: list[Frame] = []
    for worker in (0, 1):
        given, _ = requests("sync", 1)["hello"]
        service.handle(Frame(pb.Request(worker=worker, incarnation=worker + 1, **given)), replies.append)  # type: ignore[arg-type]
    if leaves:
        service.handle(Frame(pb.Request(worker=0, incarnation=1, bye=pb.Bye())), replies.append)
    else:
        clock.now.return_value = 1e4
        service.tick()
    with pytest.raises(JobAbortedError, match=told):
        service.handle(Frame(pb.Request(worker=1, incarnation=2, beat=pb.Beat())), replies.append)
    assert not any("worker 0 " in message and "go on without it" in message for message in caplog.messages)


def test_two_workers_with_one_index() -> None:
    release = threading.Event()

    def body(fleet_: Fleet, index: int) -> str:
        if index == 1:
            twin = job.fleet(Role.WORKER, 0)
            assert started.wait(30)
            with pytest.raises(IdentityError, match="already a worker 0") as caught:
                join(twin)
            optimizer = join(fleet_)
            release.set()
            step(optimizer)
            return str(caught.value)
        optimizer = join(fleet_)
        started.set()
        assert release.wait(30)
        step(optimizer)
        return ""

    started = threading.Event()
    job = Job(body, 2)
    assert "its own index" in job.run()[1]


def test_an_index_beyond_the_workers_and_another_number_of_workers() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        stranger = Fleet(environ=PATIENT, network=job.network)
        stranger.init(UserDefinedRoleMaker(2, Role.WORKER, 5, job.endpoints))
        with pytest.raises(PlanMismatchError, match="numbers of workers") as caught:
            join(stranger)
        assert "expected 1" in str(caught.value)
        assert "got 5" in str(caught.value)
        step(join(fleet_))

    job = Job(body, 1)
    job.run()


def test_a_stranger_that_comes_first_leaves_no_trace() -> None:
    """With no script of its own a server learns of the job from the first hello, which had better be one."""
    from fleet.base.clock import SystemClock
    from fleet.base.settings import ProcessSettings
    from fleet.ps.server.runtime import ServerRuntime

    network, endpoint = LoopbackNetwork(), Endpoint.parse("bare:1")
    settings = ProcessSettings.read(PATIENT)
    thread = threading.Thread(target=ServerRuntime(endpoint, network, settings, SystemClock()).run)
    thread.start()
    hello = {"endpoints": [str(endpoint)], "options": ["{}"]}
    spec = JobSpec((), (), (GroupSpec("SGD", 0, ()),), PlanSettings(server_num=1, worker_num=2))
    plan = make_plan(spec)
    stranger = pb.Request(
        worker=7, incarnation=1, hello=pb.Hello(spec=spec.to_json(), fingerprint=plan.fingerprint, **hello)
    )
    with pytest.raises(IdentityError, match="worker 7 is not part"):
        raise_if_error(network.connect(endpoint).start(Frame(stranger)).result())
    made = Fleet(environ=PATIENT, network=network)
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, [str(endpoint)]))
    step(join(made))
    made.stop_worker()
    thread.join(10)
    assert not thread.is_alive()


def test_workers_that_were_told_of_other_servers() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        stranger = Fleet(environ=PATIENT, network=job.network)
        stranger.init(UserDefinedRoleMaker(0, Role.WORKER, 1, job.endpoints[::-1]))
        with pytest.raises(PlanMismatchError, match="lists of servers"):
            join(stranger)
        step(join(fleet_))

    job = Job(body, 1, 2)
    job.run()


def test_a_model_that_differs_names_the_parameter_and_both_shapes() -> None:
    refusals: dict[int, str] = {}
    joined = threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        if index == 1:
            assert joined.wait(30)
            other = job.fleet(Role.WORKER, 1)
            with pytest.raises(PlanMismatchError) as caught:
                join(other, torch.nn.Linear(4, 2))
            refusals[1] = str(caught.value)
            optimizer = join(fleet_)  # the right model is still welcome
        else:
            optimizer = join(fleet_)
            joined.set()
        step(optimizer)

    job = Job(body, 2)
    job.run()
    assert "'weight'" in refusals[1]
    assert "(2, 3)" in refusals[1]
    assert "(2, 4)" in refusals[1]


def test_two_jobs_on_one_server() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        other = Fleet(environ={**PATIENT, "FLEET_JOB_ID": "second"}, network=job.network)
        other.init(UserDefinedRoleMaker(0, Role.WORKER, 1, job.endpoints))
        optimizer = join(fleet_)
        with pytest.raises(IdentityError, match=r"another job.*first.*second"):
            join(other)
        step(optimizer)

    job = Job(body, 1, environ={**PATIENT, "FLEET_JOB_ID": "first"})
    job.run()


def test_one_parameter_in_two_optimizers() -> None:
    made = Fleet(environ={}, network=LoopbackNetwork())
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["s:1"]))
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="two groups"):
        made.distributed_optimizer([torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)])


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    made = Fleet(environ={}, network=LoopbackNetwork())
    made.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["s:1"]))
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Embedding(3, 2, sparse=True), "b": torch.nn.Embedding(3, 2, sparse=True, max_norm=1.0)}
    )
    with pytest.raises(UnsupportedError, match="max_norm of 'b'"):
        made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    assert type(model["a"]) is torch.nn.Embedding


def test_settings_that_do_nothing_here_are_still_checked(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="FLAGS_communicator_send_queue_size"):
        Fleet(environ={"FLAGS_communicator_send_queue_size": "banana"}).init()
    Fleet(environ={"FLAGS_rpc_retry_time": "5"}).init()
    assert "FLAGS_rpc_retry_time is not known" in caplog.text


def test_a_port_in_use_names_port_and_holder(free_endpoints: Callable[[int], list[str]]) -> None:
    import os

    endpoint = Endpoint.parse(free_endpoints(1)[0])
    listener = GrpcNetwork(1).listen(endpoint, lambda frame, respond: respond(Frame(pb.Reply())))
    try:
        made = Fleet(environ=PATIENT)
        made.init(UserDefinedRoleMaker(0, Role.SERVER, 1, [str(endpoint)]))
        made.init_server()
        with pytest.raises(PortInUseError, match=f"port {endpoint.port} is in use.*process {os.getpid()}"):
            made.run_server()
    finally:
        listener.close()


# ---------------------------------------------------------------- while training


def test_an_exception_in_one_workers_loop_ends_the_job_at_once() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        step(optimizer)
        if index == 1:
            raise ValueError("a bad batch")
        step(optimizer)

    job = Job(body, 3, 2)
    job.join(job.start(), timeout_s=10)  # far below the deadline of 60 s
    assert isinstance(job.errors["worker 1"], ValueError)
    for name in ("worker 0", "worker 2", "server 0", "server 1"):
        assert isinstance(job.errors[name], JobAbortedError), name
        assert "worker 1 failed" in str(job.errors[name])
        assert "ValueError: a bad batch" in str(job.errors[name])


def vanish(fleet_: Fleet) -> None:
    """As if the machine was gone: no goodbye, no pulse."""
    for client in connections(fleet_):
        client.close()


def test_a_worker_that_falls_silent_is_given_up_on() -> None:
    """The others go on without it, as the mean over those that are left."""
    silent = threading.Event()

    def body(fleet_: Fleet, index: int) -> torch.Tensor | None:
        model = copy.deepcopy(TEMPLATE)
        optimizer = join(fleet_, model)
        step(optimizer)
        if index == 1:
            vanish(fleet_)
            silent.set()
            return None
        assert silent.wait(30)
        step(optimizer)
        return model.weight.detach().clone()

    job = Job(body, 2, environ=SOON)
    job.join(job.start())
    assert job.results[0] is not None
    assert "server 0" not in job.errors


def test_a_worker_that_falls_silent_ends_a_job_that_needs_it() -> None:
    silent = threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_, strategy=StrategyFactory.create_sync_strategy(needs_all_workers=True))
        step(optimizer)
        if index == 1:
            vanish(fleet_)
            silent.set()
            return
        assert silent.wait(30)
        with pytest.raises(JobAbortedError, match=r"worker 1 fell silent, and the job needs all workers.*got none for"):
            step(optimizer)

    job = Job(body, 2, environ=SOON)
    job.join(job.start())
    assert "worker 0" not in job.errors, job.errors["worker 0"]
    assert "worker 1 fell silent" in str(job.errors["server 0"])


def test_a_table_that_has_no_memory_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a round is applied, so nobody goes on; all are told why."""

    def refused(*_: object) -> None:
        raise MemoryError("none left")

    def body(fleet_: Fleet, index: int) -> None:
        table = fleet.nn.Embedding(None, 2)
        optimizer = join(fleet_, torch.nn.Sequential(table, torch.nn.Linear(2, 1)))
        optimizer.minimize(table(torch.arange(9)).sum())
        fleet_.barrier_worker()
        monkeypatch.setattr(MemoryStore, "insert", refused)
        optimizer.minimize(table(torch.arange(9, 99)).sum())

    job = Job(body, 2)
    job.join(job.start())
    for name in ("worker 0", "worker 1", "server 0"):
        assert isinstance(job.errors[name], JobAbortedError), name
        assert "server server0:1 failed; got MemoryError('none left')" in str(job.errors[name])


def test_nan_is_accepted_as_torch_does_unless_a_check_was_asked_for() -> None:
    def nan_step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        weight, _ = optimizer.param_groups[0]["params"]
        optimizer.minimize((weight * float("nan")).sum())
        return weight.detach().clone()

    (got,) = run_job(lambda fleet_, index: nan_step(join(fleet_)), 1)
    assert bool(got.isnan().all())

    def strict(fleet_: Fleet, index: int) -> str:
        optimizer = join(fleet_, strategy=StrategyFactory.create_sync_strategy(check_finite=True))
        with pytest.raises(NonFiniteGradientError) as caught:
            nan_step(optimizer)
        return str(caught.value)

    (message,) = run_job(strict, 1)
    assert "'weight'" in message
    assert "step 1" in message

    def strict_rows(fleet_: Fleet, index: int) -> str:
        table = fleet.nn.Embedding(None, 2)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=1.0), model=table)
        fleet_.init_worker()
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.minimize((table(torch.tensor([3, 77])) * torch.tensor([[1.0], [float("inf")]])).sum())
        return str(caught.value)

    (message,) = run_job(strict_rows, 1, environ={**PATIENT, "FLEET_CHECK_FINITE": "1"})
    assert "'weight'" in message
    assert "id 77" in message


def test_a_param_group_that_only_one_worker_added() -> None:
    """The one that goes on without it is told so; nobody trains on half a plan."""
    added = threading.Event()
    told: dict[int, str] = {}

    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        step(optimizer)
        if index == 0:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))], "lr": 0.5})
            added.set()
            with pytest.raises(JobAbortedError):
                step(optimizer)
        else:
            assert added.wait(30)
            with pytest.raises(PlanMismatchError, match="add_param_group on every worker") as caught:
                step(optimizer)
            told[index] = str(caught.value)
            raise caught.value

    job = Job(body, 2)
    job.join(job.start())
    assert "worker 1 lacks parameters that have joined the job; at" in told[1]
    assert isinstance(job.errors["worker 1"], PlanMismatchError)


def test_a_param_group_that_was_taken_away() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        groups = [{"params": [param]} for param in model.parameters()]
        inner = torch.optim.SGD(groups, lr=0.1)
        optimizer = fleet_.distributed_optimizer(inner, model=model)
        fleet_.init_worker()
        step(optimizer)
        del inner.param_groups[1]
        with pytest.raises(UnsupportedError, match="taken away"):
            step(optimizer)

    run_job(body, 1)


def test_a_push_the_plan_does_not_know_is_refused_and_disturbs_nobody() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        model = copy.deepcopy(TEMPLATE)
        optimizer = join(fleet_, model)
        client, description = connections(fleet_)[0], description_of(fleet_)
        good = {"options": description.options(), "present": b"\1\1"}
        flat = WireTensor.of(torch.zeros(8))
        ids = WireTensor.of(torch.tensor([1]))
        for push, tensors in (
            (pb.Push(**{**good, "present": b"\1\1\1"}), [flat]),
            (pb.Push(**good), [WireTensor.of(torch.zeros(7))]),
            (pb.Push(**good), [WireTensor.of(torch.zeros(8, dtype=torch.float64))]),
            (pb.Push(**good), []),
            (pb.Push(**good, row_tables=[0]), [flat, ids, flat]),
            (pb.Push(**good, used_tables=[9]), [flat]),
            (pb.Push(**{**good, "options": ["{}"]}), [flat]),
            (pb.Push(**{**good, "options": ["not json"]}), [flat]),
        ):
            with pytest.raises((RuntimeError, PlanMismatchError)):
                raise_if_error(client.call(Frame(client.request(1, push=push), tensors), "a bad push"))
        with pytest.raises(RuntimeError, match="skipped a step"):
            client.call(Frame(client.request(5, push=pb.Push(**good)), [flat]), "a push of the future")
        before = model.weight.detach().clone()
        step(optimizer)
        assert not torch.equal(before, model.weight.detach())

    run_job(body, 1)


def test_a_server_that_lost_its_state_says_so() -> None:
    """A worker that meets a fresh server on the old one's endpoint must not train on as if nothing had happened."""

    class Recording(LoopbackNetwork):
        def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
            self.newest = super().listen(endpoint, handler)
            return self.newest

    network = Recording()
    failed: dict[str, Exception] = {}

    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        step(optimizer)
        network.newest.close()  # the old one is gone …
        fresh = Job(lambda f, i: None, 1, network=network, environ=HASTY, endpoints=job.endpoints)
        thread = threading.Thread(target=fresh.serve, args=(0,))
        thread.start()  # … and another is there
        while network.listener(Endpoint.parse(job.endpoints[0])) is None:
            time.sleep(0.01)
        try:
            step(optimizer)
        except Exception as error:
            failed["worker"] = error
        thread.join(30)

    job = Job(body, 1, network=network, environ=SOON)
    job.join(job.start())
    assert not {name: error for name, error in job.errors.items() if name == "server 0"}
    assert isinstance(failed.get("worker"), ServerLostError), (failed, job.errors)
    assert job.endpoints[0] in str(failed["worker"])


def test_after_stop_worker() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        table = fleet.nn.Embedding(None, 2)
        optimizer = join(fleet_, table)
        fleet_.stop_worker()
        fleet_.stop_worker()
        with pytest.raises(StateError, match="stop_worker"):
            table(torch.tensor([1]))
        with pytest.raises(StateError, match="stop_worker"):
            optimizer.step()

    run_job(body, 1)


def test_stop_worker_after_a_failure_hides_nothing_and_waits_for_nobody() -> None:
    """As in somebody's ``finally``: the failure was raised once, and the servers may be gone by now."""
    joined, gone = threading.Event(), threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        optimizer = join(fleet_)
        if index == 1:
            assert joined.wait(30)
            raise ValueError("a bad batch")
        joined.set()
        with pytest.raises(JobAbortedError):
            step(optimizer)
        assert gone.wait(30)
        fleet_.stop_worker()

    job = Job(body, 2, 2)
    threads = job.start()
    job.join(threads[:2])  # the servers
    gone.set()
    job.join(threads, timeout_s=10)
    assert "worker 0" not in job.errors, job.errors["worker 0"]


def test_sparse_gradients_without_a_model() -> None:
    def body(fleet_: Fleet, index: int) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
        fleet_.init_worker()
        with pytest.raises(UnsupportedError, match="model="):
            optimizer.minimize(table(torch.tensor([1])).sum())

    run_job(body, 1)
