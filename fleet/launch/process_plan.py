"""Plans what to start: from the shape of a job to one command and one set of variables for each process.

A job on one machine and one machine's part of a larger job are the same thing here: a list of servers, a list of
the workers' hosts, and the set of hosts that are this machine. Everything comes in as an argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.base.cluster import Endpoint, Role, parse_address
from fleet.errors import ConfigurationError

#: The words of the variables for the two roles.
_ROLE_WORDS = {Role.SERVER: "PSERVER", Role.WORKER: "TRAINER"}

_LAST_PORT = 65535

#: These, and 127.*, mean a different machine on each machine.
_LOOPBACK_NAMES = ("localhost", "[::1]")


@dataclass(frozen=True)
class ProcessSpec:
    """Describes one process: ``environment`` is what it gets on top of the launcher's own."""

    role: Role
    index: int
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()} {self.index}"

    @property
    def log_name(self) -> str:
        return f"{self.role.name.lower()}.{self.index}.log"


@dataclass(frozen=True)
class LaunchPlan:
    """Lists the processes of this machine, servers first; ``worker_num`` and ``server_num`` are those of the whole
    job."""

    processes: tuple[ProcessSpec, ...]
    worker_num: int
    server_num: int = 0
    job_id: str = ""
    notes: tuple[str, ...] = ()

    @property
    def has_every_worker(self) -> bool:
        """Say whether this machine has all the workers, so that their end is the end of the job."""
        return sum(process.role is Role.WORKER for process in self.processes) == self.worker_num

    @property
    def is_whole(self) -> bool:
        """Say whether all of the job is on this machine."""
        return len(self.processes) == self.worker_num + self.server_num


def plan_launch(
    *,
    servers: Sequence[Endpoint],
    worker_hosts: Sequence[str],
    here: Collection[str],
    command: Sequence[str],
    job_id: str,
    inherited: Mapping[str, str],
    workers: Sequence[Endpoint] = (),
    record_dir: str = "",
    metrics_port: int | None = None,
) -> LaunchPlan:
    """Plan the processes whose host is in ``here``; an index is a place in the list of the whole job. A collective job
    has no servers, and ``workers`` are the endpoints of those on ``worker_hosts``. Each process keeps its figures in
    ``record_dir``, and shows them at a port of its own from ``metrics_port`` on."""
    addresses = (
        {"PADDLE_TRAINER_ENDPOINTS": ",".join(map(str, workers))}
        if workers
        else {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(map(str, servers))}
    )
    shared = {
        **addresses,
        "PADDLE_TRAINERS_NUM": str(len(worker_hosts)),
        "FLEET_JOB_ID": job_id,
        "FLEET_LAUNCHER": "fleetrun",
        "PYTHONUNBUFFERED": "1",
    }
    if record_dir:
        shared["FLEET_RECORD_DIR"] = record_dir
    notes = []
    if not inherited.get("OMP_NUM_THREADS"):
        # Each process would otherwise take every core for itself, and together they are slower than with one each.
        shared["OMP_NUM_THREADS"] = "1"
        notes.append("OMP_NUM_THREADS=1 for every process, as it was not set; set it to use more cores in each")

    def process(role: Role, index: int, own: tuple[str, str]) -> ProcessSpec:
        word = _ROLE_WORDS[role]
        environment = {**shared, "PADDLE_TRAINING_ROLE": word, "TRAINING_ROLE": word, own[0]: own[1]}
        return ProcessSpec(role, index, tuple(command), environment)

    processes = [
        *(
            process(Role.SERVER, index, ("PADDLE_CURRENT_ENDPOINT", str(server)))
            for index, server in enumerate(servers)
            if server.host in here
        ),
        *(
            process(Role.WORKER, index, ("PADDLE_TRAINER_ID", str(index)))
            for index, host in enumerate(worker_hosts)
            if host in here
        ),
    ]
    if metrics_port is not None:
        if (last := metrics_port + len(processes) - 1) > _LAST_PORT:
            raise ConfigurationError(
                f"there are fewer ports for Prometheus from {metrics_port} on than processes",
                expected=f"at most {_LAST_PORT + 1 - len(processes)} for {len(processes)} processes of this machine",
                got=f"--metrics_port {metrics_port}, so {last} for the last one",
                todo="Choose a lower one with --metrics_port or FLEET_METRICS_PORT, or 0 for any free ports.",
            )
        ports = [metrics_port + place if metrics_port else 0 for place in range(len(processes))]
        _refuse_taken(ports, [each for each in (*servers, *workers[:1]) if each.host in here])
        processes = [
            replace(each, environment={**each.environment, "FLEET_METRICS_PORT": str(port)})
            for each, port in zip(processes, ports, strict=True)
        ]
        if metrics_port:
            named = ", ".join(f"{each.name} {port}" for each, port in zip(processes, ports, strict=True))
            notes.append(f"ports for Prometheus: {named}")
    return LaunchPlan(
        processes=tuple(processes),
        worker_num=len(worker_hosts),
        server_num=len(servers),
        job_id=job_id,
        notes=tuple(notes),
    )


