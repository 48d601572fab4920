"""A server works for one job, which has parts: each part is written where its own kind of work is done, and read by
all."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fleet.checkpoint.state import whose
from fleet.errors import IdentityError, ProtocolError
from fleet.plan.plan import Plan, make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import gate_of, policy_of
from fleet.ps.consistency.gate import Gate
from fleet.ps.consistency.policy import Policy
from fleet.ps.server.background import Background
from fleet.ps.server.checkpoint_reader import NOTHING, Origin, Restore
from fleet.ps.server.claims import Claims
from fleet.ps.server.early_gradients import EarlyGradients
from fleet.ps.server.feed import Feed
from fleet.ps.server.meetings import Meetings
from fleet.ps.server.object_states import ObjectStates
from fleet.ps.server.pending import Outbox, Parked, Waiting
from fleet.ps.server.recent_changes import RecentChanges
from fleet.ps.server.reductions import Reductions
from fleet.ps.table.previous_round import PreviousRound
from fleet.ps.table.shard import Contribution, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import error_reply

#: So many requests of one worker may wait. More is no worker of ours: it would be a prefetch of as many batches.
MAX_WAITING = 512


@dataclass
class Plans:
    """Holds the plan of the job. It grows when parameters join an optimizer, and workers learn of that one after the
    other. Its methods alone write it."""

    current: Plan
    #: the plans before further parameters joined, the first one first
    former: list[Plan] = field(default_factory=list)
    #: further parameters are planned and worker 0 has not brought their values yet
    growing: bool = False
    #: a worker that does not know of further parameters, yet or since it has started again -> the plan that it knows
    outgrown: dict[int, Plan] = field(default_factory=dict)

    def adopt(self, plan: Plan, workers: Mapping[int, int]) -> None:
        """Go on with further parameters, which a worker does not know before it has announced them."""
        self.outgrown = {worker: self.outgrown.get(worker, self.current) for worker in workers}
        self.former.append(self.current)
        self.current, self.growing = plan, True

    def complete(self) -> None:
        """Note that worker 0 has brought the values of everything that is planned."""
        self.growing = False

    def lags(self, worker: int, known: Plan) -> None:
        """Note that a worker knows an older plan."""
        self.outgrown[worker] = known

    def catches_up(self, worker: int) -> None:
        """Note that a worker knows the current plan, or is gone."""
        self.outgrown.pop(worker, None)

    def of(self, spec: JobSpec) -> Plan | None:
        """Return the plan of this spec, which the job has or had: a worker that starts again describes itself as at
        first."""
        plans = (self.current, *self.former)
        return next((plan for plan in plans if plan.spec.common == spec.common), None)

    def had(self, fingerprint: str) -> bool:
        """Say whether this is the fingerprint of a plan before further parameters joined."""
        return any(plan.fingerprint == fingerprint for plan in self.former)


@dataclass
class Due:
    """Holds what becomes one update; ``squares`` is the squared norm of the part of its gradient that is here, and
    ``total`` that of the whole, once the servers have been told."""

    version: int
    contributions: Sequence[Contribution]
    divisor: int
    squares: float = 0.0
    total: float | None = None


@dataclass
class Rounds:
    """Pushes and pulls between their arrival and their answer, and the values that answers are made of.
    ``StepRequests`` writes it, and lets requests wait; only their end comes from elsewhere too."""

    gate: Gate
    #: (worker, step) -> what it pushed, until its round is applied
    pushed: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    #: gradients that came ahead of their pushes
    ahead: EarlyGradients = field(default_factory=EarlyGradients)
    #: what writes rows that a script has changed, before the round that is open is applied
    edits: list[Callable[[], None]] = field(default_factory=list)
    #: pulls that came before the initial values, with the version they need
    early: list[tuple[int, Waiting]] = field(default_factory=list)
    #: ticket -> the request that the gate or a gathering holds back
    parked: Parked = field(default_factory=Parked)
    #: of these, those whose version is there, and which wait until all servers agree which rows leave
    held_back: list[Hashable] = field(default_factory=list)
    #: and those that wait until the rows of their round are updated, with the worker that has closed it
    awaiting_rows: list[tuple[Hashable, int]] = field(default_factory=list)
    #: all dense values at some version, as they were answered last
    snapshot: tuple[int, list[torch.Tensor]] | None = None
    previous: PreviousRound | None = None
    #: what is complete, and waits until the servers agree on the norm of the gradient; the first is applied next
    due: deque[Due] = field(default_factory=deque)
    #: version -> the squared norm of the part of the gradient here that led to it, and of the whole; of the last ones
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)
    #: which rows the last rounds have changed
    recent: RecentChanges = field(default_factory=RecentChanges)
    #: the tables of which rows wait until all servers agree which leave; None: the shard knows
    cuts: tuple[int, ...] | None = None
    #: table -> the version at which servers agreed, and the last row that stays, its score and its id
    agreed: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def forget_values(self) -> None:
        """Drop what was made of the values, as other values stand in the shard now, or more of them."""
        self.snapshot = self.previous = self.cuts = None
        self.recent.forget()

    def write_edits(self) -> None:
        """Write the rows that a script has changed, in the order in which it did."""
        for write in self.edits:
            write()
        self.edits.clear()

    def previous_for(self, worker: int, version: int) -> PreviousRound | None:
        """Return what there was at a version, for a worker that has started again and computes its last step once
        more."""
        previous = self.previous
        is_last = previous is not None and previous.version == version
        return previous if is_last and self.gate.delivered(worker) > version else None


@dataclass
class Progress:
    """Counts how many steps the workers have taken, those in a checkpoint that the job went on from included.
    ``StepRequests`` counts them; its own methods write everything else."""

    #: what was there when the job began: 0, or what its checkpoint says
    before: int = 0
    #: what its checkpoint says of workers: how many there were, and after how many of its own steps each was whose
    #: state it has
    workers_then: int = 0
    steps_then: Mapping[int, int] = field(default_factory=dict)
    #: worker -> how many of its steps were in what it pushed
    steps: dict[int, int] = field(default_factory=dict)
    #: how often the values have been replaced by others
    loads: int = 0

    def go_on_from(self, restore: Restore, pushed: Iterable[int] = ()) -> None:
        """Count on from where the workers were in a checkpoint. In a round that is open, what these workers have
        ``pushed`` counts from here on."""
        self.before, self.workers_then, self.steps_then = restore.version, restore.workers, restore.steps
        self.steps = dict.fromkeys(pushed, 1)

    def replaced(self) -> None:
        """Count that the values have been replaced by others."""
        self.loads += 1


@dataclass
class Moves:
    """Holds which servers the job has, and whether it has moved there from others. ``Moving`` writes it, but for
    ``servers`` before the first move, as a worker names them, ``is_noted``, and ``renewed``."""

    #: all servers, in their order
    servers: tuple[str, ...] = ()
    #: all moves that were made, and to which servers each
    past: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    #: whether this server is none of them
    is_left: bool = False
    #: worker -> the incarnations that it had before it went over
    former: dict[int, set[int]] = field(default_factory=dict)
    #: whether a journal has something of a move that is under way, which a snapshot would not have
    is_noted: bool = False
    #: by worker that has started again, how far its earlier process had come here
    renewed: dict[int, int] = field(default_factory=dict)

    @property
    def made(self) -> str:
        """Return the last move that was made; nothing before the first one."""
        return self.past[-1][0] if self.past else ""

    def has_made(self, attempt: str) -> bool:
        return any(attempt == made for made, _ in self.past)

    def note(self, made: str, servers: Sequence[str]) -> None:
        """Note that a move was made."""
        self.servers = tuple(servers)
        self.past.append((made, self.servers))


@dataclass
class Job:
    """Holds the job, from the first hello on. ``where`` is its server, for errors; ``most_bytes`` is what a message may
    have."""

    job_id: str
    where: str
    most_bytes: int
    policy: Policy
    plans: Plans
    rounds: Rounds
    reductions: Reductions
    claims: Claims
    states: ObjectStates
    feed: Feed
    meetings: Meetings = field(default_factory=Meetings)
    progress: Progress = field(default_factory=Progress)
    moves: Moves = field(default_factory=Moves)
    background: Background = field(default_factory=Background)
    #: what this server holds, once worker 0 has said hello or a checkpoint is read; and whether it has its values
    shard: Shard | None = None
    initialized: bool = False
    #: how often workers brought all values, and of how many of these times nothing can be lost any more: who has seen
    #: values takes them for granted
    times_brought: int = 0
    times_kept: int = 0
    #: the checkpoint that the job began with, if it did
    began: Origin = NOTHING
    #: the checkpoint that it began with, or went on from since, unless other values have replaced those
    record: Origin = NOTHING

    def held(self) -> Shard:
        """Return the shard; raise where a request needs one and there is none."""
        if self.shard is None:
            raise ProtocolError("worker 0 has not said hello here yet", where=self.where)
        return self.shard

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the tables of which rows wait until all servers agree which leave."""
        if self.shard is None or not self.is_limited:
            return ()
        if self.rounds.cuts is None:
            self.rounds.cuts = tuple(index for index, *_ in self.shard.awaits_cut)
        return self.rounds.cuts

    @property
    def version(self) -> int:
        """Return which version the values are; the gate may be ahead of them."""
        return self.rounds.gate.version - len(self.rounds.due)

    @property
    def is_limited(self) -> bool:
        """Say whether there is a table that is to have no more than so many rows on several servers together."""
        spec = self.plans.current.spec
        return spec.settings.server_num > 1 and any(table.most_rows is not None for table in spec.tables)

    @property
    def is_whole(self) -> bool:
        """Say whether all parameters have their values, and no others are on their way."""
        return self.initialized and not self.plans.growing and not self.background.uploads

    # ---------------------------------------------------------------- requests that wait

    def all_waiting(self) -> list[Waiting]:
        """Return every request that waits for its answer."""
        return [*self.rounds.parked.values(), *self._waiting_elsewhere()]

    def _waiting_elsewhere(self) -> list[Waiting]:
        early = (waiting for _, waiting in self.rounds.early)
        return [*early, *self.claims.waiting(), *self.states.waiting(), *self.meetings.waiting()]

    def check_room(self, newcomer: Waiting) -> None:
        """Refuse a request of a worker that has too many waiting, or too much memory in them."""
        worker = newcomer.worker
        waiting = [each.nbytes for each in self.rounds.parked.of(worker)]
        waiting += [each.nbytes for each in self._waiting_elsewhere() if each.worker == worker]
        if len(waiting) >= MAX_WAITING or (waiting and sum(waiting) + newcomer.nbytes > self.most_bytes):
            raise ProtocolError(
                f"worker {worker} has too many requests waiting",
                where=self.where,
                expected=f"at most {MAX_WAITING}, and {self.most_bytes >> 20} MiB in them (FLEET_MAX_MESSAGE_MB)",
                got=f"{len(waiting)} with {sum(waiting) >> 20} MiB, and one more",
            )

    def waited_for(self, waiting: Waiting) -> list[int]:
        """Return the workers that have to do something before a request can be answered, as far as that is known."""
        rounds = self.rounds
        if waiting.gathering:
            return sorted({worker for _, workers in self.reductions.lacking() for worker in workers} - {waiting.worker})
        if any(each is waiting for _, each in rounds.early):
            return [0]
        return list(rounds.gate.lacking()[1]) if any(each is waiting for each in rounds.parked.values()) else []

    def drop(self, worker: int, outbox: Outbox) -> None:
        """Forget what a worker's process has asked for: nobody waits for it any more."""
        gone = IdentityError(f"worker {worker} is no longer part of this job", where=self.where)
        self.claims.left(worker, gone, outbox)
        self.rounds.ahead.forget(worker)
        self.states.left(worker)
        self.meetings.left(worker)
        self.plans.catches_up(worker)
        self.background.left(worker)
        parked = self.rounds.parked
        for ticket in [ticket for ticket, waiting in parked.items() if waiting.worker == worker]:
            outbox.append((parked.take(ticket).respond, error_reply(gone)))
        early = self.rounds.early
        outbox += [(waiting.respond, error_reply(gone)) for _, waiting in early if waiting.worker == worker]
        self.rounds.early = [each for each in early if each[1].worker != worker]
        if self.shard is not None:
            self.shard.forget(worker)

    def abandon(self) -> list[Waiting]:
        """End the waiting of all requests, and return them."""
        waiting = self.all_waiting()
        self.rounds.parked.clear()
        self.rounds.held_back.clear()
        self.rounds.awaiting_rows.clear()
        self.rounds.early.clear()
        self.claims.clear()
        self.states.clear()
        self.meetings.clear()
        return waiting

    # ---------------------------------------------------------------- how far it is

    def steps_of(self, worker: int) -> int:
        """Return how many of its steps the job has. Where workers share no steps, they count on from where their states
        are."""
        progress = self.progress
        before = progress.before
        if not self.policy.shares_steps:
            then = progress.steps_then
            before = then.get(whose(worker, progress.workers_then, then), before)
        return before + progress.steps.get(worker, 0)

    @property
    def step(self) -> int:
        """Return how far the job is: by its own steps, or where workers share none, by those that the first worker has
        taken."""
        if not self.policy.shares_steps:
            return self.progress.before + self.progress.steps.get(0, 0)
        version = self.rounds.gate.version
        ahead = {worker: clock - version for worker, clock in self.rounds.gate.clocks.items()}
        return max((self.steps_of(worker) - ahead[worker] for worker in ahead), default=self.progress.before)

    @property
    def is_trained(self) -> bool:
        """Say whether its values are others than those that it began with."""
        progress = self.progress
        return progress.loads > 0 or self.rounds.gate.version != progress.before or any(progress.steps.values())


def new_job(spec: JobSpec, job_id: str, where: str, most_bytes: int, deadline_s: float) -> Job:
    """Make a job for which nobody has done anything yet; ``deadline_s`` is how long a worker waits for what only
    another one may do."""
    workers, policy = spec.settings.worker_num, policy_of(spec.settings)

    def grant() -> Frame:
        """Tell a worker that it may do what only one does, and which checkpoint is the last."""
        checkpoint, url = job.background.last
        return Frame(pb.Reply(granted=True, about=json.dumps({"id": checkpoint, "url": url})))

    job = Job(
        job_id,
        where,
        most_bytes,
        policy,
        Plans(make_plan(spec)),
        Rounds(gate_of(spec.settings, workers)),
        Reductions(workers),
        Claims(where, deadline_s, grant, only_first=policy.saves_on_first_worker),
        ObjectStates(lockstep=policy.shares_steps),
        Feed(where),
    )
    return job
