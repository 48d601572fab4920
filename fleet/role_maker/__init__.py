"""Defines role makers, which say who is who in a job: each is a class with the one method ``assignment``."""

from fleet.base.cluster import Role
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
