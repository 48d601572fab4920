"""Turns one bucket of gradients into the mean over all workers, in a way that is chosen once for a job.

``begin`` is called while backward still runs and starts what can run beside it; what it returns is called after
backward and hands back the bucket's new content. The buckets come in the same order on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fleet.collective.process_group import Group
from fleet.nn.trainables import Member

Finish = Callable[[], torch.Tensor]


class Exchange(Protocol):
    #: What this worker has handed to the communicators so far.
    sent_bytes: int

    def begin(self, bucket: GradBucket) -> Finish: ...

    def adopt(self, members: Sequence[Member]) -> None:
        """Train these parameters from now on, in other buckets than before."""
        ...


class Route(Protocol):
    """Adds a flat tensor up over all workers, in place."""

    def begin(self, tensor: torch.Tensor, number: int) -> Callable[[], None]: ...


class Flat:
    """Adds up with one all-reduce; with several communicators they take turns."""

    def __init__(self, group: Group, communicators: int) -> None:
        self._group = group
        self._communicators = [group.everyone, *(group.split() for _ in range(communicators - 1))]

    def begin(self, tensor: torch.Tensor, number: int) -> Callable[[], None]:
        communicator = self._communicators[number % len(self._communicators)]
        work = communicator.allreduce(
            [tensor]
        )  # as dist.all_reduce does, but for its logging, which a small model feels
        return lambda: self._group.finish(work, tensor.device)


class Hierarchical:
    """Adds up to the first worker of each of ``inner`` groups, among these, and back: little crosses from group to
    group."""

    def __init__(self, group: Group, inner: Sequence[Sequence[int]], communicators: int) -> None:
        self._group = group
        self._mine = next(ranks for ranks in inner if group.rank in ranks)
        leaders = [ranks[0] for ranks in inner]
        self._leads = group.rank in leaders
        self._communicators: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
        for _ in range(communicators):  # every worker makes every group, and uses its own
            within = [group.split(ranks=list(ranks)) for ranks in inner]
            self._communicators.append((within[list(inner).index(self._mine)], group.split(ranks=leaders)))

    def begin(self, tensor: torch.Tensor, number: int) -> Callable[[], None]:
        within, among = self._communicators[number % len(self._communicators)]
        leader = self._mine[0]
        first = dist.reduce(tensor, leader, group=within, async_op=True)

        def finish() -> None:
            self._group.finish(first, tensor.device)
            if self._leads:
                self._group.finish(dist.all_reduce(tensor, group=among, async_op=True), tensor.device)
            self._group.finish(dist.broadcast(tensor, leader, group=within, async_op=True), tensor.device)

        return finish


class Averaging:
    """Takes the mean, divided before it is added up, and in ``dtype`` on its way if that is given."""

    def __init__(self, route: Route, size: int, dtype: torch.dtype | None) -> None:
        self._route = route
        self._size = size
        self._dtype = dtype
        self.sent_bytes = 0

    def adopt(self, members: Sequence[Member]) -> None:
        """Do nothing: all parameters are treated alike."""

    def begin(self, bucket: GradBucket) -> Finish:
        whole = bucket.buffer()
        travelling = whole if self._dtype is None else whole.to(self._dtype)
        finish = self._route.begin(travelling.div_(self._size), bucket.index())
        self.sent_bytes += travelling.nbytes

        def result() -> torch.Tensor:
            finish()
            return whole if travelling is whole else travelling.to(whole.dtype)

        return result


def neighbours(size: int, inner: int) -> list[list[int]]:
    """Return ranks in groups of ``inner`` that follow each other."""
    return [list(range(start, start + inner)) for start in range(0, size, inner)]
