"""What the job goes on from, before it begins: what this server has and sees of it, and what was chosen.

Whoever calls ``resume_from`` asks every server for that, comes to a choice (``fleet/checkpoint/resume_choice.py``), and
tells it to all of them, the first one before the others: it holds to the choice it was told first. A server whose own
script calls it answers no hello before it knows the choice; one without a script looks where those look who ask.
"""

from __future__ import annotations

import logging
from typing import Any

from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import BEGINNING, Choice, Held, Mark, Seen
from fleet.checkpoint.series import marks, name_of, root_at
from fleet.errors import CheckpointError, ServerBusyError, StateError
from fleet.ps.server.admission import check_job_id
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.context import Floor
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.initialization import Initialization
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")


class Resumption:
    def __init__(self, floor: Floor, filling: Initialization, joining: Handshake, root: Place | None) -> None:
        """``root`` is where this server's own script looks for checkpoints, if it says so."""
        self._floor = floor
        self._filling = filling
        self._joining = joining
        self._root = root
        self._is_given = filling.restore is not None
        self._chosen: Choice | None = None
        self._kept_at: int | None = None
        #: whether the log has been told that others name another root
        self._has_warned = False
        #: whether hellos have to wait for a choice
        self._waits = False

    def begin(self) -> None:
        """All that was kept has been done over."""
        self._kept_at = None if self._floor.job is None else self._floor.job.step
        self._waits = self._root is not None

    @property
    def chosen(self) -> Choice | None:
        return self._chosen

    def refuse_early(self) -> None:
        """No hello before the choice, where this server waits for one."""
        if self._waits and not self._has_begun:
            raise ServerBusyError(
                "it is not chosen yet what the job goes on from",
                where=str(self._floor.endpoint),
                todo="Call fleet.resume_from(root) on every server and every worker.",
            )

    @property
    def _has_begun(self) -> bool:
        """Whether there is a job with values to go on from. That of an earlier process of this server which was killed
        before it had any is yet to begin."""
        job = self._floor.job
        if job is None:
            return False
        return self._kept_at is None or self._chosen is not None or job.initialized or bool(job.began.id)

    def look(self, request: Any) -> pb.Reply:
        """What this server has, and sees where it has nothing. Places are read outside of the lock."""
        with self._floor.lock:
            self._check(request)
            self._warn_of_another_root(request)
            seen = Seen(self._held(request), self._chosen)
        if seen == Seen():
            seen = Seen(checkpoints=tuple(marks(self._place(request.look.root))))
        return pb.Reply(about=seen.to_json())

    def choose(self, request: Any) -> pb.Reply:
        """Hold to a choice, if there is none yet and no job."""
        told = request.choose
        choice = Choice(Mark(told.step, told.id) if told.id else BEGINNING, told.strict)
        with self._floor.lock:
            is_open = self._is_open
        restore = None
        if is_open and told.id:
            place = self._place(told.root).within(name_of(told.step))
            restore = restore_from(place.url, strict=told.strict)
            if restore.id != told.id:
                raise CheckpointError(
                    "this server finds another checkpoint",
                    where=f"{self._floor.endpoint}, {place.url}",
                    expected=f"checkpoint {told.id}",
                    got=f"checkpoint {restore.id}",
                    todo="Let no other job save there meanwhile.",
                )
        with self._floor.lock:
            if is_open and self._is_open:
                self._chosen, self._waits = choice, False
                self._filling.start_from(restore)
                _log.info("%s: the job goes on from %s", self._floor.endpoint, choice.mark)
            if self._chosen is not None and self._chosen.strict != told.strict:
                _log.warning(
                    "%s: the job goes on with strict=%s, and resume_from was called with strict=%s by %s",
                    self._floor.endpoint,
                    self._chosen.strict,
                    told.strict,
                    f"worker {request.worker}" if request.worker else "worker 0 or a server",
                )
            return pb.Reply(about=(self._chosen or choice).to_json())

    @property
    def _is_open(self) -> bool:
        return self._chosen is None and not self._has_begun

    def _check(self, request: Any) -> None:
        """Refuse who is of another job, or comes while an earlier one is about to end."""
        floor, look = self._floor, request.look
        ours = floor.knobs.job_id or ("" if floor.job is None else floor.job.job_id)
        check_job_id(floor.endpoint, ours, look.job_id)
        if self._is_given:
            raise StateError(
                "fleet.resume_from and fleet.init_server(model_dir) both say what the job goes on from",
                where=str(floor.endpoint),
                got=f"a server that begins with checkpoint {self._filling.restore.id}"
                if self._filling.restore is not None
                else None,
                todo="Leave the model_dir out.",
            )
        if not look.by_server:
            self._joining.refuse_successor(request.worker, request.incarnation, look.job_id)
        elif floor.ending.over:
            raise ServerBusyError("this server has not finished an earlier job yet", where=str(floor.endpoint))

    def _held(self, request: Any) -> Held | None:
        floor, worker = self._floor, None if request.look.by_server else request.worker
        job = floor.job
        if job is None or not self._has_begun:
            return None
        base = None if job.is_trained else Mark(job.steps_before, job.began.id)
        steps = None
        if worker is not None and worker in job.gate.clocks:  # all are told the same until they have gone on from there
            steps = job.steps_of(worker) if job.steps.get(worker) else job.steps_before
        met = worker is not None and floor.roll.has_met(worker)
        return Held(job.step, base, self._kept_at, job.policy.shares_steps, steps, met)

    def _warn_of_another_root(self, request: Any) -> None:
        told = request.look.root
        if self._root is None or told == self._root.url or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s: this server looks for checkpoints in %s, and %s in %s",
            self._floor.endpoint,
            self._root.url,
            "another one" if request.look.by_server else f"worker {request.worker}",
            told,
        )

    def _place(self, told: str) -> Place:
        return root_at(told) if self._root is None else self._root
