"""The state of a worker's own objects travels to server 0, which stores it, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleet.checkpoint.state import Bytes
from fleet.errors import ConfigurationError, MissedError
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections, PendingRequest
from fleet.ps.worker.progress import Progress

_log = logging.getLogger("fleet.worker")


@dataclass(frozen=True)
class Shares:
    """Names the states of the workers' own objects that a checkpoint is to have: those given under a name, by everyone
    who makes this call, or by those who have said that they give theirs."""

    name: str
    everyone: bool


class OwnStates:
    """Gives the state of this worker's own objects to server 0, and gets it back."""

    def __init__(self, connections: Connections, progress: Progress, most_bytes: int) -> None:
        """Server 0 keeps the states; a message may have ``most_bytes``."""
        self._connections = connections
        self._progress = progress
        self._most_bytes = most_bytes
        self._unsent: Bytes | None = None
        #: whether this worker gives its state for checkpoints
        self.gives = False
        #: the name of a checkpoint that is to follow the next push
        self.asks = ""
        self._asked_at = -1
        #: what was passed on last, and until it is known to be there, that with how many steps had been taken then
        self._given: bytes | None = None
        self._passing: tuple[Bytes, int] | None = None
        self._under_way: PendingRequest | None = None

    # ---------------------------------------------------------------- with a step

    def send_with_step(self, data: Bytes) -> None:
        """Send the state with the next step."""
        self._check_size(data)
        self._unsent = data

    def take(self) -> Bytes | None:
        """Return the state that goes with the present step."""
        data, self._unsent = self._unsent, None
        return data

    def attach_to(self, push: pb.Push, state: Bytes | None) -> list[WireTensor]:
        """Put into a push for server 0 what it has to know of the state; return the tensors that come last in it."""
        keeping = pb.Keeping(kept=state is not None, gives=self.gives, asks=self.asks)
        self.asks = ""
        if keeping.ByteSize():
            push.keeping.CopyFrom(keeping)
        return [] if state is None else [WireTensor.of(state)]

    # ---------------------------------------------------------------- for a checkpoint

    def ask(self, step: int) -> None:
        """Tell all workers with a step, if it is the next, that a checkpoint follows it and wants their states."""
        if step == self._progress.completed + 1:
            self._asked_at, self.asks = step, _after(step)

    @property
    def asked(self) -> str:
        """Return the name under which all workers have been asked after this step; empty if they have not."""
        return _after(self._asked_at) if self._asked_at == self._progress.completed else ""

    def give(self, name: str, data: Bytes, *, last: bool = False) -> None:
        self._check_size(data)
        self.wait_until_given()
        self._progress.wanted = ""
        give = pb.Give(name=name, last=last, steps=self._progress.taken)
        self._ask("state for a checkpoint", [WireTensor.of(data)], give=give)

    def pass_on(self, data: Bytes) -> None:
        """Give the state if it has changed, and do not wait for the answer."""
        content = data.tobytes()
        if content != self._given:
            self._check_size(data)
            self.wait_until_given()
            self._given, self._passing = content, (data, self._progress.taken)
        self._begin_to_give()

    def _begin_to_give(self) -> None:
        """Send what is passed on, unless it is on its way."""
        if self._passing is not None and self._under_way is None:
            data, steps = self._passing
            keeper = self._connections.by_server[0]
            request = keeper.request(self._progress.completed, give=pb.Give(steps=steps))
            under_way = keeper.start(Frame(request, [WireTensor.of(data)]), "state for checkpoints")
            under_way.send()
            self._under_way = under_way

    def forget_given(self) -> None:
        """Forget what was given: it belongs to steps that are no more."""
        self.wait_until_given()
        self._given = None

    def wait_until_given(self) -> None:
        """Wait until the state that was passed on is there. Where that fails, as the job has moved to other servers,
        the next call sends it anew."""
        self._begin_to_give()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
            self._passing = None

    def collect(self, shares: Shares) -> dict[str, Any]:
        """Wait until everybody has given a state who will; return who has, how many steps they had taken, and who
        lacks."""
        recall = pb.Recall(collection=shares.name, everyone=shares.everyone)
        answer: dict[str, Any] = json.loads(self._ask("states of all workers", recall=recall).message.about)
        for worker in answer["missing"]:
            _log.warning("the state of worker %d is not in the checkpoint: it gave none in time", worker)
        return answer

    def collected(self, shares: Shares, answer: dict[str, Any]) -> Iterator[tuple[int, int, Bytes]]:
        """Yield the collected states, one worker after the other."""
        for worker, steps in zip(answer["workers"], answer["steps"], strict=True):
            yield worker, steps, self._collected_of(worker, shares)

    def _collected_of(self, worker: int, shares: Shares) -> Bytes:
        recall = pb.Recall(collection=shares.name, workers=[worker])
        while True:
            try:
                return self._ask(f"state of worker {worker}", recall=recall).tensors[0].numpy()
            except MissedError:  # a server that was killed has what was given, and forgets who collects it
                self.collect(shares)

    # ---------------------------------------------------------------- back

    def recall(self) -> Bytes | None:
        """Return the state that server 0 has for this worker."""
        reply = self._ask("its state", recall=pb.Recall())
        if not reply.message.granted:
            return None
        step, went_on_at = reply.message.steps, self._progress.went_on_at
        if step not in (went_on_at, self._progress.taken):  # it may be asked for in the middle of the training
            notice = "the state that is given back belongs to step %d, and this worker goes on after step %d: %s"
            _log.warning(notice, step, went_on_at, "fleet.keep_state(state) before each step has it kept with that")
        return reply.tensors[0].numpy()

    def _ask(self, what: str, tensors: list[WireTensor] | None = None, **kind: object) -> Frame:
        keeper = self._connections.by_server[0]
        request = keeper.request(self._progress.completed, **kind)
        return keeper.call(Frame(request, tensors or []), what)

    def _check_size(self, data: Bytes) -> None:
        if data.nbytes > self._most_bytes:
            raise ConfigurationError(
                "the state is larger than a message may be",
                expected=f"at most {self._most_bytes >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
                got=f"{data.nbytes / (1 << 20):.1f} MiB",
                todo="Leave out what can be made again, or raise FLEET_MAX_MESSAGE_MB for every process.",
            )


def _after(step: int) -> str:
    return f"checkpoint after step {step}"
