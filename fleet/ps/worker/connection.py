"""A worker's connections repeat requests to the servers until they are answered, and send heartbeats beside.

A thread of each connection sends a heartbeat every second, however long the user's step takes. It measures the server's
silence; when that exceeds the deadline, or the server says that the job is over, it cancels whatever waits on this
connection, and the waiting thread raises what the heartbeats found. A request itself has no time limit: one that is
parked waits as long as its server is heard.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fleet.base.clock import Clock, Wait, notice_every_s
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    ConfigurationError,
    DeadlineError,
    DuplicateWorkerError,
    FleetError,
    IdentityError,
    JobAbortedError,
    ServerBusyError,
    ServerLostError,
    ServersMovedError,
    StateError,
)
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, Channel, Network, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.ps.worker.progress import Progress
from fleet.telemetry.worker_figures import ProfilerRange

_log = logging.getLogger("fleet.worker")

RETRY_PAUSE_S = 0.2
#: For so many heartbeats a worker asks again for a place that another process has: it may have just died.
TAKEN_BEATS = 4
FAREWELL_S = 2.0
#: Of so many heartbeats the shortest round trip says how far a server is.
_BEATS = 8
#: After so many heartbeats without an answer a server is away, and not just slow with one.
MISSED_BEATS = 2

#: After one of these there is nothing to ask the server any more.
FATAL = (JobAbortedError, ServerLostError, IdentityError)
#: With these a worker finds that it cannot go on, unless a server says by one that the job is over.
_OWN_FINDINGS = (DeadlineError, ServerLostError)


class Together(NamedTuple):
    """Says how far a worker is with what a group of workers does among itself: how many things they have done together,
    and what it waits for that they do next, if it waits."""

    group: int = 0
    place: int = 0
    awaits: str = ""


class Whereabouts:
    """Holds how far a worker is with others, as it tells the first server; ``together`` is written as a whole."""

    def __init__(self) -> None:
        self.together = Together()


class Connection:
    """Connects the worker to one server."""

    def __init__(
        self,
        endpoint: Endpoint,
        network: Network,
        settings: ProcessSettings,
        clock: Clock,
        worker: int,
        incarnation: int,
        figures: Callable[[], Mapping[str, float]] = dict,
        logs_absent: bool = True,
        look_ahead: Callable[[Connection], bool] = lambda _: True,
        whereabouts: Whereabouts | None = None,
        completed: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``figures`` are what the worker tells of itself with its heartbeats, and ``completed`` how many of its pushes
        all servers have acknowledged, or None before it has any values. One of its connections logs for which absent
        workers all wait. ``look_ahead`` looks where the job has moved to, until it returns that this is known.
        ``whereabouts`` is what this server is told with every request and heartbeat, to see who waits for whom.
        """
        self.endpoint = endpoint
        self.sent_bytes = self.received_bytes = 0
        self._figures = figures
        self._look_ahead = look_ahead
        self._channel = network.connect(endpoint)
        self._settings = settings
        self._clock = clock
        self._worker = worker
        self._incarnation = incarnation
        self._lock = threading.Lock()
        #: what nobody may have read the answers to yet
        self._under_way: dict[Call, Frame] = {}
        self._failure: FleetError | None = None
        self._last_heard = clock.now()
        self._logs_absent = logs_absent
        #: for workers that have not come yet
        self._wait: Wait | None = None
        self._closing = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._repeating: threading.Thread | None = None
        #: by its last heartbeat, the number of the group that somebody waits for, and of the last one that broke
        self.meeting = self.broken_group = 0
        #: what the last heartbeats took
        self._round_trips: tuple[float, ...] = ()
        #: by its last heartbeat, the servers that this worker is to move the job to
        self.wanted_servers: tuple[str, ...] = ()
        self._whereabouts = whereabouts or Whereabouts()
        self._completed = completed
        #: told that the job is over, and why, when a server has said so
        self.when_over: Callable[[FleetError], None] = lambda _: None
        #: whether the user knows what ended this connection
        self.reported = False

    def request(self, step: int, **kind: object) -> pb.Request:
        """Make a request of this worker; ``kind`` names its one field, as in ``request(3, pull=pb.Pull())``."""
        return self._request(step, self._whereabouts.together, **kind)

    def _request(self, step: int, together: Together, **kind: object) -> pb.Request:
        return pb.Request(
            worker=self._worker,
            incarnation=self._incarnation,
            step=step,
            group=together.group,
            together=together.place,
            **kind,  # type: ignore[arg-type]
        )

    def start(self, frame: Frame, what: str, *, ahead: bool = False) -> PendingRequest:
        """Send a request; ``what`` names it in errors ("push of step 7"). Nobody waits yet for the reply to a request
        that is ``ahead``."""
        return PendingRequest(self, frame, what, ahead)

    def call(self, frame: Frame, what: str) -> Frame:
        return self.start(frame, what).result()

    def hello(self, frame: Frame, *, wait: bool, watch: Callable[[], None] = lambda: None) -> Frame:
        """Say hello. With ``wait`` it waits for a server that is not up yet, until the start-up deadline; ``watch`` is
        called meanwhile, and may raise."""
        began, taken_at, attempt_s = self._clock.now(), 0.0, self.deadline_s
        waits = Wait(self._clock, self._settings.startup_deadline_s)
        while True:
            asked_at = self._clock.now()
            rest_s = began + self._settings.startup_deadline_s - asked_at
            # Nobody hears of a machine that stops. One that is slow is given more time with each attempt.
            within_s = min(rest_s, attempt_s) if wait else rest_s
            try:
                reply = raise_if_error(self._channel.start(frame, max(within_s, RETRY_PAUSE_S)).result())
            except DuplicateWorkerError:
                taken_at = taken_at or self._clock.now()
                # By when it was asked: this process may have stood still since, and the place may be free by now.
                if asked_at - taken_at > TAKEN_BEATS * self._settings.heartbeat_s:
                    raise
                self._clock.sleep(RETRY_PAUSE_S)
            except (TransportError, ServerBusyError) as error:
                taken_at = 0.0  # a server that starts again has not heard of anybody's death
                now = self._clock.now()
                attempt_s *= 2 if now - asked_at >= attempt_s else 1
                if not wait or now - began >= self._settings.startup_deadline_s:
                    if isinstance(error, ServerBusyError):
                        raise
                    raise DeadlineError(
                        f"the server at {self.endpoint} did not come up",
                        where=f"worker {self._worker}, hello",
                        expected=f"an answer within {self._settings.startup_deadline_s if wait else 0:g} s",
                        got=f"none in {now - began:.1f} s ({error})",
                        todo="Start the server, check its address and port, and look at its log.",
                    ) from None
                if waits.is_due():
                    _log.warning("waiting for the server at %s, %.0f s so far (%s)", self.endpoint, now - began, error)
                watch()
                self._clock.sleep(RETRY_PAUSE_S)
            else:
                self._heard()
                return reply

    def insist(self, frame: Frame, what: str) -> Frame:
        """Repeat a request to a server where this worker is no member, until the deadline of one that is silent."""
        began = self._clock.now()
        while True:
            try:
                return raise_if_error(self._channel.start(frame, self.deadline_s).result())
            except TransportError:
                silent_s = self._clock.now() - began
                if silent_s > self.deadline_s:
                    raise self._silence_error(silent_s) from None
            if self.failure is not None:
                raise self.reported_failure()
            _log.debug("%s is asked again for %s", self.endpoint, what)
            self._clock.sleep(RETRY_PAUSE_S)

    def inquire(self, frame: Frame) -> Frame | None:
        """Return the answer to a short question, if there is any; whatever has become of this connection."""
        return inquire_all([(self, frame)])[0]

    def farewell(self, frame: Frame) -> None:
        """Send a last word; whether it arrives matters to nobody any more."""
        with contextlib.suppress(TransportError, FleetError):
            self._channel.start(frame, FAREWELL_S).result()

    def forked_channel(self) -> Channel:
        """Open a channel for a forked child of this process, which may not use this one."""
        return self._channel.forked()

    @property
    def deadline_s(self) -> float:
        return self._settings.rpc_deadline_s

    @property
    def round_trip_s(self) -> float:
        """Return how long a request takes on its way there and back; 0 if that is not known yet. A busy machine delays
        one or another."""
        return min(self._round_trips, default=0.0)

    def start_heartbeat(self) -> None:
        if self._heartbeat is None:
            name = f"fleet-heartbeat-{self._worker}-{self.endpoint}"
            self._heartbeat = threading.Thread(target=self._beat_until_closed, name=name, daemon=True)
            self._heartbeat.start()

    def close(self) -> None:
        self._closing.set()
        self.fail(StateError("the connection is closed", where=str(self.endpoint)))
        self._channel.close()
        if self._heartbeat is not None and self._heartbeat is not threading.current_thread():
            self._heartbeat.join()

    # ---------------------------------------------------------------- heartbeats

    def _beat_until_closed(self) -> None:
        noticed, every_s = self._clock.now(), notice_every_s(self._settings.rpc_deadline_s)
        has_moved = knows_ahead = False
        while not self._closing.wait(self._settings.heartbeat_s):
            sent_at = self._clock.now()
            try:
                self._take_in(raise_if_error(self._beat().result()))
                self._round_trips = (*self._round_trips[1 - _BEATS :], self._clock.now() - sent_at)
            except TransportError:
                pass
            except ServersMovedError as error:
                self._heard()  # it stays until this worker has gone over
                self.fail(error)
                has_moved = True
            except FleetError as error:
                self.hear_the_end(error)
                return
            except Exception as error:  # without heartbeats a wait could have no end
                self.fail(FleetError(f"the heartbeat to {self.endpoint} failed", got=repr(error)))
                raise
            if has_moved and not knows_ahead:
                knows_ahead = self._look_ahead(self)
            now = self._clock.now()
            silent_s = now - self._last_heard
            if silent_s > self._settings.rpc_deadline_s:
                self.fail(self._silence_error(silent_s))
                return
            if min(silent_s, now - noticed) > every_s:
                noticed = now
                notice = "server %s has been silent for %.1f s; after %g s (FLAGS_rpc_deadline) it is given up on"
                _log.warning(notice, self.endpoint, silent_s, self._settings.rpc_deadline_s)

    def _beat(self) -> Call:
        together = self._whereabouts.together
        completed = self._completed()
        said = pb.Beat(figures=self._figures(), awaits=together.awaits, has_values=completed is not None)
        beat = Frame(self._request(completed or 0, together, beat=said))
        return self._channel.start(beat, self._settings.heartbeat_s * 2, urgent=True)

    def _take_in(self, reply: Frame) -> None:
        """Note what the answer to a heartbeat tells."""
        self._heard()
        self._log_absent_workers(reply.message.about)
        self.meeting, self.broken_group = reply.message.meeting, reply.message.broken
        self.wanted_servers = tuple(reply.message.wanted_servers)
        if reply.message.lacks:
            self._repeat(reply.message.lacks)

    def _repeat(self, step: int) -> None:
        """Send once more what the server lacks of the push of a step. Its line may have broken, and the thread that
        would notice waits for another server, where nobody gets an answer before this one has the push."""
        with self._lock:
            frames = [each for each in self._under_way.values() if _is_push_of(step, each)]
        if frames and (self._repeating is None or not self._repeating.is_alive()):
            name = f"fleet-repeat-{self._worker}-{self.endpoint}"
            self._repeating = threading.Thread(target=self._send_each, args=(frames,), name=name, daemon=True)
            self._repeating.start()

    def _send_each(self, frames: Sequence[Frame]) -> None:
        """Send requests for the answers to which somebody else waits, or asks again."""
        for frame in frames:
            with contextlib.suppress(TransportError, FleetError):
                self._channel.start(frame.kept(), self.deadline_s).result()

    def _log_absent_workers(self, absent: str) -> None:
        """Log from time to time for whom a request of this worker waits, while the job is not complete."""
        with self._lock:
            waiting = bool(absent and self._under_way) and self._logs_absent
        if not waiting:
            self._wait = None
            return
        self._wait = self._wait or Wait(self._clock, self._settings.startup_deadline_s)
        if self._wait.is_due():
            _log.warning("worker %d waits for %s, %.0f s so far", self._worker, absent, self._wait.so_far_s)

    def _heard(self) -> None:
        self._last_heard = self._clock.now()

    def _silence_error(self, silent_s: float) -> DeadlineError:
        return DeadlineError(
            f"the server at {self.endpoint} is silent",
            where=f"worker {self._worker}",
            expected=f"a sign of life within {self._settings.rpc_deadline_s:g} s (FLAGS_rpc_deadline)",
            got=f"none for {silent_s:.1f} s",
            todo="Look at the server's log and at the network between the two.",
        )

    def fail(self, error: FleetError) -> None:
        """End the connection, unless it has ended before: everybody who waits for an answer, or asks later, gets this
        error."""
        with self._lock:
            self._failure = self._failure or error
            under_way = list(self._under_way)
        for call in under_way:
            call.cancel()

    def hear_the_end(self, error: FleetError) -> None:
        """Take from a server that the job is over: other threads of this worker may ask others, which have gone."""
        self.fail(error)
        if self.failure is error:  # and the job has not moved, nor has this been closed
            self.when_over(error)

    # ---------------------------------------------------------------- for PendingRequest

    def send(self, frame: Frame, what: str, ahead: bool) -> Call:
        nbytes = self._checked_size(frame, what)
        if self.failure is None:
            call = self._channel.start(frame, ahead=ahead)
            with self._lock:
                if self._failure is None:
                    self._under_way[call] = frame
                    self.sent_bytes += nbytes
                    return call
            _give_up(call)
        raise self.reported_failure()

    def _checked_size(self, frame: Frame, what: str) -> int:
        """Return the size of a frame. A server would hang up in the middle of a request that is too large for it."""
        most, nbytes = self._settings.security.max_message_bytes, frame.nbytes
        if nbytes > most:
            raise ConfigurationError(
                "a request is larger than a message may be",
                where=f"worker {self._worker}, {what}",
                expected=f"at most {most >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
                got=f"{nbytes / (1 << 20):.1f} MiB",
                todo="Raise FLEET_MAX_MESSAGE_MB for every process, or use more servers.",
            )
        return nbytes

    def end(self, call: Call) -> None:
        """Note that nobody waits for this call any more."""
        with self._lock:
            self._under_way.pop(call, None)

    @property
    def failure(self) -> FleetError | None:
        with self._lock:
            return self._failure

    @property
    def is_over(self) -> bool:
        """Say whether the job has ended for this connection; one of which only the servers are others goes on."""
        return not isinstance(self.failure, ServersMovedError | None)

    def reported_failure(self) -> FleetError:
        """Return what ended this connection, to be raised to the user."""
        assert self._failure is not None
        self.reported = self.is_over
        return self._failure.again()

    def answered(self, reply: Frame) -> Frame:
        """Check a reply to the user's request; a reply that says that the job is over ends the connection."""
        self._heard()
        with self._lock:
            self.received_bytes += reply.nbytes
        try:
            return raise_if_error(reply)
        except FleetError as error:
            if not (error.ends_job or isinstance(error, FATAL)):
                raise
            self.hear_the_end(error)
            if self.failure is not error:  # what has ended the connection before is why the job is over
                raise self.reported_failure() from None
            self.reported = True
            raise

    @property
    def is_joined(self) -> bool:
        return self._heartbeat is not None

    def heard_since(self, instant: float) -> bool:
        return self._last_heard >= instant

    @property
    def misses_heartbeats(self) -> bool:
        return self._clock.now() - self._last_heard > MISSED_BEATS * self._settings.heartbeat_s

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def retry_times(self) -> int:
        return self._settings.rpc_retry_times

    def broken_error(self, what: str, attempts: int, error: TransportError) -> FleetError:
        return DeadlineError(
            f"the server at {self.endpoint} keeps dropping a request",
            where=f"worker {self._worker}, {what}",
            expected="an answer",
            got=f"{error}, {attempts} times (FLAGS_rpc_retry_times={self._settings.rpc_retry_times})",
            todo="Look at the server's log.",
        )


