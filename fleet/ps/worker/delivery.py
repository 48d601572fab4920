"""A push from when it leaves until it is answered, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleet.base.turns import whole
from fleet.errors import DeadlineError, FleetError
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.context import Floor
from fleet.ps.worker.handshake import check_delivered


@dataclass(frozen=True)
class Push:
    """What is sent to all servers as one step of the worker: how many of the user's are in it, the frame for each
    server, and what to do with the answers."""

    steps: int
    frames: Sequence[Frame]
    take: Callable[[Sequence[Frame]], object]

    def kept(self) -> Push:
        """The same, whatever the user does with the gradients now."""
        return replace(self, frames=[frame.kept() for frame in self.frames])


class Delivering:
    def __init__(self, floor: Floor, begin_anew: Callable[[], None]) -> None:
        """``begin_anew`` is called when a server says that its values have been replaced."""
        self._floor = floor
        self._begin_anew = begin_anew
        self._in_doubt: Push | None = None

    def deliver(self, push: Push) -> None:
        """Bring one push to its end. Interrupted (Ctrl-C in a notebook) it stays in doubt: some servers may have it."""
        self._in_doubt = push
        self._bring_to_end(push)

    def settle(self) -> None:
        """Before anything else happens: the same frames again, which no server applies twice."""
        if self._in_doubt is not None:
            self._bring_to_end(self._in_doubt)

    def _bring_to_end(self, push: Push) -> None:
        floor, progress = self._floor, self._floor.progress
        step = progress.completed + 1
        try:
            with floor.figures.push:
                replies = floor.lines.ask_all(lambda server, _: push.frames[server], f"push of step {step}")
            check_delivered(floor, step, replies)
        except BaseException as error:
            self._in_doubt = push.kept() if _is_unanswered(error) else None
            raise
        if floor.policy.trains_on_workers:  # half an exchange with the servers would be made once more with the next
            whole(lambda: self._finish(push, step, replies), "fleet-exchange")
        else:
            self._finish(push, step, replies)
        if progress.replaced:
            self._begin_anew()

    def _finish(self, push: Push, step: int, replies: Sequence[Frame]) -> None:
        progress = self._floor.progress
        progress.completed, progress.steps, self._in_doubt = step, progress.steps + push.steps, None
        push.take(replies)


def _is_unanswered(error: BaseException) -> bool:
    """Whether an error leaves open what has become of a push: no answer, or an interruption."""
    return isinstance(error, DeadlineError) or not isinstance(error, FleetError)
