"""Asynchronous training: gradients leave and parameters arrive behind the user's back, and nobody waits for anybody.

Server half: what arrives is applied at once.
Worker half: no version is needed. ``fleet.ps.worker.communicator`` sends and fetches on threads of its own.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.policy import Mode, Policy


class AsyncPolicy(Policy):
    lets_rows_age = True
    awaits_answers = False
    lets_reads_go_first = True

    def sends_gradients_early(self, most_merged: int) -> bool:
        return False


MODE = Mode("async", ArrivalGate, AsyncPolicy)
