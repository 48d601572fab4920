"""Whole jobs inside one process whose servers are killed, and there again at once.

A server is killed between two things that it does, never in the midst of an instruction; what it has not written by
then is lost, and nobody hears of what it has not answered. Writing to a file has several such moments.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENT, Body, Job, until
from inside import abandon, durability_of, end_of, task_of

from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.places import Directory
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.durability.durability import NOTED, Durability
from fleet.ps.server.durability.snapshot import Shot
from fleet.ps.server.durability.state_directory import Kind, StateDirectory
from fleet.ps.server.job import Job as ServedJob
from fleet.ps.server.runtime import ask_where_the_job_is
from fleet.ps.server.service import Service
from fleet.ps.table.stores import stores_of
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Handler, Respond

#: A line that breaks while its server is heard has to be one that is killed, however often. A server that was killed
#: amid goodbyes stays for four heartbeats: who has not heard its own answered asks again in less, if slowly.
ENVIRON = {**PATIENT, "FLAGS_rpc_retry_times": "100000", "FLEET_HEARTBEAT_S": "0.5"}

#: When a server is killed: before it has seen a request, with the request in its journal, when it has carried it out
#: and nobody has heard so, or when its answers are on their way.
BEFORE, NOTED_DOWN, CARRIED_OUT, ANSWERED = MOMENTS = ("before", "noted down", "carried out", "answered")


class Killed(BaseException):
    """Nothing in a server may hold this up."""


#: Told of every request that changes anything: the server, its kind and a running number; says when to kill, if at all.
Plan = Callable[[int, str, int], str | None]


def every(nth: int, offset: int) -> Plan:
    """Kill at every ``nth`` request of each server, at each of the moments in turn."""
    moments = itertools.cycle(MOMENTS)
    return lambda server, kind, number: next(moments) if number % nth == offset else None


def at(kind: str, moment: str, server: int = 0, times: int = 1) -> Plan:
    """Kill when a request of this kind comes."""
    left = [times]

    def plan(which: int, what: str, number: int) -> str | None:
        if (which, what) != (server, kind) or not left[0]:
            return None
        left[0] -= 1
        return moment

    return plan


class Hurrying(SystemClock):
    """Runs twenty times as fast once all workers of a job are through: whom its servers then wait for in vain, they do
    not wait for long."""

    def __init__(self, through: threading.Event) -> None:
        self._through = through
        self._since: float | None = None

    def now(self) -> float:
        now = super().now()
        if not self._through.is_set():
            return now
        if self._since is None:
            self._since = now
        return now + 19 * (now - self._since)


class Host:
    """One endpoint, where one server after the other serves a job."""

    def __init__(self, job: DyingJob, index: int, name: str) -> None:
        self.job = job
        self.index = index
        self.endpoint = Endpoint.parse(name)
        self.kills = self.kills_amid_snapshots = 0
        #: why servers ended that were started again
        self.losses: list[BaseException | None] = []
        #: what happens to the directory before the next one starts
        self.misfortune: Callable[[Path], object] = lambda _: None
        #: what the next snapshots die of
        self.crash: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._one_at_a_time = threading.RLock()
        self._requests = 0
        self._start()

    def _start(self) -> None:
        endpoint = self.endpoint
        settings = ProcessSettings.read(self.job.environ)
        self.durable = StateDirectory(str(self.job.directory), endpoint, "os", self.job.journal_bytes)
        restore = None if self.job.model_dir is None else restore_from(self.job.model_dir)
        self._muted = False
        self.stores = stores_of(endpoint, settings)
        clock = Hurrying(self.job.through)
        self.service = Service(endpoint, settings, clock, restore=restore, directory=self.durable, stores=self.stores)
        self._watch_snapshots(self.service)
        self._listener = self.job.network.listen(endpoint, self._handler(self.service))

    def serve(self) -> None:
        while True:
            self.service.ended.wait(0.02)
            with self._one_at_a_time:  # one that was killed as it ended has not
                if self.service.ended.is_set():
                    if end_of(self.service).suspended_by is None:
                        break
                    self.losses.append(self.service.failure)
                    self._start_over()
                self.service.tick()
            ask_where_the_job_is(self.service, self.job.network)
        self._listener.close(2.0)
        self.service.close()
        self.stores.close()
        failure = self.service.failure
        if failure is not None:
            raise failure

    def kill(self) -> None:
        """End the server as the system would, and start it again."""
        with self._one_at_a_time:
            self.kills += 1
            listener = self._listener
            # Threads cannot be killed: one that writes a checkpoint ends first, and what one has read goes nowhere.
            task = task_of(self.service)
            for thread in threading.enumerate():
                if task is not None and thread.name == f"fleet-{task.name}":
                    thread.join()
            self._abandon_snapshots()
            for journal in self.durable._journals:
                journal.close()
            os.close(self.durable._lock)
            abandon(self.stores)
            self.job.network.forget(self.endpoint, listener)
            self.misfortune(self.durable.directory)
            self._start()
        listener.close()

    def disturb(self, act: Callable[[Service], object]) -> None:
        """Do something to the server between two requests."""
        with self._one_at_a_time:
            act(self.service)

    @property
    def snapshots(self) -> Durability:
        return durability_of(self.service)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is being written."""
        return self.snapshots._writer is not None and self.snapshots._writer.is_alive()

    def _watch_snapshots(self, service: Service) -> None:
        """Have what writes snapshots die as ``crash`` says, and the server with it; and not begin to write before so
        many requests have come as the job's ``held`` says."""
        snapshots = self.snapshots
        take, write = snapshots._take_behind, snapshots._write

        def dying(served: ServedJob) -> None:
            try:
                with self.crash:
                    take(served)
            except Killed:
                while not self._one_at_a_time.acquire(timeout=0.01):
                    if snapshots._closed:  # it is being killed, and waits for this thread
                        return
                try:
                    if service is self.service:
                        self.kill()
                finally:
                    self._one_at_a_time.release()

        def held_up(shot: Shot, *given: Any, behind: bool) -> None:
            until_then = self._requests + self.job.held * behind
            until(lambda: self._requests >= until_then or snapshots._closed or service.ended.is_set())
            write(shot, *given, behind=behind)

        snapshots._take_behind, snapshots._write = dying, held_up  # type: ignore[method-assign]

    def _abandon_snapshots(self) -> None:
        """Whoever writes one goes no further, and removes nothing."""
        snapshots = self.snapshots
        self.kills_amid_snapshots += self.is_writing
        snapshots.take_now = lambda *_: None  # type: ignore[method-assign]
        self.durable.discard = lambda *_: None  # type: ignore[method-assign]
        if snapshots._writer is threading.current_thread():
            snapshots._writer = None
        snapshots.stop_writing()

    def stop_and_start(self) -> None:
        """End the server as SIGTERM does, and start it again."""
        with self._one_at_a_time:
            self.service.stop("a test")
            self._start_over()

    def _start_over(self) -> None:
        listener = self._listener
        self.job.network.forget(self.endpoint, listener)
        self.service.close()
        self.stores.close()
        self._start()
        listener.close()

    def _handler(self, service: Service) -> Handler:
        def handle(frame: Frame, respond: Respond) -> None:
            def answer(reply: Frame) -> None:
                if service is self.service and not self._muted:
                    respond(reply)

            with self._one_at_a_time:
                if service is not self.service:
                    return  # its line breaks
                kind = frame.message.WhichOneof("kind")
                moment = None
                if kind in self.job.counted:
                    self._requests += 1
                    moment = self.job.plan(self.index, kind, self._requests)
                self._muted = moment == CARRIED_OUT
                try:
                    if moment == BEFORE:
                        raise Killed
                    with self._noted_down() if moment == NOTED_DOWN else contextlib.nullcontext():
                        service.handle(frame, answer)
                    if moment is not None:
                        raise Killed
                except Killed:
                    self.kill()

        return handle

    @contextlib.contextmanager
    def _noted_down(self) -> Iterator[None]:
        """Die with the next record in the journal; other servers of this process do not."""

        def dying(kind: Kind, buffers: Any) -> None:
            StateDirectory.record(self.durable, kind, buffers)
            # Nobody else may go on either: what is begun from here on would lack what was noted down.
            self.snapshots._closed = True
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.durable, "record", dying)
            yield


