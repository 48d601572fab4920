"""Keeps something as fresh as its source: a thread takes one update after the other, and puts each in place as a whole.

What is kept is a ``Holder``: a user's model, or whatever else is served. What goes wrong and may pass, such as a server
that starts again or a damaged file, is logged and tried again, and the last version stays. What cannot pass, such as a
model that is another one now, ends the following; ``wait`` raises it, and the last version stays as well.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from fleet.base import checks
from fleet.base.clock import Clock, SystemClock, Wait
from fleet.errors import (
    ArgumentTypeError,
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    IdentityError,
    PlanMismatchError,
    StateError,
    UnsupportedError,
)
from fleet.serving.source import Piece, Source, SourceDescription, Update

_log = logging.getLogger("fleet.serving")

#: The source is asked for so long at a time.
_ASKED_S = 1.0
#: After a failure the next attempt comes after so long, twice as long each time, up to a bound.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: A thread that was told to end does so in this time.
_ENDING_S = 30.0
#: Failures that do not pass by themselves.
_LASTING = (
    *(ArgumentTypeError, AuthenticationError, ConfigurationError, IdentityError, PlanMismatchError),
    *(StateError, UnsupportedError),
)


class Draft(Protocol):
    """Collects what leads to the next version."""

    def add(self, piece: Piece) -> None: ...

    def publish(self) -> bool:
        """Put all of it in place at one moment; return False where that is not wanted any more."""


class Holder(Protocol):
    """Holds what is kept fresh. One thread changes it."""

    def fit(self, source: SourceDescription) -> None:
        """Get ready to hold what a source has, or raise why that cannot be."""

    def begin(self, whole: bool, version: int) -> Draft:
        """Return what collects the next version: from the one that is there, or from nothing if it comes ``whole``."""

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which this thread reads one version."""

    def close(self) -> None:
        """Change nothing any more, from any thread."""


