"""Says which jobs can move to other servers while they run."""

from __future__ import annotations

from fleet.errors import UnsupportedError
from fleet.plan.specs import JobSpec
from fleet.ps.consistency import policy_of


def refuse_unmovable(spec: JobSpec) -> None:
    """Refuse to move a job whose state, or the way in which its servers agree, would not be the same elsewhere."""
    settings = spec.settings
    policy = policy_of(settings)
    keeps_more = policy.trains_on_workers or policy.remembers_reads or policy.fills_buffers
    reasons = {
        f"the mode {settings.mode!r}": keeps_more,
        "elastic jobs": settings.elastic,
        "dense='all_reduce'": settings.has_dense_on_workers,
        "gradients in few bits (wire_dtype)": settings.wire_dtype is not None,
        "gradients clipped by their norm on all servers": settings.max_grad_norm > 0,
        "tables with admit= or evict=": any(table.has_rules for table in spec.tables),
    }
    found = [reason for reason, is_there in reasons.items() if is_there]
    if found:
        raise UnsupportedError(
            "the servers of this job cannot change while it runs",
            expected="a job in the mode sync, async, half_async or ssp",
            got=", ".join(found),
            todo="Save a checkpoint, and start the whole job again with other servers.",
        )
