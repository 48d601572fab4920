"""The server's mind: every request of every worker arrives in ``Service.handle``, and goes from there to whoever does
its kind of work.

One lock guards the job (gate, shard, waiting requests). Under it a request is decided and carried out; the replies
that became possible are collected and leave after it is released. Heartbeats and status requests change nothing, and
take no part in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import Knobs
from fleet.checkpoint.places import Place
from fleet.errors import FleetError, JobAbortedError, ProtocolError
from fleet.ps.server.admission import Expected
from fleet.ps.server.barrier import Barrier
from fleet.ps.server.checkpoint_requests import CheckpointRequests
from fleet.ps.server.context import Floor
from fleet.ps.server.departure import Departure
from fleet.ps.server.durability import Keeping, resume
from fleet.ps.server.durable_state import NOTED
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.initialization import Initialization
from fleet.ps.server.job import Restore
from fleet.ps.server.pending import Arrival, Outbox, nobody
from fleet.ps.server.replacement import Replacement
from fleet.ps.server.resumption import Resumption
from fleet.ps.server.state_directory import StateDirectory
from fleet.ps.server.state_requests import StateRequests
from fleet.ps.server.status import Status
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond


class Service:
    def __init__(
        self,
        endpoint: Endpoint,
        knobs: Knobs,
        clock: Clock,
        *,
        expected: Expected | None = None,
        restore: Restore | None = None,
        durable: StateDirectory | None = None,
        resumes: Place | None = None,
        name: str = "",
    ) -> None:
        """``name`` is what this process is called; ``expected`` is the number of workers and the servers this process
        was told of, where it was told;
        ``restore`` the checkpoint to start from; ``durable`` where what is acknowledged is kept, and where it may be
        from before; ``resumes`` where checkpoints are, of which the job goes on from one if it does from any."""
        self.floor = floor = Floor(endpoint, knobs, clock, durable, name or f"server {endpoint}")
        self.ended = floor.ending.ended
        self._keeping = keeping = Keeping(floor)
        replacing = Replacement(floor, keeping)
        filling = Initialization(floor, keeping, replacing, restore)
        joining = Handshake(floor, keeping, filling, expected)
        training = StepRequests(floor)
        checkpointing = CheckpointRequests(floor)
        self._meeting = meeting = Barrier(floor)
        self._recalling = recalling = StateRequests(floor)
        self._leaving = leaving = Departure(floor, keeping)
        self._telling = telling = Status(floor, None if expected is None else expected[0])
        self.resuming = Resumption(floor, filling, joining, resumes)
        self._handlers: dict[str, Callable[[Arrival], None]] = {
            "hello": joining.hello,
            "upload": filling.upload,
            "ready": filling.ready,
            "extend": filling.extend,
            "part": training.part,
            "push": training.push,
            "pull": training.pull,
            "gather": meeting.gather,
            "claim": checkpointing.claim,
            "release": checkpointing.release,
            "export": checkpointing.export,
            "save": checkpointing.save,
            "settle": checkpointing.settle,
            "load": replacing.load,
            "give": recalling.give,
            "recall": recalling.recall,
            "survey": telling.survey,
            "bye": leaving.bye,
            "abort": leaving.abort,
        }
        resume(
            floor,
            begin_with=filling.begin_with,
            ask=self._again,
            hand_out=training.hand_out_again,
            lose=lambda worker: leaving.lose(worker, []),
        )
        filling.go_on()
        self.resuming.begin()

    def handle(self, frame: Frame, respond: Respond) -> Callable[[], None] | None:
        request, floor = frame.message, self.floor
        kind = request.WhichOneof("kind")
        if kind == "beat":
            # One that overtakes nothing may come after the goodbye, whose answer is still on its way.
            self._check_member(request, parting=True)
            floor.ledger.heard(request.worker, request.beat.figures)
            respond(Frame(pb.Reply(about=self.absent())))
            return None
        if kind == "status":
            respond(Frame(pb.Reply(about=json.dumps(self.status()))))
            return None
        if kind in ("look", "choose") and not floor.ending.suspended:
            answer = self.resuming.look if kind == "look" else self.resuming.choose
            respond(Frame(answer(request)))
            return None
        outbox: Outbox = []
        try:
            with floor.lock, floor.ledger.request(frame, outbox):
                if floor.ending.suspended:
                    return None  # unanswered, it is asked again when the server is there again
                if kind not in self._handlers:
                    raise ProtocolError("a request of an unknown kind", where=str(floor.endpoint))
                if kind == "hello":
                    self.resuming.refuse_early()
                else:
                    self._check_member(request, parting=kind == "bye")
                    self._keeping.compare(kind, request, outbox)
                    self._keeping.note(kind, frame, outbox)
                self._handlers[kind](Arrival(frame, respond, outbox))
                self._meeting.refuse_standstill(outbox)
                self._recalling.answer_ready(outbox)
                self._keeping.begin_if_due()
        finally:
            # A refusal of this request travels as the exception; what became possible before it still leaves.
            floor.send(outbox, secure=kind in NOTED or (floor.job is not None and floor.job.policy.remembers_reads))
        return floor.settle

    def _again(self, frame: Frame) -> None:
        self.handle(frame, nobody)

    def _check_member(self, request: Any, *, parting: bool) -> None:
        self.floor.ending.refuse_if_failed(request.worker)
        self.floor.roll.check(request, parting=parting)

    def tick(self) -> None:
        """Let time pass."""
        floor, now = self.floor, self.floor.clock.now()
        outbox: Outbox = []
        with floor.lock:
            self._leaving.tick(now, outbox)
            self._meeting.refuse_standstill(outbox)
            self._recalling.answer_ready(outbox)
            if floor.job is not None:
                floor.job.claims.tick(now, outbox)
        floor.send(outbox)
        floor.sync(lambda memory: memory.sync_if_due(now))

    def await_the_first(self) -> None:
        """From now on workers are expected, and time passes."""
        self._leaving.await_the_first()

    def stop(self, reason: str) -> None:
        """End the job from outside, as a signal does; one that is kept on disk goes on when its server does."""
        floor = self.floor
        outbox: Outbox = []
        with floor.lock:
            if floor.memory is not None and not floor.ending.over:
                floor.ending.suspend()
                return
            floor.fail(JobAbortedError(f"server {floor.endpoint} was stopped", got=reason), outbox)
        floor.send(outbox)

    def close(self) -> None:
        """After the last request: keep what has to be kept."""
        self._keeping.close()

    @property
    def failure(self) -> FleetError | None:
        """Why the job ended, if it did not end well."""
        return self.floor.ending.failure

    def absent(self) -> str:
        """Which workers have not come yet, in words."""
        return self._telling.absent()

    def explain(self) -> str:
        """What this server is waiting for, in words."""
        return self._telling.explain()

    def status(self) -> dict[str, Any]:
        """How the job does, as far as this server sees it, for whoever shows it."""
        return self._telling.status()
