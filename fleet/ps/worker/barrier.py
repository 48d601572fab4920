"""A worker's part in what all of them do together: a barrier, or a reduction, at the first server."""

from __future__ import annotations

from collections.abc import Callable

from fleet.base.turns import Callers
from fleet.errors import DeadlineError, FleetError
from fleet.numeric.reduction import BARRIER
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.context import Floor


class Meeting:
    def __init__(self, floor: Floor, callers: Callers, begin_anew: Callable[[], None]) -> None:
        """``begin_anew`` is called when the server says that its values have been replaced."""
        self._floor = floor
        self._callers = callers
        self._begin_anew = begin_anew
        self._in_doubt: tuple[int, Frame] | None = None

    def gather(self, call: str, op: str, dtype: str = "", mine: WireTensor | None = None) -> WireTensor | None:
        """What comes of it, when every worker has come."""
        with self._callers.gathering(call):
            progress, client = self._floor.progress, self._floor.lines.clients[0]
            number = progress.gathered + 1
            message = pb.Gather(number=number, op=op, dtype=dtype, beside=self._callers.are_beside)
            frame = Frame(client.request(progress.completed, gather=message), [] if mine is None else [mine])
            return self._finish(number, frame)

    def settle(self) -> None:
        """Before anything else happens: the same request again, unless another thread waits for its answer."""
        if self._in_doubt is not None:
            with self._callers.gathering_if_free() as is_free:
                if is_free and self._in_doubt is not None:
                    self._finish(*self._in_doubt)

    def _finish(self, number: int, frame: Frame) -> WireTensor | None:
        """Bring one gathering to its end. Interrupted it stays in doubt, as a step does: the server may have it."""
        floor, progress = self._floor, self._floor.progress
        self._in_doubt = (number, frame)
        op = frame.message.gather.op
        what = f"barrier {number}" if op == BARRIER else f"all_reduce {number} ({op})"
        try:
            with floor.figures.meet:
                reply = floor.lines.clients[0].call(frame, what)
        except DeadlineError:
            raise  # no answer: still in doubt
        except FleetError:
            progress.gathered, self._in_doubt = number, None
            raise
        progress.gathered, self._in_doubt = number, None
        progress.notice([reply])
        if progress.replaced and not self._callers.are_beside:  # else the training thread's next step does it
            with self._callers:
                self._begin_anew()
        return reply.tensors[0] if reply.tensors else None
