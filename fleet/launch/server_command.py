"""Runs ``fleet server``: one parameter server without a user script, which learns everything from the first worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import PROCESS_ENVIRONMENT, ProcessSettings
from fleet.base.unknown_variables import remark
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.lean import be_lean
from fleet.ps.server.runtime import ServerRuntime
from fleet.ps.wire.real_network import real_network


def serve_endpoint(endpoint: Endpoint, model_dir: str | None = None, joins: Sequence[Endpoint] = ()) -> int:
    """Serve until the job is over, and return the exit code."""
    settings = ProcessSettings.read(PROCESS_ENVIRONMENT)
    remark(PROCESS_ENVIRONMENT)
    be_lean()
    restore = None if model_dir is None else restore_from(model_dir)
    with ExitStack() as opened:
        health = None
        if joins and settings.health_port is not None:
            # Whoever waits for this server before another is taken down has to wait until the job is here.
            from fleet.ps.wire.health import Health

            health = Health(Endpoint(settings.binding.of(endpoint).host, settings.health_port))
            opened.enter_context(closing(health))
            settings = replace(settings, health_port=None)

        def report(is_ready: bool) -> None:
            if health is not None:
                health.report(serving=is_ready)

        ServerRuntime(
            endpoint,
            real_network(settings),
            settings,
            SystemClock(),
            restore=restore,
            joins=joins,
            report=report,
        ).run()
    return 0
