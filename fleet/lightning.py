"""Lets a ``lightning.pytorch.Trainer`` train with a job: ``Trainer(strategy=FleetStrategy())``.

It is made of Fleet's public calls and imported by nothing else. What Lightning writes (``*.ckpt``) holds the whole
model; the state of its optimizer is a checkpoint of the job's beside it (``*.ckpt.fleet``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fleet.api import Fleet, default
from fleet.errors import CheckpointError, NotInitializedError, StateError, UnsupportedError

try:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies import ParallelStrategy
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    # Python's own kind, as scripts catch it that can do without.
    needs = "fleet.lightning needs Lightning: pip install 'torch-fleet[lightning]'"
    raise ModuleNotFoundError(needs, name=error.name) from None

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision

T = TypeVar("T")

#: What lies beside a checkpoint of Lightning's: what the servers hold, with the optimizer's state.
BESIDE = ".fleet"


class JobEnvironment(ClusterEnvironment):
    """Tells Lightning who is who. Every worker counts as a machine of its own, so each prepares its data itself, unless
    ``prepare_data_per_node = False`` leaves it to worker 0."""

    def __init__(self, job: Fleet) -> None:
        self._job = job

    creates_processes_externally = True
    main_address = ""
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._job.worker_num()

    def global_rank(self) -> int:
        return self._job.worker_index()

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self._job.worker_index()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job says how many workers there are."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job says which worker this is."""


class FleetStrategy(ParallelStrategy):
    """Has a Trainer train with all workers of the job, and this worker leave it when the script ends. In the process of
    a server it serves, and the script ends where the strategy is made.

    Examples:
        >>> trainer = lightning.pytorch.Trainer(max_epochs=1, strategy=FleetStrategy(remote="all"))
        >>> trainer.fit(module, loader)
    """

    strategy_name = "fleet"

    def __init__(
        self,
        strategy: object = None,
        remote: str | Callable[[str, torch.nn.Module], bool] = "sparse",
        *,
        job: Fleet = default,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """``strategy`` and ``remote`` are those of ``fleet.distributed_optimizer``; ``job`` stands in for the functions
        of ``import fleet``."""
        self._job = job
        self._options: dict[str, Any] = {"strategy": strategy, "remote": remote}
        self._loaded_from: str | None = None
        try:
            job.is_worker()
        except NotInitializedError:
            job.init()
        if job.is_server():
            job.init_server()
            job.run_server()
            raise SystemExit(0)
        if job.server_num() == 0:
            raise UnsupportedError(
                "FleetStrategy is for jobs with servers",
                got="a collective job",
                todo='Use Lightning\'s own strategy="ddp", or start the job with servers.',
            )
        super().__init__(
            accelerator=accelerator,
            cluster_environment=JobEnvironment(job),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # ---------------------------------------------------------------- who and where

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.global_rank % len(devices)]

    @property
    def is_distributed(self) -> bool:
        """Say whether Lightning has to give each worker a part of the data."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Have the first worker alone write logs and progress."""
        rank_zero_only.rank = self.global_rank

    # ---------------------------------------------------------------- a fit

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Join the job with what ``configure_optimizers`` returns."""
        super().setup_optimizers(trainer)
        if self._is_running():
            raise StateError(
                "fit() was called a second time in one job",
                todo="Call fleet.stop_worker() and fleet.init() before, and give a model and a strategy that are new.",
            )
        if not self.optimizers:
            return
        if len(self.optimizers) > 1:
            raise UnsupportedError(
                "configure_optimizers returned several optimizers, which a job steps as one",
                got=f"{len(self.optimizers)} optimizers",
                todo="Return one, with a parameter group for each.",
            )
        self.optimizers = [self._job.join(self.optimizers, model=self.lightning_module, **self._options)]
        for callback in trainer.checkpoint_callbacks:  # chosen when workers could not ask each other yet
            if hasattr(callback, "dirpath"):
                callback.dirpath = self.broadcast(callback.dirpath)

    def _is_running(self) -> bool:
        try:
            self._job.resume_step()
        except (NotInitializedError, StateError):
            return False
        return True

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Write what Lightning has collected, and beside it what the servers hold; worker 0 does so for all."""
        if self.is_global_zero:
            if "optimizer_states" in checkpoint and self._is_running():
                self._job.save_persistables(f"{filepath}{BESIDE}")
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | PathLike[str]) -> None:
        if self.is_global_zero:
            super().remove_checkpoint(filepath)
            beside = f"{filepath}{BESIDE}"
            files = get_filesystem(beside)
            if files.exists(beside):
                files.rm(beside, recursive=True)

    def load_checkpoint(self, checkpoint_path: str | PathLike[str], **options: Any) -> dict[str, Any]:
        linked = Path(checkpoint_path)  # ModelCheckpoint(save_last="link") makes one
        self._loaded_from = str(linked.resolve()) if linked.is_symlink() else str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Have the servers go on from what lies beside the checkpoint, and the groups from what is in it."""
        beside = f"{self._loaded_from}{BESIDE}"
        if not get_filesystem(beside).exists(beside):
            raise CheckpointError(
                "the state of the optimizer is not there",
                where=beside,
                todo="Fit from a checkpoint that FleetStrategy has written, with the folder beside it; or load the "
                "weights alone, by load_from_checkpoint().",
            )
        self._job.load_persistables(beside)
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({name: value for name, value in options.items() if name != "params"})

    # ---------------------------------------------------------------- among workers

    def barrier(self, name: str | None = None) -> None:  # noqa: ARG002
        """Wait for all workers. Before the job has begun nobody does: ``fit`` itself begins it for all at once."""
        if self._is_running():
            self._job.barrier_worker()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or what ``reduce_op`` says, over all workers."""
        self._refuse_group(group)
        if self.world_size == 1:
            return tensor
        op = getattr(reduce_op, "name", None) or str(reduce_op)
        op = {"avg": "mean"}.get(op.lower(), op.lower())
        if not isinstance(tensor, torch.Tensor):
            return self._job.all_reduce_worker(tensor, op=op)
        return self._job.all_reduce_worker(tensor.detach().cpu(), op=op).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return what all workers have, as one tensor with a dimension more. No gradient goes back."""
        self._refuse_group(group)
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise UnsupportedError("all_gather(sync_grads=True) is not there", todo="Gather without gradients.")
        places = torch.zeros(self.world_size, *tensor.shape, dtype=tensor.dtype, device="cpu")
        places[self.global_rank] = tensor.detach().cpu()
        return self._job.all_reduce_worker(places).to(tensor.device, tensor.dtype)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return what ``src`` has: anything that JSON can say. Before the job has begun, each worker's own."""
        if self.world_size == 1 or not self._is_running():
            return obj
        try:
            own = json.dumps(obj).encode() if self.global_rank == src else b""
        except (TypeError, ValueError) as error:
            raise UnsupportedError("broadcast() takes what JSON can say", got=repr(obj)) from error
        length = self._job.all_reduce_worker(len(own), op="max")
        places = torch.zeros(length, dtype=torch.int64, device="cpu")
        places[: len(own)] = torch.tensor(list(own), dtype=torch.int64, device="cpu")
        return json.loads(bytes(self._job.all_reduce_worker(places).tolist()))

    @staticmethod
    def _refuse_group(group: Any) -> None:
        if group is not None:
            raise UnsupportedError("a group of workers cannot be chosen", got=f"group={group!r}", todo="Leave it out.")
