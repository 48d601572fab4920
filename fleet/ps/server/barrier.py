"""Where workers wait for each other by their own will: a barrier, or a reduction over all; and for nothing, if some do
while the others are in a step.
"""

from __future__ import annotations

from fleet.errors import JobAbortedError
from fleet.ps.server.context import Floor
from fleet.ps.server.pending import Arrival, Outbox, Waiting
from fleet.ps.wire.frame import Frame


class Barrier:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    def gather(self, arrival: Arrival) -> None:
        """Parked until everybody has come to it."""
        floor, job, gather = self._floor, self._floor.running(), arrival.request.gather

        def answer() -> Frame:
            met = job.hall.answer(gather.number)
            met.message.loads = job.loads
            return met

        what = f"{gather.op[:20]} {gather.number}"
        waiting = Waiting(
            arrival.worker,
            what,
            floor.clock.now(),
            arrival.respond,
            answer,
            gathering=True,
            beside=gather.beside,
        )
        floor.check_patience(waiting)
        ticket = floor.ticket()
        ready = job.hall.come(ticket, waiting.worker, gather, arrival.tensors)
        job.parked[ticket] = waiting
        floor.answer(ready, waiting.worker, arrival.outbox)

    def refuse_standstill(self, outbox: Outbox) -> None:
        """Some workers wait in a gathering, all others in a step for them: nobody will ever go on."""
        job = self._floor.job
        if job is None or not job.hall.lacking():
            return
        parked = [waiting for waiting in job.parked.values() if not (waiting.ahead or waiting.beside)]
        meeting = {waiting.worker for waiting in parked if waiting.gathering}
        stepping = {waiting.worker for waiting in parked if not waiting.gathering}
        if not (meeting and stepping) or not meeting | stepping >= {*self._floor.roll.awaited()}:
            return
        step, (meeting_at, _) = job.gate.lacking()[0], job.hall.lacking()[0]
        error = JobAbortedError(
            "the workers wait for each other",
            where=str(self._floor.endpoint),
            got=f"workers {sorted(meeting)} in {meeting_at}, workers {sorted(stepping)} in step {step}",
            todo="Call barrier_worker, all_reduce_worker and metrics on every worker after the same step.",
        )
        self._floor.fail(error, outbox)
