"""Defines the server's half of every consistency mode: a gate, and the effects that it asks for.

Pure: no thread, no clock, no tensor. A gate is told what arrived and answers with the effects to carry out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

#: A worker, and the number of its step.
Push = tuple[int, int]


class Buffer(NamedTuple):
    """Holds the pushes that lead from ``version`` to the next one: each one's token, worker and step. ``divisor`` is
    what their sum is divided by, or 0 while others may still come."""

    version: int
    divisor: int
    pushes: tuple[tuple[int, int, int], ...]
    #: nobody in it goes on before it is applied
    together: bool = False


@dataclass(frozen=True)
class Rules:
    """Holds what a strategy says of its mode: how many steps a gradient may be late; how many make one update, the
    number of workers unless given; at which versions workers begin to wait for each other, or cease to."""

    staleness: int = 0
    gradients: int = 0
    changes: tuple[int, ...] = ()


#: What most modes go by.
NO_RULES = Rules()


@dataclass(frozen=True)
class Apply:
    """Asks to take one optimizer step on what these workers pushed as their step ``step``, in this order."""

    step: int
    contributors: tuple[int, ...]

    @property
    def version(self) -> int:
        return self.step

    @property
    def pushes(self) -> tuple[Push, ...]:
        return tuple((worker, self.step) for worker in self.contributors)

    @property
    def divisor(self) -> int:
        return len(self.contributors)

    @property
    def dropped(self) -> tuple[Push, ...]:
        return ()


@dataclass(frozen=True)
class ApplyBuffer:
    """Asks to take one optimizer step on the sum of these pushes, in this order, over ``divisor``; those ``dropped``
    are no part of it."""

    version: int
    pushes: tuple[Push, ...]
    dropped: tuple[Push, ...]
    divisor: int


@dataclass(frozen=True)
class Discard:
    """Asks to forget pushes that become part of nothing, as other servers do not have them, or have had them."""

    pushes: tuple[Push, ...]


@dataclass(frozen=True)
class Answer:
    """Asks to answer the request that waits under ``ticket``: the version it needs is there."""

    ticket: Hashable
    version: int


@dataclass(frozen=True)
class Changed:
    """Tells that from ``version`` on workers wait for each other, or wait no more. With ``gain`` times the speed they
    would go, or go, without waiting; it is None where that is not the reason, but what the strategy says."""

    version: int
    together: bool
    gain: float | None


Effect = Apply | ApplyBuffer | Discard | Changed | Answer


class Gate(Protocol):
    """Decides which pushes are applied when, and which waiting requests may be answered."""

    @property
    def version(self) -> int:
        """Return how many steps have been applied."""
        ...

    def push(self, worker: int, step: int, token: int | None = 0) -> list[Effect]:
        """Take note that ``worker`` delivered the gradient of its step; a repetition changes nothing. In modes with
        buffers ``token`` is the oldest version that it was computed on, or None where another server says which buffer
        it goes into."""
        ...

    def place(
        self, worker: int, step: int, buffers: Sequence[Buffer], gone: Mapping[int, int] = MappingProxyType({})
    ) -> list[Effect]:
        """Take note, in modes with buffers, what another server has of them since it has let this push in, and what it
        has of workers that are ``gone`` there."""
        ...

    def is_elsewhere(self, version: int, worker: int, step: int) -> bool:
        """Say whether a push, of which another server tells that it leads on from this version, led on from another one
        here."""
        ...

    def buffers(self, since: int) -> list[Buffer]:
        """Return the buffers from a version on, as far as they are known."""
        ...

    def follow_first(self) -> None:
        """Take note, in modes with buffers, that it is another server that says what goes into them."""
        ...

    def note(self, worker: int, step: int, own_s: float, now: float) -> None:
        """Take note, before its push, how long a worker took for a step by itself, and what time it is there."""
        ...

    def rests(self, worker: int) -> list[Effect]:
        """Note that a worker waits for all others in a barrier or a reduction."""
        ...

    def goes_on(self, worker: int) -> None:
        """Note that it does so no more."""
        ...

    def parts(self, worker: int) -> list[Effect]:
        """Note, on the server that says what goes into buffers, that a worker pushes no more, and will say goodbye."""
        ...

    def starts_again(self, worker: int) -> list[Effect]:
        """Note that another process has a worker's place: what the former one was about to send may never come."""
        ...

    @property
    def is_held_up(self) -> bool:
        """Say whether nobody must wait for the next update here, as it lacks what may never come."""
        ...

    def holds(self, worker: int, step: int) -> int:
        """Return the version that a worker waits for after a step, beside what its mode always asks for."""
        ...

    @property
    def changes(self) -> list[Changed]:
        """Return when workers began to wait for each other and ceased to."""
        ...

    def memory(self, clocks: Mapping[int, int], *, anew: bool = False) -> dict[str, Any]:
        """Return what a gate has to know beside clocks and version, as JSON has it, when workers have taken so many
        steps. What they have pushed since is pushed once more; if it may go elsewhere then, or does not come any more,
        it counts ``anew``."""
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

    def resume(
        self,
        clocks: Mapping[int, int],
        gone: Mapping[int, int],
        version: int,
        memory: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
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
