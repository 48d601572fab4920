"""Says who takes part in a job, as values: endpoints, roles, and what one process is."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address

from fleet.errors import ConfigurationError


class Role(enum.Enum):
    """Says what a process does in a parameter-server job; the numbers are the source system's.

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
        name, _, number = text.strip().rpartition(":")
        host, port = _host(name), _port(number)
        if host is None or port is None:
            raise ConfigurationError(
                "malformed endpoint", expected="host:port with a port from 0 to 65535", got=repr(text)
            )
        return cls(host, port)

    @property
    def folder_name(self) -> str:
        """Return the name of a folder that belongs to this endpoint."""
        return f"{self.host.replace(':', '_')}_{self.port}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> tuple[str, int | None]:
    """Return the parts of ``host`` or ``host:port``. A bare IPv6 address, which is how Kubernetes writes one, gets its
    brackets."""
    text = text.strip()
    bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
    host = _host(bare)
    if host is not None:
        return host, None
    endpoint = Endpoint.parse(bare)
    return endpoint.host, endpoint.port


def _host(text: str) -> str | None:
    """Return a host in the spelling by which hosts are compared, an IPv6 address in its shortest and in brackets; None
    if it is no host."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return f"[{IPv6Address(text[1:-1])}]"
        except ValueError:
            return None
    # No name of a host has one of these, and in a URI, as gRPC reads it, some of them end the host.
    is_sound = text.isprintable() and not any(c in " /,:[]?#%@\\" for c in text)
    return text if is_sound and _can_be_asked_for(text) else None


def _can_be_asked_for(name: str) -> bool:
    """Say whether the system can be asked for a host of this name, whose labels have 1 to 63 letters each."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _port(text: str) -> int | None:
    sound = text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535
    return int(text) if sound else None


@dataclass(frozen=True)
class Binding:
    """Says where a server listens, if that is not the address by which others reach it."""

    host: str = ""
    port: int | None = None

    def of(self, endpoint: Endpoint) -> Endpoint:
        return Endpoint(self.host or endpoint.host, self.port or endpoint.port)


@dataclass(frozen=True)
class Assignment:
    """Describes the job as one process sees it: the whole cluster and its own place in it.

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
        """Return where others can reach this process, if they can at all."""
        if self.is_server:
            return self.servers[self.index]
        return self.workers[self.index] if self.index < len(self.workers) else None

    def __str__(self) -> str:
        return f"{self.role.name.lower()} {self.index}"
