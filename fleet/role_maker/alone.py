"""Makes a job of one process, without a cluster."""

from __future__ import annotations

from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.role_maker.base import RoleMakerBase


class LocalRoleMaker(RoleMakerBase):
    """Describes one worker whose server lives in the same process, so that a laptop runs the cluster's code path."""

    def assignment(self) -> Assignment:
        return Assignment(
            role=Role.WORKER,
            index=0,
            worker_num=1,
            servers=(Endpoint("in-process", 0),),
            embedded=True,
            origin="alone: one worker with its server inside the process",
        )
