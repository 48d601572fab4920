"""Computes batch norms over the batches of all workers.

torch has such layers for CUDA only. This one is made of an all-reduce that autograd can go back through, so it runs
wherever the job does. In evaluation it is the layer it was.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fleet.collective.process_group import Group


class _Sum(torch.autograd.Function):
    """Sums up over all workers; the gradient of the sum is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, statistics: StatisticsGroup) -> torch.Tensor:
        ctx.statistics = statistics
        return statistics.sum(mine)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.statistics.sum(gradient), None


class StatisticsGroup:
    """Holds the communicator on which the batch norms of all workers meet, apart from that of gradients on their way.
    The others must hear when a worker has stopped and will not come."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._own: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StatisticsGroup:
        return self  # a copy of the model (an average of weights, say) meets where the model does

    def __reduce__(self) -> tuple[Any, ...]:
        return StatisticsGroup, ()  # what is unpickled is in no job, and its layers are what they were

    def open(self, group: Group) -> None:
        self._group, self._own = group, group.split()

    def close(self) -> None:
        self._group = self._own = None

    @property
    def has_others(self) -> bool:
        """Say whether the job runs, and has other workers: a batch of this one alone is what torch itself knows."""
        return self._group is not None and self._group.size > 1

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "looked at before"
        total = mine.detach().clone()
        work = dist.all_reduce(total, group=self._own, async_op=True)
        self._group.finish(work, total.device, needs_all="sync_batch_norm")
        return total


def synchronize(model: torch.nn.Module, statistics: StatisticsGroup) -> None:
    """Turn every batch norm of the model into a synchronized one, in place: they keep their identity and their keys."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, _Synchronized):
            kind: Any = type(module)
            module.__class__ = _synchronized(kind)
            module.__dict__["_statistics"] = statistics


@cache
def _synchronized(kind: Any) -> Any:
    return type(f"Synchronized{kind.__name__}", (_Synchronized, kind), {})


def _unmade(kind: Any) -> Any:
    """Return a synchronized layer for a copy or a pickle to fill in, which knows it by the layer that it was."""
    return kind.__new__(_synchronized(kind))


class _Synchronized(torch.nn.modules.batchnorm._BatchNorm):
    _statistics: StatisticsGroup

    def __reduce__(self) -> tuple[Any, ...]:
        return _unmade, (type(self).__bases__[1],), self.__dict__

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not self._statistics.has_others:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        total: torch.Tensor = _Sum.apply(_sums(wide, dims, shape), self._statistics)  # type: ignore[no-untyped-call]
        of_all = total[-1].detach()
        mean, square = (total[:-1] / of_all).chunk(2)
        mean, variance = mean.to(wide.dtype), (square - mean * mean).clamp_min(0).to(wide.dtype)
        if self.track_running_stats:
            self._remember(mean.detach(), variance.detach() * (of_all / (of_all - 1)).to(wide.dtype))
        result = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _sums(values: torch.Tensor, dims: list[int], shape: list[int]) -> torch.Tensor:
    """Return the sums of this worker's values and of their squares, of each channel, and how many there are. Squares of
    values far from zero have no digits left for how these differ: what is squared is how far each is from this worker's
    mean, and the rest is added in double precision."""
    count = values.numel() // values.size(1)
    mean = values.sum(dims) / max(1, count)
    around, exact = (values - mean.view(shape)).square().sum(dims), mean.double()
    return torch.cat([count * exact, around.double() + count * exact * exact, exact.new_full((1,), count)])
