"""Runs ``fleet replica``: a follower that answers look-ups, until a signal ends it."""

from __future__ import annotations

import logging
import signal
from types import FrameType

from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.base.unknown_variables import remark
from fleet.ps.server.lean import be_lean
from fleet.serving.following import source_of
from fleet.serving.replica import Replica

_log = logging.getLogger("fleet.serving")


class _Ended(BaseException):
    """Says that a signal came, wherever the first thread is."""


class _Signals:
    """Ends the process in order at the first signal, and lets no other one disturb that."""

    def __init__(self) -> None:
        self._first: str | None = None

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends already

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._first is None:
            self._first = signal.Signals(number).name
            raise _Ended(self._first)

    def check(self) -> None:
        """Raise if one has come whose exception was lost, as in a destructor."""
        if self._first is not None:
            raise _Ended(self._first)


def replicate(followed: str | list[str], endpoint: Endpoint, poll_s: float, at: int | None) -> int:
    """Answer until SIGTERM or SIGINT, and return the exit code."""
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    remark(PROCESS_ENVIRONMENT)
    be_lean()
    try:
        with _Signals() as signals:
            source, where = source_of(followed, poll_s, at, settings)
            with Replica(source, where, endpoint, settings, at=at) as replica:
                replica.begin()
                signals.check()
                replica.serve()
    except _Ended as ended:
        _log.info("the replica at %s ends: %s", endpoint, ended)
    return 0