class Crashes:
    """While this is entered, whoever writes the ``number``-th piece of a snapshot dies, before or after it."""

    def __init__(self, number: int, *, after: bool) -> None:
        self.struck = False
        self._number = number
        self._after = after

    def __enter__(self) -> Crashes:
        self._patch = pytest.MonkeyPatch()
        moments = [(Directory, "create"), (Directory, "publish")]
        moments += [(StateDirectory, "_journal"), (StateDirectory, "adopt"), (StateDirectory, "clean")]
        for owner, name in moments:
            self._patch.setattr(owner, name, self._dying(getattr(owner, name)))
        return self

    def _dying(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*given: Any) -> Any:
            self._number -= 1
            strikes = self._number == 0
            if strikes and not self._after:
                self.struck = True
                raise Killed
            result = act(*given)
            if strikes:
                self.struck = True
                raise Killed
            return result

        return dying

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class DyingJob(Job):
    """A job whose servers keep what they acknowledge in ``directory``, and are killed when ``plan`` says so; the job
    may move to ``later`` ones."""

    def __init__(
        self,
        body: Body,
        directory: Path,
        *,
        workers: int = 2,
        servers: int = 2,
        plan: Plan = lambda *_: None,
        journal_bytes: int = 2000,
        held: int = 0,
        reading: bool = False,
        later: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(body, workers, servers, **{"environ": ENVIRON, **options})
        self.directory = directory
        self.plan = plan
        self.journal_bytes = journal_bytes
        self.held = held
        self.counted = {*NOTED, "load", "save", *(["pull"] if reading else [])}
        #: all workers are
        self.through = threading.Event()
        self._under_way = set(range(workers))
        self.hosts = [Host(self, index, name) for index, name in enumerate([*self.endpoints, *later])]

    def serve(self, index: int) -> None:
        try:
            self.hosts[index].serve()
        except BaseException as error:
            self.errors[f"server {index}"] = error

    def start(self) -> list[threading.Thread]:
        later = range(len(self.endpoints), len(self.hosts))
        threads = [threading.Thread(target=self.serve, args=(index,), daemon=True) for index in later]
        for thread in threads:
            thread.start()
        return [*super().start(), *threads]

    def work(self, index: int) -> None:
        super().work(index)
        self._under_way.discard(index)
        if not self._under_way:
            self.through.set()

    @property
    def kills(self) -> int:
        return sum(host.kills for host in self.hosts)
