"""Reads the variables that torchrun, and whatever imitates it, gives each worker: of a collective job, or of one whose
servers somebody else has started."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.base.settings import PROCESS_ENVIRONMENT
from fleet.plan.specs import MOST_PROCESSES
from fleet.role_maker import arguments
from fleet.role_maker.base import RoleMakerBase
from fleet.role_maker.variables import Variables, whole


def at_work(environ: Mapping[str, str]) -> bool:
    """Say whether both variables are set, because cluster managers set one or the other for purposes of their own."""
    return has_started(Variables(environ))


def has_started(variables: Variables) -> bool:
    return len(variables.given("RANK", "WORLD_SIZE")) == 2


def worker_beside(servers: tuple[Endpoint, ...], variables: Variables) -> Assignment:
    """Return the place of a worker that trains with these servers."""
    size, rank, local_rank = _place(variables)
    variables.raise_complaints("a parameter-server job whose workers torchrun starts")
    return Assignment(
        Role.WORKER,
        rank,
        size,
        servers,
        origin="PADDLE_* environment variables for the servers, torchrun's for the workers",
        local_rank=local_rank,
    )


class TorchrunRoleMaker(RoleMakerBase):
    """Describes a worker started by torchrun; of the others' addresses only that of the first, the master, is known."""

    def __init__(self, environ: Mapping[str, str] = PROCESS_ENVIRONMENT) -> None:
        variables = Variables(environ)
        size, rank, local_rank = _place(variables)
        host = variables.need(("MASTER_ADDR",), _host, "the first worker's host", otherwise="")
        port = variables.need(("MASTER_PORT",), *whole(1, below=65536), otherwise=0)
        hosted = variables.read(("TORCHELASTIC_USE_AGENT_STORE",), _flag, "True or False")
        attempt = variables.read(("TORCHELASTIC_RESTART_COUNT",), *whole(0))
        variables.raise_complaints("a collective job started by torchrun")
        self._assignment = Assignment(
            role=Role.WORKER,
            index=rank,
            worker_num=size,
            workers=(Endpoint(host, port),),
            collective=True,
            origin="torchrun's environment variables",
            local_rank=local_rank,
            store_launched=bool(hosted),
            attempt=attempt or 0,
        )

    def assignment(self) -> Assignment:
        return self._assignment


def _place(variables: Variables) -> tuple[int, int, int | None]:
    """Return how many workers there are, which one this is, and which of its machine's."""
    size = variables.need(("WORLD_SIZE",), *whole(1, below=MOST_PROCESSES + 1), otherwise=0)
    rank = variables.need(("RANK",), *whole(0, below=size), otherwise=0)
    return size, rank, variables.read(("LOCAL_RANK",), *whole(0, below=size))


def _host(text: str) -> str:
    host, port = arguments.address(text)
    if port is not None:
        raise ValueError(text)
    return host


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"
