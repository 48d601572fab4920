"""Makes the process group of a collective job from the role maker's endpoints, or adopts the user's own.

The first endpoint hosts a store (under torchrun the launcher does). Through it the workers find each other, compare
what they are about to train, and connect; the connections themselves are torch's, NCCL for CUDA tensors and Gloo for
the others.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from fleet.averaging.communicators import done_within, hand_round, keep_store
from fleet.base.clock import Clock, Wait, notice_every_s
from fleet.base.cluster import Assignment, Endpoint
from fleet.base.ports import holder_of, is_taken
from fleet.base.settings import ProcessSettings
from fleet.collective.store_monitor import ENDED, StoreMonitor
from fleet.errors import DeadlineError, PlanMismatchError, PortInUseError, StateError

_log = logging.getLogger("fleet.worker")

#: The monitor finds out who is lost, so a long step of one worker is no reason for torch to give up.
_PATIENCE = timedelta(days=30)
#: Requests of the store that wait for something wait in the monitor, not in it.
_STORE_TIMEOUT = timedelta(seconds=30)
#: How long a worker that came to the store of an earlier job waits before it tries again.
_RETRY_S = 0.05
#: How often a worker that waits for the others looks whether they wait for it.
_LOOK_S = 1.0
#: Jobs of this process, one after the other; every worker counts alike.
_jobs = itertools.count()


class Group:
    """``start`` connects; then ``everyone`` is the group of all workers, and ``control`` the one for CPU tensors.
    ``exchanging`` is around every wait for a collective."""

    def __init__(self, assignment: Assignment, settings: ProcessSettings, clock: Clock) -> None:
        self.rank = assignment.index
        self.size = assignment.worker_num
        self._assignment = assignment
        self._settings = settings
        self._clock = clock
        self.exchanging: AbstractContextManager[None] = nullcontext()
        self._adopted = False
        self._made: list[dist.ProcessGroup] = []
        self._everyone: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        # Apart from what asks it: a group that is abandoned holds on to its store, and must not hold on to the port.
        self._server: TCPStore | None = None
        self._store: Store | None = None

    # ---------------------------------------------------------------- coming together

    def open(self) -> None:
        """Open the job's store, through which workers find each other. A second call does nothing."""
        if self._store is not None:
            return
        self._adopted = dist.is_initialized()
        deadline_s = self._settings.startup_deadline_s
        if self._adopted:
            self._check_adopted()
            store: Store = PrefixStore(f"fleet/{next(_jobs)}", _get_default_store())
            host, hosts_store = "the host of the adopted process group's store", False
        else:
            store, host, hosts_store = self._open_store(deadline_s)
        self._store = store
        self.monitor = StoreMonitor(store, self.rank, self.size, host, hosts_store, self._settings, self._clock)

    def gather_texts(self, what: str, told: str) -> list[str]:
        """Return what every worker says here, in their order; all of them come within the start-up deadline."""
        self._post_and_wait(what, told, self._settings.startup_deadline_s)
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        return [self.monitor.ask(lambda store, key=key: store.get(key).decode()) for key in keys]  # type: ignore[misc]

    def start(self, about: Mapping[str, object]) -> None:
        """Connect to all other workers, if they are about to do the same as this one."""
        self.open()
        deadline_s, store = self._settings.startup_deadline_s, self._store
        assert store is not None
        try:
            if dist.is_initialized() and not self._adopted:
                raise StateError(
                    "torch.distributed was initialized between resume_from() and init_worker()",
                    todo="Call init_process_group before resume_from, or leave it out.",
                )
            self._call_the_roll(about, deadline_s)
            if not self._adopted:
                self._connect(store, deadline_s)
            self._everyone = self.everyone
            if torch.cuda.is_available():
                self._control = self.split("gloo")
        except BaseException:
            self.abandon()
            raise

    def _check_adopted(self) -> None:
        got = (dist.get_rank(), dist.get_world_size())
        if got != (self.rank, self.size):
            raise StateError(
                "torch.distributed is initialized for another job",
                expected=f"rank {self.rank} of {self.size}, as {self._assignment.origin} says",
                got=f"rank {got[0]} of {got[1]}",
                todo="Leave init_process_group out: fleet.init_worker() makes the process group.",
            )

    def _open_store(self, deadline_s: float) -> tuple[Store, str, bool]:
        """Return the job's store, in words who keeps it, and whether this process does."""
        endpoint, launched = self._assignment.workers[0], self._assignment.store_launched
        hosts = self.rank == 0 and not launched
        host = f"the launcher at {endpoint}" if launched else f"worker 0 at {endpoint}"
        until, waits = self._clock.now() + deadline_s, Wait(self._clock, deadline_s)
        address = endpoint.host.strip("[]"), endpoint.port
        if hosts:
            self._server = keep_store(*address, _bound(endpoint))
        while True:
            try:
                some_s = min(until - self._clock.now(), notice_every_s(deadline_s))
                timeout = timedelta(seconds=max(0.001, some_s))
                store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            except (RuntimeError, TimeoutError) as error:
                if self._clock.now() < until:
                    if waits.is_due():
                        why = str(error).partition("\n")[0][:200]
                        _log.warning("worker %d waits for %s, %.0f s so far (%s)", self.rank, host, waits.so_far_s, why)
                    self._clock.sleep(_RETRY_S)
                    continue
                raise DeadlineError(
                    f"{host}, which keeps the job's store, did not answer within {deadline_s:g} s",
                    where=f"worker {self.rank}",
                    got=str(error).partition("\n")[0][:200],
                    todo="Start it, or raise FLEET_STARTUP_DEADLINE_S.",
                ) from None
            store.set_timeout(_STORE_TIMEOUT)
            if launched:  # it outlives jobs
                return PrefixStore(f"fleet/{self._assignment.attempt}/{next(_jobs)}", store), host, hosts
            prefixed = PrefixStore("fleet", store)
            if hosts or not _is_over(prefixed):
                return prefixed, host, hosts
            # An earlier job's, whose host is about to go.
            del store, prefixed
            self._clock.sleep(_RETRY_S)

    def _call_the_roll(self, about: Mapping[str, object], deadline_s: float) -> None:
        """Check that everybody is there and will train the same; otherwise name who is missing or differs."""
        told = json.dumps(about, sort_keys=True)
        self._post_and_wait("hello", told, deadline_s)
        self._refuse_differing(self.monitor.ask(lambda store: store.get("hello/0")).decode(), told, self.rank)
        self._post_and_wait("agrees", "", deadline_s)

    def _refuse_differing(self, first: str, told: str, rank: int) -> None:
        theirs, ours = json.loads(first), json.loads(told)
        differing = [name for name, value in ours.items() if theirs.get(name) != value]
        if differing:
            error = PlanMismatchError(
                f"worker {rank} is about to train something else than worker 0",
                expected="; ".join(f"{name} {theirs.get(name)}" for name in differing),
                got="; ".join(f"{name} {ours[name]}" for name in differing),
                todo="Build the same model, optimizer and strategy on every worker.",
            )
            self.monitor.fail(str(error))
            raise error

    def check_alike(self, where: str, about: Mapping[str, object]) -> None:
        """Return when all workers have come to this call, if they are about to do the same. Gloo ends a process in
        which a collective meets one of another size."""
        self.monitor.checks += 1
        told = json.dumps({"call": where, **about}, sort_keys=True)
        keys = [self.monitor.compares(self.monitor.checks, rank) for rank in range(self.size)]
        self.monitor.ask(lambda store: store.set(keys[self.rank], told))
        while self.monitor.until(lambda store: store.check(keys) or None, _LOOK_S) is None:
            absent = self.monitor.ask(lambda store: [r for r, key in enumerate(keys) if not store.check([key])])
            self.monitor.refuse_left(f"{where} needs every worker", absent)
            self.monitor.refuse_standstill(absent, where)
        everybody = [self.monitor.ask(lambda store, key=key: store.get(key).decode()) for key in keys]  # type: ignore[misc]
        for rank, each in enumerate(everybody):
            self._refuse_differing(everybody[0], each, rank)

    def _post_and_wait(self, what: str, told: str, deadline_s: float) -> None:
        """Write something down for the others, and return when all of them have."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self.monitor.ask(lambda store: store.set(keys[self.rank], told))
        waits = Wait(self._clock, deadline_s)
        while True:
            some_s = min(notice_every_s(deadline_s), max(0.0, deadline_s - waits.so_far_s))
            if self.monitor.until(lambda store: store.check(keys) or None, some_s) is not None:
                return
            missing = self.monitor.ask(lambda store: [r for r, key in enumerate(keys) if not store.check([key])])
            names = ", ".join(map(str, missing))
            if missing and waits.so_far_s >= deadline_s:
                raise DeadlineError(
                    f"workers {names} did not come within {deadline_s:g} s",
                    where=f"worker {self.rank} of {self.size}",
                    todo="Start them, or raise FLEET_STARTUP_DEADLINE_S.",
                )
            if missing and waits.is_due():
                _log.warning("worker %d waits for workers %s, %.0f s so far", self.rank, names, waits.so_far_s)

    def _connect(self, store: Store, deadline_s: float) -> None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("torch", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=deadline_s),
            )
        except RuntimeError as error:
            self.monitor.check()
            raise DeadlineError(
                f"the workers could not connect to each other within {deadline_s:g} s",
                where=f"worker {self.rank}",
                got=str(error).partition("\n")[0][:300],
                todo="Look at host names and firewalls; GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME choose the interface.",
            ) from None
        _set_pg_timeout(_PATIENCE, self.everyone)

    # ---------------------------------------------------------------- groups

    def check_there(self) -> None:
        """Refuse to go on where a script has destroyed the group in which the workers meet."""
        if dist.group.WORLD is not self._everyone:
            raise StateError(
                "torch.distributed's process group was destroyed while the job runs",
                where=f"worker {self.rank}",
                todo="Call dist.destroy_process_group() after fleet.stop_worker(), if the script has made the group; "
                "otherwise leave it out, as stop_worker() does so.",
            )

    @property
    def everyone(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup | None = dist.group.WORLD
        assert found is not None, "started"
        return found

    @property
    def control(self) -> dist.ProcessGroup:
        return self._control or self.everyone

    def split(self, backend: str | None = None, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Return a further group, of all workers or some; every worker makes the same ones in the same order."""
        made = dist.new_group(ranks, backend=backend, timeout=_PATIENCE)
        if isinstance(made, dist.ProcessGroup):  # it is something else where this worker is no member
            self._made.append(made)
        return cast(dist.ProcessGroup, made)

    # ---------------------------------------------------------------- waiting

    def begin(self, collective: Callable[[], dist.Work]) -> dist.Work:
        """Begin a collective that ``finish`` waits for."""
        return collective()

    def finish(self, work: dist.Work, device: torch.device, needs_all: str = "") -> None:
        """Wait for a collective: on CUDA the stream does, elsewhere this thread, until done or somebody is lost.

        ``needs_all`` names what cannot go on once a worker has stopped.
        """
        with self.exchanging:
            if device.type == "cuda":
                work.wait()
            else:
                self.monitor.wait(lambda slice_s: done_within(work, slice_s), needs_all)

    def at_once(self, call: Callable[[], object]) -> None:
        """Run a collective of torch's own that cannot be waited for in slices, to which all workers come now."""
        if not self._adopted:
            _set_pg_timeout(timedelta(seconds=self.monitor.deadline_s), self.everyone)
        try:
            call()
        except RuntimeError as error:
            raise self.monitor.blame(error) from error
        finally:
            if not self._adopted:
                _set_pg_timeout(_PATIENCE, self.everyone)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Copy the values that ``source`` has to every worker, in place."""

        def send(flat: torch.Tensor) -> None:
            self.finish(dist.broadcast(flat, source, async_op=True), flat.device)

        hand_round(tensors, send, gives=self.rank == source)

    def count_round(self) -> None:
        """Note that all workers have met once more."""
        self.monitor.rounds += 1

    # ---------------------------------------------------------------- parting

    def stop(self) -> None:
        """Part from the others when every worker has come here; groups of the user's stay."""
        self.monitor.part()
        self.monitor.end()
        self._store = None
        if not self._adopted:
            dist.destroy_process_group()
        else:
            for made in self._made:
                dist.destroy_process_group(made)
        self._made.clear()
        self._control = self._server = None

    def abandon(self) -> None:
        """Leave the group to the end of the process after a failure: collectives that are under way never end, and
        destroying the group would wait for them."""
        self.monitor.linger()
        self.monitor.end()
        self._server = self._store = None
        if self._adopted or not dist.is_initialized():
            return
        for group in (self.everyone, *self._made):
            if torch.cuda.is_available() and hasattr(group, "abort"):  # which older ones of torch do not have
                group.abort()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        dist.destroy_process_group()


def _is_over(store: Store) -> bool:
    """Say whether this is the store of a job that has ended, or one that goes away while it is asked."""
    try:
        return any(store.check([key]) for key in ENDED)
    except RuntimeError:
        return True


def _bound(endpoint: Endpoint) -> int:
    """Return a socket at the endpoint and nowhere else; torch's own would listen at every address of the machine."""
    host = endpoint.host.strip("[]")
    made: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        held = holder_of(endpoint.port) if is_taken(endpoint) else str(error)
        raise PortInUseError(
            "worker 0 cannot keep the job's store at its endpoint",
            where=str(endpoint),
            got=held,
            todo="Stop that process, or choose another port for the first worker.",
        ) from None
    return made.detach()