class Follower:
    """Keeps a model fresh until it is closed, or the process ends. ``follow`` makes it.

    As a context, it is closed at the end. What is left then is a model that stays as it is.

    Examples:
        >>> with fleet.Checkpoints("run", every_steps=1, background=False) as checkpoints:
        ...     optimizer.minimize(loss())
        ...     checkpoints.after_step()
        >>> serving = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
        >>> with fleet.serving.follow(serving, "run") as follower:
        ...     print(follower.wait(1, timeout_s=5), follower.age_s < 5)
        ...     with follower.pinned():  # both are of one version
        ...         first, second = serving(ids), serving(ids)
        1 True
    """

    def __init__(
        self, holder: Holder, source: Source, where: str, *, at: int | None = None, clock: Clock | None = None
    ) -> None:
        """``where`` names the source in messages."""
        self._holder = holder
        self._source = source
        self._where = where
        self._at = at
        self._clock: Clock = SystemClock() if clock is None else clock
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._version: int | None = None
        #: of the version that is there, while the next one comes
        self._heard_at: float | None = None
        self._trouble: FleetError | None = None
        self._failure: FleetError | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def begin(self, within_s: float) -> None:
        """Take the first version, within so many seconds, and go on behind."""
        try:
            with torch.device("cpu"):  # the caller may have chosen another for the tensors that he makes
                self._holder.fit(self._source.describe())
                self._fill(within_s)
            if self._at is not None:
                self._source.close()
                return
            self._thread = threading.Thread(target=self._go_on, name=f"fleet-follower-{self._where}", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- for users

    @property
    def version(self) -> int:
        """Return the version that forwards read now: a completed step of a synchronous job, in other modes how many
        updates every server has applied at least."""
        assert self._version is not None
        return self._version

    @property
    def age_s(self) -> float:
        """Return how many seconds ago the source was last heard to have nothing newer than ``version``."""
        heard_at = self._heard_at
        return self._clock.now() - (self._source.heard_at if heard_at is None else heard_at)

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until ``version`` or a later one is there, and return which it is. It raises what has ended the
        following, and a ``DeadlineError`` when the time is over."""
        checks.whole("version", version, 0)
        checks.seconds("timeout_s", timeout_s, above=False)
        self._refuse_child()
        wait = Wait(self._clock, timeout_s)
        with self._changed:
            while self.version < version:
                self._refuse_vain(version)
                left = timeout_s - wait.so_far_s
                if left <= 0:
                    trouble = "" if self._trouble is None else f"; the source is in trouble: {self._trouble}"
                    raise DeadlineError(
                        "a version has not come",
                        where=self._where,
                        expected=f"version {version} within {timeout_s:g} s",
                        got=f"version {self.version}{trouble}",
                    )
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return self.version

    def pinned(self) -> AbstractContextManager[object]:
        """Return a context in which this thread reads one version in all that it does, not only in each forward:
        several forwards, ``state_dict()``, a backward. The next version waits for its end."""
        return self._holder.reading()

    def close(self) -> None:
        """Stop following. The model stays as it is, and goes on working. A second call does nothing."""
        self._closing.set()
        self._holder.close()
        if os.getpid() != self._process:
            return  # the thread and its connections are the parent's
        self._source.close()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)
            if self._thread.is_alive():
                _log.warning("what follows %s has not ended within %g s", self._where, _ENDING_S)
        atexit.unregister(self.close)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Follower({self._where!r}, version={self._version})"

    def _refuse_child(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                "the model is kept fresh in the process that called fleet.serving.follow(), not in its children",
                where=self._where,
                got=f"version {self.version}, which stays",
                todo="Call follow() in the child, with a model of its own.",
            )

    def _refuse_vain(self, version: int) -> None:
        """Raise if nobody will bring this version."""
        if self._failure is not None:
            raise self._failure.again() from self._failure
        reason = "the follower was closed" if self._closing.is_set() else None
        if self._at is not None:
            reason = f"the follower is pinned to version {self._at}"
        elif reason is None and self._source.ended:
            reason = "the job is over"
        if reason is not None:
            raise StateError(
                f"{reason}, and no later version comes",
                where=self._where,
                expected=f"version {version}",
                got=f"version {self.version}",
            )

    # ---------------------------------------------------------------- one update after the other

    def _fill(self, within_s: float) -> None:
        wait = Wait(self._clock, within_s)
        while self._version is None:
            if wait.so_far_s > within_s:
                raise DeadlineError(
                    "the model could not be filled",
                    where=self._where,
                    expected=f"a whole version within {within_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                    got=None if self._trouble is None else str(self._trouble),
                )
            if wait.is_due():
                _log.info("waiting for the first version of %s, for %.0f s now", self._where, wait.so_far_s)
            update = self._source.next(_ASKED_S)
            if update is None:
                continue
            if self._at is not None and update.version != self._at:
                raise CheckpointError(
                    "this version cannot be had",
                    where=self._where,
                    expected=f"version {self._at}",
                    got=f"version {update.version}",
                    todo="Running servers have their newest version only; name a directory of checkpoints.",
                )
            try:
                self._take(update)
            except FleetError as error:
                if isinstance(error, _LASTING):
                    raise
                self._note(error)

    def _go_on(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                update = self._source.next(_ASKED_S)
                if update is not None:
                    self._take(update)
                elif self._source.ended:
                    _log.info("%s has ended; the model stays at version %d", self._where, self.version)
                    break
            except Exception as error:
                if self._closing.is_set():
                    break
                if isinstance(error, _LASTING):
                    _log.error("%s is followed no more, and version %d stays: %s", self._where, self.version, error)
                    self._failure = error
                    break
                self._note(error)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._trouble, pause_s = None, _FIRST_PAUSE_S
        with self._changed:
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        """Log a failure that may pass, once."""
        known, former = isinstance(error, FleetError), self._trouble
        trouble = self._trouble = error if isinstance(error, FleetError) else FleetError("it failed", got=repr(error))
        if former is None or str(trouble) != str(former):
            version = "no version is there yet" if self._version is None else f"version {self._version} stays"
            _log.warning("%s, and %s is tried again: %s", version, self._where, trouble, exc_info=not known)

    def _take(self, update: Update) -> None:
        """Take an update in, piece after piece, and put it in place."""
        if self._version is not None:
            self._heard_at = self._source.heard_at
        try:
            draft = self._holder.begin(update.whole, update.version)
            for piece in _closed_at_end(update.pieces):
                if self._closing.is_set():
                    return
                draft.add(piece)
            if draft.publish():
                update.taken()
                with self._changed:
                    self._version = update.version
                    self._changed.notify_all()
        finally:
            self._heard_at = None


def _closed_at_end(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces, and have a generator let go of what it holds, wherever this ends."""
    try:
        yield from pieces
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
