"""Lists names that readers of the source documents look for and PyTorch does not need, each with what to write instead.

A Fluid program is a graph that an executor runs. PyTorch is eager, so there is neither. For a name that is elsewhere
here, or called otherwise, the error says where. ``hasattr`` is told that there is no such name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from fleet.errors import ArgumentTypeError, UnknownNameError


class _Begun(Protocol):
    def _me(self, call: str) -> object:
        """Refuse a call before ``fleet.init()``, since that has to be said first."""
        ...


P = ParamSpec("P")
S = TypeVar("S", bound=_Begun)
R = TypeVar("R")

_LOOP = "PyTorch is eager and runs no programs: call the model for each batch, and optimizer.minimize(loss)."
_BEGIN = "Nothing is to be run first: fleet.init_worker() brings the initial parameters."
_DEVICE = "Nothing says where to run but PyTorch: move the model with model.to(device)."
_DATA = "Take fleet.data, or any loader of PyTorch's: batches are tensors."
_SAVE = "Call fleet.save_persistables(dirname); fleet.Checkpoints saves every so many steps."

#: Of ``fleet``, of a ``fleet.Fleet``, and of the packages that are import points.
NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("DistributeTranspiler", "DistributedTranspiler"),
        "Write: from fleet.transpiler import DistributeTranspiler.",
    ),
    **dict.fromkeys(
        ("DistributeTranspilerConfig", "DistributedTranspilerConfig"),
        "Write: from fleet.transpiler import DistributeTranspilerConfig.",
    ),
    **dict.fromkeys(("RoundRobin", "HashName"), "Write: from fleet.transpiler import RoundRobin, HashName."),
    **dict.fromkeys(
        ("Role", "RoleMakerBase", "UserDefinedRoleMaker", "UserDefinedCollectiveRoleMaker", "EnvRoleMaker"),
        "Role makers are in fleet.role_maker.",
    ),
    **dict.fromkeys(
        ("PaddleCloudRoleMaker", "MPISymetricRoleMaker", "MPISymmetricRoleMaker", "GeneralRoleMaker"),
        "Role makers are in fleet.role_maker; fleet.init() without one finds out by itself who this process is.",
    ),
    **dict.fromkeys(
        ("DistributedStrategy", "CollectiveOptimizer"),
        "Options of collective jobs are in fleet.collective.DistributedStrategy, modes of parameter servers in "
        "fleet.StrategyFactory; fleet.distributed_optimizer takes either.",
    ),
    **dict.fromkeys(
        ("SyncStrategy", "AsyncStrategy", "HalfAsyncStrategy", "GeoStrategy", "TrainerRuntimeConfig"),
        "Call fleet.StrategyFactory.create_sync_strategy() or one of its other methods; with_settings sets the rest.",
    ),
    "StrategyFactory": "It is fleet.StrategyFactory.",
    "Program": "It is fleet.Program.",
    **dict.fromkeys(("main_program", "default_main_program", "Executor", "ParallelExecutor"), _LOOP),
    **dict.fromkeys(("CompiledProgram", "program_guard", "layers", "run", "train_from_dataset"), _LOOP),
    **dict.fromkeys(("startup_program", "default_startup_program"), _BEGIN),
    **dict.fromkeys(("CPUPlace", "CUDAPlace", "cpu_places", "cuda_places"), _DEVICE),
    **dict.fromkeys(("DataFeeder", "DatasetFactory", "InMemoryDataset", "QueueDataset"), _DATA),
    "io": "Call fleet.save_persistables(dirname) or fleet.save_inference_model(dirname, model, example_inputs).",
    "run_worker": "Call fleet.init_worker(), train in a loop of your own, then fleet.stop_worker().",
    **dict.fromkeys(("stop", "close", "finalize"), "Call fleet.stop_worker() when this worker has trained."),
    "stop_server": "A server ends by itself when every worker has called fleet.stop_worker().",
    **dict.fromkeys(
        ("minimize", "backward", "apply_gradients"),
        "Call it on what fleet.distributed_optimizer returned: optimizer.minimize(loss) is zero_grad(), "
        "loss.backward() and step().",
    ),
    **dict.fromkeys(("save", "save_checkpoint", "save_model", "save_dense_params", "save_one_table"), _SAVE),
    **dict.fromkeys(
        ("load", "load_checkpoint", "load_model"),
        "Call fleet.init_server(dirname) to begin with it, or fleet.load_persistables(dirname) in a running job.",
    ),
    "worker_id": "It is fleet.worker_index().",
    "server_id": "It is fleet.server_index().",
    "node_num": "Take fleet.worker_num() and fleet.server_num().",
    "barrier": "It is fleet.barrier_worker().",
    **dict.fromkeys(("all_reduce", "all_gather"), "Call fleet.all_reduce_worker(input, op=…), or fleet.metrics."),
    "util": "Take fleet.split_files(files), fleet.all_reduce_worker(value, op=…) and fleet.barrier_worker().",
    **dict.fromkeys(
        ("shrink_sparse_table", "shrink_dense_table"),
        "It is fleet.shrink(); which rows leave is said by evict= of each fleet.nn.Embedding.",
    ),
    **dict.fromkeys(
        ("load_one_table", "clear_model", "clear_one_table"),
        "Call fleet.load_persistables(dirname), which replaces the whole model; `fleet checkpoint export DIR OUT "
        "--table NAME` writes the rows of one table.",
    ),
    **dict.fromkeys(
        ("save_cache_model", "save_cache_table"),
        "There are no cached tables: predictors ask replicas, as fleet.serving.RemoteModel does.",
    ),
    "distributed_model": "The model stays as it is: fleet.distributed_optimizer(optimizer, model=model) is all.",
    "UserDefinedOptimizer": "Wrap a torch.optim optimizer with fleet.distributed_optimizer(optimizer, model=model).",
}

#: Of ``fleet.role_maker``.
OF_ROLE_MAKERS: Mapping[str, str] = {
    "GeneralRoleMaker": "Write PaddleCloudRoleMaker(), or nothing: fleet.init() reads the same variables, and there is "
    "no Gloo to set up among workers.",
}

_BATCHES = (
    "A trainer program is not run as a whole: call trainer.minimize(loss_fn(trainer.model(x), y)) for each batch."
)

#: Of a trainer's program.
OF_A_TRAINER: Mapping[str, str] = {
    **dict.fromkeys(("run", "train", "step"), _BATCHES),
    **dict.fromkeys(("stop", "stop_worker"), "Call trainer.close()."),
    **dict.fromkeys(
        ("save", "save_persistables", "save_inference_model", "load_persistables"),
        "It is a call of trainer.fleet, as it is one of import fleet.",
    ),
}

#: Of a program before it is transpiled.
OF_A_PROGRAM: Mapping[str, str] = {
    "run": "A program is not run: transpile it, and run what get_pserver_program gives, or train with what "
    "get_trainer_program does.",
    "clone": "To evaluate, call program.model.eval(), and program.model.train() to go on.",
    "global_block": "There is no graph: look at program.model, a torch.nn.Module.",
    "random_seed": "Call torch.manual_seed before the model is made.",
}

_FLUID = {"executor", "exe", "main_program", "program", "feeded_var_names", "target_vars", "export_for_deployment"}


def missing(owner: str, name: str, names: Mapping[str, str] = NAMES) -> AttributeError:
    """Return the error for ``owner`` (in words), which was asked for a name that it lacks."""
    if name not in names:
        return AttributeError(f"{owner} has no attribute {name!r}")
    return UnknownNameError(f"{owner} has no attribute {name!r}", todo=names[name])


def directory_first(
    example: str, *, needs_init: bool = True
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method whose first argument is a directory. Called as Fluid has it, with an executor before the
    directory and programs or variables after it, the method says how it is called here (``example``)."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            given: list[object] = [*args, kwargs.get("dirname")]
            first, *rest = given
            is_late = not _is_path(first) and any(map(_is_path, rest))
            if is_late or not _FLUID.isdisjoint(kwargs):
                if needs_init:
                    self._me(method.__name__)
                told = [*(type(each).__name__ for each in args), *(f"{name}=…" for name in kwargs)]
                raise ArgumentTypeError(
                    f"{method.__name__}() takes a directory first, and neither an executor nor programs and variables",
                    got=f"{method.__name__}({', '.join(told)})",
                    todo=f"Write fleet.{example}.",
                )
            return method(self, *args, **kwargs)

        return checked

    return decorate


def _is_path(given: object) -> bool:
    return isinstance(given, str | os.PathLike)
