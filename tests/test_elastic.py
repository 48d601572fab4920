"""Workers that join a running job beyond those it began with, and leave it: elastic strategies."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import ENVIRON, DyingJob, every
from harness import PATIENT, SOON, Job
from inside import flush, leave
from test_async import eventually
from test_observing import status_of
from test_processes import Processes, Started, ended, processes  # noqa: F401 - a fixture
from test_relaxed import comes_to

import fleet.nn
from fleet import Fleet, StrategyFactory
from fleet.errors import DeadlineError, IdentityError, PlanMismatchError, ServerBusyError
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.worker import connection
from fleet.role_maker import Role, UserDefinedRoleMaker
from fleet.strategy.parameter_server import Strategy
from fleet.telemetry import prometheus
from fleet.telemetry.view import seen

ELASTIC = {
    "async": StrategyFactory.create_async_strategy(independent_recv_thread=False, elastic=True),
    "half_async": StrategyFactory.create_half_async_strategy(elastic=True),
    "gba": StrategyFactory.create_gba_strategy(1, 99, elastic=True),
}
HALF = ELASTIC["half_async"]
NAMED = {**PATIENT, "FLEET_JOB_ID": "one"}


class Part:
    """One worker's part in a job: its steps take one from every element of a parameter and of a row of its own."""

    def __init__(self, made: Fleet, strategy: Strategy) -> None:
        self.fleet = made
        self.index = made.worker_index()
        self.weight = torch.nn.Parameter(torch.full((6,), 100.0 * self.index))
        self.table = fleet.nn.Embedding(None, 2, initializer="zeros")
        sgd = torch.optim.SGD([self.weight, *self.table.parameters()], lr=1.0)
        self.optimizer = self.fleet.distributed_optimizer(sgd, strategy)

    def join(self) -> Part:
        self.fleet.init_worker()
        return self

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.minimize(self.weight.sum() + self.table(torch.tensor([self.index])).sum())

    def sees(self, *steps: int) -> None:
        """What all workers' steps, by index, have come to."""
        comes_to(self.optimizer, self.weight, -float(sum(steps)))
        expected = [-float(count) for count in steps]
        rows = torch.arange(len(steps))
        eventually(lambda: self.table(rows)[:, 0].tolist() == expected, f"{expected}")  # another server may have them

    def leave(self) -> None:
        self.fleet.stop_worker()

    def die(self) -> None:
        leave(self.fleet)


def part(job: Job, index: int, of: int, strategy: Strategy = HALF, environ: Any = None) -> Part:
    """A worker that was told of so many."""
    made = Fleet(environ=environ or job.environ, network=job.network)
    made.init(UserDefinedRoleMaker(index, Role.WORKER, of, job.endpoints))
    return Part(made, strategy)


class Servers:
    """The servers of a job that begins with some workers; who takes part is the test's affair."""

    def __init__(self, workers: int = 1, servers: int = 2, **options: Any) -> None:
        self.job = Job(lambda *_: None, workers, servers, **{"environ": PATIENT, **options})
        self._threads = [
            threading.Thread(target=self.job.serve, args=(index,), name=f"job-server-{index}", daemon=True)
            for index in range(servers)
        ]
        for thread in self._threads:
            thread.start()

    def part(self, index: int, of: int, strategy: Strategy = HALF, environ: Any = None) -> Part:
        return part(self.job, index, of, strategy, environ)

    def end(self) -> None:
        self.job.join(self._threads, 10)
        assert not self.job.errors


# ---------------------------------------------------------------- joining and leaving


