"""The server's half of every consistency mode: a gate, and the effects that it has carried out.

Pure: no thread, no clock, no tensor. A gate is told what arrived and answers with the effects to carry out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
        """Return how many steps have been applied."""
        ...

    def push(self, worker: int, step: int) -> list[Effect]:
        """``worker`` delivered the gradient of its step; a repetition changes nothing."""
        ...

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        """Return a request of ``worker`` can be answered once ``version`` is there."""
        ...

    def leave(self, worker: int) -> list[Effect]:
        """``worker`` said goodbye or was given up on; its waiting requests are dropped."""
        ...

    @property
    def clocks(self) -> dict[int, int]:
        """Return the newest step of every worker that is still part of this."""
        ...

    @property
    def gone(self) -> dict[int, int]:
        """Return the newest step of every worker that has left, which goes on from there if it is part of this
        again."""
        ...

    def resume(self, clocks: Mapping[int, int], gone: Mapping[int, int], version: int) -> None:
        """Be where another gate was that had these, with nothing pending."""
        ...

    def join(self, worker: int) -> None:
        """``worker``, which had left or was never there, is part of this from now on."""
        ...

    def delivered(self, worker: int) -> int:
        """Return the newest step ``worker`` has delivered."""
        ...

    def make_up(self, worker: int, step: int) -> list[Effect]:
        """``worker`` had delivered ``step``, of which this knows no more: its next one follows that. Not where workers
        share their steps."""
        ...

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        """Return the step that is open now and the workers it waits for, for whoever explains a wait."""
        ...
