"""Workers ask for checkpoints: one of them is let in, every server writes its share, and the checkpoint comes to its
end.

Other things that only one worker does for all, such as writing a model to serve, are claimed here too.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager

from fleet.base.clock import Clock
from fleet.checkpoint.manifest import DENSE, Checkpoint
from fleet.errors import CheckpointError, MissedError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.background import BackgroundTask
from fleet.ps.server.checkpoint_share import write_share
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.status import on_one_line
from fleet.ps.table.frozen_view import HandOn
from fleet.ps.table.shard import FIRST, Piece, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

#: What cursors begin with of an export that is of the checkpoint that the job has gone on from: for workers of which
#: none has any values, as long as no step has been taken; and for any worker.
ORIGIN, RECORD = "origin", "record"


class CheckpointRequests:
    def __init__(
        self, lock: AbstractContextManager[object], clock: Clock, end: JobEnd, members: Members, is_durable: bool
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._end = end
        self._members = members
        self._is_durable = is_durable

    # ---------------------------------------------------------------- one worker for all

    def claim(self, job: Job, arrival: Arrival) -> None:
        """Let a worker do what only one does, or let it wait until another one has done it."""
        claim = arrival.request.claim
        first_is_gone, now = 0 not in self._members.awaited(), self._clock.now()
        what = on_one_line(claim.name[:80])
        waiting = Waiting(arrival.worker, what, now, arrival.respond, lambda: Frame(pb.Reply(loads=job.progress.loads)))
        job.check_room(waiting)
        job.claims.claim(claim.name, claim.by_anyone, waiting, now, first_is_gone, arrival.outbox)

    def release(self, job: Job, arrival: Arrival) -> None:
        """Let the others go on: what was claimed is done, or has failed."""
        release = arrival.request.release
        job.claims.release(release.name, arrival.worker, release.failure, arrival.outbox)
        arrival.answer(pb.Reply())

    # ---------------------------------------------------------------- state

    def export(self, job: Job, arrival: Arrival) -> None:
        """Answer with one piece of the state, for the worker to keep."""
        export, background = arrival.request.export, job.background
        if export.cursor.partition(":")[0] in (ORIGIN, RECORD):
            self._export_record(job, arrival)
            return
        # A server that has been killed meanwhile goes on with all rows, of which it no longer knows when they changed.
        forgotten = self._is_durable and not background.checkpoint
        if export.checkpoint not in ("", background.checkpoint) and not forgotten:
            raise ProtocolError("another checkpoint was begun meanwhile", where=job.where)
        since = background.since if export.checkpoint else 0  # 0 as well if it is forgotten
        _check_standstill(job, export.version)
        dense_state = job.policy.has_dense_state_on_servers or not export.checkpoint
        counts = bool(export.checkpoint)
        piece = job.held().export(
            export.cursor,
            since,
            dense_state=dense_state,
            counts=counts,
            removed_last=not job.policy.shares_steps,
            reader=background.reader_of(arrival.worker, begins=export.cursor == FIRST),
        )
        if arrival.worker in job.plans.outgrown:
            piece = piece.known_to(job.plans.outgrown[arrival.worker].spec)
        about = json.dumps({"tensors": list(piece.tensors), **piece.about})
        reply = pb.Reply(version=job.rounds.gate.version, cursor=piece.next_cursor, about=about)
        arrival.answer(reply, [WireTensor.of(tensor) for tensor in piece.tensors.values()])

    def _export_record(self, job: Job, arrival: Arrival) -> None:
        """Answer with dense parameters, and their optimizers' state, of the checkpoint that the job has gone on from:
        workers train them, and the servers have read only the rows."""
        kind, _, number = arrival.request.export.cursor.partition(":")
        if not number.isdecimal() or (kind == ORIGIN and (not job.record.id or job.is_trained)):
            raise CheckpointError(
                "no worker has the dense parameters any more, and the servers have none later than a checkpoint's",
                where=job.where,
                todo="Start the whole job again, from its last checkpoint if there is one.",
            )
        if not job.record.id:
            arrival.answer(pb.Reply(about=json.dumps({DENSE: [], "whole": [], "values": []})))
            return
        checkpoint = Checkpoint.open(job.record.url)
        if checkpoint.manifest.id != job.record.id:
            raise CheckpointError("the checkpoint that the job went on from has been replaced", where=job.record.url)
        fit = checkpoint.fit(job.plans.current.spec)
        told, tensors, has_next = checkpoint.piece(DENSE, int(number))
        about = {DENSE: told.get(DENSE, []), "whole": sorted(fit.whole), "values": sorted(fit.values)}
        reply = pb.Reply(cursor=f"{kind}:{int(number) + 1}" if has_next else "", about=json.dumps(about))
        arrival.answer(reply, [WireTensor.of(tensor) for tensor in tensors])

    def save(self, job: Job, arrival: Arrival) -> None:
        """Begin a checkpoint, and write this server's share of it beside the training."""
        save = arrival.request.save
        if not job.background.is_at(save.id):
            self._begin(job, arrival)
        task = job.background.task
        assert task is not None
        if save.begin:
            task.answer_early(arrival.respond)
        else:
            task.answer(arrival.respond)

    def _begin(self, job: Job, arrival: Arrival) -> None:
        shard, save, background = job.held(), arrival.request.save, job.background
        server = shard.server
        if self._is_durable and job.policy.shares_steps and save.version != job.rounds.gate.version:
            raise MissedError("a server was killed while it wrote its share", where=job.where)
        _check_standstill(job, save.version)
        background.begin_anew(arrival.worker)
        shard.prepare()
        since = shard.history.begin(save.id, save.after)
        if save.after and not since and shard.loses_rows:
            raise MissedError(
                "this server does not know which rows have left since the last checkpoint", where=job.where
            )
        background.begin_checkpoint(save.id, since, arrival.worker)
        # Its manifest says what this worker knows of the job by now: parameters may join as soon as it goes on.
        known = job.plans.outgrown.get(arrival.worker, job.plans.current).spec

        def export(cursor: str, hand_on: HandOn) -> Piece:
            with self._lock:
                if self._end.over or background.checkpoint != save.id:
                    raise CheckpointError("the checkpoint was given up", where=job.where)
                if background.frozen is None:
                    _check_standstill(job, save.version)
                if background.frozen is None and job.policy.shares_steps and is_of_rows(cursor):
                    background.freeze(shard.freeze(background.since, hand_on))
                    task.let_go_on()
                dense_state, frozen = job.policy.has_dense_state_on_servers, background.frozen
                piece = shard.export(
                    cursor,
                    background.since,
                    dense_state=dense_state,
                    frozen=frozen,
                    removed_last=not job.policy.shares_steps,
                    reader=background.reader,
                )
                return piece if known is job.plans.current.spec else piece.known_to(known)

        def write() -> Frame:
            return write_share(save.folder, save.proof, server, export, self._clock, behind=save.begin)

        what = f"writing the share of server {job.where} into {save.folder}"
        task = BackgroundTask(save.id, write, what, is_kept=self._is_durable)
        if not job.policy.shares_steps:
            task.let_go_on()
        background.begin(task, arrival.worker)
        task.start()

    def finish(self, job: Job, arrival: Arrival) -> None:
        """End what a worker began: a checkpoint is there, or has been given up."""
        end, background = arrival.request.settle, job.background
        if not end.url:
            background.withdraw(arrival.worker, end.id)
        elif end.id == background.checkpoint:
            job.held().history.exists(end.id)
            background.finish_checkpoint(end.id, end.url)
        arrival.answer(pb.Reply())


def _check_standstill(job: Job, version: int) -> None:
    if job.policy.shares_steps and version != job.rounds.gate.version:
        raise ProtocolError(
            "the job went on while its state was being read",
            expected=f"version {version}",
            got=f"version {job.rounds.gate.version}",
        )