def _is_push_of(step: int, frame: Frame) -> bool:
    message = frame.message
    return bool(message.WhichOneof("kind") in ("part", "push") and message.step == step)


def _give_up(call: Call) -> None:
    """Cancel a call whose reply nobody wants any more."""
    call.cancel()
    with contextlib.suppress(TransportError, FleetError):
        call.result()  # what the network keeps for the call goes with its end


class PendingRequest:
    """Carries a request under way. Repeating it is safe: a server answers a step it already knows without applying it
    again.

    While the server is silent the request is repeated until heartbeats give the server up; if it keeps breaking
    although the server is heard, it is repeated ``FLAGS_rpc_retry_times`` times.
    """

    def __init__(self, connection: Connection, frame: Frame, what: str, ahead: bool) -> None:
        self._connection = connection
        self._frame = frame
        self._what = what
        self._call = connection.send(frame, what, ahead)

    def abandon(self) -> None:
        _give_up(self._call)
        self._connection.end(self._call)

    def send(self) -> None:
        """Let the request leave. ``result`` does so too, but of several requests under way all should leave first."""
        self._call.send()

    def result(self) -> Frame:
        """Wait for the reply. Raise an error that the server sent, or whatever ended the connection."""
        connection = self._connection
        retries = 0
        broken_at = connection.clock.now()
        while True:
            call = self._call
            try:
                reply = call.result()
            except TransportError as error:
                if connection.failure is not None:
                    raise connection.reported_failure() from None
                # Counted from one break to the next: many breaks fit between two heartbeats. Once heartbeats are missed
                # the server has been away, and one that has come back may be away again.
                retries = 0 if connection.misses_heartbeats else retries + connection.heard_since(broken_at)
                broken_at = connection.clock.now()
                if retries > connection.retry_times:
                    raise connection.broken_error(self._what, retries, error) from None
                connection.clock.sleep(RETRY_PAUSE_S)
                self._call = connection.send(self._frame, self._what, False)
            else:
                return connection.answered(reply)
            finally:
                connection.end(call)


