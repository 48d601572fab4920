"""Runs one habit of a script twice, in plain torch and in a job, and says what the job made of it.

The script is a function of a ``Script``, which holds the model, the optimizer and the batches. Around it both runs do
the same: two steps before, two after, and a look at everything that was trained. So what a script edits has to outlast
the next step to count as done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import PATIENT, Job
from inside import flush, take_fresh

import fleet.nn
from fleet import Fleet
from fleet.errors import FleetError
from fleet.strategy.parameter_server import StrategyFactory

ROWS, DIM, FIELDS = 20, 4, 3
ALL = torch.arange(ROWS)

AS_IN_TORCH, DIFFERS, REFUSED = "as in torch", "differs, said so", "refused"
WRONG = "silently wrong"

TOLERANCE = 1e-6

MODES: Mapping[str, Callable[[], Any]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "ssp": StrategyFactory.create_ssp_strategy,
    "async": StrategyFactory.create_async_strategy,
    "dc-asgd": lambda: StrategyFactory.create_async_strategy(dc_asgd_lambda=0.5),
    "all-reduce": lambda: StrategyFactory.create_sync_strategy(dense="all_reduce"),
    "geo": lambda: StrategyFactory.create_geo_strategy(1),
}


class Net(torch.nn.Module):
    """A table, a layer without bias before a norm with buffers, and a layer on top."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, DIM, sparse=sparse)
        self.hidden = torch.nn.Linear(FIELDS * DIM, 5, bias=False)
        self.norm = torch.nn.BatchNorm1d(5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.above(self.table(ids).flatten(1))

    def above(self, found: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of the rows."""
        return self.out(torch.tanh(self.norm(self.hidden(found)))).squeeze(1)


def sgd(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


@dataclass(frozen=True)
class Habit:
    """One row of a table in docs/torch.md."""

    does: str  #: what a script does, as the page says it
    gets: str
    script: Callable[[Script], Any]
    says: str = ""  #: what a refusal or a warning says; empty: the page alone
    make: Callable[[bool], torch.nn.Module] = Net
    optimizers: Callable[[torch.nn.Module], list[torch.optim.Optimizer]] = sgd
    #: steps before and after the script; None: the script begins the job itself
    before: int | None = 2
    after: int = 2
    #: what plain torch trains: a table with sparse gradients, where the outcome shows it
    sparse: bool = False
    everywhere: bool = False  #: in every mode, and with two workers
    raises: type[BaseException] | None = None  #: what torch raises too
    #: changes parameters by itself: of several workers, worker 0's changes count, and the others are told
    edits: bool = False
    not_in: tuple[str, ...] = ()  #: modes in which there is more to it
    environ: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False  #: takes seconds
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.does


@torch.library.custom_op("habits::halve", mutates_args={"values"})
def halve(values: torch.Tensor) -> None:
    """An operator of a script's own that writes into what it is given."""
    values.mul_(0.5)


class Section:
    """The habits of one section of the page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.habits: list[Habit] = []

    def _add(self, gets: str, does: str, **options: Any) -> Callable[[Callable[[Script], Any]], Callable[..., Any]]:
        def add(script: Callable[[Script], Any]) -> Callable[..., Any]:
            self.habits.append(Habit(does, gets, script, **options))
            return script

        return add

    def as_in_torch(self, does: str, **options: Any) -> Any:
        return self._add(AS_IN_TORCH, does, **options)

    def differs(self, does: str, **options: Any) -> Any:
        return self._add(DIFFERS, does, **options)

    def refused(self, does: str, says: str, **options: Any) -> Any:
        return self._add(REFUSED, does, says=says, **options)


#: Workers are threads, which share what a process has once: the global generator, and torch's numbers of hooks.
one_at_a_time = threading.Lock()

_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag, fleet.nn.Embedding)


class Script:
    """What a script has in its hands. ``remote`` says whether Fleet has taken it over."""

    def __init__(
        self, habit: Habit, fleet: Fleet | None = None, mode: str = "sync", index: int = 0, parts: int = 1
    ) -> None:
        self.habit = habit
        self.index, self.parts = index, parts
        self.remote = fleet is not None
        self.fleet: Any = fleet
        self.mode = mode
        self.taken = 0
        with one_at_a_time, torch.random.fork_rng():
            torch.manual_seed(5)
            self.model: Any = habit.make(self.remote or habit.sparse)
        self.own = habit.optimizers(self.model)
        self.optimizer: Any = self.own[0]
        self.table = getattr(self.model, "table", None)
        self._begun = False
        if habit.before is not None:
            self.begin()

    def wrap(self) -> None:
        if self.remote:
            self.optimizer = self.fleet.distributed_optimizer(
                self.own, MODES[self.mode](), model=self.model, **self.habit.options
            )
            self._wrapped = True

    def begin(self) -> None:
        """Hand model and optimizer to Fleet."""
        if self.remote:
            if self.optimizer is self.own[0]:
                self.wrap()
            self.fleet.init_worker()
            if self.mode in ("async", "dc-asgd"):
                self.optimizer.register_step_post_hook(self._settle)
        elif len(self.own) > 1:
            self.optimizer = _Several(self.own)
        self._begun = True

    def _settle(self, *_: Any) -> None:
        """Let a step have its effect at once, which these modes leave to time."""
        flush(self.fleet)
        take_fresh(self.optimizer)

    # ---------------------------------------------------------------- training

    def ids(self, step: int) -> torch.Tensor:
        return torch.randint(0, ROWS, (6, FIELDS), generator=torch.Generator().manual_seed(step))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch, or this worker's part of it."""
        self.taken += 1
        ids = self.ids(self.taken)[self.index :: self.parts]
        return ids, torch.sin(ids.sum(1).float())

    def loss(self, model: Any = None) -> torch.Tensor:
        ids, target = self.batch()
        return torch.nn.functional.mse_loss((self.model if model is None else model)(ids), target)

    def backward(self) -> torch.Tensor:
        """All of a step but the step."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    @property
    def weight(self) -> Any:
        return self.model.table.weight

    # ---------------------------------------------------------------- afterwards

    def tables(self) -> dict[str, Any]:
        return {name: each for name, each in self.model.named_modules() if isinstance(each, _TABLES)}

    @torch.no_grad()
    def seen(self) -> dict[str, torch.Tensor]:
        """Everything that was trained, the rows by a look-up."""
        if self.table is None:
            return {}
        mode = self.model.training
        self.model.train()
        tables = self.tables()
        seen = {
            name: value.detach().clone()
            for name, value in (*self.model.named_parameters(), *self.model.named_buffers())
            if name.rpartition(".")[0] not in tables and not name.startswith("table.")
        }
        for name, table in {**tables, "table": self.table}.items():
            seen[f"rows of {name}"] = table(ALL[:, None]).view(ROWS, DIM).clone()
        self.model.train(mode)
        return seen


class _Several(torch.optim.Optimizer):
    """Several optimizers as one, in plain torch."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([{"params": []}], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


# ---------------------------------------------------------------------------------------------- what comes of it


@dataclass
class Outcome:
    value: Any = None
    error: BaseException | None = None
    said: list[str] = field(default_factory=list)


def plain(value: Any) -> Any:
    """A value that can be compared: tensors without graph and layout."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value if value.layout is torch.strided else value.to_dense()
        return value.clone().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def run(script: Script) -> Any:
    habit = script.habit
    script.step(habit.before or 0)
    value = plain(habit.script(script))
    between = plain(script.seen())
    script.step(habit.after)
    return {"returned": value, "between": between, "after": plain(script.seen())}


def in_torch(habit: Habit) -> Outcome:
    return caught(lambda: run(Script(habit)))


def in_a_job(habit: Habit, mode: str = "sync") -> Outcome:
    return caught(lambda: _alone(habit, mode))


def in_a_job_of(workers: int, habit: Habit, mode: str = "sync", *, apart: bool = False) -> list[Outcome]:
    """What each worker saw, on two servers; the first also heard what any of them was told. ``apart``: each has its own
    part of a batch, and not all of it."""

    def body(fleet: Fleet, index: int) -> Any:
        return run(Script(habit, fleet, mode, *((index, workers) if apart else ())))

    job = Job(body, workers, 2, environ={**PATIENT, **habit.environ})
    told = caught(lambda: job.join(job.start()))
    assert told.error is None, told.error
    found = [Outcome(job.results.get(index), job.errors.get(f"worker {index}")) for index in range(workers)]
    found[0].said = told.said
    return found


def _alone(habit: Habit, mode: str) -> Any:
    fleet = Fleet(environ=habit.environ)
    fleet.init()
    try:
        return run(Script(habit, fleet, mode))
    finally:
        with contextlib.suppress(FleetError):  # there may be no worker to stop
            fleet.stop_worker()


class _Kept(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def caught(do: Callable[[], Any]) -> Outcome:
    outcome = Outcome()
    handler = _Kept(outcome.said)
    logger = logging.getLogger("fleet")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                outcome.value = do()
            except Exception as error:
                outcome.error = error
        outcome.said += [str(each.message) for each in warned]
    finally:
        logger.removeHandler(handler)
    return outcome


def difference(ours: Any, theirs: Any, where: str = "", tolerance: float = TOLERANCE) -> str | None:
    """The first place in which two values differ, in words."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{where}: {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        if ours.is_floating_point():
            if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
                return None
            return f"{where}: off by {(ours - theirs).abs().max():.2g}"
        return None if torch.equal(ours, theirs) else f"{where}: {ours}, not {theirs}"
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return f"{where}: {list(ours)}, not {list(theirs)}"
        found = (difference(ours[key], theirs[key], f"{where}/{key}", tolerance) for key in ours)
        return next((each for each in found if each), None)
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} items, not {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        found = (difference(*pair, f"{where}/{place}", tolerance) for place, pair in pairs)
        return next((each for each in found if each), None)
    if isinstance(ours, float) and isinstance(theirs, float):
        close = abs(ours - theirs) <= tolerance * (1 + abs(theirs)) or (ours != ours and theirs != theirs)
        return None if close else f"{where}: {ours}, not {theirs}"
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return f"{where}: {ours!r}, not {theirs!r}"
    return None if ours == theirs else f"{where}: {ours!r}, not {theirs!r}"


def judge(habit: Habit, theirs: Outcome, ours: Outcome, tolerance: float = TOLERANCE) -> tuple[str, str]:
    """What a script got, and why that is so."""
    if ours.error is not None:
        if habit.gets != REFUSED and theirs.error is not None and isinstance(ours.error, type(theirs.error)):
            return AS_IN_TORCH, f"both: {ours.error!r}"
        # An error of torch's counts as a refusal where the row says so.
        return REFUSED, f"{type(ours.error).__name__}: {ours.error}"
    if theirs.error is not None:
        return WRONG, f"torch raises {theirs.error!r}, a job nothing"
    found = difference(ours.value, theirs.value, tolerance=tolerance)
    if found is None:
        return AS_IN_TORCH, ""
    return (DIFFERS if habit.gets == DIFFERS else WRONG), found + (f"; said {ours.said}" if ours.said else "")


def is_named(error: BaseException) -> bool:
    return isinstance(error, FleetError)
