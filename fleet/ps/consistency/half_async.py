"""Half-asynchronous training: a worker merges some steps, sends once, and waits for its own acknowledgement only.

Server half: what arrives is applied at once.
Worker half: no version of anybody else's is needed. How many steps are merged is the strategy's, and the merging is
done by ``fleet.ps.worker.gradient_merge``.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.gate import Mode

MODE = Mode("half_async", ArrivalGate, version_needed=lambda _step, _staleness: 0)
