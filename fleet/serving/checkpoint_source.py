"""Follows the directory of a job's checkpoints: every new one is an update.

One that goes on from the last that was taken, over any number of deltas, is read from there on. Of others all is read,
from the nearest full one, as a full one does not say what has changed. The pieces of an update are read and verified
one by one, and whoever takes them puts nothing in place before the last. A checkpoint that turns out to be damaged, or
was removed meanwhile, is left alone for a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from fleet.base.clock import SystemClock, Wait
from fleet.checkpoint import inspection, series
from fleet.checkpoint.inspection import WEIGHT
from fleet.checkpoint.manifest import BUFFERS, TABLE, Checkpoint
from fleet.checkpoint.pieces import REMOVED
from fleet.errors import CheckpointError, DeadlineError, PlanMismatchError, StateError
from fleet.serving.source import Piece, RowChanges, SourceDescription, Update, description_of

_log = logging.getLogger("fleet.serving")

#: The checkpoint that was taken is looked at this often: another may have come to its place.
_LOOK_AGAIN_S = 5.0
#: What could not be read is tried again after so long, twice as long each time, up to a bound.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: An error lists no more versions than these.
_MOST_LISTED = 20


class CheckpointSource:
    """Implements ``Source``."""

    def __init__(self, root: object, *, poll_s: float, at: int | None = None, deadline_s: float = 180.0) -> None:
        """``at`` is the one version that is wanted; the first checkpoint may take ``deadline_s`` to come."""
        self._root = series.root_at(root)
        self._poll_s = poll_s
        self._at = at
        self._deadline_s = deadline_s
        self._clock = SystemClock()
        self._closing = threading.Event()
        self._described: SourceDescription | None = None
        self._taken: Checkpoint | None = None
        self._heard_at = self._clock.now()
        self._next_look_at = self._looked_again_at = self._clock.now()
        #: by place: the pause of what could not be read, its end, and why
        self._broken: dict[str, tuple[float, float, CheckpointError]] = {}
        #: whether there was nothing at all when it was last looked
        self._is_missed = False

    @property
    def where(self) -> str:
        return self._root.url

    @property
    def heard_at(self) -> float:
        return self._heard_at

    @property
    def ended(self) -> bool:
        """Say that more may come: a directory does not tell."""
        return False

    def close(self) -> None:
        self._closing.set()

    # ---------------------------------------------------------------- what there is

    def describe(self) -> SourceDescription:
        wait = Wait(self._clock, self._deadline_s)
        while (found := self._newest(series.steps_in(self._root))) is None:
            if self._broken:
                raise next(iter(self._broken.values()))[2].again()
            if wait.so_far_s > self._deadline_s:
                raise DeadlineError(
                    "there is no complete checkpoint to follow",
                    where=self.where,
                    expected=f"one within {self._deadline_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                    todo="Name the directory that the job gives to fleet.Checkpoints.",
                )
            if wait.is_due():
                _log.info("waiting for a first checkpoint in %s, for %.0f s now", self.where, wait.so_far_s)
            if self._closing.wait(self._poll_s):
                raise StateError("the source was closed", where=self.where)
        self._described = _description(found)
        return self._described

    def _newest(self, steps: Sequence[int]) -> Checkpoint | None:
        """Return the checkpoint to take next, of those of these steps, if there is one that can be read."""
        if self._at is not None:
            return None if self._taken is not None else self._pinned(self._at, steps)
        taken = self._taken
        known = -1 if taken is None else taken.manifest.version
        for step in reversed(steps):
            if step < known and known in steps:
                return None
            if step == known and not self._was_replaced():
                return None
            found = self._opened(step)
            if found is not None:
                return found
        return None

    def _opened(self, step: int) -> Checkpoint | None:
        place = self._root.within(series.name_of(step))
        if self._rests(place.url):
            return None
        try:
            found = series.opened(place)
            if found is not None and found.manifest.version != step:
                raise CheckpointError(
                    "a checkpoint lies in a directory that is called after another step",
                    where=place.url,
                    got=f"step {found.manifest.version}",
                )
            return None if found is None else self._unless_damaged(found)
        except CheckpointError as error:
            self._set_aside(place.url, error)
            return None

    def _unless_damaged(self, found: Checkpoint) -> Checkpoint | None:
        """Return a checkpoint unless a moment ago it could not be read, or one that it goes on from."""
        return None if any(self._rests(each.place.url) for each in found.lineage()) else found

    def _rests(self, url: str) -> bool:
        """Say whether a checkpoint could not be read a moment ago."""
        return url in self._broken and self._clock.now() < self._broken[url][1]

    def _set_aside(self, url: str, error: CheckpointError) -> None:
        """Leave alone for a while what cannot be read."""
        pause_s, _, before = self._broken.get(url, (_FIRST_PAUSE_S / 2, 0.0, None))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if str(before) != str(error):
            _log.warning("passing by what is no complete checkpoint: %s", error)
        self._broken[url] = pause_s, self._clock.now() + pause_s, error

    def _was_replaced(self) -> bool:
        """Say whether there is another checkpoint now where the last one was; this is looked at from time to time."""
        assert self._taken is not None
        now = self._clock.now()
        if now - self._looked_again_at < _LOOK_AGAIN_S:
            return False
        self._looked_again_at = now
        try:
            return Checkpoint.open_manifest(self._taken.place)[1].id != self._taken.manifest.id
        except CheckpointError:
            return False

    def _pinned(self, step: int, there: Sequence[int]) -> Checkpoint | None:
        found = series.opened(self._root.within(series.name_of(step))) if step in there else None
        if found is None or found.manifest.version != step:
            complete = [each.manifest.version for each in series.complete(self._root)]
            listed = ", ".join(map(str, complete[:_MOST_LISTED]))
            raise CheckpointError(
                f"there is no complete checkpoint of version {step}",
                where=self.where,
                expected=f"one of {listed}{', …' * (len(complete) > _MOST_LISTED)}" if complete else "one at least",
                todo="fleet checkpoint ls lists what a directory has.",
            )
        return self._unless_damaged(found)

    # ---------------------------------------------------------------- what is new

    def next(self, timeout_s: float) -> Update | None:
        began = self._clock.now()
        while not self._closing.is_set():
            now = self._clock.now()
            if now >= self._next_look_at:
                self._next_look_at = now + self._poll_s
                steps = series.steps_in(self._root)
                found = self._newest(steps)
                if found is not None:
                    return self._update(found, now)
                self._note_nothing(now, steps)
            left = began + timeout_s - self._clock.now()
            if left <= 0:
                break
            self._closing.wait(min(left, max(0.0, self._next_look_at - self._clock.now())))
        return None

    def _note_nothing(self, now: float, steps: Sequence[int]) -> None:
        """Note that nothing was newer than what was taken, unless that is so only because it cannot be read."""
        if self._taken is None:
            if self._broken:
                raise next(iter(self._broken.values()))[2].again()
            return
        there = {self._root.within(series.name_of(step)).url for step in steps}
        if not there and not self._is_missed:
            _log.warning("%s has no checkpoints any more; version %d stays", self.where, self._taken.manifest.version)
        self._is_missed = not there
        self._broken = {url: told for url, told in self._broken.items() if url in there}
        if there and not self._broken:
            self._heard_at = now

    def _update(self, found: Checkpoint, now: float) -> Update:
        if self._described is not None and _description(found) != self._described:
            raise PlanMismatchError(
                "the checkpoint is one of another model than those before it",
                where=found.where,
                todo="Follow it with a model that is built like it.",
            )
        lineage = found.lineage()
        ids = [each.manifest.id for each in lineage]
        taken = self._taken
        whole = taken is None or taken.manifest.id not in ids
        new = lineage if taken is None or whole else lineage[ids.index(taken.manifest.id) + 1 :]

        def note_taken() -> None:
            self._taken, self._heard_at, self._looked_again_at = found, now, now
            for each in new:
                self._broken.pop(each.place.url, None)

        return Update(found.manifest.version, whole, self._pieces(found, new), note_taken)

    def _pieces(self, found: Checkpoint, new: list[Checkpoint]) -> Iterator[Piece]:
        read = found
        try:
            for parameter in inspection.parameters(found):
                yield Piece({parameter.spec.name: parameter.value})
            if beside := inspection.buffers(found):
                yield Piece(beside)
            for read in new:
                yield from _rows(read)
        except CheckpointError as error:
            self._set_aside(read.place.url, error)
            raise


def _rows(checkpoint: Checkpoint) -> Iterator[Piece]:
    """Yield the rows that one checkpoint has itself."""
    dims = {table.name: table.dim for table in checkpoint.manifest.spec.tables}
    dtypes = {table.name: getattr(torch, table.dtype) for table in checkpoint.manifest.spec.tables}
    for place, piece in replace(checkpoint, before=None).files(TABLE):
        ids, *columns = inspection.checked(place, piece, checkpoint)
        name = piece.about[TABLE]
        if REMOVED in piece.about:
            nothing = torch.empty(0, dims[name], dtype=dtypes[name], device="cpu")
            yield Piece(rows={name: RowChanges(np.empty(0, np.int64), nothing, ids.numpy())})
        else:
            yield Piece(rows={name: RowChanges(ids.numpy(), columns[piece.about["columns"].index(WEIGHT)])})


def _description(checkpoint: Checkpoint) -> SourceDescription:
    told = description_of(checkpoint.manifest.spec)
    beside = inspection.buffers(checkpoint) if checkpoint.files(BUFFERS) else {}
    buffers = {name: (tuple(each.shape), each.dtype) for name, each in beside.items()}
    return SourceDescription({**told.dense, **buffers}, told.tables)
