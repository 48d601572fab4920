"""Snapshots of a durable server: begun between two requests, and written beside those that follow.

A snapshot is of the moment it is begun in, at which the journal changes as well: parameters are copied then, and rows
are kept frozen (frozen_view.py) until they are written. One is written at a time. It is given up when other values take
the place of those it is of, and when the server ends: the journal has everything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from contextlib import AbstractContextManager

from fleet.ps.server.checkpoint_share import write_pieces
from fleet.ps.server.context import Floor
from fleet.ps.server.durable_state import Memory, Shot
from fleet.ps.table.shard import Piece

_log = logging.getLogger("fleet.server")


class _GivenUpError(Exception):
    """Nobody wants this snapshot any more."""


class Snapshots:
    def __init__(self, floor: Floor, memory: Memory) -> None:
        self._floor = floor
        self.memory = memory
        self._writer: threading.Thread | None = None
        #: the number of the last one, unless it was given up
        self._wanted: int | None = None
        self._closed = False

    def begin_if_due(self) -> None:
        """Have a snapshot taken if it is time for one, and none is being written."""
        if self._is_due() and (self._writer is None or not self._writer.is_alive()):
            name = f"fleet-snapshot-{self._floor.endpoint}"
            self._writer = threading.Thread(target=self._take_behind, name=name, daemon=True)
            self._writer.start()

    def take_now(self) -> None:
        """Take one before anything else is done."""
        floor = self._floor
        shot = self.memory.begin(floor.running(), floor.roll.told(), behind=False)
        self._wanted = shot.draft.number
        self._write(shot, contextlib.nullcontext(), behind=False)

    def close(self) -> None:
        """Give up what is being written. Not under the server's lock."""
        with self._floor.lock:
            self._closed, self._wanted = True, None
        if self._writer is not None:
            self._writer.join()

    def _is_due(self) -> bool:
        """Whether it is time for one, and everything is there that one is made of."""
        job = self._floor.job
        if self._closed or self._floor.ending.begun or job is None:
            return False
        return job.is_whole and self.memory.is_due(job)

    def _take_behind(self) -> None:
        floor = self._floor
        if floor.sync(Memory.sync) is not None:  # now, lest it take long under the lock
            return
        try:
            with floor.lock:
                if not self._is_due():
                    return
                shot = self.memory.begin(floor.running(), floor.roll.told(), behind=True)
                self._wanted = shot.draft.number
            self._write(shot, floor.lock, behind=True)
        except _GivenUpError:
            pass
        except Exception as error:
            _log.warning("%s: no snapshot could be taken, and the journal grows: %r", floor.endpoint, error)

    def _write(self, shot: Shot, lock: AbstractContextManager[object], *, behind: bool) -> None:
        """Write all of it; ``lock`` is held around what has to do with the job."""

        def export(cursor: str) -> Piece:
            with lock:
                self._check_wanted(shot)
                return shot.export(cursor)

        try:
            with shot.draft.pieces as pieces:
                for piece in shot.parameters:
                    pieces.add(piece.about, piece.tensors)
                write_pieces(pieces, shot.rows, export, self._floor.clock, behind=behind)
            snapshot = self.memory.publish(shot)
        except Exception:
            self.memory.discard(shot)
            with lock:
                self._check_wanted(shot)  # else a failure is nobody's concern
            raise
        finally:
            with lock:
                shot.frozen.leave()
        with lock:
            self._check_wanted(shot)  # else it may stay: it leads to where others do
            self.memory.adopt(shot, snapshot)
        self.memory.clean()

    def _check_wanted(self, shot: Shot) -> None:
        if self._wanted != shot.draft.number:
            raise _GivenUpError
