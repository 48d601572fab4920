"""Follows running servers: a source (source.py) of what they have, version by version.

Whoever follows is no member of the job. It asks all servers for one and the same version, a few steps ahead of where
they are, so that each can take it between two rounds; how far ahead goes by how fast the job is and how long an answer
takes. Several followers ask for the same versions, as they round them alike, and servers take these once for all. Where
versions mean nothing across servers, each gives what it has.

When the job moves to other servers those that there were say so, and where; there all begins anew.

The first time, and after an outage that was too long, all rows come as they are while the training goes on; what has
changed meanwhile, at one version, follows and makes the whole consistent. An update is told of when that is there, so
what came before it is kept until then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fleet.base.clock import Clock, SystemClock, Wait
from fleet.base.cluster import Endpoint
from fleet.errors import (
    ConfigurationError,
    DeadlineError,
    FleetError,
    PlanMismatchError,
    ProtocolError,
    ServerBusyError,
    ServerLostError,
    ServersMovedError,
)
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.plan.plan import Plan, make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import policy_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Call, Channel, Network, TransportError
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.serving.source import Piece, RowChanges, SourceDescription, Update, description_of, differences

_log = logging.getLogger("fleet.serving")

#: A question that has no answer after so long is asked again.
_PATIENCE_S = 10.0
#: And for an answer to a short question.
_SHORT_S = 2.0
#: How long servers wait for the version that was asked for; the training may pause before it.
_WAIT_S = 0.5
#: After a server was not there it is asked again so soon.
_RETRY_PAUSE_S = 0.1
#: For no longer the training is left alone after an update: a job that ends waits a little for whom it has heard.
_MOST_REST_S = 1.0
#: Steps of one job are counted over about so long to tell how fast it is.
_PACE_S = 0.2


class _Lapsed(Exception):
    """Says that a server does not know any more what has changed, and all begins anew."""


@dataclass
class _Progress:
    """Holds how far this follower is: the number of the load that it has of each server, 0 for none, and what has come
    since the last update."""

    numbers: list[int]
    is_whole: bool = True
    ahead: list[Piece] = field(default_factory=list)


class ServerSource:
    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        network: Network,
        clock: Clock | None = None,
        *,
        startup_s: float = 60.0,
        poll_s: float = 0.1,
    ) -> None:
        """``startup_s`` is how long the servers may take to have a model; ``poll_s`` how soon after an update the next
        one is asked for, at the soonest."""
        if not endpoints or len(set(endpoints)) != len(endpoints):
            raise ConfigurationError(
                "a follower needs every server of the job once",
                expected="host:port of each, in the order that the job has them",
                got=", ".join(map(str, endpoints)) or "none",
            )
        self._endpoints = tuple(endpoints)
        self._network = network
        self._channels: list[Channel] = [network.connect(endpoint) for endpoint in endpoints]
        self._clock = clock or SystemClock()
        self._startup_s, self._poll_s = startup_s, poll_s
        self._incarnation = secrets.randbits(64)
        self._plan: Plan | None = None
        self._described: SourceDescription | None = None
        self._layouts: list[DenseLayout] = []
        self._flats: list[dict[str, torch.Tensor]] = []
        self._progress = _Progress([0 for _ in endpoints])
        self._version = 0
        #: servers of which everything has come that will, with the version that they ended at
        self._over: dict[int, int] = {}
        self._closed = False
        #: whether the servers did not answer when they were last asked
        self._is_silent = False
        self._heard_at = self._rests_until = self._clock.now()
        self._pace = _Pace()

    # ---------------------------------------------------------------- the source

    def describe(self) -> SourceDescription:
        """Return what there is; waits until there is something, or raises what is wrong."""
        wait = Wait(self._clock, self._startup_s)
        while self._plan is None:
            try:
                self._join()
            except ServersMovedError as error:
                self._go_over()
                self._wait_for_a_model(wait, str(error))
            except (TransportError, ServerBusyError, ServerLostError) as error:
                self._wait_for_a_model(wait, str(error))
        self._described = description_of(self._plan.spec)
        return self._described

    def next(self, timeout_s: float) -> Update | None:
        """Return what leads on from the last update that was taken, or None if there is nothing new within that
        time."""
        until = self._clock.now() + timeout_s
        while not (self._closed or self.ended):
            pause_s = min(self._poll_s, max(0.0, self._rests_until - self._clock.now()))
            try:
                if not pause_s:
                    update = self._next()
                    self._note_answer()
                    if update is not None:
                        return update
                pause_s = max(pause_s, self._poll_s / 4)
            except _Lapsed:
                self._plan = None
            except ServersMovedError:
                self._go_over()
            except (TransportError, ServerBusyError) as error:
                pause_s = _RETRY_PAUSE_S
                if self._over:  # the others have ended with these
                    self._over |= dict.fromkeys(range(len(self._endpoints)), self._version) | self._over
                else:
                    self._note_silence(str(error))
            left_s = until - self._clock.now()
            if left_s <= 0:
                break
            self._clock.sleep(min(pause_s, left_s))
        return None

    def _note_silence(self, reason: str) -> None:
        """Log once that the servers do not answer."""
        if not (self._is_silent or self._closed):
            _log.warning("nothing new comes from %s for now, and it is asked again: %s", self._names, reason)
        self._is_silent = True

    def _note_answer(self) -> None:
        if self._is_silent:
            _log.info("%s answers again", self._names)
        self._is_silent = False

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._endpoints))

    @property
    def heard_at(self) -> float:
        """Return when, on the monotonic clock, the servers were last heard to have nothing newer than the last
        update."""
        return self._heard_at

    @property
    def ended(self) -> bool:
        """Return whether the job is over, and its last version was given."""
        return len(self._over) == len(self._endpoints)

    def close(self) -> None:
        """Follow no more; ``next`` returns soon."""
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            with contextlib.suppress(TransportError, FleetError):
                channel.start(Frame(self._request(unfollow=pb.Unfollow())), 1.0).result()
            channel.close()

    # ---------------------------------------------------------------- beginning

    def _wait_for_a_model(self, wait: Wait, reason: str) -> None:
        if wait.so_far_s >= self._startup_s or self._closed:
            raise DeadlineError(
                "there is no model to follow",
                where=self._names,
                expected=f"all servers with their initial values within {self._startup_s:g} s",
                got=reason,
                todo="Start the job, and give the endpoints of all of its servers, in their order.",
            )
        if wait.is_due():
            _log.info("waiting for a model at %s, for %.0f s now: %s", self._names, wait.so_far_s, reason)
        self._clock.sleep(_RETRY_PAUSE_S)

    def _join(self) -> None:
        """Tell all servers that this process follows, and learn which model they have."""
        count = len(self._endpoints)
        replies = self._ask(
            {server: self._request(follow=pb.Follow(server=server, servers=count)) for server in range(count)}
        )
        if not all(reply.message.initialized for reply in replies.values()):
            raise ServerLostError("the job has not begun")
        if len({reply.message.about for reply in replies.values()}) > 1:
            raise ServerLostError("the servers do not have the same parameters yet")
        plan = make_plan(self._read(replies[0].message.about))
        if self._described is not None and (differing := differences(self._described, description_of(plan.spec))):
            raise PlanMismatchError(
                "the servers have a job with another model than the one that was followed",
                where=self._names,
                got=differing,
                todo="Follow it with a model that is built like it.",
            )
        self._layouts = [dense_layout(plan, server) for server in range(count)]
        self._flats = [
            {
                dtype: torch.zeros(size, dtype=getattr(torch, dtype), device="cpu")
                for dtype, size in layout.sizes.items()
            }
            for layout in self._layouts
        ]
        self._progress = _Progress([0 for _ in range(count)])
        self._over = {}
        self._plan = plan

    def _read(self, about: str) -> JobSpec:
        """Read a job's description. One that cannot be read is another release's, however often it is asked for."""
        try:
            return JobSpec.from_json(about)
        except ProtocolError as error:
            raise PlanMismatchError(
                "follower and server plan differently",
                where=self._names,
                got=str(error).rstrip("."),
                todo="Install the same version of this package everywhere.",
            ) from error

    def _begin_anew(self) -> None:
        try:
            self._join()
        except ServerLostError as error:  # there is no model yet, so it is tried again
            raise TransportError(str(error)) from None

    def _go_over(self) -> None:
        """Follow the servers that the job has moved to, as one that it had says."""
        calls = [channel.start(Frame(self._request(where=pb.Where())), _SHORT_S) for channel in self._channels]
        for call in calls:
            try:
                reply = raise_if_error(call.result())
            except (TransportError, FleetError):
                continue
            servers = tuple(map(Endpoint.parse, json.loads(reply.message.about)["servers"]))
            if servers and servers != self._endpoints:
                break
        else:
            return
        for channel in self._channels:
            channel.close()
        self._plan, self._endpoints = None, servers
        self._channels = [self._network.connect(endpoint) for endpoint in servers]
        self._progress, self._over = _Progress([0 for _ in servers]), {}
        if self._closed:  # meanwhile, with the former ones
            for channel in self._channels:
                channel.close()

    # ---------------------------------------------------------------- going on

    def _next(self) -> Update | None:
        if self._plan is None:
            self._begin_anew()
        plan = self._known_plan
        for server, number in enumerate(self._progress.numbers):
            if number == 0:
                self._take_ahead(server, self._granted({server: pb.Changes()})[server])
        agree = policy_of(plan.spec.settings).versions_agree
        for _ in range(4):  # where very many rows have changed, most of them come first
            asked_at = self._clock.now()
            replies = self._asked_together() if agree else self._asked_each()
            loads = {server: reply for server, reply in replies.items() if reply.message.granted}
            if not loads:
                return None
            rest_s = max(reply.message.news.rest_s for reply in loads.values())
            self._rests_until = self._clock.now() + min(max(self._poll_s, rest_s), _MOST_REST_S)
            large = {server: reply for server, reply in loads.items() if not reply.message.news.exact}
            if not large:
                version = min([reply.message.version for reply in replies.values()] + [*self._over.values()])
                return self._update(version, loads, asked_at)
            for server, reply in large.items():
                self._take_ahead(server, reply)
        return None

    def _asked_each(self) -> dict[int, Frame]:
        """Ask each server for what it has. One that awaits which rows leave has nothing for now; a first version needs
        something of all."""
        asked_at = self._clock.now()
        replies = self._granted({server: pb.Changes() for server in self._living})
        if not any(reply.message.granted for reply in replies.values()):
            self._heard_at = asked_at
        if self._progress.is_whole and not all(reply.message.granted for reply in replies.values()):
            return {}
        return replies

    def _asked_together(self) -> dict[int, Frame]:
        """Ask all servers for the same version, if they have anything new. If they do not give it, there is nothing."""
        asked_at = self._clock.now()
        probed = self._granted({server: pb.Changes(probe=True) for server in self._living})
        answered_at = self._clock.now()
        if not any(reply.message.news.newer for reply in probed.values()):
            self._heard_at = asked_at
            return {}
        newest = max(reply.message.version for reply in probed.values())
        version = self._pace.choose(newest, answered_at, answered_at - asked_at, self._poll_s)
        wanted = pb.Changes(version=version, wait_s=_WAIT_S)
        replies = self._granted(dict.fromkeys(self._living, wanted))
        given = {(reply.message.version, reply.message.loads) for reply in replies.values() if reply.message.granted}
        may_lack = all(reply.message.granted or not reply.message.news.newer for reply in replies.values())
        if len(given) == 1 and may_lack and given.pop()[0] == version:
            self._pace.succeeded()
            return replies
        self._pace.failed(max(reply.message.version for reply in replies.values()) > version)
        return {}

    @property
    def _living(self) -> list[int]:
        return [server for server in range(len(self._endpoints)) if server not in self._over]

    def _granted(self, wanted: dict[int, pb.Changes]) -> dict[int, Frame]:
        """Ask servers what has changed, and return what they say."""
        assert self._plan is not None
        requests = {}
        for server, changes in wanted.items():
            asks = pb.Changes()
            asks.CopyFrom(changes)
            asks.since, asks.fingerprint = self._progress.numbers[server], self._plan.fingerprint
            requests[server] = self._request(changes=asks)
        replies = self._ask(requests)
        for server, reply in replies.items():
            if reply.message.news.lapsed:
                raise _Lapsed
            if reply.message.news.over:
                self._over[server] = reply.message.version
        return replies

    def _take_ahead(self, server: int, reply: Frame) -> None:
        """Keep what is not of one version, until what follows makes it so."""
        if not reply.message.granted:
            raise TransportError("a server has no values yet")
        # All of it or nothing: another load in its place would not tell of the rows of this one that have left since.
        pieces = list(self._pieces(self._known_plan, {server: reply}, []))
        self._progress.ahead += pieces
        self._progress.numbers[server] = reply.message.news.number

    @property
    def _known_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _update(self, version: int, loads: dict[int, Frame], asked_at: float) -> Update:
        progress, plan = self._progress, self._known_plan
        numbers = {server: reply.message.news.number for server, reply in loads.items()}

        def pieces() -> Iterator[Piece]:
            flats: list[tuple[int, str, int, torch.Tensor]] = []
            try:
                yield from progress.ahead
                yield from self._pieces(plan, loads, flats)
            except (_Lapsed, TransportError, ServersMovedError) as error:
                raise ServerLostError(
                    "a server went away while it gave an update",
                    where=self._names,
                    got=str(error) or "it does not know any more what has changed",
                    todo="Ask for the next update.",
                ) from None
            for server, dtype, start, values in flats:
                self._flats[server][dtype][start : start + len(values)] = values
            if dense := self._dense(plan, {server for server, *_ in flats}):
                yield Piece(dense=dense)

        def note_taken() -> None:
            for server, number in numbers.items():
                progress.numbers[server] = number
            progress.ahead, progress.is_whole = [], False
            self._version, self._heard_at = version, asked_at

        return Update(version, progress.is_whole, pieces(), note_taken)

    def _pieces(
        self, plan: Plan, loads: dict[int, Frame], flats: list[tuple[int, str, int, torch.Tensor]]
    ) -> Iterator[Piece]:
        """Yield the rows that servers give, of which the first have come; dense values go to ``flats``."""
        numbers = {server: reply.message.news.number for server, reply in loads.items()}
        arrived: dict[int, Frame | Call] = dict(loads)
        while arrived:
            for server, there in list(arrived.items()):
                reply = there if isinstance(there, Frame) else self._answer(server, there)
                message, tensors = reply.message, reply.tensors
                if message.news.lapsed or message.news.number != numbers[server]:
                    raise _Lapsed
                if message.cursor:
                    arrived[server] = self._fetch(server, numbers[server], message.cursor)
                else:
                    del arrived[server]
                if len(tensors) == 3 * len(message.changed) + 1:
                    (dense, *tensors), start = tensors, message.news.start
                    if start + dense.array.size > self._layouts[server].sizes.get(dense.dtype, 0):
                        raise ProtocolError("dense values do not fit the plan", got=f"{dense.dtype}, {start}")
                    flats.append((server, dense.dtype, start, dense.torch().view(-1)))
                rows = _rows(plan, message.changed, [each.torch() for each in tensors])
                if rows:
                    yield Piece(rows=rows)

    def _fetch(self, server: int, number: int, cursor: str) -> Call:
        request = self._request(fetch=pb.Fetch(number=number, cursor=cursor))
        return self._channels[server].start(Frame(request), _PATIENCE_S)

    def _dense(self, plan: Plan, servers: set[int]) -> dict[str, torch.Tensor]:
        """Return the parameters of which these servers have a part."""
        params = sorted({slot.block.param for server in servers for slot in self._layouts[server].slots})
        made = {
            index: torch.empty(
                plan.spec.params[index].numel, dtype=getattr(torch, plan.spec.params[index].dtype), device="cpu"
            )
            for index in params
        }
        for layout, flats in zip(self._layouts, self._flats, strict=True):
            for slot in layout.slots:
                if slot.block.param in made:
                    begin = slot.block.offset
                    made[slot.block.param][begin : begin + slot.block.numel] = flats[slot.dtype][slot.start : slot.stop]
        return {plan.spec.params[i].name: flat.view(plan.spec.params[i].shape) for i, flat in made.items()}

    # ---------------------------------------------------------------- asking

    def _request(self, **kind: object) -> pb.Request:
        return pb.Request(incarnation=self._incarnation, **kind)  # type: ignore[arg-type]

    def _ask(self, requests: dict[int, pb.Request]) -> dict[int, Frame]:
        """Ask servers, all at once, and return their replies."""
        calls = {
            server: self._channels[server].start(Frame(request), _PATIENCE_S) for server, request in requests.items()
        }
        return {server: self._answer(server, call) for server, call in calls.items()}

    def _answer(self, server: int, call: Call) -> Frame:
        """Return what a server has answered; an error says which one did not."""
        try:
            return raise_if_error(call.result())
        except TransportError as error:
            raise TransportError(f"{self._endpoints[server]}: {error}") from None


class _Pace:
    """Chooses the version to ask for, by how fast a job is: the newest there is if it is slow, so that the training
    need not go on; else one some steps ahead, and the same that others choose."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self._steps_s = 0.0
        self._slack = 1.0

    def choose(self, newest: int, now: float, took_s: float, every_s: float) -> int:
        """Return the version to ask for, when servers have been heard to be at ``newest``, after ``took_s``."""
        if self._seen is None or newest < self._seen[1]:
            self._seen = (now, newest)
        elif now - self._seen[0] >= _PACE_S:
            self._steps_s = (newest - self._seen[1]) / (now - self._seen[0])
            self._seen = (now, newest)
        ahead = self._steps_s * took_s * 2 * self._slack + self._slack - 1
        if ahead < 0.5:
            return newest
        stride = 1 << max(0, math.floor(math.log2(max(1.0, self._steps_s * every_s))))
        return -(-(newest + math.ceil(ahead)) // stride) * stride

    def succeeded(self) -> None:
        """Note that the servers had the version."""
        self._slack = max(1.0, self._slack / 1.5)

    def failed(self, is_past: bool) -> None:
        """Note that they did not: they were past it, or did not come so far."""
        if is_past:
            self._slack = min(64.0, self._slack * 2)
        else:
            self._slack, self._steps_s, self._seen = 1.0, 0.0, None


def _rows(plan: Plan, tables: Sequence[int], tensors: Sequence[torch.Tensor]) -> dict[str, RowChanges]:
    """Return the rows of a piece by the names of their tables."""
    if len(tensors) != 3 * len(tables) or any(index >= len(plan.spec.tables) for index in tables):
        raise ProtocolError("a piece of rows does not fit the plan", got=f"{len(tensors)} tensors")
    found = {}
    for place, index in enumerate(tables):
        spec, (ids, values, gone) = plan.spec.tables[index], tensors[3 * place : 3 * place + 3]
        expected = (ids.numel(), spec.dim), getattr(torch, spec.dtype)
        if (tuple(values.shape), values.dtype) != expected or {ids.dtype, gone.dtype} != {torch.int64}:
            raise ProtocolError(f"rows of {spec.name!r} do not fit the plan", got=f"{tuple(values.shape)}")
        found[spec.name] = RowChanges(ids.numpy(), values, gone.numpy())
    return found
