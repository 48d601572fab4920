"""Tells those who wait how something ended that one process does for all, whichever way it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Give ``tell`` the failure of what is done in here, or nothing; an interruption is one too."""
    failure = "it was interrupted"
    try:
        yield
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        tell(failure)
