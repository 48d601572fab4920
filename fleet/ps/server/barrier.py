"""Workers wait for each other in barriers and reductions."""

from __future__ import annotations

from fleet.base.clock import Clock
from fleet.ps.server.job import Job
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire.frame import Frame


class Barrier:
    def __init__(self, clock: Clock, steps: StepRequests) -> None:
        self._clock = clock
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
            told=arrival.told,
        )
        job.check_room(waiting)
        ticket = self._steps.ticket()
        ready = job.reductions.come(ticket, waiting.worker, gather, arrival.tensors)
        self._steps.hold_back(job, ticket, waiting)
        self._steps.answer(job, ready, waiting.worker, arrival.outbox)
        if ticket in job.rounds.parked and not gather.beside:
            self._steps.carry_out(job, job.rounds.gate.rests(waiting.worker), waiting.worker, arrival.outbox)