@pytest.mark.parametrize("mode", ELASTIC)
def test_workers_join_and_leave_in_any_order(mode: str) -> None:
    """Indices may have gaps; the job ends when the last of all that were in it has left."""
    servers = Servers(2)
    zero, one = (servers.part(index, 2, ELASTIC[mode]).join() for index in range(2))
    zero.train(3)
    one.train(2)
    five = servers.part(5, 6, ELASTIC[mode])
    zero.sees(3, 2)
    five.join()
    assert torch.equal(five.weight.detach(), torch.full((6,), -5.0)), "what the job has learnt, and not its own"
    assert (five.fleet.worker_num(), five.fleet.resume_step(), zero.fleet.worker_num()) == (6, 0, 2)
    five.train(4)
    one.leave()
    zero.sees(3, 2, 0, 0, 0, 4)
    zero.leave()
    three = servers.part(3, 9, ELASTIC[mode]).join()
    five.leave()
    three.train(1)
    three.sees(3, 2, 0, 1, 0, 4)
    assert three.fleet.summary()["steps_by_worker"].keys() == {0, 1, 3, 5}
    three.leave()
    servers.end()


def test_whoever_looks_on_is_told_which_worker_is_which() -> None:
    """Indices have gaps, and come in any order."""
    network = LoopbackNetwork()
    servers = Servers(2, 1, network=network)
    zero, one = (servers.part(index, 2).join() for index in range(2))
    five = servers.part(5, 6).join()
    three = servers.part(3, 6).join()
    for each in (zero, one, five, three):
        each.train(each.index + 1)
        flush(each.fleet)
    status = status_of(network, servers.job.endpoints[0])
    workers = seen(0.0, {"server 0": status}, {}).workers
    assert {index: worker.steps for index, worker in workers.items()} == {0: 1, 1: 2, 3: 4, 5: 6}
    pytest.importorskip("prometheus_client")
    families = {family.name: family for family in prometheus._beside(status, "0")}
    steps = {sample.labels["worker"]: sample.value for sample in families["fleet_server_worker_steps"].samples}
    assert steps == {"0": 1, "1": 2, "3": 4, "5": 6}
    for each in (zero, one, five, three):
        each.leave()
    servers.end()


def test_all_that_the_job_began_with_are_waited_for() -> None:
    """A worker may join before all others have come, and is not the end of the job when it leaves."""
    servers = Servers(2)
    zero = servers.part(0, 2).join()
    two = servers.part(2, 3).join()
    two.train(2)
    two.leave()
    zero.leave()
    one = servers.part(1, 2).join()
    one.train(1)
    one.sees(0, 1, 2)
    one.leave()
    servers.end()


def test_one_that_joins_may_be_the_first_to_say_hello() -> None:
    servers = Servers(1)
    one = servers.part(1, 2)
    joining = threading.Thread(target=one.join, daemon=True)
    joining.start()
    zero = servers.part(0, 1).join()
    joining.join(10)
    one.train(1)
    zero.leave()
    one.sees(0, 1)
    one.leave()
    servers.end()


def test_one_that_dies_is_given_up_on_and_the_others_go_on() -> None:
    servers = Servers(1, environ={**SOON, "FLEET_JOB_ID": "one"})
    zero = servers.part(0, 1).join()
    one = servers.part(1, 2).join()
    one.train(2)
    one.die()
    zero.train(3)
    zero.fleet.barrier_worker()  # which does not wait for it any more when it is given up on
    zero.sees(3, 2)
    again = servers.part(1, 2).join()
    assert again.fleet.resume_step() == 2
    again.train(1)
    zero.leave()
    again.die()
    servers.end()


def test_who_has_left_may_join_again_where_the_job_has_an_id() -> None:
    servers = Servers(1, environ=NAMED)
    zero = servers.part(0, 1).join()
    for round_ in range(3):
        one = servers.part(1, 2).join()
        assert one.fleet.resume_step() == 2 * round_
        one.train(2)
        one.leave()
    zero.sees(0, 6)
    stranger = servers.part(1, 2, environ={**PATIENT, "FLEET_STARTUP_DEADLINE_S": "0.3"})
    with pytest.raises(ServerBusyError, match="a new worker 1; the earlier one has left"):
        stranger.join()
    zero.train(1)
    zero.leave()
    servers.end()


