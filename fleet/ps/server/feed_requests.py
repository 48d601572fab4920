"""Requests of those who follow the model from outside (feed.py): none of them is a member, or changes anything in the
job."""

from __future__ import annotations

from collections.abc import Callable

from fleet.base.clock import Clock
from fleet.errors import FleetError, PlanMismatchError, UnsupportedError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.admission import check_fingerprint
from fleet.ps.server.feed import Asked, Follower, Load, piece_of, rest_s
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import error_reply

#: No request waits longer for its version.
_MOST_WAIT_S = 10.0


class FeedRequests:
    def __init__(self, clock: Clock, end: JobEnd, send_later: Callable[[Outbox], None]) -> None:
        """``send_later`` takes replies to requests that have waited."""
        self._clock = clock
        self._end = end
        self._send_later = send_later
        self.handlers: dict[str, Callable[[Job | None, Arrival], None]] = {
            "follow": self._follow,
            "changes": self._changes,
            "fetch": self._fetch,
            "unfollow": self._unfollow,
        }

    # ---------------------------------------------------------------- requests

    def _follow(self, job: Job | None, arrival: Arrival) -> None:
        """Say which model there is, and let its sender follow."""
        self._refuse_if_failed()
        if job is None or job.shard is None or not _is_there(job):
            arrival.answer(pb.Reply())
            return
        told, plan = arrival.request.follow, job.plans.current
        settings = plan.spec.settings
        if (told.server, told.servers) != (job.shard.server, settings.server_num):
            raise PlanMismatchError(
                "a follower was told of other servers than the job has",
                where=job.where,
                expected=f"server {job.shard.server} of {settings.server_num}",
                got=f"server {told.server} of {told.servers}",
                todo="Give all servers of the job, in the order that the job has them.",
            )
        if settings.has_dense_on_workers:
            raise UnsupportedError(
                "the job's dense parameters are on its workers, and its servers cannot tell anybody",
                where=job.where,
                got=f'dense="{settings.dense}"',
                todo="Follow the directory of its checkpoints (fleet.Checkpoints) instead.",
            )
        job.feed.join(arrival.request.incarnation, self._clock.now())
        # Servers of an elastic job may have been told different numbers of workers, and a follower needs none.
        spec = plan.spec.among(1) if settings.elastic else plan.spec
        arrival.answer(pb.Reply(initialized=True, version=job.version, about=spec.to_json()))

    def _changes(self, job: Job | None, arrival: Arrival) -> None:
        """Give a follower what it lacks, or say why not."""
        self._refuse_if_failed()
        asks, now = arrival.request.changes, self._clock.now()
        each = None if job is None else job.feed.followers.get(arrival.request.incarnation)
        if job is None or each is None or job.plans.had(asks.fingerprint):
            arrival.answer(pb.Reply(news=pb.News(lapsed=True)))
            return
        # It was given this job's description, so one of its own release plans as this server does: to begin anew would
        # lead another one here again.
        check_fingerprint(job.where, job.plans.current, asks.fingerprint, who="follower")
        each.heard, each.asked = now, None
        shard = job.held()
        if not job.feed.accept(each, asks.since):
            arrival.answer(pb.Reply(news=pb.News(lapsed=True)))
        elif not _can_be_taken(job):
            arrival.answer(self._not_granted(job, each, newer=True))
        elif each.has is None:
            arrival.answer(*_granted(job, job.feed.all_rows(each, shard, job.version, job.progress.loads)))
        elif asks.probe or asks.version in (0, job.version):
            newer = job.feed.is_behind(each, shard, job.version)
            if asks.probe or not newer:
                arrival.answer(self._not_granted(job, each, newer=newer))
            else:
                load = job.feed.take(each, shard, job.version, job.progress.loads, self._clock.now)
                arrival.answer(*_granted(job, load))
        elif asks.version < job.version or self._end.over or not asks.wait_s > 0:
            arrival.answer(self._not_granted(job, each, newer=True))
        else:
            until = now + min(asks.wait_s, _MOST_WAIT_S)
            each.asked = self._waiting(job, each, asks.version, until, arrival)

    def _waiting(self, job: Job, each: Follower, version: int, until: float, arrival: Arrival) -> Asked:
        respond = arrival.respond

        def answer(load: Load | None, is_taken: bool) -> None:
            frame = Frame(*_granted(job, load)) if is_taken else Frame(self._not_granted(job, each, newer=True))
            self._send_later([(respond, frame)])

        def refuse(error: FleetError) -> None:
            self._send_later([(respond, error_reply(error))])

        return Asked(version, until, answer, refuse)

    def _fetch(self, job: Job | None, arrival: Arrival) -> None:
        """Answer with a piece of what a follower was given."""
        self._refuse_if_failed()
        asks = arrival.request.fetch
        each = None if job is None else job.feed.followers.get(arrival.request.incarnation)
        load = None if each is None else each.given
        if job is None or each is None or load is None or load.number != asks.number or not job.feed.serves(job.shard):
            arrival.answer(pb.Reply(news=pb.News(lapsed=True)))
            return
        each.heard = self._clock.now()
        arrival.answer(*_with_piece(job, load, asks.cursor))

    def _unfollow(self, job: Job | None, arrival: Arrival) -> None:
        """Forget a follower."""
        if job is not None:
            job.feed.leave(arrival.request.incarnation)
        arrival.answer(pb.Reply())

    def _refuse_if_failed(self) -> None:
        if self._end.failure is not None:
            raise self._end.failure.again()

    def _not_granted(self, job: Job, each: Follower, *, newer: bool) -> pb.Reply:
        over = self._end.over and not newer
        each.is_told = over
        return pb.Reply(version=job.version, loads=job.progress.loads, news=pb.News(newer=newer, over=over))

    # ---------------------------------------------------------------- what waits

    def is_due(self, job: Job) -> bool:
        """Say whether a request has waited for the version that is there, or for one that is past."""
        least = job.feed.least_awaited
        return least is not None and (self._end.over or least <= job.version)

    def attend(self, job: Job) -> None:
        """Answer the requests that have waited long enough."""
        feed = job.feed
        if feed.least_awaited is None:
            return
        if self._end.failure is not None:
            feed.fail(self._end.failure)
            return
        if _can_be_taken(job):
            feed.give(job.held(), job.version, job.progress.loads, self._clock.now)
        feed.dismiss(job.version, self._clock.now(), everybody=self._end.over)

    def tick(self, job: Job, now: float) -> None:
        """Let time pass."""
        self.attend(job)
        job.feed.tick(now)


def _is_there(job: Job) -> bool:
    return job.initialized and not job.plans.growing


def _can_be_taken(job: Job) -> bool:
    """Say whether the values are those of a version."""
    return _is_there(job) and not job.cuts


def _granted(job: Job, load: Load | None) -> tuple[pb.Reply, list[WireTensor]]:
    """Return the reply with what a follower is given, and the first piece of it; None says that nobody knows."""
    if load is None:
        return pb.Reply(news=pb.News(lapsed=True)), []
    reply, tensors = _with_piece(job, load, "")
    reply.granted, reply.loads = True, load.replaced
    reply.news.newer, reply.news.rest_s = True, rest_s(load)
    return reply, tensors


def _with_piece(job: Job, load: Load, cursor: str) -> tuple[pb.Reply, list[WireTensor]]:
    start, tables, tensors, following = piece_of(load, cursor, job.held(), job.where)
    news = pb.News(number=load.number, exact=load.is_exact, start=start)
    return pb.Reply(version=load.version, cursor=following, changed=tables, news=news), tensors
