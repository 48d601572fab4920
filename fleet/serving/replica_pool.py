"""Asks replicas of a model, one at a time: the one that is bound to, until it fails or grows old, and then the next.

What is read has to be of one edition of one replica. So whoever has dense parameters of a replica asks this one for
rows, and on the way to another takes that one's dense parameters first. ``PoolSource`` is the source (source.py) of
them: an update of it binds to a replica and an edition.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fleet.base.clock import Clock, Wait
from fleet.base.cluster import Endpoint
from fleet.errors import (
    AuthenticationError,
    DeadlineError,
    FleetError,
    PlanMismatchError,
    ProtocolError,
    ServerBusyError,
)
from fleet.numeric.jit import Ids
from fleet.ps.wire.plain_service import PlainCall, PlainChannel
from fleet.ps.wire.small_calls import MOST_ANSWERED, Door, SmallCallChannel
from fleet.ps.wire.transport import TransportError
from fleet.serving import lookup_pb2 as pb
from fleet.serving.source import Piece, SourceDescription, TableDescription, Update

_log = logging.getLogger("fleet.serving")

#: A replica that failed is asked again after so long, twice as long each time, up to a bound.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
#: The replicas that are not bound to are looked at so often.
_LOOK_AROUND_S = 1.0
#: One that is older by more than this is left for one that has another version, which is an earlier one where the job
#: has begun anew.
_OLDER_S = 2.0
#: Dense parameters come at least so fast.
_BYTES_A_SECOND = 10e6

_LOOK = pb.LookRequest().SerializeToString()

Connect = Callable[[Endpoint], PlainChannel]


@dataclass(eq=False)
class _Replica:
    channel: PlainChannel
    pause_s: float = 0.0
    rests_until: float = -math.inf
    state: pb.State | None = None
    #: asks where it is, while another one is bound to
    looking: PlainCall | None = None
    #: which instance was seen to have the model, and how much of it goes into one request
    known: int = 0
    most_bytes: int = 0
    trouble: str = ""
    #: takes small look-ups, if the instance that is known does
    small: SmallCallChannel | None = None

    @property
    def endpoint(self) -> Endpoint:
        return self.channel.endpoint

    def look_up(self, request: bytes, row_bytes: int, timeout_s: float) -> bytes:
        small, answer = self.small, None
        if small is not None and row_bytes <= MOST_ANSWERED:
            answer = small.ask(request, timeout_s)
        return self.channel.ask("LookUp", request, timeout_s) if answer is None else answer

    def know(self, told: pb.Description, most_bytes: int, *, with_small_calls: bool) -> None:
        """Note what it has said of itself, and how much may be asked for at once here as well."""
        if self.known != told.state.instance:
            if self.small is not None:
                self.small.close()
            has_door = with_small_calls and told.HasField("door")
            door = Door(told.door.key, told.door.local, told.door.port)
            self.small = SmallCallChannel(self.endpoint, door) if has_door else None
        self.known, self.state, self.most_bytes = told.state.instance, told.state, min(most_bytes, told.most_bytes)

    def close(self) -> None:
        if self.small is not None:
            self.small.close()
        self.channel.close()


@dataclass(frozen=True, eq=False)
class Bound:
    """Names one edition of one replica."""

    replica: _Replica
    instance: int
    edition: int
    version: int


@dataclass
class Described:
    source: SourceDescription
    places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {name: place for place, name in enumerate(self.source.tables)}


class Elsewhere(Exception):
    """Says that the rows of an edition are not to be had, and why."""


class PoolSource:
    """Implements ``Source``. Look-ups come from any thread."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        connect: Connect,
        clock: Clock,
        *,
        deadline_s: float,
        startup_s: float,
        poll_s: float,
        most_bytes: int,
        with_small_calls: bool = True,
    ) -> None:
        """``deadline_s`` is divided, so that all replicas can be asked within it. No request asks for more than
        ``most_bytes`` of ids, or of rows. ``with_small_calls`` says whether look-ups may go beside gRPC."""
        self._clock = clock
        self._startup_s, self._poll_s = startup_s, poll_s
        self._attempt_s = deadline_s / (len(endpoints) + 1)
        first = secrets.randbelow(len(endpoints))  # predictors share the replicas out among them
        self._replicas = [_Replica(connect(each)) for each in [*endpoints[first:], *endpoints[:first]]]
        self._described: Described | None = None
        self._dense_bytes = 0
        #: what the last update binds to, and what the one under way will bind to
        self.bound: Bound | None = None
        self.coming: Bound | None = None
        self._heard_at = clock.now()
        self._looked_around_at = -math.inf
        self._most_bytes, self._with_small_calls = most_bytes, with_small_calls
        self._closed = False
        self._wake = threading.Event()
        self._confirmed = threading.Condition()
        self._confirmations = 0

    @property
    def names(self) -> str:
        return ", ".join(sorted(str(each.endpoint) for each in self._replicas))

    @property
    def described(self) -> Described:
        assert self._described is not None
        return self._described

    @property
    def heard_at(self) -> float:
        return self._heard_at

    @property
    def ended(self) -> bool:
        """Say that more may come: a replica goes on without its source."""
        return False

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        with self._confirmed:
            self._confirmed.notify_all()
        for each in self._replicas:
            each.close()

    # ---------------------------------------------------------------- the source

    def describe(self) -> SourceDescription:
        wait = Wait(self._clock, self._startup_s)
        while True:
            for each in self._rested():
                try:
                    self._know(each)
                    return self.described.source
                except (TransportError, ServerBusyError) as error:
                    self._fail(each, str(error))
            if self._closed or wait.so_far_s > self._startup_s:
                raise DeadlineError(
                    "no replica has answered",
                    where=self.names,
                    expected=f"one within {self._startup_s:g} s (FLEET_STARTUP_DEADLINE_S)",
                    got=self.troubles(),
                )
            if wait.is_due():
                _log.info("waiting for a replica, for %.0f s now: %s", wait.so_far_s, self.troubles())
            self._pause(self._poll_s)

    def _know(self, replica: _Replica) -> pb.State:
        """Ask a replica what it has, and refuse it if that is another model."""
        answer = replica.channel.ask("Describe", pb.DescribeRequest().SerializeToString(), self._attempt_s)
        told = pb.Description.FromString(answer)
        described = _described(told, self._most_bytes, replica.endpoint)
        if self._described is None:
            self._described = described
            self._dense_bytes = sum(math.prod(s) * d.itemsize for s, d in described.source.dense.values())
        elif (described.source, list(described.places)) != (self._described.source, list(self._described.places)):
            raise PlanMismatchError(
                "a replica has another model than those before it",
                where=str(replica.endpoint),
                todo="Make a RemoteModel for it, with a model that is built like it.",
            )
        replica.know(told, self._most_bytes, with_small_calls=self._with_small_calls)
        return told.state

    def next(self, timeout_s: float) -> Update | None:
        until = self._clock.now() + timeout_s
        while not self._closed:
            self._wake.clear()
            for replica in self._in_order():
                try:
                    state = self._look(replica)
                    if not self._is_bound_to(replica, state):
                        return self._update(replica)
                except ServerBusyError:  # it is there, and others were first
                    continue
                except (TransportError, FleetError) as error:
                    self._fail(replica, str(error))
                    continue
                self._succeed(replica)
                self._heard_at = self._clock.now() - state.age_s
                self._confirm()
                break
            left_s = until - self._clock.now()
            if left_s <= 0:
                break
            self._pause(min(self._poll_s, left_s))
        return None

    def _is_bound_to(self, replica: _Replica, state: pb.State) -> bool:
        bound = self.bound
        return bound is not None and (bound.replica, bound.instance, bound.edition) == (
            replica,
            state.instance,
            state.edition,
        )

    def _look(self, replica: _Replica) -> pb.State:
        return self._seen(replica, replica.channel.ask("Look", _LOOK, self._attempt_s))

    def _seen(self, replica: _Replica, answer: bytes) -> pb.State:
        """Note where a replica says that it is."""
        state = replica.state = pb.State.FromString(answer)
        return state if state.instance == replica.known else self._know(replica)

    def _in_order(self) -> list[_Replica]:
        """Return the replicas that can be asked, the one to ask before all others first."""
        current = None if self.bound is None else self.bound.replica
        self._look_around(current)
        there = self._rested()
        youngest_s = min((each.state.age_s for each in there if each.state is not None), default=0.0)
        there.sort(key=lambda each: _rank(each, youngest_s + _OLDER_S), reverse=True)
        if current in there and not self._is_left_behind(current, there):
            there.remove(current)
            there.insert(0, current)
        return there

    def _look_around(self, current: _Replica | None) -> None:
        """Ask from time to time where the others are. Where one is bound to, nobody waits for their answers: one that
        hangs is not to keep back what is new."""
        now = self._clock.now()
        is_time = now - self._looked_around_at >= _LOOK_AROUND_S
        if is_time:
            self._looked_around_at = now
        rested = self._rested() if is_time else []
        for each in self._replicas:
            try:
                if each is current:
                    each.looking = None
                elif each.looking is None and each in rested:
                    each.looking = each.channel.start("Look", _LOOK, self._attempt_s)
            except TransportError as error:
                self._fail(each, str(error))
        for each in self._replicas:
            looking = each.looking
            if looking is None or not (current is None or looking.is_done):
                continue
            each.looking = None
            try:
                self._seen(each, looking.result())
                self._succeed(each)
            except (TransportError, FleetError) as error:
                self._fail(each, str(error))

    def _rested(self) -> list[_Replica]:
        """Return the replicas that have not failed a moment ago."""
        now = self._clock.now()
        return [each for each in self._replicas if now >= each.rests_until]

    def _is_left_behind(self, current: _Replica, others: Sequence[_Replica]) -> bool:
        mine = current.state
        return mine is not None and any(
            each.state.version != mine.version and mine.age_s > each.state.age_s + _OLDER_S
            for each in others
            if each.state is not None and not each.trouble
        )

    def _update(self, replica: _Replica) -> Update:
        timeout_s = self._attempt_s + self._dense_bytes / _BYTES_A_SECOND
        stream = replica.channel.stream("Dense", pb.DenseRequest().SerializeToString(), timeout_s)
        first = next(stream, None)
        if first is None:
            raise TransportError("the answer was empty")
        state = pb.DensePiece.FromString(first).state
        if state.instance != replica.known:
            raise TransportError("it was started anew")
        self.coming = Bound(replica, state.instance, state.edition, state.version)
        return Update(state.version, True, self._pieces(replica, state, stream))

    def _pieces(self, replica: _Replica, state: pb.State, stream: Iterator[bytes]) -> Iterator[Piece]:
        """Yield all dense parameters at once, when they are there: they are written to the model at one moment."""
        source = self.described.source
        places = list(source.dense.items())
        values = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in places}
        raw = [values[name].reshape(-1).view(torch.uint8) for name, _ in places]
        filled = [0] * len(raw)
        try:
            for each in stream:
                piece = pb.DensePiece.FromString(each)
                place, part = piece.parameter, piece.values
                if place >= len(raw) or piece.offset != filled[place] or filled[place] + len(part) > len(raw[place]):
                    raise ProtocolError("a piece of dense parameters does not fit", where=str(replica.endpoint))
                if part:
                    raw[place][filled[place] : filled[place] + len(part)] = torch.frombuffer(
                        bytearray(part), dtype=torch.uint8
                    )
                    filled[place] += len(part)
        except (TransportError, FleetError) as error:
            self._fail(replica, str(error))
            raise DeadlineError("dense parameters did not come", where=str(replica.endpoint), got=str(error)) from None
        if any(had < len(wanted) for had, wanted in zip(filled, raw, strict=True)):
            raise ProtocolError("dense parameters lack a part", where=str(replica.endpoint))
        yield Piece(values)
        self._heard_at = self._clock.now() - state.age_s
        self._succeed(replica)

    def took(self, bound: Bound) -> None:
        """Note that the dense parameters of this edition are those of the model now."""
        self.bound = bound
        self._confirm()

    # ---------------------------------------------------------------- look-ups

    def look_up(self, bound: Bound, asked: Sequence[tuple[int, Ids]]) -> list[bytes]:
        """Return the rows of an edition, of each table for its ids; raise ``Elsewhere`` if they are not to be had."""
        tables, most = list(self.described.source.tables.values()), bound.replica.most_bytes
        widths = [tables[place].embedding_dim * tables[place].dtype.itemsize for place, _ in asked]
        found: list[list[bytes]] = [[] for _ in asked]
        parts: list[tuple[int, Ids]] = []
        room = most
        for index, ((_, ids), width) in enumerate(zip(asked, widths, strict=True)):
            start = 0
            while start < ids.size:
                count = min(ids.size - start, room // max(width, 8))
                if not count:
                    self._ask(bound, asked, widths, parts, found)
                    parts, room = [], most
                    continue
                parts.append((index, ids[start : start + count]))
                start, room = start + count, room - count * max(width, 8)
        if parts:
            self._ask(bound, asked, widths, parts, found)
        return [b"".join(each) if len(each) != 1 else each[0] for each in found]

    def _ask(
        self,
        bound: Bound,
        asked: Sequence[tuple[int, Ids]],
        widths: Sequence[int],
        parts: Sequence[tuple[int, Ids]],
        found: list[list[bytes]],
    ) -> None:
        sizes = [ids.size * widths[index] for index, ids in parts]
        request = pb.LookUpRequest(
            instance=bound.instance,
            edition=bound.edition,
            tables=[asked[index][0] for index, _ in parts],
            counts=[ids.size for _, ids in parts],
            ids=b"".join([ids.astype("<i8", copy=False).tobytes() for _, ids in parts]),
        )
        try:
            answer = bound.replica.look_up(request.SerializeToString(), sum(sizes), self._attempt_s)
        except (TransportError, AuthenticationError, ServerBusyError) as error:
            self._fail(bound.replica, str(error))
            self._wake.set()
            raise Elsewhere(f"{bound.replica.endpoint}: {error}") from None
        rows = pb.Rows.FromString(answer)
        if rows.gone:
            self._wake.set()
            raise Elsewhere(f"{bound.replica.endpoint} has gone on to version {rows.state.version}")
        if len(rows.values) != sum(sizes):
            raise ProtocolError(
                "an answer has other rows than were asked for",
                where=str(bound.replica.endpoint),
                expected=f"{sum(sizes)} bytes",
                got=f"{len(rows.values)} bytes",
            )
        at = 0
        for (index, _), size in zip(parts, sizes, strict=True):
            found[index].append(rows.values[at : at + size])
            at += size

    def await_another(self, bound: Bound | None, timeout_s: float) -> bool:
        """Wait until the model has another edition than the one that failed, or that one was seen to be there again;
        return whether that is so. What was seen before the failure says nothing."""
        with self._confirmed:
            after = self._confirmations
            self._confirmed.wait_for(
                lambda: self.bound is not bound or self._confirmations > after or self._closed, timeout_s
            )
            return self.bound is not bound or self._confirmations > after

    def troubles(self) -> str:
        """Return what is wrong with each replica."""
        return "; ".join(f"{each.endpoint}: {each.trouble or 'no answer yet'}" for each in self._replicas)

    # ---------------------------------------------------------------- who answers

    def _confirm(self) -> None:
        with self._confirmed:
            self._confirmations += 1
            self._confirmed.notify_all()

    def _fail(self, replica: _Replica, trouble: str) -> None:
        if not replica.trouble and not self._closed:
            _log.warning(
                "the replica at %s does not answer, and is left alone for a moment: %s", replica.endpoint, trouble
            )
        replica.trouble = trouble
        replica.pause_s = min(max(_FIRST_PAUSE_S, 2 * replica.pause_s), _LONGEST_PAUSE_S)
        replica.rests_until = self._clock.now() + replica.pause_s

    def _succeed(self, replica: _Replica) -> None:
        if replica.trouble:
            _log.info("the replica at %s answers again", replica.endpoint)
        replica.trouble, replica.pause_s, replica.rests_until = "", 0.0, -math.inf

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)


