"""A worker that says hello has to belong to the job: it has the same cluster, the same model, the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.errors import ConfigurationError, IdentityError, PlanMismatchError, ProtocolError
from fleet.numeric import buffers
from fleet.plan.plan import Plan
from fleet.plan.specs import JobSpec, differences
from fleet.ps.consistency import MODES
from fleet.ps.server.job import Job
from fleet.ps.table.shard import Shard

#: The number of workers and the servers that a server was told of.
Expected = tuple[int, tuple[Endpoint, ...]]

#: What a stranger says is quoted so far.
_MOST_TEXT, _MOST_NAMES = 4000, 100


def check_share(endpoint: Endpoint, plan: Plan, server: int, options: Sequence[str], most_bytes: int) -> None:
    """Refuse a plan whose part for this server is too large, before any memory is taken for it."""
    Shard.check_options(plan, options)
    for group in {table.group for table in plan.spec.tables}:
        Shard.rule_of(plan, group, rows=True)
    here = () if plan.spec.settings.has_dense_on_workers else plan.spec.params
    for group in {param.group for param in here}:
        Shard.rule_of(plan, group, rows=False)
    needed, there = plan.dense_bytes(server), buffers.installed()
    if needed > most_bytes:
        raise ConfigurationError(
            "the dense parameters of one server do not fit into one message",
            where=str(endpoint),
            expected=f"at most {most_bytes >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
            got=f"{needed / (1 << 20):.1f} MiB",
            todo="Raise FLEET_MAX_MESSAGE_MB for every process, or use more servers.",
        )
    if there is not None and needed > there:
        raise ConfigurationError(
            "this server has not the memory for its part of the dense parameters",
            where=str(endpoint),
            expected=f"at most {there >> 20} MiB, all that there is",
            got=f"{needed >> 20} MiB",
            todo="Use more servers.",
        )


def check_cluster(
    endpoint: Endpoint, expected: Expected | None, spec: JobSpec, worker: int, hello: Any, *, replaying: bool = False
) -> None:
    """Refuse a worker that was told of another cluster than this server, but for the workers that join an elastic
    job. While a journal is done over, addresses are those of its time, which may have been others."""
    settings = spec.settings
    if settings.mode not in MODES:
        raise ConfigurationError("this server does not know the mode", got=settings.mode, expected=", ".join(MODES))
    if len(hello.endpoints) != settings.server_num or hello.server >= settings.server_num:
        named = ", ".join(hello.endpoints[:_MOST_NAMES])
        raise ProtocolError("a hello contradicts itself about the servers", got=named[:_MOST_TEXT])
    if settings.elastic and worker >= settings.worker_num:
        raise ProtocolError("a hello contradicts itself", got=f"worker {worker} of {settings.worker_num}")
    if expected is None:
        return
    worker_num, servers = expected
    if settings.worker_num < worker_num or (settings.worker_num > worker_num and not settings.elastic):
        raise PlanMismatchError(
            "worker and server were started with different numbers of workers",
            where=str(endpoint),
            expected=f"{worker_num}{' or more' if settings.elastic else ''}, as this server was told",
            got=f"{settings.worker_num}, as the worker was",
            todo="Start them all with the same number: PADDLE_TRAINERS, trainers= or worker_num=.",
        )
    known = [str(server) for server in servers]
    same = len(known) == len(hello.endpoints) if replaying else known == list(hello.endpoints)
    if not same or servers[hello.server] != endpoint:
        raise PlanMismatchError(
            "worker and server were started with different lists of servers",
            where=str(endpoint),
            expected=", ".join(known),
            got=", ".join(hello.endpoints[:_MOST_NAMES])[:_MOST_TEXT],
            todo="Start them all with the same list, in the same order.",
        )


def check_job_id(endpoint: Endpoint, ours: str, theirs: str) -> None:
    # Ids are optional: launchers give them, people at four terminals do not. Only two different ones contradict.
    if ours and theirs and ours != theirs:
        raise IdentityError(
            "this server serves another job",
            where=str(endpoint),
            expected=f"job {ours}",
            got=f"job {theirs[:_MOST_TEXT]}",
            todo="Give the second job servers of its own.",
        )


def check_same_job(endpoint: Endpoint, ours: str, job: Job, spec: JobSpec, hello: Any) -> Plan:
    """Return the plan that a worker knows, which is the job's, or was before parameters joined it."""
    check_job_id(endpoint, ours, hello.job_id)
    plan = job.plans.of(spec)
    if plan is None:
        raise PlanMismatchError(
            "this worker's model, optimizer or strategy is not the job's",
            where=str(endpoint),
            got="; ".join(differences(job.plans.current.spec.common, spec.common))[:_MOST_TEXT],
            todo="Run the same script everywhere; if another job is using this server, give this one its own.",
        )
    check_fingerprint(endpoint, plan, hello.fingerprint)
    return plan


def check_fingerprint(endpoint: Endpoint | str, plan: Plan, theirs: str, *, who: str = "worker") -> None:
    if plan.fingerprint != theirs:
        raise PlanMismatchError(
            f"{who} and server plan differently",
            where=str(endpoint),
            expected=plan.fingerprint[:12],
            got=theirs[:12],
            todo="Install the same version of this package everywhere.",
        )
