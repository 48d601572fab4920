"""Defines what a role maker is: a class that can say which process of which job this one is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fleet.base.cluster import Assignment, Endpoint, Role


class RoleMakerBase(ABC):
    """Says who is who in a job. A new role maker is one class with one method.

    Examples:
        >>> from fleet.role_maker import Role, RoleMakerBase, UserDefinedRoleMaker
        >>> class ByHostName(RoleMakerBase):
        ...     def __init__(self, name: str) -> None:
        ...         kind, _, number = name.partition("-")
        ...         self.role, self.number = (Role.SERVER if kind == "ps" else Role.WORKER), int(number)
        ...
        ...     def assignment(self):
        ...         return UserDefinedRoleMaker(self.number, self.role, 4, ["ps-0:6174", "ps-1:6174"]).assignment()
        >>> second = fleet.Fleet()
        >>> second.init(ByHostName("ps-1"))
        >>> second.server_index()
        1
    """

    @abstractmethod
    def assignment(self) -> Assignment:
        """Return the whole cluster, the same on every node, and this process's own place in it."""


def collective(workers: tuple[Endpoint, ...], index: int, origin: str) -> Assignment:
    """Return the place of one worker in a job without servers. Its local rank counts the earlier workers on the same
    host, as the choice of a GPU needs it."""
    local_rank = sum(worker.host == workers[index].host for worker in workers[:index])
    return Assignment(
        role=Role.WORKER,
        index=index,
        worker_num=len(workers),
        workers=workers,
        collective=True,
        origin=origin,
        local_rank=local_rank,
    )
