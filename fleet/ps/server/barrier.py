"""Workers wait for each other in barriers and reductions. If some wait there, and all others wait in a step for them,
the job ends.
"""

from __future__ import annotations

from fleet.base.clock import Clock
from fleet.errors import JobAbortedError
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Outbox, Waiting
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire.frame import Frame


class Barrier:
    def __init__(self, clock: Clock, end: JobEnd, members: Members, steps: StepRequests) -> None:
        self._clock = clock
        self._end = end
        self._members = members
        self._steps = steps

    def gather(self, job: Job, arrival: Arrival) -> None:
        """Park a worker until everybody has come to its gathering."""
        gather = arrival.request.gather

        def answer() -> Frame:
            outcome = job.reductions.answer(gather.number)
            outcome.message.loads = job.progress.loads
            return outcome

        what = f"{gather.op[:20]} {gather.number}"
        waiting = Waiting(
            arrival.worker,
            what,
            self._clock.now(),
            arrival.respond,
            answer,
            gathering=True,
            beside=gather.beside,
        )
        job.check_room(waiting)
        ticket = self._steps.ticket()
        ready = job.reductions.come(ticket, waiting.worker, gather, arrival.tensors)
        self._steps.hold_back(job, ticket, waiting)
        self._steps.answer(job, ready, waiting.worker, arrival.outbox)

    def refuse_standstill(self, job: Job, outbox: Outbox) -> None:
        """End the job if some workers wait in a gathering, and all others in a step for these: nobody would ever go
        on."""
        if not job.reductions.lacking():
            return
        parked = [waiting for waiting in job.rounds.parked.values() if not (waiting.ahead or waiting.beside)]
        gathering = {waiting.worker for waiting in parked if waiting.gathering}
        stepping = {waiting.worker for waiting in parked if not waiting.gathering}
        stepping |= {waiting.worker for waiting in job.meetings.waiting()}
        if not (gathering and stepping) or not gathering | stepping >= {*self._members.awaited()}:
            return
        step, (gathering_at, _) = job.rounds.gate.lacking()[0], job.reductions.lacking()[0]
        error = JobAbortedError(
            "the workers wait for each other",
            where=job.where,
            got=f"workers {sorted(gathering)} in {gathering_at}, workers {sorted(stepping)} in step {step}",
            todo="Call barrier_worker, all_reduce_worker and metrics on every worker after the same step.",
        )
        self._end.fail(error, job, outbox)
