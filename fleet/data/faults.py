"""Decides what becomes of malformed samples: the first one ends the reading, or all are counted and some logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fleet.errors import DataError

_log = logging.getLogger("fleet")

#: So many are told in full; of the others there is only the number at the end.
TOLD = 10


class Faults:
    """Counts the malformed samples of one reading in one process."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.skipped = 0

    def found(self, described: Callable[[], DataError]) -> None:
        """Count one more. It is described only if it is reported, since its line may have to be looked for by reading
        the file again."""
        if not self._skip:
            raise described()
        self.skipped += 1
        if self.skipped <= TOLD:
            _log.warning("skipped: %s", described())
        if self.skipped == TOLD:
            _log.warning("further malformed samples are counted, and told at the end of the epoch")

    def close(self) -> None:
        if self.skipped:
            _log.warning("%d malformed samples were skipped in this epoch, in this process", self.skipped)
