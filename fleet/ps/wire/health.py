"""A server reports that it is ready by gRPC's own health protocol, at a port of its own, as Kubernetes asks for it.

The port is its own, since those who ask (the kubelet) have neither a token nor certificates. It says nothing but that
the server listens, from the moment it does until its job is over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from fleet.base.cluster import Binding, Endpoint
from fleet.base.ports import holder_of, is_taken, why_not
from fleet.errors import ConfigurationError, PortInUseError, UnsupportedError
from fleet.ps.wire.transport import Channel, Handler, Listener, Network

_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 16),
]


class HealthNetwork:
    """Wraps a network so that its servers report at ``port`` that they are there."""

    def __init__(self, network: Network, port: int, binding: Binding) -> None:
        self._network = network
        self._port = port
        self._binding = binding

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        health = Health(Endpoint(self._binding.of(endpoint).host, self._port))
        try:
            listener = self._network.listen(endpoint, handler)
        except BaseException:
            health.close()
            raise
        health.report(serving=True)
        return _Listener(listener, health)

    def connect(self, endpoint: Endpoint) -> Channel:
        return self._network.connect(endpoint)

    def own_address(self, towards: Endpoint) -> str:
        return self._network.own_address(towards)


class _Listener:
    def __init__(self, listener: Listener, health: Health) -> None:
        self._listener = listener
        self._health = health

    def close(self, grace_s: float = 0.0) -> None:
        self._health.report(serving=False)
        self._listener.close(grace_s)
        self._health.close()


class Health:
    def __init__(self, at: Endpoint) -> None:
        try:
            from grpc_health.v1 import health, health_pb2
        except ImportError:
            raise UnsupportedError(
                "FLEET_HEALTH_PORT is set, and grpcio-health-checking is not installed",
                todo="pip install 'torch-fleet[health]', or unset FLEET_HEALTH_PORT.",
            ) from None
        if is_taken(at):
            raise PortInUseError(
                f"port {at.port} is in use",
                where=f"{at}, for health checks",
                got=holder_of(at.port),
                todo="Give every server of a machine another FLEET_HEALTH_PORT.",
            )
        self._states = health_pb2.HealthCheckResponse
        self._servicer = health.HealthServicer()
        self.report(serving=False)
        # Only Check is served: Watch would keep something for every peer that asks.
        check = grpc.unary_unary_rpc_method_handler(
            self._servicer.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fleet-health")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        service = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
        self._server.add_generic_rpc_handlers((service,))
        try:
            self._server.add_insecure_port(str(at))
        except RuntimeError as error:
            self.close()
            raise ConfigurationError(
                "cannot take health checks here",
                where=str(at),
                got=why_not(at) or str(error),
                todo="Give the server an address of this machine.",
            ) from None
        self._server.start()

    def report(self, *, serving: bool) -> None:
        self._servicer.set("", self._states.SERVING if serving else self._states.NOT_SERVING)

    def close(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown(wait=True)
