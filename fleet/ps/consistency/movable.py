"""Says which jobs can move to other servers while they run."""

from __future__ import annotations

from fleet.errors import UnsupportedError
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import policy_of

#: What the names of moves begin with.
ATTEMPT = "move "


def refuse_unmovable(spec: JobSpec) -> None:
    """Refuse to move a job whose state, or the way in which its servers agree, would not be the same elsewhere."""
    settings = spec.settings
    policy = policy_of(settings)
    keeps_more = policy.trains_on_workers or policy.remembers_reads
    if keeps_more:
        raise UnsupportedError(
            "the servers of this job cannot change while it runs",
            expected="a job in the mode sync, async, half_async, ssp, gba or auto",
            got=f"the mode {settings.mode!r}",
            todo="Save a checkpoint, and start the whole job again with other servers.",
        )