def test_one_that_comes_when_all_have_left_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.ps.server.job_end.JobEnd._all_informed", lambda _: leaves.is_set())
    leaves = threading.Event()
    servers = Servers(1, 1, environ=NAMED)
    servers.part(0, 1).join().leave()
    with pytest.raises(IdentityError, match=r"worker 1 comes too late.*every worker of this job has left"):
        servers.part(1, 2).join()
    other_job = servers.part(1, 2, environ={**PATIENT, "FLEET_STARTUP_DEADLINE_S": "0.3"})
    with pytest.raises(ServerBusyError, match="a new worker 1; the earlier job is over"):
        other_job.join()
    leaves.set()
    servers.end()


# ---------------------------------------------------------------- who is not let in, and what that does to the job


def test_what_does_not_fit_is_refused_and_the_job_goes_on() -> None:
    servers = Servers(2)
    parts = [servers.part(index, 2).join() for index in range(2)]
    with pytest.raises(PlanMismatchError, match=r"different numbers of workers.*expected 2 or more.*got 1"):
        servers.part(0, 1).join()
    other = servers.part(2, 3)
    other.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(PlanMismatchError, match="only in the newcomer's model"):
        other.join()
    with pytest.raises(PlanMismatchError, match="got settings: elastic True in the job, False in the newcomer's"):
        servers.part(1, 2, StrategyFactory.create_half_async_strategy()).join()
    for each in parts:
        each.train(1)
        each.leave()
    servers.end()


def test_without_elastic_nobody_joins() -> None:
    rigid = StrategyFactory.create_half_async_strategy()
    servers = Servers(1)
    zero = servers.part(0, 1, rigid).join()
    with pytest.raises(PlanMismatchError, match=r"different numbers of workers.*expected 1, as this server was told"):
        servers.part(1, 2, rigid).join()
    zero.leave()
    servers.end()


