"""Defines ``Fleet``, which has every call that a user makes. ``fleet.init`` and the others are the bound methods of one
default instance.

Importing this module imports neither torch nor gRPC nor numba; a backend does, when ``init`` has chosen one.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fleet.base import checks
from fleet.base.clock import SystemClock
from fleet.base.cluster import Assignment
from fleet.base.pointers import directory_first, missing
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.base.unknown_variables import remark
from fleet.errors import ArgumentTypeError, ConfigurationError, NotInitializedError, StateError
from fleet.metrics import Metrics
from fleet.role_maker.base import RoleMakerBase
from fleet.role_maker.doubts import doubts
from fleet.role_maker.resolve import resolve

if TYPE_CHECKING:
    from os import PathLike

    import torch

    from fleet.collective.backend import CollectiveBackend
    from fleet.optimizer import DistributedOptimizer
    from fleet.ps.backend import ParameterServerBackend
    from fleet.ps.wire.transport import Network

_log = logging.getLogger("fleet")

T = TypeVar("T")


class Fleet:
    """Holds one process's part in one job. Several may live side by side in one process; the functions of ``import
    fleet`` are the methods of one of them.

    Examples:
        >>> another = fleet.Fleet()
        >>> another.init()  # a job of its own, beside the one that is running
        >>> another.worker_num()
        1
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None, network: Network | None = None) -> None:
        """``environ`` stands in for the process environment, ``network`` for gRPC (tests, simulations)."""
        self._environ = PROCESS_ENVIRONMENT if environ is None else environ
        self._network = network
        self._assignment: Assignment | None = None
        self._chosen: ParameterServerBackend | CollectiveBackend | None = None
        self._former = 0

    # ---------------------------------------------------------------- who am I

    def init(self, role_maker: RoleMakerBase | None = None, *, is_collective: bool | None = None) -> None:
        """Find out who this process is: from ``role_maker`` if it is given, else from the environment, else it runs
        alone.

        Examples:
            >>> fleet.stop_worker()  # a running job has to end first
            >>> fleet.init()  # no variables of a job, no launcher: alone
            >>> fleet.worker_index(), fleet.worker_num(), fleet.is_server()
            (0, 1, False)
        """
        if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
            raise ArgumentTypeError(
                "role_maker is of the wrong type",
                expected="a RoleMakerBase, as fleet.role_maker has them, or None",
                got=type(role_maker).__name__,
            )
        checks.switch_or_none("is_collective", is_collective)
        if self._chosen is not None and self._chosen.running:
            raise StateError("fleet.init() was called while a job is running", todo="Call fleet.stop_worker() first.")
        settings = ProcessSettings.read(self._environ)
        remark(self._environ)
        if role_maker is None:
            assignment = resolve(is_collective, self._environ)
        else:
            assignment = role_maker.assignment()
            if not isinstance(assignment, Assignment):
                raise ArgumentTypeError(
                    f"{type(role_maker).__name__}.assignment() returns something that is no assignment",
                    expected="what assignment() of one of fleet.role_maker returns",
                    got=type(assignment).__name__,
                    todo="Return UserDefinedRoleMaker(…).assignment(), for example.",
                )
            if is_collective is not None and is_collective is not assignment.collective:
                kind = "collective" if assignment.collective else "parameter-server"
                asked = "collective" if is_collective else "parameter-server"
                raise StateError(
                    f"a {asked} job is asked for, and the role maker describes a {kind} one",
                    expected=f"is_collective={assignment.collective}, or a role maker of the other kind",
                    got=f"is_collective={is_collective} and {assignment.origin}",
                    todo="Leave is_collective out: then the role maker chooses, as it does with import fleet.",
                )
        if self._chosen is not None:
            self._former = self._chosen.former or self._former
            self._chosen.let_go()
        self._assignment = assignment
        self._chosen = None
        self._settings = settings
        _log.info(
            "%s of %d workers and %d servers (%s)",
            assignment,
            assignment.worker_num,
            assignment.server_num,
            assignment.origin,
        )
        doubt = doubts(self._environ) if assignment.embedded else None
        if doubt is not None:
            _log.warning("%s", doubt)
        if assignment.collective:
            self._backend("init")  # where CUDA is, the model goes to this worker's device from here on
        elif self._network is None:
            from fleet.numeric.compiler import put_off_compiler
            from fleet.ps.server.lean import be_lean

            be_lean() if assignment.is_server else put_off_compiler()
        from fleet.numeric.elementary import find_elementary_functions

        find_elementary_functions()

    def is_worker(self) -> bool:
        """Say whether this process trains. A process that runs alone does, and its server is a part of it.

        Examples:
            >>> fleet.is_worker()
            True
        """
        return self._me("is_worker").is_worker

    def is_server(self) -> bool:
        """Say whether this process serves.

        Examples:
            >>> if fleet.is_server():
            ...     fleet.init_server()
            ...     fleet.run_server()
            ... else:
            ...     print("this process trains")
            this process trains
        """
        return self._me("is_server").is_server

    def is_first_worker(self) -> bool:
        """Say whether this is worker 0, which does what has to be done once for the whole job.

        Examples:
            >>> if fleet.is_first_worker():
            ...     fleet.save_persistables("ckpt/final")
        """
        me = self._me("is_first_worker")
        return me.is_worker and me.index == 0

    def worker_index(self) -> int:
        """Return which worker this is, counted from 0. On a server this is an error.

        Examples:
            >>> fleet.worker_index()
            0
        """
        return self._index("worker_index", self._me("worker_index").is_worker)

    def server_index(self) -> int:
        """Return which server this is, counted from 0. On a worker this is an error.

        Examples:
            >>> fleet.server_index()
            Traceback (most recent call last):
                ...
            fleet.errors.StateError: fleet.server_index() was called on worker 0. ...
        """
        return self._index("server_index", self._me("server_index").is_server)

    def worker_num(self) -> int:
        """Return how many workers the job began with.

        Examples:
            >>> fleet.worker_num()
            1
        """
        return self._me("worker_num").worker_num

    def server_num(self) -> int:
        """Return how many servers the job has; 0 in a collective job.

        Examples:
            >>> fleet.server_num()
            1
        """
        return self._me("server_num").server_num

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the workers' addresses where they are known: in collective jobs, and where a variable lists them.

        Examples:
            >>> fleet.worker_endpoints()
            []
        """
        return _listed(self._me("worker_endpoints").workers, to_string)

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the servers' addresses in their order, as a list or as text with commas.

        Examples:
            >>> from fleet.role_maker import Role, UserDefinedRoleMaker
            >>> second = fleet.Fleet()
            >>> second.init(UserDefinedRoleMaker(1, Role.WORKER, 2, ["10.0.0.1:6174", "10.0.0.2:6174"]))
            >>> second.server_endpoints(to_string=True)
            '10.0.0.1:6174,10.0.0.2:6174'
        """
        return _listed(self._me("server_endpoints").servers, to_string)

    def split_files(self, files: list[T]) -> list[T]:
        """Return this worker's share of ``files``, which is contiguous; the first ``len(files) % n`` workers get one
        more.

        Examples:
            >>> from fleet.role_maker import Role, UserDefinedRoleMaker
            >>> first = fleet.Fleet()
            >>> first.init(UserDefinedRoleMaker(0, Role.WORKER, 2, ["10.0.0.1:6174"]))
            >>> first.split_files(["monday", "tuesday", "wednesday"])
            ['monday', 'tuesday']
        """
        me = self._me("split_files")
        if not isinstance(files, list):
            raise ArgumentTypeError("files must be a list", got=type(files).__name__)
        if not me.is_worker:
            raise StateError(f"split_files() was called on {me}", todo="Guard it with fleet.is_worker().")
        each, more = divmod(len(files), me.worker_num)
        start = me.index * each + min(me.index, more)
        return files[start : start + each + (me.index < more)]

    # ---------------------------------------------------------------- training

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: object = None,
        *,
        model: torch.nn.Module | None = None,
        remote: str | Callable[[str, torch.nn.Module], bool] = "sparse",
    ) -> DistributedOptimizer:
        """Wrap one optimizer, or a list of them, for this job. ``strategy=None`` means synchronous training.

        ``model`` gives parameters their names. ``remote`` says which of its ``torch.nn.Embedding`` and ``EmbeddingBag``
        that the optimizers have go to the servers, in place: those made with ``sparse=True``; with ``"all"`` every one
        that is not frozen; or those for which a function of (name, module) returns True. It is asked once about each.

        Examples:
            >>> fleet.stop_worker()
            >>> fleet.init()
            >>> model = torch.nn.Linear(2, 1)
            >>> adam = torch.optim.Adam(model.parameters(), lr=0.01)
            >>> strategy = fleet.StrategyFactory.create_async_strategy()
            >>> optimizer = fleet.distributed_optimizer(adam, strategy, model=model)
            >>> fleet.init_worker()
            >>> optimizer.minimize(model(torch.ones(4, 2)).mean())

            >>> fleet.stop_worker()
            >>> fleet.init()
            >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 4), torch.nn.Linear(4, 1))  # of some library's
            >>> adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
            >>> optimizer = fleet.distributed_optimizer(adagrad, model=model, remote="all")
            >>> fleet.init_worker()
            >>> optimizer.minimize(model(torch.tensor([3, 17])).mean())
        """
        backend = self._backend("distributed_optimizer")
        import torch

        given = optimizer_list(optimizer)
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError("model must be a torch.nn.Module", got=type(model).__name__)
        _check_remote(remote, model)
        return backend.distributed_optimizer(given, strategy, model, remote)

    def join(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: object = None,
        *,
        model: torch.nn.Module | None = None,
        remote: str | Callable[[str, torch.nn.Module], bool] = "sparse",
    ) -> DistributedOptimizer:
        """Make every call that a script makes around its training: for scripts whose training is a library's.

        ``init()``, if it has not been called, and ``distributed_optimizer``; then a worker has ``init_worker()``, and
        ``stop_worker()`` when the script ends. A server serves, and its script ends here.

        Examples:
            >>> fleet.stop_worker()
            >>> fleet.init()  # which a script can leave out
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = fleet.join(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            >>> optimizer.minimize(model(torch.ones(4, 2)).mean())
        """
        if self._assignment is None:
            self.init()
        joined = self.distributed_optimizer(optimizer, strategy, model=model, remote=remote)
        if self.is_server():
            self.init_server()
            self.run_server()
            raise SystemExit(0)
        self.init_worker()
        # This runs before what exit_guard does at exit, which init_worker has registered.
        atexit.register(self._leave)
        return joined

    def resume_from(self, root: str | PathLike[str], *, strict: bool = True) -> int:
        """Let the job go on where it was, and return the step that it goes on from, which is the same on every role. It
        goes on from what durable servers have kept, else from the newest complete checkpoint in ``root`` that all
        servers see, else from the beginning. Call it on every role after ``init()`` and before ``init_server()`` or
        ``init_worker()``. A process that starts again while the job runs gets the running job's step.

        ``root`` is the directory of ``fleet.Checkpoints``, or a URL, and need not be there yet. With ``strict=False`` a
        checkpoint of another model is loaded as far as names and shapes agree; the rest is logged, and begins anew.

        Examples:
            >>> with fleet.Checkpoints("ckpt/run", every_steps=2, background=False) as checkpoints:
            ...     for _ in range(5):
            ...         optimizer.minimize(loss())
            ...         checkpoints.after_step()
            >>> fleet.stop_worker()
            >>> fleet.init()  # the script is run again
            >>> fleet.resume_from("ckpt/run")
            4
            >>> model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
            >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            >>> fleet.init_worker()
            >>> fleet.resume_step()
            4
        """
        backend = self._backend("resume_from")
        if isinstance(root, bytes) or not isinstance(root, str | os.PathLike):
            raise ArgumentTypeError("root must be a path or a URL", got=repr(root))
        checks.switch("strict", strict)
        return backend.resume_from(root, strict=strict)

    def init_server(self, model_dir: str | PathLike[str] | None = None) -> None:
        """Prepare to serve, from a checkpoint if ``model_dir`` names one.

        Examples:
            >>> if fleet.is_server():
            ...     fleet.init_server(fleet.Checkpoints.latest("ckpt/run"))  # None: nothing to go on from
            ...     fleet.run_server()
        """
        self._backend("init_server").init_server(model_dir)

    def run_server(self) -> None:
        """Serve until every worker has stopped or has been given up on.

        Examples:
            >>> if fleet.is_server():
            ...     fleet.init_server()
            ...     fleet.run_server()
        """
        self._backend("run_server").run_server()

    def init_worker(self) -> None:
        """Connect to the servers, or in a collective job to the other workers; agree on the plan, and take over the
        initial parameters.

        Examples:
            >>> fleet.stop_worker()
            >>> fleet.init()
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            >>> fleet.init_worker()
            >>> fleet.resume_step()
            0
        """
        self._backend("init_worker").init_worker()

    def stop_worker(self) -> None:
        """Say goodbye to the servers, once ``Checkpoints`` that are still open are closed. A second call does nothing.

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.stop_worker()
            >>> fleet.stop_worker()
        """
        self._backend("stop_worker").stop_worker()

    def prefetch(
        self,
        batches: Iterable[T],
        lookup: Callable[[T], Mapping[Any, Any]],
        depth: int | None = None,
        *,
        device: Any = None,
        embedding_staleness: int | None = None,
    ) -> Iterator[T]:
        """Iterate over ``batches`` while the rows of the next ``depth`` ones are fetched. ``lookup(batch)`` returns the
        ids that each remote embedding will be asked for, as ``{module: ids}``; the forward then finds their rows there.

        Unless ``depth`` is given, it is 2 with ``device``, and else 1 to begin with: in asynchronous and
        half-asynchronous jobs without delay compensation it grows while batches wait for their rows, as far as that
        helps.

        With ``device`` the rows are brought there, by copies beside the computation. A synchronous job gets the same
        numbers, to the bit. In asynchronous and half-asynchronous jobs ``embedding_staleness`` lets rows stay on the
        device for so many batches after the one in which they were asked for, and be used again.

        Examples:
            >>> batches = [torch.tensor([1, 2]), torch.tensor([3, 4])]
            >>> for ids in fleet.prefetch(batches, lambda batch: {model[0]: batch}):
            ...     optimizer.minimize(model(ids).square().mean())
            >>> fleet.summary()["steps"]
            2
        """
        backend = self._backend("prefetch")
        checks.whole_or_none("depth", depth, 1)
        if not callable(lookup):
            raise ArgumentTypeError("lookup must be a function of a batch", got=type(lookup).__name__)
        checks.whole_or_none("embedding_staleness", embedding_staleness, 1)
        return backend.prefetch(batches, lookup, depth, device, embedding_staleness)

    # ---------------------------------------------------------------- among workers

    def barrier_worker(self) -> None:
        """Wait until every worker has come here. As with all calls in which workers meet, every worker makes the same
        ones in the same order; a worker that has left is not waited for.

        Examples:
            >>> fleet.barrier_worker()
        """
        self._backend("barrier_worker").barrier_worker()

    def all_reduce_worker(self, input: Any, output: Any = None, op: str = "sum") -> Any:
        """Return the ``sum``, ``mean``, ``max`` or ``min`` over all workers, element by element.

        ``input`` is a numpy array, a tensor or a number, of one element type and shape on all workers. The result is of
        the same kind and element type; of integers and bools the sum is int64 and the mean is float64. If ``output`` is
        given, the result is written into it, and it is returned.

        Examples:
            >>> fleet.all_reduce_worker(1280)
            1280
            >>> fleet.all_reduce_worker(torch.tensor([1.0, 2.0]), op="max")
            tensor([1., 2.])
        """
        return self._backend("all_reduce_worker").all_reducer("all_reduce_worker")(input, output, op)

    @property
    def metrics(self) -> Metrics:
        """Return the metrics over the data of all workers.

        Examples:
            >>> fleet.metrics.auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
            0.75
        """
        return Metrics(lambda call: self._backend(call).all_reducer(call))

    # ---------------------------------------------------------------- state

    @directory_first("save_persistables(dirname)")
    def save_persistables(
        self, dirname: str | PathLike[str], mode: str = "full", *, state: dict[str, Any] | None = None
    ) -> None:
        """Write the whole job's state as one checkpoint; one worker calls it, or all do. ``dirname`` is a directory, or
        a URL that fsspec knows. ``mode="delta"`` writes only the rows that changed since the last checkpoint. ``state``
        holds further objects of every worker that makes the call: see ``load_state``.

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.save_persistables("ckpt/final")
            >>> optimizer.minimize(loss())
            >>> fleet.save_persistables("ckpt/final", mode="delta")
            >>> fleet.load_persistables("ckpt/final")
        """
        backend = self._backend("save_persistables")
        own = None
        if state is not None:
            from fleet.checkpoint.state import encoded

            own = encoded(state)
        with backend.undisturbed("save_persistables()"):
            backend.begin_saving(dirname, mode, own)(None)

    def shrink(self) -> None:
        """Let rows leave the tables now that their ``evict=`` no longer keeps, as they do every ``FLEET_EVICT_EVERY``
        steps. One worker calls it, or all do, and it is done once; ``summary()`` tells how many have left. Where a run
        has to be repeated to the bit, call it on all workers after the same step: what a worker has read for the step
        that follows, it has read.

        Examples:
            >>> fleet.stop_worker()
            >>> fleet.init()
            >>> model = fleet.nn.Embedding(None, 4, evict=fleet.nn.MaxRows(2))
            >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            >>> fleet.init_worker()
            >>> optimizer.minimize(model(torch.tensor([1, 2, 3])).sum())
            >>> fleet.shrink()
            >>> fleet.summary()["tables"]["weight"]["rows"]
            2
        """
        self._backend("shrink").shrink()

    def resize_servers(self, endpoints: Sequence[str]) -> None:
        """Move the job, which runs, to the servers at ``endpoints``, some of which it may have already. One worker
        calls it, or all do; it returns when the move is done. Servers that are new have been started with this list, or
        with ``fleet server``. ``run_server()`` of one that is not on it returns. docs/scaling.md says which
        jobs can move.

        Examples:
            >>> fleet.resize_servers(["127.0.0.1:7164", "127.0.0.1:7165"])
            Traceback (most recent call last):
                ...
            fleet.errors.UnsupportedError: a job of one process has its server in it. Start servers of their own.
        """
        self._backend("resize_servers").resize_servers(endpoints)

    def load_state(self, state: dict[str, Any]) -> bool:
        """Restore ``state`` from the checkpoint that the job went on from, and return whether that holds any for this
        worker. If there are more workers now than then, the new ones get worker 0's. ``state`` is a dict of names and
        objects with ``state_dict()`` and ``load_state_dict()``, such as schedulers and datasets, or of plain values,
        which are replaced in the dict itself. Each of its names has to be in the checkpoint.

        Examples:
            >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            >>> state = {"schedule": schedule, "best": 0.25}
            >>> optimizer.minimize(loss())
            >>> schedule.step()
            >>> fleet.save_persistables("ckpt/scheduled", state=state)
            >>> optimizer.minimize(loss())
            >>> schedule.step()
            >>> state["best"] = 0.125
            >>> fleet.load_persistables("ckpt/scheduled")
            >>> fleet.load_state(state), schedule.last_epoch, state["best"]
            (True, 1, 0.25)
        """
        return self._backend("load_state").load_state(state)

    def keep_state(self, state: dict[str, Any]) -> None:
        """Keep ``state``, a dict as ``load_state`` takes it, with the step that comes next. A worker that starts again
        in this job gets back the state of the step it goes on after. It is as safe as the step itself: durable servers
        keep it on their disks, others keep it as long as they live.

        Examples:
            >>> state = {"seen": 0}
            >>> for batch in range(3):
            ...     state["seen"] += 32
            ...     fleet.keep_state(state)
            ...     optimizer.minimize(loss())
            >>> again = {"seen": None}
            >>> fleet.load_state(again), again["seen"]
            (True, 96)
        """
        self._backend("keep_state").keep_state(state)

    def resume_step(self) -> int:
        """Return how many steps of this worker the job knows: 0 when fresh, more after a checkpoint was loaded. Where
        workers share no step, it is the step at which this worker's state in the checkpoint was saved.

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.resume_step()
            1
        """
        return self._backend("resume_step").resume_step()

    @directory_first("load_persistables(dirname)")
    def load_persistables(self, dirname: str | PathLike[str]) -> None:
        """Load a checkpoint into a running job. One worker calls it, or all do; in a collective job all have to.

        Examples:
            >>> fleet.save_persistables("ckpt/before")
            >>> before = loss().item()
            >>> optimizer.minimize(loss())
            >>> fleet.load_persistables("ckpt/before")
            >>> loss().item() == before
            True
        """
        self._backend("load_persistables").load_persistables(dirname)

    @directory_first("save_inference_model(dirname, model, example_inputs), where the model stands for all of them")
    def save_inference_model(
        self, dirname: str, model: torch.nn.Module, example_inputs: tuple[Any, ...] | None = None
    ) -> None:
        """Write as a directory what serving needs of ``model``; one worker calls it, or all do.

        ``example_inputs``, a tuple of positional arguments made of tensors, adds a ``torch.export`` program that plain
        PyTorch runs on batches of any size (docs/serving.md).

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.save_inference_model("serve", model)
            >>> sorted(fleet.load_inference_model("serve"))
            ['0.ids', '0.weight', '1.bias', '1.weight']
        """
        backend = self._backend("save_inference_model")
        from fleet.serving import export

        backend.save_inference_model(export.check_dirname(dirname), export.check_model(model), example_inputs)

    @directory_first("load_inference_model(dirname, model)", needs_init=False)
    def load_inference_model(self, dirname: str, model: torch.nn.Module | None = None) -> Any:
        """Return the tensors that ``save_inference_model`` wrote, by name. With ``model``, a fresh one of the class
        that was saved, return a copy of it that serves with these tensors. This needs no job, not even ``init``, and
        reads no program.

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.save_inference_model("serve", model)
            >>> fresh = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
            >>> served = fleet.load_inference_model("serve", fresh)
            >>> torch.equal(served(ids), model.eval()(ids))
            True
        """
        from fleet.serving import export

        return export.load(export.check_dirname(dirname), None if model is None else export.check_model(model))

    def state_dict(self, model: torch.nn.Module, *, tables: bool = True) -> dict[str, Any]:
        """Return the job's whole ``model`` as plain tensors on the CPU, by the keys of ``model.state_dict()``.

        Buffers are this worker's. A remote table with ``num_embeddings`` comes as one matrix; a table that takes any id
        comes as its sorted ``ids`` beside the rows. ``tables=False`` leaves remote tables out.

        Examples:
            >>> optimizer.minimize(loss())
            >>> state = fleet.state_dict(model)
            >>> state["0.ids"], state["0.weight"].shape
            (tensor([1, 3, 4, 5, 9]), torch.Size([5, 4]))
        """
        backend = self._backend("state_dict")
        from fleet.serving import export

        checks.switch("tables", tables)
        return backend.state_dict(export.check_model(model), tables=tables)

    def load_state_dict(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Give the whole job the values of plain tensors, as ``state_dict`` returns them or as a model in one process
        has them; one worker calls it, or all do. The optimizer's state stays as it is, and so do rows that ``state``
        does not name.

        Examples:
            >>> optimizer.minimize(loss())
            >>> state = fleet.state_dict(model)
            >>> before = loss().item()
            >>> optimizer.minimize(loss())
            >>> fleet.load_state_dict(model, state)
            >>> loss().item() == before
            True
        """
        self._backend("load_state_dict").load_state_dict(model, state)

    # ---------------------------------------------------------------- what happened

    def summary(self) -> dict[str, Any]:
        """Return what the job has done and seen so far, on a worker of a running job: the steps of each worker, the
        sizes of the tables, how old the values were that gradients were computed on (docs/modes/index.md has every
        key), and this worker's own figures (docs/observing.md).

        Examples:
            >>> optimizer.minimize(loss())
            >>> told = fleet.summary()
            >>> told["mode"], told["steps"], told["tables"]["0.weight"]["rows"]
            ('sync', 1, 5)
        """
        return self._backend("summary").summary()

    def report(self, *, examples: int | None = None, loss: Any = None, **figures: Any) -> None:
        """Report what only the script knows, on a worker: how many ``examples`` it has trained on since its last
        report, its ``loss``, and figures of any other name, each a number or a tensor of one element. ``fleet top``,
        the report and the metrics show them. It costs a few assignments; ``minimize(loss)`` reports the loss by itself.

        Examples:
            >>> optimizer.minimize(loss())
            >>> fleet.report(examples=32)
            >>> fleet.summary()["figures"]["examples"]
            32
        """
        self._backend("report").report(examples, loss, figures)

    # ---------------------------------------------------------------- shorthands

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(f"{type(self).__name__!r} object", name)

    def _leave(self) -> None:
        """End this worker's part in the job, if it has one."""
        if self._chosen is not None and self._chosen.running:
            self.stop_worker()

    def _me(self, call: str) -> Assignment:
        if self._assignment is None:
            raise NotInitializedError(f"fleet.{call}() came before fleet.init()", todo="Call fleet.init() first.")
        return self._assignment if self._chosen is None else self._chosen.assignment

    def _index(self, call: str, fits: bool) -> int:
        me = self._me(call)
        if not fits:
            raise StateError(
                f"fleet.{call}() was called on {me}", todo="Guard it with fleet.is_worker() or is_server()."
            )
        return me.index

    def _backend(self, call: str) -> ParameterServerBackend | CollectiveBackend:
        assignment = self._me(call)
        if self._chosen is None:
            self._chosen = self._make_backend(assignment)
        return self._chosen

    def _make_backend(self, assignment: Assignment) -> ParameterServerBackend | CollectiveBackend:
        if assignment.collective:
            from fleet.collective.backend import CollectiveBackend

            return CollectiveBackend(assignment, self._settings, SystemClock())
        from fleet.ps.backend import ParameterServerBackend

        return ParameterServerBackend(assignment, self._settings, SystemClock(), self._network, self._former)


def _check_remote(remote: object, model: object) -> None:
    expected = "'sparse', 'all', or a function of (name, module) that returns True or False"
    if isinstance(remote, type) or not (isinstance(remote, str) or callable(remote)):
        raise ArgumentTypeError("remote is of the wrong type", expected=expected, got=repr(remote))
    if isinstance(remote, str) and remote not in ("sparse", "all"):
        raise ConfigurationError("remote is unknown", expected=expected, got=repr(remote))
    if remote != "sparse" and model is None:
        raise ConfigurationError(
            "remote chooses among the embeddings of a model, and distributed_optimizer was given none",
            got=f"remote={remote!r}",
            todo="Hand it over: fleet.distributed_optimizer(optimizer, model=model, remote=…).",
        )


def optimizer_list(given: object) -> list[torch.optim.Optimizer]:
    """Return one optimizer, or several, as a list."""
    import torch

    from fleet.optimizer import DistributedOptimizer

    optimizers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ArgumentTypeError(
                "optimizer is of the wrong type",
                expected="a torch.optim.Optimizer or a list of them",
                got=type(each).__name__,
            )
        if isinstance(each, DistributedOptimizer):
            raise StateError(
                "the optimizer is one that fleet.distributed_optimizer() has returned, and cannot be wrapped again",
                todo="Hand over the optimizer of torch's, once for each fleet.init(). In a notebook give what is "
                "returned another name.",
            )
    if not optimizers:
        raise ArgumentTypeError("optimizer is an empty list")
    return optimizers


def _listed(endpoints: Sequence[object], to_string: bool) -> list[str] | str:
    texts = [str(endpoint) for endpoint in endpoints]
    return ",".join(texts) if to_string else texts


#: The one whose bound methods are the functions of ``import fleet``.
default = Fleet()
