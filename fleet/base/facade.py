"""Makes ``from fleet.transpiler import fleet`` and ``from fleet.collective import fleet`` choose the backend.

Both are ``import fleet`` itself, with its default ``Fleet``, except that ``init`` refuses the other kind of job.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

from fleet.base.cluster import Assignment
from fleet.errors import StateError


@runtime_checkable
class RoleMaker(Protocol):
    """Names what is needed of a role maker; ``fleet.role_maker`` lies above this file."""

    def assignment(self) -> Assignment: ...


def _package() -> Any:
    """Return the package ``fleet``, which lies above all: it is loaded before any of its modules is."""
    return sys.modules["fleet"]


class Facade:
    """Offers ``fleet`` for one kind of job: every name of ``import fleet``, and an ``init`` that refuses the other
    kind.

    Examples:
        >>> from fleet.collective import fleet as collective
        >>> from fleet.role_maker import Role, UserDefinedRoleMaker
        >>> collective.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["10.0.0.1:6174"]))
        Traceback (most recent call last):
            ...
        fleet.errors.StateError: the fleet of fleet.collective is for collective jobs, ...
    """

    def __init__(self, package: str, collective: bool) -> None:
        self._package = package
        self._collective = collective

    def init(self, role_maker: RoleMaker | None = None, *, is_collective: bool | None = None) -> None:
        """Do what ``fleet.init`` does, for one kind of job."""
        if isinstance(is_collective, bool) and is_collective is not self._collective:
            raise StateError(
                f"is_collective={is_collective} was given to the fleet of {self._package}",
                todo="Leave it out; import fleet itself takes both kinds of job.",
            )
        described = role_maker.assignment() if isinstance(role_maker, RoleMaker) else None
        if isinstance(described, Assignment) and described.collective is not self._collective:
            kinds = {False: "parameter-server", True: "collective"}
            raise StateError(
                f"the fleet of {self._package} is for {kinds[self._collective]} jobs, and this role maker describes a "
                f"{kinds[not self._collective]} one",
                got=type(role_maker).__name__,
                todo="Take the fleet of the other package, or import fleet itself: it takes both kinds of job.",
            )
        _package().init(role_maker, is_collective=self._collective if is_collective is None else is_collective)

    def __getattr__(self, name: str) -> Any:
        return getattr(_package(), name)

    def __dir__(self) -> list[str]:
        return dir(_package())

    def __repr__(self) -> str:
        return f"<fleet, as {self._package} has it>"


parameter_server = Facade("fleet.transpiler", collective=False)
"""``import fleet`` for parameter-server jobs: its ``init`` refuses a collective one."""
collective = Facade("fleet.collective", collective=True)
"""``import fleet`` for collective jobs: its ``init`` refuses one with parameter servers."""
