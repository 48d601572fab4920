"""Workers ask to meet (meetings.py)."""

from __future__ import annotations

from typing import Any

from fleet.base.clock import Clock
from fleet.errors import ProtocolError
from fleet.ps.server.job import Job
from fleet.ps.server.meetings import Told
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Outbox, Waiting
from fleet.ps.server.status import on_one_line
from fleet.ps.server.step_requests import StepRequests, push_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

_LONGEST_ADDRESS = 300


_LONGEST_WAIT = 100


class MeetingRequests:
    def __init__(self, clock: Clock, members: Members, steps: StepRequests) -> None:
        self._clock = clock
        self._members = members
        self._steps = steps

    def meet(self, job: Job, arrival: Arrival) -> None:
        """Let a worker wait for the others, or note that it meets them no more."""
        request, worker = arrival.request, arrival.worker
        meet = request.meet
        if not job.plans.current.spec.settings.has_dense_on_workers or len(meet.address) > _LONGEST_ADDRESS:
            raise ProtocolError("a worker wants to meet others, and has no reason to", where=job.where)
        if meet.leaving:
            job.meetings.leave(worker)
            self._steps.answer(job, job.reductions.leave(worker), worker, arrival.outbox)
            arrival.answer(pb.Reply())
            return
        if meet.broken and not meet.address:
            job.meetings.broke(meet.group)
            arrival.answer(pb.Reply())
            return
        waiting = Waiting(
            worker,
            "the other workers",
            self._clock.now(),
            arrival.respond,
            lambda: Frame(pb.Reply()),
            told=arrival.told,
        )
        job.check_room(waiting)
        job.meetings.come(request, waiting, arrival.outbox)

    def heard(self, job: Job, request: Any) -> tuple[int, int]:
        """Note what a heartbeat tells of a worker among the others, and return what it is told. Takes no lock."""
        told = Told(request.group, request.together, on_one_line(request.beat.awaits[:_LONGEST_WAIT]))
        job.meetings.hear(request.worker, told)
        return job.meetings.told

    def answer_ready(self, job: Job, outbox: Outbox) -> None:
        """Let a meeting end if everybody has come, or go on whom others wait for elsewhere."""
        if job.meetings.waiting():
            meetings, gate = job.meetings, job.rounds.gate
            step, lacking = gate.lacking()
            pushing = [each.worker for each in job.rounds.parked.values() if each.what == push_of(step)]
            late = meetings.late(step, lacking, pushing)
            if job.policy.waits_for_others:
                late += [each for each in meetings.overtaken(gate.clocks) if each not in late]
            meetings.send_on(late, outbox)
            meetings.answer_ready(self._members.awaited(), outbox, is_trained=job.is_trained)
