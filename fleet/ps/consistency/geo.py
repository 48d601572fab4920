"""GEO: every worker trains on its own, and tells every so many steps how far it has come.

Server half: what arrives is a change of the values, not a gradient, and is added at once.
Worker half: no version of anybody else's is needed. What is told, and how the others' changes are taken in, is in
``fleet.ps.worker.geo_training``.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.gate import Mode

MODE = Mode("geo", ArrivalGate, version_needed=lambda _step, _staleness: 0, adds=True)
