"""Workers give the states of their own objects (object_states.py) for a checkpoint, and get them back."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.base.clock import Clock
from fleet.errors import MissedError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.job import Job
from fleet.ps.server.members import Members
from fleet.ps.server.object_states import ObjectState
from fleet.ps.server.pending import Arrival, Outbox, Waiting
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

_LONGEST_NAME = 8192


class StateRequests:
    def __init__(self, clock: Clock, members: Members, deadline_s: float) -> None:
        """``deadline_s`` is how long a worker that collects waits for states that do not come."""
        self._clock = clock
        self._members = members
        self._deadline_s = deadline_s

    def give(self, job: Job, arrival: Arrival) -> None:
        """Keep a worker's state for a checkpoint."""
        give = arrival.request.give
        check_name(give.name)
        state = state_of(arrival.tensors, give.steps, give.name)
        job.states.give(arrival.worker, state, last=give.last)
        arrival.answer(pb.Reply())

    def recall(self, job: Job, arrival: Arrival) -> None:
        """Give a worker its own state back, or the collected ones to the worker that saves them."""
        recall = arrival.request.recall
        if recall.workers:
            self._hand_over(job, arrival)
        elif recall.collection:
            check_name(recall.collection)
            self._collect(job, arrival)
        else:
            state = job.states.of(arrival.worker, arrival.request.step)
            reply = pb.Reply(granted=state is not None, steps=0 if state is None else state.steps)
            arrival.answer(reply, [] if state is None else [WireTensor.of(state.data)])

    def _collect(self, job: Job, arrival: Arrival) -> None:
        recall, now = arrival.request.recall, self._clock.now()
        waiting = Waiting(arrival.worker, "the workers' states", now, arrival.respond, lambda: Frame(pb.Reply()))
        job.check_room(waiting)
        clocks = job.rounds.gate.clocks
        job.states.collect(recall.collection, recall.everyone, arrival.request.step, waiting, clocks)

    def _hand_over(self, job: Job, arrival: Arrival) -> None:
        """Answer with some of the states that were collected."""
        collected, recall = job.states.collected, arrival.request.recall
        if (collected.name, collected.worker) != (recall.collection, arrival.worker):
            raise MissedError("a server was killed while the workers' states were collected", where=job.where)
        if not all(worker in collected.states for worker in recall.workers):
            raise ProtocolError("a state is asked for that was not collected", where=job.where)
        states = [collected.states[worker].data for worker in dict.fromkeys(recall.workers)]
        arrival.answer(pb.Reply(), [WireTensor.of(data) for data in states])

    def answer_ready(self, job: Job, outbox: Outbox) -> None:
        """Answer those who collect, once everything has come that will come."""
        if not job.states.waiting():
            return

        def occupied() -> set[int]:
            return {each.worker for each in job.all_waiting() if not each.ahead}

        def too_late(since: float) -> bool:
            return self._clock.now() - since > self._deadline_s

        clocks = job.rounds.gate.clocks
        job.states.answer_ready(self._members.awaited(), clocks, occupied, outbox, too_late=too_late)


def state_of(tensors: Sequence[WireTensor], steps: int, name: str = "") -> ObjectState:
    """Return the state that came as the only one of some tensors: a copy, which holds on to nothing that came with
    it."""
    if len(tensors) != 1 or tensors[0].dtype != "uint8" or len(tensors[0].shape) != 1:
        raise ProtocolError("a state is not one flat tensor of bytes", got=[each.dtype for each in tensors][:20])
    return ObjectState(tensors[0].numpy().copy(), steps, name)


def check_name(name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise ProtocolError("a name is too long", expected=f"up to {_LONGEST_NAME} characters", got=len(name))
