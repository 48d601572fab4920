"""Asks all servers what they have and see, comes to a choice, and tells them: every process of a job does so, to go on
where the job was.

Servers ask each other as workers ask them, and each process asks for itself. It does not matter who is first, and all
wait only until every server is there. A server that the others do not let in, or that would not know them for want of a
certificate, is told by the workers; one that has state of its own goes on from that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from fleet.base.clock import Clock
from fleet.base.cluster import Assignment
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.resume_choice import (
    Choice,
    Resumed,
    Seen,
    choose,
    passed_by,
    refuse_apart,
    step_of_server,
    step_of_worker,
    steps_apart,
    without_state,
)
from fleet.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    ServerBusyError,
    ServerLostError,
)
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, Channel, Network, TransportError
from fleet.ps.wire.wire_errors import raise_if_error

_log = logging.getLogger("fleet")

RETRY_PAUSE_S = 0.2
#: After this much waiting, and then again and again, the log says who is waited for.
NOTICE_S = 10.0
#: A question without an answer is asked again: the way to a server may have been lost.
PATIENCE_S = 60.0

#: A server that knows of no way on stays so long, for the others to find that out and not to wait for it.
LINGER_S = 2.0

#: By server, why there is no answer yet.
Missing = dict[int, Exception]


class OwnServer(Protocol):
    """Names what is needed of the server of a process that serves."""

    @property
    def chosen(self) -> Choice | None: ...

    def ask(self, request: pb.Request) -> Frame: ...


def resume(
    assignment: Assignment,
    network: Network,
    settings: ProcessSettings,
    clock: Clock,
    root: str,
    *,
    strict: bool,
    own: OwnServer | None,
    former: int,
) -> Resumed:
    """Find out where the job goes on from, the same for all of its processes. ``root`` is where its checkpoints are;
    ``own`` is this process's server. ``former`` is the incarnation by which servers know who has left the job that
    this process was in before."""
    questions = _Questions(assignment, network, own)
    look = pb.Look(root=root, job_id=settings.job_id, by_server=own is not None, former=former)
    began = noticed = clock.now()
    try:
        seen: dict[int, Seen] = {}
        earlier: list[Seen] | None = None
        while True:
            rest_s = began + settings.startup_deadline_s - clock.now()
            answers, missing = questions.ask(sorted(questions.everyone - seen.keys()), rest_s, look=look)
            seen.update((server, Seen.from_json(answer)) for server, answer in answers.items())
            if own is not None and own.chosen is not None:
                return Resumed(own.chosen.mark.step)
            if own is not None and missing and _is_barred(missing) and (mine := seen[assignment.index].held):
                return Resumed(mine.step)
            if not missing:
                # Servers that were asked first may have joined the job, or gone on in it, before the others were asked.
                now_seen = _in_order(seen)
                if earlier is None and (without_state(now_seen) or steps_apart(now_seen)):
                    earlier = now_seen
                    seen.clear()
                    continue
                if earlier is not None:
                    refuse_apart(assignment.servers, earlier, now_seen)
                choice, missing = _agree(questions, assignment, now_seen, strict, root, rest_s)
                if not missing:
                    break
                seen.clear()
            now = clock.now()
            if now - began >= settings.startup_deadline_s:
                raise _did_not_come(assignment, missing, settings.startup_deadline_s)
            if now - noticed >= NOTICE_S:
                noticed = now
                _log.warning("resume_from: waiting for %s, %.0f s so far", _named(assignment, missing), now - began)
            clock.sleep(RETRY_PAUSE_S)
    except ServerLostError:
        if own is not None:
            clock.sleep(LINGER_S)
        raise
    finally:
        questions.close()
    if own is not None:
        return step_of_server(_in_order(seen), choice, assignment.index)
    return step_of_worker(_in_order(seen), choice)


def _agree(
    questions: _Questions, assignment: Assignment, seen: list[Seen], strict: bool, root: str, rest_s: float
) -> tuple[Choice | None, Missing]:
    """Return what the job goes on from, after telling all servers; None if they have it already."""
    choice = choose(assignment.servers, seen, strict=strict)
    if choice is None:
        return None, {}
    for newer in passed_by(assignment.servers, seen, choice):
        _log.warning("resume_from goes on from %s: %s", choice.mark, newer)
    for servers in ([0], sorted(questions.everyone - {0})):
        mark = choice.mark
        # A first server that has chosen holds to its choice, and logs which process was called with another value.
        is_heard = servers == [0] and seen[0].chosen is not None
        message = pb.Choose(step=mark.step, id=mark.id, strict=strict if is_heard else choice.strict, root=root)
        answers, missing = questions.ask(servers, rest_s, choose=message)
        if missing:
            return None, missing
        held = {server: Choice.from_json(answer) for server, answer in answers.items()}
        if servers == [0]:
            choice = held[0]
        elif any(each != choice for each in held.values()):
            raise CheckpointError(
                "the servers do not go on from the same checkpoint",
                expected=choice.mark,
                got=", ".join(f"{assignment.servers[server]} from {each.mark}" for server, each in held.items()),
                todo="Start the whole job again.",
            )
    if choice.strict is not strict:
        raise ConfigurationError(
            "resume_from was called with different values of strict",
            where=str(assignment),
            expected=f"strict={choice.strict}, as another process has it",
            got=f"strict={strict}",
            todo="Call it with the same arguments on every role, and start the whole job again.",
        )
    return choice, {}


class _Questions:
    """Asks the servers questions, all under way at once."""

    def __init__(self, assignment: Assignment, network: Network, own: OwnServer | None) -> None:
        self.everyone = frozenset(range(len(assignment.servers)))
        self._assignment = assignment
        self._network = network
        self._own = own
        self._channels: dict[int, Channel] = {}

    def ask(self, servers: Iterable[int], rest_s: float, **kind: object) -> tuple[dict[int, str], Missing]:
        """Ask some servers the same question; return what they answer, and who does not."""
        worker = 0 if self._own is not None else self._assignment.index
        request = pb.Request(worker=worker, **kind)  # type: ignore[arg-type]
        answers: dict[int, str] = {}
        missing: Missing = {}
        calls: dict[int, Call] = {}
        for server in servers:
            if self._own is not None and server == self._assignment.index:
                answers[server] = self._own.ask(request).message.about
                continue
            try:
                channel = self._channel(server)
            except FleetError as error:  # it has nothing by which it would know the others, or they it
                if self._own is None:
                    raise
                missing[server] = error
            else:
                calls[server] = channel.start(Frame(request), min(PATIENCE_S, max(rest_s, RETRY_PAUSE_S)))
        for server, call in calls.items():
            try:
                answers[server] = raise_if_error(call.result()).message.about
            except TransportError as error:
                missing[server] = error
            except ServerBusyError as error:
                missing[server] = error
            except AuthenticationError as error:
                if self._own is None:
                    raise
                missing[server] = error
        return answers, missing

    def _channel(self, server: int) -> Channel:
        if server not in self._channels:
            self._channels[server] = self._network.connect(self._assignment.servers[server])
        return self._channels[server]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _is_barred(missing: Missing) -> bool:
    """Say whether those who do not answer are there, and this process is not let in, or would not know them."""
    return all(isinstance(error, FleetError) and not isinstance(error, ServerBusyError) for error in missing.values())


def _in_order(seen: dict[int, Seen]) -> list[Seen]:
    return [seen[server] for server in sorted(seen)]


def _named(assignment: Assignment, missing: Missing) -> str:
    return ", ".join(f"server {server} ({assignment.servers[server]})" for server in sorted(missing))


def _did_not_come(assignment: Assignment, missing: Missing, deadline_s: float) -> DeadlineError:
    return DeadlineError(
        f"{_named(assignment, missing)} did not come",
        where=f"{assignment}, resume_from",
        expected=f"an answer of every server within {deadline_s:g} s (FLEET_STARTUP_DEADLINE_S)",
        got="; ".join(dict.fromkeys(str(error) for _, error in sorted(missing.items()))),
        todo="Start every server, check addresses and ports, and look at their logs.",
    )
