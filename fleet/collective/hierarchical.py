"""Adds gradients up within groups of workers first, and among these after that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fleet.collective.process_group import Group


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


def neighbours(size: int, inner: int) -> list[list[int]]:
    """Return ranks in groups of ``inner`` that follow each other."""
    return [list(range(start, start + inner)) for start in range(0, size, inner)]
