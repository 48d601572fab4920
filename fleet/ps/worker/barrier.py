"""A worker takes part in what all of them do together: a barrier, or a reduction, at the first server."""

from __future__ import annotations

from collections.abc import Callable

from fleet.base.turns import Turns
from fleet.errors import DeadlineError, FleetError, ServersMovedError
from fleet.numeric.reduction import BARRIER
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.progress import Progress
from fleet.telemetry.worker_figures import WorkerFigures


class Barrier:
    """Waits for all workers, and reduces values over them, at the first server."""

    def __init__(
        self,
        connections: Connections,
        progress: Progress,
        figures: WorkerFigures,
        turns: Turns,
        reload: Callable[[], None],
    ) -> None:
        """``reload`` is called when the server says that its values have been replaced."""
        self._connections = connections
        self._progress = progress
        self._figures = figures
        self._turns = turns
        self._reload = reload
        self._in_doubt: tuple[pb.Gather, list[WireTensor]] | None = None

    def gather(self, call: str, op: str, dtype: str = "", mine: WireTensor | None = None) -> WireTensor | None:
        """Return the outcome, when every worker has come."""
        with self._turns.meeting(call):
            number = self._progress.gathered + 1
            message = pb.Gather(number=number, op=op, dtype=dtype, beside=self._turns.is_other_thread)
            return self._finish(message, [] if mine is None else [mine])

    def finish_interrupted(self) -> None:
        """Send a request in doubt again, unless another thread waits for its answer."""
        if self._in_doubt is not None:
            with self._turns.meeting_if_free() as is_free:
                if is_free and self._in_doubt is not None:
                    self._finish(*self._in_doubt)

    def _finish(self, message: pb.Gather, tensors: list[WireTensor]) -> WireTensor | None:
        """Bring one gathering to its end. If it is interrupted it stays in doubt, as a step does: the server may have
        it."""
        progress = self._progress
        self._in_doubt = (message, tensors)
        number, op, first_server = message.number, message.op, self._connections.by_server[0]
        frame = Frame(first_server.request(progress.completed, gather=message), tensors)
        what = f"barrier {number}" if op == BARRIER else f"all_reduce {number} ({op})"
        try:
            with self._figures.meet:
                reply = first_server.call(frame, what)
        except DeadlineError:
            raise  # no answer: still in doubt
        except ServersMovedError:
            self._in_doubt = None  # it is made anew, where the job is
            raise
        except FleetError:
            progress.gathered, self._in_doubt = number, None
            raise
        progress.gathered, self._in_doubt = number, None
        progress.notice([reply])
        if progress.replaced and not self._turns.is_other_thread:  # else the training thread's next step does it
            with self._turns.take():
                self._reload()
        return reply.tensors[0] if reply.tensors else None
