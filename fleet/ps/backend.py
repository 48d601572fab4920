"""Implements the parameter-server backend: the one file here that ties concrete classes together."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from fleet.base.clock import Clock
from fleet.base.cluster import Assignment, Endpoint
from fleet.base.interruption import uninterrupted
from fleet.base.lifecycle import Lifecycle
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import Resumed
from fleet.checkpoint.series import latest, root_at
from fleet.checkpoint.state import Bytes, encoded
from fleet.errors import FleetError, NotInitializedError, StateError, UnsupportedError
from fleet.nn.handle import handle_of
from fleet.optimizer import DistributedOptimizer, Kept, params_of
from fleet.plan.specs import ALL_REDUCE
from fleet.ps.consistency import policy_of
from fleet.ps.resume_query import resume
from fleet.ps.server.checkpoint_reader import Restore, restore_from
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.transport import Network
from fleet.ps.worker import checkpoint_save, model_export, replacement, resizing, shrink
from fleet.ps.worker.checkpoint_save import CheckpointStates, Rest
from fleet.ps.worker.describe import Description, describe
from fleet.ps.worker.embedding_remarks import EmbeddingRemarks
from fleet.ps.worker.hybrid_optimizer import HybridOptimizer
from fleet.ps.worker.prefetch import Batch, prefetch
from fleet.ps.worker.remote_choice import Remote, RemoteChoice
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.serving.followed_model import refuse_followed
from fleet.strategy.parameter_server import Strategy, as_strategy

_log = logging.getLogger("fleet")


class ParameterServerBackend(Lifecycle[WorkerRuntime, Strategy]):
    def __init__(
        self,
        assignment: Assignment,
        settings: ProcessSettings,
        clock: Clock,
        network: Network | None,
        former: int = 0,
    ) -> None:
        super().__init__(assignment, settings, clock)
        self._given_network = LoopbackNetwork() if network is None and assignment.embedded else network
        self._network = self._given_network or real_network(settings)
        self.former = former
        self._restore: Restore | None = None
        self._server_prepared = False
        #: listens from ``resume_from`` on, until it runs
        self._listening: ServerRuntime | None = None
        self._resumed: Resumed | None = None
        #: the server of a job of one process, and the thread that it serves on
        self._embedded: tuple[ServerRuntime, threading.Thread] | None = None
        self._remote_choice = RemoteChoice("sparse")
        self._embedding_remarks = EmbeddingRemarks()

    @property
    def assignment(self) -> Assignment:
        """Return what this process is in its job, which may have moved to other servers."""
        return self._assignment if self._worker is None else self._worker.assignment

    # ---------------------------------------------------------------- the optimizer

    def distributed_optimizer(
        self, optimizers: Sequence[torch.optim.Optimizer], given: object, model: torch.nn.Module | None, remote: Remote
    ) -> DistributedOptimizer:
        self._refuse_second_optimizer()
        strategy = as_strategy(given)
        settings = self._settings.joined(dict(strategy.settings))
        if self._listening is not None and settings is not self._settings:
            raise StateError(
                "the strategy has settings for a server that listens already",
                where=str(self._assignment),
                todo="Call distributed_optimizer before resume_from.",
            )
        network = self._network if settings is self._settings else self._given_network or real_network(settings)
        if strategy.dense == ALL_REDUCE:
            self._refuse_protection(settings)
        self._refuse_kept(optimizers)
        self._parts = (optimizers, model, strategy)
        self._remote_choice = RemoteChoice(remote)
        try:
            described = self._describe()
        except BaseException:
            self._parts = None
            raise
        self._settings, self._network = settings, network
        if self._assignment.is_server:
            # Servers learn everything from the first worker's hello; this process's copy of the tables is not needed.
            for handle in described.handles:
                handle.release()
        kind = HybridOptimizer if strategy.dense == ALL_REDUCE else DistributedOptimizer
        return kind(optimizers, lambda: self._running_worker("step()"), lambda: self.running, self._state_kept_at)

    def _refuse_kept(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse a model that somebody else in this process keeps."""
        params = [*params_of(optimizers)]
        refuse_followed(params)
        for handle in map(handle_of, params):
            by = None if handle is None else handle.source
            if handle is not None and isinstance(by, WorkerRuntime) and not by.stopped and self._assignment.is_worker:
                raise StateError(
                    f"the rows of {handle.name!r} are on the servers of another job, which runs in this process",
                    where=str(self._assignment),
                    todo="Call stop_worker() of that job first, or build a model for each job.",
                )

    def _refuse_protection(self, settings: ProcessSettings) -> None:
        """Refuse what the workers cannot have among themselves."""
        names = ", ".join(settings.security.acting)
        if names and self._assignment.worker_num > 1:
            raise UnsupportedError(
                f"{names} cannot be honoured with dense={ALL_REDUCE!r}: between workers there are torch's connections, "
                "which know neither tokens nor TLS",
                todo=f"Leave dense at 'servers', or unset {names} and keep the job in a network of its own.",
            )

    def _state_kept_at(self) -> Kept | None:
        """Return what is kept elsewhere of the optimizers' state; None where all of it is in them."""
        assert self._parts is not None
        optimizers, _, strategy = self._parts
        here = policy_of(strategy, strategy.update_frequency).trains_on_workers
        is_all = not here and strategy.dense != ALL_REDUCE
        # The state of rows is in no optimizer.
        if not is_all and all(handle_of(param) is None for param in params_of(optimizers)):
            return None
        at = 0 if self._resumed is None else self._resumed.step
        if self._worker is not None:
            at = self._worker.progress.taken
        where = (
            "is on the servers" if is_all else "for rows lies beside these" if here else "for rows is on the servers"
        )
        return Kept(at, lambda param: is_all or handle_of(param) is not None, where, is_saved=not here)

    # ---------------------------------------------------------------- going on

    def resume_from(self, given: object, *, strict: bool) -> int:
        self._refuse_late_resuming()
        if self._server_prepared:
            raise StateError("resume_from() came after init_server()", todo="Call it before init_server().")
        root = root_at(given)
        self._resumed = self._resume_alone(root, strict) if self._assignment.embedded else self._resume(root, strict)
        self._has_resumed = True
        _log.info("%s: the job goes on from step %d", self._assignment, self._resumed.step)
        return self._resumed.step

    def _resume_alone(self, root: Place, strict: bool) -> Resumed:
        found = latest(root)
        if found is None:
            return Resumed(0)
        self._restore = restore_from(found.where, strict=strict)
        return Resumed(self._restore.version)

    def _resume(self, root: Place, strict: bool) -> Resumed:
        a = self._assignment
        if a.is_server:
            self._listening = self._make_server(a.servers[a.index], resumes=root)
        clock, own = self._clock, self._listening
        try:
            return resume(a, self._network, self._settings, clock, root.url, strict=strict, own=own, former=self.former)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Drop what was begun here before the job."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()

    # ---------------------------------------------------------------- servers

    def init_server(self, model_dir: object) -> None:
        if not (self._assignment.is_server or self._assignment.embedded):
            raise StateError(f"init_server() was called on {self._assignment}", todo="Guard it with fleet.is_server().")
        if self._worker is not None:
            raise StateError("init_server() came after init_worker()", todo="Call it before: the server is running.")
        if self._has_resumed and model_dir is not None:
            raise StateError(
                "init_server(model_dir) came after resume_from(), and both say what the job goes on from",
                got=f"model_dir={str(model_dir)!r}",
                todo="Leave the model_dir out.",
            )
        if not self._has_resumed:
            self._restore = None if model_dir is None else restore_from(model_dir)
        self._server_prepared = True

    def run_server(self) -> None:
        if not self._assignment.is_server:
            raise StateError(f"run_server() was called on {self._assignment}", todo="Guard it with fleet.is_server().")
        if not self._server_prepared:
            raise NotInitializedError("run_server() came before init_server()", todo="Call fleet.init_server() first.")
        self._server_prepared = False
        server, self._listening = self._listening, None
        server = server or self._make_server(self._assignment.servers[self._assignment.index])
        server.run()
        self.former = server.one_that_was_here
        self._done()

    def _make_server(self, endpoint: Endpoint, resumes: Place | None = None) -> ServerRuntime:
        expected = (self._assignment.worker_num, self._assignment.servers)
        # One that lives and dies with its only worker has nobody to keep anything for, and the port is the worker's.
        settings = self._settings
        if self._assignment.embedded:
            if settings.durable_dir:
                _log.warning("FLEET_DURABLE_DIR has no effect on a process that runs alone: its server ends with it")
            settings = replace(
                settings, durable_dir="", observing=replace(settings.observing, metrics_port=None), launcher="itself"
            )
        return ServerRuntime(
            endpoint, self._network, settings, self._clock, expected=expected, restore=self._restore, resumes=resumes
        )

    # ---------------------------------------------------------------- workers

    def init_worker(self) -> None:
        if not self._assignment.is_worker:
            raise StateError(f"init_worker() was called on {self._assignment}", todo="Guard it with fleet.is_worker().")
        _, model, strategy = self._parts_to_start()
        a = self._assignment
        clock, former = self._clock, self.former
        worker = WorkerRuntime(a, self._describe, strategy, self._network, self._settings, clock, model, former)
        asked = resizing.AskedMove(worker)
        worker.move_as_asked, worker.before_close = asked.go_on, asked.give_up
        try:
            if a.embedded:
                self._serve_beside(a.servers[0])
            worker.start(self._resumed)
            with uninterrupted():  # or rows would be gone with the server that has them
                worker.begin()
                if model is not None:
                    worker.watch(model)
                self._started(worker)
        except BaseException:
            if self._worker is None:
                worker.close()
                if self._embedded is not None:
                    self._embedded[0].end()
                self._after_worker()
            raise

    def _serve_beside(self, endpoint: Endpoint) -> None:
        with uninterrupted():  # or it would listen, and nobody know of it
            server = self._make_server(endpoint)
            thread = threading.Thread(target=_run_quietly, args=(server,), name="fleet-server", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no room for it
                server.close()
                raise
            self._embedded = server, thread

    def _describe(self) -> Description:
        """Describe the user's optimizers and model as they are now."""
        assert self._parts is not None
        optimizers, model, strategy = self._parts
        self._remote_choice.go_remote(optimizers, model)
        a = self.assignment
        evict_every = self._settings.joined(dict(strategy.settings)).evict_every
        described = describe(optimizers, model, strategy, a.server_num, a.worker_num, evict_every)
        if model is not None and a.is_worker and a.index == 0:  # the job is told once
            self._embedding_remarks.tell(model, described)
        return described

    def _after_worker(self) -> None:
        if self._worker is not None and self._worker.has_left:
            self.former = self._worker.incarnation
        if self._embedded is not None:
            self._embedded[1].join(timeout=10.0)

    def prefetch(
        self,
        batches: Iterable[Batch],
        lookup: Callable[[Batch], Mapping[Any, Any]],
        depth: int | None,
        device: object,
        embedding_staleness: int | None,
    ) -> Iterator[Batch]:
        return prefetch(self._running_worker("prefetch()"), batches, lookup, depth, device, embedding_staleness)

    # ---------------------------------------------------------------- among workers

    def barrier_worker(self) -> None:
        self._running_worker("barrier_worker()").barrier()

    def all_reducer(self, call: str) -> Callable[[object, object, object], Any]:
        """Return the function that reduces (value, output, op) over the workers, on behalf of ``call``."""
        worker = self._running_worker(f"{call}()")
        return lambda value, output, op: worker.all_reduce(f"{call}()", value, output, op)

    # ---------------------------------------------------------------- state

    def undisturbed(self, call: str) -> AbstractContextManager[Any]:
        """Surround what is one call to the user; no other thread of this process trains on between its parts."""
        return self._running_worker(call).turns.take()

    def begin_saving(
        self, dirname: object, mode: object, own: Bytes | None = None, wanted: str = "", *, or_full: bool = False
    ) -> Rest:
        """Do the part of saving that needs this thread, and return a function that does the rest (``saves_behind``)."""
        worker = self._running_worker("save_persistables()")
        return checkpoint_save.begin(worker, dirname, mode, own, wanted, or_full)

    def before_goodbye(self, finish: Callable[[], object]) -> None:
        """Have what still saves behind the training finish before this worker says that it is done."""
        self._running_worker("Checkpoints()").before_goodbye.append(finish)

    #: The rest of a save may be done on another thread, while this one trains.
    saves_behind = True
    saves_deltas = True

    def steps_taken(self, call: str) -> int:
        return self._running_worker(call).progress.taken

    def steps_of_its_own(self, call: str) -> int:
        """Return how many steps this process has taken, whichever step it began at or has loaded."""
        return self._running_worker(call).progress.own

    def checkpoint_states(self, *, gives: bool) -> CheckpointStates:
        """Return the object that brings the states of all workers into the checkpoints that ``Checkpoints`` saves."""
        return CheckpointStates(self._running_worker("Checkpoints()"), gives=gives)

    def keep_state(self, state: object) -> None:
        worker = self._running_worker("keep_state()")
        data = encoded(state)
        worker.in_turn("keep_state()", lambda: worker.own_states.send_with_step(data))

    def load_state(self, state: object) -> bool:
        return replacement.load_own_state(self._running_worker("load_state()"), state)

    def shrink(self) -> None:
        shrink.shrink(self._running_worker("shrink()"))

    def resize_servers(self, endpoints: object) -> None:
        resizing.resize(self._running_worker("resize_servers()"), endpoints)

    def load_persistables(self, dirname: object) -> None:
        replacement.load(self._running_worker("load_persistables()"), dirname)

    def load_state_dict(self, model: object, state: object) -> None:
        replacement.load_state(self._running_worker("load_state_dict()"), model, state)

    def save_inference_model(self, dirname: str, model: torch.nn.Module, example_inputs: object) -> None:
        model_export.save_inference_model(
            self._running_worker("save_inference_model()"), dirname, model, example_inputs
        )

    def state_dict(self, model: torch.nn.Module, *, tables: bool) -> dict[str, torch.Tensor]:
        return model_export.state_dict(self._running_worker("state_dict()"), model, tables=tables)

    def resume_step(self) -> int:
        return self._joined_worker("resume_step()").progress.steps


def _run_quietly(server: ServerRuntime) -> None:
    """Run the server inside a worker's process: what ends it reaches the worker as replies, not as a second
    traceback."""
    with contextlib.suppress(FleetError):
        server.run()
