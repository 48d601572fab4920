"""Half-asynchronous training: a worker merges some steps, pushes once, and waits for its own acknowledgement only.

Server half: what arrives is applied at once.
Worker half: no version of anybody else's is needed. ``fleet.ps.worker.gradient_merge`` merges the steps.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.policy import Mode, Policy


class HalfAsyncPolicy(Policy):
    lets_rows_age = True

    def steps_per_push(self, most_merged: int) -> int:
        return most_merged


MODE = Mode("half_async", ArrivalGate, HalfAsyncPolicy)
