"""The vocabulary every consistency mode speaks: effects, a gate (server half) and a policy (worker half).

Pure: no thread, no clock, no tensor. A gate is told what arrived and answers with the effects to carry out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Apply:
    """Take one optimizer step on what these workers pushed as their step ``step``, in this order."""

    step: int
    contributors: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Answer the request that waits under ``ticket``: the version it needs is there."""

    ticket: Hashable
    version: int


Effect = Apply | Answer


class Gate(Protocol):
    """Decides which pushes are applied when, and which waiting requests may be answered."""

    @property
    def version(self) -> int:
        """How many steps have been applied."""
        ...

    def push(self, worker: int, step: int) -> list[Effect]:
        """``worker`` delivered the gradient of its step; a repetition changes nothing."""
        ...

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        """A request of ``worker`` can be answered once ``version`` is there."""
        ...

    def leave(self, worker: int) -> list[Effect]:
        """``worker`` said goodbye or was given up on; its waiting requests are dropped."""
        ...

    @property
    def clocks(self) -> dict[int, int]:
        """The newest step of every worker that is still part of this."""
        ...

    @property
    def gone(self) -> dict[int, int]:
        """The newest step of every worker that has left, which goes on from there if it is part of this again."""
        ...

    def resume(self, clocks: Mapping[int, int], gone: Mapping[int, int], version: int) -> None:
        """Be where another gate was that had these, with nothing pending."""
        ...

    def join(self, worker: int) -> None:
        """``worker``, which had left or was never there, is part of this from now on."""
        ...

    def delivered(self, worker: int) -> int:
        """The newest step ``worker`` has delivered."""
        ...

    def make_up(self, worker: int, step: int) -> list[Effect]:
        """``worker`` had delivered ``step``, of which this knows no more: its next one follows that. Not where workers
        share their steps."""
        ...

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        """The step that is open now and the workers it waits for, for whoever explains a wait."""
        ...


@dataclass(frozen=True)
class Mode:
    """One consistency mode: how servers gate, and which version a worker needs after ``step`` steps, given the bound
    on staleness that the job has (0 where the mode knows none)."""

    name: str
    gate: Callable[[Iterable[int], int], Gate]
    version_needed: Callable[[int, int], int]
    #: Steps are the whole job's: after the same step every server is at the same version and every worker sees it.
    lockstep: bool = False
    #: What workers push are changes, to be added to the values, and not gradients.
    adds: bool = False
    #: Workers push behind their steps: none waits for the answer.
    behind: bool = False
