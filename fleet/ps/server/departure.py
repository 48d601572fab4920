"""How workers leave: with a goodbye, with the reason why the job has failed, by falling silent, or by never coming."""

from __future__ import annotations

import logging

from fleet.errors import DeadlineError, FleetError, JobAbortedError
from fleet.ps.consistency.membership import Lost, NeverCame
from fleet.ps.server.context import Floor
from fleet.ps.server.durability import Keeping
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")

#: So much of a traceback is passed on.
MOST_REASON = 32 << 10


class Departure:
    def __init__(self, floor: Floor, keeping: Keeping) -> None:
        self._floor = floor
        self._keeping = keeping
        self._began_at = floor.clock.now()

    def await_the_first(self) -> None:
        """Count the time for the first worker from now on."""
        self._began_at = self._floor.clock.now()

    def bye(self, arrival: Arrival) -> None:
        arrival.answer(pb.Reply())
        self._floor.ending.tell([arrival.worker])
        if self._floor.roll.leave(arrival.worker):
            self._departed(arrival.worker, arrival.outbox)

    def abort(self, arrival: Arrival) -> None:
        reason = f"worker {arrival.worker} failed and ended the job"
        told = arrival.request.abort.reason[:MOST_REASON]
        self._floor.fail(JobAbortedError(reason, got=told), arrival.outbox, by_worker=True)
        self._floor.ending.tell([arrival.worker])
        arrival.answer(pb.Reply())

    def tick(self, now: float, outbox: Outbox) -> None:
        """Give up on who is silent, and on a job that cannot start."""
        floor = self._floor
        effects = floor.roll.tick(now)
        if floor.roll.is_empty and now - self._began_at > floor.knobs.startup_deadline_s:
            floor.fail(self._nobody_came(), outbox)
        for effect in effects:
            if isinstance(effect, NeverCame):
                floor.fail(self._never_came(effect), outbox)
            elif floor.running().plan.spec.settings.needs_all_workers:
                floor.fail(self._was_needed(effect), outbox)
            else:
                told = "%s: worker %d was silent for %.1f s and is given up on; the others go on without it"
                _log.warning(told, floor.endpoint, effect.worker, effect.silent_s)
                self.lose(effect.worker, outbox)

    def lose(self, worker: int, outbox: Outbox) -> None:
        """A worker is given up on."""
        try:
            self._keeping.note_lost(worker, outbox)
        except JobAbortedError:  # everybody is told
            return
        self._floor.roll.lose(worker)
        self._departed(worker, outbox)

    def _departed(self, worker: int, outbox: Outbox) -> None:
        floor, job = self._floor, self._floor.running()
        if worker == 0 and (job.growing or not job.initialized):
            floor.fail(JobAbortedError("worker 0 left before it had sent the initial values"), outbox)
            return
        floor.drop_requests(worker, outbox)
        floor.carry_out(job.gate.leave(worker), worker, outbox)
        floor.answer(job.hall.leave(worker), worker, outbox)
        if floor.roll.is_finished and not floor.ending.over:
            floor.ending.end()

    def _was_needed(self, effect: Lost) -> FleetError:
        return JobAbortedError(
            f"worker {effect.worker} fell silent, and the job needs all workers",
            where=str(self._floor.endpoint),
            expected=f"a sign of life every {self._floor.knobs.beat_s:g} s",
            got=f"none for {effect.silent_s:.1f} s",
            todo="See what that worker says last in its log, and start the job again, from its last checkpoint.",
        )

    def _nobody_came(self) -> FleetError:
        where, within_s = str(self._floor.endpoint), self._floor.knobs.startup_deadline_s
        refusals = self._floor.roll.refusals
        if refusals:
            return DeadlineError(
                "every worker that came was refused",
                where=where,
                expected=f"one that fits within {within_s:g} s",
                got="; ".join(refusals).rstrip("."),
                todo="Start servers and workers again, all with the same settings.",
            )
        return DeadlineError(
            "no worker said hello",
            where=where,
            expected=f"the first one within {within_s:g} s",
            todo="Start the workers, and give them this server's endpoint.",
        )

    def _never_came(self, effect: NeverCame) -> FleetError:
        names = ", ".join(f"worker {worker}" for worker in effect.workers)
        return JobAbortedError(
            f"{names} did not say hello",
            where=str(self._floor.endpoint),
            expected=f"every worker within {self._floor.knobs.startup_deadline_s:g} s of the first",
            got="; ".join(effect.refusals) or None,
            todo="Start every worker, and let them reach every server.",
        )
