"""The pages of docs/deploying: their commands as they stand there, where this machine can run them, and the manifests
against schemas and as the pods that they describe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import test_processes
from network_namespaces import Machine, Machines, missing
from patience import PROCESSES_S
from test_processes import CLEAN, ROOT, TRAIN, Processes, ended

from fleet.base.cluster import Assignment
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
def machines() -> Iterator[Machines]:
    with Machines() as made:
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

    def test_over_ipv6(self, lan: dict[str, Machine], tmp_path: Path) -> None:
        command = f"fleetrun --servers [fd77::1]:6170 --workers fd77::2 {TRAIN}"
        _, out = outputs([shell(lan[name], command, tmp_path) for name in ("node1", "node2")])
        assert "weight -5.0 row -2.5" in out or "weight -5.0 row -5.0" in out

    def test_a_server_behind_a_forwarded_port_whose_own_name_leads_home(
        self, machines: Machines, tmp_path: Path
    ) -> None:
        """The worker is in another network and knows the gateway alone; the server's name is 127.0.1.1 to itself."""
        server, gateway, worker = (machines.machine(name) for name in ("server", "gateway", "worker"))
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


def manifest(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((KUBERNETES / name).read_text())


def assert_valid(resource: Any) -> None:
    """By Kubernetes' own schema, in which nothing may be misspelt."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(resource, "1.31", strict=True)


def assert_valid_by_our_schema(resource: Any, schema: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(resource, json.loads((ROOT / "tests" / "schemas" / schema).read_text()))


def test_the_jobset_is_one() -> None:
    jobset = manifest("jobset.yaml")
    assert_valid_by_our_schema(jobset, "jobset.json")
    names = [job["name"] for job in jobset["spec"]["replicatedJobs"]]
    for job in jobset["spec"]["replicatedJobs"]:
        assert_valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})
        assert all(before["name"] in names[: names.index(job["name"])] for before in job.get("dependsOn", []))
    assert set(jobset["spec"]["successPolicy"]["targetReplicatedJobs"]) <= set(names)


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


Pod = tuple[str, dict[str, str]]


def pods_of_the_jobset(addresses: Mapping[str, str]) -> list[Pod]:
    """Every pod's host name and environment, as the cluster would make them of the manifest."""
    made = []
    jobset = manifest("jobset.yaml")
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            name = f"{jobset['metadata']['name']}-{job['name']}-0-{index}"
            fields = {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
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
                    environ[variable["name"]] = variable["value"]
            made.append((name, environ))
    return made


ADDRESSES = {
    f"quickstart-{kind}-0-{i}": f"10.80.{network}.{i + 1}"
    for network, kind in enumerate(("server", "worker"))
    for i in (0, 1)
}


def test_the_pods_of_the_jobset_know_who_they_are() -> None:
    everyone: list[Assignment] = [resolve(None, environ) for _, environ in pods_of_the_jobset(ADDRESSES)]
    assert [str(each) for each in everyone] == ["server 0", "server 1", "worker 0", "worker 1"]
    servers = [f"quickstart-server-0-{i}.quickstart" for i in (0, 1)]
    assert [[server.host for server in each.servers] for each in everyone] == [servers] * 4


class TestPods:
    pytestmark = netns

    def test_the_jobset_trains_and_its_probes_are_answered(self, machines: Machines, tmp_path: Path) -> None:
        pytest.importorskip("grpc_health", reason="the extra 'health'")
        names = {f"{name}.quickstart": address for name, address in ADDRESSES.items()}
        started = {}
        for name, environ in pods_of_the_jobset(ADDRESSES):
            pod = machines.machine(name)
            machines.connect(pod, "pods", f"{ADDRESSES[name]}/16")
            # A pod does not find its own name in time; the others' it does.
            pod.knows({other: address for other, address in names.items() if address != ADDRESSES[name]})
            started[name] = pod, environ
        kubelet = machines.machine("kubelet")
        machines.connect(kubelet, "pods", "10.80.0.100/16")
        processes, probes = [], []
        for name, (pod, environ) in started.items():
            if "server" in name:
                processes.append(shell(pod, "python examples/quickstart.py", tmp_path, **environ))
                probe = str(ROOT / "tests" / "scripts" / "probe.py")
                probes.append(shell(kubelet, f"python {probe} {ADDRESSES[name]}:6175", tmp_path))
        assert outputs(probes) == ["SERVING\n"] * 2
        for name, (pod, environ) in started.items():
            if "worker" in name:
                processes.append(shell(pod, "python examples/quickstart.py", tmp_path, **environ))
        outs = outputs(processes)
        assert [accuracies(out) for out in outs] == [[], [], [0.977], [0.977]]


# ---------------------------------------------------------------------------------------------- the pages


def test_every_block_is_run_and_every_link_leads_somewhere() -> None:
    blocks = {name: len(re.findall(r"```sh\n", page)) for name, page in PAGES.items()}
    assert {name: count for name, count in blocks.items() if count} == {
        "laptop": 2,
        "machines": 4,  # the last one makes a token
        "mpi": 1,
        "slurm": 1,
        "torchrun": 2,
    }
    for name, page in PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
            assert (ROOT / "docs" / "deploying" / link).exists(), f"{name}: {link}"
    assert set(re.findall(r"\]\((\w+)\.md\)", PAGES["README"])) == set(PAGES) - {"README"}