def inquire_all(asked: Sequence[tuple[Connection, Frame]]) -> list[Frame | None]:
    """Return the answers to short questions that are asked at once, as far as there are any."""
    calls: list[Call | None] = []
    for connection, frame in asked:
        try:
            calls.append(connection._channel.start(frame, FAREWELL_S))
        except (TransportError, FleetError):
            calls.append(None)
    answers: list[Frame | None] = []
    for call in calls:
        try:
            answers.append(None if call is None else raise_if_error(call.result()))
        except (TransportError, FleetError):
            answers.append(None)
    return answers


class Connections:
    """Connects the worker to all servers, and asks them together."""

    def __init__(self, by_server: Sequence[Connection], progress: Progress, claim: Callable[[str], object]) -> None:
        """``claim`` notes, with a reason, that this worker is the cause of its job's end."""
        #: one list as long as this lives, with other connections in it when the job has moved to other servers
        self.by_server: list[Connection] = []
        self.replace(by_server)
        #: how often the job had moved when it came to these servers, as far as one of them has said
        self.moves = 0
        self._progress = progress
        self._claim = claim

    def replace(self, by_server: Sequence[Connection]) -> list[Connection]:
        """Connect to other servers from now on; return the connections that there were."""
        former, self.by_server[:] = [*self.by_server], by_server
        for connection in by_server:
            connection.when_over = self._fail_all
        return former

    def _fail_all(self, error: FleetError) -> None:
        for connection in self.by_server:
            connection.fail(error)

    def ask(self, what: str, at_once: int | None = None, *, step: int | None = None, **kind: object) -> list[Frame]:
        """Send the same request to every server, as ``Connection.request`` has it, about the last step or another."""
        step = self._progress.completed if step is None else step
        return self.ask_all(lambda _, connection: Frame(connection.request(step, **kind)), what, at_once)

    def ask_all(
        self,
        make: Callable[[int, Connection], Frame],
        what: str,
        at_once: int | None = None,
        *,
        first: int = 0,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Frame]:
        """Send one request to every server from the ``first`` one on: all under way at once, or ``at_once`` of them.
        ``meanwhile`` is called once, when the last of them are."""
        failure: FleetError | None = None
        replies = []
        numbered = list(enumerate(self.by_server))[first:]
        at_once = at_once or max(1, len(numbered))
        for start in range(0, len(numbered), at_once):
            some = numbered[start : start + at_once]
            pendings: list[PendingRequest] = []
            try:
                for server, connection in some:
                    pendings.append(connection.start(make(server, connection), what))
                for pending in pendings:
                    pending.send()
                if meanwhile is not None and start + at_once >= len(numbered):
                    meanwhile()
                with ProfilerRange("fleet.wait"):
                    for pending in pendings:
                        try:
                            replies.append(pending.result())
                        except FleetError as error:  # the others still get their answer
                            failure = failure or error
            except BaseException:  # interrupted: what nobody reads any more must hold nothing up
                for pending in pendings:
                    pending.abandon()
                raise
        if failure is not None:
            raise failure
        return replies

    def farewell(self, **word: object) -> None:
        """Send a last word to every server, whether it arrives or not."""
        for connection in self.by_server:
            connection.farewell(Frame(connection.request(self._progress.completed, **word)))

    def claim_cause(self, reason: str) -> None:
        """Note that this worker ends the job, unless it follows the failure of another one."""
        ends = [each.failure for each in self.by_server if each.is_over]
        if self._is_joined and all(isinstance(end, _OWN_FINDINGS) and not end.ends_job for end in ends):
            self._claim(reason)

    def end_job(self, error: FleetError) -> None:
        """End the job, as this worker has found that it cannot go on: the others must not go on either, and other
        threads of this worker must not wait for servers that end now."""
        self.claim_cause(f"{type(error).__name__}: {error}")  # before anybody hears of it
        for connection in self.by_server:  # before servers answer other threads that the job was ended by somebody
            connection.fail(error)
        self.farewell(abort=pb.Abort(reason=str(error)))

    def note_reported(self) -> None:
        """Note that the user knows what ended any of them."""
        for connection in self.by_server:
            connection.reported = connection.reported or connection.is_over

    @property
    def round_trip_s(self) -> float:
        """Return how long a request takes to the server that is furthest away and back."""
        return max((each.round_trip_s for each in self.by_server), default=0.0)

    @property
    def wanted_servers(self) -> tuple[str, ...]:
        """Return the servers that this worker is to move the job to, if one of them has heard of such."""
        return next((each.wanted_servers for each in self.by_server if each.wanted_servers), ())

    @property
    def reported(self) -> bool:
        """Say whether the user knows what ended one of them."""
        return any(connection.reported for connection in self.by_server)

    @property
    def failure(self) -> FleetError | None:
        """Return what ended one of them, if it is known."""
        return next((each.failure for each in self.by_server if each.failure is not None), None)

    @property
    def is_healthy(self) -> bool:
        """Say whether this worker is in the job, and has heard of no end of it."""
        return self._is_joined and not any(connection.is_over for connection in self.by_server)

    @property
    def _is_joined(self) -> bool:
        return any(connection.is_joined for connection in self.by_server)

    @property
    def sent_bytes(self) -> int:
        return sum(connection.sent_bytes for connection in self.by_server)

    @property
    def received_bytes(self) -> int:
        return sum(connection.received_bytes for connection in self.by_server)

    def close(self) -> None:
        for connection in self.by_server:
            connection.close()
