"""What is acknowledged is kept: the journal and the snapshots of a durable server, around its requests.

Requests that change anything are noted before they are carried out, and snapshots begun between two of them; a server
that starts again does over what it finds. Without FLEET_DURABLE_DIR there is nothing to do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet.errors import ConfigurationError, FleetError, ServerLostError
from fleet.plan.specs import JobSpec
from fleet.ps.server.context import Floor
from fleet.ps.server.job import Job, Origin, new_job
from fleet.ps.server.pending import Outbox
from fleet.ps.server.snapshots import Snapshots
from fleet.ps.wire.frame import Frame

_log = logging.getLogger("fleet.server")


class Keeping:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._snapshots = None if floor.memory is None else Snapshots(floor, floor.memory)

    def compare(self, kind: str, request: Any, outbox: Outbox) -> None:
        """See to it that nobody waits for what is lost: a server that has gone on may have kept less than it had
        acknowledged, which shows in what its workers take for granted. The job ends with that, but where each worker
        goes at its own pace, and nothing depends on what it was given: there it goes on without the steps that are
        gone."""
        memory = self._floor.memory
        if memory is None or not memory.goes_on or kind == "abort":
            return
        job, worker = self._floor.running(), request.worker
        known = request.step - (kind in ("push", "part"))
        kept = job.gate.clocks.get(worker, known)  # of one that has said goodbye nothing is expected
        if kept < known and job.policy.may_lose_steps:
            if not memory.replaying:
                told = "%s: goes on without steps %d to %d of worker %d, which were acknowledged and not kept (%s)"
                _log.warning(told, self._floor.endpoint, kept + 1, known, worker, self._policy)
            self._floor.carry_out(job.gate.make_up(worker, known), worker, outbox)
        elif kept < known:
            raise self._lost(worker, f"step {known}", f"step {kept}", outbox)
        if kind == "gather" and request.gather.number - 1 > job.hall.reached(worker):
            met, kept = request.gather.number - 1, job.hall.reached(worker)
            raise self._lost(worker, f"gathering {met}", f"gathering {kept}", outbox)
        if worker == 0 and kind in ("pull", "push") and self._waits_for_first(job, kind, request):
            raise self._lost(worker, "initial values", "none", outbox)

    @staticmethod
    def _waits_for_first(job: Job, kind: str, request: Any) -> bool:
        """Whether a request of worker 0 would wait for values that worker 0 has brought already: it asks for none, and
        trains on none, before they are acknowledged."""
        if not job.initialized:
            return not job.began.id
        return job.growing and request.worker not in job.outgrown and (kind == "push" or request.pull.dense)

    def _lost(self, worker: int, known: str, kept: str, outbox: Outbox) -> FleetError:
        floor, memory = self._floor, self._floor.memory
        assert memory is not None
        failure = ServerLostError(
            "a server has kept less than it had acknowledged",
            where=f"{floor.endpoint}, {memory.directory}",
            expected=f"{known}, which worker {worker} takes for granted",
            got=f"{kept} ({self._policy})",
            todo="Start the whole job again, from its last checkpoint if there is one. With FLEET_DURABLE_SYNC=always "
            "nothing is lost when a machine stops.",
        )
        floor.fail(failure, outbox)
        return failure

    @property
    def _policy(self) -> str:
        return f"FLEET_DURABLE_SYNC={self._floor.knobs.durable_sync}"

    def note(self, kind: str, frame: Frame, outbox: Outbox) -> None:
        """Have a request that changes anything in the journal, before it does."""
        self._keep(lambda kept: kept.memory.note(kind, frame), outbox)

    def note_origin(self, origin: Origin, outbox: Outbox) -> None:
        """Have in the journal, before the first hello, what the job begins with."""
        self._keep(lambda kept: kept.memory.begun(origin), outbox)

    def note_lost(self, worker: int, outbox: Outbox) -> None:
        self._keep(lambda kept: kept.memory.lost(worker), outbox)

    def take(self, outbox: Outbox) -> None:
        """Take a snapshot of what the journal says nothing of: where the job's values came from."""
        self._keep(lambda kept: kept.take_now(), outbox)

    def begin_if_due(self) -> None:
        """Let go of what is finished, and have a snapshot taken if it is time for one."""
        if self._snapshots is not None and self._floor.job is not None:
            self._snapshots.memory.settle(self._floor.job)  # at once: what is held on to is memory for the next request
            self._snapshots.begin_if_due()

    def close(self) -> None:
        """After the last request: keep what has to be kept."""
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots.memory.end(over=self._floor.ending.over)

    def _keep(self, act: Callable[[Snapshots], None], outbox: Outbox) -> None:
        if self._snapshots is None:
            return
        try:
            act(self._snapshots)
        except OSError as error:
            raise self._floor.cannot_keep(error, outbox) from None


def resume(
    floor: Floor,
    *,
    begin_with: Callable[[Origin], None],
    ask: Callable[[Frame], None],
    hand_out: Callable[[Frame], None],
    lose: Callable[[int], None],
) -> None:
    """Be where the server was whose memory this one has: ``begin_with`` the checkpoint its job began with, if any,
    ``ask`` it what it was asked, ``hand_out`` what its workers were given, ``lose`` whom it gave up on."""
    memory = floor.memory
    if memory is None:
        return
    state = memory.known()
    if state is not None:
        spec = JobSpec.from_json(state["spec"])
        floor.job = new_job(spec, state["job_id"], str(floor.endpoint), floor.knobs.rpc_deadline_s)
        # Versions that noted no placement dealt as this one does, where they did not hash.
        unsaid = floor.job.plan.placement if spec.settings.split_method == "RoundRobin" else None
        if state.get("placement", unsaid) != floor.job.plan.placement:
            raise _placed_otherwise(memory.directory)
        memory.resume(floor.job, state, floor.clock.now())
        floor.roll.resume(spec.settings, state["members"])

    def again(act: Callable[[Frame], None]) -> Callable[[Frame], None]:
        def redo(request: Frame) -> None:
            if floor.job is None and request.message.WhichOneof("kind") != "hello":
                # There was a job: its first hello is refused now, and what followed would be dropped without a word.
                raise _placed_otherwise(memory.directory)
            with contextlib.suppress(FleetError):  # it was refused then as well
                act(request)

        return redo

    memory.replay(floor.running, begin_with, again(ask), again(hand_out), lose)
    job = floor.job
    if job is None:
        return
    floor.roll.surmise()
    floor.ending.tell_again()
    if floor.knobs.job_id not in ("", job.job_id):
        raise ConfigurationError(
            "the state of another job is kept here",
            where=str(memory.directory),
            expected=f"job {floor.knobs.job_id!r} (FLEET_JOB_ID)",
            got=f"job {job.job_id!r}",
            todo=f"Set FLEET_JOB_ID={job.job_id} everywhere to go on with it; if it is over, remove the directory, or "
            "let this job keep its state elsewhere (FLEET_DURABLE_DIR).",
        )
    _log.warning("%s: goes on from %s, at version %d", floor.endpoint, memory.directory, job.gate.version)


def _placed_otherwise(directory: Path) -> ConfigurationError:
    return ConfigurationError(
        "the state that is kept here is of a version of this package that gave servers other parts of the parameters",
        where=str(directory),
        todo="Go on with that version; or remove the directory and start the job from its last checkpoint, which does "
        "not depend on it.",
    )
