"""Decides when a gradient is applied and when a wait is over. A mode is one file; adding one is that file and a line
here."""

from typing import Protocol

from fleet.ps.consistency import asynchronous, auto, gba, geo, half_async, ssp, sync
from fleet.ps.consistency.dc_asgd import compensated
from fleet.ps.consistency.gate import Gate, Rules
from fleet.ps.consistency.policy import Mode, Policy

MODES: dict[str, Mode] = {
    mode.name: mode for mode in (sync.MODE, asynchronous.MODE, half_async.MODE, geo.MODE, ssp.MODE, gba.MODE, auto.MODE)
}


class Settings(Protocol):
    """Holds what a strategy and a job's spec say about the mode."""

    @property
    def mode(self) -> str: ...

    @property
    def staleness(self) -> int: ...

    @property
    def gradients(self) -> int: ...

    @property
    def changes(self) -> tuple[int, ...]: ...

    @property
    def dc_lambda(self) -> float: ...


def gate_of(settings: Settings, worker_num: int) -> Gate:
    """Return the gate for a job of so many workers that begins."""
    rules = Rules(staleness=settings.staleness, gradients=settings.gradients, changes=settings.changes)
    return MODES[settings.mode].gate(range(worker_num), 0, rules)


def policy_of(settings: Settings, update_frequency: int = 1) -> Policy:
    """Return the policy of a job with these settings. Only its workers need to know how often they push."""
    policy = MODES[settings.mode].policy
    return (compensated(policy) if settings.dc_lambda else policy)(settings.staleness, update_frequency)
