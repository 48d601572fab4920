"""Chooses where a job goes on, once for all of its processes, from what its servers have and see.

State that the servers have themselves wins: that of a job that runs, or that they have kept on disk. Else the choice is
the newest complete checkpoint that all of them see, and else a beginning. All of it is a pure function of what the
servers tell (``Seen``), so all who ask them come to the same choice. Should a checkpoint become complete in between,
the first server holds to the choice it was told first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet.errors import CheckpointError, ProtocolError, ServerLostError

#: A server tells of so many checkpoints, the newest ones: others see the same few, or none.
MOST_TOLD = 16


@dataclass(frozen=True, order=True)
class Mark:
    """Names a checkpoint by its step and its id."""

    step: int
    id: str

    def __str__(self) -> str:
        return f"step {self.step} (checkpoint {self.id})" if self.id else "a beginning"


#: No checkpoint at all.
BEGINNING = Mark(0, "")


@dataclass(frozen=True)
class Choice:
    """Says what is gone on from; with ``strict`` all of the checkpoint has to fit."""

    mark: Mark
    strict: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Choice:
        try:
            return _choice(json.loads(text))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ProtocolError("what a server goes on from cannot be read", got=text[:80]) from None


@dataclass(frozen=True)
class Held:
    """Describes a job as one server has it."""

    #: how far the job is; where workers share no step, how far the first one is
    step: int
    #: what it began from, as long as nobody has trained since
    base: Mark | None
    #: how far it was when the server's process took it over from what an earlier one had kept
    kept_at: int | None
    #: whether steps are the whole job's
    lockstep: bool
    #: how many steps of the worker that asks it has, if that worker has any part in it
    steps: int | None
    #: whether that worker has come to this process before
    met: bool


@dataclass(frozen=True)
class Seen:
    """Says what one server has and sees. It lists checkpoints only if it has neither a job nor a choice."""

    held: Held | None = None
    chosen: Choice | None = None
    checkpoints: tuple[Mark, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Seen:
        try:
            raw = json.loads(text)
            held, chosen = raw["held"], raw["chosen"]
            if held is not None:
                held = Held(**{**held, "base": None if held["base"] is None else _mark(held["base"])})
            return cls(
                held,
                None if chosen is None else _choice(chosen),
                tuple(_mark(each) for each in raw["checkpoints"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ProtocolError("what a server sees cannot be read", got=text[:80]) from None


def marks_to_json(marks: Sequence[Mark]) -> str:
    return json.dumps([asdict(each) for each in marks])


def marks_from_json(text: str) -> list[Mark]:
    return [_mark(each) for each in json.loads(text)]


def _mark(raw: Any) -> Mark:
    return Mark(int(raw["step"]), str(raw["id"]))


def _choice(raw: Any) -> Choice:
    return Choice(_mark(raw["mark"]), bool(raw["strict"]))


# ---------------------------------------------------------------------------------------------- the choice


def without_state(seen: Sequence[Seen]) -> list[int]:
    """Return the servers that lack the job although others have been trained in it."""
    is_trained = any(each.held is not None and each.held.base is None for each in seen)
    return [server for server, each in enumerate(seen) if each.held is None] if is_trained else []


def are_apart(steps: Sequence[int]) -> bool:
    """Say whether servers are further apart than one step, which may be under way."""
    return max(steps) - min(steps) > 1


def steps_apart(seen: Sequence[Seen]) -> list[int] | None:
    """Return the servers' steps if they are further apart than one job in rounds allows. That is no proof: they are
    asked one after the other, and a running job goes on meanwhile."""
    held = [each.held for each in seen if each.held is not None]
    steps = [each.step for each in held if each.lockstep]
    return steps if len(steps) == len(seen) and are_apart(steps) else None


def refuse_apart(servers: Sequence[object], earlier: Sequence[Seen], now: Sequence[Seen]) -> None:
    """Raise if servers were apart at both looks, and stand still."""
    steps = steps_apart(now)
    if steps is not None and steps == steps_apart(earlier):
        raise not_at_the_same_step(servers, steps)


def not_at_the_same_step(servers: Sequence[object], steps: Sequence[int | None]) -> ServerLostError:
    """Return the error for servers at these ``steps``, which have None for a server without state."""
    told = ["without state" if step is None else f"at {step}" for step in steps]
    if None in steps:
        todo = (
            "Start the whole job again, from its last checkpoint if there is one, without what durable servers have "
            "kept of it (FLEET_DURABLE_DIR)."
        )
    else:
        todo = (
            "What servers have kept on disk (FLEET_DURABLE_DIR) is not of one step: by FLEET_DURABLE_SYNC a machine "
            "that stops may lose the last second of it. Start the whole job again from its last checkpoint, with "
            "these directories removed."
        )
    return ServerLostError(
        "the servers are not at the same step",
        got=", ".join(f"{server} {each}" for server, each in zip(servers, told, strict=True)),
        todo=todo,
    )


def choose(servers: Sequence[object], seen: Sequence[Seen], *, strict: bool = True) -> Choice | None:
    """Return what the job begins from; None where every server has it already. Errors name the servers as ``servers``
    does."""
    lost = without_state(seen)
    if lost:
        there = [f"{servers[i]} at step {each.held.step}" for i, each in enumerate(seen) if each.held is not None]
        raise ServerLostError(
            "a server has lost its part of the job, which the others have",
            got=f"{', '.join(str(servers[i]) for i in lost)} without state, {', '.join(there)}",
            todo="Start the whole job again, from its last checkpoint if there is one, without what durable servers "
            "have kept of it (FLEET_DURABLE_DIR).",
        )
    held = [each.held for each in seen if each.held is not None]
    if len(held) == len(seen):
        return None
    before = {each.base for each in held if each.base is not None}
    told = {each.chosen for each in seen if each.chosen is not None}
    if len(before | {each.mark for each in told}) > 1:
        raise CheckpointError(
            "the servers do not start from the same checkpoint",
            got=", ".join(f"{server} from {_origin(each)}" for server, each in zip(servers, seen, strict=True)),
            todo="Start the whole job again, without what durable servers have kept of it (FLEET_DURABLE_DIR).",
        )
    if told:
        return min(told, key=lambda each: each.strict)
    if before:
        return Choice(before.pop(), strict)
    return Choice(newest_of_all([each.checkpoints for each in seen]), strict)


def newest_of_all(seen: Sequence[Sequence[Mark]]) -> Mark:
    """Return the newest checkpoint that all servers see which list any; a beginning if there is none."""
    return max(set(seen[0]).intersection(*seen[1:]), default=BEGINNING)


def _origin(seen: Seen) -> str:
    found = seen.held.base if seen.held is not None else seen.chosen.mark if seen.chosen is not None else None
    return "nothing yet" if found is None else str(found)


def passed_by(servers: Sequence[object], seen: Sequence[Seen], choice: Choice) -> list[str]:
    """Return the checkpoints that are newer than the chosen one, each in words with the servers that do not see it."""
    newer = {mark for each in seen for mark in each.checkpoints if mark.step > choice.mark.step}
    blind = {mark: [servers[i] for i, each in enumerate(seen) if mark not in each.checkpoints] for mark in newer}
    return [f"{mark} is not seen by {', '.join(map(str, blind[mark]))}" for mark in sorted(newer)]


# ---------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True)
class Resumed:
    """Tells a process the job's step; and how many more of this worker's steps the servers had then, which it takes
    once more: a step that was brought before its round was over."""

    step: int
    ahead: int = 0


def step_of_worker(seen: Sequence[Seen], choice: Choice | None) -> Resumed:
    """Return the step of a worker that is about to join, for the first time or again."""
    held = [each.held for each in seen if each.held is not None]
    if not held:
        assert choice is not None, "made where a server lacks the job"
        return Resumed(choice.mark.step)
    own = [each.steps for each in held if each.steps is not None]
    if not held[0].lockstep:
        return Resumed(min(own) if own else min(each.step for each in held))
    step = min(each.step for each in held)
    if own and not any(each.met for each in held):
        step = min(step, _kept_at(held, min(own), step))
    return Resumed(step, max(0, min(own) - step) if own else 0)


def step_of_server(seen: Sequence[Seen], choice: Choice | None, me: int) -> Resumed:
    """Return the step of server ``me``, which has just started."""
    mine = seen[me]
    if mine.chosen is not None:
        return Resumed(mine.chosen.mark.step)
    held = [each.held for each in seen if each.held is not None]
    if mine.held is None or mine.held.kept_at is None:
        return Resumed(choice.mark.step if choice is not None else min(each.step for each in held))
    step = min(each.step for each in held)
    return Resumed(min(step, _kept_at(held, mine.held.kept_at, step)))


def _kept_at(held: Sequence[Held], mine: int, step: int) -> int:
    """Return where the job was when all of its servers started again, if that was just now, for a process that was at
    ``mine`` then: others may have trained on since. Otherwise return ``step``, where the job is."""
    kept = [each.kept_at for each in held if each.kept_at is not None]
    if len(kept) < len(held) or mine - min(kept) > 1:
        return step
    return min(kept)
