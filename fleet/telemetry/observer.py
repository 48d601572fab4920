"""Shows a process's figures while it runs: in the record on disk, in TensorBoard, and on a page for Prometheus.

Each is shown only where it was asked for, and a process of which nobody asks anything has no thread for it. A failure
here, such as a full disk, is logged once and never harms the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fleet.base.clock import wall_time
from fleet.base.settings import ProcessSettings
from fleet.errors import ConfigurationError
from fleet.telemetry.record import Record

_log = logging.getLogger("fleet.observing")

PERIOD_S = 1.0


class _Sink(Protocol):
    def write(self, at: float, kind: str, told: Any, is_last: bool) -> None: ...

    def close(self) -> None: ...


class Observer:
    def __init__(
        self, process: str, kind: str, read: Callable[[], Mapping[str, Any]], settings: ProcessSettings
    ) -> None:
        """``read`` returns the figures of ``process`` ("worker 0"), as its ``kind`` has them, from any thread."""
        self._kind = kind
        self._read = read
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._page: _Closable | None = None
        self._sinks = _sinks(process, settings)
        if settings.observing.metrics_port is not None:
            from fleet.telemetry.prometheus import Page  # needs what not everybody has installed

            try:
                self._page = Page(process, kind, read, settings)
            except BaseException:
                self._close_sinks()
                raise
        if self._sinks:
            self._thread = threading.Thread(target=self._run, name=f"fleet-observer-{process}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Show the last figures, and end."""
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._page is not None:
            self._page.close()
            self._page = None

    def _run(self) -> None:
        while self._sinks:
            is_last = self._ending.wait(PERIOD_S)
            self._write(is_last)
            if is_last:
                break
        self._close_sinks()

    def _write(self, is_last: bool) -> None:
        try:
            told = self._read()
            for sink in self._sinks:
                sink.write(wall_time(), self._kind, told, is_last)
        except Exception as error:
            _log.warning("figures are no longer recorded: %s", error)
            self._close_sinks()

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                _log.warning("the end of a record is lost: %s", error)


class _Closable(Protocol):
    def close(self) -> None: ...


def _sinks(process: str, settings: ProcessSettings) -> list[_Sink]:
    sinks: list[_Sink] = []
    observing = settings.observing
    if observing.record_dir:
        try:
            sinks.append(Record(observing.record_dir, process))
        except OSError as error:
            raise ConfigurationError(
                "FLEET_RECORD_DIR cannot be written to",
                where=observing.record_dir,
                got=str(error),
                todo="Name a directory in which this process may make files, or unset the variable.",
            ) from None
    if observing.tensorboard_dir:
        from fleet.telemetry.tensorboard import Scalars

        sinks.append(Scalars(observing.tensorboard_dir, process))
    return sinks
