"""Checks constructor arguments: each check raises on the first thing wrong, in the documented order."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.base import checks
from fleet.base.cluster import Endpoint, parse_address
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.plan.specs import MOST_PROCESSES


def endpoints(name: str, value: object) -> tuple[Endpoint, ...]:
    """Return a list of distinct ``host:port`` strings as endpoints."""
    if not isinstance(value, list):
        raise ArgumentTypeError(f"{name} must be a list", expected="a list of 'host:port' strings", got=repr(value))
    if not value:
        raise ConfigurationError(f"{name} must not be empty", expected="at least one 'host:port'", got="[]")
    refuse_duplicates(name, value)
    for item in value:
        if not isinstance(item, str):
            raise ArgumentTypeError(f"{name} must hold strings only", expected="'host:port'", got=repr(item))
    parsed = tuple(endpoint(item, where=f"{name}[{i}]") for i, item in enumerate(value))
    refuse_duplicates(name, parsed)  # " a:1" and "a:01" are "a:1" too
    return parsed


def endpoint(text: str, *, where: str | None = None) -> Endpoint:
    """Return ``host:port`` as an endpoint that others can connect to, which port 0 is not."""
    try:
        parsed = Endpoint.parse(text)
    except ValueError:
        parsed = None
    if parsed is None or parsed.port == 0:
        raise ConfigurationError(
            "malformed endpoint", where=where, expected="host:port with a port from 1 to 65535", got=repr(text)
        )
    return parsed


def address(text: str) -> tuple[str, int | None]:
    """Return ``host``, or a ``host:port`` that others can connect to, in its parts."""
    host, port = parse_address(text)
    return (host, None) if port is None else (host, endpoint(f"{host}:{port}").port)


def refuse_duplicates(name: str, items: Iterable[object]) -> None:
    seen: set[object] = set()
    for item in items:
        try:
            known = item in seen
            seen.add(item)
        except TypeError:
            continue  # unhashable, so no string: the next check names it
        if known:
            raise ConfigurationError(f"{name} must not name one endpoint twice", got=f"{str(item)!r} twice")


def index(name: str, value: object) -> int:
    number = checks.integer(name, value)
    if number < 0:
        raise ConfigurationError(f"{name} must not be negative", expected="0 or more", got=number)
    return number


def below(name: str, value: int, limit: int, members: str) -> None:
    if value >= limit:
        raise ConfigurationError(
            f"{name} is out of range", expected=f"0 to {limit - 1}, for {limit} {members}", got=value
        )


def count(name: str, value: object) -> int:
    number = checks.integer(name, value)
    if number <= 0:
        raise ConfigurationError(f"{name} must be greater than 0", expected="1 or more", got=number)
    if number > MOST_PROCESSES:
        raise ConfigurationError(f"{name} is out of range", expected=f"at most {MOST_PROCESSES}", got=number)
    return number
