"""A worker's connection to a server: it waits for who is alive, gives up on who is silent, and repeats what broke."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from faults import Action, Fault, FaultyNetwork
from harness import until
from patience import PATIENCE_S

from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    DeadlineError,
    DuplicateWorkerError,
    FleetError,
    JobAbortedError,
    PlanMismatchError,
    ProtocolError,
    ServerLostError,
)
from fleet.ps.server.members import QUIET_BEATS
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import BrokenCall, Call, Listener, Network, Respond, TransportError
from fleet.ps.wire.wire_errors import error_reply
from fleet.ps.worker.connection import Connection, PendingRequest

SETTINGS = ProcessSettings(heartbeat_s=0.02, rpc_deadline_s=0.3, startup_deadline_s=0.5, rpc_retry_times=3)
#: For tests in which nobody falls silent, though the machine may be slow.
PATIENT = replace(SETTINGS, rpc_deadline_s=PATIENCE_S, startup_deadline_s=PATIENCE_S)
WORKER = 3


class Server:
    """Answers as it is told; counts what it was asked and applies every step once, as real servers do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: list[tuple[str, int]] = []
        self.applied: list[int] = []
        self.parked: list[tuple[int, Respond]] = []
        self.parks = False
        self.failure: FleetError | None = None

    def __call__(self, frame: Frame, respond: Respond) -> None:
        request = frame.message
        kind = request.WhichOneof("kind")
        with self.lock:
            self.asked.append((kind, request.step))
            if self.failure is not None:
                raise self.failure
            if kind == "push" and request.step not in self.applied:
                self.applied.append(request.step)
            if kind in ("push", "pull") and self.parks:
                self.parked.append((request.step, respond))
                return
        respond(Frame(pb.Reply(version=request.step, initialized=True)))

    def count(self, kind: str) -> int:
        with self.lock:
            return sum(asked == kind for asked, _ in self.asked)

    def heard_beyond(self, beats: int) -> bool:
        return self.count("beat") > beats

    def release(self) -> None:
        with self.lock:
            parked, self.parked = self.parked, []
        for step, respond in parked:
            respond(Frame(pb.Reply(version=step)))


class Line:
    """A server that may be up, faults on the way to it, and clients that are closed after the test."""

    def __init__(self, inner: Network, endpoint: Endpoint) -> None:
        self.network = FaultyNetwork(inner)
        self.endpoint = endpoint
        self.server = Server()
        self.listener: Listener | None = None
        self.clients: list[Connection] = []
        self.pool = ThreadPoolExecutor(8)

    def up(self) -> None:
        self.listener = self.network.listen(self.endpoint, self.server)

    def down(self) -> None:
        if self.listener is not None:
            self.listener.close()

    def client(self, settings: ProcessSettings = SETTINGS) -> Connection:
        client = Connection(self.endpoint, self.network, settings, SystemClock(), WORKER, 77)
        self.clients.append(client)
        return client

    def joined(self, settings: ProcessSettings = PATIENT) -> Connection:
        """A client that has said hello and has a pulse."""
        if self.listener is None:
            self.up()
        client = self.client(settings)
        client.hello(hello(client), wait=True)
        client.start_heartbeat()
        return client

    def waiting(self, pending: PendingRequest) -> Future[Frame]:
        return self.pool.submit(pending.result)

    def parked(self, client: Connection, step: int = 7) -> Future[Frame]:
        """A push that has arrived and is not answered."""
        self.server.parks = True
        future = self.waiting(push(client, step))
        until(lambda: self.server.parked)
        return future

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.down()
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(LoopbackNetwork(), Endpoint("server", 1))
    yield line
    line.close()


@pytest.fixture(params=["loopback", "grpc"])
def any_line(request: pytest.FixtureRequest) -> Iterator[Line]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
    line = Line(LoopbackNetwork() if request.param == "loopback" else GrpcNetwork(4), endpoint)
    yield line
    line.close()


def hello(client: Connection) -> Frame:
    return Frame(client.request(0, hello=pb.Hello(server=1)))


def push(client: Connection, step: int) -> PendingRequest:
    return client.start(Frame(client.request(step, push=pb.Push())), f"push of step {step}")


# ---------------------------------------------------------------------------------------------- hello


