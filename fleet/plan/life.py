"""Says which ids get a row in a table, and which rows leave it again.

These are values, which are part of a table's description and travel by the name of their ``kind``. Users make them
(``fleet.nn.CountFilter`` and its like) and give them to an embedding, where what contradicts itself is refused; what
they do to a table is in ``fleet.ps.table``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args

from fleet.errors import ArgumentTypeError, ConfigurationError

#: What a row's columns are called that rules go by, up to the dot: no optimizer's state has one in its name.
PREFIX = "life."

#: Counts beyond this are a mistake, and in a sketch, where a count has 32 bits, beyond the other.
_MOST, _MOST_IN_A_SKETCH = 1 << 53, (1 << 32) - 1


class _Rule:
    """Shows a rule as a user writes it: the first number, then what is not at its default, by name."""

    def __repr__(self) -> str:
        said = [each for each in fields(self) if each.init and getattr(self, each.name) != each.default]  # type: ignore[arg-type]
        shown = [
            repr(getattr(self, each.name)) if each.default is MISSING else f"{each.name}={getattr(self, each.name)!r}"
            for each in said
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class CountFilter(_Rule):
    """Lets an id have a row once it was in ``n`` look-ups of training, counted once for a worker and step.

    ``of="weight"`` adds up the weights that came with the look-ups instead. ``sketch_mb`` counts in so many MiB on each
    server, however many ids come; then an id may be let in early, and never late, and one whose row has left is let in
    again at once, as its count stays.

    Examples:
        >>> users = fleet.nn.Embedding(None, 8, admit=fleet.nn.CountFilter(3))
        >>> users
        Embedding(any id, 8, admit=CountFilter(3))
        >>> fleet.nn.CountFilter(10, of="weight", sketch_mb=64)
        CountFilter(10, of='weight', sketch_mb=64)
    """

    n: int | float
    of: str = "count"
    sketch_mb: int | float | None = None
    kind: str = field(default="CountFilter", init=False, repr=False)

    def __post_init__(self) -> None:
        _check_choice(self, "of", self.of, ("count", "weight"))
        if self.of == "count":
            _check_whole(self, "n", self.n)
        else:
            _check_positive(self, "n", self.n)
        if self.sketch_mb is not None:
            _check_positive(self, "sketch_mb", self.sketch_mb)
            if self.of == "count" and self.n > _MOST_IN_A_SKETCH:
                raise _unusable(self, "n", f"at most {_MOST_IN_A_SKETCH}, which is as far as a sketch counts", self.n)


@dataclass(frozen=True, repr=False)
class Probability(_Rule):
    """Lets an id have a row with this probability at each step in which it is looked up for training. Whether it does
    depends on the seed, the table, the id and the step, and on nothing else.

    Examples:
        >>> fleet.nn.Embedding(None, 8, admit=fleet.nn.Probability(0.1))
        Embedding(any id, 8, admit=Probability(0.1))
    """

    p: int | float
    kind: str = field(default="Probability", init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_number(self.p) or not 0 < self.p <= 1:
            raise _unusable(self, "p", "0 < p <= 1", self.p)


@dataclass(frozen=True, repr=False)
class Unused(_Rule):
    """Takes a row away once it has not been trained for so many steps of its table, or so many seconds. Seconds are
    those of the first worker's clock, so what they do is not the same in two runs.

    Examples:
        >>> fleet.nn.Embedding(None, 8, evict=fleet.nn.Unused(steps=100_000))
        Embedding(any id, 8, evict=Unused(steps=100000))
        >>> fleet.nn.Unused(seconds=7 * 24 * 3600)
        Unused(seconds=604800)
    """

    steps: int | None = None
    seconds: int | float | None = None
    kind: str = field(default="Unused", init=False, repr=False)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise _unusable(self, "steps or seconds", "one of them", (self.steps, self.seconds))
        if self.steps is not None:
            _check_whole(self, "steps", self.steps)
        else:
            _check_positive(self, "seconds", self.seconds)


@dataclass(frozen=True, repr=False)
class MaxRows(_Rule):
    """Leaves a table ``n`` rows, on all servers together: those trained last (``"recent"``), those trained most often
    (``"often"``), or those of the greatest sum of weights (``"weight"``). Of equal rows those of smaller ids stay.

    Examples:
        >>> fleet.nn.Embedding(None, 8, evict=[fleet.nn.MaxRows(1_000_000, by="often"), fleet.nn.Unused(steps=5000)])
        Embedding(any id, 8, evict=[MaxRows(1000000, by='often'), Unused(steps=5000)])
    """

    n: int
    by: str = "recent"
    kind: str = field(default="MaxRows", init=False, repr=False)

    def __post_init__(self) -> None:
        _check_whole(self, "n", self.n)
        _check_choice(self, "by", self.by, ("recent", "often", "weight"))


@dataclass(frozen=True, repr=False)
class SmallNorm(_Rule):
    """Takes a row away when the Euclidean norm of its values is smaller than ``below``.

    Examples:
        >>> fleet.nn.Embedding(None, 8, evict=fleet.nn.SmallNorm(1e-3))
        Embedding(any id, 8, evict=SmallNorm(0.001))
    """

    below: int | float
    kind: str = field(default="SmallNorm", init=False, repr=False)

    def __post_init__(self) -> None:
        _check_positive(self, "below", self.below)


#: What may stand for ``admit=``, and in ``evict=``.
Admission = CountFilter | Probability
Eviction = Unused | MaxRows | SmallNorm

#: All of them by the name under which they travel.
KINDS: Mapping[str, type[Admission | Eviction]] = {
    kind.__name__: kind for kind in (CountFilter, Probability, Unused, MaxRows, SmallNorm)
}


def rules_of(admit: object, evict: object) -> tuple[Admission | None, tuple[Eviction, ...]]:
    """Return what a user gave as ``admit=`` and ``evict=``: one rule or none, and none, one or a list of them."""
    rules = () if evict is None else tuple(evict) if isinstance(evict, list | tuple) else (evict,)
    if admit is not None and not isinstance(admit, Admission):
        raise _misplaced("admit", Admission, "evict", Eviction, admit)
    for rule in rules:
        if not isinstance(rule, Eviction):
            raise _misplaced("evict", Eviction, "admit", Admission, rule)
    twice = named_twice(rules)
    if twice:
        raise ConfigurationError(
            f"evict= has two rules of the kind {twice}",
            expected="one of each kind",
            got=", ".join(map(repr, rules)),
            todo="Leave the one that is meant.",
        )
    return admit, rules


def named_twice(rules: Sequence[Eviction]) -> str | None:
    """Return a kind of which there are two among these rules."""
    kinds = [rule.kind for rule in rules]
    return next((kind for kind in kinds if kinds.count(kind) > 1), None)


def goes_by_weight(admit: Admission | None, evict: Sequence[Eviction]) -> bool:
    """Say whether any of these rules counts the weights of look-ups."""
    by_weight = isinstance(admit, CountFilter) and admit.of == "weight"
    return by_weight or any(isinstance(rule, MaxRows) and rule.by == "weight" for rule in evict)


def _misplaced(argument: str, fits: Any, other: str, fits_other: Any, got: object) -> Exception:
    expected = " or ".join(f"fleet.nn.{kind.__name__}" for kind in get_args(fits))
    if isinstance(got, fits_other):
        return ConfigurationError(
            f"{got!r} is no rule for {argument}=", expected=expected, got=repr(got), todo=f"Give it as {other}=."
        )
    return ArgumentTypeError(f"{argument}= is of the wrong type", expected=expected, got=repr(got))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _check_whole(rule: object, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise _unusable(rule, name, "a whole number from 1", value)


def _check_positive(rule: object, name: str, value: object) -> None:
    if not _is_number(value) or not 0 < value <= _MOST:  # type: ignore[operator]
        raise _unusable(rule, name, "a positive number", value)


def _check_choice(rule: object, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _unusable(rule, name, " or ".join(map(repr, choices)), value)


def _unusable(rule: object, name: str, expected: str, got: object) -> ConfigurationError:
    kind = type(rule).__name__
    return ConfigurationError(f"{kind} has an unusable {name}", where=f"fleet.nn.{kind}", expected=expected, got=got)
