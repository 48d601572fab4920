"""What a server does for a checkpoint on a thread of its own, however long it takes: write its share of one, or read
one. Workers that ask again, because their line broke meanwhile, get the answer to the first time they asked.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import PurePosixPath

from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import proven
from fleet.errors import CheckpointError, FleetError
from fleet.ps.table.shard import FIRST, Piece
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.errors import error_reply
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond

_log = logging.getLogger("fleet.server")


class Errand:
    """One piece of work that was asked for by a name, and whoever waits for it."""

    def __init__(self, name: str, work: Callable[[], Frame], what: str) -> None:
        """``what`` it is, errors tell."""
        self.name = name
        self.what = what
        self._work = work
        self._lock = threading.Lock()
        self._asking: list[Respond] = []
        self._reply: Frame | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"fleet-{self.name}", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._reply is not None

    def answer(self, respond: Respond) -> None:
        """Tell the outcome, now or when it is there."""
        with self._lock:
            if self._reply is None:
                self._asking.append(respond)
                return
        respond(self._reply)

    def _run(self) -> None:
        try:
            reply = self._work()
        except FleetError as error:
            reply = error_reply(error)
        except Exception as error:
            _log.warning("%s failed", self.what, exc_info=error)
            reply = error_reply(CheckpointError(f"{self.what} failed", got=f"{type(error).__name__}: {error}"))
        with self._lock:
            self._reply, asking = reply, self._asking
        for respond in asking:
            respond(reply)


def write_share(folder: str, proof: str, server: int, export: Callable[[str], Piece]) -> Frame:
    """Write all that ``export`` has, cursor by cursor, into a folder that a worker has claimed; not granted if that is
    not to be found here."""
    place = proven(folder, proof)
    if place is None:
        return Frame(pb.Reply(granted=False))
    prefix = f"server-{server}"
    for name in place.names():
        if name.startswith(f"{prefix}-"):  # by this server, before it was killed
            place.remove(name)
    with PieceWriter(place, PurePosixPath(folder).name, prefix) as pieces:
        cursor = FIRST
        while cursor:
            piece = export(cursor)
            pieces.add(piece.about, piece.tensors)
            cursor = piece.next_cursor
    return Frame(pb.Reply(granted=True, about=_told(pieces.files)))


def _told(files: list[PieceFile]) -> str:
    return json.dumps([asdict(each) for each in files])