def test_a_server_that_never_comes_up(any_line: Line) -> None:
    client = any_line.client()
    with pytest.raises(DeadlineError) as caught:
        client.hello(hello(client), wait=True)
    assert isinstance(caught.value, TimeoutError)
    text = str(caught.value)
    assert f"the server at {any_line.endpoint} did not come up" in text
    assert f"worker {WORKER}" in text
    assert "within 0.5 s" in text
    assert str(caught.value.got).startswith("none in ")
    assert caught.value.todo


def test_a_server_that_is_there_and_never_answers(line: Line) -> None:
    line.network.add(Fault(Action.SILENCE, kind="hello", times=None))
    line.up()
    client = line.client()
    with pytest.raises(DeadlineError, match=r"server:1 did not come up.*no reply within"):
        client.hello(hello(client), wait=True)
    assert line.server.asked == []


def test_a_server_whose_machine_stops_before_it_answers(any_line: Line) -> None:
    """When it is there again it knows nothing of the hello, and nobody tells its worker."""
    any_line.network.add(Fault(Action.SILENCE, kind="hello"))
    any_line.up()
    client = any_line.client(replace(PATIENT, rpc_deadline_s=0.3))
    future = any_line.pool.submit(client.hello, hello(client), wait=True)
    assert future.result(PATIENCE_S / 2).message.initialized
    assert any_line.server.asked == [("hello", 0)]


@pytest.mark.parametrize("wait", [True, False])
def test_a_server_that_takes_longer_than_an_attempt(line: Line, wait: bool) -> None:
    class Slow(Server):
        def __call__(self, frame: Frame, respond: Respond) -> None:
            if frame.message.WhichOneof("kind") != "hello":
                super().__call__(frame, respond)
                return
            answer = threading.Timer(0.5, super().__call__, (frame, respond))
            answers.append(answer)
            answer.start()

    answers: list[threading.Timer] = []
    line.server = Slow()
    line.up()
    client = line.client(replace(PATIENT, rpc_deadline_s=0.2))
    try:
        assert client.hello(hello(client), wait=wait).message.initialized
    finally:
        for answer in answers:
            answer.join()
    assert wait or len(answers) == 1


class Ticking:
    """A clock on which only waiting takes time."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_no_hello_waits_beyond_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """Early ones break at once, the last one meets silence: all of them together have the deadline."""
    clock = Ticking()

    class Channel:
        def start(self, _: Frame, timeout_s: float | None = None, *, urgent: bool = False) -> Call:
            assert timeout_s is not None
            if clock.now() > 5:
                clock.sleep(timeout_s)
            return BrokenCall("unavailable")

        def close(self) -> None:
            pass

    class Nowhere(LoopbackNetwork):
        def connect(self, endpoint: Endpoint) -> Any:
            return Channel()

    settings = replace(SETTINGS, rpc_deadline_s=20.0, startup_deadline_s=10.0)
    client = Connection(Endpoint("server", 1), Nowhere(), settings, clock, WORKER, 77)
    with pytest.raises(DeadlineError, match=r"none in 10\.0 s"):
        client.hello(hello(client), wait=True)
    told = [message for message in caplog.messages if "waiting for the server at server:1" in message]
    assert [message.partition(", ")[2][:4] for message in told] == ["3 s "]


def test_a_server_that_is_killed_while_the_place_of_a_dead_process_is_asked_for() -> None:
    """When it is there again, it waits for the dead one's heartbeats as long as any server does."""
    clock = Ticking()
    taken = DuplicateWorkerError("there is already a worker 3")

    class Answer(BrokenCall):
        def result(self) -> Frame:
            return error_reply(taken) if clock.now() < 5 + QUIET_BEATS else Frame(pb.Reply(version=8))

    class Channel:
        def start(self, _: Frame, timeout_s: float | None = None, *, urgent: bool = False) -> Call:
            return BrokenCall("unavailable") if 2 < clock.now() < 5 else Answer("")

        def close(self) -> None:
            pass

    class Restarting(LoopbackNetwork):
        def connect(self, endpoint: Endpoint) -> Any:
            return Channel()

    client = Connection(Endpoint("server", 1), Restarting(), ProcessSettings(heartbeat_s=1.0), clock, WORKER, 77)
    assert client.hello(hello(client), wait=True).message.version == 8
    taken_for_good = Connection(
        Endpoint("server", 1), Restarting(), ProcessSettings(heartbeat_s=0.1), clock, WORKER, 78
    )
    clock.time = 5.5
    with pytest.raises(DuplicateWorkerError):
        taken_for_good.hello(hello(client), wait=True)


