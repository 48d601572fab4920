"""Runs PowerSGD (Vogels et al., 2019, arXiv:1905.13727) by torch's own communication hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from fleet.averaging.exchange import Finish, Layouts
from fleet.collective.process_group import Group
from fleet.errors import UnsupportedError
from fleet.nn.trainables import Member
from fleet.strategy.collective import PowerSGD


class LowRank:
    def __init__(self, group: Group, options: PowerSGD, members: Sequence[Member]) -> None:
        self._group = group
        self._options = options
        self.sent_bytes = 0
        self._under_way: torch.futures.Future[torch.Tensor] | None = None
        self.adopt(members)

    def adopt(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.param.dim() == 0:
                raise UnsupportedError(f"power_sgd takes no parameter without a dimension, as {member.name!r} is")
            if member.param.is_complex() or not member.param.numel():
                raise UnsupportedError(
                    f"power_sgd cannot compress {member.name!r}",
                    expected="real numbers, and at least one of them",
                    got=f"{member.param.dtype} {tuple(member.param.shape)}",
                    todo="Leave power_sgd out, or keep it out of the optimizer.",
                )
        self.begin_anew()  # what the hook remembers belongs to buckets, which change

    def begin_anew(self, step: int = 0) -> None:  # noqa: ARG002, it counts to its start anew
        self.state = powerSGD_hook.PowerSGDState(
            self._group.everyone,
            matrix_approximation_rank=self._options.rank,
            start_powerSGD_iter=self._options.start_step,
            min_compression_rate=self._options.min_compression_rate,
            use_error_feedback=self._options.use_error_feedback,
            warm_start=self._options.warm_start,
        )

    def prepare(self, lie: Layouts) -> None:
        """Do nothing: what has been averaged may be averaged again."""

    def begin(self, bucket: GradBucket) -> Finish:
        # Off CUDA the hook goes on from callbacks, on threads of their own: what these send must not come between
        # what the next bucket sends, or workers would disagree on the order.
        self._complete()
        buffer, before = bucket.buffer(), self.state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(self.state, bucket)
        self._under_way = future if buffer.device.type == "cpu" else None
        # The hook counts what it compresses; until it begins to, it sends the bucket.
        elements = self.state.total_numel_after_compression - before or buffer.numel()
        self.sent_bytes += elements * buffer.element_size()

        def finish() -> torch.Tensor:
            self._complete()
            result: torch.Tensor = future.wait()
            return result

        return finish

    def _complete(self) -> None:
        future, self._under_way = self._under_way, None
        if future is not None:
            with self._group.exchanging:
                self._group.monitor.wait(lambda slice_s: self._done_within(future, slice_s))

    def _done_within(self, future: torch.futures.Future[torch.Tensor], slice_s: float) -> bool:
        """Look again and again whether a future is done, often at first: a future cannot be waited for with a
        deadline."""
        clock = self._group.monitor.clock
        until, pause_s = clock.now() + slice_s, 0.0001
        while not future.done():
            if clock.now() > until:
                return False
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)
        future.value()  # raises what went wrong
        return True
