"""``fleet.ray.run``: jobs on a Ray cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray_job
import small_job
import torch
from harness import Job, run_job, until
from patience import PROCESSES_S
from prepared import Prepared
from test_processes import ROOT

import fleet
import fleet.launch.cli
import fleet.ray
from fleet import Fleet
from fleet.base import exit_guard
from fleet.base.cluster import Endpoint, Role
from fleet.base.ports import is_taken
from fleet.base.settings import ProcessSettings
from fleet.errors import DeadlineError, FleetError, IdentityError, JobAbortedError, ServerLostError
from fleet.launch.host_network import free_ports

#: Long enough for a busy machine to start eight processes.
PATIENT = {"FLAGS_rpc_deadline": f"{PROCESSES_S * 1000:g}", "FLEET_STARTUP_DEADLINE_S": f"{PROCESSES_S:g}"}

needs_ray = [
    pytest.mark.ray,
    pytest.mark.timeout(3 * PROCESSES_S),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


def on_ray(function: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_ray:
        function = mark(function)
    return function


# ---------------------------------------------------------------------------------------------- without Ray


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no servers": ({"server_num": 0}, "server_num is out of range"),
    "no workers": ({"worker_num": 0}, "worker_num is out of range"),
    "fewer workers than it begins with": ({"max_worker_num": 0}, "max_worker_num is out of range"),
    "half a restart": ({"max_restarts": 0.5}, "max_restarts must be an int"),
    "restarts below zero": ({"max_restarts": -1}, "max_restarts is out of range"),
    "resources that are none": ({"resources_per_server": 4}, "resources_per_server must be a dict"),
    "a negative resource": ({"resources_per_worker": {"GPU": -1}}, "resources_per_worker['GPU'] is out of range"),
    "no resource": ({"resources_per_worker": {"CPU": 0}}, "resources_per_worker asks for nothing"),
    "storage at a URL": ({"storage": "s3://bucket/run"}, "storage is for the journals of servers"),
    "storage that is no path": ({"storage": 3}, "storage must be a path"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_are_refused_by_name(case: str) -> None:
    given, what = REFUSED[case]
    with pytest.raises(FleetError) as caught:
        fleet.ray.run(print, **{"server_num": 1, "worker_num": 1, **given})
    assert what in str(caught.value)


def test_two_places_for_journals_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEET_DURABLE_DIR", "/var/tmp/fleet")
    with pytest.raises(FleetError, match="FLEET_DURABLE_DIR and storage= both say"):
        fleet.ray.run(print, server_num=1, worker_num=1, storage=tmp_path)


def test_the_module_is_there_without_ray_and_says_what_it_needs() -> None:
    script = (
        "import sys; sys.modules['ray'] = None; import fleet\n"
        "try: fleet.ray.run(print, server_num=1, worker_num=1)\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert said.stdout.strip() == "fleet.ray needs Ray: pip install 'torch-fleet[ray]'"


@pytest.mark.parametrize(
    ("bundles", "nodes", "enough"),
    [
        ([{"CPU": 1}] * 4, [{"CPU": 2}, {"CPU": 2}], True),
        ([{"CPU": 1}] * 4, [{"CPU": 2}, {"CPU": 1}], False),
        ([{"CPU": 3}], [{"CPU": 2}, {"CPU": 2}], False),
        ([{"CPU": 1, "GPU": 1}, {"CPU": 4}], [{"CPU": 5}, {"CPU": 1, "GPU": 1}], True),
    ],
)
def test_whether_a_cluster_is_large_enough(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]], enough: bool
) -> None:
    assert fleet.ray._is_enough(bundles, nodes) is enough


class ToldError(Exception):
    """How Ray tells of what a process has raised."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class ActorLostError(ToldError):
    pass


