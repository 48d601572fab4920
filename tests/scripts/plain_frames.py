"""``plain_frames.py DEVICE``: have the system fill in all checksums and cut all segments itself, before a device gets a
frame. A virtual cable would carry neither, as it loses nothing; whoever damages frames on it needs both.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL, _SET_TX_CHECKSUM = 0x8946, 0x17  # linux/sockios.h, linux/ethtool.h: ETHTOOL_STXCSUM


def main(device: str) -> None:
    value = array.array("B", struct.pack("II", _SET_TX_CHECKSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))


if __name__ == "__main__":
    main(sys.argv[1])
