"""A server's process loads, listens, lets time pass until the job is over, and closes.

It listens from the beginning on. ``run`` serves; a server that is to resume has been asked before what it sees.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from fleet.base.clock import Clock, Wait
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import Choice
from fleet.errors import FleetError, NotInitializedError
from fleet.ps.server.checkpoint_reader import Restore
from fleet.ps.server.durability.state_directory import StateDirectory
from fleet.ps.server.service import Service
from fleet.ps.table.stores import stores_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, Network, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.telemetry.observer import Observer

_log = logging.getLogger("fleet.server")

TICK_S = 0.2
#: How often a wait that goes on is explained in the log.
EXPLAIN_S = 30.0
#: What replies under way get to leave before the listener closes.
GRACE_S = 2.0
#: How long an answer of another server takes at most.
ASKS_S = 2.0


#: So often servers of a job may say nothing before they are taken to have none.
_MOST_SILENCES = 30


class ServerRuntime:
    def __init__(
        self,
        endpoint: Endpoint,
        network: Network,
        settings: ProcessSettings,
        clock: Clock,
        *,
        expected: tuple[int, tuple[Endpoint, ...]] | None = None,
        restore: Restore | None = None,
        resumes: Place | None = None,
        joins: Sequence[Endpoint] = (),
        report: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """``joins`` are servers of a job that is to have this one too, if it runs without it; ``report`` is told, again
        and again, whether there is none, or it has."""
        self._endpoint = endpoint
        self._joining = Joining(endpoint, [each for each in joins if each != endpoint], report)
        self._network = network
        self._settings = settings
        self._clock = clock
        endpoints = () if expected is None else expected[1]
        #: ``fleet server`` is not told which one it is
        self._name = f"server {endpoints.index(endpoint) if endpoint in endpoints else endpoint}"
        self._stores = stores_of(endpoint, settings)
        directory = None
        try:
            if settings.durable_dir:
                keeps_all = settings.durable_keep == "all"
                directory = StateDirectory(settings.durable_dir, endpoint, settings.durable_sync, keeps_all=keeps_all)
            self._service = Service(
                endpoint,
                settings,
                clock,
                expected=expected,
                restore=restore,
                directory=directory,
                resumes=resumes,
                name=self._name,
                stores=self._stores,
            )
            self._listener = network.listen(endpoint, self._service.handle)
        except BaseException:
            if directory is not None:
                directory.close()
            self._stores.close()
            raise

    def ask(self, request: pb.Request) -> Frame:
        """Answer a request that can be answered at once."""
        replies: list[Frame] = []
        self._service.handle(Frame(request), replies.append)
        (reply,) = replies
        return reply

    @property
    def one_that_was_here(self) -> int:
        """Return the incarnation of a worker of the job; 0 if none came."""
        return self._service.one_that_was_here

    @property
    def chosen(self) -> Choice | None:
        """Return what the job goes on from, if this server has been told."""
        return self._service.chosen

    def end(self) -> None:
        """Let the serving end at once, in a process that is all of its job."""
        self._service.ended.set()

    def close(self) -> None:
        """End without having served."""
        self._service.stop("its process does something else")
        self._listener.close()
        self._close()

    def _close(self) -> None:
        try:
            self._service.close()
        finally:
            self._stores.close()

    def run(self) -> None:
        """Serve until every worker has left; raise what ended the job, if it did not end well."""
        self._service.await_the_first()
        explained_at = asked_at = self._clock.now()
        waits = Wait(self._clock, self._settings.startup_deadline_s)
        # Started by hand, nobody else says that it is there; and a log that nobody has set up shows warnings only.
        level = logging.INFO if self._settings.launcher else logging.WARNING
        _log.log(level, "%s listens at %s", self._name, self._endpoint)
        try:
            observer = Observer(self._name, "server", self._service.status, self._settings)
            drain = self._service.drain if self._settings.drain else self._service.stop
            with closing(observer), _signals_end(self._service.stop, drain) as stopped:
                while not self._service.ended.wait(TICK_S):
                    self._service.tick()
                    if self._clock.now() - asked_at > ASKS_S:
                        asked_at = self._clock.now()
                        ask_where_the_job_is(self._service, self._network)
                        self._joining.go_on(self._service, self._clock, self._network)
                    absent = self._service.absent()
                    if absent and waits.is_due():
                        _log.warning("%s: waiting for %s, %.0f s so far", self._endpoint, absent, waits.so_far_s)
                    if self._clock.now() - explained_at > EXPLAIN_S:
                        explained_at = self._clock.now()
                        _log.info("%s: %s", self._endpoint, self._service.explain())
        finally:
            self._service.stop("its process ends")
            self._listener.close(GRACE_S)
            self._close()
        failure = self._service.failure
        if failure is not None and not stopped:
            raise failure.again()
        if stopped and (failure is not None or self._service.end.suspended):
            _hand_on(stopped[0])


def ask_where_the_job_is(service: Service, network: Network) -> None:
    """Let a server that was killed while its job moved, and may not have been told, ask others."""
    with ExitStack() as opened:
        channels = [opened.enter_context(closing(network.connect(each))) for each in service.doubts()]
        calls = [channel.start(Frame(pb.Request(where=pb.Where())), ASKS_S) for channel in channels]
        for place, call in enumerate(calls):
            with suppress(TransportError, FleetError):
                service.learn(json.loads(raise_if_error(call.result()).message.about), is_first=place == 0)


def _about(call: Call) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(raise_if_error(call.result()).message.about)
    return about


class Joining:
    """Asks for a place in a job that runs without this server, until the job has come here."""

    def __init__(self, endpoint: Endpoint, others: Sequence[Endpoint], report: Callable[[bool], None]) -> None:
        self._endpoint = endpoint
        self._others = others
        self._report = report
        self._refusal = ""
        self._silences = 0

    def go_on(self, service: Service, clock: Clock, network: Network) -> None:
        if service.job is not None or not self._others:
            self._report(True)
            return
        began = clock.now()
        is_awaited = self._is_awaited(network)
        service.not_taken_in(self._refusal)
        # One that takes all the time to say nothing may have a job; one that is not there says so at once.
        is_silent = not is_awaited and clock.now() - began > 0.9 * ASKS_S
        self._silences = self._silences + 1 if is_silent else 0
        self._report(not is_awaited and not 0 < self._silences <= _MOST_SILENCES)

    def _is_awaited(self, network: Network) -> bool:
        """Say whether a job runs at the others that has not moved here yet, after asking for it."""
        with ExitStack() as opened:
            channels = [opened.enter_context(closing(network.connect(each))) for each in self._others]
            told = pb.Request(rearrange=pb.Rearrange())
            calls = [(channel, channel.start(Frame(told), ASKS_S)) for channel in channels]
            for channel, call in calls:
                try:
                    job = _about(call)
                    servers = [*job["servers"], str(self._endpoint)]
                    if len({*servers}) < len(servers):  # a job that begins, and will come
                        self._refusal = ""  # of one before
                        return False
                    if not job["wanted"]:
                        self._warn(job["refusal"])
                        asked = pb.Request(rearrange=pb.Rearrange(endpoints=servers))
                        _about(channel.start(Frame(asked), ASKS_S))
                except (TransportError, NotInitializedError):  # it is not there, or has no job
                    continue
                except FleetError as error:
                    self._warn(str(error))
                return True
        return False

    def _warn(self, refusal: str) -> None:
        if refusal and refusal != self._refusal:
            _log.warning("%s: the job goes on without this server: %s", self._endpoint, refusal)
        self._refusal = refusal


def _hand_on(number: int) -> None:
    """Let a handler of somebody else's know of a signal that has ended the serving before the job: Ray ends actors by
    one, and knows then that they are lost."""
    handler = signal.getsignal(number)
    is_ours = (getattr(handler, "__module__", None) or "").startswith("fleet.")
    if callable(handler) and handler is not signal.default_int_handler and not is_ours:
        handler(number, None)


@contextmanager
def _signals_end(stop: Callable[[str], None], drain: Callable[[str], None]) -> Iterator[list[int]]:
    """End the serving in order on SIGTERM and SIGINT, by ``drain`` if that is a SIGTERM and the first of them; outside
    the main thread signals belong to somebody else."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, _frame: object) -> None:
        is_first = not received and number == signal.SIGTERM
        received.append(number)
        _log.warning("serving ends: %s", signal.Signals(number).name)
        # The handler runs between two instructions of this thread, which may hold the service's lock.
        threading.Thread(
            target=drain if is_first else stop, args=(f"signal {signal.Signals(number).name}",), daemon=True
        ).start()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
