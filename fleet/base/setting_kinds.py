"""Types of settings: how the text of a variable becomes a value, and how a refusal names what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet.base import checks
from fleet.base.cluster import Binding, parse_address
from fleet.errors import ConfigurationError

T = TypeVar("T")

#: A job's id stands in every message about it.
_LONGEST_ID = 200


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Describes one type: ``word`` is its name on the page of variables, and ``parse`` raises ``ValueError`` for text
    of another type."""

    word: str
    parse: Callable[[str], T]
    expected: str = ""
    #: how many of the variable's unit the value is
    unit: float = 1.0

    def read(self, name: str, text: str) -> T:
        """Return the value of ``text``, which is not blank."""
        try:
            return self.parse(text)
        except (ValueError, OverflowError):
            raise ConfigurationError(f"{name} is not usable", expected=self.expected, got=repr(text)) from None


def whole(least: int = 1, unit: int = 1, word: str = "whole number") -> Kind[int]:
    """Return the type of whole numbers from ``least`` on, each counting so many of a smaller unit."""

    def parse(text: str) -> int:
        number = int(text)
        if not least <= float(number):
            raise ValueError(text)
        return number * unit

    return Kind(word, parse, f"a whole number of at least {least}", unit)


def choice(*among: str) -> Kind[str]:
    """Return the type of a few words, in capitals or not."""

    def parse(text: str) -> str:
        if text.lower() not in among:
            raise ValueError(text)
        return text.lower()

    return Kind("word", parse, " or ".join(among))


def _duration(word: str, unit: float) -> Kind[float]:
    """Return the type of times above zero, whose values are in seconds."""

    def parse(text: str) -> float:
        number = float(text)
        if not 1e-9 <= number <= checks.LONGEST_S / unit:
            raise ValueError(text)
        return number * unit

    return Kind(word, parse, f"a number above zero, {checks.LONGEST_S / unit:g} at most", unit)


def _port(text: str, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= 65535:
        raise ValueError(text)
    return int(text)


def _port_or_off(text: str) -> int | None:
    return None if text.lower() == "off" else _port(text, least=0)


def _switch(text: str) -> bool:
    if text.lower() in ("0", "false", "no", "off"):
        return False
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    raise ValueError(text)


def _address(text: str) -> Binding:
    host, port = parse_address(text)
    if port == 0:
        raise ValueError(text)
    return Binding(host, port)


def _host(text: str) -> str:
    host, port = parse_address(text)
    if port is not None:
        raise ValueError(text)
    return host


def _job_id(text: str) -> str:
    if len(text) > _LONGEST_ID or not text.isprintable():
        raise ValueError(text)
    return text


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError(text)
    return text


def _local_path(text: str) -> str:
    if "://" in text:
        raise ValueError(text)
    return _path(text)


MILLISECONDS = _duration("milliseconds", 1e-3)
SECONDS = _duration("seconds", 1.0)
MEBIBYTES = whole(unit=1 << 20, word="MiB")
SWITCH = Kind("1 or 0", _switch, "1 or 0")
PORT = Kind("port", _port, "a port from 1 to 65535")
PORT_OR_OFF = Kind("port, or `off`", _port_or_off, "a port, 0 for any, or off")
ADDRESS = Kind("address", _address, "an address of this machine, as 10.0.0.1, [fd00::1], 0.0.0.0 or 10.0.0.1:6174")
HOST = Kind("address", _host, "an address of this machine, as 10.0.0.1, [fd00::1] or 0.0.0.0")
TEXT = Kind("text", str)
JOB_ID = Kind("text", _job_id, f"at most {_LONGEST_ID} letters, in one line")
PATH = Kind("path", _path, "a path")
LOCAL_PATH = Kind("path", _local_path, "a path on this machine, and no URL")
