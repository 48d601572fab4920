"""``shrink``: rows leave all tables that have rules for it, at once; one worker asks for it, or all do, and it is done
once."""

from __future__ import annotations

from typing import Any

from fleet.base.clock import wall_time
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.worker.lease import once
from fleet.ps.worker.runtime import WorkerRuntime


def shrink(worker: WorkerRuntime) -> None:
    with worker.turns.take():
        worker.in_turn("shrink()", worker.flush)

        def act(_: dict[str, Any]) -> None:
            request = pb.Shrink(now=wall_time(), version=worker.progress.completed)
            replies = worker.connections.ask("shrink()", shrink=request)
            worker.cuts.notice([reply.message for reply in replies])
            worker.cuts.tell_due()

        # Where one is lost amid it, another does it again: rows that have left do so once.
        once(worker, worker.progress.name_of_call("shrink()"), act, by_anyone=True)
        worker.forget_rows()
