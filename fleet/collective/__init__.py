"""Collective training. Not there yet but for its import point, ``from fleet.collective import fleet``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleet.facade import collective as fleet

__all__ = ["fleet"]


def __getattr__(name: str) -> Any:
    if name == "fleet":
        from fleet.facade import collective

        return collective
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