def test_one_that_cannot_start_leaves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is let in by one server and does not reach the next."""
    servers = Servers(1)
    zero = servers.part(0, 1).join()
    one = servers.part(1, 2)

    def fails(*_: Any, **__: Any) -> Any:
        raise DeadlineError("a server did not come up")

    with monkeypatch.context() as patch:
        patch.setattr("fleet.ps.worker.trained_model.DenseValues.fetch", fails)
        with pytest.raises(DeadlineError, match="did not come up"):
            one.join()
    zero.train(2)
    zero.sees(2)
    zero.leave()
    servers.end()


# ---------------------------------------------------------------- among workers


def test_who_is_there_takes_part_in_what_workers_do_together() -> None:
    def together(*parts: Part) -> list[float]:
        totals: dict[int, float] = {}

        def sum_up(each: Part) -> None:
            totals[each.index] = each.fleet.metrics.sum(10.0**each.index)
            each.fleet.barrier_worker()

        threads = [threading.Thread(target=sum_up, args=(each,), daemon=True) for each in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return [totals[each.index] for each in parts]

    servers = Servers(2)
    zero, one = (servers.part(index, 2).join() for index in range(2))
    assert together(zero, one) == [11.0, 11.0]
    two = servers.part(2, 3).join()
    assert together(zero, one, two) == [111.0] * 3
    one.leave()
    assert together(zero, two) == [101.0] * 2
    zero.leave()
    three = servers.part(3, 4).join()
    assert together(three, two) == [1100.0] * 2
    two.leave()
    assert together(three) == [1000.0]
    three.leave()
    servers.end()


def test_a_checkpoint_of_one_that_has_joined_is_written(tmp_path: Path) -> None:
    """Its first call is not the first call of the others, which was carried out before it came."""
    servers = Servers(1)
    zero = servers.part(0, 1).join()
    zero.train(1)
    zero.fleet.save_persistables(str(tmp_path / "same"))
    one = servers.part(1, 2).join()
    zero.leave()
    one.train(2)
    one.fleet.save_persistables(str(tmp_path / "same"))
    one.leave()
    servers.end()
    loaded = Servers(1, model_dir=str(tmp_path / "same"))
    zero = loaded.part(0, 1).join()
    zero.sees(1, 2)
    two = loaded.part(2, 3).join()
    two.train(4)
    zero.leave()
    two.sees(1, 2, 4)
    two.leave()
    loaded.end()


# ---------------------------------------------------------------- servers that are killed


@pytest.mark.parametrize("offset", range(2))
@pytest.mark.parametrize("mode", ELASTIC)
@pytest.mark.pairs(1)
def test_servers_that_are_killed_know_who_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, offset: int
) -> None:
    """No push is lost and none counts twice, of whomever."""
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)

    def body(made: Fleet, index: int) -> None:
        host = Part(made, ELASTIC[mode]).join()
        host.train(4)
        if index == 0:
            for _ in range(2):
                guest = part(job, 4, 5, ELASTIC[mode]).join()
                guest.train(3)
                guest.leave()
        made.barrier_worker()
        host.sees(4, 4, 0, 0, 6)

    job = DyingJob(body, tmp_path, plan=every(3, offset), environ={**ENVIRON, "FLEET_JOB_ID": "one"})
    job.run()
    assert job.kills > 10
    assert not list(tmp_path.iterdir())


def test_who_has_left_goes_on_where_it_was_although_a_server_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers must agree on it, or what they do not agree on would be lost on some."""
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.002)

    def body(made: Fleet, index: int) -> None:
        host = Part(made, HALF).join()
        guest = part(job, 1, 2).join()
        guest.train(3)
        guest.leave()
        host.train(1)
        job.hosts[0].kill()
        guest = part(job, 1, 2).join()
        assert guest.fleet.resume_step() == 3
        guest.train(2)
        guest.leave()
        host.sees(1, 5)

    environ = {**ENVIRON, "FLEET_JOB_ID": "one"}
    job = DyingJob(body, tmp_path, workers=1, environ=environ, journal_bytes=1)
    job.run()


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
def test_processes_that_join_are_told_to_end_and_killed(
    processes: Processes,  # noqa: F811
    tmp_path: Path,
    free_endpoints: Callable[[int], list[str]],
) -> None:
    end = tmp_path / "end"
    (endpoint,) = free_endpoints(1)
    script = str(Path(__file__).parent / "scripts" / "elastic.py")
    common = {"PADDLE_PSERVERS_IP_PORT_LIST": endpoint, "FLEET_JOB_ID": "one", "FLAGS_rpc_deadline": "3000"}

    def worker(index: int) -> Started:
        """One that knows of no other than those before it."""
        about = {"PADDLE_TRAINERS": str(index + 1), "PADDLE_TRAINER_ID": str(index)}
        started = processes.start(script, str(end), TRAINING_ROLE="TRAINER", **common, **about)
        assert started.stdout is not None
        assert started.stdout.readline() == "joined\n"
        return started

    about = {"PADDLE_TRAINERS": "1", "PADDLE_PSERVER_ID": "0"}
    server = processes.start(script, str(end), TRAINING_ROLE="PSERVER", **common, **about)
    first, told, killed = worker(0), worker(1), worker(2)
    told.send_signal(signal.SIGTERM)
    assert ended(told)[0] == -signal.SIGTERM
    killed.kill()
    assert ended(killed)[0] == -signal.SIGKILL
    end.touch()
    code, out, err = ended(first)
    assert code == 0, err
    found = re.search(r"weight -(\d+) steps {0: (\d+), 1: (\d+), 2: (\d+)}", out)
    assert found, out
    all_steps, *steps = map(int, found.groups())
    assert all_steps == sum(steps)
    code, _, err = ended(server)
    assert code == 0, err
    assert "worker 2 was silent" in err
    assert "worker 1 was silent" not in err
