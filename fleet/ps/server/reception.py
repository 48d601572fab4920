"""Whether a worker that says hello belongs to the job: the same cluster, the same model, the same plan."""

from __future__ import annotations

from typing import Any

from fleet.cluster import Endpoint
from fleet.errors import ConfigurationError, IdentityError, PlanMismatchError, ProtocolError
from fleet.ps.consistency import MODES
from fleet.transpiler.plan import Plan
from fleet.transpiler.specs import JobSpec, differences

#: The number of workers and the servers that a server was told of.
Expected = tuple[int, tuple[Endpoint, ...]]


def check_cluster(endpoint: Endpoint, expected: Expected | None, spec: JobSpec, hello: Any) -> None:
    """The worker and this server must have been told of the same cluster."""
    settings = spec.settings
    if settings.mode not in MODES:
        raise ConfigurationError("this server does not know the mode", got=settings.mode, expected=", ".join(MODES))
    if len(hello.endpoints) != settings.server_num or hello.server >= settings.server_num:
        raise ProtocolError("a hello contradicts itself about the servers", got=list(hello.endpoints))
    if expected is None:
        return
    worker_num, servers = expected
    if settings.worker_num != worker_num:
        raise PlanMismatchError(
            "worker and server were started with different numbers of workers",
            where=str(endpoint),
            expected=f"{worker_num}, as this server was told",
            got=settings.worker_num,
        )
    told = [str(server) for server in servers]
    if told != list(hello.endpoints) or servers[hello.server] != endpoint:
        raise PlanMismatchError(
            "worker and server were started with different lists of servers",
            where=str(endpoint),
            expected=", ".join(told),
            got=", ".join(hello.endpoints),
        )


def check_same_job(endpoint: Endpoint, ours: str, plan: Plan, spec: JobSpec, hello: Any) -> None:
    # Ids are optional: launchers give them, people at four terminals do not. Only two different ones contradict.
    if ours and hello.job_id and ours != hello.job_id:
        raise IdentityError(
            "this server serves another job",
            where=str(endpoint),
            expected=f"job {ours}",
            got=f"job {hello.job_id}",
            todo="Give the second job servers of its own.",
        )
    if plan.spec != spec:
        raise PlanMismatchError(
            "this worker's model, optimizer or strategy is not the job's",
            where=str(endpoint),
            got="; ".join(differences(plan.spec, spec)),
            todo="Run the same script everywhere; if another job is using this server, give this one its own.",
        )
    check_fingerprint(endpoint, plan, hello.fingerprint)


def check_fingerprint(endpoint: Endpoint, plan: Plan, theirs: str) -> None:
    if plan.fingerprint != theirs:
        raise PlanMismatchError(
            "worker and server plan differently",
            where=str(endpoint),
            expected=plan.fingerprint[:12],
            got=theirs[:12],
            todo="Install the same version of this package everywhere.",
        )
