"""Workers let rows leave tables: at once (``shrink``), and where all servers together are to have no more than so many.

No server knows what rows the others have. When rows are due to leave such a table, each keeps them, and tells the
workers; any of them asks all servers how many rows would stay with which last one (``rank``), and tells them the last
one that stays (``cut``). Where steps are shared, every worker does so before it goes on, so nobody asks for rows
meanwhile but ahead of time, and who does waits; a server that has been told tells those who ask later. Elsewhere
servers go on, and rows leave when somebody says which.

The caller holds the server's lock.
"""

from __future__ import annotations

import math

import numpy as np

from fleet.errors import ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.job import Job
from fleet.ps.server.pending import Arrival
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire import fleet_pb2 as pb

#: What an answer to a question begins with: nothing is to be agreed on; the question's counts follow; it has been
#: agreed on, and the last row that stays follows.
UNKNOWN, AWAITED, AGREED = 0, 1, 2

HIGHEST_ID = 2**63 - 1

#: More places in one question are no worker's of ours.
_MOST_PLACES = 64


class RowRequests:
    def __init__(self, steps: StepRequests) -> None:
        self._steps = steps

    def shrink(self, job: Job, arrival: Arrival) -> None:
        """Let rows leave now, as they do after some steps."""
        shrink, version = arrival.request.shrink, job.rounds.gate.version
        if not 0 < shrink.now < math.inf:
            raise ProtocolError("a request does not say what time it is", got=shrink.now)
        if job.policy.shares_steps and shrink.version != version:
            raise ProtocolError(
                "the job went on while rows were to leave",
                where=job.where,
                expected=f"version {shrink.version}",
                got=f"version {version}",
            )
        job.held().shrink(shrink.now)
        job.rounds.cuts = None
        arrival.answer(pb.Reply(version=version, cuts=job.cuts))

    def rank(self, job: Job, arrival: Arrival) -> None:
        """Answer how many rows would stay, if these were the last ones."""
        tables, tensors = arrival.request.rank.tables, arrival.tensors
        if len(tensors) != 2 * len(tables):
            raise ProtocolError("a question has the wrong number of tensors", got=len(tensors))
        answers: list[WireTensor] = []
        for place, index in enumerate(tables):
            scores, ids = (each.numpy() for each in tensors[2 * place : 2 * place + 2])
            if {scores.dtype, ids.dtype} != {np.dtype(np.int64)} or ids.ndim != 1 or scores.shape != ids.shape:
                raise ProtocolError(
                    "places among rows do not fit",
                    expected="as many int64 scores as ids",
                    got=f"{scores.dtype} {scores.shape} and {ids.dtype} {ids.shape}",
                )
            if ids.size > _MOST_PLACES:
                raise ProtocolError("a question names too many places", got=ids.size)
            answers.append(WireTensor.of(np.array(self._answer(job, index, scores.tolist(), ids.tolist()), np.int64)))
        arrival.answer(pb.Reply(version=job.rounds.gate.version), answers)

    def _answer(self, job: Job, index: int, scores: list[int], ids: list[int]) -> list[int]:
        by, shard, version = self._order(job, index), job.held(), job.rounds.gate.version
        if index in job.cuts:
            low, high = shard.bounds(index, by)
            rows = shard.rank(index, by, low, HIGHEST_ID)
            return [AWAITED, rows, low, high, *(shard.rank(index, by, *last) for last in zip(scores, ids, strict=True))]
        at, *last = job.rounds.agreed.get(index, (None,))
        return [AGREED, *last] if at == version and job.policy.shares_steps else [UNKNOWN]

    def cut(self, job: Job, arrival: Arrival) -> None:
        """Let rows leave that come after the last one that stays. All servers are told of it, some of them again."""
        cut, rounds = arrival.request.cut, job.rounds
        if not len(cut.tables) == len(cut.scores) == len(cut.ids):
            raise ProtocolError("a cut's tables and rows differ in number", got=len(cut.tables))
        version = rounds.gate.version
        for index, score, id_ in zip(cut.tables, cut.scores, cut.ids, strict=True):
            by = self._order(job, index)
            if index in job.cuts and (cut.version == version or not job.policy.shares_steps):
                job.held().cut(index, by, None if score < 0 else (score, id_))
                rounds.cuts, rounds.agreed[index] = None, (version, score, id_)
        self._steps.answer_held_back(job, arrival.worker, arrival.outbox)
        arrival.answer(pb.Reply(version=version))

    @staticmethod
    def _order(job: Job, index: int) -> str:
        """Return by what the rows of a table are ordered, of which so many stay."""
        rule = job.held().table(index).spec.most_rows
        if rule is None or not job.is_limited:
            raise ProtocolError("no server has to agree with others on the rows of this table", got=index)
        return rule.by
