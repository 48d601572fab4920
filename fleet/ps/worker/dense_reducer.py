"""Averages dense gradients among workers that may come, leave and die.

A round in which the group breaks is done over with those who are left, inside of the same backward: what a bucket sends
is a copy, so that the gradients of this worker are still there. That round, and every first one of a group, is *plain*:
all gradients in the order of the parameters, when the backward is through. The workers of a new group may be at the end
of a backward, before one, or just have come, and a plain round is the same for all of them. After its step each of them
makes a new reducer, and says so in the next round. When all have, gradients leave while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fleet.averaging.exchange import Averaging, Finish, Flat
from fleet.averaging.reducer import Reducer, Round
from fleet.base.turns import Turns
from fleet.nn.trainables import ElementTypes
from fleet.ps.worker.dense_group import DenseGroup, GroupBrokenError


class LoneReducer:
    """Stands where there is no other worker to average with: a round changes no gradient, and is as long as a step."""

    was_interrupted = is_taken_over = False

    def __init__(
        self,
        types: ElementTypes,
        group: DenseGroup,
        on_round: Callable[[Round], None],
        says: Callable[[], tuple[int, ...]],
        asked: int,
    ) -> None:
        self._types = types
        self._group = group
        self._on_round = on_round
        self._marked = (False,) * asked
        self._number = group.number
        self.enabled = True
        self._says = says

    @property
    def is_outdated(self) -> bool:
        return self._number != self._group.number

    def run(self, taking_part: bool) -> None:
        self._types.check()
        self._group.count_round()
        self._on_round(Round((0,) if taking_part else (), (self._says(),), self._marked))
        self._group.advance()

    def check_watching(self) -> None:
        """Do nothing: gradients are read where the step is taken."""

    def close(self) -> None:
        """Do nothing: no parameter is held."""


class LastingReducer(Reducer):
    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        types: ElementTypes,
        group: DenseGroup,
        dtype: torch.dtype | None,
        on_round: Callable[[Round], None],
        turns: Turns,
        says: Callable[[], tuple[int, ...]],
        asked: Sequence[Callable[[], bool]],
        meet: Callable[..., bool],
    ) -> None:
        """``dtype`` is what gradients travel in, if not as they are. ``meet`` makes another group, and tells whether
        this worker has got from the others what this round, and the step it is of, would have brought."""
        averaging = Averaging(Flat(group), group.size, dtype, keeps=True)
        super().__init__(params, names, types, group, averaging, on_round, turns, says, asked)
        self._lasting = group
        self._meet = meet
        #: of the group whose buckets these are
        self._number = group.number
        self._is_plain = False
        #: whether the last round was over elsewhere, and its step was taken over
        self.is_taken_over = False

    @property
    def is_outdated(self) -> bool:
        """Say whether gradients could leave earlier with another reducer."""
        return self._number != self._lasting.number

    def close(self) -> None:
        self._lasting.is_unfinished |= self._is_open
        super().close()
        self._pending.clear()

    # ---------------------------------------------------------------- within a backward

    def _open(self) -> None:
        group = self._lasting
        # A round that was interrupted may be over elsewhere.
        if group.must_meet:
            self._turns.refuse_fork("backward()")
            self.is_taken_over = self._meet(in_backward=True)
        else:
            self.is_taken_over = False
        self._is_plain = self.is_taken_over or not group.has_buckets
        assert self._is_plain or not self.is_outdated, "who said that it is ready has a reducer of this group"
        if not self._is_plain:
            super()._open()
            return
        self._types.check()
        self._enter_round()
        self._seen.clear()
        self._engine.queue_callback(self._close)

    def _begin(self, bucket: GradBucket) -> Finish:
        try:
            return super()._begin(bucket)
        except GroupBrokenError as error:
            broken = error

        def finish() -> torch.Tensor:
            raise broken

        return finish

    def _close(self) -> None:
        if not self._is_plain:
            super()._close()
            return
        self._is_open = False
        if not self.is_taken_over:
            self._average_plainly([param.grad for param in self._params])
        self._engine.queue_callback(self._finish)

    def _complete(self, counting: dist.Work | None) -> None:
        try:
            super()._complete(counting)
        except GroupBrokenError:
            self._average_again()
        self._pending.clear()

    def _average_again(self) -> None:
        """Do a round over that had begun in buckets. What these are to have is written where their gradients are."""
        own: dict[int, torch.Tensor] = {}
        for _, bucket, _ in self._pending:
            own |= {
                id(param): gradient for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
            }
        self._is_plain = True
        if self._lasting.is_leaving:
            raise GroupBrokenError("the group broke in this worker's last round")
        if not self._meet_again():
            self._average_plainly([own[id(param)] if self._has(param) else None for param in self._params])
        if not self.is_taken_over:
            for param, (average, mark) in zip(self._params, self._averages, strict=True):
                if mark > 0:
                    own[id(param)].copy_(average.view_as(param))
        for future, bucket, _ in self._pending:
            future.set_result(bucket.buffer())

    def _has(self, param: torch.nn.Parameter) -> bool:
        return self._taking_part and param.grad is not None

    def _meet_again(self) -> bool:
        self.is_taken_over = self._meet()
        return self.is_taken_over

    @torch.no_grad()
    def _average_plainly(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Average all gradients at once, in whatever group can do so; nothing is written yet."""
        while True:
            try:
                self._sum(gradients)
                return
            except GroupBrokenError:
                if self._lasting.is_leaving:
                    raise
                if self._meet_again():
                    return

    def _sum(self, gradients: Sequence[torch.Tensor | None]) -> None:
        group, params = self._lasting, len(self._params)
        census = torch.zeros(group.size * (1 + self._words) + params + len(self._asked))
        if self._taking_part:
            census[group.rank] = 1
            census[group.size : group.size + params] = torch.tensor([float(each is not None) for each in gradients])
        self._say(census)
        flats: dict[torch.dtype, tuple[list[int], torch.Tensor]] = {}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(self._params):
            by_dtype.setdefault(param.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            pieces = [
                torch.zeros_like(self._params[index]).reshape(-1) if gradient is None else gradient.reshape(-1)
                for index in indices
                for gradient in (gradients[index],)
            ]
            flats[dtype] = indices, torch.cat(pieces).div_(group.size)
        works = [group.begin(lambda flat=flat: group.everyone.allreduce([flat])) for _, flat in flats.values()]  # type: ignore[misc]
        counting = group.begin(lambda: group.control.allreduce([census]))
        for work, (_, flat) in zip(works, flats.values(), strict=True):
            group.finish(work, flat.device)
        group.finish(counting, census.device)
        self._counted = census.tolist()
        averages: dict[int, torch.Tensor] = {}
        for indices, flat in flats.values():
            sizes = [self._params[index].numel() for index in indices]
            averages |= dict(zip(indices, flat.split_with_sizes(sizes), strict=True))
        marks = self._counted[group.size : group.size + params]
        self._averages = [(averages[index], marks[index]) for index in range(params)]

    @torch.no_grad()
    def _finish(self) -> None:
        if not self._is_plain:
            try:
                super()._finish()
            except GroupBrokenError:  # in agreeing on the next round's buckets: this round is over
                self._lasting.is_over = True
                self._end_round(self._done)
            return
        if self.is_taken_over:
            self._on_round(Round(()))
            super()._leave_round()
            return
        for param, (average, mark) in zip(self._params, self._averages, strict=True):
            if mark > 0 and param.grad is None:
                param.grad = average.view_as(param).clone()
            elif mark > 0 and param.grad is not None:
                param.grad.copy_(average.view_as(param))
        self._averages = []
        self._end_round(self._settle(self._counted, 1))

    def _leave_round(self) -> None:
        super()._leave_round()
        self._lasting.advance()

    def _settle(self, counted: Sequence[float], divided_by: int) -> Round:
        self._done = super()._settle(counted, divided_by)
        return self._done
