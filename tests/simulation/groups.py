"""Stands for torch's connections between workers that average dense gradients: a store where they find each other, and
a group whose collectives are messages of the simulated network.

Connections go when a process of the group does: its peers hear of it, unless its machine has stopped. What is lost on
the way is sent again, as TCP does. What a collective adds up is the same on all, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from .network import Load, Wires
from .scheduler import Process, Scheduler, Thread

#: TCP sends again what was lost.
_SENT_AGAIN_AFTER_S = 0.2
#: A store that refuses is called for so long.
_CALLS_FOR_S = 0.25


class Store:
    """Belongs to one process; the others of a group come to it."""

    def __init__(self, groups: Groups, port: int, owner: Process) -> None:
        self.port = port
        self.owner = owner
        self._groups = groups
        self._keys: set[str] = set()

    def set_timeout(self, _: timedelta) -> None:
        pass

    def set(self, key: str) -> None:
        self._groups.travel(self.owner)
        self._keys.add(key)

    def check(self, keys: set[str]) -> bool:
        self._groups.travel(self.owner)
        return keys <= self._keys


class Prefixed:
    """Stands for torch's PrefixStore."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.store = store

    def set(self, key: str, _: str) -> None:
        self.store.set(f"{self.prefix}/{key}")

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check({f"{self.prefix}/{key}" for key in keys})


class Groups:
    """Makes the groups of one simulation, and ends them."""

    def __init__(self, scheduler: Scheduler, wires: Wires) -> None:
        self.scheduler = scheduler
        self.wires = wires
        self._stores: dict[int, Store] = {}
        #: by store and prefix, and then by rank: who is in a group
        self._members: dict[tuple[int, str], dict[int, SimulatedGroup]] = {}

    # ---------------------------------------------------------------- in place of what dense_group.py has from torch

    def own_store(self, _: str) -> tuple[int, Store]:
        port = self.wires.number()
        self._stores[port] = Store(self, port, self.scheduler.check().process)
        return port, self._stores[port]

    def store(self, _: str, port: int, **__: Any) -> Store:
        store = self._stores[port]
        self.travel(store.owner)
        return store

    def prefixed(self, prefix: str, store: Store) -> Prefixed:
        return Prefixed(prefix, store)

    def connected(self, store: Prefixed, rank: int, size: int, _: torch.device, patience: timedelta) -> SimulatedGroup:
        me = self.scheduler.check()
        members = self._members.setdefault((store.store.port, store.prefix), {})
        group = members[rank] = SimulatedGroup(self, members, me.process, rank, size)
        for each in members.values():
            each.wake()
        until = self.scheduler.now + patience.total_seconds()
        while len(members) < size and self.scheduler.now < until:
            group.wait(until - self.scheduler.now)
        if len(members) < size:
            raise RuntimeError("wait timeout: not all have connected")
        return group

    def travel(self, owner: Process) -> None:
        """Go to another process and back; raise, some time later, if it is not there."""
        me, came = self.scheduler.check(), []

        def answer(is_there: bool) -> None:
            came.append(is_there)
            self.scheduler.wake(me)

        name = me.process.name
        if name != owner.name:
            self.wires.carry(name, owner.name, lambda: answer(not owner.is_dead), lambda: answer(False))
            while not came:
                self.scheduler.block()
        if came == [False]:
            self.scheduler.block(_CALLS_FOR_S)
            raise RuntimeError(f"the store of {owner.name} refuses the connection")

    # ---------------------------------------------------------------- what befalls them

    def gone(self, process: Process, *, silently: bool = False) -> None:
        """Note that a process has ended: its peers hear of it, but not if its machine has stopped."""
        met = [each for members in self._members.values() for each in members.values() if each.process is process]
        for group in met:
            if not silently:
                group.hang_up()
            group.has_hung_up = True


class SimulatedWork(dist.Work):
    """Is one collective, as one member waits for it."""

    def __init__(self, group: SimulatedGroup, finish: Callable[[Sequence[Any]], None]) -> None:
        super().__init__()
        self._group = group
        self._finish = finish
        self._is_done = False

    def end(self, given: Sequence[Any]) -> None:
        with torch.no_grad():
            self._finish(given)
        self._is_done = True

    def is_completed(self) -> bool:
        return self._is_done or self._group.failure is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's own code does."""
        if not self.within(self._group.patience.total_seconds()):
            self._group.fail("Timed out waiting for a collective")
            raise RuntimeError(self._group.failure)
        return True

    def within(self, slice_s: float) -> bool:
        until = self._group.groups.scheduler.now + slice_s
        while not self.is_completed() and self._group.groups.scheduler.now < until:
            self._group.wait(until - self._group.groups.scheduler.now)
        if not self._is_done and self._group.failure is not None:
            raise RuntimeError(self._group.failure)
        return self._is_done


