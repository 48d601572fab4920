"""Says what averaging needs of a group of workers, whoever has brought them together, and how values are handed round
in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.modules.batchnorm import _NormBase

#: Values are copied to travel together; beyond this size that gains nothing.
_BATCH_BYTES = 32 << 20


class Communicators(Protocol):
    """Connects workers to each other."""

    #: this worker's place among them, and how many they are
    rank: int
    size: int

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Return the group of all workers."""
        ...

    @property
    def control(self) -> dist.ProcessGroup:
        """Return the group of all workers for tensors on the CPU."""
        ...

    def begin(self, collective: Callable[[], dist.Work]) -> dist.Work:
        """Begin a collective that ``finish`` waits for."""
        ...

    def finish(self, work: dist.Work, device: torch.device) -> None:
        """Wait for a collective: on CUDA the stream does, elsewhere this thread, until done or somebody is lost."""
        ...

    def at_once(self, call: Callable[[], object]) -> None:
        """Run a collective of torch's own that cannot be waited for in slices, to which all workers come now."""
        ...

    def count_round(self) -> None:
        """Note that all workers have met once more."""
        ...


def keep_store(host: str, port: int, listening: int) -> TCPStore:
    """Return a store that this process keeps for all, on a socket that is bound."""
    keep = partial(TCPStore, host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    try:
        return keep()
    except NotImplementedError:  # the newer of the two stores that torch 2.5 has takes no socket
        return keep(use_libuv=False)


def done_within(work: dist.Work, slice_s: float) -> bool:
    """Wait for a collective for so long, and say whether it is done; raise if it has failed."""
    try:
        work.wait(timedelta(seconds=slice_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended meanwhile, and well unless this raises why not
    return True


@torch.no_grad()
def hand_round(tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], None], *, gives: bool) -> None:
    """Copy the values that one worker ``gives`` to all others, in place; ``send`` broadcasts a flat tensor."""
    for some in _batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in some])
        send(flat.view(torch.uint8))  # Gloo knows few element types
        if not gives:
            for tensor, values in zip(some, flat.split_with_sizes([tensor.numel() for tensor in some]), strict=True):
                # A graph that has saved a buffer would refuse another backward, though it is what it was.
                if not (tensor.is_cpu and torch.equal(_bits(tensor), _bits(values))):
                    tensor.detach().copy_(values.view(tensor.shape))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return what tells zeros of either sign apart, and no NaN from itself."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def outline(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Describe values that are handed round, of which all workers have to have the same ones."""
    return [f"{name} {value.dtype} {tuple(value.shape)}" for name, value in named]


def layout(param: torch.Tensor) -> str:
    """Describe how a parameter lies in memory, and with it its gradient in a bucket: alike on all workers."""
    return "" if param.is_contiguous() else f" by {param.stride()}"


def buffers_to_share(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the buffers of modules, to be written when a backward is through. Another one through the same graph would
    refuse what has changed since its forward; running statistics it does not read where they are trained."""
    return [
        value.data if isinstance(module, _NormBase) and module.training else value
        for module in modules
        for value in module.buffers(recurse=False)
    ]


def kinds(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.dtype, torch.Size]]:
    """Return what buffers of modules have to have in common on all workers, to be handed round."""
    return [(value.dtype, value.shape) for module in modules for value in module.buffers(recurse=False)]


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that can travel as one: of one element type and device, and not too many bytes."""
    made: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        batches = made.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(each.nbytes for each in batches[-1]) > _BATCH_BYTES:
            batches.append([])
        batches[-1].append(tensor)
    return [batch for batches in made.values() for batch in batches]
