"""Carries out what options do in ``step``: parameters averaged over workers, gradients merged over several steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fleet.averaging.reducer import Round
from fleet.collective.process_group import Group


@torch.no_grad()
def average_parameters(group: Group, params: Sequence[torch.nn.Parameter], contribute: bool, asked: bool) -> Round:
    """Return the mean of the parameters of all workers that contribute, on every worker. The round is marked if any
    worker says yes to what it is ``asked``."""
    marks = torch.zeros(group.size + 1, device="cpu")
    marks[group.rank], marks[-1] = float(contribute), float(asked)
    counting = dist.all_reduce(marks, group=group.control, async_op=True)
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    sums = []
    for some in by_dtype.values():
        flat = torch.cat([param.detach().reshape(-1) for param in some])
        if not contribute:
            flat.zero_()
        sums.append((some, flat, dist.all_reduce(flat, async_op=True)))
    group.finish(counting, marks.device)
    *came, marked = marks.tolist()
    workers = tuple(rank for rank, mark in enumerate(came) if mark)
    for some, flat, work in sums:
        group.finish(work, flat.device)
        if workers:
            mean = flat.div_(len(workers))
            for param, values in zip(some, mean.split_with_sizes([param.numel() for param in some]), strict=True):
                param.detach().copy_(values.view(param.shape))
    group.monitor.rounds += 1
    return Round(workers, marked=(marked > 0,))


class MergedGradients:
    """Holds the sum of the gradients of several steps, also while parameters join, until the update on it is made."""

    def __init__(self) -> None:
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        #: whether the mean of all workers is in ``.grad``, and the update on it is not made yet
        self.is_averaged = False

    def add(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Add what ``.grad`` holds now, whatever happens to it afterwards."""
        for param in params:
            if param.grad is not None:
                present = self._sums.get(param)
                self._sums[param] = param.grad.detach().clone() if present is None else present.add_(param.grad)

    def put_back(self, params: Sequence[torch.nn.Parameter], divisor: int) -> None:
        """Leave in ``.grad`` the sum with what is there, divided."""
        for param in params:
            some = [each for each in (self._sums.get(param), param.grad) if each is not None]
            param.grad = sum(some[1:], some[0]).detach().div(divisor) if some else None

    def begin_anew(self) -> None:
        self._sums.clear()
        self.is_averaged = False