def test_nobody_is_waited_for_where_the_strategy_says_so(line: Line) -> None:
    settings = ProcessSettings(startup_deadline_s=10 * PATIENCE_S)
    client = line.client(settings)
    future = line.pool.submit(client.hello, hello(client), wait=False)
    with pytest.raises(DeadlineError, match="did not come up"):
        future.result(PATIENCE_S)


def test_a_server_that_comes_up_late(any_line: Line) -> None:
    client = any_line.client(PATIENT)
    any_line.network.add(Fault(Action.DROP_REQUEST, kind="hello", times=2))
    future = any_line.pool.submit(client.hello, hello(client), wait=True)
    until(lambda: len(any_line.network.struck) == 2)
    assert not future.done()
    any_line.up()
    assert future.result(PATIENCE_S).message.initialized
    assert any_line.server.asked == [("hello", 0)]


def test_a_hello_that_is_refused_is_not_repeated(line: Line) -> None:
    line.server.failure = PlanMismatchError("another model", expected="(3, 4)", got="(3, 5)")
    line.up()
    client = line.client()
    with pytest.raises(PlanMismatchError, match="another model"):
        client.hello(hello(client), wait=True)
    assert line.server.asked == [("hello", 0)]


def test_who_asks_is_in_every_request(line: Line) -> None:
    request = line.client().request(5, pull=pb.Pull(version=4))
    assert (request.worker, request.incarnation, request.step, request.pull.version) == (WORKER, 77, 5, 4)


# ---------------------------------------------------------------------------------------------- requests that break


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY, Action.DUPLICATE, Action.DELAY])
def test_a_request_is_answered_once_whatever_happens_to_it(any_line: Line, action: Action) -> None:
    any_line.network.add(Fault(action, worker=WORKER, kind="push", step=2, delay_s=0.1))
    client = any_line.joined()
    for step in (1, 2, 3):
        assert any_line.waiting(push(client, step)).result(PATIENCE_S).message.version == step
    assert any_line.server.applied == [1, 2, 3]
    assert any_line.network.struck == [(action, "push", 2)]
    repeated = action in (Action.DROP_REPLY, Action.DUPLICATE)
    assert any_line.server.count("push") == (4 if repeated else 3)


def test_a_cut_line_that_heals(any_line: Line) -> None:
    client = any_line.joined()
    future = any_line.parked(client)
    any_line.network.cut(any_line.endpoint)
    beats = any_line.server.count("beat")
    until(lambda: not any_line.network._under_way[any_line.endpoint])
    any_line.server.parks = False
    any_line.network.heal(any_line.endpoint)
    assert future.result(PATIENCE_S).message.version == 7
    assert any_line.server.applied == [7]
    until(lambda: any_line.server.count("beat") > beats)


def test_a_server_that_restarts_within_the_deadline(any_line: Line) -> None:
    client = any_line.joined()
    future = any_line.parked(client)
    any_line.down()
    any_line.server.parks = False
    any_line.up()
    assert future.result(PATIENCE_S).message.version == 7


@pytest.mark.parametrize("action", [Action.DROP_REQUEST, Action.DROP_REPLY])
@pytest.mark.parametrize("retry_times", [0, 2])
def test_a_request_that_keeps_breaking_although_the_server_is_heard(
    any_line: Line, action: Action, retry_times: int
) -> None:
    any_line.network.add(Fault(action, kind="push", times=None))
    client = any_line.joined(replace(PATIENT, rpc_retry_times=retry_times))
    with pytest.raises(DeadlineError) as caught:
        any_line.waiting(push(client, 7)).result(PATIENCE_S)
    text = str(caught.value)
    assert f"the server at {any_line.endpoint} keeps dropping a request" in text
    assert "push of step 7" in text
    assert f"FLAGS_rpc_retry_times={retry_times}" in text
    assert len(any_line.network.struck) >= retry_times + 1
    # The line itself is good: the next request goes through.
    any_line.network.clear()
    assert any_line.waiting(push(client, 8)).result(PATIENCE_S).message.version == 8


def test_retries_are_counted_however_rare_heartbeats_are(line: Line) -> None:
    """A break takes no time and falls between two heartbeats; it counts all the same."""
    line.network.add(Fault(Action.DROP_REQUEST, kind="push", times=None))
    client = line.joined(replace(PATIENT, heartbeat_s=0.5, rpc_retry_times=1))
    with pytest.raises(DeadlineError, match="keeps dropping"):
        line.waiting(push(client, 7)).result(PATIENCE_S)


