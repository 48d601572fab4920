"""Brings together the workers that average dense gradients among themselves, over connections of torch's own.

They find each other through the first server, which tells all who there is and where, once everybody has come; the
first of them keeps a store, through which they connect. A group never changes. When a worker leaves, comes or is lost,
those who are there meet again and make another one, whose number is higher.

A collective is waited for in slices. It has failed when a connection of this worker breaks, or when the first server
says that another worker of the group is lost or has given it up. Then nobody in it gets any further. The first server
hears with each heartbeat what a worker waits for, so that it finds workers that wait for different things.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from fleet.averaging.communicators import done_within, hand_round, keep_store
from fleet.base.cluster import Endpoint
from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connection, Connections, Together, Whereabouts

_log = logging.getLogger("fleet.worker")

#: The servers find out who is lost, so a long step of one worker is no reason for torch to give up.
_PATIENCE = timedelta(days=30)
#: How long a collective is waited for before it is looked whether it can still end.
SLICE_S = 0.25
#: So long a store that does not answer is called before it is looked whether it can be there; and so often it is asked
#: whether all have come to it.
_CALL, _ASK_S = timedelta(seconds=2), 0.01
_BACKLOG = 1024

_T = TypeVar("_T")

#: What workers do together, as errors name it.
AVERAGE = "an average of gradients"


#: How often a group that broke is looked at, and how long the end of the process waits for one that is about to go.
_LOOK_S, _LAST_S = 0.1, 2.0
_is_ending = threading.Event()
_letting_go = threading.Lock()


class GroupBrokenError(Exception):
    """Says that no collective of the present group will end any more."""


@dataclass(frozen=True)
class Comer:
    """Says who has come to a meeting: a worker's index, how many of its pushes the servers have, how many rounds are
    over for it, how much it has done together with others in its last group, how many steps it has taken, and whether
    it has the values that the workers train."""

    worker: int
    address: str
    step: int
    rounds: int
    place: int
    steps: int
    has_values: bool


class DenseGroup:
    """Connects this worker to the others. ``size`` and ``rank`` are those of the group that there is."""

    def __init__(
        self,
        connections: Connections,
        whereabouts: Whereabouts,
        worker: int,
        exchanging: AbstractContextManager[None],
        following: Callable[[Callable[[], Any]], Any],
        own_address: Callable[[Endpoint], str],
    ) -> None:
        """``whereabouts`` is what the first server is told of them; ``exchanging`` is around every wait for the others.
        ``following`` lets something be done once more where the job has moved to other servers meanwhile; the others
        find this worker at its ``own_address``, which is that under which it talks to the first server."""
        self.rank = 0
        self.size = 1
        self._workers = [worker]
        #: of the group; 0 before the first one
        self.number = 0
        #: how many rounds are over, and how many of them in this group
        self.rounds = self.rounds_here = 0
        #: whether the servers had updates when it was made
        self.is_trained = False
        #: whether all have agreed to make another one before the next round
        self.is_over = False
        #: whether this worker's next round is its last
        self.is_leaving = False
        #: whether all have said in the last round that buckets may leave while backward runs
        self.has_buckets = False
        #: whether a collective has begun that nobody waits for any more
        self.is_unfinished = False
        self._is_broken = False
        self._does = AVERAGE
        self._worker = worker
        self._connections = connections
        self._whereabouts = whereabouts
        self._exchanging = exchanging
        self.following = following
        self._own_address = own_address
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None
        self._under_way: set[dist.Work] = set()

    # ---------------------------------------------------------------- coming together

    def worker_at(self, rank: int) -> int:
        return self._workers[rank]

    def rank_of(self, worker: int) -> int:
        """Return where a worker is in the group that there is."""
        return self._workers.index(worker)

    def has(self, worker: int) -> bool:
        return worker in self._workers

    @property
    def _first(self) -> Connection:
        """Return the connection to the first server, which is another one when the job has moved."""
        return self._connections.by_server[0]

    @property
    def must_meet(self) -> bool:
        """Say whether no further round can be in this group."""
        return self.is_over or self.is_broken

    @property
    def is_broken(self) -> bool:
        return self._is_broken or 0 < self.number <= self._first.broken_group

    @property
    def is_wanted(self) -> bool:
        """Say whether somebody waits for another group."""
        return self._first.meeting > self.number > 0

    def meet(
        self, step: int, steps: int, device: torch.device, *, has_values: bool, in_a_step: bool = False
    ) -> list[Comer]:
        """Make a group with all workers that there are, and return who is in it, in the order of ranks. This worker has
        taken so many ``steps`` with others, and the servers have ``step`` pushes of it. Nobody is in it where the round
        that this worker is in is over for others, which wait for its push: then they meet when the step is over."""
        while True:
            broken = self.is_broken
            self.close()
            try:
                with self._exchanging:
                    said = pb.Meet(broken=broken, steps=steps, has_values=has_values, in_a_step=in_a_step)
                    meet = partial(self._meet, step, said, device)
                    comers: list[Comer] = self.following(meet)
                    return comers
            except FleetError:  # of the servers, some of which are RuntimeErrors too
                raise
            except (GroupBrokenError, RuntimeError, OSError) as error:
                # Somebody was lost in between: what is known of that comes with the next meeting.
                _log.warning("worker %d could not connect to the others, and meets them again: %s", self._worker, error)
                self._is_broken = True
            except BaseException:
                self._is_broken = True
                raise

    def _meet(self, step: int, said: pb.Meet, device: torch.device) -> list[Comer]:
        host = self._own_address(self._first.endpoint)
        # Whoever comes to the first one's while torch is at making it waits for five seconds now and then.
        port, own = _own_store(host)
        asked = pb.Meet(group=self.number, address=json.dumps([host, port]), rounds=self.rounds)
        asked.MergeFrom(said)
        reply = self._first.call(Frame(self._first.request(step, meet=asked)), "a meeting of the workers")
        told = json.loads(reply.message.about)
        comers = [Comer(**each) for each in told["members"]]
        if not comers:
            self._is_broken = True
            return []
        self.rank = next(rank for rank, each in enumerate(comers) if each.worker == self._worker)
        self._workers = [each.worker for each in comers]
        self.size, self.number, self.is_trained = len(comers), told["number"], told["trained"]
        self.rounds_here, self.is_over, self._is_broken, self.is_unfinished = 0, False, False, False
        self.has_buckets = False
        self._whereabouts.together = Together(self.number)
        patience = timedelta(seconds=self._first.deadline_s)
        self._store = own
        if self.rank > 0:
            host, port = json.loads(comers[0].address)
            come = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=_CALL)
            self._store = self._repeated(come)
        self._store.set_timeout(patience)
        store = PrefixStore(str(self.number), self._store)
        store.set(f"here {self.rank}", "")
        self._repeated(partial(self._await_all, store))
        self._group = _connected(store, self.rank, self.size, device, patience)
        return comers

    def _await_all(self, store: PrefixStore) -> None:
        """Look whether all have come, for whom torch would wait without a look at whether they still can."""
        try:
            have_come = store.check([f"here {rank}" for rank in range(self.size)])
        except RuntimeError as error:  # a connection that has broken is not made again
            raise self.broken_by(error) from error
        if not have_come:
            self._first.clock.sleep(_ASK_S)
            raise RuntimeError("not all workers of the group have come to its store")

    def _repeated(self, attempt: Callable[[], _T]) -> _T:
        """Repeat what fails without another worker, until it is there, is late, or is known to be lost."""
        until = self._first.clock.now() + self._first.deadline_s
        while True:
            try:
                return attempt()
            except RuntimeError:
                self._check()
                if self._first.clock.now() > until:
                    raise

    def say_farewell(self, step: int) -> None:
        """Tell the first server that this worker meets nobody any more, but in its last round."""
        self.is_leaving = True
        self._tell(step, pb.Meet(group=self.number, leaving=True), "a farewell to the workers")

    def tell_broken(self, step: int) -> None:
        """Tell the others, through the first server, that the group is broken, as this worker meets them later."""
        self._tell(step, pb.Meet(group=self.number, broken=True), "word of a broken group")

    def _tell(self, step: int, meet: pb.Meet, what: str) -> None:
        self.following(lambda: self._first.call(Frame(self._first.request(step, meet=meet)), what))

    def break_off(self) -> None:
        """Give up what this worker was doing with the others, who hear of it when it meets them next."""
        self._is_broken = self.is_unfinished = True

    def close(self) -> None:
        """Let go of the connections."""
        group, self._group, self._store = self._group, None, None
        under_way, self._under_way = self._under_way, set()
        if group is None or not (self.is_broken or self.is_unfinished or under_way):
            return
        if hasattr(group, "abort"):  # which older ones of torch do not have
            group.abort()
        _keep_until_over(group, under_way)

    # ---------------------------------------------------------------- for averaging

    @property
    def everyone(self) -> dist.ProcessGroup:
        assert self._group is not None, "met"
        return self._group

    @property
    def control(self) -> dist.ProcessGroup:
        return self.everyone

    def finish(self, work: dist.Work, device: torch.device) -> None:
        """Wait for a collective: on CUDA the stream does, elsewhere this thread, until done or the group breaks."""
        if device.type == "cuda":
            work.wait()
            self._under_way.discard(work)
            return
        with self._exchanging, self._awaiting():
            while True:
                try:
                    if done_within(work, SLICE_S):
                        self._under_way.discard(work)
                        return
                except RuntimeError as error:
                    raise self.broken_by(error) from error
                self._check()

    def at_once(self, call: Callable[[], object]) -> None:
        """Run a collective of torch's own that cannot be waited for in slices, to which all workers come now."""
        backend: Any = self.everyone._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=self._first.deadline_s))
        try:
            with self._awaiting():
                call()
        except RuntimeError as error:
            raise self.broken_by(error) from error
        finally:
            backend._set_default_timeout(_PATIENCE)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Surround something that all workers do together at the same place, beside averages of gradients."""
        self._does = what
        try:
            yield
        finally:
            self._does = AVERAGE
        self.advance()

    def advance(self) -> None:
        """Note that all have done one more thing together."""
        said = self._whereabouts.together
        self._whereabouts.together = Together(said.group, said.place + 1)

    @contextmanager
    def _awaiting(self) -> Iterator[None]:
        """Surround a wait, and let the first server know of it."""
        group, place, _ = self._whereabouts.together
        self._whereabouts.together = Together(group, place, self._does)
        try:
            yield
        except BaseException:
            self.break_off()
            raise
        finally:
            self._whereabouts.together = Together(group, place)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Copy the values that the rank ``source`` has to every worker, in place."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source

        def send(flat: torch.Tensor) -> None:
            self.finish(self.begin(lambda: self.everyone.broadcast([flat], options)), flat.device)

        hand_round(tensors, send, gives=self.rank == source)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all workers, which may differ in length."""
        # Not an all-reduce: a worker that should not be here would add its number to another one's gradients.
        lengths = [int(each) for each in self._gather_alike(torch.tensor([len(tensor)], device="cpu"))]
        mine = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        mine[: len(tensor)] = tensor
        return [each[:length] for each, length in zip(self._gather_alike(mine), lengths, strict=True)]

    def _gather_alike(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self.finish(self.begin(lambda: self.everyone.allgather([found], [mine])), mine.device)
        return found

    def begin(self, collective: Callable[[], dist.Work]) -> dist.Work:
        """Begin a collective that ``finish`` waits for."""
        try:
            work = collective()
        except RuntimeError as error:
            raise self.broken_by(error) from error
        self._under_way.add(work)
        return work

    def count_round(self) -> None:
        self.rounds += 1
        self.rounds_here += 1

    def broken_by(self, error: RuntimeError) -> GroupBrokenError:
        """Note that the group is broken, and return the error that says so."""
        self._is_broken = True
        return GroupBrokenError(str(error).partition("\n")[0][:300])

    def _check(self) -> None:
        # Where the job has moved meanwhile this worker goes over while it waits: who is lost is known there.
        self.following(self._refuse_if_over)
        if self.is_broken:
            raise GroupBrokenError("a worker of the group is gone")

    def _refuse_if_over(self) -> None:
        if self._first.failure is not None:
            raise self._first.reported_failure()


def _connected(
    store: PrefixStore, rank: int, size: int, device: torch.device, patience: timedelta
) -> dist.ProcessGroup:
    """Return a group that is this worker's alone to know, beside whatever the script has made of torch.distributed."""
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = ProcessGroupGloo(PrefixStore("cpu", store), rank, size, patience)
    gloo._set_default_timeout(_PATIENCE)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        nccl = ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        group._set_default_backend(kinds.NCCL)
        group._register_backend(device, kinds.NCCL, nccl)
    return group


def _keep_until_over(group: dist.ProcessGroup, under_way: set[dist.Work]) -> None:
    """Keep a broken group until its collectives have ended: torch waits for them in whoever lets go of it last.

    Most have failed, and others end as the other workers let go of it; some never do. It must not stay longer: what
    another worker sends to a collective that has failed here is never read, and Gloo takes a core to look for it.
    """
    held = [group]  # by the thread alone

    def keep() -> None:
        while not all(work.is_completed() for work in under_way):
            if _is_ending.wait(_LOOK_S):
                break
        with _letting_go:
            held.clear()

    if threading.main_thread().is_alive():
        atexit.unregister(_keep_for_good)
        atexit.register(_keep_for_good)  # the last to register is the first to be called
        threading.Thread(target=keep, name="broken-group", daemon=True).start()
    else:  # the process ends, and begins no threads
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _keep_for_good() -> None:
    """Let go of no group any more, as the process ends: a thread that is in torch's code then would abort it."""
    _is_ending.set()
    _letting_go.acquire(timeout=_LAST_S)


def _own_store(host: str) -> tuple[int, TCPStore]:
    """Return a store that this worker keeps, in case it is the first one, and its port."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.bind((host, 0))
        made.listen(_BACKLOG)
        port = made.getsockname()[1]
        return port, keep_store(host, port, made.detach())
    except (OSError, RuntimeError) as error:
        made.close()
        raise FleetError("a worker has no address for the others", where=host, got=str(error)) from None
