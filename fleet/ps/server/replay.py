"""Runs a durable server again, from what it has kept: without a network, and without writing where it is kept.

A server does the same when it is asked the same in the same order. So its journal is done over by a ``Service`` that
nobody can reach, and looked at before each update: what is there then is the state after the update before it, with all
that was asked since (values that a script has changed, rows that have left).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ObservingSettings, ProcessSettings
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import policy_of
from fleet.ps.server.durability.kept_state import KeptServer, RemovedError, Segment
from fleet.ps.server.job import Due, Job
from fleet.ps.server.service import Service
from fleet.ps.table.stores import MemoryStores, Stores

#: Is shown a server after so many updates, with what comes next unless that is the end; says whether that is enough.
Visit = Callable[[Job, int, Due | None], bool]

#: Nobody listens there.
NOWHERE = Endpoint("replay", 0)


class Replay:
    def __init__(
        self, kept: KeptServer, settings: ProcessSettings, clock: Clock, new_stores: Callable[[], Stores] = MemoryStores
    ) -> None:
        """``settings`` are those of this process, of which the limits count that the server had; ``new_stores`` says
        where rows are kept meanwhile."""
        self.kept = kept
        self._clock = clock
        self._new_stores = new_stores
        self._settings = replace(
            settings, durable_dir="", durable_sync="os", job_id="", launcher="", observing=ObservingSettings()
        )

    def to(self, step: int | None, act: Callable[[Job, int], None]) -> int:
        """Let ``act`` see the server after so many updates, or as it was last; return after how many that was."""
        kept = self.kept
        if step is not None and step < kept.first:
            raise self._out_of_range(step, f"{kept.first} or more")
        reached = -1

        def visit(job: Job, version: int, due: Due | None) -> bool:
            nonlocal reached
            if due is not None and version != step:
                return False
            if step is None or version == step:
                act(job, version)
            reached = version
            return True

        self._run(kept.segments[-1] if step is None else kept.segment_for(step), visit)
        if step is not None and reached != step:
            raise self._out_of_range(step, f"from {kept.first} to {reached}")
        return reached

    def each(self, visit: Visit, until: int | None = None) -> None:
        """Show everything that was kept, or what was up to so many updates, from the first state on, each after one
        more update."""
        if until is not None and until < self.kept.first:
            raise self._out_of_range(until, f"{self.kept.first} or more")
        reached, enough = -1, False
        segments = self.kept.segments
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            stop = None if following is None else following.first
            if stop is not None and stop <= segment.first:
                continue  # other values have taken the place of those that it leads to

            def within(job: Job, version: int, due: Due | None, stop: int | None = stop) -> bool:
                nonlocal reached, enough
                if stop is not None and version >= stop:
                    return True
                reached = version
                enough = visit(job, version, due) or version == until
                return enough

            self._run(segment, within)
            if enough:
                return
        if until is not None:
            raise self._out_of_range(until, f"from {self.kept.first} to {reached}")

    def _run(self, segment: Segment, visit: Visit) -> None:
        """Do a segment over until the visitor has seen enough."""
        stores, watch = self._new_stores(), _Watch(visit)
        try:
            service = Service(
                NOWHERE,
                self._settings,
                self._clock,
                directory=segment,
                stores=stores,
                before_update=watch.before_update,
            )
            try:
                for _ in service.redo:
                    if watch.is_over():
                        return
                if watch.is_over():
                    return
            except RemovedError:
                raise
            except CheckpointError as error:
                raise self._cannot_go_on(error, watch) from None
            job = service.job
            if job is None or job.shard is None or not job.is_whole:
                raise CheckpointError(
                    "the server had not all values yet that it was to begin, or go on, with",
                    where=str(self.kept.directory),
                    got=None if watch.seen is None else f"{watch.seen} steps before that",
                    todo=None if watch.seen is None else f"Replay to step {watch.seen}, or one before it.",
                )
            visit(job, job.version, None)
        finally:
            stores.close()

    def _cannot_go_on(self, error: CheckpointError, watch: _Watch) -> FleetError:
        seen = watch.seen
        todo = "No state before it is left." if seen is None else f"Replay to step {seen}, or one before it."
        return CheckpointError(error.what, where=error.where, expected=error.expected, got=error.got, todo=todo)

    def _out_of_range(self, step: int, there: str) -> ConfigurationError:
        return ConfigurationError(
            "the journals do not have this step",
            where=f"{self.kept.directory}, {self.kept.name}",
            expected=there,
            got=step,
            todo="With FLEET_DURABLE_KEEP=all servers keep every step from the first one on.",
        )


class _Watch:
    """Asks a visitor before each update. What it raises is raised again outside of the server, to which it would be a
    failure of its own."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._enough = False
        self._error: Exception | None = None
        #: the last state that was there
        self.seen: int | None = None

    def before_update(self, job: Job, due: Due) -> None:
        if self._enough or self._error is not None:
            return
        self.seen = due.version - 1
        try:
            self._enough = self._visit(job, due.version - 1, due)
        except Exception as error:
            self._error = error

    def is_over(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._enough


def steps_of(job: Job, version: int) -> int:
    """Return which step of its job a server's state is of: where workers share no steps, its own updates count."""
    if not job.policy.shares_steps:
        return version
    gate, progress = job.rounds.gate, job.progress
    if not gate.clocks:  # all workers have left, the last one at the end
        return progress.before + max(progress.steps.values(), default=0)
    return job.step - (gate.version - version)


def shares_versions(spec: JobSpec) -> bool:
    """Say whether after as many updates all servers of a job are at the same point of it."""
    policy = policy_of(spec.settings)
    return policy.shares_steps or policy.fills_buffers
