"""Waits for the disk without the server's lock, where rows of tables lie in files.

What a request will ask of the disk is found out under the lock, waited for without it, and given to the tables under
the lock again. Where there is not so much memory that the rows stay until they are needed, they are waited for once
more, under the lock: the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from fleet.errors import FleetError
from fleet.numeric.jit import Ids
from fleet.plan.plan import Plan
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.pending import Outbox
from fleet.ps.table.shard import Shard
from fleet.ps.table.stores import Stores
from fleet.ps.table.table import Table
from fleet.ps.wire.frame import Frame


class DiskWaits:
    def __init__(
        self,
        lock: AbstractContextManager[object],
        end: JobEnd,
        stores: Stores,
        running: Callable[[], Job | None],
        send: Callable[[Outbox], None],
    ) -> None:
        """``send`` lets replies leave."""
        self._lock = lock
        self._end = end
        self._stores = stores
        self._running = running
        self._send = send
        #: whether rows of a file are being written anew
        self._rewriting = False

    def before(self, frame: Frame) -> None:
        """Wait for the rows that a request will ask for, and until there is room for others to leave memory."""
        request, job = frame.message, self._running()
        kind = request.WhichOneof("kind")
        if not self._stores.has_files or job is None or kind not in ("pull", "push", "upload"):
            return
        with self._lock:
            shard = job.shard
            wanted = [] if shard is None else _rows_of(shard, frame)
            readings = [(table, table.reading(ids, expected=kind == "pull")) for table, ids in wanted]
            backlogs = [] if shard is None else shard.backlogs()
        found = [(table, reading) for table, reading in readings if reading is not None]
        for _, reading in found:
            reading.run()
        for backlog in backlogs:
            backlog.wait()
        if found:
            with self._lock:
                for table, reading in found:
                    table.take(reading)

    def make_beside(self, plan: Plan, server: int, seed: int, options: Sequence[str]) -> Shard:
        """Make a shard for other values while there is one that is trained, which makes room for it little by little.
        Called on a thread of its own."""
        new_store = self._stores.share()
        job, has_room = self._running(), False
        while job is not None and not has_room:
            with self._lock:
                has_room = job.shard is None or job.shard.give_way()
                backlogs = [] if job.shard is None else job.shard.backlogs()
            for backlog in backlogs:
                backlog.wait()
        return Shard(plan, server, seed, options, new_store)

    def after(self) -> None:
        """Write rows anew of a part of a file most of which is not needed any more."""
        job = self._running()
        if not self._stores.has_files or job is None or self._rewriting:
            return
        self._rewriting = True
        self._stores.remove_unused()
        try:
            with self._lock:
                shard = job.shard
                found = None if shard is None else shard.to_rewrite()
                backlogs = [] if shard is None or found is None else shard.backlogs()
            if found is not None:
                table, reading = found
                reading.run()
                for backlog in backlogs:
                    backlog.wait()
                with self._lock:
                    table.rewrite(reading)
        except FleetError as error:
            outbox: Outbox = []
            with self._lock:
                self._end.fail(error, job, outbox)
            self._send(outbox)
        finally:
            self._rewriting = False


def _rows_of(shard: Shard, frame: Frame) -> list[tuple[Table, Ids]]:
    """Return the rows that a request speaks of. What makes no sense is refused when it is carried out."""
    request = frame.message
    kind = request.WhichOneof("kind")
    ids = [tensor.array for tensor in frame.tensors if tensor.dtype == "int64"]  # nothing else in them is
    if kind == "upload":
        tables = [request.upload.table] if request.upload.rows and request.upload.edit else []
    elif kind == "pull":
        tables, ids = request.pull.tables, _cut(ids, request.pull.counts)
    else:
        tables, ids = request.push.row_tables, _cut(ids, request.push.row_counts)
    found = shard.rows_of(tables, ids)
    if kind == "push" and shard.changes is not None:  # which the answer has
        changed = shard.changes.marked(request.worker)
        found += shard.rows_of([*changed], [*changed.values()])
    return found


def _cut(ids: Sequence[Ids], counts: Sequence[int]) -> list[Ids]:
    """Return the ids of each table, of which there are so many."""
    return [each for every in ids[:1] for each in np.split(every, np.cumsum(counts, dtype=np.int64)[:-1])]
