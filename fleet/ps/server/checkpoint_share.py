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

from fleet.base.clock import Clock
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import proven
from fleet.errors import CheckpointError, FleetError
from fleet.ps.table.frozen_view import HandOn
from fleet.ps.table.shard import FIRST, Piece, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")


#: A share that nobody waits for rests so much longer than it copies: the rest of the time belongs to who trains.
_REST = 2.0


class BackgroundTask:
    """One piece of work that was asked for by a name, and whoever waits for it."""

    def __init__(self, name: str, work: Callable[[], Frame], what: str) -> None:
        """``what`` it is, errors tell."""
        self.name = name
        self.what = what
        self._work: Callable[[], Frame] | None = work
        self._lock = threading.Lock()
        self._asking: list[Respond] = []
        self._held_up: list[Respond] = []
        self._reply: Frame | None = None
        self._may_go_on = False

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

    def answer_early(self, respond: Respond) -> None:
        """Tell, now or when it is so, that the job may go on while the rest is done; or the outcome."""
        with self._lock:
            if self._reply is None and not self._may_go_on:
                self._held_up.append(respond)
                return
        respond(self._reply or Frame(pb.Reply(granted=True)))

    def let_go_on(self) -> None:
        """What is left to do does not hold the job up."""
        with self._lock:
            self._may_go_on, held_up, self._held_up = True, self._held_up, []
        for respond in held_up:
            respond(Frame(pb.Reply(granted=True)))

    def _run(self) -> None:
        work, self._work = self._work, None  # it knows this errand, and may hold values as large as all others together
        assert work is not None, "it is started once"
        try:
            reply = work()
        except FleetError as error:
            reply = error_reply(error)
        except Exception as error:
            _log.warning("%s failed", self.what, exc_info=error)
            reply = error_reply(CheckpointError(f"{self.what} failed", got=f"{type(error).__name__}: {error}"))
        with self._lock:
            self._reply, asking = reply, self._asking + self._held_up
        for respond in asking:
            respond(reply)


#: Makes the piece that begins at a cursor; what has to be written beside it is handed on.
Export = Callable[[str, HandOn], Piece]


def write_share(folder: str, proof: str, server: int, export: Export, clock: Clock, *, behind: bool) -> Frame:
    """Write all that ``export`` has, cursor by cursor, into a folder that a worker has claimed; not granted if that is
    not to be found here. ``behind`` the training it takes only what time that leaves."""
    place = proven(folder, proof)
    if place is None:
        return Frame(pb.Reply(granted=False))
    prefix = f"server-{server}"
    for name in place.names():
        if name.startswith(f"{prefix}-"):  # by this server, before it was killed
            place.remove(name)
    with PieceWriter(place, PurePosixPath(folder).name, prefix, behind=behind) as pieces:
        write_pieces(pieces, FIRST, lambda cursor: export(cursor, pieces.add), clock, behind=behind)
    return Frame(pb.Reply(granted=True, about=_told(pieces.files)))


def write_pieces(
    pieces: PieceWriter, cursor: str, export: Callable[[str], Piece], clock: Clock, *, behind: bool
) -> None:
    """Write what ``export`` has from a cursor on; ``behind`` the training with a rest after each piece."""
    while cursor:
        began = clock.now()
        piece = export(cursor)
        took = clock.now() - began
        pieces.add(piece.about, piece.tensors)
        if behind and is_of_rows(cursor):  # parameters may hold the job up
            clock.sleep(_REST * took)
        cursor = piece.next_cursor


def _told(files: list[PieceFile]) -> str:
    return json.dumps([asdict(each) for each in files])
