"""Defines the server's half of every consistency mode: a gate, and the effects that it asks for.

Pure: no thread, no clock, no tensor. A gate is told what arrived and answers with the effects to carry out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Apply:
    """Asks to take one optimizer step on what these workers pushed as their step ``step``, in this order."""

    step: int
    contributors: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Asks to answer the request that waits under ``ticket``: the version it needs is there."""

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
        """Take note that ``worker`` delivered the gradient of its step; a repetition changes nothing."""
        ...

    def wait(self, ticket: Hashable, worker: int, version: int) -> list[Effect]:
        """Let a request of ``worker`` wait until ``version`` is there."""
        ...

    def leave(self, worker: int) -> list[Effect]:
        """Take out ``worker``, which said goodbye or was given up on; its waiting requests are dropped."""
        ...

    @property
    def clocks(self) -> dict[int, int]:
        """Return the newest step of every worker that still takes part."""
        ...

    @property
    def gone(self) -> dict[int, int]:
        """Return the newest step of every worker that has left; one that joins again goes on from there."""
        ...

    def resume(self, clocks: Mapping[int, int], gone: Mapping[int, int], version: int) -> None:
        """Go on where another gate was that had these, with nothing pending."""
        ...

    def join(self, worker: int) -> None:
        """Let ``worker``, which had left or was never there, take part from now on."""
        ...

    def delivered(self, worker: int) -> int:
        """Return the newest step ``worker`` has delivered."""
        ...

    def make_up(self, worker: int, step: int) -> list[Effect]:
        """Skip ``step``, which ``worker`` had delivered and of which the gate knows no more: its next step follows
        that. This is not for workers that share their steps."""
        ...

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        """Return the step that is open now and the workers it waits for, to explain a wait."""
        ...
