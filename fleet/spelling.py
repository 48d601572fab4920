"""Names of settings that do not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def unknown_setting(of: str, name: str, known: Iterable[str]) -> AttributeError:
    import difflib  # rarely needed, and slow to import

    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(sorted(known))}."
    return AttributeError(f"{of} has no setting {name!r}. {hint}")
