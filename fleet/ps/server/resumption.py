"""A job that is yet to begin is told where to go on: this server says what it has and sees, and holds to the choice.

A process that calls ``resume_from`` asks every server for that, comes to a choice
(``fleet/checkpoint/resume_choice.py``), and tells it to all of them, the first one before the others: that one holds to
the choice it was told first. A server whose own script calls it answers no hello before it knows the choice; a server
without a script looks for checkpoints in the place that those who ask name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import BEGINNING, Choice, Held, Mark, Seen
from fleet.checkpoint.series import marks, name_of, root_at
from fleet.errors import CheckpointError, ServerBusyError, StateError
from fleet.ps.server.admission import check_job_id
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.initialization import Initialization
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")


class Resumption:
    def __init__(
        self,
        endpoint: Endpoint,
        job_id: str,
        lock: AbstractContextManager[object],
        end: JobEnd,
        members: Members,
        initialization: Initialization,
        handshake: Handshake,
        found_job: Callable[[], Job | None],
        root: Place | None,
    ) -> None:
        """``found_job`` finds the job, under the lock; ``root`` is where this server's own script looks for
        checkpoints, if it says so."""
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._job_id = job_id
        self._lock = lock
        self._end = end
        self._members = members
        self._initialization = initialization
        self._handshake = handshake
        self._found_job = found_job
        self._root = root
        self._is_given = initialization.restore is not None
        self._chosen: Choice | None = None
        self._kept_at: int | None = None
        #: whether the log has been told that others name another root
        self._has_warned = False
        #: whether hellos have to wait for a choice
        self._waits = False

    def begin(self) -> None:
        """Take up what was kept, after all of it has been done over."""
        job = self._found_job()
        self._kept_at = None if job is None else job.step
        self._waits = self._root is not None

    @property
    def chosen(self) -> Choice | None:
        return self._chosen

    def refuse_early(self) -> None:
        """Refuse a hello before the choice, where this server waits for one."""
        if self._waits and not self._has_begun(self._found_job()):
            raise ServerBusyError(
                "it is not chosen yet what the job goes on from",
                where=self._where,
                todo="Call fleet.resume_from(root) on every server and every worker.",
            )

    def _has_begun(self, job: Job | None) -> bool:
        """Say whether there is a job with values to go on from. The job of an earlier process of this server which was
        killed before it had any is yet to begin."""
        if job is None:
            return False
        return self._kept_at is None or self._chosen is not None or job.initialized or bool(job.began.id)

    def look(self, request: Any) -> pb.Reply:
        """Return what this server has; where it has nothing, what it sees. Places are read without the lock."""
        with self._lock:
            self._check(request)
            self._warn_of_another_root(request)
            seen = Seen(self._held(request), self._chosen)
        if seen == Seen():
            seen = Seen(checkpoints=tuple(marks(self._place(request.look.root))))
        return pb.Reply(about=seen.to_json())

    def choose(self, request: Any) -> pb.Reply:
        """Hold to a choice, if there is none yet and no job."""
        chosen = request.choose
        choice = Choice(Mark(chosen.step, chosen.id) if chosen.id else BEGINNING, chosen.strict)
        with self._lock:
            is_open = self._is_open
        restore = None
        if is_open and chosen.id:
            place = self._place(chosen.root).within(name_of(chosen.step))
            restore = restore_from(place.url, strict=chosen.strict)
            if restore.id != chosen.id:
                raise CheckpointError(
                    "this server finds another checkpoint",
                    where=f"{self._where}, {place.url}",
                    expected=f"checkpoint {chosen.id}",
                    got=f"checkpoint {restore.id}",
                    todo="Let no other job save there meanwhile.",
                )
        with self._lock:
            if is_open and self._is_open:
                self._chosen, self._waits = choice, False
                self._initialization.start_from(self._found_job(), restore)
                _log.info("%s: the job goes on from %s", self._where, choice.mark)
            if self._chosen is not None and self._chosen.strict != chosen.strict:
                _log.warning(
                    "%s: the job goes on with strict=%s, and resume_from was called with strict=%s by %s",
                    self._where,
                    self._chosen.strict,
                    chosen.strict,
                    f"worker {request.worker}" if request.worker else "worker 0 or a server",
                )
            return pb.Reply(about=(self._chosen or choice).to_json())

    @property
    def _is_open(self) -> bool:
        return self._chosen is None and not self._has_begun(self._found_job())

    def _check(self, request: Any) -> None:
        """Refuse a process that is of another job, or comes while an earlier job is about to end."""
        look, job = request.look, self._found_job()
        ours = self._job_id or ("" if job is None else job.job_id)
        check_job_id(self._endpoint, ours, look.job_id)
        if self._is_given:
            raise StateError(
                "fleet.resume_from and fleet.init_server(model_dir) both say what the job goes on from",
                where=self._where,
                got=f"a server that begins with checkpoint {self._initialization.restore.id}"
                if self._initialization.restore is not None
                else None,
                todo="Leave the model_dir out.",
            )
        self._handshake.refuse_who_has_left(look.former)
        if not look.by_server:
            self._handshake.refuse_successor(job, request, look)
        elif self._end.over:
            raise ServerBusyError("this server has not finished an earlier job yet", where=self._where)

    def _held(self, request: Any) -> Held | None:
        job, worker = self._found_job(), None if request.look.by_server else request.worker
        if job is None or not self._has_begun(job):
            return None
        base = None if job.is_trained else Mark(job.progress.before, job.began.id)
        steps = None  # all hear the same until they have gone on from there
        if worker is not None and worker in job.rounds.gate.clocks:
            steps = job.steps_of(worker) if job.progress.steps.get(worker) else job.progress.before
        met = worker is not None and self._members.has_met(worker)
        return Held(job.step, base, self._kept_at, job.policy.shares_steps, steps, met)

    def _warn_of_another_root(self, request: Any) -> None:
        root = request.look.root
        if self._root is None or root == self._root.url or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s: this server looks for checkpoints in %s, and %s in %s",
            self._where,
            self._root.url,
            "another one" if request.look.by_server else f"worker {request.worker}",
            root,
        )

    def _place(self, root: str) -> Place:
        return root_at(root) if self._root is None else self._root
