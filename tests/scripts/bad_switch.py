"""A switch with two ports that treats what it forwards badly: ``bad_switch.py PORT PORT FAULTS``, faults as JSON.

It runs in a network namespace, on veth cables that are plugged into no bridge, and takes whole Ethernet frames from one
and gives them to the other, as packet sockets do; that needs root and no module of the kernel's. Faults are shares of
the frames, and ``delay_s``, which each frame has a random part of, so that many overtake others. ``latency_s`` and
``bits_per_s`` are no faults but the length and the width of a cable: frames arrive so much later, one after the other,
in their order. By SIGUSR1 it forgets every connection that it has seen, as a firewall does that is started again: what
belongs to one vanishes from then on. When it is told to end it prints how many frames it treated how.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import json
import math
import random
import select
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

_ALL, _OUTGOING, _IPV4 = 3, 4, b"\x08\x00"
_MOST = 1 << 17
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # linux/socket.h, linux/if_packet.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_PR_SET_TIMERSLACK = 29  # linux/prctl.h
#: Before each frame stands what its receiver has to do: cut it into segments, fill in a checksum. So a large one may
#: pass whole, as it does in a cable without a switch.
_TO_DO = 10
#: Then come addresses and the type of what follows; a flipped bit behind them is found by a checksum of IP or TCP.
_ETHERNET = _TO_DO + 14


class Switch:
    def __init__(
        self,
        ports: list[str],
        loss: float = 0.0,
        duplicate: float = 0.0,
        corrupt: float = 0.0,
        delay_s: float = 0.0,
        latency_s: float = 0.0,
        bits_per_s: float = math.inf,
    ) -> None:
        self._sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) for _ in ports]
        for each, port in zip(self._sockets, ports, strict=True):
            each.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            for buffer in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):  # what finds no room is lost
                each.setsockopt(socket.SOL_SOCKET, buffer, 64 << 20)
            each.bind((port, _ALL))
        self._loss, self._duplicate, self._corrupt, self._delay_s = loss, duplicate, corrupt, delay_s
        self._latency_s, self._bits_per_s = latency_s, bits_per_s
        self._free_at = [0.0, 0.0]  #: by where frames go
        self._random = random.Random(1)
        self._numbers = itertools.count()
        #: when a frame leaves, its number, to which socket
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._newest = [-1, -1]
        #: the pairs of TCP ports that were seen, and those that were forgotten
        self._connections: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self.told: Counter[str] = Counter()

    def run(self) -> None:
        while True:
            rest = self._under_way[0][0] - time.monotonic() if self._under_way else 1.0
            for each in select.select(self._sockets, [], [], max(0.0, rest))[0]:
                self._take(each)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                self._give(*heapq.heappop(self._under_way)[1:])

    def _take(self, came: Any) -> None:
        frame, address = came.recvfrom(_MOST)
        if address[2] == _OUTGOING:  # what this switch has sent itself
            return
        self.told["frames"] += 1
        if self._strikes("lost", self._loss) or self._is_forgotten(frame):
            return
        if frame[_ETHERNET - 2 : _ETHERNET] == _IPV4 and self._strikes("corrupt", self._corrupt):
            at = self._random.randrange(_ETHERNET, len(frame))
            frame = frame[:at] + bytes([frame[at] ^ 1 << self._random.randrange(8)]) + frame[at + 1 :]
        for _ in range(1 + self._strikes("duplicate", self._duplicate)):
            to = 1 - self._sockets.index(came)
            sent = max(self._free_at[to], time.monotonic()) + 8 * len(frame) / self._bits_per_s
            self._free_at[to] = sent
            arrives = sent + self._latency_s + self._delay_s * self._random.random()
            heapq.heappush(self._under_way, (arrives, next(self._numbers), to, frame))

    def forget(self) -> None:
        self._forgotten |= self._connections

    def _is_forgotten(self, frame: bytes) -> bool:
        if frame[_ETHERNET - 2 : _ETHERNET] != _IPV4 or frame[_ETHERNET + 9] != socket.IPPROTO_TCP:
            return False
        ports = frame[_ETHERNET + 20 : _ETHERNET + 24]  # IP's header has no options here
        pair = min(ports, ports[2:] + ports[:2])
        self._connections.add(pair)
        is_forgotten = pair in self._forgotten
        self.told["forgotten"] += is_forgotten
        return is_forgotten

    def _strikes(self, what: str, share: float) -> bool:
        strikes = self._random.random() < share
        self.told[what] += strikes
        return strikes

    def _give(self, number: int, to: int, frame: bytes) -> None:
        self.told["overtaken"] += number < self._newest[to]
        self._newest[to] = max(self._newest[to], number)
        self._sockets[to].send(frame)


def main() -> None:
    first, second, faults = sys.argv[1:]
    switch = Switch([first, second], **json.loads(faults))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # a pause is over when it is over, and not 50 us later
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGUSR1, lambda *_: switch.forget())
    print("forwards", flush=True)
    try:
        switch.run()
    finally:
        print(json.dumps(switch.told))


if __name__ == "__main__":
    main()
