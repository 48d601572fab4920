"""Holds a worker's figures: the training thread adds to them, and others read them from another thread.

What a step pays for is a few additions. A loss is kept as the tensor it is, and made a number when somebody reads it,
about once a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from fleet.base import checks
from fleet.base.clock import Clock
from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.telemetry.figures import LONGEST_NAME, WORKER
from fleet.telemetry.process import ProcessFigures, delay

#: So many figures of the user's own.
MOST_REPORTED = 64
#: In one call. Their sum has to remain a number that figures can travel as, whatever a script calls its examples.
_MOST_EXAMPLES = 1e15


class WorkerFigures:
    def __init__(self, clock: Clock) -> None:
        self.push = Span("fleet.push", clock)
        self.pull = Span("fleet.pull", clock)
        self.meet = Span("fleet.meet", clock)
        self.reduce = Span("fleet.reduce", clock)
        self.copy = Span("fleet.copy", clock)
        self._process = ProcessFigures(clock)
        self._examples = 0
        self._reported: dict[str, float | torch.Tensor] = {}

    def saw(self, loss: object) -> None:
        """Note a loss that the training has computed."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._reported["loss"] = loss.detach()

    def report(self, examples: object, loss: object, others: Mapping[str, object]) -> None:
        """Take figures that only the script knows."""
        counted = 0 if examples is None else checks.integer("report(): examples", examples)
        if counted < 0:
            raise ConfigurationError("report(): examples cannot be negative", got=examples)
        checks.number("report(): examples", counted, 0, below=_MOST_EXAMPLES)
        given = {**others, **({} if loss is None else {"loss": loss})}
        for name in others:
            if name in WORKER:
                raise ConfigurationError(
                    f"report(): {name!r} is a figure that Fleet counts itself", todo="Choose another name."
                )
            if len(name) > LONGEST_NAME or not name.isidentifier() or not name.isascii():
                raise ConfigurationError(
                    "report(): this is no name of a figure",
                    expected=f"letters, digits and underscores, at most {LONGEST_NAME}",
                    got=repr(name[:80]),
                )
        if len((self._reported.keys() | given) - {"loss"}) > MOST_REPORTED:  # which is no name of the script's own
            raise ConfigurationError("report(): too many figures", expected=f"up to {MOST_REPORTED} names")
        kept = {name: _kept(name, value) for name, value in given.items()}
        self._examples += counted
        self._reported.update(kept)

    def read(self, **known: float) -> dict[str, float]:
        """Return all figures, with what the caller ``known`` beside them."""
        return {
            **known,
            "examples": self._examples,
            "push_seconds": self.push.seconds,
            "pull_seconds": self.pull.seconds,
            "meet_seconds": self.meet.seconds,
            "reduce_seconds": self.reduce.seconds,
            "copy_seconds": self.copy.seconds,
            **delay(),
            **self._process.read(),
            **{name: _number(value) for name, value in list(self._reported.items())},
        }


def _number(value: float | torch.Tensor) -> float:
    try:
        return float(value)
    except RuntimeError:  # what is wrong with a device its training thread will tell
        return math.nan


def _kept(name: str, value: object) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    if hasattr(value, "__float__") and not isinstance(value, str | torch.Tensor):
        return float(checks.real(f"report(): {name}", value) if type(value) is int else value)
    raise ArgumentTypeError(
        f"report(): {name} must be a number or a tensor of one element",
        got=f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80],
    )


class Span:
    """Measures time: ``with span:`` adds the time that it takes, and is a range in a profile of torch's. It serves one
    thread at a time."""

    def __init__(self, name: str, clock: Clock) -> None:
        #: the spans that are over, and when the present one began: one value, as another thread may read it
        self._state: tuple[float, float | None] = (0.0, None)
        self._clock = clock
        self._range = ProfilerRange(name)

    @property
    def seconds(self) -> float:
        """Return the seconds so far, those of a span under way too: a wait that never ends must not look like time of
        the script's own."""
        now = self._clock.now()
        over, began = self._state
        return over if began is None else over + max(0.0, now - began)

    def __enter__(self) -> None:
        self._range.__enter__()
        self._state = self._state[0], self._clock.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._state = self.seconds, None
        self._range.__exit__(kind, error, at)


class ProfilerRange:
    """Marks a range in a profile of torch's, which costs next to nothing while none is made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recorded: Any = None

    def __enter__(self) -> None:
        if torch._C._autograd._profiler_enabled():
            self._recorded = torch.profiler.record_function(self._name)
            self._recorded.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(kind, error, at)
            self._recorded = None
