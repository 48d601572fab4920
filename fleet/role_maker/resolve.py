"""Decides who this process is when the script does not say."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.base import checks
from fleet.base.cluster import Assignment
from fleet.bootstrap.mpi_world import launcher_of
from fleet.errors import ConfigurationError
from fleet.role_maker import slurm, torchrun
from fleet.role_maker.alone import LocalRoleMaker
from fleet.role_maker.mpi import MPISymmetricRoleMaker
from fleet.role_maker.variables import Variables
from fleet.role_maker.variables_of_launchers import EnvRoleMaker, mentions_job, names_servers, names_workers


def resolve(is_collective: bool | None, environ: Mapping[str, str]) -> Assignment:
    """Read the environment's variables if they are there; else ask an MPI launcher, else torchrun, else Slurm; else run
    alone."""
    checks.switch_or_none("is_collective", is_collective)
    if mentions_job(environ):
        only_workers = names_workers(environ) and not names_servers(environ)
        return EnvRoleMaker(only_workers if is_collective is None else is_collective, environ).assignment()
    by_torchrun = torchrun.at_work(environ)
    # torchrun starts collective jobs only, so it answers a call for one even where an MPI launcher started it.
    if launcher_of(environ) is not None and not (is_collective and by_torchrun):
        return MPISymmetricRoleMaker(bool(is_collective), environ).assignment()
    # torchrun's agents and MPI's may be tasks of a Slurm step themselves, and what they start is none.
    if not by_torchrun and slurm.at_work(environ, even_alone=bool(is_collective)):
        return slurm.SlurmRoleMaker(bool(is_collective), environ).assignment()
    if is_collective or (by_torchrun and is_collective is None):
        return EnvRoleMaker(True, environ).assignment()
    if by_torchrun:
        raise ConfigurationError(
            "a parameter-server job is asked for under torchrun, which starts workers only",
            expected="PADDLE_PSERVERS_IP_PORT_LIST, with servers that somebody else has started",
            got=Variables(environ).found("RANK", "WORLD_SIZE"),
            todo="Start them with fleet server, and name them there; or let fleet.init() choose a collective job.",
        )
    return LocalRoleMaker().assignment()
