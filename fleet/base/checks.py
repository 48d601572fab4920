"""Checks arguments and options: each check gives the value back, or says by its name what it must be."""

from __future__ import annotations

from fleet.errors import ArgumentTypeError, ConfigurationError

_INFINITY = float("inf")


def integer(name: str, value: object, kind: str = "an int") -> int:
    """Return an int as it is, or refuse the value. To Python True is an int; as a number it is a slip."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be {kind}", got=repr(value))
    return value


def whole(name: str, value: object, least: int) -> int:
    """Return an int of at least ``least``, or refuse the value."""
    number = integer(name, value)
    if number < least:
        raise ConfigurationError(f"{name} is out of range", expected=f"at least {least}", got=number)
    return number


def whole_or_none(name: str, value: object, least: int) -> int | None:
    return None if value is None else whole(name, value, least)


def real(name: str, value: object, kind: str = "a number") -> float:
    """Return an int or a float, which may be NaN or infinite, or refuse the value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} must be {kind}", got=repr(value))
    try:
        float(value)
    except OverflowError:  # and nobody wants to read its digits
        raise ConfigurationError(
            f"{name} is out of range", expected="what a float can hold", got="a larger int"
        ) from None
    return value


def number(name: str, value: object, least: float, *, below: float = _INFINITY, above: bool = False) -> float:
    """Return a number from ``least`` on (with ``above``, only above it) and below ``below``, or refuse the value."""
    given = real(name, value)
    if not least <= given < below or (above and given == least):
        bound = f"{'above' if above else 'at least'} {least:g}"
        expected = bound if below == _INFINITY else f"{bound} and below {below:g}"
        raise ConfigurationError(f"{name} is out of range", expected=expected, got=value)
    return given


#: About thirty years: more than that no clock of the system waits.
LONGEST_S = 1e9


def seconds(name: str, value: object, *, above: bool = True) -> float:
    """Return a time that the system can wait for, above zero or (without ``above``) zero too, or refuse the value."""
    return number(name, real(name, value, "a number of seconds"), 0, below=LONGEST_S, above=above)


def switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False", got=repr(value))
    return value


def switch_or_none(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True, False or None", got=repr(value))
    return value