def _rank(replica: _Replica, oldest_s: float) -> tuple[bool, int]:
    """Return by what replicas are put in order: those that are not old, and of these the ones with later versions."""
    state = replica.state
    return (False, -1) if state is None else (state.age_s <= oldest_s, state.version)


def _described(told: pb.Description, most_bytes: int, where: Endpoint) -> Described:
    """Read a description, which comes from outside, where no more than ``most_bytes`` may be asked for at once."""
    try:
        tables = {
            each.name: TableDescription(each.embedding_dim, each.num_embeddings or None, each.mean, _dtype(each.dtype))
            for each in told.tables
        }
        dense = {each.name: (tuple(each.shape), _dtype(each.dtype)) for each in told.dense}
    except ValueError as error:
        raise ProtocolError("a replica's description cannot be read", where=str(where), got=str(error)) from None
    widest = max((each.embedding_dim * each.dtype.itemsize for each in tables.values()), default=8)
    if min(most_bytes, told.most_bytes) < widest:
        raise ProtocolError(
            "less than one row may be asked for at once",
            where=str(where),
            expected=f"{widest} bytes",
            got=f"{told.most_bytes} bytes from the replica, {most_bytes} here",
            todo="Set FLEET_MAX_MESSAGE_MB to more.",
        )
    return Described(SourceDescription(dense, tables))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no element type of torch: {name!r}")
    return found


def array_of(values: bytes, table: TableDescription) -> torch.Tensor:
    """Return rows as they came as a tensor."""
    flat = np.frombuffer(bytearray(values), np.float32 if table.dtype == torch.float32 else np.float64)
    return torch.from_numpy(flat).reshape(-1, table.embedding_dim)
