"""Names of settings that do not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

#: How alike two names of variables are, beyond the prefix that all of a family have, before one is taken for the other.
_ALIKE = 0.75


def unknown_setting(of: str, name: str, known: Iterable[str]) -> AttributeError:
    import difflib  # rarely needed, and slow to import

    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(sorted(known))}."
    return AttributeError(f"{of} has no setting {name!r}. {hint}")


def nearest(variable: str, known: Iterable[str]) -> str | None:
    """The known variable that was probably meant, itself if it is known."""
    if variable in (known := set(known)):
        return variable
    import difflib

    family, _, rest = variable.partition("_")
    ends = {name.partition("_")[2]: name for name in sorted(known) if name.startswith(f"{family}_")}
    close = difflib.get_close_matches(rest, ends, n=1, cutoff=_ALIKE)
    return ends[close[0]] if close else None
