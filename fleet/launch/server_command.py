"""Runs ``fleet server``: one parameter server without a user script, which learns everything from the first worker."""

from __future__ import annotations

from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.base.unknown_variables import remark
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.lean import be_lean
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.wire.real_network import real_network


def serve_endpoint(endpoint: Endpoint, model_dir: str | None = None) -> int:
    """Serve until the job is over, and return the exit code."""
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    remark(PROCESS_ENVIRONMENT)
    be_lean()
    restore = None if model_dir is None else restore_from(model_dir)
    ServerRuntime(endpoint, real_network(settings), settings, SystemClock(), restore=restore).run()
    return 0
