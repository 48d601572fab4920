"""A startup probe, as the kubelet runs one: asks HOST:PORT for its health until it is there, or for a minute."""

import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

until = time.monotonic() + 60
status = "nobody there"
while status != "SERVING" and time.monotonic() < until:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        except grpc.RpcError:
            time.sleep(0.2)
print(status)