class Script:
    """As much of Ray as a job asks for. What it waits for comes one after the other, as written: what an actor's method
    returns, or raises. What is not written does not come while somebody waits; who is in the group comes at once. Lost
    actors are started again ``restarts`` times."""

    exceptions = SimpleNamespace(
        RayError=ToldError,
        RayActorError=ActorLostError,
        WorkerCrashedError=ActorLostError,
        OutOfMemoryError=ActorLostError,
        GetTimeoutError=TimeoutError,
    )
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: "in the group")
    )

    def __init__(self, restarts: int = 0, has_journals: bool = False, **written: Any) -> None:
        self.restarts, self.has_journals = restarts, has_journals
        self.written = [(tuple(name.split("_")), what) for name, what in written.items()]
        self.places: dict[str, str] = {}
        #: who was, and what had not come by then
        self.killed: dict[str, list[tuple[str, ...]]] = {}

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *_: self.actor(options)))

    def actor(self, options: dict[str, Any]) -> Any:
        name = options["name"].removeprefix("fleet-").replace("-", "")
        self.places[name] = options["scheduling_strategy"]
        calls = ("look_around", "prepare", "work", "__ray_terminate__")
        answers = {call: SimpleNamespace(remote=lambda *_, call=call: (name, call.strip("_"))) for call in calls}
        return SimpleNamespace(name=name, **answers)

    def wait(self, awaited: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        coming = [each for each in awaited if self.written and self.asked(each) == self.written[0][0]]
        return coming, [each for each in awaited if each not in coming]

    def asked(self, each: tuple[str, str]) -> tuple[str, str]:
        return each[0], "comes" if each[1] == "look_around" else "ends"

    def get(self, answer: tuple[str, str], timeout: float | None = None) -> Any:
        is_at_once = answer[1] == "look_around" and (not self.written or self.asked(answer) != self.written[0][0])
        _, what = (None, None) if is_at_once else self.written.pop(0)
        if isinstance(what, BaseException):
            raise what
        return ("10.0.0.1", 6174, self.has_journals) if answer[1] == "look_around" else what

    def kill(self, actor: Any) -> None:
        self.killed.setdefault(actor.name, [what for what, _ in self.written])

    def run(self) -> list[Any]:
        """A job of a server and a worker, and two workers that may join it."""
        made = [fleet.ray._Part(Role.SERVER, 0, {"CPU": 1})]
        made += [fleet.ray._Part(Role.WORKER, index, {"CPU": 1}, is_late=index > 0) for index in range(3)]
        settings = ProcessSettings.read({})
        return fleet.ray._Job(self, None, made, {"FLEET_JOB_ID": "one"}, settings, self.restarts, None).run()


def too_late() -> ToldError:
    return ToldError(IdentityError("worker 2 comes too late"))


def test_who_joins_has_its_result_among_the_others_and_who_does_not_is_called_off() -> None:
    ray = Script(worker2_comes=None, worker0_ends="first", worker2_ends="second", server0_ends=None)
    assert ray.run() == ["first", "second"]
    assert ray.places == dict.fromkeys(("server0", "worker0"), "in the group") | dict.fromkeys(
        ("worker1", "worker2"), "DEFAULT"
    )
    assert ray.killed["worker1"] == [("server0", "ends")]


def test_a_worker_that_finds_the_job_over_does_not_fail_it() -> None:
    before = Script(worker2_comes=None, worker0_ends="first", worker2_ends=too_late(), server0_ends=None)
    assert before.run() == ["first"]
    after = Script(worker2_comes=None, worker0_ends="first", server0_ends=None, worker2_ends=too_late())
    assert after.run() == ["first"]


@pytest.mark.parametrize("error", [ValueError("no such column"), IdentityError("worker 1 is not part of this job")])
def test_a_worker_that_joins_and_fails_ends_the_job(error: Exception) -> None:
    with pytest.raises(JobAbortedError, match="worker 1 failed"):
        Script(worker1_comes=None, worker1_ends=ToldError(error)).run()


def test_an_error_that_seems_to_come_of_others_counts_when_they_end_well() -> None:
    late = ToldError(DeadlineError("the user's own"))
    with pytest.raises(JobAbortedError, match=r"worker 0 failed; .*the user's own"):
        Script(worker0_ends=late, server0_ends=None).run()


def test_who_is_lost_before_it_says_where_it_is_is_started_again_or_named() -> None:
    lost = ActorLostError(OSError("no memory"))
    again = Script(1, worker0_comes=lost, **{"worker0.1_ends": "first"}, server0_ends=None)
    assert again.run() == ["first"]
    with pytest.raises(JobAbortedError, match=r"worker 0 failed; got OSError: no memory"):
        Script(worker0_comes=lost).run()


@pytest.mark.parametrize("who", ["worker0", "worker1"])
def test_an_error_of_an_actor_that_looks_around_is_told_by_whose_it_is(who: str) -> None:
    with pytest.raises(JobAbortedError, match=f"worker {who[-1]} failed; got ModuleNotFoundError: no fleet"):
        Script(1, **{f"{who}_comes": ToldError(ModuleNotFoundError("no fleet"))}).run()


def test_a_failure_is_not_forgotten_when_a_worker_that_joined_is_lost() -> None:
    failed = ToldError(DeadlineError("the user's own"))
    with pytest.raises(JobAbortedError, match=r"worker 0 failed; .*the user's own"):
        Script(1, worker1_comes=None, worker0_ends=failed, worker1_ends=ActorLostError(OSError()), server0_ends=0).run()


@pytest.mark.parametrize("has_journals", [False, True])
def test_who_has_failed_by_the_loss_of_another_begins_again_with_it(has_journals: bool) -> None:
    missed, lost = ToldError(ServerLostError("server 0")), ActorLostError(OSError())
    ends = {"worker0.1_ends": "first", "server0.2_ends": None}
    ray = Script(1, has_journals, worker0_ends=missed, server0_ends=lost, **ends)
    assert ray.run() == ["first"]


def test_a_signal_of_rays_lets_a_process_end_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_guard, "_is_dismissed", False)
    heard: list[bool] = []

    def rays(number: int, _frame: object) -> None:
        heard.append(exit_guard.is_dismissed())
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, rays)
    try:
        with fleet.ray._lost_by_sigterm():
            assert getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == __name__, "Ray's, for those who ask"
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is rays
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [True]


