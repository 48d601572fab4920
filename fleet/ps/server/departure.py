"""Workers leave: with a goodbye, with the reason why the job has failed, by falling silent, or by never coming."""

from __future__ import annotations

import logging

from fleet.base.clock import Clock
from fleet.base.settings import ProcessSettings
from fleet.errors import DeadlineError, FleetError, JobAbortedError
from fleet.ps.consistency.membership import Lost, NeverCame
from fleet.ps.server.durability.durability import Durability
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")

#: So much of a traceback is passed on.
MOST_REASON = 32 << 10


class Departure:
    def __init__(
        self,
        where: str,
        settings: ProcessSettings,
        clock: Clock,
        end: JobEnd,
        members: Members,
        durability: Durability | None,
        steps: StepRequests,
    ) -> None:
        self._where = where
        self._settings = settings
        self._clock = clock
        self._end = end
        self._members = members
        self._durability = durability
        self._steps = steps
        self._began_at = clock.now()
        #: why a job that this server asked for a share has not given it one
        self.not_taken_in = ""

    def await_the_first(self) -> None:
        """Count the time for the first worker from now on."""
        self._began_at = self._clock.now()

    def bye(self, job: Job, arrival: Arrival) -> None:
        """Let a worker go."""
        arrival.answer(pb.Reply())
        self._end.inform([arrival.worker])
        if self._members.leave(arrival.worker):
            self._departed(job, arrival.worker, arrival.outbox)

    def abort(self, job: Job, arrival: Arrival) -> None:
        """End the job, as a worker has failed."""
        what = f"worker {arrival.worker} failed and ended the job"
        reason = arrival.request.abort.reason[:MOST_REASON]
        self._end.fail(JobAbortedError(what, got=reason), job, arrival.outbox, by_worker=True)
        self._end.inform([arrival.worker])
        arrival.answer(pb.Reply())

    def tick(self, job: Job | None, now: float, outbox: Outbox) -> None:
        """Give up on workers that are silent, and on a job that cannot start."""
        effects = self._members.tick(now)
        if self._members.is_empty and now - self._began_at > self._settings.startup_deadline_s:
            self._end.fail(self._nobody_came(), job, outbox)
        for effect in effects:
            assert job is not None, "a member exists only with a job"
            if isinstance(effect, NeverCame):
                self._end.fail(self._never_came(effect), job, outbox)
            elif job.plans.current.spec.settings.needs_all_workers:
                self._end.fail(self._was_needed(effect), job, outbox)
            else:
                text = "%s: worker %d was silent for %.1f s and is given up on; %s"
                what_follows = "the job ends" if _brings_values(job, effect.worker) else "the others go on without it"
                _log.warning(text, self._where, effect.worker, effect.silent_s, what_follows)
                self.lose(job, effect.worker, outbox, effect.silent_s)

    def lose(self, job: Job, worker: int, outbox: Outbox, silent_s: float | None = None) -> None:
        """Give up on a worker; ``silent_s`` is how long it was silent, as far as that is known."""
        if self._durability is not None:
            try:
                self._durability.note_lost(job, worker, outbox)
            except JobAbortedError:  # everybody hears of it
                return
        self._members.lose(worker)
        if _brings_values(job, worker):
            self._end.fail(self._fell_silent(silent_s), job, outbox)
        else:
            self._departed(job, worker, outbox)

    def _departed(self, job: Job, worker: int, outbox: Outbox) -> None:
        if _brings_values(job, worker):
            error = JobAbortedError(
                "worker 0 left before it had sent the initial values",
                where=self._where,
                todo="Look at its output, as its script ended early, and start the job again.",
            )
            self._end.fail(error, job, outbox)
            return
        job.drop(worker, outbox)
        self._steps.carry_out(job, job.rounds.gate.leave(worker), worker, outbox)
        self._steps.answer(job, job.reductions.leave(worker), worker, outbox)
        if self._members.is_finished and not self._end.over:
            self._end.end()

    def _fell_silent(self, silent_s: float | None) -> FleetError:
        return JobAbortedError(
            "worker 0 fell silent before it had sent the initial values",
            where=self._where,
            expected=f"a sign of life every {self._settings.heartbeat_s:g} s, and in "
            f"{self._settings.rpc_deadline_s:g} s at the latest (FLAGS_rpc_deadline)",
            got=None if silent_s is None else f"none for {silent_s:.1f} s",
            todo="See what it says last in its log, and whether its machine was too busy; then start the job again.",
        )

    def _was_needed(self, effect: Lost) -> FleetError:
        return JobAbortedError(
            f"worker {effect.worker} fell silent, and the job needs all workers",
            where=self._where,
            expected=f"a sign of life every {self._settings.heartbeat_s:g} s",
            got=f"none for {effect.silent_s:.1f} s",
            todo="See what that worker says last in its log, and start the job again, from its last checkpoint.",
        )

    def _nobody_came(self) -> FleetError:
        where, within_s = self._where, self._settings.startup_deadline_s
        if self.not_taken_in:
            return DeadlineError(
                "the job has not taken this server in",
                where=where,
                expected=f"a share of it within {within_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                got=self.not_taken_in.rstrip("."),
                todo="Mend that and start this server again.",
            )
        refusals = self._members.refusals
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
            where=self._where,
            expected=f"every worker within {self._settings.startup_deadline_s:g} s of the first",
            got="; ".join(effect.refusals) or None,
            todo="Start every worker, and let them reach every server.",
        )


def _brings_values(job: Job, worker: int) -> bool:
    """Say whether the others wait for values that this worker alone brings."""
    return worker == 0 and (job.plans.growing or not job.initialized)
