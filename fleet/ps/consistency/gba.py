"""GBA, a global batch without waiting (Su et al., NeurIPS 2022): so many gradients make one update.

Server half: a push goes into the buffer of the version that there is. When that holds ``gradients`` pushes, it is
closed: their sum over that number is one update, in the order of token, worker and step. So the batch it stands for is
that of synchronous training. A push whose token, the oldest version that it was computed on, is more than ``staleness``
versions behind is dropped, and keeps its place. When no worker is left that would push, what lies in the open buffer is
applied.

Server 0 says which buffer a push goes into. The others keep pushes aside until some worker has told them (``place``),
and close the same buffers with the same pushes, but for those of a worker that died on its way between two servers.
A worker tells a server that has not made an update that server 0 has: what lies in an open buffer changes no value.
It tells all that server 0 knew then, so nobody waits for a worker that has stopped in between.

Worker half: no version is needed; what comes with the answer to a push is what the server has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fleet.errors import ProtocolError
from fleet.ps.consistency.clock_gate import ClockGate
from fleet.ps.consistency.gate import NO_RULES, ApplyBuffer, Buffer, Discard, Effect, Rules
from fleet.ps.consistency.policy import Mode, Policy


class GbaGate(ClockGate):
    #: So many buffers are remembered when they have been applied, for whoever has not heard of them.
    kept = 64

    def __init__(self, workers: Iterable[int], version: int = 0, rules: Rules = NO_RULES) -> None:
        super().__init__(workers, version, rules)
        self._gradients = rules.gradients or len(self._clock)
        self._staleness = rules.staleness
        #: version -> the pushes that lead on from it, as token, worker and step, and what their sum is divided by once
        #: no others can come
        self._pushes: dict[int, set[tuple[int, int, int]]] = {}
        self._divisors: dict[int, int] = {}
        #: those of which nobody goes on before they are applied
        self._together: set[int] = set()
        #: what is here and not applied, and that of it which has no place yet
        self._here: set[tuple[int, int]] = set()
        self._unplaced: set[tuple[int, int]] = set()
        #: those that another process has the place of, until it pushes
        self._renewed: set[int] = set()
        #: those that push no more
        self._parting: set[int] = set()
        #: whether it is this server that says what goes into a buffer
        self._admits = False

    def join(self, worker: int) -> None:
        self._clock[worker] = self._gone.pop(worker, 0)
        self._renewed.add(worker)

    def parts(self, worker: int) -> list[Effect]:
        self._parting.add(worker)
        return self._effects()

    def starts_again(self, worker: int) -> list[Effect]:
        self._renewed.add(worker)
        self._parting.discard(worker)
        return self._let_go_on()

    @property
    def is_held_up(self) -> bool:
        return any(worker in self._renewed for worker, _ in self._missing())

    def _let_go_on(self) -> list[Effect]:
        """Return the answers to all who wait for an update that may never come."""
        return (
            self._answer(max((version for _, version in self._waiting.values()), default=0)) if self.is_held_up else []
        )

    def holds(self, worker: int, step: int) -> int:
        """Let a worker wait where this server lacks the parts of a push that others have: what it read here would be
        so old that its gradients were dropped."""
        at = None if self.is_held_up else self._version_of(worker, step)
        return 0 if at is None else max(0, at - max(0, self._staleness - 1))

    def _version_of(self, worker: int, step: int) -> int | None:
        """Return the version that a push leads on from, if its buffer is not applied yet."""
        awaited = ((version, pushes) for version, pushes in self._pushes.items() if version >= self._applied)
        return next((at for at, pushes in awaited if (worker, step) in {each[1:] for each in pushes}), None)

    def leave(self, worker: int) -> list[Effect]:
        self._parting.discard(worker)
        return super().leave(worker)

    def lacking(self) -> tuple[int, tuple[int, ...]]:
        missing = {worker for worker, _ in self._missing()}
        return self._applied + 1, tuple(sorted(missing or self._clock))

    def place(
        self, worker: int, step: int, buffers: Sequence[Buffer], gone: Mapping[int, int] = MappingProxyType({})
    ) -> list[Effect]:
        for buffer in buffers:
            for _, whose, number in buffer.pushes:
                if number > self._clock.get(whose, number) + 1:
                    raise ProtocolError(f"a push of worker {whose} was given a place long before it came", got=number)
        for buffer in buffers:
            if buffer.version >= self._applied and buffer.version not in self._divisors:
                self._pushes.setdefault(buffer.version, set()).update(buffer.pushes)
                if buffer.divisor:
                    self._divisors[buffer.version] = buffer.divisor
                if buffer.together:
                    self._together.add(buffer.version)
        self._unplaced -= self._placed
        lost = self._discarded([*self._too_late(worker, step), *self._never_sent(gone)])
        return [*([Discard(lost)] if lost else []), *self._effects(), *self._let_go_on()]

    def is_elsewhere(self, version: int, worker: int, step: int) -> bool:
        if version >= self._applied:
            return (worker, step) not in self._here and step <= self._clock.get(worker, 0)
        pushes = self._pushes.get(version)
        return pushes is not None and all(each[1:] != (worker, step) for each in pushes)

    def buffers(self, since: int) -> list[Buffer]:
        return [
            Buffer(version, self._divisors.get(version, 0), tuple(sorted(pushes)), version in self._together)
            for version, pushes in sorted(self._pushes.items())
            if version >= since
        ]

    def resume(
        self,
        clocks: Mapping[int, int],
        gone: Mapping[int, int],
        version: int,
        memory: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().resume(clocks, gone, version)
        for at, divisor, pushes, together in memory.get("buffers", ()):
            self._pushes[at] = {(token, worker, step) for token, worker, step in pushes}
            self._divisors |= {at: divisor} if divisor else {}
            self._together |= {at} if together else set()
        self._gradients = memory.get("gradients", self._gradients)
        self._renewed, self._parting = {*memory.get("renewed", ())}, {*memory.get("parting", ())}
        self._here = {(worker, step) for worker, step in memory.get("here", ())}
        self._admits = memory.get("admits", False)

    def memory(self, clocks: Mapping[int, int], *, anew: bool = False) -> dict[str, Any]:
        here = [(worker, step) for worker, step in self._here - self._unplaced if step <= clocks.get(worker, step)]
        buffers = self.buffers(0)
        if anew:
            kept = [[each for each in buffer.pushes if each[2] <= clocks.get(each[1], each[2])] for buffer in buffers]
            buffers = [each._replace(pushes=tuple(some)) for each, some in zip(buffers, kept, strict=True) if some]
        return {
            "buffers": buffers,
            "here": sorted(here),
            "admits": self._admits,
            "gradients": self._gradients,
            "renewed": sorted(self._renewed),
            "parting": sorted(self._parting),
        }

    def follow_first(self) -> None:
        self._admits = False

    def _deliver(self, worker: int, step: int, token: int | None) -> list[Effect]:
        self._renewed.discard(worker)
        if token is not None:
            self._admits = True
            self._pushes.setdefault(self._place_for(worker, step), set()).add((token, worker, step))
            self._admit(self._pushes[self._applied])
        # An open buffer has less than ``gradients`` pushes; and there may be one more each time it has started again.
        elif sum(whose == worker for whose, _ in self._unplaced) > self._gradients + self.kept:
            self._clock[worker] = step - 1
            raise ProtocolError(f"worker {worker} pushed before its last pushes had a place", got=f"step {step}")
        elif (worker, step) not in self._placed:
            self._unplaced.add((worker, step))
        self._here.add((worker, step))
        return []

    def _place_for(self, worker: int, step: int) -> int:
        """Return the version of the buffer that a push goes into."""
        return self._applied

    def _admit(self, pushes: set[tuple[int, int, int]]) -> None:
        """Close the buffer of these pushes, if it is full."""
        if len(pushes) == self._gradients:
            self._divisors[self._applied] = self._gradients

    def _too_late(self, worker: int, step: int) -> list[tuple[int, int]]:
        """Return what has no place of a worker's pushes up to a step that server 0 has: parts of buffers that had to be
        applied without them."""
        return [each for each in self._unplaced if each[0] == worker and each[1] <= step]

    def _never_sent(self, gone: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the last pushes of workers that left between this server and server 0, where they are ``gone`` after
        an earlier step. Should one join again, it takes that step again."""
        found = [(worker, step) for worker, step in self._unplaced if self._gone.get(worker) == step]
        found = [(worker, step) for worker, step in found if gone.get(worker, step) < step]
        self._gone |= {worker: step - 1 for worker, step in found}
        return found

    def _discarded(self, found: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Forget pushes that are here, and return them."""
        self._unplaced.difference_update(found)
        self._here.difference_update(found)
        return tuple(sorted(found))

    @property
    def _placed(self) -> set[tuple[int, int]]:
        """Return the pushes that are awaited here."""
        awaited = (pushes for version, pushes in self._pushes.items() if version >= self._applied)
        return {(worker, step) for pushes in awaited for _, worker, step in pushes}

    def _effects(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._is_full():
            effects.append(self._close())
        return [*effects, *self._answer(self._applied)]

    def _is_full(self) -> bool:
        """Say whether the next buffer can be applied: it is closed, and all is here that can still come."""
        pushes = self._pushes.get(self._applied, ())
        if self._parting >= self._clock.keys():  # nobody is left who would push
            return bool(pushes)
        return self._applied in self._divisors and not self._missing()

    def _missing(self) -> list[tuple[int, int]]:
        """Return the pushes in the next buffer that are not here yet, and may come."""
        pushes = self._pushes.get(self._applied, ())
        return [
            (worker, step) for _, worker, step in pushes if worker in self._clock and (worker, step) not in self._here
        ]

    def _close(self) -> ApplyBuffer:
        version = self._applied
        divisor = self._divisors.setdefault(version, self._gradients)
        here = [each for each in sorted(self._pushes[version]) if each[1:] in self._here]
        self._here.difference_update(each[1:] for each in here)
        self._applied += 1
        self._pushes.pop(version - self.kept, None)
        self._divisors.pop(version - self.kept, None)
        self._together.discard(version - self.kept)
        late = {each for each in here if version - each[0] > self._staleness}
        pushes = tuple((worker, step) for token, worker, step in here if (token, worker, step) not in late)
        dropped = tuple((worker, step) for token, worker, step in here if (token, worker, step) in late)
        return ApplyBuffer(version + 1, pushes, dropped, divisor)


class GbaPolicy(Policy):
    fills_buffers = True

    def applies_one_lookup(self, worker_num: int) -> bool:
        return False


MODE = Mode("gba", GbaGate, GbaPolicy)
