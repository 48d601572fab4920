"""Memory for rows that are about to come, had from the system beside what brings them.

Systems hand memory out page by page when it is first written, which takes as long as all that is done with the rows,
and longer where a virtual machine has to get it from its host first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from fleet.ps.table.table import Table

#: Memory is taken when it is needed so much later, by the rows' weights, and looked after so often.
_AHEAD_BYTES, _PAUSE_S = 64 << 20, 0.002


@contextlib.contextmanager
def room_taken(tables: Sequence[Table]) -> Iterator[None]:
    """Meanwhile have a thread take the memory that the tables expect to need, in the order in which rows come. It keeps
    a little ahead of them, since nothing is believed of how many come before they have."""
    done = threading.Event()

    def touch() -> None:
        for table in tables:
            for rows in table.touch():
                while (rows - len(table)) * table.spec.dim * np.dtype(table.spec.dtype).itemsize > _AHEAD_BYTES:
                    if done.wait(_PAUSE_S):
                        return
                if done.is_set():
                    return

    thread = threading.Thread(target=touch, name="fleet-checkpoint-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
