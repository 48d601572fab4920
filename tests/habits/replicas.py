"""Trains in plain torch what docs/synchronous.md says that several workers train: a thread for each of them, which runs
the same script on its own part of each batch.

A step takes the mean of what all have in ``.grad``, where nothing counts as zero, the values that the first one has,
and the options of its groups. With ``dense="all_reduce"`` each backward leaves the mean of dense gradients in
``.grad``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from habits.habit import Habit, Outcome, Script, caught, run


class Meeting:
    """A place where threads meet and see what the others have brought."""

    def __init__(self, size: int) -> None:
        self._brought: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, index: int, mine: Any) -> list[Any]:
        self._barrier.wait()
        self._brought[index] = mine
        self._barrier.wait()
        return list(self._brought)

    def leave(self) -> None:
        self._barrier.abort()


Grads = Sequence[torch.Tensor | None]


def mean(grads: Grads) -> torch.Tensor | None:
    found = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
    return sum(found[1:], found[0].clone()) / len(grads) if found else None


class Replica(Script):
    """Is one of several workers' scripts, in plain torch."""

    def __init__(self, habit: Habit, mode: str, meeting: Meeting, index: int, parts: int) -> None:
        self.meeting = meeting
        super().__init__(habit, None, mode, index, parts)

    def begin(self) -> None:
        super().begin()
        self._step = self.optimizer.step
        self.optimizer.step = MethodType(lambda _, closure=None: self._together(closure), self.optimizer)
        if self.mode == "all-reduce":
            for param in self.dense:
                param.register_post_accumulate_grad_hook(self._when_backward_ends)
        self._is_awaited, self._is_synchronized = False, True

    @property
    def dense(self) -> list[torch.Tensor]:
        rows = {id(weight) for weight in self.model.rows()}
        return [param for param in self.model.parameters() if id(param) not in rows]

    def set_synchronized(self, value: bool) -> None:
        self._is_synchronized = value

    def _when_backward_ends(self, _: torch.Tensor) -> None:
        if self._is_synchronized and not self._is_awaited:
            self._is_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average_dense)

    def _average_dense(self) -> None:
        self._is_awaited = False
        self.average(self.dense)

    def average(self, params: Sequence[torch.Tensor]) -> None:
        """Have the mean of all workers' gradients in place of this one's."""
        grads = [None if param.grad is None else param.grad.clone() for param in params]
        for param, *theirs in zip(params, *self.meeting.exchange(self.index, grads), strict=True):
            param.grad = mean(theirs)

    def clips_what_is_applied(self) -> None:
        if self.mode == "all-reduce":
            self.average(self.params)

    def _together(self, closure: Callable[[], torch.Tensor] | None = None) -> Any:
        loss = None if closure is None else closure()
        params = self.params
        own = [param.grad for param in params]
        options = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        values = [param.detach().clone() for param in params]
        first_values, first_options = self.meeting.exchange(self.index, (values, options))[0]
        for param, value in zip(params, first_values, strict=True):
            param.data.copy_(value)
        for group, of_first in zip(self.optimizer.param_groups, first_options, strict=True):
            group.update(of_first)
        self.average(params)
        self._step()
        for group, mine in zip(self.optimizer.param_groups, options, strict=True):
            group.update(mine)
        if self.mode != "all-reduce":
            for param, grad in zip(params, own, strict=True):
                param.grad = grad
        return loss


def in_replicas(workers: int, habit: Habit, mode: str) -> list[Outcome]:
    """What each of several workers has to see, by what the pages say."""
    meeting = Meeting(workers)
    outcomes: list[Outcome] = [Outcome()] * workers

    def work(index: int) -> None:
        try:
            outcomes[index] = Outcome(run(Replica(habit, mode, meeting, index, workers)))
        except Exception as error:
            outcomes[index] = Outcome(error=error)
            meeting.leave()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(workers)]

    def together() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    outcomes[0].said = caught(together).said
    return outcomes
