"""Requests go over plain sockets, direct connections, beside a network that leads to them.

Through Python's gRPC a request of 400 KiB costs about half a millisecond of computing on either side, whatever its
options; over a socket it costs a tenth of that (docs/decisions/0005-direct-connections.md). A client asks the server
over the network where it takes direct connections, and is given a key; if it cannot reach them, everything goes over
the network.

With TLS they are encrypted as gRPC's connections are, with the same certificates. What stays on one machine, under the
name that a server has there, is not.
"""

from __future__ import annotations

from collections.abc import Callable

from fleet.base.cluster import Binding, Endpoint
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_client import DirectChannel
from fleet.ps.wire.direct_server import DirectListener
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.security import Security
from fleet.ps.wire.transport import Handler, Listener, Network, Respond


class DirectNetwork:
    def __init__(
        self, control: Network, port: int = 0, security: Security | None = None, binding: Binding | None = None
    ) -> None:
        """``port`` is where servers listen; without it they take any that is free."""
        self._control = control
        self._port = port
        self._security = security or Security()
        self._binding = binding or Binding()

    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener:
        at = self._binding.of(endpoint)
        self._security.check_listening(at)
        direct = DirectListener(at, self._port, handler, self._security)

        def receive(frame: Frame, respond: Respond) -> Callable[[], None] | None:
            if frame.message.WhichOneof("kind") != "direct":
                return handler(frame, respond)
            respond(Frame(pb.Reply(direct=direct.address)))
            return None

        try:
            return _Listener(direct, self._control.listen(endpoint, receive))
        except BaseException:
            direct.close()
            raise

    def connect(self, endpoint: Endpoint) -> DirectChannel:
        return DirectChannel(endpoint, self._control.connect(endpoint), self._security)

    def own_address(self, towards: Endpoint) -> str:
        return self._control.own_address(towards)


class _Listener:
    def __init__(self, direct: DirectListener, control: Listener) -> None:
        self._direct = direct
        self._control = control

    def close(self, grace_s: float = 0.0) -> None:
        self._direct.refuse()
        self._control.close(grace_s)
        self._direct.close(grace_s)
