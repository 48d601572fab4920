"""A durable server writes its journal before it carries a request out, and a snapshot when the journal is long; it
reads both when it starts again.

A snapshot shows the moment at which it is begun, between two requests; the journal changes at that moment as well.
Parameters are copied then, and rows are kept as they are (frozen_view.py) until they are written, beside the requests
that follow. One snapshot is written at a time. It is given up when other values take the place of those it shows, and
when the server ends: the journal has everything.

A server without FLEET_DURABLE_DIR has none of this.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from fleet.base.clock import Clock
from fleet.base.settings import ProcessSettings
from fleet.base.system_errors import is_full, reason
from fleet.errors import ConfigurationError, FleetError, JobAbortedError, ServerLostError
from fleet.plan.plan import PROTOCOL
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.gate import Effect
from fleet.ps.server.checkpoint_reader import Origin
from fleet.ps.server.checkpoint_share import write_pieces
from fleet.ps.server.durability.snapshot import (
    Shot,
    carried_over,
    is_unfinished,
    parameters_of,
    recall,
    restore,
    signed,
    state_of,
)
from fleet.ps.server.durability.state_directory import Kind, StateDirectory, of_another_version
from fleet.ps.server.job import Job, new_job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Outbox
from fleet.ps.table.shard import MakeShard, Piece, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame

_log = logging.getLogger("fleet.server")

#: Requests that change what a server would do next.
NOTED = frozenset(
    (
        *("hello", "upload", "ready", "extend", "push", "gather", "claim", "release", "settle", "give", "bye", "abort"),
        *("shrink", "cut", "place", "clip"),
    )
)


#: Requests of a move to other servers, which are written down where they have changed anything.
MOVING = frozenset(("halt", "stage", "fill", "switch"))


#: And those of which some decide.
_DECIDING = frozenset(("halt", "fill", "switch", "where", "claim", "release"))


def decides(kind: str, request: Any) -> bool:
    """Say whether what becomes of a move, or of what one worker does for all, depends on it that all is kept by the
    time that a request is answered. Of pieces that is the last: one that lacks others is refused."""
    return kind in _DECIDING and (kind != "fill" or bool(request.fill.state))


class _GivenUpError(Exception):
    """Says that nobody wants this snapshot any more."""


class Durability:
    def __init__(
        self,
        directory: StateDirectory,
        lock: AbstractContextManager[object],
        end: JobEnd,
        members: Members,
        clock: Clock,
        settings: ProcessSettings,
        where: str,
        cannot_sync: Callable[[FleetError], None],
    ) -> None:
        """``lock`` is the server's, under which every method is called that says nothing else; ``cannot_sync`` ends the
        job on a thread that does not hold it."""
        self._directory = directory
        self._lock = lock
        self._end = end
        self._members = members
        self._clock = clock
        self._settings = settings
        self._where = where
        self._cannot_sync = cannot_sync
        #: pushes and gatherings that may not be finished, by what tells them apart
        self._unfinished: dict[tuple[str, int, int], Frame] = {}
        #: whether the journal is being done over
        self.replaying = False
        #: whether there is anything from before
        self.goes_on = False
        #: whether a server from which the job has moved here had anything from before
        self._takes_over_what_goes_on = False
        #: the last heartbeats, which say how many of their pushes workers take for granted
        self._heard: dict[int, Any] = {}
        #: the shard that the last snapshot is of, and the epoch that began with it
        self._kept: tuple[Shard | None, int] = (None, 0)
        self._writer: threading.Thread | None = None
        #: the number of the last snapshot, unless it was given up
        self._wanted: int | None = None
        self._closed = False
        #: a job that has moved to this server, of which there is no snapshot yet
        self._moved: Job | None = None

    @property
    def directory(self) -> Path:
        return self._directory.directory

    # ---------------------------------------------------------------- the journal

    def note(self, job: Job | None, kind: str, frame: Frame, outbox: Outbox) -> None:
        """Write a request that changes anything into the journal, before it does."""
        if kind not in NOTED:
            return
        self._record(Kind.REQUEST, frame.buffers, job, outbox)
        message = frame.message
        if kind == "push":
            self._unfinished[kind, message.worker, message.step] = frame
        elif kind == "gather":
            self._unfinished[kind, message.worker, message.gather.number] = frame

    def note_move(self, job: Job | None, frame: Frame, outbox: Outbox) -> None:
        """Write down what is about to be done for a move to other servers. A server that is killed knows then whether
        it stands still, what it is to take over, and whether the move was made."""
        self._record(Kind.REQUEST, frame.buffers, job, outbox)
        if job is not None:
            job.moves.is_noted = True

    def takes_over(self, push: Frame) -> None:
        """Know a push that has come with a job that moves here, and is not finished."""
        self._unfinished["push", push.message.worker, push.message.step] = push

    def has_moved(self, job: Job, *, may_lack_steps: bool) -> None:
        """Take a snapshot soon: what is in the journals led to another job than this one is now. One of the servers
        that it comes from ``may_lack_steps``."""
        self._moved, self._takes_over_what_goes_on = job, may_lack_steps
        self._directory.make_due()

    def forget_moves(self) -> None:
        """Drop all that was written of moves to this server, which has no job: nothing came of them."""
        if self.replaying:
            return
        try:
            self._directory.empty()
        except OSError as error:
            raise self._end_as(self._cannot_keep(error, "an empty journal"), None, []) from None

    def note_origin(self, origin: Origin, outbox: Outbox) -> None:
        """Write into the journal, before the first hello, what the job begins with."""
        self._record(Kind.ORIGIN, lambda: [json.dumps(astuple(origin)).encode()], None, outbox)

    def note_lost(self, job: Job, worker: int, outbox: Outbox) -> None:
        """Write into the journal that a worker is given up on."""
        self._record(Kind.LOST, lambda: [worker.to_bytes(4, "little")], job, outbox)

    def note_handed(self, job: Job, request: Frame, outbox: Outbox) -> None:
        """Write into the journal that the answer to a request is about to be made, and remembered."""
        self._record(Kind.HANDED, request.buffers, job, outbox)

    def _record(self, kind: Kind, buffers: Callable[[], list[Any]], job: Job | None, outbox: Outbox) -> None:
        if self.replaying:
            return
        record = buffers()
        try:
            self._directory.record(kind, record)
        except OSError as error:
            wanted = f"{sum(memoryview(each).nbytes for each in record)} more bytes of its journal"
            raise self._end_as(self._cannot_keep(error, wanted), job, outbox) from None

    def secure(self, *, surely: bool) -> FleetError | None:
        """Put on the disk what has to be there before anybody hears of it, as FLEET_DURABLE_SYNC says, or ``surely``
        unless that leaves it to the system. Called without the lock, as it may take long."""
        return self._synced(lambda: self._directory.secure(surely=surely))

    def sync_if_due(self, now: float) -> None:
        """Put the journal on the disk from time to time. Called without the lock."""
        self._synced(lambda: self._directory.sync_if_due(now))

    def _synced(self, sync: Callable[[], None]) -> FleetError | None:
        try:
            sync()
        except OSError as error:
            failure = self._cannot_keep(error, "its journal on the disk")
            self._cannot_sync(failure)
            return failure
        return None

    def _cannot_keep(self, error: OSError, wanted: str) -> FleetError:
        """Return why the job ends: what cannot be kept on the disk must not be acknowledged either."""
        return JobAbortedError(
            f"server {self._where} cannot keep what it does",
            where=str(self.directory),
            expected=wanted,
            got=reason(error),
            todo=f"{'Make room on' if is_full(error) else 'Look at'} that disk, or name another one "
            "(FLEET_DURABLE_DIR). Then start the job again, from its last checkpoint if there is one.",
        )

    def _end_as(self, failure: FleetError, job: Job | None, outbox: Outbox) -> FleetError:
        self._end.fail(failure, job, outbox)
        return failure

    # ---------------------------------------------------------------- what a machine that stopped has lost

    @property
    def may_lack_steps(self) -> bool:
        """Say whether there may be less here than workers were told: the server was stopped, or one was where the job
        has been before."""
        return self.goes_on or self._takes_over_what_goes_on

    def compare(self, job: Job, kind: str, request: Any, outbox: Outbox) -> list[Effect]:
        """Make sure that nobody waits for a lost step. A server that has gone on may have kept less than it had
        acknowledged, which shows in what its workers take for granted. That ends the job, unless each worker goes at
        its own pace and nothing depends on what it was given: such a job goes on without the lost steps."""
        if kind in ("place", "halt"):
            self._compare_places(job, request, outbox)
        if not self.may_lack_steps or kind == "abort":
            return []
        worker, effects = request.worker, []
        gate = job.rounds.gate
        known = request.step - (kind in ("push", "part"))
        kept = gate.clocks.get(worker, known)  # of one that has said goodbye nothing is expected
        if kept < known and job.policy.may_lose_steps:
            if not self.replaying:
                text = "%s: goes on without steps %d to %d of worker %d, which were acknowledged and not kept (%s)"
                _log.warning(text, self._where, kept + 1, known, worker, self._policy)
            effects = gate.make_up(worker, known)
            # Other servers have them: whoever takes the worker's place does not take them once more.
            job.progress.steps[worker] = job.progress.steps.get(worker, 0) + known - kept
        elif kept < known:
            raise self._lost(job, worker, f"step {known}", f"step {kept}", outbox)
        if kind == "push" and job.policy.shares_steps and gate.version < known:  # what others had pushed is not kept
            raise self._lost(job, worker, f"update {known}", f"update {gate.version}", outbox)
        if kind == "place":  # it tells of others' pushes too, and may be the first to do so
            clocks = gate.clocks
            for buffer in request.place.buffers:
                for whose, step in zip(buffer.workers, buffer.steps, strict=False):
                    if step > clocks.get(whose, step) + 1:
                        raise self._lost(job, whose, f"step {step - 1}", f"step {clocks[whose]}", outbox)
        if kind == "gather" and request.gather.number - 1 > job.reductions.reached(worker):
            met, kept = request.gather.number - 1, job.reductions.reached(worker)
            raise self._lost(job, worker, f"gathering {met}", f"gathering {kept}", outbox)
        if _lacks_values(job, kind, request, known):
            raise self._lost(job, worker, "initial values", "none", outbox)
        return effects

    def _compare_places(self, job: Job, request: Any, outbox: Outbox) -> None:
        """Make sure that the first server has not lost a push of which updates were made, also here. Its worker takes
        that step once more, and is given another place for it."""
        for buffer in (*request.place.buffers, *request.halt.buffers):
            for whose, step in zip(buffer.workers, buffer.steps, strict=False):
                if job.rounds.gate.is_elsewhere(buffer.version, whose, step):
                    push = f"step {step} of worker {whose}"
                    known, kept = f"{push} in the update that it was part of", f"{push} in update {buffer.version + 1}"
                    raise self._kept_less(job, ", ".join(job.moves.servers[:1]), known, kept, outbox)

    def hear(self, beat: Any) -> None:
        """Note what a worker's heartbeat takes for granted; the lock is not needed."""
        self._heard[beat.worker] = beat

    def heard(self) -> list[Any]:
        """Return, once, the last heartbeats; another process in a worker's place takes less for granted."""
        heard, self._heard = self._heard, {}
        return [beat for beat in heard.values() if self._members.has(beat)]

    def _lost(self, job: Job, worker: int, known: str, kept: str, outbox: Outbox) -> FleetError:
        expected = f"{known}, which worker {worker} takes for granted"
        return self._kept_less(job, f"{self._where}, {self.directory}", expected, kept, outbox)

    def _kept_less(self, job: Job, where: str, expected: str, kept: str, outbox: Outbox) -> FleetError:
        failure = ServerLostError(
            "a server has kept less than it had acknowledged",
            where=where,
            expected=expected,
            got=f"{kept} ({self._policy})",
            todo="Start the whole job again, from its last checkpoint if there is one. With FLEET_DURABLE_SYNC=always "
            "nothing is lost when a machine stops.",
        )
        return self._end_as(failure, job, outbox)

    @property
    def _policy(self) -> str:
        return f"FLEET_DURABLE_SYNC={self._settings.durable_sync}"

    # ---------------------------------------------------------------- snapshots

    def begin_if_due(self, job: Job) -> None:
        """Drop what is finished, and begin a snapshot if it is time for one and none is being written."""
        self._forget_finished(job)  # at once: what is held on to is memory for the next request
        if self._is_due(job) and (self._writer is None or not self._writer.is_alive()):
            name = f"fleet-snapshot-{self._where}"
            self._writer = threading.Thread(target=lambda: self._take_behind(job), name=name, daemon=True)
            self._writer.start()

    def take_now(self, job: Job, outbox: Outbox) -> None:
        """Take a snapshot before anything else is done, as the journal does not have everything."""
        try:
            shot = self._begin(job, behind=False)
            self._write(shot, contextlib.nullcontext(), behind=False)
        except OSError as error:
            raise self._end_as(self._cannot_keep(error, "a snapshot"), job, outbox) from None

    def _forget_finished(self, job: Job) -> None:
        self._unfinished = {key: frame for key, frame in self._unfinished.items() if is_unfinished(job, *key)}

    def _is_due(self, job: Job) -> bool:
        """Say whether it is time for a snapshot, and everything is there that one is made of. None can be taken while a
        worker that has left has a part in something unfinished: what it brought would be refused when that is done
        over.
        """
        if self._closed or self._end.begun or not job.is_whole or self.replaying or not self._directory.is_due:
            return False
        if job.rounds.due or job.rounds.edits or job.moves.is_noted or job.moves.is_left:
            return False
        self._forget_finished(job)
        clocks = job.rounds.gate.clocks
        return all(worker in clocks for _, worker, _ in self._unfinished)

    def _take_behind(self, job: Job) -> None:
        if self._synced(self._directory.sync) is not None:  # now, lest it take long under the lock
            return
        try:
            with self._lock:
                if not self._is_due(job):
                    return
                shot = self._begin(job, behind=True)
            self._write(shot, self._lock, behind=True)
        except _GivenUpError:
            pass
        except Exception as error:
            told = (self._where, self.directory, error)
            _log.warning("%s: no snapshot could be taken in %s, and the journal grows: %r", *told)

    def _begin(self, job: Job, *, behind: bool) -> Shot:
        """Begin a snapshot of a job whose parameters are all there, as they are now."""
        shard = job.shard
        assert shard is not None
        self._forget_finished(job)
        members = self._members.dump()
        self._unfinished = signed(self._unfinished, members)
        state = state_of(job, shard, members, self._unfinished)
        (last, since), whole = self._kept, sum(len(table) * table.row_bytes for table in shard.tables)
        on_top = last is shard and self._directory.table_bytes < 2 * whole and shard.history.knows_removed(since)
        epoch = shard.history.next_epoch()
        shard.history.goes_on_from("snapshot", *((since, epoch) if on_top else (epoch,)))
        carried = carried_over(job, shard, self._unfinished)
        parameters, rows = parameters_of(shard, since if on_top else 0)
        draft = self._directory.begin(state, carried, on_top=on_top, behind=behind)
        frozen = shard.freeze(since if on_top else 0, draft.pieces.add)
        self._wanted = draft.number
        return Shot(draft, shard, epoch, parameters, rows, frozen)

    def _write(self, shot: Shot, lock: AbstractContextManager[object], *, behind: bool) -> None:
        """Write all of a snapshot; ``lock`` is held around what has to do with the job."""

        def export(cursor: str) -> Piece:
            with lock:
                self._check_wanted(shot)
                return shot.export(cursor)

        try:
            with shot.draft.pieces as pieces:
                for piece in shot.parameters:
                    pieces.add(piece.about, piece.tensors)
                write_pieces(pieces, shot.rows, export, self._clock, behind=behind)
            snapshot = self._directory.publish(shot.draft)
        except Exception:
            self._directory.discard(shot.draft)
            with lock:
                self._check_wanted(shot)  # else a failure is nobody's concern
            raise
        finally:
            with lock:
                shot.frozen.leave()
        with lock:
            self._check_wanted(shot)  # else it may stay: it leads to where others do
            self._directory.adopt(shot.draft, snapshot)
            self._kept = shot.shard, shot.epoch
            if self._moved is not None and self._moved.shard is shot.shard:
                self._moved = None
            shot.shard.history.goes_on_from("snapshot", shot.epoch)
        self._directory.clean()

    def _check_wanted(self, shot: Shot) -> None:
        if self._wanted != shot.draft.number:
            raise _GivenUpError

    # ---------------------------------------------------------------- recovery

    def redo(
        self,
        running: Callable[[], Job | None],
        *,
        begin: Callable[[Job], None],
        make_shard: MakeShard,
        begin_with: Callable[[Origin], None],
        ask: Callable[[Frame], object],
        hand_out: Callable[[Job, Frame], None],
        lose: Callable[[Job, int], None],
    ) -> Iterator[None]:
        """Become the server whose directory this is, record by record: ``begin`` its job, or ``begin_with`` the
        checkpoint that it began with, ``ask`` what was asked, ``hand_out`` what workers were given, ``lose`` whom it
        gave up on."""
        self._begin_from_snapshot(begin, make_shard)
        self.replaying = True
        try:
            for kind, data in self._directory.records():
                self.goes_on = True
                if kind is Kind.ORIGIN:
                    begin_with(Origin(*json.loads(bytes(data))))
                elif kind is Kind.REQUEST:
                    frame = read_frame(pb.Request, [data])
                    if running() is None and frame.message.WhichOneof("kind") not in ("hello", *MOVING):
                        raise of_another_version(self.directory)
                    with contextlib.suppress(FleetError):  # it was refused then as well
                        ask(frame)
                else:
                    job = running()
                    if job is None:
                        # There was a job: its first hello is refused now, and the rest would be dropped without a word.
                        raise of_another_version(self.directory)
                    if kind is Kind.LOST:
                        lose(job, int.from_bytes(data, "little"))
                    elif kind is Kind.HANDED:
                        with contextlib.suppress(FleetError):
                            hand_out(job, read_frame(pb.Request, [data]))
                    else:
                        recall(job, kind, read_frame(pb.Reply, [data], limit=len(data)))
                yield
        finally:
            self.replaying = False

    def recover(self, redo: Iterator[None], running: Callable[[], Job | None]) -> None:
        """Do everything over, and go on from there."""
        for _ in redo:
            pass
        self.goes_on = self.goes_on or self._directory.snapshot is not None
        if (job := running()) is not None:
            job.claims.restarted()
            self._go_on(job)

    def _begin_from_snapshot(self, begin: Callable[[Job], None], make_shard: MakeShard) -> None:
        if self._directory.snapshot is None:
            return
        state = self._directory.snapshot.state
        # Workers go on as they spoke then, and so does the journal. What a later one says may not even be readable.
        if state.get("protocol") != PROTOCOL:
            raise of_another_version(self.directory)
        spec = JobSpec.from_json(state["spec"])
        most_bytes = self._settings.security.max_message_bytes
        job = new_job(spec, state["job_id"], self._where, most_bytes, self._settings.rpc_deadline_s)
        placement = job.plans.current.placement
        # Versions that noted no placement dealt as this one does, where they did not hash.
        if state.get("placement", placement if spec.settings.split_method == "RoundRobin" else None) != placement:
            raise of_another_version(self.directory)
        shard = restore(job, state, self._directory.pieces(), self._clock.now(), make_shard)
        epoch = shard.history.next_epoch()
        self._kept = shard, epoch
        shard.history.goes_on_from("snapshot", epoch)
        begin(job)
        self._members.restore(spec.settings, state["members"])

    def _go_on(self, job: Job) -> None:
        self._members.surmise()
        self._end.inform_again()
        ours = self._settings.job_id
        if ours not in ("", job.job_id):
            raise ConfigurationError(
                "the state of another job is kept here",
                where=str(self.directory),
                expected=f"job {ours!r} (FLEET_JOB_ID)",
                got=f"job {job.job_id!r}",
                todo=f"Set FLEET_JOB_ID={job.job_id} everywhere to go on with it; if it is over, remove the directory, "
                "or let this job keep its state elsewhere (FLEET_DURABLE_DIR).",
            )
        _log.warning("%s: goes on from %s, at version %d", self._where, self.directory, job.rounds.gate.version)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Keep what has to be kept, after the last request. Called without the lock."""
        self.stop_writing()
        if self._end.over and self._end.failure is None and self._moved is not None and self._directory.keeps_all:
            self._keep_the_end(self._moved)
        if self._end.over:
            self._directory.forget()
        else:
            self._directory.close()

    def _keep_the_end(self, job: Job) -> None:
        """Write a snapshot of a job that is over, so that there is one to run it again from."""
        try:
            with self._lock:
                shot = self._begin(job, behind=False)
            self._write(shot, self._lock, behind=False)
        except (OSError, FleetError) as error:
            _log.warning("%s: nothing is kept of the job since it has moved: %r", self._where, error)

    def stop_writing(self) -> None:
        """Give up the snapshot that is being written. Called without the lock."""
        with self._lock:
            self._closed, self._wanted = True, None
        if self._writer is not None:
            self._writer.join()


def is_replaying(durability: Durability | None) -> bool:
    """Say whether a server does over what its journal has."""
    return durability is not None and durability.replaying


def note_move(durability: Durability | None, job: Job | None, frame: Frame, outbox: Outbox) -> None:
    """Write down what is about to be done for a move, where anything is."""
    if durability is not None:
        durability.note_move(job, frame, outbox)


def _lacks_values(job: Job, kind: str, request: Any, known: int) -> bool:
    """Say whether values are not here that a worker has seen, which takes ``known`` steps for granted. Nobody trains on
    any, and worker 0 asks for none, before it has brought them and they are acknowledged."""
    asks_as_first = kind == "pull" and request.worker == 0
    if not job.initialized:
        has_seen = known > 0 or kind in ("push", "export") or asks_as_first or request.beat.has_values
        return has_seen and not job.began.id
    plans = job.plans
    asks_for_all = kind == "push" or (asks_as_first and request.pull.dense)
    return plans.growing and request.worker not in plans.outgrown and asks_for_all
