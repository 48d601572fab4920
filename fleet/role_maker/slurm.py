"""Makes a cluster of the tasks of a Slurm step: each finds all of it in srun's variables, without a message to the
others.

Slurm tells the nodes, how many tasks each has, and in which way the tasks were dealt to them. From that follows where
every task runs; a task that finds itself on another node says so, and nothing is started on a wrong guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fleet.base import checks
from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.base.settings import PROCESS_ENVIRONMENT
from fleet.role_maker.base import RoleMakerBase, collective
from fleet.role_maker.hostlist import MOST, expand_counts, expand_hosts
from fleet.role_maker.variables import Variables, whole

_TASK, _TASKS = ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",)
_HOSTS, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_SERVERS, _PORT = ("FLEET_SLURM_SERVERS",), ("FLEET_SLURM_PORT",)

#: Jobs get blocks of ports in turn, below those that systems hand out by themselves: two jobs on one node whose numbers
#: are less than ``_BLOCKS`` apart have different ones. A job with more on a node goes on into the next blocks.
_FIRST_PORT, _BLOCKS, _BLOCK = 16000, 1000, 16
#: Between the blocks of two steps of one job.
_STEP_STRIDE = 101


def at_work(environ: Mapping[str, str], *, even_alone: bool = False) -> bool:
    """Say whether srun started this process as one of several tasks. The script of a batch job and an interactive shell
    have a job, but no such step."""
    in_a_step = len(Variables(environ).given(*_TASK, *_TASKS)) == 2
    return in_a_step and (even_alone or environ[_TASKS[0]].strip() != "1")


class SlurmRoleMaker(RoleMakerBase):
    """Describes one task of a step. Half of the tasks serve unless ``FLEET_SLURM_SERVERS`` says how many; they are
    spread over the nodes, first tasks first. The others are workers in Slurm's order; with ``is_collective`` all tasks
    are.

    Examples:
        >>> from fleet.role_maker import SlurmRoleMaker
        >>> step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]"}
        >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "FLEET_SLURM_PORT": "6174"}
        >>> me = SlurmRoleMaker(environ=step).assignment()
        >>> me.index, [str(server) for server in me.servers]
        (1, ['node1:6174', 'node2:6174'])
    """

    def __init__(self, is_collective: bool = False, environ: Mapping[str, str] = PROCESS_ENVIRONMENT) -> None:
        checks.switch("is_collective", is_collective)
        variables = Variables(environ)
        least = 1 if is_collective else 2
        size = variables.need(_TASKS, *whole(least, below=MOST + 1), otherwise=0)
        rank = variables.need(_TASK, *whole(0, below=size), otherwise=0)
        none_named: tuple[str, ...] = ()
        none_counted: tuple[int, ...] = ()
        hosts = variables.need((_HOSTS,), expand_hosts, "names as node[01-03,7]", otherwise=none_named)
        counts = variables.need((_COUNTS,), expand_counts, "numbers as 2(x3),1", otherwise=none_counted)
        at_once = _at_once(variables)
        server_num = 0
        if not is_collective:
            server_num = variables.read(_SERVERS, *whole(1, below=size)) or size // 2
        nodes = _nodes(variables, size, rank, hosts, counts, at_once)
        first_port = _first_port(variables, max(counts, default=1))
        variables.raise_complaints("a Slurm step")

        place = _places(nodes)
        servers = sorted(range(size), key=lambda task: (place[task], nodes[task]))[:server_num]
        workers = sorted(set(range(size)).difference(servers))
        taken: Counter[int] = Counter()

        def endpoint(task: int) -> Endpoint:
            taken[nodes[task]] += 1
            return Endpoint(hosts[nodes[task]], first_port + taken[nodes[task]] - 1)

        origin = f"Slurm, task {rank} of {size}"
        if is_collective:
            self._assignment = collective(tuple(map(endpoint, workers)), rank, origin)
            return
        role, own = (Role.SERVER, servers) if rank in servers else (Role.WORKER, workers)
        self._assignment = Assignment(role, own.index(rank), len(workers), tuple(map(endpoint, servers)), origin=origin)

    def assignment(self) -> Assignment:
        return self._assignment


def _at_once(variables: Variables) -> int:
    """Return how many tasks a node is dealt before the next one gets some: all it takes (block), 1 (cyclic), or as srun
    was told (plane)."""

    def parse(text: str) -> str:
        way = text.replace(",", ":").partition(":")[0]  # of nodes; what follows speaks of sockets and cores
        if way not in ("block", "cyclic", "plane", "*"):
            raise ValueError(text)
        return way

    way = variables.read(("SLURM_DISTRIBUTION",), parse, "block, cyclic or plane (srun -m)")
    if way == "plane":
        return variables.need(("SLURM_DIST_PLANESIZE",), *whole(1), otherwise=1)
    return 1 if way == "cyclic" else MOST


def _nodes(
    variables: Variables, size: int, rank: int, hosts: Sequence[str], counts: Sequence[int], at_once: int
) -> list[int]:
    """Return the node of every task, as far as the variables agree about it."""
    if not (size and hosts and counts):
        return []
    if len(hosts) != len(counts):
        variables.complain((_HOSTS, _COUNTS), "a number of tasks for each node")
    if sum(counts) != size:
        variables.complain((_COUNTS, *_TASKS), "as many tasks on the nodes as in the step")
        return []
    nodes: list[int] = []
    left = list(counts)
    while len(nodes) < size:
        for node, count in enumerate(left):
            dealt = min(count, at_once)
            nodes += [node] * dealt
            left[node] -= dealt
    here = variables.need(("SLURM_NODEID",), *whole(0, below=len(counts)), otherwise=nodes[rank])
    if here != nodes[rank]:
        names = variables.given("SLURM_NODEID", *_TASK, _COUNTS, "SLURM_DISTRIBUTION")
        variables.complain(names, f"task {rank} to be on node {nodes[rank]}")
    return nodes


def _places(nodes: Sequence[int]) -> list[int]:
    """Return which of its node's tasks each one is."""
    before: Counter[int] = Counter()
    places = []
    for node in nodes:
        places.append(before[node])
        before[node] += 1
    return places


def _first_port(variables: Variables, most_on_a_node: int) -> int:
    """Return the first of as many ports as the fullest node has tasks."""
    given = variables.read(_PORT, *whole(1, below=65536 - most_on_a_node))
    if variables.given(*_PORT):
        return given or _FIRST_PORT
    job = variables.need(("SLURM_JOB_ID",), *whole(0), otherwise=0)
    step = variables.read(("SLURM_STEP_ID",), *whole(0)) or 0
    return _FIRST_PORT + (job + step * _STEP_STRIDE) % _BLOCKS * _BLOCK
