"""What every call of a worker stands on, made once and handed to whoever does one kind of work."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.base.cluster import Assignment
from fleet.base.settings import Knobs
from fleet.ps.consistency.gate import Mode
from fleet.ps.worker.connections import Lines
from fleet.ps.worker.fetch import Fetching
from fleet.ps.worker.lookups import RowReader
from fleet.ps.worker.object_states import OwnStates
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.trained_model import Trained
from fleet.strategy.parameter_server import Strategy
from fleet.telemetry.worker_figures import WorkerFigures


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
