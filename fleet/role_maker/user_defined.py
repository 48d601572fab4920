"""Takes a cluster that is spelled out in code."""

from __future__ import annotations

from fleet.base.cluster import Assignment, Role
from fleet.errors import ArgumentTypeError
from fleet.role_maker import arguments
from fleet.role_maker.base import RoleMakerBase, collective


class UserDefinedRoleMaker(RoleMakerBase):
    """Describes one process of a parameter-server job; ``current_id`` counts among the processes of its own role.

    Examples:
        >>> from fleet.role_maker import Role, UserDefinedRoleMaker
        >>> maker = UserDefinedRoleMaker(1, Role.WORKER, worker_num=2, server_endpoints=["10.0.0.1:6174"])
        >>> str(maker.assignment())
        'worker 1'
    """

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: list[str] | None = None,
    ) -> None:
        servers = arguments.endpoints("server_endpoints", server_endpoints)
        if not isinstance(role, Role):
            raise ArgumentTypeError("role must be a Role", expected="Role.WORKER or Role.SERVER", got=repr(role))
        index = arguments.index("current_id", current_id)
        if role is Role.SERVER:
            arguments.below("current_id", index, len(servers), "servers")
        workers = arguments.count("worker_num", worker_num)
        if role is Role.WORKER:  # a range that only a sound worker_num gives
            arguments.below("current_id", index, workers, "workers")
        self._assignment = Assignment(role, index, workers, servers, origin="UserDefinedRoleMaker")

    def assignment(self) -> Assignment:
        return self._assignment


class UserDefinedCollectiveRoleMaker(RoleMakerBase):
    """Describes one worker of a collective job; its endpoint is ``worker_endpoints[current_id]``.

    Examples:
        >>> from fleet.role_maker import UserDefinedCollectiveRoleMaker
        >>> maker = UserDefinedCollectiveRoleMaker(current_id=0, worker_endpoints=["10.0.0.1:6170", "10.0.0.2:6170"])
        >>> maker.assignment().collective
        True
    """

    def __init__(self, current_id: int = 0, worker_endpoints: list[str] | None = None) -> None:
        workers = arguments.endpoints("worker_endpoints", worker_endpoints)
        index = arguments.index("current_id", current_id)
        arguments.below("current_id", index, len(workers), "workers")
        self._assignment = collective(workers, index, "UserDefinedCollectiveRoleMaker")

    def assignment(self) -> Assignment:
        return self._assignment
