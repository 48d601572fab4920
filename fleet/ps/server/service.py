"""The server's mind: every request of every worker arrives in ``Service.handle``.

One lock guards the job (gate, shard, waiting requests). Under it a request is decided and carried out; the replies
that became possible are collected and leave after it is released. A request that cannot be answered yet is
remembered as a ticket in the gate and holds no thread. Heartbeats take only the membership's lock, so that a long
round is never mistaken for a dead server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fleet.clock import Clock
from fleet.cluster import Endpoint
from fleet.environ import Knobs
from fleet.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    IdentityError,
    JobAbortedError,
    MissedError,
    PlanMismatchError,
    ProtocolError,
    ServerLostError,
    StillBusyError,
)
from fleet.ps.consistency import MODES
from fleet.ps.consistency.base import Apply, Effect
from fleet.ps.consistency.membership import Membership, NeverCame, Standing, Told
from fleet.ps.server.claims import Claims
from fleet.ps.server.durable import Durable
from fleet.ps.server.gathering import Hall
from fleet.ps.server.job import Job, Restore
from fleet.ps.server.ledger import Ledger
from fleet.ps.server.loading import restore_from
from fleet.ps.server.reading import contribution_of
from fleet.ps.server.reception import Expected, check_cluster, check_fingerprint, check_same_job, check_share
from fleet.ps.server.remembering import NOTED, Memory, check_can_be_kept, outcome_of
from fleet.ps.server.shares import Errand, write_share
from fleet.ps.server.waiting import Outbox, Waiting
from fleet.ps.table.before import Before
from fleet.ps.table.shard import Piece, Shard, is_of_rows
from fleet.ps.table.standing import HandOn
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.errors import error_reply
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.narrow import Narrow
from fleet.ps.wire.tensors import WireTensor
from fleet.ps.wire.transport import Respond
from fleet.transpiler.plan import make_plan
from fleet.transpiler.specs import DTYPES, JobSpec, differences

_log = logging.getLogger("fleet.server")

#: For so many heartbeats a failed job's server stays, to tell its workers why.
LINGER_BEATS = 4
#: A worker that is silent for so many heartbeats may be replaced by another process under its index.
QUIET_BEATS = 3

#: So many requests of one worker may wait. More is no worker of ours: it would be a prefetch of as many batches.
MAX_WAITING = 512

#: So much of a traceback is passed on.
MOST_REASON = 32 << 10


class Service:
    def __init__(
        self,
        endpoint: Endpoint,
        knobs: Knobs,
        clock: Clock,
        *,
        expected: Expected | None = None,
        restore: Restore | None = None,
        durable: Durable | None = None,
    ) -> None:
        """``expected`` is the number of workers and the servers this process was told of, where it was told;
        ``restore`` the checkpoint to start from; ``durable`` where what is acknowledged is kept, and where it may be
        from before."""
        self._endpoint = endpoint
        self._knobs = knobs
        self._clock = clock
        self._expected = expected
        self._restore = restore
        self._started_at = clock.now()
        self._most_bytes = knobs.security.max_message_bytes
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._members_lock = threading.Lock()
        self._members: Membership | None = None
        self._failure: FleetError | None = None
        self._over = False
        self._told: set[int] = set()
        self._over_at = 0.0
        self._tickets = itertools.count()
        self._ledger = Ledger(clock)
        self._suspended = False
        self.ended = threading.Event()
        self._handlers: dict[str, Callable[[Any, Frame, Respond, Outbox], None]] = {
            "upload": self._upload,
            "ready": self._ready,
            "extend": self._extend,
            "part": self._part,
            "push": self._push,
            "pull": self._pull,
            "export": self._export,
            "claim": self._claim,
            "release": self._release,
            "save": self._save,
            "settle": self._settle,
            "load": self._load,
            "gather": self._gather,
            "survey": self._survey,
            "bye": self._bye,
            "abort": self._abort,
        }

        self._memory = None if durable is None else Memory(durable)
        if self._memory is not None:
            self._remember(self._memory)

    @property
    def failure(self) -> FleetError | None:
        """Why the job ended, if it did not end well."""
        return self._failure

    # ---------------------------------------------------------------- arrivals

    def handle(self, frame: Frame, respond: Respond) -> None:
        request = frame.message
        kind = request.WhichOneof("kind")
        if kind == "beat":
            # One that overtakes nothing may come after the goodbye, whose answer is still on its way.
            self._check_member(request, parting=True)
            self._ledger.heard(request.worker, request.beat.figures)
            respond(Frame(pb.Reply()))
            return
        if kind == "status":
            respond(Frame(pb.Reply(about=json.dumps(self.status()))))
            return
        outbox: Outbox = []
        try:
            with self._lock, self._ledger.request(frame, outbox):
                if self._suspended:
                    return  # unanswered, it is asked again when the server is there again
                if kind == "hello":
                    self._hello(request, frame, respond, outbox)
                elif kind in self._handlers:
                    self._check_member(request, parting=kind == "bye")
                    self._note(kind, frame, outbox)
                    self._handlers[kind](request, frame, respond, outbox)
                else:
                    raise ProtocolError("a request of an unknown kind", where=str(self._endpoint))
                self._refuse_standstill(outbox)
                self._keep_if_due()
        finally:
            # A refusal of this request travels as the exception; what became possible before it still leaves.
            self._send(outbox, secure=kind in NOTED)

    def tick(self) -> None:
        """Let time pass: give up on who is silent, end a job that cannot start."""
        now = self._clock.now()
        outbox: Outbox = []
        with self._lock:
            with self._members_lock:
                effects = [] if self._members is None else self._members.tick(now)
            if self._members is None and now - self._started_at > self._knobs.startup_deadline_s:
                self._fail(self._nobody_came(), outbox)
            for effect in effects:
                if isinstance(effect, NeverCame):
                    self._fail(self._never_came(effect), outbox)
                else:
                    _log.warning(
                        "%s: worker %d was silent for %.1f s and is given up on; the others go on without it",
                        self._endpoint,
                        effect.worker,
                        effect.silent_s,
                    )
                    self._lose(effect.worker, outbox)
            self._refuse_standstill(outbox)
            if self._job is not None:
                self._job.claims.tick(now, outbox)
        self._send(outbox)
        self._sync(lambda memory: memory.sync_if_due(now))

    def stop(self, reason: str) -> None:
        """End the job from outside, as a signal does; one that is kept on disk goes on when its server does."""
        outbox: Outbox = []
        with self._lock:
            if self._memory is not None and not self._over:
                self._suspended = True
                self.ended.set()
                return
            self._fail(JobAbortedError(f"server {self._endpoint} was stopped", got=reason), outbox)
        self._send(outbox)

    # ---------------------------------------------------------------- what is kept on disk

    def _note(self, kind: str, frame: Frame, outbox: Outbox) -> None:
        """Have a request that changes anything in the journal, before it does."""
        if self._memory is None:
            return
        try:
            self._memory.note(kind, frame)
        except OSError as error:
            raise self._cannot_keep(error, outbox) from None

    def _sync(self, sync: Callable[[Memory], None]) -> FleetError | None:
        """Have things on the disk, on a thread that holds no lock; if they cannot be, the job is over."""
        if self._memory is None:
            return None
        try:
            sync(self._memory)
        except OSError as error:
            outbox: Outbox = []
            with self._lock:
                failure = self._cannot_keep(error, outbox)
            self._send(outbox, secure=False)
            return failure
        return None

    def _cannot_keep(self, error: OSError, outbox: Outbox) -> FleetError:
        """What cannot be kept may not be acknowledged either: the job cannot go on."""
        failure = JobAbortedError(f"server {self._endpoint} cannot keep what it does", got=str(error))
        self._fail(failure, outbox)
        return failure

    def _keep_if_due(self) -> None:
        """Take a snapshot if it is time for one, and everything is there that one is made of."""
        memory, job = self._memory, self._job
        if memory is None or job is None:
            return
        memory.settle(job)  # at once, as what is held on to is memory for the next request
        if self._over or not job.is_whole or not memory.is_due(job):
            return
        try:
            memory.take(job, self._members_told())
        except OSError as error:  # the journal goes on
            _log.warning("%s: no snapshot could be taken, and the journal grows: %s", self._endpoint, error)

    def _keep(self, job: Job, outbox: Outbox) -> None:
        """Take a snapshot of what the journal says nothing of: where its values came from."""
        if self._memory is None:
            return
        try:
            self._memory.take(job, self._members_told())
        except OSError as error:
            raise self._cannot_keep(error, outbox) from None

    def _members_told(self) -> list[Told]:
        assert self._members is not None
        with self._members_lock:
            return self._members.told()

    def _remember(self, memory: Memory) -> None:
        """Be where the server was whose memory this is."""
        state = memory.known()
        if state is not None:
            spec = JobSpec.from_json(state["spec"])
            self._job = self._new_job(spec, state["job_id"])
            memory.resume(self._job, state, self._clock.now())
            self._members = self._new_members(spec)
            self._members.resume(state["members"], self._clock.now())

        def ask(request: Frame) -> None:
            with contextlib.suppress(FleetError):  # it was refused then as well
                self.handle(request, lambda _: None)

        def recall(before: Before) -> None:
            self._running().before = before

        memory.replay(
            ask,
            lambda worker: self._lose(worker, []),
            lambda number, reply: self._running().hall.know(number, outcome_of(reply)),
            recall,
        )
        if self._job is None:
            return
        self._told.clear()  # nobody has heard anything of this process
        self._over_at = self._clock.now()
        self.ended.clear()
        if self._knobs.job_id not in ("", self._job.job_id):
            raise ConfigurationError(
                "the state of another job is kept here",
                where=str(memory.directory),
                expected=f"job {self._knobs.job_id!r} (FLEET_JOB_ID)",
                got=f"job {self._job.job_id!r}",
                todo="Remove the directory if that job is over, or let this one keep its state elsewhere.",
            )
        _log.warning("%s: goes on from %s, at version %d", self._endpoint, memory.directory, self._job.gate.version)

    def _send(self, outbox: Outbox, *, secure: bool = True) -> None:
        """Let replies leave, ``secure`` ones when what they tell of is as safe as it has to be. Mere questions need not
        wait for what others have asked for: these ask again, should it be lost."""
        failure = self._sync(Memory.secure) if secure and outbox else None
        for respond, frame in outbox:
            respond(frame if failure is None else error_reply(failure))
        if self._over and self._all_told():
            self.ended.set()

    def close(self) -> None:
        """After the last request: keep what has to be kept."""
        if self._memory is not None:
            self._memory.end(over=self._over)

    def _all_told(self) -> bool:
        """A server is not gone before every worker has heard why its job failed, or that its goodbye has come, within a
        few of its heartbeats. One that was killed may have had goodbyes that it did not answer."""
        with self._members_lock:
            members = self._members
            asking = () if members is None else members.awaited() if self._failure is not None else members.gone()
        lingered_s = self._clock.now() - self._over_at
        return self._told.issuperset(asking) or lingered_s > LINGER_BEATS * self._knobs.beat_s

    def explain(self) -> str:
        """What this server is waiting for, in words."""
        with self._lock, self._members_lock:
            if self._job is None or self._members is None:
                return "waiting for the first worker's hello"
            job, members, now = self._job, self._members, self._clock.now()
            waits = job.hall.lacking()
            if job.growing or not job.initialized:
                waits.append(("initial values", (0,)))
            elif job.pushed or not waits:
                step, lacking = job.gate.lacking()
                waits.append((f"round {step}", lacking))
            return "; ".join(
                f"{what}: waiting for " + ", ".join(members.describe(worker, now) for worker in lacking)
                for what, lacking in waits
            )

    def status(self) -> dict[str, Any]:
        """How the job does, as far as this server sees it, for whoever shows it."""
        with self._lock, self._members_lock:
            return {"server": str(self._endpoint), **self._ledger.status(self._job, self._members, self._phase())}

    def _phase(self) -> str:
        job = self._job
        if self._suspended:
            return "stopped, to go on when it is started again"
        if self._over:
            return "over" if self._failure is None else f"failed: {_on_one_line(str(self._failure))[:500]}"
        if job is None:
            return "waiting for the first worker"
        if not job.initialized:
            return "waiting for initial values"
        return "training" if job.errand is None or job.errand.is_done else _on_one_line(job.errand.what)

    # ---------------------------------------------------------------- joining

    def _hello(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        hello = request.hello
        self._refuse_successor(request)
        if self._failure is not None:
            self._told.add(request.worker)
            raise self._failure.again()
        spec = JobSpec.from_json(hello.spec)
        label = _on_one_line(hello.label[:200])
        try:
            check_cluster(self._endpoint, self._expected, spec, request.worker, hello)
            if self._memory is not None:
                check_can_be_kept(spec)
            begun_with = spec.settings.worker_num if self._expected is None else self._expected[0]
            job = self._job or self._new_job(spec.among(begun_with), hello.job_id)
            check_same_job(self._endpoint, self._knobs.job_id or job.job_id, job.plan, spec, hello)
            check_share(self._endpoint, job.plan, hello.server, hello.options, self._most_bytes)
        except FleetError as error:
            with self._members_lock:
                if self._members is not None:
                    self._members.refused(request.worker, f"worker {request.worker} ({label}) was refused: {error}")
            told = _on_one_line(str(error))
            _log.warning("%s: worker %d (%s) was refused: %s", self._endpoint, request.worker, label, told)
            raise
        with self._members_lock:
            members = self._members or self._new_members(job.plan.spec)
            surely = self._memory is not None and self._memory.replaying
            before = members.hello(request.worker, request.incarnation, label, self._clock.now(), surely=surely)
            self._members = members
        self._note("hello", frame, outbox)  # only now: whether it is let in is a matter of time
        if before is Standing.LEFT:
            _log.info("%s: worker %d (%s) has joined", self._endpoint, request.worker, label)
        elif before is not None:
            self._replaced(job, request.worker, label, outbox)
        if before in (Standing.LEFT, Standing.LOST):
            job.gate.join(request.worker)
            job.hall.join(request.worker)
        if before is not None and not job.mode.lockstep:
            job.claims.joined(request.worker)
        if self._job is None:
            self._job = job
            _log.info(
                "%s: serving a job of %d workers: %d blocks of %d bytes in all, and a share of %d tables",
                self._endpoint,
                begun_with,
                len(job.plan.by_server[hello.server]),
                job.plan.dense_bytes(hello.server),
                len(spec.tables),
            )
            if self._restore is not None:
                self._begin_restoring(job, self._restore, hello)
        if request.worker == 0 and self._restore is None and job.shard is None:
            try:
                shard = Shard(job.plan, hello.server, hello.seed, tuple(hello.options))
                shard.warm()
                job.shard = shard
            except Exception as error:
                raise self._cannot_set_up(error, outbox) from None
        reply = pb.Reply(
            version=job.gate.version,
            initialized=job.initialized or self._restore is not None,
            delivered=job.gate.delivered(request.worker),
            steps=job.steps_of(request.worker),
            loads=job.loads,
            gathered=job.hall.told()[request.worker],
            about="" if self._restore is None else self._restore.id,
        )
        outbox.append((respond, Frame(reply)))
        if job.initialized:
            self._release_early(job, outbox)

    def _replaced(self, job: Job, worker: int, label: str, outbox: Outbox) -> None:
        """A worker has started again: what its earlier process waited for nobody waits for now."""
        _log.warning(
            "%s: worker %d has started again (%s); its earlier process is fenced off", self._endpoint, worker, label
        )
        self._drop_requests(job, worker, outbox)

    def _refuse_successor(self, request: Any) -> None:
        """A worker of the next job may be early: the process that had its place here has left, others have not."""
        with self._members_lock:
            members = self._members
            before = None if members is None else members.succeeds(request.worker, request.incarnation)
            is_new = members is not None and members.standing(request.worker) is None
        ours = self._knobs.job_id or ("" if self._job is None else self._job.job_id)
        restarted = bool(ours) and ours == request.hello.job_id
        if before is Standing.LIVE and not restarted and self._memory is not None and self._memory.goes_on:
            raise IdentityError(
                "this server goes on with a job whose state it has kept, and this worker was not part of it",
                where=f"{self._endpoint}, {self._memory.directory}",
                got=f"a new worker {request.worker}",
                todo="Remove the directory if that job is over. Workers may start again where FLEET_JOB_ID is set.",
            )
        if not restarted and (before is Standing.LEFT or (self._over and (is_new or before is not None))):
            raise StillBusyError(
                "this server has not finished an earlier job yet",
                where=str(self._endpoint),
                got=f"a hello of a new worker {request.worker}; the earlier "
                + ("one has left" if before is Standing.LEFT else "job is over"),
                todo="Wait until the earlier job has ended, or give this one servers of its own.",
            )

    def _new_members(self, spec: JobSpec) -> Membership:
        return Membership(
            spec.settings.worker_num,
            silence_s=self._knobs.rpc_deadline_s,
            quiet_s=QUIET_BEATS * self._knobs.beat_s,
            startup_s=self._knobs.startup_deadline_s,
            now=self._clock.now(),
            elastic=spec.settings.elastic,
        )

    def _new_job(self, spec: JobSpec, job_id: str) -> Job:
        plan = make_plan(spec)
        mode = MODES[spec.settings.mode]
        gate = mode.gate(range(spec.settings.worker_num), 0)
        claims = Claims(str(self._endpoint), self._knobs.rpc_deadline_s, self._grant, only_first=mode.adds)
        return Job(plan, job_id, gate, Hall(spec.settings.worker_num), claims)

    def _begin_restoring(self, job: Job, restore: Restore, hello: Any) -> None:
        """Read the checkpoint on a thread of its own, however large it is: hellos are answered meanwhile, with the
        version that its manifest names, and pulls wait as they wait for initial values."""
        job.gate = job.mode.gate(range(job.plan.spec.settings.worker_num), restore.version)
        job.steps_before = restore.version
        job.last = (restore.id, restore.url)

        def load() -> None:
            outbox: Outbox = []
            try:
                shard = Shard(job.plan, hello.server, restore.seed, tuple(hello.options))
                restore.fill(shard, hello.server)
                shard.warm()
            except Exception as error:
                with self._lock:
                    self._cannot_set_up(error, outbox)
            else:
                with self._lock:
                    job.shard, job.initialized = shard, True
                    with contextlib.suppress(JobAbortedError):  # everybody is told
                        self._keep(job, outbox)
                        self._release_early(job, outbox)
            self._send(outbox)

        threading.Thread(target=load, name=f"fleet-restore-{self._endpoint}", daemon=True).start()

    def _cannot_set_up(self, error: Exception, outbox: Outbox) -> FleetError:
        """Without its shard this server is of no use to anybody: the job cannot run."""
        _log.error("%s: the job cannot be set up", self._endpoint, exc_info=error)
        failure = JobAbortedError(f"server {self._endpoint} could not set up the job", got=str(error))
        self._fail(failure, outbox)
        return failure

    def _upload(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        shard = self._shard()
        upload = request.upload
        job = self._running()
        if upload.anew:
            self._check_upload(shard, upload, frame.tensors)
            job.asked_by = request.worker
            job.uploads.append((upload, frame.tensors))
        else:
            self._check_initializer(request)
            if job.growing or not job.initialized:
                self._check_upload(shard, upload, frame.tensors)
                self._write(shard, upload, frame.tensors)
        outbox.append((respond, Frame(pb.Reply())))

    @staticmethod
    def _check_upload(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]) -> None:
        """Refuse what does not fit when it comes: later it would be everybody's problem."""
        if upload.rows:
            if len(tensors) != 2:
                raise ProtocolError("an upload of rows needs ids and values", got=len(tensors))
            shard.check_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
        else:
            if len(tensors) != len(upload.blocks):
                raise ProtocolError("an upload's blocks and tensors differ in number")
            for position, tensor in zip(upload.blocks, tensors, strict=True):
                shard.dense.check_values(position, tensor.torch())

    @staticmethod
    def _write(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]) -> None:
        if upload.rows:
            shard.upload_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
        else:
            for position, tensor in zip(upload.blocks, tensors, strict=True):
                shard.dense.write(position, tensor.torch())

    def _ready(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        self._shard()
        job = self._running()
        if request.ready.anew:
            self._take_over(job, request.ready.attempt, outbox)
        else:
            self._check_initializer(request)
            job.initialized, job.growing = True, False
        outbox.append((respond, Frame(pb.Reply(initialized=True))))
        self._release_early(job, outbox)

    def _release_early(self, job: Job, outbox: Outbox) -> None:
        early, job.early = job.early, []
        for version, waiting in early:
            self._park(job, version, waiting, [], outbox)

    def _check_initializer(self, request: Any) -> None:
        if request.worker != 0:
            raise ProtocolError("initial values come from worker 0", got=f"worker {request.worker}")

    def _extend(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        """Further parameters, at the same step of every worker: the first that comes has the plan changed."""
        job, shard, extend = self._running(), self._shard(), request.extend
        spec = JobSpec.from_json(extend.spec)
        if spec != job.plan.spec:
            if not spec.continues(job.plan.spec):
                raise PlanMismatchError(
                    "this worker added other parameters to its optimizer than the job has",
                    where=f"{self._endpoint}, step {request.step}",
                    got="; ".join(differences(job.plan.spec, spec)),
                    todo="Call add_param_group alike on every worker.",
                )
            if job.pushed or job.gate.version != request.step:
                raise PlanMismatchError(
                    "parameters were added while another worker went on without them",
                    where=f"{self._endpoint}, step {request.step}",
                    todo="Call add_param_group on every worker, after the same step.",
                )
            plan = make_plan(spec)
            check_fingerprint(self._endpoint, plan, extend.fingerprint)
            check_share(self._endpoint, plan, shard.server, extend.options, self._most_bytes)
            try:
                shard.adopt(plan, tuple(extend.options))
                shard.warm()
            except Exception as error:
                raise self._cannot_set_up(error, outbox) from None
            job.plan, job.growing = plan, True
            job.forget_values()
        outbox.append((respond, Frame(pb.Reply(version=job.gate.version, initialized=not job.growing))))

    # ---------------------------------------------------------------- training

    def _part(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        job = self._running()
        if not job.initialized or job.growing or request.step != job.gate.delivered(request.worker) + 1:
            raise ProtocolError("a part came before its push was due", where=str(self._endpoint))
        # A journal has pushes that are whole.
        granted = self._memory is None and not job.mode.adds and Narrow(job.plan.spec.settings.wire_dtype).is_plain
        if granted:
            job.parts.add(request, frame.tensors, self._shard().dense)
        outbox.append((respond, Frame(pb.Reply(granted=granted))))

    def _push(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        job = self._running()
        if not job.initialized or job.growing:
            raise ProtocolError("a push came before the initial values", where=str(self._endpoint))
        worker, step = request.worker, request.step
        quiet = request.push.quiet

        def answer() -> Frame:
            values = self._values(job, worker, step, not quiet, ())
            return values if self._shard().changes is None else self._with_changes(values, worker, step)

        waiting = Waiting(worker, f"push of step {step}", self._clock.now(), respond, answer)
        self._check_patience(job, waiting)
        effects: list[Effect] = []
        if step > job.gate.delivered(worker):
            if any(other == worker for other, _ in job.pushed):
                raise ProtocolError(f"worker {worker} pushed before its last round was over", got=f"step {step}")
            contribution = contribution_of(
                request, frame.tensors, self._shard(), job.parts, self._endpoint, self._most_bytes
            )
            job.pushed[worker, step] = contribution
            try:
                effects = job.gate.push(worker, step)
            except ProtocolError:
                del job.pushed[worker, step]
                raise
            job.steps[worker] = job.steps.get(worker, 0) + request.push.steps
        self._park(job, job.mode.version_needed(step, job.plan.spec.settings.staleness), waiting, effects, outbox)

    def _pull(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        job = self._running()
        pull = request.pull
        if not (len(pull.tables) == len(pull.training) == len(frame.tensors)):
            raise ProtocolError("a pull's tables and ids differ in number")
        wanted = [
            (table, tensor.numpy(), training)
            for table, tensor, training in zip(pull.tables, frame.tensors, pull.training, strict=True)
        ]

        self._check_reply(job, pull, frame.tensors)
        waiting = Waiting(
            request.worker,
            f"values at step {request.step}",
            self._clock.now(),
            respond,
            lambda: self._values(job, request.worker, pull.version, pull.dense, wanted),
            ahead=pull.ahead,
            nbytes=frame.nbytes,
        )
        self._check_patience(job, waiting)
        # While the job grows, workers that are not there yet still need rows to get there.
        if job.initialized and not (job.growing and pull.dense):
            self._park(job, pull.version, waiting, [], outbox)
        else:
            job.early.append((pull.version, waiting))

    def _check_reply(self, job: Job, pull: Any, ids: Sequence[WireTensor]) -> None:
        """Repeated ids make a large reply of a small request, for which memory would be taken here."""
        tables = job.plan.spec.tables
        nbytes = 0
        for index, tensor in zip(pull.tables, ids, strict=True):
            if index >= len(tables):
                raise ProtocolError("a message names a table this job does not have", got=index)
            nbytes += tensor.array.size * tables[index].dim * DTYPES[tables[index].dtype]
        if nbytes > self._most_bytes:
            raise ConfigurationError(
                "a reply would be larger than a message may be",
                where=str(self._endpoint),
                expected=f"at most {self._most_bytes >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
                got=f"{nbytes / (1 << 20):.1f} MiB of rows",
                todo="Ask for fewer rows at once, or raise FLEET_MAX_MESSAGE_MB for every process.",
            )

    def _check_patience(self, job: Job, newcomer: Waiting) -> None:
        """What one worker has waiting here is bounded in number and in memory."""
        waiting = [each.nbytes for each in job.all_waiting() if each.worker == newcomer.worker]
        if len(waiting) >= MAX_WAITING or (waiting and sum(waiting) + newcomer.nbytes > self._most_bytes):
            raise ProtocolError(
                f"worker {newcomer.worker} has too many requests waiting",
                where=str(self._endpoint),
                expected=f"at most {MAX_WAITING}, and {self._most_bytes >> 20} MiB in them (FLEET_MAX_MESSAGE_MB)",
                got=f"{len(waiting)} with {sum(waiting) >> 20} MiB, and one more",
            )

    def _park(self, job: Job, version: int, waiting: Waiting, effects: list[Effect], outbox: Outbox) -> None:
        """Carry out what a request caused and let it wait for its version, which may be there at once."""
        ticket = next(self._tickets)
        job.parked[ticket] = waiting
        self._carry_out(job, effects + job.gate.wait(ticket, waiting.worker, version), waiting.worker, outbox)

    def _carry_out(self, job: Job, effects: Sequence[Effect], by: int, outbox: Outbox) -> None:
        """What worker ``by`` has brought about."""
        try:
            for effect in effects:
                if isinstance(effect, Apply):
                    job.apply(effect.step, effect.contributors)
                else:
                    waiting = job.parked.pop(effect.ticket, None)
                    if waiting is not None:  # else it was a process's whose worker has started again
                        self._ledger.released(waiting, by)
                        self._answer_one(waiting, outbox)
        except Exception as error:
            # Half a round is applied: nobody may go on from here as if nothing had happened.
            _log.exception("%s: the server failed", self._endpoint)
            failure = JobAbortedError(f"server {self._endpoint} failed", got=repr(error), todo=_way_out(error))
            self._fail(failure, outbox)

    def _values(
        self, job: Job, worker: int, needed: int, dense: bool, wanted: Sequence[tuple[int, Any, bool]]
    ) -> Frame:
        """Values that a worker needs at a version at least: the current ones, but for one that goes back a step. They
        are copied now, under the lock; encoding and sending come after it."""
        shard, before = self._shard(), job.before_for(worker, needed)
        version = job.gate.version if before is None else before.version
        reply = pb.Reply(version=version, clock=shard.dense.clock, loads=job.loads, steps=job.steps_of(worker))
        tensors: list[WireTensor] = []
        if dense:
            flats = job.dense_at(version) if before is None else before.dense
            tensors += [WireTensor.of(tensor) for tensor in flats]
            if shard.compensation is not None:
                handed = dict(zip(shard.dense.layout.dtypes, flats, strict=True))
                shard.compensation.handed_dense(worker, handed)
        try:
            for table, ids, training in wanted:
                rows = shard.read(table, ids, training)
                if before is not None:
                    before.restore(table, ids, rows)
                tensors.append(WireTensor.of(rows))
                reply.table_clocks.append(shard.tables[table].step)
                if shard.compensation is not None and training:
                    shard.compensation.handed_rows(worker, table, ids, rows)
                if shard.changes is not None and training:
                    shard.changes.hold(worker, table, ids)
        except FleetError as error:
            return error_reply(error)
        return Frame(reply, tensors)

    def _with_changes(self, values: Frame, worker: int, step: int) -> Frame:
        """The answer to a GEO worker's push: also the rows it holds that others have changed; all tables' clocks."""
        shard = self._shard()
        assert shard.changes is not None
        for table, ids in shard.changes.take(worker, step).items():
            values.message.changed.append(table)
            values.tensors += [WireTensor.of(ids), WireTensor.of(shard.read(table, ids, training=True))]
        values.message.table_clocks.extend(table.step for table in shard.tables)
        return values

    # ---------------------------------------------------------------- checkpoints

    def _export(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        job, export = self._running(), request.export
        # A server that has been killed meanwhile goes on with all rows, of which it no longer knows when they changed.
        forgotten = self._memory is not None and not job.begun[0]
        if export.checkpoint not in ("", job.begun[0]) and not forgotten:
            raise ProtocolError("another checkpoint was begun meanwhile", where=str(self._endpoint))
        since = job.begun[1] if export.checkpoint else 0  # 0 as well if it is forgotten
        self._check_standstill(job, export.version)
        piece = self._shard().export(export.cursor, since, dense_state=not (export.checkpoint and job.mode.adds))
        about = json.dumps({"tensors": list(piece.tensors), **piece.about})
        reply = pb.Reply(version=job.gate.version, cursor=piece.next_cursor, about=about)
        outbox.append((respond, Frame(reply, [WireTensor.of(tensor) for tensor in piece.tensors.values()])))

    def _check_standstill(self, job: Job, version: int) -> None:
        if job.mode.lockstep and version != job.gate.version:
            raise ProtocolError(
                "the job went on while its state was being read",
                expected=f"version {version}",
                got=f"version {job.gate.version}",
            )

    def _claim(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        job = self._running()
        with self._members_lock:
            assert self._members is not None
            gone = 0 not in self._members.awaited()
        claim, now = request.claim, self._clock.now()
        what = _on_one_line(claim.name[:80])
        waiting = Waiting(request.worker, what, now, respond, lambda: Frame(pb.Reply(loads=job.loads)))
        self._check_patience(job, waiting)
        job.claims.claim(claim.name, claim.by_anyone, waiting, now, gone, outbox)

    def _grant(self) -> Frame:
        """What a worker is told that may do what only one does: also which checkpoint is the last."""
        last = self._running().last
        return Frame(pb.Reply(granted=True, about=json.dumps({"id": last[0], "url": last[1]})))

    def _release(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        self._running().claims.release(request.release.name, request.worker, request.release.failure, outbox)
        outbox.append((respond, Frame(pb.Reply())))

    def _save(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        """Begin a checkpoint, and write this server's share of it beside the training."""
        job, shard, save = self._running(), self._shard(), request.save
        server = shard.server
        if job.errand is None or job.errand.name != save.id:
            if self._memory is not None and job.mode.lockstep and save.version != job.gate.version:
                raise MissedError("a server was killed while it wrote its share", where=str(self._endpoint))
            self._check_standstill(job, save.version)
            job.give_up()
            job.asked_by = request.worker
            shard.prepare()
            job.begun = (save.id, shard.history.begin(save.id, save.after))

            def export(cursor: str, hand_on: HandOn) -> Piece:
                with self._lock:
                    if self._over or job.begun[0] != save.id:
                        raise CheckpointError("the checkpoint was given up", where=str(self._endpoint))
                    if job.standing is None:
                        self._check_standstill(job, save.version)
                    if job.standing is None and job.mode.lockstep and is_of_rows(cursor):
                        job.standing = shard.stand(job.begun[1], hand_on)
                        errand.let_go_on()
                    return shard.export(cursor, job.begun[1], dense_state=not job.mode.adds, standing=job.standing)

            def write() -> Frame:
                return write_share(save.folder, save.proof, server, export, self._clock, behind=save.begin)

            what = f"writing the share of server {self._endpoint} into {save.folder}"
            errand = job.errand = Errand(save.id, write, what)
            if not job.mode.lockstep:
                errand.let_go_on()
            errand.start()
        if save.begin:
            job.errand.answer_early(respond)
        else:
            job.errand.answer(respond)

    def _take_over(self, job: Job, attempt: str, outbox: Outbox) -> None:
        """Other values have come, a checkpoint that has been read or uploads: they replace what there is."""
        if attempt == job.taken:
            job.give_up()  # asked again
            return
        shard, loaded, uploads = self._shard(), job.loaded, job.uploads
        is_read = loaded is not None and loaded[0] == attempt and loaded[2].plan is job.plan
        if not is_read and (loaded is not None or not uploads):
            if self._memory is not None:  # it was killed since, and can read again
                raise StillBusyError("this server has not read the checkpoint yet", where=str(self._endpoint))
            what = "the values that were to be taken over are not here"
            raise ProtocolError(what, where=str(self._endpoint), got=attempt[:80])
        try:
            if is_read:
                assert loaded is not None
                _, restore, job.shard = loaded
                # Of a round that is open, what has been pushed counts from here on.
                job.steps_before, job.steps = restore.version, dict.fromkeys((worker for worker, _ in job.pushed), 1)
                job.last = (restore.id, restore.url)
            else:
                for upload, tensors in uploads:
                    self._write(shard, upload, tensors)
                shard.replaced()
        except FleetError as error:
            # Other servers have taken them over: nobody may go on from here as if nothing had happened.
            what = f"server {self._endpoint} could not go on from other values"
            self._fail(JobAbortedError(what, got=str(error)), outbox)
            raise
        job.give_up()
        job.taken, job.loads = attempt, job.loads + 1
        job.forget_values()
        if is_read:
            self._keep(job, outbox)

    def _settle(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        """The end of what a worker began: a checkpoint is there, or what it was is given up."""
        job, settle = self._running(), request.settle
        if not settle.url and (job.errand is None or job.errand.name == settle.id):
            job.give_up()
        elif settle.url and settle.id == job.begun[0]:
            self._shard().history.exists(settle.id)
            job.last = (settle.id, settle.url)
        outbox.append((respond, Frame(pb.Reply())))

    def _load(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        """Read a checkpoint beside the training, to be taken over when every server has."""
        job, load = self._running(), request.load
        if load.attempt == job.taken:
            outbox.append((respond, Frame(pb.Reply())))
            return
        if job.errand is None or job.errand.name != load.attempt:
            job.give_up()
            job.asked_by = request.worker
            old = self._shard()

            def read() -> Frame:
                restore = restore_from(load.url)
                if restore.id != load.id:
                    raise CheckpointError(
                        "this server finds another checkpoint",
                        where=f"{self._endpoint}, {load.url}",
                        expected=f"checkpoint {load.id}",
                        got=f"checkpoint {restore.id}",
                        todo="Every server has to see the directory that the worker sees.",
                    )
                shard = Shard(job.plan, old.server, restore.seed, old.options)
                restore.fill(shard, old.server)
                with self._lock:
                    if job.errand is errand:
                        job.loaded = (load.attempt, restore, shard)
                return Frame(pb.Reply())

            errand = job.errand = Errand(load.attempt, read, f"loading {load.url} on server {self._endpoint}")
            errand.start()
        job.errand.answer(respond)

    # ---------------------------------------------------------------- what happened

    def _survey(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        shard, job = self._shard(), self._running()
        about = {
            "steps": {worker: job.steps_of(worker) for worker in sorted(job.steps)},
            "tables": {table.spec.name: {"rows": len(table), "bytes": table.nbytes} for table in shard.tables},
            "staleness": shard.staleness.counts,
        }
        outbox.append((respond, Frame(pb.Reply(version=job.gate.version, about=json.dumps(about)))))

    # ---------------------------------------------------------------- gatherings

    def _gather(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:
        """A barrier, or a reduction over all workers: parked until everybody has come to it."""
        job, ticket, gather = self._running(), next(self._tickets), request.gather

        def answer() -> Frame:
            met = job.hall.answer(gather.number)
            met.message.loads = job.loads
            return met

        what = f"{gather.op[:20]} {gather.number}"
        waiting = Waiting(request.worker, what, self._clock.now(), respond, answer, gathering=True)
        self._check_patience(job, waiting)
        ready = job.hall.come(ticket, request.worker, gather, frame.tensors)
        job.parked[ticket] = waiting
        self._answer(job, ready, waiting.worker, outbox)

    def _answer(self, job: Job, tickets: Sequence[Hashable], by: int, outbox: Outbox) -> None:
        for waiting in [job.parked.pop(ticket) for ticket in tickets if ticket in job.parked]:  # none if the job failed
            self._ledger.released(waiting, by)
            self._answer_one(waiting, outbox)

    def _answer_one(self, waiting: Waiting, outbox: Outbox) -> None:
        if self._memory is None or not self._memory.replaying:  # else nobody would read it
            outbox.append((waiting.respond, _answer_of(waiting)))

    # ---------------------------------------------------------------- leaving

    def _bye(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        outbox.append((respond, Frame(pb.Reply())))
        self._told.add(request.worker)
        assert self._members is not None
        with self._members_lock:
            repeated = self._members.standing(request.worker) is Standing.LEFT
            if not repeated:
                self._members.leave(request.worker)
        if not repeated:
            self._departed(request.worker, outbox)

    def _abort(self, request: Any, frame: Frame, respond: Respond, outbox: Outbox) -> None:  # noqa: ARG002
        reason = f"worker {request.worker} failed and ended the job"
        self._fail(JobAbortedError(reason, got=request.abort.reason[:MOST_REASON]), outbox)
        self._told.add(request.worker)
        outbox.append((respond, Frame(pb.Reply())))

    def _lose(self, worker: int, outbox: Outbox) -> None:
        if self._memory is not None:
            try:
                self._memory.lost(worker)
            except OSError as error:
                self._cannot_keep(error, outbox)
                return
        assert self._members is not None
        with self._members_lock:
            self._members.lose(worker)
        self._departed(worker, outbox)

    def _departed(self, worker: int, outbox: Outbox) -> None:
        job = self._running()
        if worker == 0 and not job.initialized:
            self._fail(JobAbortedError("worker 0 left before it had sent the initial values"), outbox)
            return
        self._drop_requests(job, worker, outbox)
        self._carry_out(job, job.gate.leave(worker), worker, outbox)
        self._answer(job, job.hall.leave(worker), worker, outbox)
        assert self._members is not None
        with self._members_lock:
            finished = self._members.finished
        if finished and not self._over:
            self._over, self._over_at = True, self._clock.now()

    def _drop_requests(self, job: Job, worker: int, outbox: Outbox) -> None:
        """Nobody waits for them any more."""
        job.claims.left(worker, outbox)
        job.parts.forget(worker)
        if job.asked_by == worker:
            job.give_up()
        gone = IdentityError(f"worker {worker} is no longer part of this job", where=str(self._endpoint))
        for ticket in [ticket for ticket, waiting in job.parked.items() if waiting.worker == worker]:
            outbox.append((job.parked.pop(ticket).respond, error_reply(gone)))
        if job.shard is not None:
            job.shard.forget(worker)

    def _fail(self, error: FleetError, outbox: Outbox) -> None:
        """The job is over: tell everybody who waits now, and everybody who will ask."""
        if self._over:
            return
        self._failure, self._over, self._over_at = error, True, self._clock.now()
        if self._job is not None:
            self._told |= {waiting.worker for waiting in self._job.all_waiting()}
            outbox += [(waiting.respond, error_reply(error)) for waiting in self._job.all_waiting()]
            self._job.parked.clear()
            self._job.early.clear()
            self._job.claims.clear()

    def _refuse_standstill(self, outbox: Outbox) -> None:
        """Some workers wait in a gathering, all others in a step for them: nobody will ever go on."""
        if self._job is None or not self._job.hall.lacking():
            return
        parked = [waiting for waiting in self._job.parked.values() if not waiting.ahead]
        meeting = {waiting.worker for waiting in parked if waiting.gathering}
        stepping = {waiting.worker for waiting in parked if not waiting.gathering}
        if not (meeting and stepping):
            return
        assert self._members is not None
        with self._members_lock:
            live = set(self._members.awaited())
        if live <= meeting | stepping:
            job = self._running()
            step, (meeting_at, _) = job.gate.lacking()[0], job.hall.lacking()[0]
            error = JobAbortedError(
                "the workers wait for each other",
                where=str(self._endpoint),
                got=f"workers {sorted(meeting)} in {meeting_at}, workers {sorted(stepping)} in step {step}",
                todo="Call barrier_worker, all_reduce_worker and metrics on every worker after the same step.",
            )
            self._fail(error, outbox)

    # ---------------------------------------------------------------- shorthands

    def _check_member(self, request: Any, parting: bool = False) -> None:
        if self._failure is not None:
            self._told.add(request.worker)
            raise self._failure.again()
        with self._members_lock:
            members = self._members
            if members is not None and members.heard(request.worker, request.incarnation, self._clock.now()):
                return
            standing = None if members is None else members.standing(request.worker)
        if parting and standing is Standing.LEFT:
            return
        if standing is None or standing is Standing.EXPECTED:
            raise ServerLostError(
                "this server does not know the worker's job: it was restarted and has lost its state",
                where=str(self._endpoint),
                got=f"a request of worker {request.worker}",
                todo="Start the job again, from its last checkpoint if there is one (init_server(model_dir)).",
            )
        raise IdentityError(
            f"worker {request.worker} is no longer part of this job",
            where=str(self._endpoint),
            got=f"it has {'left' if standing is Standing.LEFT else 'been given up on or was replaced'}",
        )

    def _running(self) -> Job:
        assert self._job is not None, "a member exists only with a job"
        return self._job

    def _shard(self) -> Shard:
        shard = self._running().shard
        if shard is None:
            raise ProtocolError("worker 0 has not said hello here yet", where=str(self._endpoint))
        return shard

    def _nobody_came(self) -> FleetError:
        return DeadlineError(
            "no worker said hello",
            where=str(self._endpoint),
            expected=f"the first one within {self._knobs.startup_deadline_s:g} s",
            todo="Start the workers, and give them this server's endpoint.",
        )

    def _never_came(self, effect: NeverCame) -> FleetError:
        names = ", ".join(f"worker {worker}" for worker in effect.workers)
        return JobAbortedError(
            f"{names} did not say hello",
            where=str(self._endpoint),
            expected=f"every worker within {self._knobs.startup_deadline_s:g} s of the first",
            got="; ".join(effect.refusals) or None,
            todo="Start every worker, and let them reach every server.",
        )


def _on_one_line(text: str) -> str:
    """What a stranger says, so that it cannot pass for lines of this server's log."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _answer_of(waiting: Waiting) -> Frame:
    """An answer that cannot be made, for lack of memory perhaps, is the misfortune of who asked and of nobody else."""
    try:
        return waiting.answer()
    except Exception as error:
        _log.exception("an answer for worker %d could not be made", waiting.worker)
        return error_reply(FleetError("the server could not make an answer", got=repr(error), todo=_way_out(error)))


def _way_out(error: Exception) -> str | None:
    return "Give the job more servers, or this one more memory." if isinstance(error, MemoryError) else None