class SimulatedGroup(dist.ProcessGroup):
    """Is one member's end of a group."""

    def __init__(
        self, groups: Groups, members: dict[int, SimulatedGroup], process: Process, rank: int, size: int
    ) -> None:
        super().__init__(rank, size)
        self.groups = groups
        self.process = process
        self.patience = timedelta(days=30)
        self.failure: str | None = None
        self.has_hung_up = False
        self._members = members
        self._rank = rank
        self._number = 0
        self._waiting: list[Thread] = []
        #: by the number of a collective: what each rank has given to it, and the work that waits for all
        self._given: dict[int, dict[int, Any]] = {}
        self._works: dict[int, SimulatedWork] = {}

    # ---------------------------------------------------------------- waiting

    def wait(self, timeout_s: float) -> None:
        me = self.groups.scheduler.check()
        self._waiting.append(me)
        try:
            self.groups.scheduler.block(timeout_s)
        finally:
            self._waiting.remove(me)

    def wake(self) -> None:
        for thread in self._waiting:
            self.groups.scheduler.wake(thread)

    # ---------------------------------------------------------------- connections

    def abort(self) -> None:
        self.hang_up()
        self.has_hung_up = True

    def hang_up(self) -> None:
        """Close all connections: the others hear of it."""
        if not self.has_hung_up:
            self.fail("the group was aborted")
            for other in self._others():
                self._carry(other, partial(other.fail, "Connection closed by peer"), Load("close", 0))

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.wake()

    def _others(self) -> list[SimulatedGroup]:
        return [each for rank, each in sorted(self._members.items()) if rank != self._rank]

    def _carry(self, other: SimulatedGroup, arrive: Callable[[], None], load: Load) -> None:
        def breaks() -> None:
            other.fail("Connection reset by peer")
            self.fail("Connection reset by peer")

        self.groups.wires.carry(self.process.name, other.process.name, arrive, breaks, load)

    # ---------------------------------------------------------------- collectives

    def _begin(self, what: str, gives: Any, finish: Callable[[Sequence[Any]], None]) -> SimulatedWork:
        self.groups.scheduler.check()
        if self.failure is not None:
            raise RuntimeError(self.failure)
        number, self._number = self._number, self._number + 1
        work = self._works[number] = SimulatedWork(self, finish)
        wires = self.groups.wires
        for other in self._others():
            fate = wires.on_moment(f"{what} {number}")
            wires.note(self.process.name, other.process.name, f"{what} {number}")
            arrive = partial(other.receive, number, self._rank, gives)
            late_s = _SENT_AGAIN_AFTER_S if fate in ("lost", "unanswered") else 0.0
            self.groups.scheduler.at(late_s, partial(self._carry, other, arrive, Load(what, 0)))
        self.receive(number, self._rank, gives)
        return work

    def receive(self, number: int, rank: int, given: Any) -> None:
        if self.failure is not None or self.has_hung_up or self.process.is_dead:
            return
        here = self._given.setdefault(number, {})
        here[rank] = given
        work = self._works.get(number)
        if work is not None and len(here) == self.size():
            del self._given[number], self._works[number]
            work.end([each for _, each in sorted(here.items())])
            self.wake()

    def allreduce(self, tensors: list[torch.Tensor], _: Any = None) -> SimulatedWork:
        (tensor,) = tensors
        return self._begin("all_reduce", tensor.clone(), lambda given: tensor.copy_(reduce(torch.add, given)))

    def allgather(self, found: list[list[torch.Tensor]], tensors: list[torch.Tensor], _: Any = None) -> SimulatedWork:
        def finish(given: Sequence[torch.Tensor]) -> None:
            for place, each in zip(found[0], given, strict=True):
                place.copy_(each)

        return self._begin("all_gather", tensors[0].clone(), finish)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> SimulatedWork:
        def finish(given: Sequence[torch.Tensor]) -> None:
            tensors[0].copy_(given[options.rootRank])

        return self._begin("broadcast", tensors[0].clone(), finish)

    def _get_backend(self, _: torch.device) -> SimulatedGroup:
        return self

    def _set_default_timeout(self, patience: timedelta) -> None:
        self.patience = patience

    def getBackendName(self) -> str:
        return "simulated"
