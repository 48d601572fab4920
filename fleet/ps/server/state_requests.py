"""Requests that have to do with the states of the workers' own objects (states.py): into a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.errors import MissedError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.context import Floor
from fleet.ps.server.object_states import ObjectState
from fleet.ps.server.pending import Arrival, Outbox, Waiting
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

_LONGEST_NAME = 8192


class StateRequests:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    def give(self, arrival: Arrival) -> None:
        job, give = self._floor.running(), arrival.request.give
        check_name(give.name)
        share = share_of(arrival.tensors, give.steps, give.name)
        job.states.give(arrival.worker, share, last=give.last)
        arrival.answer(pb.Reply())

    def recall(self, arrival: Arrival) -> None:
        job, recall = self._floor.running(), arrival.request.recall
        if recall.workers:
            self._hand_over(arrival)
        elif recall.collection:
            check_name(recall.collection)
            self._collect(arrival)
        else:
            share = job.states.of(arrival.worker, arrival.request.step)
            reply = pb.Reply(granted=share is not None, steps=0 if share is None else share.steps)
            arrival.answer(reply, [] if share is None else [WireTensor.of(share.data)])

    def _collect(self, arrival: Arrival) -> None:
        floor, job, recall = self._floor, self._floor.running(), arrival.request.recall
        now = floor.clock.now()
        waiting = Waiting(arrival.worker, "the workers' states", now, arrival.respond, lambda: Frame(pb.Reply()))
        floor.check_patience(waiting)
        job.states.collect(recall.collection, recall.everyone, arrival.request.step, waiting, job.gate.clocks)

    def _hand_over(self, arrival: Arrival) -> None:
        """Some of the states that were collected."""
        collected, recall = self._floor.running().states.collected, arrival.request.recall
        if (collected.name, collected.worker) != (recall.collection, arrival.worker):
            raise MissedError("a server was killed while the workers' states were collected", where=self._where)
        if not all(worker in collected.shares for worker in recall.workers):
            raise ProtocolError("a state is asked for that was not collected", where=self._where)
        shares = [collected.shares[worker].data for worker in dict.fromkeys(recall.workers)]
        arrival.answer(pb.Reply(), [WireTensor.of(data) for data in shares])

    def answer_ready(self, outbox: Outbox) -> None:
        """Whoever collects may have all that will come."""
        floor, job = self._floor, self._floor.job
        if job is None or not job.states.waiting():
            return

        def occupied() -> set[int]:
            return {each.worker for each in job.all_waiting() if not each.ahead}

        def too_late(since: float) -> bool:
            return floor.clock.now() - since > floor.knobs.rpc_deadline_s

        job.states.answer_ready(floor.roll.awaited(), job.gate.clocks, occupied, outbox, too_late=too_late)

    @property
    def _where(self) -> str:
        return str(self._floor.endpoint)


def share_of(tensors: Sequence[WireTensor], steps: int, name: str = "") -> ObjectState:
    """The state that came as the only one of some tensors: a copy, which holds on to nothing that came with it."""
    if len(tensors) != 1 or tensors[0].dtype != "uint8" or len(tensors[0].shape) != 1:
        raise ProtocolError("a state is not one flat tensor of bytes", got=[each.dtype for each in tensors][:20])
    return ObjectState(tensors[0].numpy().copy(), steps, name)


def check_name(name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise ProtocolError("a name is too long", expected=f"up to {_LONGEST_NAME} characters", got=len(name))
