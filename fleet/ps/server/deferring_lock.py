"""A server's lock lets its next holder first do what the one before has put off.

So an answer need not wait for work that does not show in it, and nobody sees anything in which that work is not done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class DeferringLock:
    def __init__(self, catch_up: Callable[[], None]) -> None:
        """``catch_up`` does what is put off, if anything is."""
        self._lock = threading.Lock()
        self._catch_up = catch_up

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._catch_up()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