def test_as_many_breaks_as_are_allowed(line: Line) -> None:
    line.network.add(Fault(Action.DROP_REPLY, kind="push", times=3))
    client = line.joined()
    assert line.waiting(push(client, 7)).result(PATIENCE_S).message.version == 7
    assert line.server.count("push") == 4


def test_errors_of_the_server_are_raised_and_not_repeated(line: Line) -> None:
    line.server.failure = ProtocolError("no such block", where="here", todo="Look.")
    line.up()
    client = line.client()
    with pytest.raises(ProtocolError, match=r"^no such block; at here"):
        push(client, 7).result()
    assert line.server.count("push") == 1


def test_a_reply_that_is_garbage(line: Line) -> None:
    class Garbage:
        def result(self) -> Frame:
            raise ProtocolError("a message is not a frame of this protocol")

        def cancel(self) -> None:
            pass

    client = line.client()
    client._channel.start = lambda *_, **__: Garbage()  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="not a frame"):
        push(client, 7).result()
    assert not client._under_way


# ---------------------------------------------------------------------------------------------- silence


def test_a_silent_server_is_given_up_on(any_line: Line, caplog: pytest.LogCaptureFixture) -> None:
    client = any_line.joined(SETTINGS)
    future = any_line.parked(client)
    any_line.network.add(Fault(Action.SILENCE, times=None))
    with pytest.raises(DeadlineError) as caught:
        future.result(PATIENCE_S)
    text = str(caught.value)
    assert f"the server at {any_line.endpoint} is silent" in text
    assert f"worker {WORKER}" in text
    assert "within 0.3 s (FLAGS_rpc_deadline)" in text
    assert str(caught.value.got).startswith("none for ")
    # Long before it has been said that it may come to this.
    notices = [message for message in caplog.messages if f"server {any_line.endpoint} has been silent for" in message]
    assert notices
    assert all("after 0.3 s (FLAGS_rpc_deadline) it is given up on" in notice for notice in notices)
    assert re.search(r"silent for 0\.[012]", notices[0])
    # It stays given up on: the next request says so at once.
    with pytest.raises(DeadlineError, match="is silent"):
        push(client, 8)


def test_a_server_that_dies_is_given_up_on(any_line: Line) -> None:
    client = any_line.joined(SETTINGS)
    future = any_line.parked(client)
    any_line.down()
    with pytest.raises(DeadlineError, match=f"{any_line.endpoint} is silent"):
        future.result(PATIENCE_S)


def test_a_server_that_is_cut_off_is_given_up_on(any_line: Line) -> None:
    client = any_line.joined(SETTINGS)
    any_line.network.add(Fault(Action.CUT, kind="push"))
    with pytest.raises(DeadlineError, match=f"{any_line.endpoint} is silent"):
        any_line.waiting(push(client, 7)).result(PATIENCE_S)


def test_a_parked_call_outlives_the_deadline(any_line: Line) -> None:
    """The server is heard; how long a round takes is nobody's failure."""
    deadline_s = 0.8
    client = any_line.joined(replace(SETTINGS, rpc_deadline_s=deadline_s))
    parked_at = time.monotonic()
    future = any_line.parked(client)
    beats = any_line.server.count("beat")
    until(lambda: time.monotonic() - parked_at > 2 * deadline_s and any_line.server.count("beat") > beats + 5)
    assert not future.done()
    any_line.server.release()
    assert future.result(PATIENCE_S).message.version == 7
    assert any_line.server.count("push") == 1


def test_a_heartbeat_that_is_lost_is_no_silence(line: Line) -> None:
    client = line.joined()
    future = line.parked(client)
    line.network.add(Fault(Action.DROP_REPLY, kind="beat", times=3))
    until(lambda: len(line.network.struck) == 3)
    line.server.release()
    assert future.result(PATIENCE_S).message.version == 7
    assert client.failure is None


@pytest.mark.parametrize(
    "error",
    [
        ServerLostError("this server does not know the worker's job", where="server:1", todo="Start again."),
        JobAbortedError("worker 1 failed and ended the job", got="ValueError: no"),
    ],
)
def test_what_a_heartbeat_tells_reaches_a_parked_call(any_line: Line, error: FleetError) -> None:
    client = any_line.joined()
    future = any_line.parked(client)
    any_line.server.failure = error
    with pytest.raises(type(error)) as caught:
        future.result(PATIENCE_S)
    assert str(caught.value) == str(error)
    with pytest.raises(type(error)):
        push(client, 8)


