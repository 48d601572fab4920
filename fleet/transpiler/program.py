"""Defines the source documents' lower-level door: ``fleet.Program`` and ``DistributeTranspiler``.

A Fluid program is a graph that its transpiler rewrites. PyTorch is eager, so a program here is a model with its
optimizer, and the transpiler returns handles: each has a ``Fleet`` of its own and makes the calls that any script makes
on ``import fleet``. All other calls, such as ``save_persistables``, are methods of a handle's ``fleet``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fleet.api import Fleet, optimizer_list
from fleet.base import checks
from fleet.base.cluster import Endpoint, Role
from fleet.base.pointers import OF_A_PROGRAM, OF_A_TRAINER, missing
from fleet.errors import ArgumentTypeError, ConfigurationError, NotInitializedError, StateError
from fleet.plan.config import DistributeTranspilerConfig
from fleet.role_maker import arguments
from fleet.role_maker.user_defined import UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from fleet.strategy.collective import DistributedStrategy, as_collective
from fleet.strategy.parameter_server import Strategy, as_strategy

if TYPE_CHECKING:
    import torch

    from fleet.optimizer import DistributedOptimizer
    from fleet.ps.wire.transport import Network

_PSERVERS = "127.0.0.1:6174"


class Program:
    """Holds a model and what trains it, one optimizer or a list of them.

    Examples:
        >>> program = fleet.Program(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> fleet.Program.last() is program
        True
    """

    _last: ClassVar[Program | None] = None

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError("model must be a torch.nn.Module", got=type(model).__name__)
        self.model = model
        self.optimizers = optimizer_list(optimizer)
        Program._last = self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(f"{type(self).__name__!r} object", name, OF_A_PROGRAM)

    @classmethod
    def last(cls) -> Program:
        """Return the program made last in this process, which ``transpile`` takes when it is given none."""
        if cls._last is None:
            raise NotInitializedError(
                "there is no program yet", todo="Make one with fleet.Program(model, optimizer), or pass program=."
            )
        return cls._last


class DistributeTranspiler:
    """Turns a program into one for a server and one for a trainer of the same job.

    ``environ`` stands in for the process environment, ``network`` for gRPC, as in ``fleet.Fleet``.

    Examples:
        >>> from fleet.transpiler import DistributeTranspiler
        >>> model = torch.nn.Linear(2, 1)
        >>> program = fleet.Program(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> transpiler = DistributeTranspiler()
        >>> transpiler.transpile(trainer_id=0, program=program, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=2)
        >>> transpiler.get_pserver_program("10.0.0.2:6174")  # in a server; get_trainer_program() in a trainer
        ServerProgram('10.0.0.2:6174')
    """

    def __init__(
        self,
        config: DistributeTranspilerConfig | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        network: Network | None = None,
    ) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise ArgumentTypeError("config must be a DistributeTranspilerConfig", got=type(config).__name__)
        self._config = config
        self._environ = environ
        self._network = network
        self._job: _Job | None = None
        self._servers: dict[Endpoint, ServerProgram] = {}
        self._trainer: TrainerProgram | None = None

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = _PSERVERS,
        trainers: int | str = 1,
        sync_mode: bool | None = None,
        startup_program: Program | None = None,
        current_endpoint: str | None = None,
    ) -> None:
        """Say what the job is. Every process of it gives the same ``pservers`` and ``trainers``. In a collective mode
        (``config.mode``) ``trainers`` is the list of the trainers' endpoints, and there are no servers.

        ``program=None`` is the last ``fleet.Program`` made. ``sync_mode=None`` leaves it to the config.
        ``get_pserver_program`` and ``get_startup_program`` take ``current_endpoint`` when they are given none.
        """
        if self._job is not None:
            raise StateError("transpile() was called twice", todo="Make another DistributeTranspiler.")
        config = self._config_for(sync_mode)
        strategy = as_strategy(config) if config.mode == "pserver" else as_collective(config)
        program = Program.last() if program is None else _program("program", program)
        _check_startup(startup_program, program)
        here = None if current_endpoint is None else _endpoint("current_endpoint", current_endpoint)
        if isinstance(strategy, DistributedStrategy):
            self._job = _collective_job(program, strategy, trainer_id, pservers, trainers, here)
        else:
            self._job = _server_job(program, strategy, trainer_id, pservers, trainers, here)
        _guard(program)

    def get_trainer_program(self, wait_port: bool | None = None) -> TrainerProgram:
        """Connect this process as trainer ``trainer_id``, and take over the initial parameters.

        With ``wait_port`` (None: what the config says) it waits for servers that are not there yet; without it, a
        server that is not there is an error at once. A second call returns the same trainer.
        """
        job = self._transpiled("get_trainer_program")
        checks.switch_or_none("wait_port", wait_port)
        if self._trainer is not None and wait_port is not None:
            raise StateError("wait_port comes too late: this trainer is connected", got=f"wait_port={wait_port}")
        if self._trainer is None:
            arguments.below("trainer_id", job.trainer_id, job.trainers, "trainers")
            strategy = job.strategy
            if wait_port is False and not isinstance(strategy, Strategy):
                raise ConfigurationError(
                    "wait_port=False: in a collective job every trainer waits for the others", todo="Leave it out."
                )
            if wait_port is not None and isinstance(strategy, Strategy):
                strategy = replace(strategy, wait_port=wait_port)
            self._trainer = TrainerProgram(job, strategy, self._fleet(job, Role.WORKER, job.trainer_id))
        return self._trainer

    def get_pserver_program(self, endpoint: str | None = None) -> ServerProgram:
        """Return the program of the server at ``endpoint``, one of ``pservers``."""
        job = self._transpiled("get_pserver_program")
        if job.workers:
            raise StateError(
                "get_pserver_program() was called in a collective job, which has no servers",
                todo="Call get_trainer_program() in every process.",
            )
        parsed = job.here if endpoint is None else _endpoint("endpoint", endpoint)
        if parsed is None:
            raise ConfigurationError(
                "get_pserver_program() does not know which server this is",
                expected=f"one of {job.listed()}",
                got="no endpoint, here or in transpile(current_endpoint=…)",
            )
        if parsed not in job.servers:
            raise ConfigurationError(
                "the endpoint is not among pservers", expected=f"one of {job.listed()}", got=str(parsed)
            )
        if parsed not in self._servers:
            fleet = self._fleet(job, Role.SERVER, job.servers.index(parsed))
            self._servers[parsed] = ServerProgram(job, fleet, parsed)
        return self._servers[parsed]

    def get_startup_program(
        self,
        endpoint: str | None = None,
        pserver_program: ServerProgram | None = None,
        startup_program: Program | None = None,
    ) -> StartupProgram:
        """Return the program that the server at ``endpoint`` runs first. ``pserver_program`` is what
        ``get_pserver_program`` returned for it."""
        job = self._transpiled("get_startup_program")
        server = self.get_pserver_program(endpoint)
        if pserver_program not in (None, server):
            raise ConfigurationError(
                "pserver_program does not belong to this endpoint",
                expected=f"what get_pserver_program({str(server.endpoint)!r}) returned",
                got=repr(pserver_program),
            )
        _check_startup(startup_program, job.program)
        return StartupProgram(server)

    def get_pserver_programs(self, endpoint: str | None = None) -> tuple[ServerProgram, StartupProgram]:
        """Return both programs of a server."""
        return self.get_pserver_program(endpoint), self.get_startup_program(endpoint)

    def _config_for(self, sync_mode: bool | None) -> DistributeTranspilerConfig:
        """Return the config with ``sync_mode`` as ``transpile`` was given it: it can be said in both places."""
        config = copy.copy(self._config or DistributeTranspilerConfig())
        checks.switch_or_none("sync_mode", sync_mode)
        if sync_mode and not config.sync_mode:
            # True is the config's default, so that False was set on purpose; the other way round the argument wins.
            raise ConfigurationError(
                "transpile(sync_mode=True) contradicts config.sync_mode = False", todo="Say it in one place."
            )
        if sync_mode is not None:
            config.sync_mode = sync_mode
        return config

    def _transpiled(self, call: str) -> _Job:
        if self._job is None:
            raise NotInitializedError(f"{call}() came before transpile()", todo="Call transpile(trainer_id, …) first.")
        return self._job

    def _fleet(self, job: _Job, role: Role, index: int) -> Fleet:
        fleet = Fleet(environ=self._environ, network=self._network)
        if job.workers:
            fleet.init(UserDefinedCollectiveRoleMaker(index, [str(worker) for worker in job.workers]))
        else:
            fleet.init(UserDefinedRoleMaker(index, role, job.trainers, [str(server) for server in job.servers]))
        return fleet


@dataclass(frozen=True)
class _Job:
    """Holds what ``transpile`` was told."""

    program: Program
    strategy: Strategy | DistributedStrategy
    servers: tuple[Endpoint, ...]
    trainers: int
    trainer_id: int
    here: Endpoint | None
    #: The trainers' endpoints, in a collective job only.
    workers: tuple[Endpoint, ...] = ()

    def listed(self) -> str:
        return ", ".join(map(str, self.servers))


class TrainerProgram:
    """Trains in a running job, collective or not. ``optimizer`` is what ``fleet.distributed_optimizer`` returns:
    schedulers take it, and gradients may be accumulated and clipped between its ``backward`` and ``step``."""

    def __init__(self, job: _Job, strategy: Strategy | DistributedStrategy, fleet: Fleet) -> None:
        self.model = job.program.model
        self.fleet = fleet
        self.optimizer: DistributedOptimizer = fleet.distributed_optimizer(
            job.program.optimizers, strategy, model=self.model
        )
        fleet.init_worker()

    def minimize(self, loss: torch.Tensor) -> None:
        """Take a step on ``loss``: ``zero_grad(); loss.backward(); step()``."""
        self.optimizer.minimize(loss)

    def close(self) -> None:
        """Tell every server, or the other trainers, that this one is done. A second call does nothing."""
        self.fleet.stop_worker()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(f"{type(self).__name__!r} object", name, OF_A_TRAINER)


class ServerProgram:
    """Serves the job; its startup program runs first."""

    def __init__(self, job: _Job, fleet: Fleet, endpoint: Endpoint) -> None:
        self.fleet = fleet
        self.endpoint = endpoint
        self.started = False
        self._served = False
        self._job = job

    def start(self, model_dir: str | None) -> None:
        if self.started:
            raise StateError(f"the startup program of {self.endpoint} was run twice")
        self.fleet.init_server(model_dir)  # first, as it may fail and be called again
        # The server learns the model from its trainers; what it could not train is refused here too, and tables that
        # this process built go, as their rows come from trainer 0.
        self.fleet.distributed_optimizer(
            self._job.program.optimizers, self._job.strategy, model=self._job.program.model
        )
        self.started = True

    def run(self) -> None:
        """Serve until every trainer has closed or has been given up on."""
        if not self.started:
            raise NotInitializedError(
                f"the server program of {self.endpoint} came before its startup program",
                todo="Call get_startup_program(endpoint, pserver_program).run() first.",
            )
        if self._served:
            raise StateError(f"the server program of {self.endpoint} was run twice", todo="Transpile anew for another.")
        self._served = True
        self.fleet.run_server()

    def __repr__(self) -> str:
        return f"ServerProgram({str(self.endpoint)!r})"


class StartupProgram:
    """Prepares a server, from a checkpoint if ``model_dir`` names one."""

    def __init__(self, server: ServerProgram) -> None:
        self._server = server

    def run(self, model_dir: str | None = None) -> None:
        self._server.start(model_dir)


def _guard(program: Program) -> None:
    """Hand the program over to a job: from here on its optimizers must not train this process alone."""
    from fleet.optimizer import guard_until_wrapped

    guard_until_wrapped(
        program.optimizers,
        "Make the trainer with get_trainer_program(), and call its minimize(loss), or step() on its optimizer.",
    )


def _server_job(
    program: Program, strategy: Strategy, trainer_id: int, pservers: object, trainers: object, here: Endpoint | None
) -> _Job:
    if not isinstance(pservers, str):
        raise ArgumentTypeError("pservers must be text", expected="'host:port,host:port'", got=repr(pservers))
    servers = arguments.endpoints("pservers", pservers.split(","))
    if isinstance(trainers, str):
        raise ArgumentTypeError(
            "trainers must be an int",
            expected="how many trainers there are; a list of their addresses belongs to mode='nccl2'",
            got=repr(trainers),
        )
    return _Job(
        program,
        strategy,
        servers,
        arguments.count("trainers", trainers),
        arguments.index("trainer_id", trainer_id),
        here,
    )


def _collective_job(
    program: Program,
    strategy: DistributedStrategy,
    trainer_id: int,
    pservers: object,
    trainers: object,
    here: Endpoint | None,
) -> _Job:
    if pservers != _PSERVERS:
        raise ConfigurationError("pservers: a collective job has no servers", got=repr(pservers), todo="Leave it out.")
    if not isinstance(trainers, str):
        raise ArgumentTypeError(
            "trainers must be text in a collective mode", expected="'host:port,host:port'", got=repr(trainers)
        )
    workers = arguments.endpoints("trainers", trainers.split(","))
    index = arguments.index("trainer_id", trainer_id)
    arguments.below("trainer_id", index, len(workers), "trainers")
    if here is not None and workers[index] != here:
        raise ConfigurationError(
            "current_endpoint is not the endpoint of this trainer", expected=str(workers[index]), got=str(here)
        )
    return _Job(program, strategy, (), len(workers), index, here, workers)


def _program(name: str, given: object) -> Program:
    if not isinstance(given, Program):
        raise ArgumentTypeError(f"{name} must be a fleet.Program or None", got=type(given).__name__)
    return given


def _check_startup(given: object, program: Program) -> None:
    """Refuse a startup program other than the program itself, as there is none apart from it."""
    if given is not None and _program("startup_program", given) is not program:
        raise ConfigurationError(
            "startup_program is another program", expected="the same as program, or None", got="two programs"
        )


def _endpoint(name: str, text: object) -> Endpoint:
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} must be text", expected="'host:port'", got=repr(text))
    return arguments.endpoint(text, where=name)
