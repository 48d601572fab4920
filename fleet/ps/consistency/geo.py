"""GEO: every worker trains on its own, and tells every so many steps how far it has come.

Server half: what arrives is a change of the values, not a gradient, and is added at once. The answer says which of the
rows that a worker holds others have changed. Worker half: no version of anybody else's is needed.
``fleet.ps.worker.geo_replica`` trains, sends changes and takes in those of others.
"""

from __future__ import annotations

from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.policy import Mode, Policy


class GeoPolicy(Policy):
    trains_on_workers = True
    remembers_reads = True
    takes_gradients_early = False
    tells_changed_rows = True
    has_dense_state_on_servers = False
    saves_on_first_worker = True

    def steps_per_push(self, most_merged: int) -> int:
        return self.update_frequency

    def sends_gradients_early(self, most_merged: int) -> bool:
        return False

    def remembers_read(self, *, dense: bool, training: bool) -> bool:
        """Say whether rows were read to be trained: the worker holds those."""
        return training

    def remembers_push(self, *, brings_values: bool) -> bool:
        return True

    def applies_one_lookup(self, worker_num: int) -> bool:
        """Say no: a change has the ids of many steps."""
        return False


MODE = Mode("geo", ArrivalGate, GeoPolicy)
