"""A step whose optimizers run on the servers: the gradients leave, and new values come back when the mode lets them.

In the synchronous modes a step is one push, of which a part may leave while the backward still runs; the
half-asynchronous mode makes one push of several steps. In the asynchronous mode the communicator pushes and fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from fleet.ps.wire.frame import Frame
from fleet.ps.worker.communicator import Communicator
from fleet.ps.worker.context import Floor
from fleet.ps.worker.delivery import Delivering, Push
from fleet.ps.worker.dense_buffers import nbytes
from fleet.ps.worker.gradient_merge import Clocks, GradientMerge, Gradients
from fleet.ps.worker.gradients import UserGradients
from fleet.ps.worker.handshake import check_delivered
from fleet.ps.worker.overlap import EarlyGradients, worthwhile
from fleet.ps.worker.push import Pushing


class Stepping:
    def __init__(
        self,
        floor: Floor,
        gradients: UserGradients,
        pushing: Pushing,
        delivering: Delivering,
        begin_anew: Callable[[], None],
    ) -> None:
        """``begin_anew`` is called when a server says that its values have been replaced."""
        self._floor = floor
        self._gradients = gradients
        self._pushing = pushing
        self._delivering = delivering
        self._begin_anew = begin_anew
        self._communication = replace(floor.knobs.communicator, **dict(floor.strategy.communicator))  # type: ignore[arg-type]
        self._merge = self._make_merge(floor.policy.steps_per_push(self._communication.max_merge_var_num))
        self._communicator: Communicator | None = None
        self._early: EarlyGradients | None = None

    def start(self) -> None:
        """The first values are there: what works beside the user's thread may begin."""
        if not self._floor.policy.awaits_answers:
            merge, name = self._make_merge(0), str(self._floor.assignment.index)
            self._communicator = Communicator(
                self._communication,
                merge,
                self._push_behind,
                self._fetch_behind,
                name,
                values_bytes=max(map(nbytes, self._floor.trained.layouts)),
                gives_way=bool(self._floor.trained.description.handles) and self._floor.policy.lets_reads_go_first,
            )
        self._early = self._make_early()

    def grow(self) -> None:
        """Further parameters have joined the job."""
        self._merge = self._make_merge(self._merge.steps)
        if self._early is not None:
            self._early.close()
        self._early = self._make_early()

    def _make_merge(self, steps: int) -> GradientMerge:
        return GradientMerge(self._floor.trained.description, steps, self._communication.is_sgd_optimizer)

    def _make_early(self) -> EarlyGradients | None:
        """What lets gradients leave ahead of their push, where each step is one push, of gradients as they are."""
        params = self._floor.trained.description.params
        may = self._floor.policy.sends_gradients_early(self._communication.max_merge_var_num)
        if not (may and self._pushing.is_plain and worthwhile(params)):
            return None
        return EarlyGradients(params, self._pushing.send_part, str(self._floor.assignment.index))

    # ---------------------------------------------------------------- the user's thread

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a backward that the step follows at once: its gradients may leave."""
        return nullcontext() if self._early is None else self._early.leaving()

    def looked_up(self) -> None:
        """The rows of a forward are there."""
        if self._communicator is not None:
            self._communicator.looked_up()

    def step(self) -> None:
        """Push what this worker's gradients are now, or keep them for a push that is due later; return with the values
        that the mode lets it go on with."""
        floor, description = self._floor, self._floor.trained.description
        options = description.options()
        dense = self._gradients.dense()
        ahead = 0
        if self._early is not None:
            ahead, sent = self._early.sent([param.grad for param in description.params])
            dense = [None if index in sent else grad for index, grad in enumerate(dense)]
        # When the values were read that the gradients were computed on; rows are read anew in the next step.
        rows, read = self._gradients.rows(), Clocks(floor.fetching.read_at, floor.rows.take_clocks())
        gradients = Gradients(dense, rows, read, options, ahead=ahead, state=floor.own.take())
        floor.progress.take_step()
        if self._communicator is not None:
            self._leave_to(self._communicator, gradients)
            return
        due = self._merge.add(gradients)
        if due is not None:
            self._push(due)

    def _leave_to(self, communicator: Communicator, gradients: Gradients) -> None:
        with self._floor.figures.push:
            communicator.put(gradients.copied())
        fresh = communicator.fresh()
        if fresh is not None:
            self._floor.fetching.take(fresh)
        if self._floor.progress.replaced:
            self._begin_anew()

    def flush(self) -> None:
        """Have everything applied that this worker has computed."""
        if self._communicator is not None:
            self._communicator.flush()
        rest = self._merge.rest()
        if rest is not None:
            self._push(rest)

    def _push(self, gradients: Gradients) -> None:
        frames, arrived = self._pushing.of_gradients(gradients)

        def take(replies: Sequence[Frame]) -> None:
            arrived()
            self._floor.fetching.take(replies)

        self._delivering.deliver(Push(gradients.steps, frames, take))

    # ---------------------------------------------------------------- the communicator's threads

    def _push_behind(self, gradients: Gradients, bring: bool) -> list[Frame]:
        """A push which takes no new values itself."""
        progress = self._floor.progress
        frames, arrived = self._pushing.of_gradients(gradients, quiet=not bring)
        what = f"push of step {progress.completed + 1}"
        at_once = self._communication.thread_pool_size
        replies = self._floor.lines.ask_all(lambda server, _: frames[server], what, at_once)
        check_delivered(self._floor, progress.completed + 1, replies)
        arrived()
        progress.notice(replies)  # long before values are fetched again, perhaps
        progress.completed, progress.steps = progress.completed + 1, progress.steps + gradients.steps
        return replies

    def _fetch_behind(self) -> list[Frame]:
        what = f"parameters after step {self._floor.progress.completed}"
        return self._floor.fetching.ask(what, self._communication.thread_pool_size)

    @property
    def queued(self) -> int:
        """How many steps wait to be sent."""
        return 0 if self._communicator is None else self._communicator.queued

    # ---------------------------------------------------------------- the end

    def end(self) -> None:
        """Tell the threads to stop; requests under way end with their lines."""
        if self._communicator is not None:
            self._communicator.end()

    def close(self) -> None:
        """The lines are closed: wait for the threads."""
        if self._early is not None:
            self._early.close()
        if self._communicator is not None:
            self._communicator.join()
