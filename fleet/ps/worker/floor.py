"""What every call of a worker stands on, made once and handed to whoever does one kind of work."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.cluster import Assignment
from fleet.environ import Knobs
from fleet.observing.worker import WorkerFigures
from fleet.ps.consistency.base import Mode
from fleet.ps.worker.fetching import Fetching
from fleet.ps.worker.lines import Lines
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.rows import RowReader
from fleet.ps.worker.states import OwnStates
from fleet.ps.worker.trained import Trained
from fleet.strategy import Strategy


@dataclass(frozen=True)
class Floor:
    assignment: Assignment
    strategy: Strategy
    knobs: Knobs
    mode: Mode
    figures: WorkerFigures
    progress: Progress
    lines: Lines
    trained: Trained
    fetching: Fetching
    rows: RowReader
    own: OwnStates

    @property
    def may_lose_steps(self) -> bool:
        """Whether the job goes on where a server has lost steps (the servers' ``Job`` has the same)."""
        return not (self.mode.lockstep or self.mode.adds or self.strategy.dc_lambda)
