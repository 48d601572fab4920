"""A server writes its pieces of a checkpoint or of a snapshot one after the other, beside the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import PurePosixPath

from fleet.base.clock import Clock
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import proven
from fleet.ps.table.frozen_view import HandOn
from fleet.ps.table.shard import FIRST, Piece, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

#: A share that nobody waits for rests so much longer than it copies: the rest of the time belongs to who trains.
_REST = 2.0


#: Makes the piece that begins at a cursor; what has to be written beside it is handed on.
Export = Callable[[str, HandOn], Piece]


def write_share(folder: str, proof: str, server: int, export: Export, clock: Clock, *, behind: bool) -> Frame:
    """Write everything that ``export`` has, cursor by cursor, into a folder that a worker has claimed; the reply says
    no if this process does not find the folder. ``behind`` the training it takes only the time that the training
    leaves."""
    place = proven(folder, proof)
    if place is None:
        return Frame(pb.Reply(granted=False))
    prefix = f"server-{server}"
    for name in place.names():
        if name.startswith(f"{prefix}-"):  # by this server, before it was killed
            place.remove(name)
    with PieceWriter(place, PurePosixPath(folder).name, prefix, behind=behind) as pieces:
        write_pieces(pieces, FIRST, lambda cursor: export(cursor, pieces.add), clock, behind=behind)
    return Frame(pb.Reply(granted=True, about=_described(pieces.files)))


def write_pieces(
    pieces: PieceWriter, cursor: str, export: Callable[[str], Piece], clock: Clock, *, behind: bool
) -> None:
    """Write what ``export`` has from a cursor on; ``behind`` the training it rests after each piece."""
    while cursor:
        began = clock.now()
        piece = export(cursor)
        took = clock.now() - began
        if piece.about:
            pieces.add(piece.about, piece.tensors)
        if behind and is_of_rows(cursor):  # parameters may hold the job up
            clock.sleep(_REST * took)
        cursor = piece.next_cursor


def _described(files: list[PieceFile]) -> str:
    return json.dumps([asdict(each) for each in files])
