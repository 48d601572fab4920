"""What a forked child of a worker may do: look rows up.

It does so over connections of its own, as a request on one of the parent's would mix with the parent's. Nobody counts
on it: it sends no heartbeats, has no step, and may read nothing that servers would remember the worker to have read.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet.base.turns import Callers
from fleet.errors import DeadlineError, UnsupportedError
from fleet.nn.handle import Lookup, Wanted
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.connection import ServerClient
from fleet.ps.worker.context import Floor
from fleet.ps.worker.geo_training import Replica
from fleet.ps.worker.lookups import RowReader


class ForkedReader:
    def __init__(self, floor: Floor) -> None:
        self.callers = Callers()
        self._floor = floor
        self._rows = RowReader([_Line(client) for client in floor.lines.clients], floor.progress.version_needed)
        self._rows.adopt(floor.trained.plan.spec.tables, floor.trained.description.handles)

    def lookup(self, wanted: Sequence[Wanted], replica: Replica | None) -> list[Lookup]:
        mode = self._floor.strategy.mode
        if self._floor.policy.remembers_reads and any(each.training for each in wanted):
            raise UnsupportedError(
                "a look-up of rows to be trained was made in a forked child of a worker, which trains nothing",
                where=f"the mode {mode!r}, in which servers remember what each worker has looked up",
                todo="Call model.eval() in the child, or look the rows up in the process that called init_worker().",
            )
        with self.callers:
            return self._rows.lookup(wanted, self._floor.progress.completed, replica)


class _Line:
    """To one server, for whoever does not wait longer than the deadline."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._channel = client.forked_channel()

    def request(self, step: int, **kind: object) -> object:
        return self._client.request(step, **kind)

    def start(self, frame: Frame, what: str, *, ahead: bool = False) -> _Asked:  # noqa: ARG002 - none is made ahead
        return _Asked(self._client, self._channel.start(frame, self._client.deadline_s), what)


class _Asked:
    def __init__(self, client: ServerClient, call: Call, what: str) -> None:
        self._client = client
        self._call = call
        self._what = what

    def send(self) -> None:
        self._call.send()

    def result(self) -> Frame:
        try:
            return raise_if_error(self._call.result())
        except TransportError as error:
            raise DeadlineError(
                f"a forked child of a worker got no answer from the server at {self._client.endpoint}",
                where=self._what,
                expected=f"one within {self._client.deadline_s:g} s (FLAGS_rpc_deadline)",
                got=str(error),
                todo="See whether the server is there; or start the process anew, with a place of its own in the job.",
            ) from None

    def abandon(self) -> None:
        self._call.cancel()
