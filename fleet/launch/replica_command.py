"""Runs ``fleet replica``: a follower that answers look-ups, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from fleet.base import checks
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.base.unknown_variables import remark
from fleet.ps.server.lean import be_lean
from fleet.serving.following import source_of
from fleet.serving.replica import Replica

_log = logging.getLogger("fleet.serving")


class _Ended(BaseException):
    """Says that a signal came, wherever the first thread is."""


def replicate(followed: str | list[str], endpoint: Endpoint, poll_s: float) -> int:
    """Answer until SIGTERM or SIGINT, and return the exit code."""
    checks.number("--poll_s", poll_s, 0, above=True)
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    remark(PROCESS_ENVIRONMENT)
    be_lean()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        source, where = source_of(followed, poll_s, None, settings)
        with Replica(source, where, endpoint, settings) as replica:
            try:
                replica.begin()
                threading.Event().wait()
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # it ends already
    except _Ended as ended:
        _log.info("the replica at %s ends: %s", endpoint, ended)
    return 0


def _end(number: int, _: FrameType | None) -> None:
    raise _Ended(signal.Signals(number).name)
