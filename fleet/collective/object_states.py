"""Moves the states of the workers' own objects through the job's store: into a checkpoint, and back.

Every worker puts its own there when a checkpoint wants it. The worker that writes takes them out, and waits for those
that give theirs as long as they can still come to it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial

from torch._C._distributed_c10d import Store

from fleet.checkpoint.manifest import Checkpoint
from fleet.checkpoint.state import Bytes, check_state, restore, states_in, warn_of_none, whose
from fleet.collective.reductions import drop, get, put
from fleet.collective.worker import CollectiveWorker
from fleet.numeric.tensors import WireTensor

_log = logging.getLogger("fleet.worker")


def give(worker: CollectiveWorker, name: str, state: Bytes) -> None:
    monitor, told = worker.group.monitor, {"steps": worker.steps}
    monitor.ask(lambda store: put(store, f"state/{name}/{monitor.rank}", told, WireTensor.of(state)))


def collect(worker: CollectiveWorker, name: str, *, everyone: bool) -> Iterator[tuple[int, int, Bytes]]:
    """Yield what has been given under a name, by everyone who makes this call or by those who give theirs: worker,
    steps, state."""
    monitor = worker.group.monitor

    def absent(store: Store) -> list[int]:
        return [other for other in range(monitor.size) if _may_come(worker, store, name, other, everyone)]

    monitor.until(lambda store: not absent(store) or None, monitor.deadline_s)
    for other in range(monitor.size):
        key = f"state/{name}/{other}"
        if monitor.ask(lambda store, key=key: store.check([key])):  # type: ignore[misc]
            told, tensor = monitor.ask(partial(get, key=key))
            assert tensor is not None
            yield other, told["steps"], tensor.numpy()
            monitor.ask(partial(drop, key=key))
        elif monitor.ask(partial(_gives, worker=other)):
            _log.warning("the state of worker %d is not in the checkpoint: it gave none in time", other)


def _may_come(worker: CollectiveWorker, store: Store, name: str, other: int, everyone: bool) -> bool:
    """Say whether to wait for a worker: not if it waits for this one itself, in a round or a gathering."""
    monitor = worker.group.monitor
    if other == monitor.rank or store.check([f"state/{name}/{other}"]) or store.check([f"left/{other}"]):
        return False
    if not (everyone or _gives(store, other)) or worker.reductions.is_ahead(store, other):
        return False
    return not (store.check([f"waits/{other}"]) and int(store.get(f"waits/{other}")) == monitor.rounds + 1)


def _gives(store: Store, worker: int) -> bool:
    return store.check([f"gives/{worker}"]) and store.get(f"gives/{worker}") == b"1"


# ---------------------------------------------------------------------------------------------- back


def bring(worker: CollectiveWorker, checkpoint: Checkpoint) -> dict[str, object]:
    """Lay out what a checkpoint has for each worker; return whose states there are, and how many workers there were."""
    monitor, found = worker.group.monitor, []
    for of, _, state in states_in(checkpoint):
        key, tensor = f"brought/{worker.loads}/{of}", WireTensor.of(state)
        monitor.ask(lambda store, key=key, tensor=tensor: put(store, key, {}, tensor))  # type: ignore[misc]
        found.append(of)
    worker.laid_out[worker.loads] = found
    all_have_come_to = min(worker.loads, monitor.ask(partial(_slowest_load, size=monitor.size)))
    for load_ in [each for each in worker.laid_out if each < all_have_come_to]:
        for of in worker.laid_out.pop(load_):
            monitor.ask(partial(drop, key=f"brought/{load_}/{of}"))
    return {"of": found, "workers": checkpoint.manifest.spec.settings.worker_num}


def note_load(worker: CollectiveWorker) -> None:
    """Tell worker 0 that this worker has come to its next load, and asks for nothing any more that an earlier one has
    brought."""
    monitor, load_ = worker.group.monitor, str(worker.loads)
    monitor.ask(lambda store: store.set(f"loads/{monitor.rank}", load_))


def _slowest_load(store: Store, size: int) -> float:
    came = [int(store.get(key)) if store.check([key]) else 0 for key in (f"loads/{other}" for other in range(1, size))]
    return min(came, default=math.inf)


def load(worker: CollectiveWorker, state: object) -> bool:
    """Give this worker's own objects what the loaded checkpoint has of them; return whether it has anything."""
    check_state(state)
    rank, of = worker.group.monitor.rank, worker.brought["of"]
    given = whose(rank, worker.brought["workers"], of)
    if given not in of:
        if worker.loads and worker.steps:
            warn_of_none(rank, worker.steps)
        return False
    _, tensor = worker.group.monitor.ask(partial(get, key=f"brought/{worker.loads}/{given}"))
    assert tensor is not None
    restore(state, tensor.numpy(), str(worker.assignment))
    return True


class CheckpointStates:
    """Brings the states of all workers into the checkpoints that worker 0 saves from time to time."""

    def __init__(self, worker: CollectiveWorker, *, gives: bool) -> None:
        self._worker = worker
        self._gives = gives
        self._asked_at = -1
        self._say(gives)

    def _say(self, gives: bool) -> None:
        monitor = self._worker.group.monitor
        if gives or self._gives:
            monitor.ask(lambda store: store.set(f"gives/{monitor.rank}", str(int(gives))))

    @property
    def needs_notice(self) -> bool:
        """Say whether others have to hear of a checkpoint before its step: their states right after that belong into
        it."""
        return self._gives and self._worker.group.size > 1

    def ask(self, step: int) -> None:
        """Let all know that a checkpoint is to follow a step."""
        if step != self._asked_at:
            self._asked_at = step
            self._worker.group.monitor.ask(lambda store: store.set("asked", str(step)))

    @property
    def asked(self) -> str:
        """Return the name under which all have been asked after this step; empty if they have not."""
        return self._after(self._asked_at) if self._asked_at == self._worker.steps else ""

    @property
    def wanted(self) -> str | None:
        """Return the name under which this worker's state is wanted now; None if it is not."""
        step = self._worker.group.monitor.ask(lambda store: int(store.get("asked")) if store.check(["asked"]) else -1)
        return self._after(step) if step == self._worker.steps else None

    @staticmethod
    def _after(step: int) -> str:
        return f"checkpoint after step {step}"

    def name_of_call(self, call: str) -> str:
        """Return the name of the states that are wanted in a call that every worker makes; empty where this worker
        gives none."""
        return f"{call} after step {self._worker.steps}" if self._gives else ""

    def give(self, name: str, state: Bytes, *, last: bool = False) -> None:
        """Hand over this worker's state; after the ``last`` one, nobody waits for another."""
        if not self._worker.stopped:
            give(self._worker, name, state)
            if last:
                self._say(False)

    def end(self) -> None:
        if not self._worker.stopped:
            self._say(False)
