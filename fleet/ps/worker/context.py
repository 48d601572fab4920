"""What every call of a worker stands on, made once and handed to whoever does one kind of work."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.base.cluster import Assignment
from fleet.base.settings import Knobs
from fleet.ps.consistency.policy import Policy
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
    policy: Policy
    figures: WorkerFigures
    progress: Progress
    lines: Lines
    trained: Trained
    fetching: Fetching
    rows: RowReader
    own: OwnStates
