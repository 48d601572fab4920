"""A forked child of a worker may look rows up, and nothing else.

It does so over connections of its own, as a request on one of the parent's would mix with the parent's. It sends no
heartbeats, has no step, and may read nothing that servers would remember the worker to have read; so nobody waits for
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleet.base.turns import Turns
from fleet.errors import DeadlineError, ServersMovedError, UnsupportedError
from fleet.nn.handle import Lookup, TableHandle, Wanted
from fleet.ps.consistency.policy import Policy
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.connection import Connection, Connections
from fleet.ps.worker.lookups import HeldRows, RowReader
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.trained_model import TrainedModel


class ForkedReader:
    """Looks rows up in a forked child."""

    def __init__(
        self, connections: Connections, trained: TrainedModel, progress: Progress, mode: str, policy: Policy
    ) -> None:
        """``mode`` is the name in errors of the mode that has this ``policy``."""
        self.turns = Turns()
        self._progress = progress
        self._mode = mode
        self._policy = policy
        self._rows = RowReader([_Link(each) for each in connections.by_server], progress.version_needed, 0)
        self._rows.adopt(trained.plan.spec.tables, trained.description.handles)

    def lookup(self, wanted: Sequence[Wanted], held: HeldRows | None) -> list[Lookup]:
        self._check(any(each.training for each in wanted))
        with self.turns.take():
            return self._rows.lookup(wanted, self._progress.completed, held)

    def whole(self, handle: TableHandle, held: HeldRows | None, most_bytes: int) -> torch.Tensor:
        self._check(True)
        with self.turns.take():
            return self._rows.whole(handle, self._progress.completed, held, most_bytes)

    def _check(self, training: bool) -> None:
        if self._policy.remembers_reads and training:
            raise UnsupportedError(
                "a look-up of rows to be trained was made in a forked child of a worker, which trains nothing",
                where=f"the mode {self._mode!r}, in which servers remember what each worker has looked up",
                todo="Call model.eval() in the child, or look the rows up in the process that called init_worker().",
            )


class _Link:
    """Connects the child to one server, and waits no longer than the deadline."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel = connection.forked_channel()

    def request(self, step: int, **kind: object) -> object:
        return self._connection.request(step, **kind)

    def start(self, frame: Frame, what: str, *, ahead: bool = False) -> _Asked:  # noqa: ARG002 - none is made ahead
        return _Asked(self._connection, self._channel.start(frame, self._connection.deadline_s), what)


class _Asked:
    def __init__(self, connection: Connection, call: Call, what: str) -> None:
        self._connection = connection
        self._call = call
        self._what = what

    def send(self) -> None:
        self._call.send()

    def result(self) -> Frame:
        try:
            return raise_if_error(self._call.result())
        except ServersMovedError as error:
            raise ServersMovedError(
                "the job has moved to other servers, and a forked child of a worker cannot go along",
                where=f"{self._what}, {self._connection.endpoint}",
                todo="Fork anew: make a DataLoader without persistent_workers, or make it anew after a move.",
            ) from error
        except TransportError as error:
            raise DeadlineError(
                f"a forked child of a worker got no answer from the server at {self._connection.endpoint}",
                where=self._what,
                expected=f"one within {self._connection.deadline_s:g} s (FLAGS_rpc_deadline)",
                got=str(error),
                todo="See whether the server is there; or start the process anew, with a place of its own in the job.",
            ) from None

    def abandon(self) -> None:
        self._call.cancel()