def test_who_ends_without_a_word_comes_back_as_if_it_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its script says goodbye."""
    monkeypatch.setattr(exit_guard, "_is_dismissed", False)
    turns = threading.Barrier(2, timeout=PROCESSES_S)

    def begun(job_of: Fleet) -> tuple[torch.nn.Module, Any]:
        model = small_job.Net()
        optimizer = job_of.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
        job_of.init_worker()
        return model, optimizer

    def body(first: Fleet, worker: int) -> int:
        small_job.train(*begun(first), [worker])
        turns.wait()
        if worker:
            turns.wait()  # it is one process, and would go without a word as well
            return 1
        exit_guard.dismiss()
        first.stop_worker()
        monkeypatch.setattr(exit_guard, "_is_dismissed", False)
        turns.wait()
        again = job.fleet(Role.WORKER, 0)
        begun(again)
        step = again.resume_step()
        again.stop_worker()
        return step

    job = Job(body, 2, 1)
    assert job.run() == [1, 1], "its goodbye would have been the end of its part"


def test_threads_that_run_jobs_at_once_connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    both = threading.Barrier(2)

    def init() -> None:
        began.append(threading.get_ident())
        with contextlib.suppress(threading.BrokenBarrierError):  # who comes alone
            both.wait(0.2)

    def placement_group(*_: Any, **__: Any) -> None:
        raise LookupError("far enough")

    util = SimpleNamespace(placement_group=placement_group)
    ray = SimpleNamespace(is_initialized=lambda: bool(began) and not both.n_waiting, init=init, util=util)
    monkeypatch.setattr(fleet.ray, "_ray", lambda: ray)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(fleet.ray.run, print, server_num=1, worker_num=1) for _ in range(2)]
    assert [type(each.exception()) for each in runs] == [LookupError, LookupError]
    assert len(began) == 1


# ---------------------------------------------------------------------------------------------- on a cluster


#: What only nodes have that the autoscaler adds.
GROWN = "grown"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, prepared: Prepared) -> Iterator[Any]:
    """Two nodes of four processors each, beside the head's, which takes nobody. Its autoscaler adds up to two others
    for those who ask for what only these have, and takes them away when nobody is there. The actors of jobs that are
    run from here are prepared; those of other drivers begin with a new Python."""
    import ray
    from ray.cluster_utils import Cluster

    (gcs_port,) = free_ports(1)
    provider = {
        "type": "fake_multinode",
        "gcs_address": f"{ray.util.get_node_ip_address()}:{gcs_port}",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "foreground_node_launch": True,
    }
    grown = {"resources": {"CPU": 0, GROWN: 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    autoscaler = {
        "cluster_name": "of-tests",
        "provider": provider,
        "max_workers": 2,
        "idle_timeout_minutes": 0.02,
        "upscaling_speed": 1000,
        "available_node_types": {"ray.head.default": head, "grown": grown},
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        **{f"{when}_commands": [] for when in commands},
    }
    config = tmp_path_factory.mktemp("ray") / "autoscaler.json"
    config.write_text(json.dumps(autoscaler))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_FAKE_CLUSTER", "1")
        patch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
        patch.setenv("AUTOSCALER_HEARTBEAT_TIMEOUT_S", f"{PROCESSES_S:g}")
        head_node = {
            "num_cpus": 0,
            "include_dashboard": False,
            "gcs_server_port": gcs_port,
            "autoscaling_config": str(config),
            "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        }
        made = Cluster(initialize_head=True, head_node_args=head_node)
        try:
            for _ in range(2):
                made.add_node(num_cpus=4)
            python = str(prepared.commands(bare=True) / "python")
            ray.init(address=made.address, runtime_env={"py_executable": python})
            yield made
        finally:
            ray.shutdown()
            of_ray = psutil.Process().children(recursive=True)
            made.shutdown()
            for each in of_ray:  # nodes that the autoscaler has added and not taken away
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)


def ends_as_in_one_process(results: Any, workers: int = 2) -> bool:
    """Whether workers have seen what those of the same job have that are threads."""
    if workers not in EXPECTED:
        EXPECTED[workers] = run_job(ray_job.body, workers, 2)
    expected = EXPECTED[workers]
    return all(small_job.same(seen, other) for (_, _, seen), other in zip(results, expected, strict=True))


EXPECTED: dict[int, Any] = {}


def assert_nothing_is_left(folder: Path) -> None:
    """No actor, none of the processes that left word in the folder, no port, no place, no demand."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    pids = [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]
    endpoints = [Endpoint.parse(path.read_text().split()[1]) for path in folder.glob("server-?")]
    assert pids
    assert endpoints
    until(lambda: not [each for each in list_named_actors(all_namespaces=True) if each["name"].startswith("fleet-")])
    until(lambda: not any(map(is_member, pids)))
    until(lambda: not any(map(is_taken, endpoints)))
    until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))


