"""Server 0 keeps the states of the workers' own objects, as bytes that it never looks into.

There are three kinds, each by worker. *Brought* states are those of the checkpoint that the job went on from. *Kept*
states came with a push and belong to that step: those of the last two steps, since a worker that starts again may go on
before its last one. *Given* states are for a checkpoint, under the name by which they are wanted. The worker that saves
*collects* them: it waits for those who give theirs as long as they can still come to it.

In lockstep worker 0 says with its push that a checkpoint follows the step, and every worker hears so with the answer to
its own. In the other modes workers give theirs after every step, and the last ones given are collected.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet.checkpoint.state import whose
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame

#: Without rounds, a worker that has sent more pushes than these since a collection began has gone past it. These may
#: have been on their way.
_PUSHES_ON_THEIR_WAY = 4
#: A worker may give its state for so many checkpoints more at one step.
_MOST_NAMES = 3


@dataclass(frozen=True)
class ObjectState:
    """Holds the state that one worker gave after so many of its steps; ``name`` says for what."""

    data: np.ndarray[Any, Any]
    steps: int
    name: str = ""


@dataclass
class _Collection:
    """Holds a wait for the states of this name; ``clocks`` are the steps that had been delivered when it began."""

    name: str
    everyone: bool
    waiting: Waiting
    step: int
    clocks: Mapping[int, int]


@dataclass
class Collected:
    """Holds what came of a collection, for the worker that asked for it."""

    name: str = ""
    worker: int = -1
    states: dict[int, ObjectState] = field(default_factory=dict)
    #: who gives its state, and did not this time
    missing: list[int] = field(default_factory=list)


class ObjectStates:
    def __init__(self, *, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._brought: Mapping[int, ObjectState] = {}
        #: how many workers there were in the checkpoint they are from
        self._workers_then = 0
        #: worker -> its last two, each with the step that it came with
        self._kept: dict[int, list[tuple[int, ObjectState]]] = {}
        #: worker -> what it gave at its last step, by name, and in that order
        self._given: dict[int, dict[str, ObjectState]] = {}
        #: the workers that give theirs for checkpoints
        self._giving: set[int] = set()
        #: the step that a checkpoint follows, and the name of that
        self._asked: tuple[int, str] = (0, "")
        self._collection: _Collection | None = None
        self.collected = Collected()

    # ---------------------------------------------------------------- what workers get back

    def bring(self, states: Mapping[int, ObjectState], workers_then: int) -> None:
        """Go on from a checkpoint with these states; what was kept belongs to steps that are no more."""
        self._brought, self._workers_then = states, workers_then
        self._kept.clear()
        self._given.clear()

    def keep(self, worker: int, step: int, state: ObjectState) -> None:
        kept = self._kept.get(worker, [])
        if not kept or kept[-1][0] <= step:  # else it is a late repetition
            self._kept[worker] = [*[each for each in kept if each[0] < step][-1:], (step, state)]

    def of(self, worker: int, step: int) -> ObjectState | None:
        """Return the state that a worker gets back which goes on after ``step``."""
        kept = [state for at, state in self._kept.get(worker, ()) if at <= step]
        if kept:
            return kept[-1]
        return self._brought.get(whose(worker, self._workers_then, self._brought))

    # ---------------------------------------------------------------- checkpoints

    def pushed(self, worker: int, step: int, keeping: Any) -> None:
        """Take what a push says of its worker's state."""
        (self._giving.add if keeping.gives else self._giving.discard)(worker)
        if keeping.asks and worker == 0:
            self._asked = step, keeping.asks

    def others_give(self, worker: int) -> bool:
        return bool(self._giving - {worker})

    def wanted(self, step: int) -> str:
        """Return the name under which states are wanted after a step; empty if they are not."""
        return self._asked[1] if self._asked[0] == step else ""

    def give(self, worker: int, state: ObjectState, *, last: bool) -> None:
        earlier = [each for each in self._given.get(worker, {}).values() if each.steps == state.steps]
        kept = [each for each in earlier if each.name != state.name][-_MOST_NAMES:]
        self._given[worker] = {each.name: each for each in (*kept, state)}
        (self._giving.discard if last else self._giving.add)(worker)

    def collect(self, name: str, everyone: bool, step: int, waiting: Waiting, clocks: Mapping[int, int]) -> None:
        """Let a worker wait for all states of a name; asked again, it goes on waiting."""
        before = self._collection
        if before is not None and (before.name, before.waiting.worker) == (name, waiting.worker):
            before.waiting = waiting.repeating(before.waiting)
        elif (self.collected.name, self.collected.worker) == (name, waiting.worker):
            self._collection = _Collection(name, everyone, waiting, step, {})
        else:
            self._collection, self.collected = _Collection(name, everyone, waiting, step, dict(clocks)), Collected()

    def answer_ready(
        self,
        live: Collection[int],
        clocks: Mapping[int, int],
        occupied: Callable[[], set[int]],
        outbox: Outbox,
        *,
        too_late: Callable[[float], bool],
    ) -> None:
        """Answer those who collect, once nobody else will come. ``occupied`` workers wait for something themselves:
        they have gone past it."""
        collection = self._collection
        if collection is None:
            return
        if self.collected.name != collection.name:
            absent = {worker for worker in live if self._may_come(worker, collection, clocks)}
            if absent and absent - occupied() and not too_late(collection.waiting.since):
                return
            self.collected = self._outcome(collection, live)
        self._collection, collected = None, self.collected
        outline = {
            "workers": list(collected.states),
            "steps": [state.steps for state in collected.states.values()],
            "missing": collected.missing,
        }
        outbox.append((collection.waiting.respond, Frame(pb.Reply(about=json.dumps(outline)))))

    def _may_come(self, worker: int, collection: _Collection, clocks: Mapping[int, int]) -> bool:
        if self._has_given(worker, collection.name) or not (collection.everyone or worker in self._giving):
            return False
        clock, begun = clocks.get(worker, 0), collection.clocks.get(worker, 0)
        if self._lockstep:
            return clock <= collection.step
        return collection.everyone and clock <= begun + _PUSHES_ON_THEIR_WAY

    def _has_given(self, worker: int, name: str) -> bool:
        return name in self._given.get(worker, ())

    def _outcome(self, collection: _Collection, live: Collection[int]) -> Collected:
        states = {}
        for worker, given in sorted(self._given.items()):
            if collection.name in given:  # the worker that gave it may have left since
                states[worker] = given[collection.name]
            elif given and worker in live and not (self._lockstep or collection.everyone):
                states[worker] = list(given.values())[-1]
        missing = sorted(worker for worker in self._giving - states.keys() if worker in live)
        return Collected(collection.name, collection.waiting.worker, states, missing)

    def waiting(self) -> list[Waiting]:
        return [] if self._collection is None else [self._collection.waiting]

    def left(self, worker: int) -> None:
        """Note that a process has gone. What it has given stays, also for a process that takes its place."""
        self._giving.discard(worker)
        if self._collection is not None and self._collection.waiting.worker == worker:
            self._collection = None
        if self.collected.worker == worker:
            self.collected = Collected()

    def clear(self) -> None:
        self._collection = None

    # ---------------------------------------------------------------- a snapshot

    def dump(self) -> Iterator[Frame]:
        """Yield everything but the waits: those who wait will ask again."""
        outline = {"giving": sorted(self._giving), "asked": self._asked, "workers_then": self._workers_then}
        yield Frame(pb.Reply(about=json.dumps(outline)))
        states = [
            *(("brought", worker, 0, state) for worker, state in self._brought.items()),
            *(("kept", worker, step, state) for worker, kept in self._kept.items() for step, state in kept),
            *(("given", worker, 0, state) for worker, given in self._given.items() for state in given.values()),
        ]
        for kind, worker, step, state in states:
            about = {"kind": kind, "worker": worker, "step": step, "steps": state.steps, "name": state.name}
            yield Frame(pb.Reply(about=json.dumps(about)), [WireTensor.of(state.data)])

    def restore(self, frame: Frame) -> None:
        """Take one frame after the other of what was dumped."""
        about = json.loads(frame.message.about)
        if "kind" not in about:
            self._giving, self._asked = set(about["giving"]), (about["asked"][0], about["asked"][1])
            self._workers_then = about["workers_then"]
            return
        worker, state = about["worker"], ObjectState(frame.tensors[0].numpy(), about["steps"], about["name"])
        if about["kind"] == "brought":
            self._brought = {**self._brought, worker: state}
        elif about["kind"] == "kept":
            self.keep(worker, about["step"], state)
        else:
            self._given.setdefault(worker, {})[state.name] = state
