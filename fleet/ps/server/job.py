"""What a server keeps of the job it works for, and the checkpoint it may start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fleet.checkpoint.state import whose
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import dense_layout
from fleet.plan.plan import Plan, make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import gate_of, policy_of
from fleet.ps.consistency.gate import Gate
from fleet.ps.consistency.policy import Policy
from fleet.ps.server.checkpoint_share import BackgroundTask
from fleet.ps.server.claims import Claims
from fleet.ps.server.early_gradients import EarlyGradients
from fleet.ps.server.object_states import ObjectState, ObjectStates
from fleet.ps.server.pending import Waiting
from fleet.ps.server.reductions import Reductions
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.previous_round import PreviousRound
from fleet.ps.table.shard import Contribution, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame


@dataclass(frozen=True)
class Origin:
    """What a job begins with: a checkpoint, all of which has to fit if it is ``strict``; or nothing."""

    id: str = ""
    url: str = ""
    strict: bool = True


NOTHING = Origin()


@dataclass
class Job:
    """The job a server works for, from the first hello on."""

    plan: Plan
    job_id: str
    gate: Gate
    hall: Reductions
    claims: Claims
    states: ObjectStates
    shard: Shard | None = None
    initialized: bool = False
    #: the plans before further parameters joined, the first one first
    former: list[Plan] = field(default_factory=list)
    #: further parameters are planned and worker 0 has not brought their values yet
    growing: bool = False
    #: a worker that does not know of further parameters, yet or since it has started again -> the plan that it knows
    outgrown: dict[int, Plan] = field(default_factory=dict)
    #: (worker, step) -> what it pushed, until its round is applied
    pushed: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    #: gradients that came ahead of their pushes
    parts: EarlyGradients = field(default_factory=EarlyGradients)
    #: pulls that came before the initial values, with the version they need
    early: list[tuple[int, Waiting]] = field(default_factory=list)
    #: ticket -> the request the gate or the hall holds back
    parked: dict[Hashable, Waiting] = field(default_factory=dict)
    #: what was there when the job began: 0, or what its checkpoint says
    steps_before: int = 0
    #: what its checkpoint says of workers: how many there were, and after how many of its own steps each was whose
    #: state it has
    workers_then: int = 0
    steps_then: Mapping[int, int] = field(default_factory=dict)
    #: the checkpoint that the job began with, if it did
    began: Origin = NOTHING
    #: worker -> how many of its steps were in what it pushed
    steps: dict[int, int] = field(default_factory=dict)
    #: all dense values at some version, as they were answered last
    snapshot: tuple[int, list[torch.Tensor]] | None = None
    before: PreviousRound | None = None
    #: the checkpoint that was begun last, and from which epoch on rows belong into it
    begun: tuple[str, int] = ("", 0)
    #: the rows that belong into it, where they have to be as they were when it began
    frozen: FrozenView | None = None
    #: the newest one that exists: its id and where it is
    last: tuple[str, str] = ("", "")
    #: what is being done for a checkpoint, or was last, and the worker that asked for it
    errand: BackgroundTask | None = None
    asked_by: int | None = None
    #: a checkpoint that has been read, and the attempt it was read for, until it is taken over
    loaded: tuple[str, Restore, Shard, Mapping[int, ObjectState]] | None = None
    #: other values that have been uploaded, likewise
    uploads: list[tuple[pb.Upload, Sequence[WireTensor]]] = field(default_factory=list)
    #: the attempt that was taken over last
    taken: str = ""
    #: how often the values have been replaced by others
    loads: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all parameters have their values, and no others are on their way."""
        return self.initialized and not self.growing and not self.uploads

    def forget_values(self) -> None:
        """Others stand here now, or more of them."""
        self.snapshot = self.before = None

    def dense_at(self, version: int) -> list[torch.Tensor]:
        """All dense values, which are at this version now, and stay as they are."""
        assert self.shard is not None
        if self.snapshot is None or self.snapshot[0] != version:
            self.snapshot = (version, self.shard.dense.snapshot())
        return self.snapshot[1]

    def dense_for(self, worker: int, flats: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of all dense values those that a worker knows of: parameters that join a job come after the others."""
        if worker not in self.outgrown:
            return flats
        assert self.shard is not None
        by_dtype = dict(zip(self.shard.dense.layout.dtypes, flats, strict=True))
        known = dense_layout(self.outgrown[worker], self.shard.server)
        return [by_dtype[dtype][:size] for dtype, size in known.sizes.items()]

    def adopt(self, plan: Plan) -> None:
        """Go on with further parameters, of which nobody knows yet who has not announced them."""
        self.outgrown = {worker: self.outgrown.get(worker, self.plan) for worker in self.gate.clocks}
        self.former.append(self.plan)
        self.plan, self.growing = plan, True
        self.forget_values()

    def plan_of(self, spec: JobSpec) -> Plan | None:
        """The plan of this spec, which the job has or had: a worker that starts again describes itself as at first."""
        plans = (self.plan, *self.former)
        return next((plan for plan in plans if plan.spec.common == spec.common), None)

    def apply(self, version: int, workers: Sequence[int]) -> None:
        """Close the round that leads to a version, with what these workers have pushed for it."""
        assert self.shard is not None
        contributions = [self.pushed.pop((worker, version)) for worker in workers]
        # All of a worker's push is here or nothing, where there is no second server; without rounds no step has values.
        keep = self.policy.shares_steps and self.plan.spec.settings.server_num > 1
        self.before = None
        dense = self.dense_at(version - 1) if keep else []
        self.snapshot = None
        rows = self.shard.apply(contributions, keep=keep)
        if not self.policy.awaits_answers:  # no answer would be there any sooner for who needs it
            self.shard.apply_pending()
        self.before = PreviousRound(version - 1, dense, rows) if keep else None

    def before_for(self, worker: int, version: int) -> PreviousRound | None:
        """What there was at a version, for a worker that has started again and computes its last step once more."""
        is_last = self.before is not None and self.before.version == version
        return self.before if is_last and self.gate.delivered(worker) > version else None

    def give_up(self) -> None:
        """Whatever was begun, a checkpoint or other values, is not to be."""
        self.begun, self.errand, self.loaded, self.uploads = ("", 0), None, None, []
        if self.frozen is not None:
            self.frozen.leave()
            self.frozen = None

    @cached_property
    def policy(self) -> Policy:
        return policy_of(self.plan.spec.settings)

    def all_waiting(self) -> list[Waiting]:
        early = (waiting for _, waiting in self.early)
        return [*self.parked.values(), *early, *self.claims.waiting(), *self.states.waiting()]

    def waited_for(self, waiting: Waiting) -> list[int]:
        """The workers that have to do something before a request can be answered, as far as that is known."""
        if waiting.gathering:
            return sorted({worker for _, workers in self.hall.lacking() for worker in workers} - {waiting.worker})
        if any(each is waiting for _, each in self.early):
            return [0]
        return list(self.gate.lacking()[1]) if any(each is waiting for each in self.parked.values()) else []

    def go_on_from(self, restore: Restore) -> None:
        """Have workers count on from where they were in a checkpoint."""
        self.steps_before, self.workers_then, self.steps_then = restore.version, restore.workers, restore.steps

    def steps_of(self, worker: int) -> int:
        """How many of its steps the job has. Where workers share none, they count on from where their states are."""
        before = self.steps_before
        if not self.policy.shares_steps:
            before = self.steps_then.get(whose(worker, self.workers_then, self.steps_then), before)
        return before + self.steps.get(worker, 0)

    @property
    def step(self) -> int:
        """How far the job is, by its own steps; where workers share none, by those that the first one has taken."""
        if not self.policy.shares_steps:
            return self.steps_before + self.steps.get(0, 0)
        version = self.gate.version
        ahead = {worker: clock - version for worker, clock in self.gate.clocks.items()}
        return max((self.steps_of(worker) - ahead[worker] for worker in ahead), default=self.steps_before)

    @property
    def is_trained(self) -> bool:
        """Whether its values are others than those that it began with."""
        return self.loads > 0 or self.gate.version != self.steps_before or any(self.steps.values())

    def grant(self) -> Frame:
        """What a worker is told that may do what only one does: also which checkpoint is the last."""
        checkpoint, url = self.last
        return Frame(pb.Reply(granted=True, about=json.dumps({"id": checkpoint, "url": url})))


def new_job(spec: JobSpec, job_id: str, where: str, deadline_s: float) -> Job:
    """One that nobody has done anything for yet; ``where`` its server is, errors tell, and how long a worker waits for
    what only another one may do."""
    workers, policy = spec.settings.worker_num, policy_of(spec.settings)
    claims = Claims(where, deadline_s, lambda: job.grant(), only_first=policy.saves_on_first_worker)
    states = ObjectStates(lockstep=policy.shares_steps)
    job = Job(make_plan(spec), job_id, gate_of(spec.settings, workers), Reductions(workers), claims, states)
    return job


@dataclass(frozen=True)
class Restore:
    """A checkpoint to start from: what its manifest says, how to fill a new shard from it, and by name what it does not
    fill of a job."""

    id: str
    url: str
    seed: int
    version: int
    fill: Callable[[Shard, int], None]
    lacks: Callable[[JobSpec], frozenset[str]]
    strict: bool
    #: reads the states of the workers that it has
    states: Callable[[], Mapping[int, ObjectState]]
    #: the workers whose states those are -> after how many of their steps
    steps: Mapping[int, int]
    #: how many workers the job had
    workers: int
