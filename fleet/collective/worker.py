"""Runs one worker of a collective job: its optimizer's steps and the user's calls.

A *round* is where all workers meet in the process group: at the end of a backward, in a step that completes a merge, or
where local SGD averages. A worker that has stopped goes on meeting the others with nothing to contribute, inside of its
``stop_worker``, until a round has nobody left in it. So data may be uneven, at the cost of one empty round at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fleet.averaging.communicators import buffers_to_share, kinds, layout, outline
from fleet.averaging.exchange import Averaging, Exchange, Flat, Route
from fleet.averaging.reducer import Reducer, Round
from fleet.base.clock import Clock
from fleet.base.cluster import Assignment
from fleet.base.settings import ProcessSettings
from fleet.base.turns import Turns
from fleet.collective.batch_norm import StatisticsGroup
from fleet.collective.dgc import DeepCompression
from fleet.collective.hierarchical import Hierarchical, neighbours
from fleet.collective.power_sgd import LowRank
from fleet.collective.process_group import Group
from fleet.collective.reductions import StoreReductions
from fleet.collective.step_options import MergedGradients, average_parameters
from fleet.errors import ConfigurationError, NonFiniteGradientError, StateError
from fleet.nn.trainables import ElementTypes, Member, members
from fleet.numeric.tensors import finite
from fleet.optimizer import params_of
from fleet.strategy.collective import DistributedStrategy
from fleet.strategy.pace import Pace
from fleet.telemetry.observer import Observer
from fleet.telemetry.worker_figures import WorkerFigures


class CollectiveWorker:
    trains_here = True

    def __init__(
        self,
        assignment: Assignment,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        strategy: DistributedStrategy,
        statistics: StatisticsGroup,
        settings: ProcessSettings,
        clock: Clock,
        group: Group | None = None,
    ) -> None:
        """``group`` is one in which the workers have met already."""
        self.assignment = assignment
        self.optimizers = optimizers
        self.model = model
        self.turns = Turns()
        self.figures = WorkerFigures(clock)
        self.steps = 0
        #: of these, what this process has taken itself
        self.own_steps = 0
        self.loads = 0
        #: how often each was made at a step, after so many loads
        self._calls: Counter[tuple[int, int, str]] = Counter()
        #: what the checkpoint that was loaded last has of the states of workers' own objects
        self.brought: dict[str, Any] = {"of": [], "workers": 0}
        #: on worker 0, by the number of a load: whose states lie in the store since then
        self.laid_out: dict[int, list[int]] = {}
        self.stopped = False
        self.group = group or Group(assignment, settings, clock)
        self.group.exchanging = self.figures.push
        self._strategy = strategy
        self._pace = Pace.of(strategy)
        self._statistics = statistics
        self._known: set[int] = set()
        self._job_id = settings.job_id
        self._check_finite = strategy.check_finite or settings.check_finite
        self._last_round: Round | None = None
        self._unaveraged = False
        self._rounds_seen = 0
        self._is_over = False
        self.members: list[Member] = []
        self._trained: list[torch.nn.Parameter] = []
        #: of the buffers, as all workers have them
        self._kinds: list[Any] | None = None
        self._exchange: Exchange | None = None
        self._compression: DeepCompression | None = None
        self._merged = MergedGradients()
        self._reducer: Reducer | None = None
        self._settings = settings
        self._observer: Observer | None = None

    # ---------------------------------------------------------------- the beginning

    def start(self) -> None:
        """Connect, and take over worker 0's values."""
        self.members = members(self.optimizers, self.model)
        beside = {"what else the model has": outline(self._beside().items())}
        self.group.start({**self._outline(), **beside, "strategy": repr(self._strategy), "FLEET_JOB_ID": self._job_id})
        try:
            self._observer = Observer(str(self.assignment), "worker", self.read_figures, self._settings)
            self.reductions = StoreReductions(self.group.monitor, self.turns)
            if self._pace.sends_gradients:
                self._exchange = self._make_exchange()
            if self._strategy.sync_batch_norm:
                self._statistics.open(self.group)
            self.group.broadcast(self._values(), 0)
            self._arm()
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    @property
    def device(self) -> torch.device:
        """Return the device that this worker trains on."""
        return self._trained[0].device

    def _outline(self) -> dict[str, object]:
        values = outline((member.name, member.param) for member in self.members)
        params = [
            f"{each}{layout(m.param)} {m.param.requires_grad}" for each, m in zip(values, self.members, strict=True)
        ]
        return {"optimizers": [type(each).__name__ for each in self.optimizers], "parameters": params}

    def _make_exchange(self) -> Exchange:
        strategy = self._strategy
        if strategy.dgc is not None:
            self._compression = DeepCompression(self.group, strategy.dgc, self.members)
            return self._compression
        if strategy.power_sgd is not None:
            return LowRank(self.group, strategy.power_sgd, self.members)
        half = torch.float16 if strategy.fp16_allreduce else torch.bfloat16 if strategy.bf16_allreduce else None
        return Averaging(self._make_route(), self.group.size, half)

    def _make_route(self) -> Route:
        strategy, size = self._strategy, self.group.size
        if not strategy.use_hierarchical_allreduce:
            return Flat(self.group, [self.group.split() for _ in range(strategy.nccl_comm_num - 1)])
        inner = strategy.hierarchical_allreduce_inter_nranks or self._workers_here()
        if not 1 < inner < size or size % inner:
            raise ConfigurationError(
                "hierarchical_allreduce_inter_nranks does not divide the workers into groups",
                expected=f"a divisor of {size} between 1 and {size}",
                got=inner,
                todo="Set it, or leave use_hierarchical_allreduce out.",
            )
        return Hierarchical(self.group, neighbours(size, inner), strategy.nccl_comm_num)

    def _workers_here(self) -> int:
        """Return how many workers this host has; 0 where only the first worker's address is known."""
        workers, mine = self.assignment.workers, self.assignment.endpoint
        return sum(mine is not None and worker.host == mine.host for worker in workers) if len(workers) > 1 else 0

    def _arm(self) -> None:
        """Begin to watch the parameters that are trained now."""
        trained = [member for member in self.members if member.param.requires_grad]
        self._trained = [member.param for member in trained]
        self._known = {id(param) for param in self._trained}
        if not trained:
            raise StateError("no parameter of the optimizer requires a gradient")
        names = [member.name for member in trained]
        self._types = ElementTypes(self._trained, names, [param.dtype for param in self._trained])
        modules = () if self.model is None else self.model.modules()
        self._buffered = [module for module in modules if any(True for _ in module.buffers(recurse=False))]
        if self._kinds is None:
            self._kinds = kinds(self._buffered)
        if self._exchange is not None:
            self._reducer = Reducer(
                self._trained,
                names,
                self._types,
                self.group,
                self._exchange,
                self._after_round,
                self.turns,
                asked=[self._has_other_buffers] if self._buffered else [],
            )
            self._reducer.enabled = self._pace.reduces_in_backward

    def extend(self) -> None:
        """Take up parameters that have joined an optimizer, or that are trained from now on, on every worker."""
        known = {id(member.param) for member in self.members}
        self.members = members(self.optimizers, self.model)
        self.group.check_alike("a change of what is trained", self._outline())
        self.group.broadcast([m.param for m in self.members if id(m.param) not in known], 0)
        if self._reducer is not None:
            self._reducer.close()
        if self._exchange is not None:
            self._exchange.adopt(self.members)
        self._arm()

    def go_on_from(self, step: int, brought: dict[str, Any]) -> None:
        """Note that a checkpoint's values have been loaded, beside which nothing of before counts."""
        self.steps, self.brought = step, brought
        self._merged.begin_anew()
        if self._exchange is not None:
            self._exchange.begin_anew(step)

    def _has_newcomers(self) -> bool:
        return any(id(param) not in self._known and param.requires_grad for param in params_of(self.optimizers))

    def _values(self) -> list[torch.Tensor]:
        """Return everything that is to be the same on all workers: what is trained, and what else the model has."""
        return [*(member.param for member in self.members), *self._beside().values()]

    def _beside(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters that no optimizer has, and its buffers, by name."""
        mine = {id(member.param) for member in self.members}
        named = () if self.model is None else (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: value for name, value in named if id(value) not in mine}

    def _after_round(self, done: Round) -> None:
        """Take over the buffers of the first worker that took part, as DistributedDataParallel does with worker 0's."""
        if self._compression is not None:
            self._compression.end_round()
        self._last_round = done if done.workers else self._last_round
        self._is_over = not done.workers
        if any(done.marked):
            self.group.check_alike("a step", {"buffers": outline(self._beside().items())})
            self._kinds = kinds(self._buffered)
        buffers = buffers_to_share(self._buffered)
        if buffers and done.workers:
            self.group.broadcast(buffers, done.workers[0])

    def _has_other_buffers(self) -> bool:
        """Say whether a buffer is of another kind than all workers have it."""
        return kinds(self._buffered) != self._kinds

    # ---------------------------------------------------------------- a step

    def step_here(self, update: Callable[[], None]) -> None:
        """Take one step on the present gradients; ``update`` lets the wrapped optimizers step."""
        self.check("step()")
        self.turns.train()
        if self._reducer is not None and self._reducer.was_interrupted:
            raise StateError(
                "a backward ended in an exception, and the other workers wait for its gradients",
                where=str(self.assignment),
                todo="Let the exception end the script, which ends the job for all.",
            )
        self._types.check()
        late, is_again = self._has_newcomers(), self._rounds_seen != self.group.monitor.rounds
        if late:
            self.extend()
        elif self._reducer is not None and not is_again:
            self._reducer.check_watching()  # nothing was averaged since the step before: is that the user's will?
        if not self._pace.updates(self.steps + 1):
            self._merged.add(self._trained)
            self._count_step()
            return
        if self._pace.merged > 1:
            self._average_merged()
        elif self._reducer is not None and late:
            with nullcontext() if self._compression is None else self._compression.whole(is_again):
                self._reduce(taking_part=True)
        if self._check_finite:
            self._refuse_infinite()
        if self._compression is None:
            update()
        else:
            self._compression.update(update)
        self._merged.begin_anew()
        self._count_step()  # now: one that raises, and is taken again, counts once, as it does for the others
        self._rounds_seen = self.group.monitor.rounds
        self._unaveraged = True
        if self._pace.averages(self.steps):
            self._average(contribute=True)

    def _average_merged(self) -> None:
        """Average what several steps have merged, once: a hook may have raised after that, and the step be taken again
        on the same gradients."""
        merge, reducer = self._strategy.gradient_merge, self._reducer
        assert merge is not None
        assert reducer is not None
        if not self._merged.is_averaged or reducer.has_more:
            self._merged.put_back(self._trained, merge.k_steps if merge.avg else 1)
            self._reduce(taking_part=True)
            self._merged.is_averaged = True

    def _count_step(self) -> None:
        self.steps += 1
        self.own_steps += 1

    def _reduce(self, taking_part: bool) -> None:
        assert self._reducer is not None
        before, self._reducer.enabled = self._reducer.enabled, True
        try:
            self._reducer.run(taking_part)
        finally:
            self._reducer.enabled = before

    def _average(self, contribute: bool) -> None:
        self._after_round(average_parameters(self.group, self._trained, contribute, self._has_other_buffers()))
        self._unaveraged = False

    def _refuse_infinite(self) -> None:
        for member in self.members:
            if member.param.grad is not None and not bool(finite(member.param.grad)):
                raise NonFiniteGradientError(
                    f"the gradient of {member.name!r} holds NaN or infinity",
                    where=f"worker {self.assignment.index}, step {self.steps + 1}",
                )

    def name_of_call(self, call: str) -> str:
        """Name a call that is carried out once for the job: every worker that makes it gets the same name."""
        at = (self.loads, self.steps, call)
        self._calls = Counter({each: count for each, count in self._calls.items() if each[:2] == at[:2]})
        self._calls[at] += 1
        return f"{self.loads}/{self.steps}/{self._calls[at]}/{call}"

    def set_synchronized(self, wanted: bool) -> bool:
        """Set whether backwards reduce from now on, as far as the strategy lets them, and return what it was before."""
        if self._reducer is None:
            return wanted
        before = self._reducer.enabled
        self._reducer.enabled = wanted and self._pace.reduces_in_backward
        return before

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Wait for the others until all have stopped, take over where the last of them has come to, and part."""
        if self.stopped:
            return
        self.stopped = True
        told = self.group.monitor.has_failed  # by a call before this one, whose error is not to be hidden
        try:
            if not told:
                self._accompany()
                self._let_go()
                self.group.stop()
        except BaseException:
            told = True
            raise
        finally:
            self._let_go()
            if told:
                self.group.abandon()

    def _accompany(self) -> None:
        self.group.check_there()
        self.group.monitor.leave()
        self._is_over = False
        if self._compression is not None:
            self._compression.takes_part = False
        while not self._is_over:
            if self._reducer is not None:
                self._reduce(taking_part=False)
            else:  # what this worker has computed since the last average still counts
                self._average(contribute=self._unaveraged)
        last = self._last_round
        if last is not None and len(last.workers) < self.group.size:
            self.group.broadcast(self._values(), last.workers[0])

    def abort(self, reason: str) -> None:
        """End the job for all, because this worker failed."""
        if not self.stopped:
            self.stopped = True
            try:
                self.group.monitor.fail(reason)
            finally:
                self._let_go()
                self.group.abandon()

    def end(self, reason: str) -> None:
        """End the job, since no collective job goes on without one of its workers."""
        self.abort(reason)

    def _let_go(self) -> None:
        """Leave the parameters alone, and hold nothing that holds the process group, or its store would outlive it."""
        if self._observer is not None:
            self._observer.close()
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = self._exchange = self._compression = None
        self._statistics.close()

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "rounds": self.group.monitor.rounds,
            "gradient_bytes": self._sent_bytes,
            "figures": self.read_figures(),
        }

    def read_figures(self) -> dict[str, float]:
        """Return this worker's figures, from any thread."""
        return self.figures.read(step=self.steps, steps=self.own_steps, lockstep=True, sent_bytes=self._sent_bytes)

    @property
    def _sent_bytes(self) -> int:
        exchange = self._exchange
        return 0 if exchange is None else exchange.sent_bytes

    def check(self, call: str) -> None:
        """Refuse a call in another process, and tell of a failure."""
        self.turns.refuse_fork(call)
        self.group.monitor.check()
        self.group.check_there()
