"""Turns one bucket of gradients into the mean over all workers, in a way that is chosen once for a job.

``begin`` is called while backward still runs and starts what can run beside it; what it returns is called after
backward and hands back the bucket's new content. The buckets come in the same order on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fleet.averaging.communicators import Communicators
from fleet.nn.trainables import Member

Finish = Callable[[], torch.Tensor]


#: By the ids of parameters: the strides of those whose gradients do not lie in a bucket row by row.
Layouts = dict[int, tuple[int, ...]]


def layouts(params: Iterable[torch.Tensor]) -> Layouts:
    """Return how gradients lie in buckets that are made now: as their parameters do, if these have no gaps."""
    return {
        id(param): param.stride()
        for param in params
        if not param.is_contiguous() and torch.empty_like(param, device="meta").stride() == param.stride()
    }


def gradients_in(
    bucket: GradBucket, lie: Layouts, content: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters of a bucket, each with its gradient there or in other ``content``, by its numbers: what
    torch itself gives out is in the order of memory."""
    params = bucket.parameters()
    flat = bucket.buffer() if content is None else content
    if params[0].is_complex() and not flat.is_complex():  # torch sends both parts as real numbers
        flat = torch.view_as_complex(flat.view(-1, 2))
    pieces = flat.split_with_sizes([param.numel() for param in params])
    return [
        (param, piece.as_strided(param.shape, lie[id(param)]) if id(param) in lie else piece.view(param.shape))
        for param, piece in zip(params, pieces, strict=True)
    ]


class Exchange(Protocol):
    #: What this worker has handed to the communicators so far.
    sent_bytes: int

    def prepare(self, lie: Layouts) -> None:
        """Look at gradients before a backward adds to them that is a round, and note how they will lie in buckets."""
        ...

    def begin(self, bucket: GradBucket) -> Finish: ...

    def adopt(self, members: Sequence[Member]) -> None:
        """Train these parameters from now on, in other buckets than before."""
        ...

    def begin_anew(self, step: int) -> None:
        """Forget what was held back, as the values of another time are loaded, after so many steps."""
        ...


class Route(Protocol):
    """Adds a flat tensor up over all workers, in place."""

    def begin(self, tensor: torch.Tensor, number: int) -> Callable[[], None]: ...


class Flat:
    """Adds up with one all-reduce; further communicators take turns with the group's own."""

    def __init__(self, group: Communicators, further: Sequence[dist.ProcessGroup] = ()) -> None:
        self._group = group
        self._communicators = [group.everyone, *further]

    def begin(self, tensor: torch.Tensor, number: int) -> Callable[[], None]:
        communicator = self._communicators[number % len(self._communicators)]
        # As dist.all_reduce does, but for its logging, which a small model feels.
        work = self._group.begin(lambda: communicator.allreduce([tensor]))
        return lambda: self._group.finish(work, tensor.device)


class Averaging:
    """Takes the mean, divided before it is added up, and in ``dtype`` on its way if that is given. Where it ``keeps``
    what the bucket has, that stays as it is until there is a result."""

    def __init__(self, route: Route, size: int, dtype: torch.dtype | None, *, keeps: bool = False) -> None:
        self._route = route
        self._size = size
        self._dtype = dtype
        self._keeps = keeps
        #: where each bucket travels from, if not from itself: new memory every time would cost more than the division
        self._aside: dict[int, torch.Tensor] = {}
        self.sent_bytes = 0

    def adopt(self, members: Sequence[Member]) -> None:
        """Do nothing: all parameters are treated alike."""

    def begin_anew(self, step: int) -> None:
        """Do nothing: nothing is held back."""

    def prepare(self, lie: Layouts) -> None:
        """Do nothing: what has been averaged may be averaged again."""

    def begin(self, bucket: GradBucket) -> Finish:
        whole = bucket.buffer()
        real = torch.view_as_real(whole) if whole.is_complex() else whole
        if self._dtype is not None:
            travelling = real.to(self._dtype).div_(self._size)
        else:
            travelling = torch.div(real, self._size, out=self._place_of(bucket.index(), real))
        finish = self._route.begin(travelling, bucket.index())
        self.sent_bytes += travelling.nbytes

        def result() -> torch.Tensor:
            finish()
            mean = travelling.to(real.dtype)  # itself, where it travels as it is
            return torch.view_as_complex(mean) if whole.is_complex() else mean

        return result

    def _place_of(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """Return where the mean of a bucket's content is to be made."""
        if not self._keeps:
            return whole
        place = self._aside.get(number)
        if place is None or place.shape != whole.shape or place.dtype != whole.dtype:
            place = self._aside[number] = torch.empty_like(whole)
        return place