def test_several_calls_all_learn_of_the_end(line: Line) -> None:
    client = line.joined()
    line.server.parks = True
    futures = [line.waiting(push(client, step)) for step in range(5)]
    until(lambda: len(line.server.parked) == 5)
    line.server.failure = JobAbortedError("over")
    for future in futures:
        with pytest.raises(JobAbortedError, match="over"):
            future.result(PATIENCE_S)
    assert not client._under_way


# ---------------------------------------------------------------------------------------------- leaving


def pulses() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fleet-heartbeat")]


def test_close_leaves_no_thread_and_no_waiter(any_line: Line) -> None:
    client = any_line.joined()
    client.start_heartbeat()  # a second time does nothing
    assert len(pulses()) == 1
    future = any_line.parked(client)
    client.close()
    assert pulses() == []
    with pytest.raises(FleetError, match="closed"):
        future.result(PATIENCE_S)
    with pytest.raises(FleetError, match="closed"):
        push(client, 8)
    client.close()


def test_close_while_the_server_is_silent(any_line: Line) -> None:
    client = any_line.joined(replace(PATIENT, heartbeat_s=PATIENCE_S / 4))
    any_line.network.add(Fault(Action.SILENCE, times=None))
    future = any_line.waiting(push(client, 7))
    until(lambda: any_line.network.struck)
    any_line.pool.submit(client.close).result(PATIENCE_S)
    assert pulses() == []
    with pytest.raises(FleetError, match="closed"):
        future.result(PATIENCE_S)


def test_closing_again_and_again_under_a_fast_pulse(any_line: Line) -> None:
    """A heartbeat that starts on a closed channel must not end in a traceback of the pulse."""
    for _ in range(30):
        client = any_line.joined(replace(PATIENT, heartbeat_s=0.001))
        beats = any_line.server.count("beat")
        until(partial(any_line.server.heard_beyond, beats))
        client.close()
    assert pulses() == []


def test_a_line_without_a_pulse_closes(line: Line) -> None:
    client = line.client()
    client.close()
    with pytest.raises(FleetError, match="closed"):
        push(client, 1)


@pytest.mark.parametrize("state", ["up", "down", "failing"])
def test_a_farewell_never_fails(line: Line, state: str) -> None:
    if state != "down":
        line.up()
    if state == "failing":
        line.server.failure = JobAbortedError("over")
    client = line.client()
    client.farewell(Frame(client.request(3, abort=pb.Abort(reason="no"))))
    assert line.server.asked == ([] if state == "down" else [("abort", 3)])


# ---------------------------------------------------------------------------------------------- the faults themselves


def outcome(call: Call) -> Any:
    try:
        return call.result().message.version
    except TransportError as error:
        return str(error)


def test_faults_strike_whom_they_name(any_line: Line) -> None:
    any_line.up()
    any_line.network.add(
        Fault(Action.DROP_REQUEST, endpoint=any_line.endpoint, worker=1, kind="pull", step=5, skip=1, times=2),
        Fault(Action.DROP_REQUEST, endpoint=Endpoint("elsewhere", 1), times=None),
    )
    channel = any_line.network.connect(any_line.endpoint)

    def ask(worker: int, step: int) -> Any:
        return outcome(channel.start(Frame(pb.Request(worker=worker, step=step, pull=pb.Pull())), PATIENCE_S))

    dropped = "the request was dropped"
    assert [ask(1, 5) for _ in range(4)] == [5, dropped, dropped, 5]
    assert [ask(2, 5), ask(1, 6)] == [5, 6]
    any_line.network.cut(any_line.endpoint)
    assert "cut off" in ask(1, 7)
    any_line.network.heal(any_line.endpoint)
    assert ask(1, 7) == 7
    any_line.network.add(Fault(Action.SILENCE))
    silent = channel.start(Frame(pb.Request(step=1, pull=pb.Pull())), 0.05)
    assert outcome(silent) == "no reply within 0.05 s"
    channel.close()


def test_a_delayed_request_is_overtaken(any_line: Line) -> None:
    any_line.up()
    any_line.network.add(Fault(Action.DELAY, step=1, delay_s=0.2))
    channel = any_line.network.connect(any_line.endpoint)
    calls = [channel.start(Frame(pb.Request(step=step, pull=pb.Pull())), PATIENCE_S) for step in (1, 2)]
    assert [outcome(call) for call in reversed(calls)] == [2, 1]
    assert any_line.server.asked == [("pull", 2), ("pull", 1)]
    channel.close()
