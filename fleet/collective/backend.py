"""Puts the parts of a collective job together, and refuses the calls that need servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from fleet.base.clock import Clock
from fleet.base.cluster import Assignment
from fleet.base.lifecycle import Lifecycle
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.series import root_at
from fleet.checkpoint.state import Bytes
from fleet.collective import checkpoint, forward, model_export, object_states
from fleet.collective.batch_norm import StatisticsGroup, synchronize
from fleet.collective.process_group import Group
from fleet.collective.resumption import Resumption, resume
from fleet.collective.synchronized_optimizer import SynchronizedOptimizer
from fleet.collective.trainable import refuse_remote, refuse_untrainable
from fleet.collective.worker import CollectiveWorker
from fleet.errors import ConfigurationError, StateError, UnsupportedError
from fleet.nn.trainables import members
from fleet.optimizer import params_of
from fleet.serving.followed_model import refuse_followed
from fleet.strategy.collective import DistributedStrategy, as_collective

_log = logging.getLogger("fleet")


class CollectiveBackend(Lifecycle[CollectiveWorker, DistributedStrategy]):
    """Runs a collective job's part in this process. Where CUDA is, it chooses this worker's device by its local
    rank."""

    def __init__(self, assignment: Assignment, settings: ProcessSettings, clock: Clock) -> None:
        super().__init__(assignment, settings, clock)
        _refuse_protection(settings)
        self._statistics = StatisticsGroup()
        self._device = _choose_device(assignment)
        #: in which the workers meet from ``resume_from`` on, and what they go on from
        self._group: Group | None = None
        self._beginning: Resumption | None = None

    # ---------------------------------------------------------------- the optimizer

    def distributed_optimizer(
        self, optimizers: Sequence[torch.optim.Optimizer], given: object, model: torch.nn.Module | None, remote: object
    ) -> SynchronizedOptimizer:
        self._refuse_second_optimizer()
        strategy = as_collective(given)
        refuse_followed(params_of(optimizers))
        refuse_remote(remote)
        refuse_untrainable(optimizers, model)
        members(optimizers, model)  # refuses what has no name of its own, while the user's line is on the stack
        scaler = self._change_forward(model, strategy)
        self._parts = optimizers, model, strategy
        return SynchronizedOptimizer(
            optimizers,
            lambda: self._running_worker("step()"),
            lambda: self.running,
            scaler,
            strategy.dgc is not None,
        )

    def _change_forward(
        self, model: torch.nn.Module | None, strategy: DistributedStrategy
    ) -> torch.amp.GradScaler | None:
        asked = [name for name in ("sync_batch_norm", "recompute_checkpoints", "use_amp") if getattr(strategy, name)]
        if model is None:
            if asked:
                raise ConfigurationError(
                    f"{asked[0]} acts on the model, and distributed_optimizer was given none",
                    todo="Hand it over: fleet.distributed_optimizer(optimizer, strategy, model=model).",
                )
            return None
        if strategy.recompute_checkpoints:
            forward.recompute(model, strategy.recompute_checkpoints)
        if strategy.sync_batch_norm:
            synchronize(model, self._statistics)
        if not strategy.use_amp:
            return None
        forward.autocast(model, self._device)
        return torch.amp.GradScaler(self._device.type, init_scale=strategy.amp_loss_scaling)

    # ---------------------------------------------------------------- the job

    def init_server(self, model_dir: object) -> NoReturn:  # noqa: ARG002
        self._no_servers("init_server()", "To go on from a checkpoint call fleet.load_persistables(dirname).")

    def run_server(self) -> NoReturn:
        self._no_servers("run_server()", "Guard it with fleet.is_server().")

    def prefetch(self, *_: object) -> NoReturn:
        self._no_servers("prefetch()", "Iterate over the batches themselves: there are no rows to fetch.")

    def _no_servers(self, call: str, todo: str) -> NoReturn:
        raise StateError(f"{call} was called in a collective job, which has no servers", todo=todo)

    def resume_from(self, given: object, *, strict: bool) -> int:
        self._refuse_late_resuming()
        root = root_at(given)
        group = Group(self._assignment, self._settings, self._clock)
        group.open()
        try:
            self._beginning = resume(group, root, strict=strict)
        except BaseException as error:
            group.monitor.fail(f"{type(error).__name__}: {error}")
            group.abandon()
            raise
        self._group, self._has_resumed = group, True
        _log.info("%s: the job goes on from step %d", self._assignment, self._beginning.step)
        return self._beginning.step

    def let_go(self) -> None:
        """Drop what was begun here before the job."""
        group, self._group = self._group, None
        if group is not None:
            group.monitor.fail(f"worker {group.rank} did something else after resume_from()")
            group.abandon()

    def init_worker(self) -> None:
        parts = self._parts_to_start()
        group, self._group = self._group, None
        worker = CollectiveWorker(self._assignment, *parts, self._statistics, self._settings, self._clock, group)
        worker.start()
        try:
            if self._beginning is not None and self._beginning.url:
                checkpoint.load(worker, self._beginning.url, strict=self._beginning.strict)
        except BaseException as error:
            worker.abort(f"{type(error).__name__}: {error}")
            raise
        self._started(worker)

    def _running_worker(self, call: str) -> CollectiveWorker:
        worker = self._joined_worker(call)
        worker.check(call)
        return worker

    # ---------------------------------------------------------------- among workers

    def barrier_worker(self) -> None:
        worker = self._running_worker("barrier_worker()")
        with worker.figures.meet:
            worker.reductions.barrier()

    def all_reducer(self, call: str) -> Callable[[object, object, object], Any]:
        """Return the function that reduces (value, output, op) over the workers, on behalf of ``call``."""
        worker = self._running_worker(f"{call}()")

        def reduce(value: object, output: object, op: object) -> Any:
            with worker.figures.meet:
                return worker.reductions.all_reduce(f"{call}()", value, output, op)

        return reduce

    # ---------------------------------------------------------------- state

    def _quiet_worker(self, call: str) -> CollectiveWorker:
        """Return the worker for a call that needs all of the training's state, which a step and a backward alter in
        place."""
        worker = self._running_worker(call)
        worker.turns.refuse_other_thread(call)
        return worker

    def undisturbed(self, call: str) -> AbstractContextManager[None]:
        """Surround a call that needs quiet; nothing that could disturb it is let in here."""
        self._quiet_worker(call)
        return nullcontext()

    def begin_saving(
        self,
        dirname: object,
        mode: object,
        own: Bytes | None = None,
        wanted: str = "",
        *,
        or_full: bool = False,  # noqa: ARG002, there are no deltas
    ) -> Callable[[None], None]:
        """Return a function that saves; nothing has to be done before it."""
        worker = self._running_worker("save_persistables()")
        return lambda _: checkpoint.save(worker, dirname, mode, own, wanted)

    def before_goodbye(self, finish: Callable[[], object]) -> None:
        """Do nothing: what has been saved is there when the call returns."""

    #: False, since the next step alters what would be saved, and there are no rows.
    saves_behind = saves_deltas = False

    def steps_taken(self, call: str) -> int:
        return self._running_worker(call).steps

    def steps_of_its_own(self, call: str) -> int:
        """Return how many steps this process has taken, whichever step it began at or has loaded."""
        return self._running_worker(call).own_steps

    def checkpoint_states(self, *, gives: bool) -> object_states.CheckpointStates:
        """Return the object that brings the states of all workers into the checkpoints that ``Checkpoints`` saves."""
        return object_states.CheckpointStates(self._running_worker("Checkpoints()"), gives=gives)

    def keep_state(self, state: object) -> NoReturn:  # noqa: ARG002
        self._running_worker("keep_state()")
        raise UnsupportedError(
            "keep_state() is for a worker that starts again, which none of a collective job can alone",
            todo="Give state= to fleet.Checkpoints, and start the whole job again from its last checkpoint.",
        )

    def resize_servers(self, endpoints: object) -> NoReturn:
        self._running_worker("resize_servers()")
        raise UnsupportedError(
            "resize_servers() moves a job to other servers, and a collective job has none",
            got=repr(endpoints)[:200],
            todo="Leave it out, or start a parameter-server job.",
        )

    def shrink(self) -> NoReturn:
        self._running_worker("shrink()")
        raise UnsupportedError(
            "shrink() lets rows leave tables, and a collective job has no servers to hold any",
            todo="Leave it out, or start a parameter-server job.",
        )

    def load_state(self, state: object) -> bool:
        return object_states.load(self._running_worker("load_state()"), state)

    def load_persistables(self, dirname: object) -> None:
        checkpoint.load(self._quiet_worker("load_persistables()"), dirname)

    def load_state_dict(self, model: object, state: object) -> None:
        checkpoint.load_state(self._quiet_worker("load_state_dict()"), model, state)

    def save_inference_model(self, dirname: str, model: torch.nn.Module, example_inputs: object) -> None:
        worker = self._quiet_worker("save_inference_model()")
        model_export.save_inference_model(worker, dirname, model, example_inputs, self._statistics)

    def state_dict(self, model: torch.nn.Module, *, tables: bool) -> dict[str, torch.Tensor]:
        self._quiet_worker("state_dict()")
        return model_export.state_dict(model, tables=tables)

    def resume_step(self) -> int:
        return self._running_worker("resume_step()").steps


def _refuse_protection(settings: ProcessSettings) -> None:
    names = ", ".join(settings.security.acting)
    if names:
        raise UnsupportedError(
            f"{names} cannot be honoured by a collective job: torch.distributed knows neither tokens nor TLS",
            todo=f"Unset {names}, and keep the job in a network of its own.",
        )


def _choose_device(assignment: Assignment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    local_rank = assignment.index if assignment.local_rank is None else assignment.local_rank
    if local_rank >= count:
        raise ConfigurationError(
            "there are fewer CUDA devices than workers on this host",
            where=str(assignment),
            expected=f"a local rank below {count}",
            got=local_rank,
            todo="Start fewer workers here, or hide the devices with CUDA_VISIBLE_DEVICES= to train on CPUs.",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