def _refuse_taken(ports: Sequence[int], listening: Sequence[Endpoint]) -> None:
    """Refuse ports for Prometheus that processes of the job listen at themselves."""
    taken = sorted({each.port for each in listening}.intersection(ports))
    if taken:
        raise ConfigurationError(
            "ports for Prometheus are the job's own",
            expected=f"others than {', '.join(map(str, taken))}",
            got=f"{ports[0]} to {ports[-1]}",
            todo="Choose others with --metrics_port or FLEET_METRICS_PORT, or 0 for any free ones.",
        )


def child_environment(inherited: Mapping[str, str], process: ProcessSpec) -> dict[str, str]:
    """Return the whole environment of ``process``, without variables of an earlier job that would contradict it."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("PADDLE_") and name not in ("TRAINING_ROLE", "POD_IP")
    }
    return {**kept, **process.environment}


def parse_endpoints(text: str, whose: str) -> tuple[Endpoint, ...]:
    """Parse ``host:port,host:port``, the addresses by which every machine reaches them. ``whose`` is server or
    worker."""
    option = f"--{whose}s"
    _refuse_count(option, f"--{whose}_num", text)
    endpoints = tuple(Endpoint.parse(entry) for entry in text.split(","))
    for endpoint in endpoints:
        if endpoint.port == 0 or endpoint.host in ("0.0.0.0", "[::]"):
            raise ConfigurationError(
                f"{option} names an address nobody can connect to", expected="host:port", got=str(endpoint)
            )
        if endpoints.count(endpoint) > 1:
            raise ConfigurationError(f"{option} names {endpoint} twice")
    return endpoints


def parse_worker_hosts(text: str) -> tuple[str, ...]:
    """Parse ``host,host``, which has a host once for each of its workers; workers listen nowhere, so a port says
    nothing."""
    _refuse_count("--workers", "--worker_num", text)
    return tuple(parse_address(entry)[0] for entry in text.split(","))


def check_reachable(hosts: Collection[str], here: Collection[str]) -> None:
    """Refuse a loopback name in a job of several machines: on each of them it would be a different machine."""
    elsewhere = [host for host in hosts if host not in here and not _is_loopback(host)]
    for host in hosts:
        if elsewhere and _is_loopback(host):
            raise ConfigurationError(
                f"{host} means a different machine on each machine of this job; {elsewhere[0]} is not this one",
                todo=f"Write an address by which {elsewhere[0]} can reach it.",
            )


def shared_job_id(servers: Sequence[Endpoint], worker_hosts: Sequence[str]) -> str:
    """Return a name that the launchers of several machines find without talking, since all were given the same two
    lists."""
    text = ",".join(map(str, servers)) + "/" + ",".join(worker_hosts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _refuse_count(option: str, count_option: str, text: str) -> None:
    if text.strip().isdigit():
        raise ConfigurationError(
            f"{option} takes addresses", got=repr(text), todo=f"For a number of processes use {count_option} {text}."
        )


def _is_loopback(host: str) -> bool:
    return host in _LOOPBACK_NAMES or host.startswith("127.")
