"""What is acknowledged is kept: the journal and the snapshots of a durable server, around its requests.

Requests that change anything are noted before they are carried out, and snapshots begun between two of them; a server
that starts again does over what it finds. Without FLEET_DURABLE_DIR there is nothing to do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from fleet.errors import ConfigurationError, FleetError
from fleet.ps.server.floor import Floor
from fleet.ps.server.job import new_job
from fleet.ps.server.snapshots import Snapshots
from fleet.ps.server.waiting import Outbox
from fleet.ps.wire.frame import Frame
from fleet.transpiler.specs import JobSpec

_log = logging.getLogger("fleet.server")


class Keeping:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._snapshots = None if floor.memory is None else Snapshots(floor, floor.memory)

    def note(self, kind: str, frame: Frame, outbox: Outbox) -> None:
        """Have a request that changes anything in the journal, before it does."""
        self._keep(lambda kept: kept.memory.note(kind, frame), outbox)

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
    floor: Floor, *, ask: Callable[[Frame], None], hand_out: Callable[[Frame], None], lose: Callable[[int], None]
) -> None:
    """Be where the server was whose memory this one has: ``ask`` it what it was asked, ``hand_out`` what its workers
    were given, ``lose`` whom it gave up on."""
    memory = floor.memory
    if memory is None:
        return
    state = memory.known()
    if state is not None:
        spec = JobSpec.from_json(state["spec"])
        floor.job = new_job(spec, state["job_id"], str(floor.endpoint), floor.knobs.rpc_deadline_s)
        memory.resume(floor.job, state, floor.clock.now())
        floor.roll.resume(spec.settings, state["members"])

    def again(act: Callable[[Frame], None]) -> Callable[[Frame], None]:
        def redo(request: Frame) -> None:
            with contextlib.suppress(FleetError):  # it was refused then as well
                act(request)

        return redo

    memory.replay(floor.running, again(ask), again(hand_out), lose)
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
