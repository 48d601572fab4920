"""Asynchronous training: gradients leave and parameters arrive behind the user's back, and nobody waits for anybody.

Server half: what arrives is applied at once.
Worker half: no version is needed. What is sent and fetched when is decided by ``fleet.ps.worker.communicator``.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.gate import Mode

MODE = Mode("async", ArrivalGate, version_needed=lambda _step, _staleness: 0, behind=True)
