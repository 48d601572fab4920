"""The servers' dense values on their way into the user's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connections import Lines
from fleet.ps.worker.dense_buffers import Flat
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.trained_model import Trained


class Fetching:
    def __init__(self, lines: Lines, progress: Progress, trained: Trained) -> None:
        self._lines = lines
        self._progress = progress
        self._trained = trained
        #: server -> how many updates its values had had that came last
        self.read_at: Mapping[int, int] = {}

    def ask(self, what: str, at_once: int | None = None) -> list[Frame]:
        pull = pb.Pull(version=self._progress.version_needed(), dense=True)
        return self._lines.ask(what, at_once, pull=pull)

    def values(self, replies: Sequence[Frame]) -> list[Flat]:
        """The values of every server's blocks, as it sent them."""
        self._progress.notice(replies)
        self.read_at = {server: reply.message.clock for server, reply in enumerate(replies)}
        return [
            # In GEO rows follow the dense values.
            dict(zip(layout.dtypes, (tensor.torch() for tensor in reply.tensors), strict=False))
            for layout, reply in zip(self._trained.layouts, replies, strict=True)
        ]

    def take(self, replies: Sequence[Frame]) -> list[Flat]:
        """Write the servers' values into the user's parameters, in place."""
        values = self.values(replies)
        self._trained.writer.write(values)
        return values
