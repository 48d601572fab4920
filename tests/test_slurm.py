"""A start by Slurm: what srun's variables say, read without a Slurm."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fleet.base.cluster import Assignment, Role
from fleet.errors import ConfigurationError
from fleet.role_maker import SlurmRoleMaker
from fleet.role_maker.hostlist import MOST, expand_counts, expand_hosts
from fleet.role_maker.resolve import resolve

Env = dict[str, str]


# ---------------------------------------------------------------------------------------------- Slurm's lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n", ["n"]),
        ("n1,m2", ["n1", "m2"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1-3],gpu,m[2]", ["n1", "n2", "n3", "gpu", "m2"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("a[1-2]-b.example.com", ["a1-b.example.com", "a2-b.example.com"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("[1-2]", ["1", "2"]),
        ("n_1", ["n_1"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "n,", ",n", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[1,]", "n[a-b]", "n[3-1]", "n[[1]]", "n[1-2-3]"),
        *("n 1", "n[1 - 2]", "n;rm", "n\n", "n²", "n[²]", "n[0-9999999999999]", "n..m", "n" * 64),
        *(f"n[0-{MOST}]", "n[1-999]m[1-999]", f"n[1-{MOST}],m", ",".join(["n[1-999]"] * 99)),
    ],
)
def test_what_is_no_host_list_or_too_long_a_one(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(text)


def test_any_hosts_that_are_abbreviated_come_back() -> None:
    draw = random.Random(3)
    for _ in range(200):
        names: list[str] = []
        parts: list[str] = []
        for _ in range(draw.randint(1, 4)):
            stem, width = draw.choice(["n", "gpu-", "a1x", "r2n"]), draw.randint(1, 4)
            spans = []
            for _ in range(draw.randint(1, 3)):
                low = draw.randrange(10**width)
                high = min(low + draw.randint(0, 12), 10**width - 1)
                names += [f"{stem}{number:0{width}}" for number in range(low, high + 1)]
                spans.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            parts.append(f"{stem}[{','.join(spans)}]")
        assert list(expand_hosts(",".join(parts))) == names


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,3(x2)", [1, 2, 3, 3])])
def test_tasks_of_nodes(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "x", "2(x0)", "2(x", "2x3", "-1", "1,,1", "2(x3)1", f"1(x{MOST + 1})", "9" * 12]
)
def test_what_is_no_such_list(text: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(text)


# ---------------------------------------------------------------------------------------------- steps


def dealt(counts: list[int], at_once: int) -> list[int]:
    """The node of each task, as Slurm deals them: to one node after the other, so many at once."""
    stacks = [[node] * count for node, count in enumerate(counts)]
    order = []
    while any(stacks):
        for stack in stacks:
            order += stack[:at_once]
            del stack[:at_once]
    return order


def step(hosts: str, counts: str, **more: str) -> list[Env]:
    """What srun gives each task."""
    per_node = list(expand_counts(counts))
    way = more.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    at_once = {"block": MOST, "cyclic": 1, "plane": int(more.get("SLURM_DIST_PLANESIZE", "1"))}[way]
    nodes = dealt(per_node, at_once)
    return [
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": str(len(nodes)),
            "SLURM_STEP_NODELIST": hosts,
            "SLURM_STEP_TASKS_PER_NODE": counts,
            **more,
        }
        for task, node in enumerate(nodes)
    ]


def seen(environs: list[Env], **kinds: Any) -> list[Assignment]:
    return [SlurmRoleMaker(environ=environ, **kinds).assignment() for environ in environs]


def cluster(assignment: Assignment) -> Assignment:
    return replace(assignment, role=Role.WORKER, index=0, local_rank=None, origin="")


def test_half_of_the_tasks_serve_spread_over_the_nodes() -> None:
    everyone = seen(step("n[1-2]", "2(x2)"))
    assert [str(each) for each in everyone] == ["server 0", "worker 0", "server 1", "worker 1"]
    assert [str(server) for server in everyone[0].servers] == ["n1:27376", "n2:27376"]
    assert everyone[3].origin == "Slurm, task 3 of 4"
    more = seen(step("n[1-3]", "3,2,2"))
    assert [str(each) for each in more if each.is_server] == ["server 0", "server 1", "server 2"]
    assert [server.host for server in more[0].servers] == ["n1", "n2", "n3"]
    assert more[0].worker_num == 4


def test_how_many_serve_may_be_said_and_servers_of_one_node_have_ports_of_their_own() -> None:
    everyone = seen(step("n[1-2]", "3,2", FLEET_SLURM_SERVERS="4", FLEET_SLURM_PORT="7000"))
    assert [str(server) for server in everyone[0].servers] == ["n1:7000", "n2:7000", "n1:7001", "n2:7001"]
    assert [each.index for each in everyone if each.is_worker] == [0]


@pytest.mark.parametrize("seed", range(30))
def test_every_task_sees_one_cluster_and_has_a_place_of_its_own(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.randint(1, 5) for _ in range(draw.randint(1, 6))]
    if sum(counts) < 2:
        counts = [2]
    more = {"SLURM_DISTRIBUTION": draw.choice(["block", "cyclic", "plane", "cyclic:block", "block:*:NoPack"])}
    if more["SLURM_DISTRIBUTION"] == "plane":
        more["SLURM_DIST_PLANESIZE"] = str(draw.randint(1, 4))
    servers = draw.randint(1, sum(counts) - 1)
    environs = step(f"n[1-{len(counts)}]", ",".join(map(str, counts)), FLEET_SLURM_SERVERS=str(servers), **more)
    everyone = seen(environs)
    assert len({cluster(each) for each in everyone}) == 1
    assert sorted(each.index for each in everyone if each.is_server) == list(range(servers))
    assert [each.index for each in everyone if each.is_worker] == list(range(len(environs) - servers))
    for environ, each in zip(environs, everyone, strict=True):
        if each.is_server:
            assert each.endpoint is not None
            assert each.endpoint.host == f"n{int(environ['SLURM_NODEID']) + 1}", "where it really runs"
    on_nodes = [sum(server.host == f"n{node + 1}" for server in everyone[0].servers) for node in range(len(counts))]
    assert all(on == max(on_nodes) or on in (max(on_nodes) - 1, counts[node]) for node, on in enumerate(on_nodes))
    workers = seen(environs, is_collective=True)
    assert len({cluster(each) for each in workers}) == 1
    assert [each.index for each in workers] == list(range(len(environs)))
    assert len(set(workers[0].workers)) == len(environs)
    for environ, each in zip(environs, workers, strict=True):
        assert each.endpoint is not None
        assert each.endpoint.host == f"n{int(environ['SLURM_NODEID']) + 1}"
        assert each.local_rank == sum(other.endpoint.host == each.endpoint.host for other in workers[: each.index])  # type: ignore[union-attr]


def test_jobs_and_steps_get_ports_of_their_own() -> None:
    def port(job: int, number: int) -> int:
        environ = step("n", "2", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))[0]
        return SlurmRoleMaker(environ=environ).assignment().servers[0].port

    ports = {port(job, number) for job in range(5000, 5090) for number in range(3)}
    assert len(ports) == 270
    assert max(ports) - min(ports) >= 16
    assert all(16000 <= each < 32000 and each % 16 == 0 for each in ports)
    assert 16000 <= port(2**32, 4294967290) < 32000


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID", "from 0 to 3", "'4'"]),
        ({"SLURM_STEP_NUM_TASKS": "1"}, ["SLURM_STEP_NUM_TASKS", "from 2 to", "'1'"]),
        ({"SLURM_STEP_NUM_TASKS": "5"}, ["SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NUM_TASKS", "'2(x2)' and '5'"]),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, ["SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE", "for each node"]),
        ({"SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST", "node[01-03,7]"]),
        ({"SLURM_STEP_NODELIST": " "}, ["SLURM_STEP_NODELIST", "found nothing"]),
        ({"SLURM_NODEID": "1"}, ["SLURM_NODEID and SLURM_PROCID", "task 0 to be on node 0"]),
        ({"SLURM_NODEID": ""}, ["SLURM_NODEID", "found nothing"]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["SLURM_DISTRIBUTION", "block, cyclic or plane", "'arbitrary'"]),
        ({"SLURM_DISTRIBUTION": "plane"}, ["SLURM_DIST_PLANESIZE", "found nothing"]),
        ({"FLEET_SLURM_SERVERS": "4"}, ["FLEET_SLURM_SERVERS", "from 1 to 3", "'4'"]),
        ({"FLEET_SLURM_SERVERS": "0"}, ["FLEET_SLURM_SERVERS", "from 1 to 3", "'0'"]),
        ({"FLEET_SLURM_PORT": "65534"}, ["FLEET_SLURM_PORT", "from 1 to 65533"]),
        ({"SLURM_JOB_ID": ""}, ["SLURM_JOB_ID", "found nothing"]),
    ],
)
def test_wrong_variables_are_named(change: Env, parts: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="a Slurm step") as caught:
        SlurmRoleMaker(environ={**step("n[1-2]", "2(x2)")[0], **change})
    (line,) = str(caught.value).split("\n  ")[1:]
    assert all(part in line for part in ["expected", *parts]), line


def test_a_task_that_is_not_where_the_others_think_says_so() -> None:
    environs = step("n[1-2]", "2(x2)", SLURM_DISTRIBUTION="cyclic")
    lost = []
    for environ in environs:
        try:
            SlurmRoleMaker(environ={**environ, "SLURM_DISTRIBUTION": "block"})
        except ConfigurationError as error:
            lost.append(str(error))
    assert len(lost) == 2
    assert "SLURM_DISTRIBUTION" in lost[0]


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        SlurmRoleMaker(environ={"FLEET_SLURM_SERVERS": "x"})
    names = [line.partition(":")[0] for line in str(caught.value).split("\n  ")[1:]]
    assert names == [
        *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        *("FLEET_SLURM_SERVERS", "SLURM_JOB_ID"),
    ]
    with pytest.raises(TypeError, match="is_collective"):
        SlurmRoleMaker("yes", {})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- found unasked

STEP = step("n[1-2]", "2(x2)")[1]
TORCHRUN: Env = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}
PADDLE: Env = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "a:1",
    "PADDLE_TRAINERS": "3",
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ID": "2",
}
#: What the script of a batch job has, and a shell that salloc or srun --pty opens.
BATCH = {name: value for name, value in step("n", "1")[0].items() if not name.startswith("SLURM_STEP")}
SHELL = step("n", "1")[0]


@pytest.mark.parametrize(
    ("is_collective", "environ", "who"),
    [
        (None, STEP, "Slurm, task 1 of 4"),
        (False, STEP, "Slurm, task 1 of 4"),
        (True, STEP, "Slurm, task 1 of 4"),
        (True, SHELL, "Slurm, task 0 of 1"),
        (None, {**STEP, **PADDLE}, "PADDLE_* environment variables"),
        (None, {**STEP, **TORCHRUN}, "torchrun's environment variables"),
        (None, BATCH, "alone: one worker with its server inside the process"),
        (None, SHELL, "alone: one worker with its server inside the process"),
        (None, {**STEP, "SLURM_STEP_NUM_TASKS": " "}, "alone: one worker with its server inside the process"),
    ],
)
def test_who_this_is_under_slurm(is_collective: bool | None, environ: Env, who: str) -> None:
    me = resolve(is_collective, environ)
    assert me.origin == who
    assert me.collective is (bool(is_collective) or environ.get("RANK") == "1")


def test_an_mpi_launcher_inside_a_step_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun in a batch job starts its agents by srun, so that what they start has the agents' variables."""

    def world(*_: object) -> None:
        raise AssertionError("MPI")

    monkeypatch.setattr("fleet.role_maker.mpi.world", world)
    with pytest.raises(AssertionError, match="MPI"):
        resolve(None, {**STEP, "OMPI_COMM_WORLD_SIZE": "2"})
