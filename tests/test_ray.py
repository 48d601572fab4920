"""``fleet.ray.run``: jobs on a Ray cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_job
import small_job
from harness import run_job, until
from patience import PROCESSES_S
from test_processes import ROOT

import fleet
import fleet.ray
from fleet.base.cluster import Endpoint
from fleet.base.ports import is_taken
from fleet.errors import FleetError, JobAbortedError

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


# ---------------------------------------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of four processors each, beside the head's, which takes nobody."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                made.add_node(num_cpus=4)
            ray.init(address=made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def expected() -> Any:
    """What workers see at the end of the same job in one process."""
    return run_job(ray_job.body, 2, 2)


def is_member(process: psutil.Process) -> bool:
    """Whether Ray calls this process after our actors' class."""
    try:
        return " ".join(process.cmdline()).startswith("ray::Member")
    except psutil.Error:
        return False


def assert_nothing_is_left() -> None:
    import ray
    from ray.util import list_named_actors, placement_group_table

    until(lambda: not [each for each in list_named_actors(all_namespaces=True) if each["name"].startswith("fleet-")])
    until(lambda: not [each for each in psutil.Process().children(recursive=True) if is_member(each)])
    until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))


def assert_ports_are_free(folder: Path) -> None:
    endpoints = [Endpoint.parse(path.read_text().split()[1]) for path in folder.glob("server-?")]
    assert endpoints
    until(lambda: not any(map(is_taken, endpoints)))


@on_ray
def test_a_job_ends_where_it_ends_in_one_process(cluster: Any, patient: None, expected: Any) -> None:
    needs = {"CPU": 2}
    results = fleet.ray.run(ray_job.train, server_num=2, worker_num=2, resources_per_worker=needs)
    assert [(index, threads) for index, threads, _ in results] == [(0, "2"), (1, "2")]
    for (_, _, seen), other in zip(results, expected, strict=True):
        assert small_job.same(seen, other)
    assert_nothing_is_left()


@on_ray
def test_who_is_killed_comes_back(cluster: Any, patient: None, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "worker-0-step-3").write_text("kill server-1")
    (tmp_path / "worker-1-step-5").write_text("kill worker-0")
    storage = tmp_path / "storage"
    results = fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2, max_restarts=1, storage=storage)
    assert not list(tmp_path.glob("*step*")), "both were killed"
    assert all(small_job.same(seen, other) for (_, _, seen), other in zip(results, expected, strict=True))
    assert list(storage.iterdir()) == [], "journals go with their job"
    assert_nothing_is_left()


@on_ray
def test_a_server_whose_port_is_taken_follows_its_journal(
    cluster: Any, patient: None, expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "worker-0-step-3").write_text("occupy server-1")
    storage = tmp_path / "storage"
    results = fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2, max_restarts=1, storage=storage)
    assert "all start again" in caplog.text
    assert all(small_job.same(seen, other) for (_, _, seen), other in zip(results, expected, strict=True))
    assert_ports_are_free(tmp_path)


@on_ray
def test_who_is_lost_too_often_ends_the_job(cluster: Any, patient: None, tmp_path: Path) -> None:
    (tmp_path / "worker-0-step-3").write_text("kill server-1")
    with pytest.raises(JobAbortedError, match="server 1 failed") as caught:
        fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2)
    assert "Actor" in type(caught.value.__cause__).__name__
    assert_nothing_is_left()
    assert_ports_are_free(tmp_path)


@on_ray
def test_a_failure_is_told_by_whose_it_is_and_leaves_nothing(cluster: Any, patient: None, tmp_path: Path) -> None:
    (tmp_path / "worker-1-step-2").write_text("fail column")
    with pytest.raises(JobAbortedError, match=r"worker 1 failed; .*ValueError: no such column") as caught:
        fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2, max_restarts=3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_nothing_is_left()
    assert_ports_are_free(tmp_path)


@on_ray
def test_an_interrupted_run_leaves_nothing(
    cluster: Any, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    waits = []

    def interrupted(*args: Any, **named: Any) -> Any:
        waits.append(args)
        if len(waits) == 1:
            until(lambda: len(list(tmp_path.glob("server-?"))) == 2)
            raise KeyboardInterrupt
        return wait(*args, **named)

    wait = ray.wait
    monkeypatch.setattr(ray, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet.ray.run(ray_job.train, tmp_path, server_num=2, worker_num=2)
    assert_nothing_is_left()
    assert_ports_are_free(tmp_path)


@on_ray
def test_a_job_outlives_a_node(cluster: Any, patient: None, expected: Any, tmp_path: Path) -> None:
    doomed = cluster.add_node(num_cpus=4, resources={"first": 4})
    (tmp_path / "worker-0-step-3").write_text("wait -")
    with ThreadPoolExecutor(1) as beside:  # Ray adds nodes on the main thread only
        running = beside.submit(
            fleet.ray.run,
            ray_job.train,
            tmp_path,
            server_num=2,
            worker_num=2,
            resources_per_server={"CPU": 1, "first": 1},
            max_restarts=2,
            storage=tmp_path / "storage",
        )
        while not (tmp_path / "reached").exists() and not running.done():
            time.sleep(0.05)
        cluster.remove_node(doomed)
        spare = cluster.add_node(num_cpus=4, resources={"first": 4})
        results = running.result(2 * PROCESSES_S)
    assert all(small_job.same(seen, other) for (_, _, seen), other in zip(results, expected, strict=True))
    assert_nothing_is_left()
    cluster.remove_node(spare)
