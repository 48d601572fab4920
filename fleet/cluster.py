"""Who takes part in a job, as values: endpoints, roles, and what one process is."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.errors import ConfigurationError


class Role(enum.Enum):
    """What a process does in a parameter-server job; the numbers are the source system's.

    Examples:
        >>> from fleet.role_maker import Role
        >>> [role.name for role in Role]
        ['WORKER', 'SERVER']
    """

    WORKER = 1
    SERVER = 2


@dataclass(frozen=True, order=True)
class Endpoint:
    """``host:port``; an IPv6 host is written in brackets, ``[::1]:6174``."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        well_formed = (
            bool(colon)
            and bool(host)
            and port.isascii()
            and port.isdigit()
            and len(port) <= 5
            and int(port) <= 65535
            and not any(c.isspace() or c in "/," for c in host)
            and (bracketed or ":" not in host)
        )
        if not well_formed:
            raise ConfigurationError(
                "malformed endpoint", expected="host:port with a port from 0 to 65535", got=repr(text)
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Assignment:
    """The job as one process sees it: the whole cluster and its own place in it.

    ``origin`` says in words where the answer came from ("PADDLE_* variables"); it is logged once.
    ``embedded`` marks the job of one worker whose server lives inside the same process. ``held`` is whatever keeps this
    process's port for it until it listens there; ``when_done`` is called when its part of the job is over. Of a
    collective job, ``store_launched`` says that the launcher hosts the store at the first endpoint, and ``attempt`` how
    often it has restarted the job.
    """

    role: Role
    index: int
    worker_num: int
    servers: tuple[Endpoint, ...] = ()
    workers: tuple[Endpoint, ...] = ()
    collective: bool = False
    embedded: bool = False
    origin: str = "code"
    local_rank: int | None = None
    store_launched: bool = False
    attempt: int = 0
    held: object = field(default=None, compare=False, repr=False)
    when_done: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def server_num(self) -> int:
        return len(self.servers)

    @property
    def is_worker(self) -> bool:
        return self.role is Role.WORKER

    @property
    def is_server(self) -> bool:
        return self.role is Role.SERVER

    @property
    def endpoint(self) -> Endpoint | None:
        """Where this process can be reached, if it can be reached at all."""
        if self.is_server:
            return self.servers[self.index]
        return self.workers[self.index] if self.index < len(self.workers) else None

    def __str__(self) -> str:
        return f"{self.role.name.lower()} {self.index}"
