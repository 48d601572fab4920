"""Defines role makers, which say who is who in a job: each is a class with the one method ``assignment``."""

from __future__ import annotations

from typing import Any

from fleet.base.cluster import Role
from fleet.base.pointers import OF_ROLE_MAKERS, missing
from fleet.role_maker.base import RoleMakerBase
from fleet.role_maker.mpi import MPISymetricRoleMaker, MPISymmetricRoleMaker
from fleet.role_maker.slurm import SlurmRoleMaker
from fleet.role_maker.user_defined import UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from fleet.role_maker.variables_of_launchers import EnvRoleMaker, PaddleCloudRoleMaker

__all__ = [
    "EnvRoleMaker",
    "MPISymetricRoleMaker",
    "MPISymmetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "SlurmRoleMaker",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]


def __getattr__(name: str) -> Any:
    raise missing(f"module {__name__!r}", name, OF_ROLE_MAKERS)
