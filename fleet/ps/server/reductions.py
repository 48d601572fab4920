"""Workers bring tensors to their gatherings, and get the outcome; ``numeric/reduction.py`` decides when.

A reduction is computed when its gathering closes, in worker order, so that its bits do not depend on who came first.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from fleet.errors import FleetError, ProtocolError
from fleet.numeric.reduction import (
    BARRIER,
    CARRIED,
    MAX_BYTES,
    OPS,
    Asked,
    Close,
    Effect,
    Gatherings,
    Refuse,
    Tell,
    disagreement,
)
from fleet.numeric.tensors import WireTensor
from fleet.numeric.values import reduced
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")

#: What a gathering came to: a tensor, nothing (a barrier), or why it failed.
Outcome = WireTensor | FleetError | None


class Reductions:
    """Holds the gatherings of one job. ``come`` and ``leave`` return the tickets of the requests that can be answered
    now."""

    def __init__(self, worker_num: int) -> None:
        self._decisions = Gatherings(range(worker_num))
        #: (number, worker) -> what it brought, until the gathering is decided
        self._brought: dict[tuple[int, int], WireTensor] = {}
        self._ops: dict[int, str] = {}
        self._outcomes: dict[int, Outcome] = {}

    def come(self, ticket: Hashable, worker: int, gather: Any, tensors: Sequence[WireTensor]) -> list[Hashable]:
        """Let a worker's request to gather wait under ``ticket``; it may be answered at once."""
        asked = _asked(worker, gather, tensors)
        number = gather.number
        effects: list[Effect] = []
        if number > self._decisions.reached(worker):
            effects = self._decisions.come(worker, number, asked)
            if tensors:
                self._brought[number, worker] = tensors[0]
            self._ops[number] = asked.op
        return self._carry_out(effects + self._decisions.wait(ticket, worker, number))

    def leave(self, worker: int) -> list[Hashable]:
        return self._carry_out(self._decisions.leave(worker))

    def join(self, worker: int) -> None:
        self._decisions.join(worker)

    def reached(self, worker: int) -> int:
        """Return the newest gathering a worker has come to."""
        return self._decisions.reached(worker)

    def answer(self, number: int) -> Frame:
        """Return the outcome of a gathering."""
        outcome = self._outcomes.get(number, ProtocolError("a gathering is over and forgotten", got=f"number {number}"))
        if isinstance(outcome, FleetError):
            return error_reply(outcome)
        return Frame(pb.Reply(), [] if outcome is None else [outcome])

    def is_open(self, number: int) -> bool:
        """Say whether the outcome of a gathering is not decided yet."""
        return number in self._decisions.open

    def dump(self) -> dict[int, int]:
        """Return the newest decided gathering that every worker has come to."""
        return {worker: self.decided(worker) for worker in self._decisions.came}

    def decided(self, worker: int) -> int:
        """Return the newest decided gathering that a worker has come to."""
        came = self._decisions.came.get(worker, 0)
        return next((number for number in range(came, 0, -1) if not self.is_open(number)), 0)

    def outcomes(self) -> Iterator[tuple[int, Frame]]:
        """Yield the outcomes of the gatherings that somebody may still ask for."""
        for number in self._outcomes:
            yield number, self.answer(number)

    def restore(self, came: Mapping[int, int]) -> None:
        self._decisions.resume(came, ())

    def know(self, number: int, outcome: Outcome) -> None:
        """Note the outcome of a gathering before this process was there."""
        self._decisions.resume(self._decisions.came, {*self._outcomes, number})
        self._outcomes[number] = outcome

    def lacking(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return every gathering that waits, in words, and the workers it waits for."""
        return [
            (f"barrier {number}" if asked.op == BARRIER else f"all_reduce {number} ({asked.op})", workers)
            for number, asked, workers in self._decisions.lacking()
        ]

    def _carry_out(self, effects: Sequence[Effect]) -> list[Hashable]:
        ready = []
        for effect in effects:
            if isinstance(effect, Close):
                brought = [self._brought.pop((effect.number, worker), None) for worker in effect.contributors]
                self._outcomes[effect.number] = _outcome(self._ops[effect.number], brought)
            elif isinstance(effect, Refuse):
                self._outcomes[effect.number] = disagreement(effect.number, effect.one, effect.other)
                self._drop(effect.number)
            elif isinstance(effect, Tell):
                ready.append(effect.ticket)
            else:
                self._outcomes.pop(effect.number, None)
                self._ops.pop(effect.number, None)
                self._drop(effect.number)
        return ready

    def _drop(self, number: int) -> None:
        for key in [key for key in self._brought if key[0] == number]:
            del self._brought[key]


def _asked(worker: int, gather: Any, tensors: Sequence[WireTensor]) -> Asked:
    """Read what a worker asks for; everything is checked before it becomes part of a gathering."""
    if gather.op == BARRIER:
        if tensors or gather.dtype:
            raise ProtocolError("a barrier brings no tensor", got=f"{len(tensors)} from worker {worker}")
        return Asked(BARRIER, beside=gather.beside)
    if gather.op not in OPS:
        raise ProtocolError("a gathering is of an unknown kind", expected=", ".join(OPS), got=repr(gather.op)[:40])
    if len(tensors) != 1:
        raise ProtocolError("a reduction needs one tensor", got=f"{len(tensors)} from worker {worker}")
    (tensor,) = tensors
    if CARRIED.get(gather.dtype) != tensor.dtype:
        raise ProtocolError(
            "a reduction has another element type than it says",
            expected=CARRIED.get(gather.dtype, ", ".join(CARRIED)),
            got=f"{tensor.dtype} as {gather.dtype!r:.40}",
        )
    if tensor.array.nbytes > MAX_BYTES:
        raise ProtocolError("a reduction is too large", expected=f"at most {MAX_BYTES} bytes", got=tensor.array.nbytes)
    return Asked(gather.op, gather.dtype, tensor.shape, gather.beside)


def _outcome(op: str, brought: Sequence[WireTensor | None]) -> Outcome:
    try:
        return None if op == BARRIER else reduced(op, [tensor for tensor in brought if tensor is not None])
    except Exception as error:  # out of memory, say: everybody who waits must hear of it
        _log.exception("a reduction failed")
        return FleetError("the server could not reduce what the workers brought", got=repr(error))
