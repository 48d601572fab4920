"""Reads environment variables so that everything wrong with them is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fleet.errors import ConfigurationError

T = TypeVar("T")


class Variables:
    """Reads variables by all their spellings and keeps each complaint until ``raise_complaints``.

    A variable set to blanks counts as unset: a template with nothing to fill in leaves it so.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._complaints: list[str] = []

    def given(self, *names: str) -> tuple[str, ...]:
        """Return those of ``names`` that are set."""
        return tuple(name for name in names if self._environ.get(name, "").strip())

    def found(self, *names: str) -> str:
        """Return those of ``names`` that are set, as ``NAME=value``."""
        return " ".join(f"{name}={self._environ[name].strip()}" for name in self.given(*names))

    def need(self, names: Sequence[str], parse: Callable[[str], T], expected: str, *, otherwise: T) -> T:
        """Return the value as ``read`` does, and complain if no spelling is set; ``otherwise`` stands in until the
        complaint is raised."""
        if not self.given(*names):
            self.missing(names, expected)
        value = self.read(names, parse, expected)
        return otherwise if value is None else value

    def read(self, names: Sequence[str], parse: Callable[[str], T], expected: str) -> T | None:
        """Return the value that all set spellings agree on; None if none is set, or if it is malformed and complained
        of."""
        given = self.given(*names)
        values: list[T] = []
        for name in given:
            try:
                values.append(parse(self._environ[name].strip()))
            except ValueError:
                self.complain((name,), expected)
        if any(value != values[0] for value in values):
            self.complain(given, "one value")
        return values[0] if values else None

    def missing(self, names: Sequence[str], expected: str) -> None:
        self._keep(f"{' or '.join(names)}: expected {expected}, found nothing")

    def complain(self, names: Sequence[str], expected: str) -> None:
        found = " and ".join(repr(self._environ[name]) for name in names)
        self._keep(f"{' and '.join(names)}: expected {expected}, found {found}")

    def raise_complaints(self, job: str) -> None:
        """Raise every complaint in one error; do nothing when there is none."""
        if self._complaints:
            lines = "".join(f"\n  {complaint}" for complaint in self._complaints)
            raise ConfigurationError(f"the environment does not describe this process of {job}:{lines}")

    def _keep(self, complaint: str) -> None:
        if complaint not in self._complaints:
            self._complaints.append(complaint)


def whole(least: int, *, below: int = 0) -> tuple[Callable[[str], int], str]:
    """Return how to parse a whole number within bounds, and what to call it. Where ``below`` is 0, unknown, there is no
    upper bound."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise ValueError(text)
        number = int(text)
        if number < least or (below and number >= below):
            raise ValueError(text)
        return number

    return parse, f"a whole number from {least} to {below - 1}" if below else f"a whole number of at least {least}"
