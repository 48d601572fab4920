"""Finds names of settings that do not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

#: How alike two names of variables are, beyond the prefix that all of a family have, before one is taken for the other.
_ALIKE = 0.75
#: Names with fewer letters are not compared with those of another family, and in those with fewer than the second
#: number a single letter may be wrong.
_LONG_ENOUGH, _LONG = 8, 10


def unknown_setting(of: str, name: str, known: Iterable[str]) -> AttributeError:
    import difflib  # rarely needed, and slow to import

    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(sorted(known))}."
    return AttributeError(f"{of} has no setting {name!r}. {hint}")


def nearest(variable: str, known: Iterable[str]) -> str | None:
    """Return the known variable that was probably meant; a known variable is returned itself."""
    if variable in (known := set(known)):
        return variable
    import difflib

    family, _, rest = variable.partition("_")
    ends = {name.partition("_")[2]: name for name in sorted(known) if name.startswith(f"{family}_")}
    close = difflib.get_close_matches(rest, ends, n=1, cutoff=_ALIKE)
    return ends[close[0]] if close else None


def misspelt(variable: str, known: Iterable[str]) -> str | None:
    """Return the known variable that this differs from only in upper and lower case, underscores, and one letter, or
    two in a long name: so little that no stranger's variable is taken for it."""
    said = _squeezed(variable)
    if len(said) < _LONG_ENOUGH or variable in (known := set(known)):
        return None
    most = 1 if len(said) < _LONG else 2
    meant = {name: _squeezed(name) for name in sorted(known)}
    close = [
        name
        for name, letters in meant.items()
        if letters[0] == said[0] and abs(len(letters) - len(said)) <= most and _distance(letters, said) <= most
    ]
    return min(close, key=lambda name: _distance(meant[name], said), default=None)


def _squeezed(variable: str) -> str:
    return variable.replace("_", "").casefold()


def _distance(one: str, other: str) -> int:
    """Return how many letters have to be put in, left out or replaced."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        before, row[0] = row[0], place
        for at, beside in enumerate(other, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (letter != beside))
    return row[-1]
