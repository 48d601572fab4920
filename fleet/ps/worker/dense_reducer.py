"""Averages dense gradients among workers that may come, leave and die.

A round in which the group breaks is done over with those who are left, inside of the same backward: what a bucket sends
is a copy, so that the gradients of this worker are still there. That round, and every first one of a group, is *plain*:
all gradients in the order of the parameters, when the backward is through. The workers of a new group may be at the end
of a backward, before one, or just have come, and a plain round is the same for all of them. After its step each of them
makes a new reducer, and says so in the next round. When all have, gradients leave while backward runs.

A plain round is of all parameters there are, of which those travel that any worker has a gradient of. Buckets are of
those that required one when the reducer was made. Where these differ between workers rounds stay plain, and where more
have a gradient than a round of buckets was of, a plain one follows it in the same backward, and then other reducers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fleet.averaging.communicators import layout
from fleet.averaging.exchange import Averaging, Finish, Flat, gradients_in
from fleet.averaging.reducer import Reducer, Round
from fleet.base.turns import Turns
from fleet.nn.trainables import ElementTypes
from fleet.ps.worker.dense_group import DenseGroup, GroupBrokenError


class LoneReducer:
    """Stands where there is no other worker to average with: a round changes no gradient, and is as long as a step."""

    was_interrupted = is_taken_over = lacks_some = False
    is_fresh = has_averaged_all = True
    watched = 0

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

    def let_go(self) -> None:
        """Do nothing: no gradient is held."""

    def close(self) -> None:
        """Do nothing: no parameter is held."""


class LastingReducer(Reducer):
    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        every: Sequence[torch.nn.Parameter],
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
        """Watch ``params``, which require a gradient, of ``every`` one that may have one in a round, on any worker.
        ``dtype`` is what gradients travel in, if not as they are. ``meet`` makes another group, and tells whether
        this worker has got from the others what this round, and the step it is of, would have brought."""
        averaging = Averaging(Flat(group), group.size, dtype, keeps=True)
        super().__init__(params, names, types, group, averaging, on_round, turns, says, asked)
        self._lasting = group
        self._every = every
        watched = {id(param) for param in params}
        self._others = [param for param in every if id(param) not in watched]
        #: which parameters these are, and how they are laid out, as their gradients are in buckets: in four bytes
        told = [f"{index}{layout(param)}" for index, param in enumerate(every) if id(param) in watched]
        self.watched = zlib.crc32(" ".join(told).encode())
        self._meet = meet
        #: of the group whose buckets these are
        self._number = group.number
        self._is_plain = False
        #: whether the last round was over elsewhere, and its step was taken over
        self.is_taken_over = False
        #: what the last round has left in ``.grad``
        self._averaged: list[torch.Tensor | None] = []

    @property
    def is_outdated(self) -> bool:
        """Say whether gradients could leave earlier with another reducer."""
        return self._number != self._lasting.number

    @property
    def lacks_some(self) -> bool:
        """Say whether a parameter has a gradient, or will have, that is in no bucket."""
        return any(param.requires_grad or param.grad is not None for param in self._others)

    @property
    def has_averaged_all(self) -> bool:
        """Say whether gradients are what the last round has left: no backward has added to them outside of rounds, and
        the script has put no others in their place."""
        grads = zip(self._every, self._averaged, strict=False)
        return not self.has_more and all(param.grad is averaged for param, averaged in grads)

    @property
    def is_fresh(self) -> bool:
        """Say whether no round of buckets has been in it, and it has all parameters that require a gradient."""
        return not self._is_settled and not any(param.requires_grad for param in self._others)

    def close(self) -> None:
        self._lasting.is_unfinished |= self._is_open
        super().close()
        self._pending.clear()
        self.let_go()

    def let_go(self) -> None:
        """Let go of the gradients of a step that is taken, so that they are gone when the script drops them."""
        self._averaged = []

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
            self._average_plainly(self._gradients())
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
            own |= {id(param): gradient for param, gradient in gradients_in(bucket, self._lie)}
        self._is_plain = True
        if self._lasting.is_leaving:
            raise GroupBrokenError("the group broke in this worker's last round")
        if not self._meet_again():
            self._average_plainly(
                [
                    None if gradient is None else own.get(id(param), gradient)
                    for param, gradient in zip(self._every, self._gradients(), strict=True)
                ]
            )
        if not self.is_taken_over:
            for param, average in zip(self._every, self._averages, strict=True):
                if average is not None and id(param) in own:
                    own[id(param)].copy_(average.view_as(param))
        for future, bucket, _ in self._pending:
            future.set_result(self._as_read(bucket, bucket.buffer()))

    def _gradients(self) -> list[torch.Tensor | None]:
        return [param.grad if self._taking_part else None for param in self._every]

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
        group, params = self._lasting, len(self._every)
        census = torch.zeros(group.size * (1 + self._words) + params + len(self._asked), device="cpu")
        if self._taking_part:
            census[group.rank] = 1
            census[group.size : group.size + params] = torch.tensor(
                [float(each is not None) for each in gradients], device="cpu"
            )
        self._say(census)
        group.finish(group.begin(lambda: group.control.allreduce([census])), census.device)
        self._counted = census.tolist()
        marks = self._counted[group.size : group.size + params]
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(self._every):
            if marks[index] > 0:
                alike.setdefault((param.dtype, param.device), []).append(index)
        flats: list[tuple[list[int], torch.Tensor]] = []
        for indices in alike.values():
            pieces = [
                torch.zeros_like(self._every[index]).reshape(-1) if gradient is None else gradient.reshape(-1)
                for index in indices
                for gradient in (gradients[index],)
            ]
            flats.append((indices, torch.cat(pieces).div_(group.size)))
        works = [group.begin(lambda flat=flat: group.everyone.allreduce([flat])) for _, flat in flats]  # type: ignore[misc]
        for work, (_, flat) in zip(works, flats, strict=True):
            group.finish(work, flat.device)
        averages: dict[int, torch.Tensor] = {}
        for indices, flat in flats:
            sizes = [self._every[index].numel() for index in indices]
            averages |= dict(zip(indices, flat.split_with_sizes(sizes), strict=True))
        self._averages = [averages.get(index) for index in range(params)]

    @torch.no_grad()
    def _finish(self) -> None:
        if not self._is_plain:
            try:
                super()._finish()
            except GroupBrokenError:  # in agreeing on the next round's buckets: this round is over
                self._lasting.is_over = True
                self._end_round(self._done)
            if self._lasting.has_buckets:
                return
            self._is_plain = True
            self._average_plainly(self._gradients())
        if self.is_taken_over:
            self._on_round(Round(()))
            super()._leave_round()
            return
        for param, average in zip(self._every, self._averages, strict=True):
            if average is not None and param.grad is None:
                param.grad = average.view_as(param).clone()
            elif average is not None and param.grad is not None:
                param.grad.copy_(average.view_as(param))
        self._averages = []
        self._end_round(self._read_census(self._counted, 1, self._every))

    def _leave_round(self) -> None:
        # Where some worker has a gradient that was in no bucket all average once more, and everything.
        if self._is_plain or self._lasting.has_buckets:
            super()._leave_round()
            self._averaged = [param.grad for param in self._every]
        self._lasting.advance()

    def _read_census(self, counted: Sequence[float], divided_by: int, of: Sequence[torch.nn.Parameter]) -> Round:
        self._done = super()._read_census(counted, divided_by, of)
        return self._done
