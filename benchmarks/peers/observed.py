"""``ours.py`` that shows its figures in every other span of time only, and there ten times as often as usual.

Its worker writes down how each span went: a line of JSON in the file that ``SPANS`` names.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import ours
from work import Meter

from fleet.telemetry import observer

SPAN_S, AS_OFTEN = 1.5, 10


class Spans:
    """``after_step`` of a meter, and beside it what a step takes in each whole span."""

    def __init__(self) -> None:
        self._original = Meter.after_step
        self._span, self._steps = -1, 0
        self._began = self._cpu = 0.0
        self._is_whole = False

    def after_step(self, meter: Meter, loss: Any) -> None:
        span = current_span()
        if span != self._span:
            now, cpu = time.monotonic(), time.process_time()
            if self._is_whole:
                figures = {
                    "shown": is_shown(self._span),
                    "seconds": (now - self._began) / self._steps,
                    "cpu_s": (cpu - self._cpu) / self._steps,
                }
                with open(os.environ["SPANS"], "a", encoding="utf-8") as file:
                    file.write(json.dumps(figures) + "\n")
            self._is_whole = self._span >= 0  # the first one had begun before
            self._span, self._steps, self._began, self._cpu = span, 0, now, cpu
        self._steps += 1
        self._original(meter, loss)


def current_span() -> int:
    """The same in all processes."""
    return int(time.time() / SPAN_S)


def is_shown(span: int) -> bool:
    return span % 2 == 0


def main() -> None:
    write = observer.Observer._write

    def write_sometimes(self: observer.Observer) -> None:
        if is_shown(current_span()):
            write(self)

    observer.PERIOD_S /= AS_OFTEN
    observer.Observer._write = write_sometimes  # type: ignore[method-assign]
    spans = Spans()
    Meter.after_step = lambda meter, loss: spans.after_step(meter, loss)  # type: ignore[method-assign]
    ours.main()


if __name__ == "__main__":
    main()
