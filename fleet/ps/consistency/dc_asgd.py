"""DC-ASGD: a mode without rounds whose late gradients are compensated for what has happened since they were computed.

Server half: ``fleet.ps.table.compensation`` has what is added to each gradient; the order is the mode's own. Worker
half: the mode's own. A gradient of rows is compensated for the time since they were last read, which should be what it
was computed on. So no look-up may go before its push.
"""

from __future__ import annotations

from fleet.ps.consistency.policy import Policy


class Compensated(Policy):
    remembers_reads = True
    lets_reads_go_first = False
    lets_rows_age = False


def compensated(policy: type[Policy]) -> type[Policy]:
    """Return a mode's policy with delay compensation."""
    return type(f"Compensated{policy.__name__}", (Compensated, policy), {})