def is_member(pid: int) -> bool:
    """Whether this process is there, and Ray calls it after our actors' class."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).startswith("ray::Member")
    except psutil.Error:
        return False


@on_ray
def test_a_job_ends_where_it_ends_in_one_process(cluster: Any, patient: None, tmp_path: Path) -> None:
    results = fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2, resources_per_worker={"CPU": 2})
    assert [(index, threads) for index, threads, _ in results] == [(0, "2"), (1, "2")]
    assert ends_as_in_one_process(results)
    assert_nothing_is_left(tmp_path)


@on_ray
def test_a_job_is_looked_at_like_any_other(
    cluster: Any, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEET_AUTH_TOKEN", "of-who-looks-too" * 2)
    (tmp_path / "worker-0-step-3").write_text("look -")
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(fleet.ray.run, ray_job.train, tmp_path, server_num=2, worker_num=1)
        until(lambda: (tmp_path / "reached").exists() or running.done(), PROCESSES_S)
        endpoints = [path.read_text().split()[1] for path in sorted(tmp_path.glob("server-?"))]
        assert fleet.launch.cli.main(["top", "--once", "--interval", "0.1", ",".join(endpoints)]) == 0
        (tmp_path / "looked").touch()
        results = running.result(PROCESSES_S)
    table = capsys.readouterr().out
    assert all(name in table for name in ("server 0", "server 1", "worker 0")), table
    assert ends_as_in_one_process(results, workers=1)
    assert_nothing_is_left(tmp_path)


@on_ray
@pytest.mark.slow  # a part of them in CI
@pytest.mark.parametrize("how", ["kill", "end"])
def test_who_is_killed_comes_back(cluster: Any, patient: None, tmp_path: Path, how: str) -> None:
    """Or ends by a SIGTERM, as all do on a node that Ray gives back."""
    (tmp_path / "worker-0-step-3").write_text(f"{how} server-1")
    (tmp_path / "worker-1-step-5").write_text(f"{how} worker-0")
    storage = tmp_path / "storage"
    results = fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2, max_restarts=1, storage=storage)
    assert not list(tmp_path.glob("*step*")), "both were killed"
    assert ends_as_in_one_process(results)
    assert list(storage.iterdir()) == [], "journals go with their job"
    assert_nothing_is_left(tmp_path)


@on_ray
@pytest.mark.slow  # a part of them in CI
def test_a_server_whose_port_is_taken_follows_its_journal(
    cluster: Any, patient: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "worker-0-step-3").write_text("occupy server-1")
    storage = tmp_path / "storage"
    results = fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=1, max_restarts=1, storage=storage)
    assert "all start again" in caplog.text
    assert ends_as_in_one_process(results, workers=1)
    assert_nothing_is_left(tmp_path)


@on_ray
def test_who_is_lost_too_often_ends_the_job(cluster: Any, patient: None, tmp_path: Path) -> None:
    (tmp_path / "worker-0-step-3").write_text("kill server-1")
    with pytest.raises(JobAbortedError, match="server 1 failed") as caught:
        fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=1)
    assert "Actor" in type(caught.value.__cause__).__name__
    assert_nothing_is_left(tmp_path)


@on_ray
def test_a_failure_is_told_by_whose_it_is_and_leaves_nothing(cluster: Any, patient: None, tmp_path: Path) -> None:
    (tmp_path / "worker-1-step-2").write_text("fail column")
    with pytest.raises(JobAbortedError, match=r"worker 1 failed; .*ValueError: no such column") as caught:
        fleet.ray.run(ray_job.train, tmp_path, server_num=1, worker_num=2, max_restarts=3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_nothing_is_left(tmp_path)


@on_ray
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_a_run_whose_driver_ends_leaves_nothing(
    cluster: Any, patient: None, tmp_path: Path, prepared: Prepared, how: signal.Signals
) -> None:
    (tmp_path / "worker-0-step-3").write_text("wait -")
    script = ROOT / "tests" / "scripts" / "ray_driver.py"
    driver = prepared.start([str(script), cluster.address, str(tmp_path)], os.environ, bare=True)
    until(lambda: (tmp_path / "reached").exists() or driver.poll() is not None, PROCESSES_S)
    driver.send_signal(how)
    _, told = driver.communicate(timeout=PROCESSES_S)
    assert driver.returncode == (1 if how is signal.SIGINT else -how)
    assert ("KeyboardInterrupt" in told) == (how is signal.SIGINT), told
    assert_nothing_is_left(tmp_path)


@on_ray
def test_a_job_outlives_a_node(cluster: Any, patient: None, tmp_path: Path) -> None:
    doomed = cluster.add_node(num_cpus=4, resources={"first": 4})
    (tmp_path / "worker-0-step-3").write_text("wait -")
    with ThreadPoolExecutor(1) as beside:  # Ray adds nodes on the main thread only
        running = beside.submit(
            fleet.ray.run,
            ray_job.train,
            tmp_path,
            server_num=2,
            worker_num=1,
            resources_per_server={"CPU": 1, "first": 1},
            max_restarts=2,
            storage=tmp_path / "storage",
        )
        while not (tmp_path / "reached").exists() and not running.done():
            time.sleep(0.05)
        cluster.remove_node(doomed)
        spare = cluster.add_node(num_cpus=4, resources={"first": 4})
        results = running.result(2 * PROCESSES_S)
    assert ends_as_in_one_process(results, workers=1)
    assert_nothing_is_left(tmp_path)
    cluster.remove_node(spare)


@on_ray
def test_workers_join_an_elastic_job_as_the_autoscaler_adds_nodes(cluster: Any, patient: None, tmp_path: Path) -> None:
    """The first actors wait for a node, too. There is none for a third worker, which is called off at the end."""
    results = fleet.ray.run(
        ray_job.grow,
        tmp_path,
        True,
        server_num=1,
        worker_num=1,
        max_worker_num=3,
        resources_per_server={GROWN: 0.1},
        resources_per_worker={GROWN: 0.9},
    )
    (second,) = {1, 2} & {index for index, _, _ in results}  # whichever of the two Ray gave the place
    assert results == [(0, 1, 2), (second, second + 1, 2)]
    assert_nothing_is_left(tmp_path)
    import ray

    until(lambda: GROWN not in ray.cluster_resources())


@on_ray
def test_workers_that_would_join_another_job_are_refused(cluster: Any, patient: None, tmp_path: Path) -> None:
    with pytest.raises(JobAbortedError, match=r"worker 1 failed; .*PlanMismatchError"):
        fleet.ray.run(ray_job.grow, tmp_path, False, server_num=1, worker_num=1, max_worker_num=2)
    assert_nothing_is_left(tmp_path)


@on_ray
@pytest.mark.parametrize(
    ("script", "result"),
    [("train", r"accuracy on new clicks: 0\.9[5-9]"), ("sweep", "8 jobs; the best learning rate is ")],
    ids=["train", "sweep"],
)
def test_an_example_comes_to_its_result(
    cluster: Any, prepared: Prepared, tmp_path: Path, script: str, result: str
) -> None:
    environ = {**os.environ, "RAY_ADDRESS": cluster.address, "HOME": str(tmp_path)}
    example = prepared.start([str(ROOT / "examples" / "ray" / f"{script}.py")], environ, tmp_path, bare=True)
    out, err = example.communicate(timeout=2 * PROCESSES_S)
    assert re.search(result, out), out + err
