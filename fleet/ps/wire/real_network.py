"""Chooses what reaches other processes, by this one's settings."""

from __future__ import annotations

from fleet.base.settings import ProcessSettings
from fleet.ps.wire.transport import Network


def real_network(settings: ProcessSettings) -> Network:
    """Return gRPC and what stands beside it, imported when it is first needed."""
    from fleet.ps.wire.direct import DirectNetwork
    from fleet.ps.wire.grpc_server import GrpcNetwork
    from fleet.ps.wire.security import Security

    security = Security.of(settings.security)
    network: Network = GrpcNetwork(settings.rpc_get_thread_num, security, settings.binding)
    if settings.direct_port is not None:
        network = DirectNetwork(network, settings.direct_port, security, settings.binding)
    if settings.health_port is not None:
        from fleet.ps.wire.health import HealthNetwork

        network = HealthNetwork(network, settings.health_port, settings.binding)
    return network
