"""Bounded staleness (stale synchronous parallel): workers run free, but none far ahead of the slowest.

Server half: every gradient is applied when it arrives.
Worker half: after ``t`` steps a worker goes on once the slowest live worker has delivered ``t - staleness``. With
``staleness=0`` steps follow each other as in synchronous training, but each gradient is an optimizer step of its own.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.policy import Mode, Policy


class BoundedPolicy(Policy):
    def version_needed(self, step: int) -> int:
        return max(0, step - self.staleness)


MODE = Mode("ssp", ArrivalGate, BoundedPolicy)
