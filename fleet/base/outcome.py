"""Tells those who wait how something ended that one process does for all, whichever way it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Give ``tell`` the failure of the work in here, or an empty text; an interruption is a failure too."""
    failure = "it was interrupted"
    try:
        yield
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        tell(failure)
