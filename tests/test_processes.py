"""Real processes, real sockets: every way of starting a job, and of ending one badly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from harness import PATIENT, Job, until
from patience import PROCESSES_S
from prepared import Prepared, Process
from scripts import train

from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.ports import is_taken
from fleet.base.settings import ProcessSettings
from fleet.errors import DeadlineError, JobAbortedError
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.real_network import real_network
from fleet.role_maker import Role, UserDefinedRoleMaker

ROOT = Path(__file__).parent.parent
TRAIN = str(ROOT / "tests" / "scripts" / "train.py")
QUICKSTART = str(ROOT / "examples" / "quickstart.py")

#: Without the variables of whatever started the tests.
STRANGE = ("PADDLE_", "FLAGS_", "FLEET_", "TRAINING_ROLE", "POD_IP")
STRANGE_TO_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(STRANGE + STRANGE_TO_TORCH)}


Started = Process | subprocess.Popen[str]


class Processes:
    """Processes of a test, each ended with it."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.started: list[Started] = []

    def start(self, *command: str, cwd: Path | None = None, **variables: str) -> Started:
        """A script or a module in a process that has the imports behind it, and none of a compiler where the script
        sees to that."""
        bare = TRAIN in command
        return self._add(self._prepared.start([*command], environ_with(variables), cwd, bare=bare))

    def path(self, *, bare: bool = False) -> str:
        """A search path on which Python and its commands begin so too."""
        return os.pathsep.join(
            [str(self._prepared.commands(bare=bare)), str(Path(sys.executable).parent), os.environ["PATH"]]
        )

    def python(self, *command: str, cwd: Path | None = None, **variables: str) -> Started:
        """A Python with a command line of its own."""
        return self._add(
            subprocess.Popen(
                [sys.executable, *command],
                env=environ_with(variables),
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def _add(self, process: Started) -> Started:
        self.started.append(process)
        return process

    def server(self, endpoint: str, endpoints: list[str], workers: int, **more: str) -> Started:
        return self.start(TRAIN, **as_server(endpoint, endpoints, workers), **more)

    def worker(self, index: int, endpoints: list[str], workers: int, variant: str = "", **more: str) -> Started:
        return self.start(TRAIN, variant, **as_worker(index, endpoints, workers), **more)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def environ_with(variables: Mapping[str, str]) -> dict[str, str]:
    return {**CLEAN, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}


def as_server(endpoint: str, endpoints: list[str], workers: int) -> dict[str, str]:
    host, _, port = endpoint.partition(":")
    return {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(workers),
        "POD_IP": host,
        "PADDLE_PORT": port,
    }


def as_worker(index: int, endpoints: list[str], workers: int) -> dict[str, str]:
    return {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(workers),
        "PADDLE_TRAINER_ID": str(index),
    }


@pytest.fixture
def processes(prepared: Prepared) -> Iterator[Processes]:
    made = Processes(prepared)
    yield made
    made.end()


class Here:
    """Members of a job that are threads of this process, over real sockets, as what is looked at is the process beside
    them. Its workers do what the script's do."""

    def __init__(self, endpoints: list[str], workers: int, variant: str = "", **environ: str) -> None:
        self.said: list[str] = []
        self._job = Job(
            lambda made, _: train.train(made, variant, self.said.append),
            workers,
            network=real_network(ProcessSettings.read(environ)),
            endpoints=endpoints,
            environ={**PATIENT, **environ},
        )
        self._threads: list[threading.Thread] = []

    def start(self, *, servers: Sequence[int] = (), workers: Sequence[int] = ()) -> Here:
        members = [(self._job.serve, index) for index in servers] + [(self._job.work, index) for index in workers]
        for member, index in members:
            name = f"{member.__name__} {index}"
            self._threads.append(threading.Thread(target=member, args=(index,), name=name, daemon=True))
            self._threads[-1].start()
        return self

    def heard(self, wanted: str) -> None:
        """Wait until a worker here says so."""
        until(lambda: wanted in self.said or self._job.errors)
        assert wanted in self.said, self._job.errors

    def error(self, member: str) -> BaseException:
        """What ended a member that failed."""
        self._job.join(self._threads)
        return self._job.errors[member]

    def end(self) -> None:
        """All end well."""
        self._job.join(self._threads)
        assert not self._job.errors


def ended(process: Started, timeout_s: float = PROCESSES_S) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


@pytest.mark.slow
def test_the_quickstart_alone(processes: Processes, tmp_path: Path) -> None:
    code, out, err = ended(processes.start(QUICKSTART, cwd=tmp_path))
    assert code == 0, err
    found = re.search(r"accuracy on new clicks: ([\d.]+)", out)
    assert found
    assert float(found[1]) > 0.95
    assert (tmp_path / "ckpt" / "quickstart" / "manifest.json").is_file()


def test_the_example_of_the_readme(processes: Processes, tmp_path: Path) -> None:
    (code,) = [part.partition("```")[0] for part in (ROOT / "README.md").read_text().split("```python\n")[1:2]]
    script = tmp_path / "train.py"
    script.write_text(code)
    status, out, err = ended(processes.start(str(script), cwd=tmp_path))
    assert status == 0, err
    found = re.search(r"worker 0 of 1: loss ([\d.]+)", out)
    assert found
    assert float(found[1]) < 0.05


@pytest.mark.slow
def test_role_makers_in_code_on_four_processes(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    """examples/user_defined.py, whose right answer is known."""
    endpoints = free_endpoints(2)
    command = [str(ROOT / "examples" / "user_defined.py"), "--endpoints", ",".join(endpoints), "--worker_num", "2"]
    started = [
        processes.start(*command, "--role", role, "--index", str(index))
        for role in ("server", "worker")
        for index in range(2)
    ]
    for process in started:
        status, out, err = ended(process)
        assert status == 0, err
    found = re.search(r"largest error ([\d.e-]+)", out)
    assert found
    assert float(found[1]) < 1e-3


@pytest.mark.slow
def test_four_terminals(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    """One server from the user's script, one with no script at all; workers before servers. Two are new
    Pythons, whose hashes are not those of the others."""
    endpoints = free_endpoints(2)
    workers = [processes.worker(0, endpoints, 2), processes.python(TRAIN, **as_worker(1, endpoints, 2))]
    servers = [
        processes.server(endpoints[0], endpoints, 2),
        processes.python("-m", "fleet", "server", "--endpoint", endpoints[1]),
    ]
    for process in workers:
        code, out, err = ended(process)
        assert code == 0, err
        # Two workers: weight -1 a round; row 0 gets half a gradient a round, from worker 0 alone.
        assert "weight -5.0 row -2.5" in out
    for process, said in zip(servers, ["served without a compiler\n", ""], strict=True):
        code, out, err = ended(process)
        assert code == 0, err
        assert out == said


@pytest.mark.slow
def test_one_port_on_two_addresses(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    port = free_endpoints(1)[0].partition(":")[2]
    endpoints = [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    servers = [processes.server(endpoint, endpoints, 1) for endpoint in endpoints]
    code, out, err = ended(processes.worker(0, endpoints, 1))
    assert code == 0, err
    assert "weight -5.0 row -5.0" in out
    assert [ended(server)[0] for server in servers] == [0, 0]


def test_an_exception_ends_the_whole_job_with_its_traceback(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    """No launcher watches: the servers and the other worker learn of it from the one that failed."""
    endpoints = free_endpoints(1)
    here = Here(endpoints, 2, "fail").start(servers=[0], workers=[0])
    code, _, err = ended(processes.worker(1, endpoints, 2, "fail"))
    assert code == 1
    assert "ValueError: a bad batch" in err
    for member in ("worker 0", "server 0"):
        error = here.error(member)
        assert isinstance(error, JobAbortedError)
        assert "worker 1 failed" in str(error)
        assert "ValueError: a bad batch" in str(error)


def test_ctrl_c_on_a_worker(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    endpoints = free_endpoints(1)
    here = Here(endpoints, 1).start(servers=[0])
    worker = processes.worker(0, endpoints, 1, "slow")
    assert worker.stdout is not None
    assert [worker.stdout.readline() for _ in range(2)] == ["joined\n", "under way\n"]
    worker.send_signal(signal.SIGINT)
    code, _, err = ended(worker)
    assert code != 0
    assert "KeyboardInterrupt" in err
    assert "KeyboardInterrupt" in str(here.error("server 0"))


def test_a_killed_worker_that_starts_again(
    processes: Processes, free_endpoints: Callable[[int], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with the job's next step, and everybody ends where they would have ended."""
    endpoints = free_endpoints(2)
    beating = {"FLEET_HEARTBEAT_S": "0.2"}
    here = Here(endpoints, 2, "again", **beating).start(servers=[0, 1], workers=[0])
    worker = processes.worker(1, endpoints, 2, "again", **beating)
    assert worker.stdout is not None
    first = [worker.stdout.readline() for _ in range(7)]
    assert first == ["joined\n", "from 0\n", *(f"step {step}\n" for step in range(5))]
    worker.kill()
    code, out, err = ended(processes.worker(1, endpoints, 2, "again", **beating))
    assert code == 0, err
    here.end()
    last = f"weight {-sum(range(1, 41))}.0 row -14.0"
    assert out.splitlines()[-1] == here.said[-1] == last
    resumed = int(out.splitlines()[1].removeprefix("from "))
    assert 5 <= resumed < 40
    assert caplog.text.count("worker 1 has started again") == 2, "each server says so"


def test_sigterm_on_a_worker(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    """As when a pod is evicted: the job ends at once and says why, and the process still dies of the signal."""
    endpoints = free_endpoints(1)
    server = processes.server(endpoints[0], endpoints, 1)
    worker = processes.worker(0, endpoints, 1, "slow")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "joined\n"
    worker.send_signal(signal.SIGTERM)
    assert ended(worker)[0] == -signal.SIGTERM
    code, _, err = ended(server)
    assert code == 1
    assert "ended by SIGTERM" in err


@pytest.mark.parametrize("handler", ["exit_guard._chain_sigterm()", "mpi_world._say_so_on_sigterm('rank 0')"])
def test_the_first_process_of_a_container_dies_of_sigterm_too(handler: str) -> None:
    """The system keeps signals away from it for which it has no handler, as it does when ours has done its work."""
    unshare = ["unshare", "--pid", "--fork", *["--map-root-user"] * (os.geteuid() != 0)]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("there can be no namespace of processes here")
    script = f"""
import os, signal
from fleet.base import exit_guard
from fleet.bootstrap import mpi_world
{handler}
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("it lives on")
"""
    told = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert told.stdout == "1\n", told.stderr
    assert told.returncode == 128 + signal.SIGTERM


def test_a_forked_child_does_not_speak_for_the_worker(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    endpoints = free_endpoints(1)
    here = Here(endpoints, 1).start(servers=[0])
    code, out, err = ended(processes.worker(0, endpoints, 1, "fork"))
    assert code == 0, err
    assert "weight -5.0" in out
    here.end()


def test_sigterm_on_a_server(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    """The server ends cleanly; the worker is told which one it was and why."""
    endpoints = free_endpoints(2)
    here = Here(endpoints, 1, "slow").start(servers=[0], workers=[0])
    server = processes.server(endpoints[1], endpoints, 1)
    here.heard("joined")
    server.send_signal(signal.SIGTERM)
    code, out, err = ended(server)
    assert code == 0, err
    assert "served" in out
    told = str(here.error("worker 0"))
    assert endpoints[1] in told
    assert "SIGTERM" in told
    assert "SIGTERM" in str(here.error("server 0")), "the other server hears the reason from the worker"


@pytest.mark.parametrize("durable", [False, True])
def test_a_handler_of_somebody_elses_hears_of_the_signal_that_ended_the_serving(durable: bool, tmp_path: Path) -> None:
    """It has been set before, and may end the process in its own way."""
    network, endpoints = LoopbackNetwork(), ["server:1"]

    def own(number: int, _frame: object) -> None:
        raise SystemExit(number + 2)

    def kill_when_it_serves() -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) not in (own, before))
        os.kill(os.getpid(), signal.SIGTERM)

    kept = {"FLEET_DURABLE_DIR": str(tmp_path)} if durable else {}
    server = Fleet(environ={**PATIENT, **kept}, network=network)
    server.init(UserDefinedRoleMaker(0, Role.SERVER, 1, endpoints))
    server.init_server()
    killer = threading.Thread(target=kill_when_it_serves)
    before = signal.signal(signal.SIGTERM, own)
    try:
        killer.start()
        with pytest.raises(SystemExit) as ended:
            server.run_server()
        assert ended.value.code == signal.SIGTERM + 2
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
        killer.join()


def test_sigterm_on_a_server_that_is_to_be_drained(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    endpoints = free_endpoints(2)
    here = Here(endpoints, 1, "brief", FLEET_HEARTBEAT_S="0.05").start(servers=[0], workers=[0])
    server = processes.server(endpoints[1], endpoints, 1, FLEET_DRAIN="1")
    here.heard("joined")
    server.send_signal(signal.SIGTERM)
    code, out, err = ended(server)
    assert code == 0, err
    assert "served" in out
    here.end()


def test_a_killed_server_is_an_error_after_the_deadline(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    endpoints = free_endpoints(1)
    hasty = {"FLAGS_rpc_deadline": "1500", "FLEET_HEARTBEAT_S": "0.2"}
    server = processes.server(endpoints[0], endpoints, 1, **hasty)
    here = Here(endpoints, 1, "slow", **hasty).start(workers=[0])
    here.heard("joined")
    server.kill()
    error = here.error("worker 0")
    assert isinstance(error, DeadlineError)
    assert f"the server at {endpoints[0]} is silent" in str(error)


@pytest.mark.slow
def test_a_server_and_a_worker_that_are_paused(
    processes: Processes, free_endpoints: Callable[[int], list[str]]
) -> None:
    """As a debugger does it, or a frozen container. Less than the deadline costs time only; a worker that is paused for
    longer is given up on, and finds nobody when it wakes."""
    endpoints = free_endpoints(1)
    hasty = {"FLAGS_rpc_deadline": "5000", "FLEET_HEARTBEAT_S": "0.2"}
    server = processes.server(endpoints[0], endpoints, 2, **hasty)
    workers = [processes.worker(index, endpoints, 2, "again", **hasty) for index in range(2)]

    def heard(worker: Started, wanted: str) -> None:
        assert worker.stdout is not None
        while worker.stdout.readline() != wanted:
            assert worker.poll() is None, worker.communicate()

    heard(workers[1], "step 3\n")
    server.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(1.0)
    server.send_signal(signal.SIGCONT)
    heard(workers[1], "step 10\n")
    workers[1].send_signal(signal.SIGSTOP)
    code, _, err = ended(workers[0])
    assert code == 0, err
    code, _, err = ended(server)
    assert code == 0
    assert re.search(r"worker 1 was silent for [\d.]+ s and is given up on", err)
    workers[1].send_signal(signal.SIGCONT)
    code, _, err = ended(workers[1])
    assert code == 1
    assert re.search(rf"DeadlineError: the server at {re.escape(endpoints[0])} is silent", err)


def test_a_script_that_forgets_stop_worker(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    endpoints = free_endpoints(1)
    here = Here(endpoints, 1).start(servers=[0])
    assert ended(processes.worker(0, endpoints, 1, "forget"))[0] == 0
    assert "without fleet.stop_worker()" in str(here.error("server 0"))


@pytest.mark.parametrize(
    ("variant", "code", "why"),
    [
        ("exit", 7, r"exit code 7 \(its script ended without fleet\.stop_worker\(\), which has to be .*\)"),
        pytest.param("fail", 1, r"exit code 1 \(ValueError: a bad batch\)", marks=pytest.mark.slow),
        pytest.param("forget", 1, r"its script ended without fleet\.stop_worker\(\).*", marks=pytest.mark.slow),
    ],
)
def test_fleetrun_names_the_worker_that_ended_the_job(
    processes: Processes, tmp_path: Path, variant: str, code: int, why: str
) -> None:
    command = ("-m", "fleet.launch", "--server_num", "1", "--worker_num", "2", TRAIN, variant)
    for _ in range(3):
        got, _, err = ended(processes.start(*command, cwd=tmp_path))
        log = (tmp_path / "logs" / "server.0.log").read_text()
        if log:  # on a busy machine a server may be ended before it has failed by itself
            break
    assert got == code
    assert re.search(rf"^\[fleetrun\] worker [01] failed: {why}; its output is in logs/worker", err, re.MULTILINE), err
    assert err.count("Traceback (most recent call last)") == (variant == "fail")
    if variant == "fail":
        assert err.splitlines()[-1] == "[worker 1] ValueError: a bad batch"
    assert "Traceback" in log


#: One worker, or all, fail in the midst of a backward whose averages are under way among the workers.
FAILS_IN_A_BACKWARD = """
import sys

import torch

import fleet

fleet.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))
strategy = fleet.StrategyFactory.create_sync_strategy(dense="all_reduce")
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.01), strategy, model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()

def fail(gradient):
    raise ValueError("a bad batch")

for step in range(4):
    hidden = model[:2](torch.randn(16, 64))
    if step == 3 and (sys.argv[1] == "all" or fleet.worker_index() == 1):
        hidden.register_hook(fail)
    optimizer.minimize(model[2:](hidden).square().mean())
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_worker_that_fails_amid_an_average_ends_by_its_own_error(
    processes: Processes, tmp_path: Path, who: str
) -> None:
    """Not by one of torch's, whose collectives may end just when the process does."""
    (tmp_path / "script.py").write_text(FAILS_IN_A_BACKWARD)
    command = ("-m", "fleet.launch", "--server_num", "1", "--worker_num", "3", "script.py", who)
    code, _, err = ended(processes.start(*command, cwd=tmp_path))
    assert code == 1, err
    assert re.search(r"^\[fleetrun\] worker \d failed: exit code 1 \(ValueError: a bad batch\)", err, re.MULTILINE), err
    for log in (tmp_path / "logs").glob("worker.*.log"):
        assert "terminate called" not in log.read_text(), log


def test_a_forgotten_stop_worker_is_told_of_alone(processes: Processes) -> None:
    code, _, err = ended(processes.start(TRAIN, "forget"))
    assert code == 0
    assert "the script ended without fleet.stop_worker(), so its job has failed: call it after the training" in err


def test_a_second_server_on_the_same_port(processes: Processes, free_endpoints: Callable[[int], list[str]]) -> None:
    endpoints = free_endpoints(1)
    here = Here(endpoints, 1, "again").start(servers=[0])
    until(lambda: is_taken(Endpoint.parse(endpoints[0])))
    code, _, err = ended(processes.start("-m", "fleet", "server", "--endpoint", endpoints[0]))
    here.start(workers=[0]).end()
    assert code != 0
    assert f"port {endpoints[0].partition(':')[2]} is in use" in err
    assert f"process {os.getpid()}" in err
    assert "Traceback" not in err, "an operator's command explains itself without one"
